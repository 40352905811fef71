"""What data departs from its schema in, and which change of the schema would give way to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from components.anomalies import DATASET, Anomaly, Severity
from components.errors import did_you_mean
from components.schema.spec import Environment, FeatureSchema, Schema
from components.statistics import FeatureStatistics, Statistics

_SHOWN = 5
_CORRECT = "Correct the values, or"


@dataclass(frozen=True)
class Departure:
    """One departure of a feature, or of the number of rows.

    Attributes:
        kind: As in `components.anomalies.KINDS`.
        message: What is wrong, and how to mend it.
        fix: Keys of the feature's schema -> the value that would let it pass; `None` takes the key out. Of a domain, the
            values to add. Empty where no change of the schema helps.
    """

    kind: str
    message: str
    fix: dict[str, Any] = field(default_factory=dict)


def compare(
    statistics: Statistics,
    schema: Schema,
    *,
    split: str,
    supplied: bool,
    environment: Environment = "training",
) -> Iterator[Anomaly]:
    """What in one split departs from the schema.

    Args:
        statistics: Of the split.
        schema: What it should be.
        split: Its name, for the messages.
        supplied: The user wrote the schema, so departures are errors; from an inferred one they are warnings.
        environment: Where the data is from.

    Yields:
        The anomalies, feature by feature.
    """
    severity: Severity = "error" if supplied else "warning"
    for name, departure in departures(statistics, schema, environment):
        # What cannot be checked is no fault of the data.
        told: Severity = "warning" if departure.kind == "STATS_NOT_AVAILABLE" else severity
        yield Anomaly(departure.kind, name, split, told, departure.message)


def departures(statistics: Statistics, schema: Schema, environment: Environment) -> Iterator[tuple[str, Departure]]:
    """The same with the name of each feature, and what would mend it in the schema."""
    yield from ((DATASET, each) for each in _num_examples(statistics, schema))
    for name in statistics:
        if name not in schema.features:
            hint = "Describe it in the schema, or leave it out with data.drop."
            yield name, Departure("SCHEMA_NEW_COLUMN", f"the schema does not know this column. {hint}")
    for name, expected in schema.features.items():
        if not expected.is_checked or not schema.in_environment(name, environment):
            continue
        if name in statistics:
            yield from ((name, each) for each in _of_feature(expected, statistics[name]))
        else:
            hint = did_you_mean(name, statistics)
            message = f"the data lacks this column of the schema.{hint} Take it out of the schema, or provide it."
            yield name, Departure("SCHEMA_MISSING_COLUMN", message, {"lifecycle": "deprecated"})


def _num_examples(statistics: Statistics, schema: Schema) -> Iterator[Departure]:
    count = max((feature.count for feature in statistics.values()), default=0)
    least, most = schema.dataset.min_examples, schema.dataset.max_examples
    if least is not None and count < least:
        message = f"{count} rows, at least {least} are needed. Give more data, or lower dataset.min_examples."
        yield Departure("DATASET_LOW_NUM_EXAMPLES", message, {"min_examples": count})
    if most is not None and count > most:
        message = (
            f"{count} rows, at most {most} are expected. Look for rows given twice, or raise dataset.max_examples."
        )
        yield Departure("DATASET_HIGH_NUM_EXAMPLES", message, {"max_examples": count})


def _of_feature(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if seen.type != expected.type:
        message = f"is {seen.type}, the schema says {expected.type}. Change one of the two."
        yield Departure("UNEXPECTED_DATA_TYPE", message, _retyped(expected, seen))
        return
    yield from _shape(expected, seen)
    if not seen.present and (expected.min_fraction or expected.min_count):
        message = f"no row of {seen.count} has a value. Fill them in, or lower min_fraction and min_count."
        yield Departure("FEATURE_TYPE_NOT_PRESENT", message, {"min_fraction": None, "min_count": None})
        return
    for check in (_presence, _valency, _domain, _bool_domain, _encoded, _bounds, _nan, _uniqueness, _size, _text):
        yield from check(expected, seen)


def _retyped(expected: FeatureSchema, seen: FeatureStatistics) -> dict[str, Any]:
    """The keys that stand, whatever the type, stay."""
    kept = ("type", "shape", "lifecycle", "in_environment", "not_in_environment", "min_fraction", "min_count")
    return {"type": seen.type} | {name: None for name in expected.model_fields_set if name not in kept}


def _shape(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    fix = {"shape": None if not seen.shape else list(seen.shape)}
    shapes = f"has shape {_shown_shape(seen.shape)}, the schema says {_shown_shape(expected.shape)}"
    if len(seen.shape) != len(expected.shape):
        message = f"{shapes}, which is nested {len(expected.shape)} deep instead of {len(seen.shape)}."
        yield Departure("VALUE_NESTEDNESS_MISMATCH", f"{message} Change one of the two.", fix)
    elif any(size not in (None, given) for given, size in zip(seen.shape, expected.shape, strict=True)):
        yield Departure("INVALID_FEATURE_SHAPE", f"{shapes}. Change one of the two.", fix)


def _shown_shape(shape: Iterable[int | None]) -> str:
    return f"[{', '.join('null' if size is None else str(size) for size in shape)}]"


def _presence(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    share = seen.present / seen.count if seen.count else 0.0
    if share < expected.min_fraction:
        message = (
            f"{seen.missing} of {seen.count} rows have no value; at least {expected.min_fraction:.0%} must have one."
        )
        yield Departure(
            "FEATURE_TYPE_LOW_FRACTION_PRESENT",
            f"{message} Fill them in, or lower min_fraction in a schema of yours.",
            {"min_fraction": math.floor(share * 10_000) / 10_000},
        )
    if seen.present < expected.min_count:
        message = f"{seen.present} rows have a value, at least {expected.min_count} must have one."
        yield Departure(
            "FEATURE_TYPE_LOW_NUMBER_PRESENT",
            f"{message} Fill them in, or lower min_count in a schema of yours.",
            {"min_count": seen.present},
        )


def _valency(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if expected.min_values is None and expected.max_values is None:
        return
    least, most = seen.min_num_values, seen.max_num_values
    if None not in seen.shape:
        least = most = math.prod(size for size in seen.shape if size is not None)
    if least is None or most is None:
        yield _unavailable("how many values each row has")
        return
    advice = f"{_CORRECT} change {{}} in a schema of yours."
    if expected.min_values is not None and least < expected.min_values:
        message = f"a row has {least} values, at least {expected.min_values} are needed. {advice.format('min_values')}"
        yield Departure("FEATURE_TYPE_LOW_NUMBER_VALUES", message, {"min_values": least})
    if expected.max_values is not None and most > expected.max_values:
        message = f"a row has {most} values, at most {expected.max_values} are allowed. {advice.format('max_values')}"
        yield Departure("FEATURE_TYPE_HIGH_NUMBER_VALUES", message, {"max_values": most})


def _unavailable(what: str) -> Departure:
    message = (
        f"the statistics do not hold {what}, so the schema cannot be checked. Run validate again, or take the key out."
    )
    return Departure("STATS_NOT_AVAILABLE", message)


def _domain(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if expected.domain is None or seen.num_tokens is not None:
        return
    allowed = set(expected.domain)
    others = [(str(value), count) for value, count in seen.top_values if value not in allowed]
    num_others, num_values = sum(count for _, count in others), sum(count for _, count in seen.top_values)
    if others and (expected.min_domain_mass == 1 or num_others / num_values > 1 - expected.min_domain_mass):
        message = f"{num_others} rows hold values outside the domain: {_counted(others)}."
        yield Departure(
            "ENUM_TYPE_UNEXPECTED_STRING_VALUES",
            f"{message} Correct them, or add them to a schema of yours.",
            {"domain": [value for value, _ in others]},
        )


def _counted(values: list[tuple[str, int]]) -> str:
    shown = ", ".join(f"{value!r} ({count})" for value, count in values[:_SHOWN])
    return shown + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")


def _bool_domain(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if expected.bool_domain is None:
        return
    fix = {"bool_domain": None}
    if expected.type == "string":
        allowed = (expected.bool_domain.true_value, expected.bool_domain.false_value)
        others = [(str(value), count) for value, count in seen.top_values if value not in allowed]
        if others:
            message = f"is neither {allowed[0]!r} nor {allowed[1]!r}: {_counted(others)}. {_CORRECT} give it a domain."
            yield Departure("BOOL_TYPE_UNEXPECTED_STRING", message, fix)
    elif seen.min is None or seen.max is None:
        return
    elif expected.type == "int":
        for kind, value in (("BOOL_TYPE_SMALL_INT", min(seen.min, 0)), ("BOOL_TYPE_BIG_INT", max(seen.max, 1))):
            if value not in (0, 1):
                yield Departure(kind, f"{value:g} is neither 0 nor 1. {_CORRECT} take bool_domain out.", fix)
    elif odd := [value for value in (seen.min, *seen.quantiles, seen.max) if value not in (0, 1)]:
        message = f"{odd[0]:g} is neither 0 nor 1. {_CORRECT} take bool_domain out."
        yield Departure("BOOL_TYPE_UNEXPECTED_FLOAT", message, fix)


def _encoded(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    """Strings that should be numbers."""
    if expected.encodes is None:
        return
    numbers, others = [], []
    for value, count in seen.top_values:
        number = _parsed(str(value), expected.encodes)
        if number is None:
            others.append((str(value), count))
        else:
            numbers.append(number)
    if others:
        kind = "INT_TYPE_NOT_INT_STRING" if expected.encodes == "int" else "FLOAT_TYPE_STRING_NOT_FLOAT"
        message = f"holds texts that are no {expected.encodes}: {_counted(others)}. {_CORRECT} take encodes out."
        yield Departure(kind, message, {"encodes": None, "min": None, "max": None})
    elif numbers:
        yield from _outside(expected, expected.encodes, min(numbers), max(numbers))


def _parsed(text: str, kind: str) -> float | None:
    convert: Callable[[str], float] = int if kind == "int" else float
    try:
        return convert(text)
    except ValueError:
        return None


def _bounds(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if seen.min is not None and seen.max is not None and expected.type in ("int", "float"):
        yield from _outside(expected, expected.type, seen.min, seen.max)


def _outside(expected: FeatureSchema, number: str, least: float, most: float) -> Iterator[Departure]:
    advice = f"{_CORRECT} widen the bounds in a schema of yours."
    whole = number == "int"
    if expected.min is not None and least < expected.min:
        kind = "INT_TYPE_SMALL_INT" if whole else "FLOAT_TYPE_SMALL_FLOAT"
        message = f"smallest value {least:g} is below the least allowed, {expected.min:g}. {advice}"
        yield Departure(kind, message, {"min": int(least) if whole else least})
    if expected.max is not None and most > expected.max:
        kind = "INT_TYPE_BIG_INT" if whole else "FLOAT_TYPE_BIG_FLOAT"
        message = f"largest value {most:g} is above the greatest allowed, {expected.max:g}. {advice}"
        yield Departure(kind, message, {"max": int(most) if whole else most})


def _nan(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if expected.disallow_nan and seen.missing:
        message = f"{seen.missing} of {seen.count} rows are NaN or missing, which is the same here. Fill them in, or"
        yield Departure("FLOAT_TYPE_HAS_NAN", f"{message} take disallow_nan out.", {"disallow_nan": None})


def _uniqueness(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    least, most = expected.min_unique, expected.max_unique
    if least is None and most is None:
        return
    if seen.num_unique is None:
        message = f"distinct values of {expected.type} features are not counted. Take min_unique and max_unique out."
        yield Departure("FEATURE_TYPE_NO_UNIQUE", message, {"min_unique": None, "max_unique": None})
        return
    if least is not None and seen.num_unique < least:
        message = f"has {seen.num_unique} distinct values, at least {least} are needed. {_CORRECT} lower min_unique."
        yield Departure("FEATURE_TYPE_LOW_UNIQUE", message, {"min_unique": seen.num_unique})
    if most is not None and seen.num_unique > most:
        message = f"has {seen.num_unique} distinct values, at most {most} are allowed. {_CORRECT} raise max_unique."
        yield Departure("FEATURE_TYPE_HIGH_UNIQUE", message, {"max_unique": seen.num_unique})


def _size(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if expected.max_bytes is None:
        return
    size = seen.max_length_bytes
    if expected.type == "uint8" and None not in seen.shape:
        size = math.prod(side for side in seen.shape if side is not None)
    if size is None:
        yield _unavailable("the largest size")
    elif size > expected.max_bytes:
        message = f"the largest value has {size} bytes, at most {expected.max_bytes} are allowed."
        yield Departure(
            "MAX_IMAGE_BYTE_SIZE_EXCEEDED", f"{message} Make it smaller, or raise max_bytes.", {"max_bytes": size}
        )


def _text(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    if expected.min_coverage is None and expected.min_mean_token_length is None and not expected.tokens:
        return
    num_tokens = sum(count for _, count, _ in seen.top_tokens)
    if seen.num_tokens is None or not num_tokens:
        yield _unavailable("words, since the feature is in no `op: text` of transform.features")
        return
    known = set(expected.domain or ())
    covered = sum(count for token, count, _ in seen.top_tokens if token in known) / seen.num_tokens
    if expected.min_coverage is not None and covered < expected.min_coverage:
        message = f"{covered:.1%} of the words are in the domain, at least {expected.min_coverage:.1%} must be."
        advice = "Add words to the domain, or lower min_coverage."
        fix = {"min_coverage": math.floor(covered * 10_000) / 10_000}
        yield Departure("FEATURE_COVERAGE_TOO_LOW", f"{message} {advice}", fix)
    length = sum(len(token) * count for token, count, _ in seen.top_tokens) / num_tokens
    least = expected.min_mean_token_length
    if least is not None and length < least:
        message = f"words have {length:.2f} characters on average, at least {least:g} are needed."
        advice = "Look at how texts are split, or lower min_mean_token_length."
        fix = {"min_mean_token_length": math.floor(length * 100) / 100}
        yield Departure("FEATURE_COVERAGE_TOO_SHORT_AVG_TOKEN_LENGTH", f"{message} {advice}", fix)
    yield from _token_shares(expected, seen)


def _token_shares(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[Departure]:
    rows = {token: num_rows for token, _, num_rows in seen.top_tokens}
    for token, bounds in expected.tokens.items():
        share = rows.get(token, 0) / seen.count
        said = f"{share:.1%} of the rows hold the word {token!r}"
        advice = f"Correct the texts, or change tokens.{token} in a schema of yours."
        if share < bounds.min_fraction:
            message = f"{said}, at least {bounds.min_fraction:.1%} must. {advice}"
            yield Departure("SEQUENCE_VALUE_TOO_SMALL_FRACTION", message)
        if share > bounds.max_fraction:
            message = f"{said}, at most {bounds.max_fraction:.1%} may. {advice}"
            yield Departure("SEQUENCE_VALUE_TOO_LARGE_FRACTION", message)
