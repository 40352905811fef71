"""How far features moved from the last span, by the measures and thresholds that the schema chooses."""

from __future__ import annotations

from collections.abc import Iterator

from components.anomalies import DATASET, Anomaly, Severity
from components.distances import distance
from components.schema.spec import Comparator, FeatureSchema, Schema
from components.statistics import FeatureStatistics, Statistics

MAX_DISTANCE = 0.2
_KINDS = {
    "l_infinity": "COMPARATOR_L_INFTY_HIGH",
    "jensen_shannon": "COMPARATOR_JENSEN_SHANNON_DIVERGENCE_HIGH",
    "normalized_difference": "COMPARATOR_NORMALIZED_ABSOLUTE_DIFFERENCE_HIGH",
}


def thresholds_of(
    own: Comparator | None, defaults: Comparator, pair: tuple[FeatureStatistics, FeatureStatistics]
) -> dict[str, float]:
    """Measure -> threshold for one feature: its own, else the default of the measure that suits it, else 0.2."""
    if own is not None and own.thresholds:
        return own.thresholds
    suited = distance(*pair)
    return {} if suited is None else {suited[0]: defaults.thresholds.get(suited[0], MAX_DISTANCE)}


def drift(now: Statistics, last: Statistics, schema: Schema, *, split: str, supplied: bool) -> Iterator[Anomaly]:
    """What moved since the last span.

    Args:
        now: Statistics of a split.
        last: Of the same split of the last span.
        schema: With the thresholds.
        split: Its name.
        supplied: The user wrote the schema: what departs from a threshold of a feature's own is an error.
    """
    yield from _num_examples(now, last, schema, split, supplied)
    for name, feature in now.items():
        expected = schema.features.get(name)
        if expected is not None and not expected.is_checked:
            continue
        own = None if expected is None else expected.drift
        severity: Severity = "error" if supplied and own is not None else "warning"
        if name not in last:
            if own is not None:
                message = "the last span lacks this column, so its drift is unknown. Name another validate.drift_from."
                yield Anomaly("COMPARATOR_CONTROL_DATA_MISSING", name, split, severity, message)
        elif last[name].type == feature.type:
            yield from _moved(name, feature, last[name], schema, expected, split, severity)


def exceeded(measure: str, value: float, threshold: float, other: str) -> tuple[str, str]:
    """Kind of the anomaly that a distance above its threshold is, and the beginning of its message."""
    return _KINDS[measure], f"differs from {other} ({measure} {value:.3f}, above {threshold:g})."


def _moved(
    name: str,
    now: FeatureStatistics,
    last: FeatureStatistics,
    schema: Schema,
    expected: FeatureSchema | None,
    split: str,
    severity: Severity,
) -> Iterator[Anomaly]:
    own = None if expected is None else expected.drift
    for measure, threshold in thresholds_of(own, schema.defaults.drift, (last, now)).items():
        measured = distance(last, now, measure)
        if measured is not None and measured[1] > threshold:
            kind, said = exceeded(measure, measured[1], threshold, "the last span")
            advice = f"Find out what changed; if it is right, raise features.{name}.drift in a schema of yours."
            yield Anomaly(kind, name, split, severity, f"{said} {advice}")


def _num_examples(now: Statistics, last: Statistics, schema: Schema, split: str, supplied: bool) -> Iterator[Anomaly]:
    count, before = (max((feature.count for feature in side.values()), default=0) for side in (now, last))
    least, most = schema.dataset.min_fraction_of_last, schema.dataset.max_fraction_of_last
    severity: Severity = "error" if supplied else "warning"
    said = f"{count} rows, the last span had {before}"
    if least is not None and count < least * before:
        message = f"{said}; at least {least:g} times that are needed. Look for rows that are missing."
        yield Anomaly("COMPARATOR_LOW_NUM_EXAMPLES", DATASET, split, severity, message)
    if most is not None and before and count > most * before:
        message = f"{said}; at most {most:g} times that are expected. Look for rows given twice."
        yield Anomaly("COMPARATOR_HIGH_NUM_EXAMPLES", DATASET, split, severity, message)
