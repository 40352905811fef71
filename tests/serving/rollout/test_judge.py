"""Whether a canary is as good as the stable version."""

from __future__ import annotations

import math

import pytest

from serving.rollout.judge import CallCounts, Decision, Thresholds, judge, wilson_lower_bound

BUCKETS = {0.01: 900.0, 0.02: 980.0, 0.04: 1000.0, math.inf: 1000.0}  # the 95 % quantile: 0.01625 s
STABLE = CallCounts(1000, 0, BUCKETS)


def scaled(share: float, buckets: dict[float, float] = BUCKETS) -> dict[float, float]:
    return {upper: share * count for upper, count in buckets.items()}


@pytest.mark.parametrize(
    ("count", "calls", "confidence", "bound"),
    [  # the two-sided 95 % interval of 81 of 263 is 0.2553 to 0.3662 (Newcombe 1998, table I, method 3)
        (81, 263, 0.975, 0.2553),
        (15, 148, 0.975, 0.0624),
        (0, 20, 0.975, 0.0),
        (1, 29, 0.975, 0.0061),
        (0, 0, 0.975, 0.0),
    ],
)
def test_wilson_lower_bound(count: int, calls: int, confidence: float, bound: float) -> None:
    assert wilson_lower_bound(count, calls, confidence) == pytest.approx(bound, abs=5e-5)


def test_quantile_is_interpolated_in_its_bucket() -> None:
    assert STABLE.quantile_seconds(0.94) == pytest.approx(0.015)
    assert STABLE.quantile_seconds(0.45) == pytest.approx(0.005)
    assert CallCounts(1, 0, {0.01: 0.0, math.inf: 1.0}).quantile_seconds(0.5) == 0.01
    assert math.isnan(CallCounts().quantile_seconds(0.5))


def test_slower_than_is_the_inverse_of_the_quantile() -> None:
    assert STABLE.slower_than(STABLE.quantile_seconds(0.94)) == pytest.approx(60)
    assert STABLE.slower_than(0.04) == 0
    assert STABLE.slower_than(1.0) == 0
    assert CallCounts(1, 0, {0.01: 0.0, math.inf: 1.0}).slower_than(5.0) == 1


@pytest.mark.parametrize(
    ("canary", "decision", "first_reason"),
    [
        (CallCounts(200, 0, scaled(0.2)), Decision.PROMOTE, "0.00% of the canary's 200 calls failed"),
        (CallCounts(199, 0, scaled(0.199)), Decision.WAIT, "the canary has had 199 of the 200 calls it needs"),
        (CallCounts(0, 0), Decision.WAIT, "the canary has had 0 of the 200"),
        (CallCounts(1000, 10, BUCKETS), Decision.PROMOTE, "1.00% of the canary's 1000 calls failed"),
        (CallCounts(1000, 12, BUCKETS), Decision.WAIT, "1.20% of the canary's"),
        (CallCounts(1000, 40, BUCKETS), Decision.ROLL_BACK, "4.00% of the canary's"),
        (CallCounts(4, 4), Decision.WAIT, "the canary has had 4 of the 200"),  # four calls condemn nobody
        (CallCounts(5, 5), Decision.ROLL_BACK, "100.00% of the canary's 5 calls failed"),
        # 5 % may be slower than 1.5 x 16.25 ms; here are 5.6 %, then 11.25 %
        (CallCounts(200, 0, {0.02: 184, 0.04: 200, math.inf: 200}), Decision.WAIT, "the 95% quantile"),
        (CallCounts(200, 0, {0.02: 170, 0.04: 200, math.inf: 200}), Decision.ROLL_BACK, "the 95% quantile"),
    ],
)
def test_decisions(canary: CallCounts, decision: Decision, first_reason: str) -> None:
    verdict = judge(STABLE, canary, Thresholds())
    assert verdict.decision is decision
    assert verdict.reasons[0].startswith(first_reason), verdict.reasons


def test_a_stable_version_that_fails_allows_as_much() -> None:
    stable = CallCounts(1000, 100, BUCKETS)
    assert judge(stable, CallCounts(1000, 105, BUCKETS), Thresholds()).decision is Decision.PROMOTE
    assert judge(stable, CallCounts(1000, 200, BUCKETS), Thresholds()).decision is Decision.ROLL_BACK


def test_an_alarm_speaks_against_a_canary_that_is_else_good() -> None:
    verdict = judge(STABLE, CallCounts(1000, 0, BUCKETS), Thresholds(), ["miles has drifted"])
    assert (verdict.decision, verdict.reasons[0]) == (Decision.ROLL_BACK, "miles has drifted")


def test_without_calls_of_the_stable_version_errors_alone_decide() -> None:
    assert judge(CallCounts(), CallCounts(200, 0, scaled(0.2)), Thresholds()).decision is Decision.PROMOTE
    assert judge(CallCounts(), CallCounts(200, 20, scaled(0.2)), Thresholds()).decision is Decision.ROLL_BACK
