"""Whether two sets of examples differ by more than a threshold, and by more than sampling alone would make them differ.

A distance is judged only where it cannot be noise: an alarm is a distance above its threshold and above what samples of
these sizes, drawn from one distribution, would reach with the chance `significance`, shared out over all comparisons of
a look (Bonferroni). Above the threshold but not above the noise, there are too few examples to tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal

from components.distances import distance, largest_change
from components.schema.spec import Comparator
from components.statistics import FeatureStatistics, Statistics

Verdict = Literal["ok", "alarm", "too_few"]
_JENSEN_SHANNON_BINS = 10


@dataclass(frozen=True)
class Comparison:
    """One thing that was compared.

    Attributes:
        kind: `skew` (features against the train split), `drift` (features against earlier windows), `missing` and `unseen`
            (shares of values), `prediction` or `quality`.
        name: The feature, prediction or metric.
        measure: `l_infinity`, `jensen_shannon` (base 2), `increase` of a share, or `drop` of a metric.
        reference: `train`, `first` or `previous` (window), `held_out` (the test split).
        where: The slice, `feature=value`; empty for all examples.
        distance: What was measured.
        threshold: Above it there may be an alarm.
        noise: Below it the distance may be sampling noise.
        verdict: `ok`, `alarm` or `too_few`.
        detail: What changed most.
    """

    kind: str
    name: str
    measure: str
    reference: str
    where: str
    distance: float
    threshold: float
    noise: float
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Candidate:
    """A comparison before the number of all comparisons is known; `noise` gives the noise at a chance."""

    kind: str
    name: str
    measure: str
    reference: str
    distance: float
    threshold: float
    noise: Callable[[float], float]
    num_examples: int
    where: str = ""
    detail: str = ""


def judge(candidates: Sequence[Candidate], *, significance: float, min_examples: int) -> list[Comparison]:
    """Give each candidate its noise and verdict; alarms first, then by the share of their thresholds that they reach."""
    chance = significance / max(len(candidates), 1)
    judged = []
    for each in candidates:
        noise = each.noise(chance)
        verdict: Verdict = "ok"
        if each.num_examples < min_examples or each.threshold < each.distance <= noise:
            verdict = "too_few"
        elif each.distance > each.threshold:
            verdict = "alarm"
        judged.append(
            Comparison(
                kind=each.kind,
                name=each.name,
                measure=each.measure,
                reference=each.reference,
                where=each.where,
                distance=each.distance,
                threshold=each.threshold,
                noise=noise,
                verdict=verdict,
                detail=each.detail,
            )
        )
    return sorted(
        judged, key=lambda one: (one.verdict != "alarm", -one.distance / (one.threshold or 1e-9), one.name, one.where)
    )


def distances(
    kind: str,
    reference: str,
    before: Statistics,
    now: Statistics,
    thresholds: Callable[[str, str], float],
    measures: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[Candidate]:
    """The distance of each feature, by its `measures` or the one that suits it.

    `thresholds` gives the one for a name and measure.
    """
    found = []
    for name, feature in before.items():
        for chosen in measures.get(name) or (None,):
            measured = distance(feature, now[name], chosen)
            if measured is None:
                continue
            measure, value = measured
            noise, detail = _noise(measure, feature, now[name]), _detail(measure, feature, now[name])
            threshold = thresholds(name, measure)
            found.append(
                Candidate(kind, name, measure, reference, value, threshold, noise, now[name].present, detail=detail)
            )
    return found


def missing(train: Statistics, now: Statistics, threshold: float) -> list[Candidate]:
    """The rise of the share of rows without a value."""
    return [
        _share_rise("missing", name, (feature.missing, feature.count), (now[name].missing, now[name].count), threshold)
        for name, feature in train.items()
        if feature.type != "uint8" and feature.count and now[name].count
    ]


def unseen(train: Statistics, held_out: Statistics, now: Statistics, threshold: float) -> list[Candidate]:
    """The rise of the share of categories that the train split does not have, over that in the test split."""
    found = []
    for name, feature in train.items():
        known = {value for value, _ in feature.top_values}
        measured = distance(feature, now[name])
        all_known = all(side.num_unique == len(side.top_values) for side in (feature, now[name]))
        if measured is None or measured[0] != "l_infinity" or not all_known:
            continue  # no category, a text, or one with too many values to keep them all
        before, after = ((_num_unseen(side, known), side.present) for side in (held_out[name], now[name]))
        if before[1] and after[1]:
            found.append(_share_rise("unseen", name, before, after, threshold))
    return found


def _num_unseen(feature: FeatureStatistics, known: set[int | str]) -> int:
    return sum(count for value, count in feature.top_values if value not in known)


def _share_rise(kind: str, name: str, before: tuple[int, int], after: tuple[int, int], threshold: float) -> Candidate:
    shares = before[0] / before[1], after[0] / after[1]
    reference = "train" if kind == "missing" else "held_out"

    def noise(chance: float) -> float:
        return shares_noise(*shares, before[1], after[1], chance)

    detail = f"{shares[0]:.1%} -> {shares[1]:.1%}"
    rise = max(shares[1] - shares[0], 0.0)
    return Candidate(kind, name, "increase", reference, rise, threshold, noise, after[1], detail=detail)


def _detail(measure: str, before: FeatureStatistics, now: FeatureStatistics) -> str:
    if measure != "jensen_shannon" or before.type == "string":
        value, share_before, share_now = largest_change(before, now)
        return f"{value}: {share_before:.1%} -> {share_now:.1%}"
    medians = [side.quantiles[len(side.quantiles) // 2] if side.quantiles else math.nan for side in (before, now)]
    return f"median: {medians[0]:.4g} -> {medians[1]:.4g}"


def _noise(measure: str, before: FeatureStatistics, now: FeatureStatistics) -> Callable[[float], float]:
    sizes = before.present, now.present

    def l_infinity_noise(chance: float) -> float:
        _, share_before, share_now = largest_change(before, now)
        values = max(before.num_unique or 1, now.num_unique or 1)
        return shares_noise(share_before, share_now, *sizes, chance / values)

    if measure == "normalized_difference":
        return lambda chance: 0.0  # it compares numbers of rows, which are no sample
    num_bins = max(before.num_unique or 2, now.num_unique or 2) if before.type == "string" else _JENSEN_SHANNON_BINS
    return l_infinity_noise if measure == "l_infinity" else lambda c: jensen_shannon_noise(*sizes, c, num_bins)


def shares_noise(share_a: float, share_b: float, num_a: int, num_b: int, chance: float) -> float:
    """What the difference of two shares exceeds with `chance` where they are samples of one: pooled two-proportion test.

    The continuity correction keeps it honest where a share is 0 or the samples are small.
    """
    if not num_a or not num_b:
        return 0.0
    pooled = (share_a * num_a + share_b * num_b) / (num_a + num_b)
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / num_a + 1 / num_b))
    return min(1.0, NormalDist().inv_cdf(1 - chance / 2) * deviation + (1 / num_a + 1 / num_b) / 2)


def jensen_shannon_noise(num_a: int, num_b: int, chance: float, num_bins: int = _JENSEN_SHANNON_BINS) -> float:
    """What the Jensen-Shannon divergence of two samples of one distribution exceeds with `chance`.

    Near 0 the divergence is a quarter of the chi-squared distance over 2 ln 2, which here has the chi-squared
    distribution of (bins - 1) degrees of freedom; its quantile by Wilson and Hilferty, PNAS 17 (1931).
    """
    if not num_a or not num_b:
        return 0.0
    freedom = num_bins - 1
    spread = 2 / (9 * freedom)
    quantile = freedom * (1 - spread + NormalDist().inv_cdf(1 - chance) * math.sqrt(spread)) ** 3
    return min(1.0, (1 / num_a + 1 / num_b) * quantile / (8 * math.log(2)))


class Thresholds:
    """The threshold for a name and measure: that of the config for the name, of the schema, of the config for the measure.

    Args:
        by_name: `monitor.thresholds`.
        by_measure: Measure -> threshold of the config.
        own: Feature -> what its schema says.
        defaults: What the schema says of the others.
    """

    def __init__(
        self,
        by_name: Mapping[str, float],
        by_measure: Mapping[str, float],
        own: Mapping[str, Comparator | None],
        defaults: Comparator,
    ) -> None:
        self._by_name, self._by_measure = by_name, {**by_measure, **defaults.thresholds}
        self._own = {name: each.thresholds for name, each in own.items() if each and name not in by_name}
        self.measures = {name: list(each) for name, each in self._own.items()}

    def __call__(self, name: str, measure: str) -> float:
        own: Mapping[str, float] = self._own.get(name, {})
        return self._by_name.get(name, own.get(measure, self._by_measure.get(measure, 0.0)))
