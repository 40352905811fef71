"""When a call is tried again, on a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving.client.retry import Call, RetryPolicy
from serving.errors import Code, ServingError


class Clock:
    """A clock that sleeping moves, and the waits that were asked for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def policy(self, **settings: float) -> RetryPolicy:
        """Without jitter: each wait is the longest."""
        return RetryPolicy(**settings, clock=lambda: self.now, sleep=self.sleep, uniform=lambda low, high: high)


def failing(*errors: ServingError, clock: Clock | None = None, seconds: float = 0.0) -> Callable[[float], float]:
    """An attempt that fails with these errors, then gives the seconds it was given."""
    left = list(errors)

    def attempt(remaining_seconds: float) -> float:
        if clock is not None:
            clock.now += seconds
        if left:
            raise left.pop(0)
        return remaining_seconds

    return attempt


UNAVAILABLE = ServingError(Code.UNAVAILABLE, "nobody there")
OVERLOADED = ServingError(Code.RESOURCE_EXHAUSTED, "full")


def test_waits_double_up_to_the_longest() -> None:
    clock = Clock()
    policy = clock.policy(max_retries=5, initial_backoff_seconds=0.5, max_backoff_seconds=2.0)
    assert Call(policy, 100.0).run(failing(UNAVAILABLE, OVERLOADED, UNAVAILABLE, OVERLOADED)) == 100.0 - 5.5
    assert clock.waits == [0.5, 1.0, 2.0, 2.0]


def test_many_retries() -> None:
    clock = Clock()
    policy = clock.policy(max_retries=2000, max_backoff_seconds=1.0)
    Call(policy, 9999.0).run(failing(*[UNAVAILABLE] * 2000))
    assert clock.waits[-1] == 1.0


def test_waits_are_drawn_from_zero_to_the_longest() -> None:
    asked = []
    policy = RetryPolicy(clock=lambda: 0.0, sleep=lambda _: None, uniform=lambda *bounds: asked.append(bounds) or 0.0)
    Call(policy, 1.0).run(failing(UNAVAILABLE, UNAVAILABLE))
    assert asked == [(0.0, 0.1), (0.0, 0.2)]


def test_retries_are_counted_over_the_whole_call() -> None:
    clock = Clock()
    call = Call(clock.policy(max_retries=2), 100.0)
    call.run(failing(UNAVAILABLE))
    with pytest.raises(ServingError, match="the third"):
        call.run(failing(UNAVAILABLE, ServingError(Code.UNAVAILABLE, "the third")))
    assert len(clock.waits) == 2


@pytest.mark.parametrize("code", [code for code in Code if code not in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)])
def test_what_is_never_tried_again(code: Code) -> None:
    clock = Clock()
    with pytest.raises(ServingError, match="once"):
        Call(clock.policy(), 10.0).run(failing(ServingError(code, "once")))
    assert clock.waits == []


def test_the_server_says_when() -> None:
    clock = Clock()
    later = ServingError(Code.UNAVAILABLE, "loading", retry_after_seconds=7.0)
    assert Call(clock.policy(initial_backoff_seconds=0.5), 10.0).run(failing(later)) == 2.5
    assert clock.waits == [7.5]


def test_no_wait_beyond_the_deadline() -> None:
    """The caller learns at once why, and not at the deadline that it is too late."""
    clock = Clock()
    later = ServingError(Code.RESOURCE_EXHAUSTED, "full", retry_after_seconds=10.0)
    with pytest.raises(ServingError, match="RESOURCE_EXHAUSTED: full"):
        Call(clock.policy(), 10.0).run(failing(later))
    assert clock.waits == []


def test_attempts_share_one_deadline() -> None:
    clock = Clock()
    policy = clock.policy(max_retries=9, initial_backoff_seconds=1.0, max_backoff_seconds=1.0)
    with pytest.raises(ServingError) as raised:
        Call(policy, 10.0).run(failing(*[UNAVAILABLE] * 9, clock=clock, seconds=2.0))
    assert raised.value is UNAVAILABLE
    assert clock.waits == [1.0, 1.0, 1.0], "after 2+1+2+1+2+1+2 = 11 s it is too late for another"

    call = Call(clock.policy(), 10.0)
    clock.now += 10.0
    with pytest.raises(ServingError, match="DEADLINE_EXCEEDED: there was no answer within 10 s"):
        call.run(failing())
