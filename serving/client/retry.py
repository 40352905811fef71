"""One call of a client: its deadline, and the attempts that fit into it.

Only failures of servers that did not do the work are tried again: nobody listens, or the server is overloaded or not
ready. A call that ran into its deadline never is. The waits are exponential with full jitter
(https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from serving.errors import Code, ServingError

T = TypeVar("T")

RETRIED = frozenset((Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED))


@dataclass(frozen=True)
class RetryPolicy:
    """How often and when a client tries again.

    Attributes:
        max_retries: attempts after the first; 0 turns retries off.
        initial_backoff_seconds: the most that is waited before the first retry; it doubles with each.
        max_backoff_seconds: the most that is waited before any retry, on top of what the server asks for.
        clock: seconds that only grow.
        sleep: waits for some seconds.
        uniform: a random number between two.
    """

    max_retries: int = 3
    initial_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform


class Call:
    """What is left of a call's time and of its retries.

    Args:
        policy: when to try again.
        timeout_seconds: for everything that is done under this call.
    """

    def __init__(self, policy: RetryPolicy, timeout_seconds: float) -> None:
        self._policy = policy
        self._timeout_seconds = timeout_seconds
        self._deadline = policy.clock() + timeout_seconds
        self._num_retries = 0

    def remaining_seconds(self) -> float:
        """The time that is left.

        Raises:
            ServingError: DEADLINE_EXCEEDED, when none is.
        """
        seconds = self._deadline - self._policy.clock()
        if seconds <= 0:
            raise self.too_late()
        return seconds

    def too_late(self) -> ServingError:
        """The error of a call whose time is over."""
        return ServingError(Code.DEADLINE_EXCEEDED, f"there was no answer within {self._timeout_seconds:g} s")

    def sleep(self, seconds: float) -> None:
        """Wait, but not beyond the deadline."""
        self._policy.sleep(max(0.0, min(seconds, self._deadline - self._policy.clock())))

    def run(self, attempt: Callable[[float], T]) -> T:
        """Make a request, again where that may help.

        Args:
            attempt: makes it, given the seconds that are left.

        Raises:
            ServingError: of the last attempt, also when the time left does not reach for the next one.
        """
        while True:
            try:
                return attempt(self.remaining_seconds())
            except ServingError as error:
                wait_seconds = self._wait_seconds(error)
                if wait_seconds is None or self._policy.clock() + wait_seconds >= self._deadline:
                    raise
            self._num_retries += 1
            self._policy.sleep(wait_seconds)

    def _wait_seconds(self, error: ServingError) -> float | None:
        policy = self._policy
        if error.code not in RETRIED or self._num_retries >= policy.max_retries:
            return None
        backoff = min(policy.initial_backoff_seconds * 2 ** min(self._num_retries, 30), policy.max_backoff_seconds)
        return (error.retry_after_seconds or 0.0) + policy.uniform(0.0, backoff)
