"""Whether a canary is as good as the stable version, from counts of their calls.

Both questions are of proportions: the share of calls that fail, and the share of calls that are slower than the stable
version's slow ones. A canary is taken back when the lower end of its proportion's confidence interval lies above what is
allowed, and promoted when it has had enough calls and the proportion itself is within it; else there is more to see.

Interval: Wilson (1927), one-sided. https://doi.org/10.1080/01621459.1927.10502953
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import NormalDist

_MIN_BAD_CALLS = 5  # fewer condemn nobody, for the canary is looked at again and again


class Decision(Enum):
    """What is to be done with a canary."""

    PROMOTE = "promote"
    ROLL_BACK = "roll back"
    WAIT = "wait"


@dataclass(frozen=True)
class Thresholds:
    """What a canary may not exceed.

    Attributes:
        min_calls: calls that a canary needs before it can be promoted.
        max_error_rate_increase: by how much its share of failed calls may be above the stable version's.
        max_latency_ratio: how many times as slow as the stable version its slow calls may be.
        latency_quantile: which calls are the slow ones: 0.95 means the slowest 5 %.
        confidence: of the interval, one-sided.
    """

    min_calls: int = 200
    max_error_rate_increase: float = 0.01
    max_latency_ratio: float = 1.5
    latency_quantile: float = 0.95
    confidence: float = 0.99


@dataclass(frozen=True)
class CallCounts:
    """The calls of one version in some time.

    Attributes:
        calls: all of them.
        errors: those that failed.
        buckets: a histogram of the successful calls: upper bound in seconds -> calls at most as slow (cumulative, with
            math.inf last); empty when unknown.
    """

    calls: float = 0
    errors: float = 0
    buckets: Mapping[float, float] = field(default_factory=dict)

    @property
    def error_rate(self) -> float:
        """Share of the calls that failed."""
        return self.errors / self.calls if self.calls else 0.0

    @property
    def timed_calls(self) -> float:
        """Calls in the histogram."""
        return max(self.buckets.values(), default=0.0)

    def quantile_seconds(self, quantile: float) -> float:
        """A quantile of the seconds, interpolated as Prometheus's histogram_quantile does; NaN for no calls."""
        rank = quantile * self.timed_calls
        if not rank:
            return math.nan
        lower, below = 0.0, 0.0
        for upper, count in sorted(self.buckets.items()):
            if count >= rank:
                if math.isinf(upper):
                    return lower
                return lower + (upper - lower) * (rank - below) / (count - below)
            lower, below = upper, count
        raise AssertionError("the last bucket holds all calls")

    def slower_than(self, seconds: float) -> float:
        """How many calls took longer, interpolated."""
        lower, below = 0.0, 0.0
        for upper, count in sorted(self.buckets.items()):
            if seconds < upper:
                part = 0.0 if math.isinf(upper) else (seconds - lower) / (upper - lower)
                return self.timed_calls - below - part * (count - below)
            lower, below = upper, count
        return 0.0


@dataclass(frozen=True)
class Verdict:
    """A decision and what it rests on.

    Attributes:
        decision: the decision.
        reasons: sentences with the numbers; those that stand against the canary first.
    """

    decision: Decision
    reasons: tuple[str, ...]


def judge(stable: CallCounts, canary: CallCounts, thresholds: Thresholds, alarms: Sequence[str] = ()) -> Verdict:
    """Compare a canary with the stable version over the same time.

    Args:
        stable: calls of the stable version.
        canary: calls of the canary.
        thresholds: what the canary may not exceed.
        alarms: what else speaks against it, such as drift that `monitor` reports.

    Example:
        >>> judge(CallCounts(1000, 2), CallCounts(500, 40), Thresholds()).decision
        <Decision.ROLL_BACK: 'roll back'>
    """
    findings = [_errors(stable, canary, thresholds), _latency(stable, canary, thresholds)]
    against = [*alarms, *(text for decision, text in findings if decision is Decision.ROLL_BACK)]
    open_questions = [text for decision, text in findings if decision is Decision.WAIT]
    settled = [text for decision, text in findings if decision is Decision.PROMOTE]
    if against:
        return Verdict(Decision.ROLL_BACK, (*against, *open_questions, *settled))
    if canary.calls < thresholds.min_calls:
        open_questions.insert(0, f"the canary has had {canary.calls:g} of the {thresholds.min_calls} calls it needs")
    decision = Decision.WAIT if open_questions else Decision.PROMOTE
    return Verdict(decision, (*open_questions, *settled))


def _errors(stable: CallCounts, canary: CallCounts, thresholds: Thresholds) -> tuple[Decision, str]:
    allowed = stable.error_rate + thresholds.max_error_rate_increase
    text = (
        f"{canary.error_rate:.2%} of the canary's {canary.calls:g} calls failed, "
        f"{stable.error_rate:.2%} of the stable version's {stable.calls:g}; allowed are {allowed:.2%}"
    )
    return _weigh(canary.errors, canary.calls, allowed, thresholds), text


def _latency(stable: CallCounts, canary: CallCounts, thresholds: Thresholds) -> tuple[Decision, str]:
    quantile = thresholds.latency_quantile
    usual = stable.quantile_seconds(quantile)
    if math.isnan(usual):
        return Decision.PROMOTE, "the stable version has had no calls to compare the latency with"
    limit = thresholds.max_latency_ratio * usual
    slow = canary.slower_than(limit)
    text = (
        f"the {quantile:.0%} quantile of the canary's latency is {1000 * canary.quantile_seconds(quantile):.3g} ms, "
        f"of the stable version's {1000 * usual:.3g} ms; allowed are {1000 * limit:.3g} ms"
    )
    return _weigh(slow, canary.timed_calls, 1 - quantile, thresholds), text


def _weigh(count: float, calls: float, allowed: float, thresholds: Thresholds) -> Decision:
    if count >= _MIN_BAD_CALLS and wilson_lower_bound(count, calls, thresholds.confidence) > allowed:
        return Decision.ROLL_BACK
    return Decision.PROMOTE if count <= allowed * calls else Decision.WAIT


def wilson_lower_bound(count: float, calls: float, confidence: float) -> float:
    """The lower end of the one-sided Wilson interval of a proportion.

    Args:
        count: how many of the calls.
        calls: how many there were; 0 gives 0.
        confidence: such as 0.99.
    """
    if not calls or not count:
        return 0.0
    z = NormalDist().inv_cdf(confidence)
    share = count / calls
    middle = share + z**2 / (2 * calls)
    width = z * math.sqrt(share * (1 - share) / calls + z**2 / (4 * calls**2))
    return (middle - width) / (1 + z**2 / calls)
