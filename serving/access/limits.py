"""What keeps a server up when too much is asked of it: a rate for each client, a number of requests at a time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from serving.access.auth import BearerTokens
from serving.errors import Code, ServingError

_RETRY_AFTER_SECONDS = 1.0  # of a request refused since too many are under way, whose length nobody knows


class RateLimit:
    """Token buckets (https://en.wikipedia.org/wiki/Token_bucket), one for each client.

    Args:
        requests_per_second: how fast a bucket fills.
        burst: what it holds: so many requests may come at once.
        clock: the time in seconds.
    """

    def __init__(self, requests_per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = requests_per_second
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[bytes, tuple[float, float]] = {}  # client -> what its bucket held, and when

    def take(self, client: bytes) -> None:
        """Let one request through.

        Args:
            client: who asks; there must be few of them, since none is forgotten.

        Raises:
            ServingError: RESOURCE_EXHAUSTED, with the time until the next one may come.
        """
        with self._lock:
            now = self._clock()
            held, since = self._buckets.get(client, (float(self._burst), now))
            held = min(held + (now - since) * self._rate, self._burst)
            if held < 1:
                raise ServingError(
                    Code.RESOURCE_EXHAUSTED,
                    f"more than {self._rate:g} requests per second",
                    retry_after_seconds=(1 - held) / self._rate,
                )
            self._buckets[client] = held - 1, now


class ConcurrencyLimit:
    """A number of requests at a time, over all protocols; those past it are refused at once.

    Args:
        max_requests: that number.

    Attributes:
        refused: how many it has refused.
    """

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.refused = 0
        self.under_way = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Begin a request; `leave` ends it.

        Raises:
            ServingError: UNAVAILABLE, and nothing has begun.
        """
        with self._lock:
            if self.under_way >= self.max_requests:
                self.refused += 1
                raise ServingError(
                    Code.UNAVAILABLE,
                    f"{self.max_requests} requests are under way, and no more are taken",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            self.under_way += 1

    def leave(self) -> None:
        """End a request that `enter` began."""
        with self._lock:
            self.under_way -= 1


class Gate:
    """What a request must pass before its body is read.

    Args:
        tokens: who may come in; None lets everybody.
        rate_limit: how often: each token when there are tokens, else all together; None has no limit.

    Attributes:
        refused: how many it has refused, by the code they got.
    """

    def __init__(self, tokens: BearerTokens | None = None, rate_limit: RateLimit | None = None) -> None:
        self.refused = {Code.UNAUTHENTICATED: 0, Code.RESOURCE_EXHAUSTED: 0}
        self._tokens = tokens
        self._rate_limit = rate_limit
        self._lock = threading.Lock()

    def check(self, authorization: str | None) -> None:
        """See that a request may come in.

        Args:
            authorization: its `Authorization` header, or None.

        Raises:
            ServingError: UNAUTHENTICATED or RESOURCE_EXHAUSTED.
        """
        try:
            client = b"" if self._tokens is None else self._tokens.check(authorization)
            if self._rate_limit is not None:
                self._rate_limit.take(client)
        except ServingError as error:
            with self._lock:
                self.refused[error.code] += 1
            raise


def retry_after_header(error: ServingError) -> dict[str, str]:
    """The Retry-After header of an error (RFC 9110, whole seconds), if it says when to try again."""
    if error.retry_after_seconds is None:
        return {}
    return {"Retry-After": str(math.ceil(error.retry_after_seconds))}
