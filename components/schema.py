"""The schema: what each feature must look like, as YAML that people read and edit, and how data may depart from it.

features:
  fare: {type: float, min_fraction: 1.0, min: 0.0, max: 700.07}
  payment_type: {type: string, min_fraction: 1.0, domain: [Cash, Credit Card]}
  image: {type: uint8, shape: [28, 28, 1], min_fraction: 1.0}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from components.config import Fraction, Section
from components.errors import ConfigError, DataError, did_you_mean
from components.examples import ExamplesInfo, Feature
from components.statistics import LOW_CARDINALITY, FeatureStatistics, Statistics

SCHEMA_FILE = "schema.yaml"
_SHOWN = 5
_HEADER = """\
# What each feature must look like. Edit a copy, name it in validate.schema_path, and departures become errors.
#   type: int, float, string or uint8     shape: of one example, absent for a scalar
#   min_fraction: least share of rows that have a value     domain: the only values allowed     min, max: bounds
"""


class FeatureSchema(Section):
    """What one feature must look like."""

    type: Literal["int", "float", "string", "uint8"]
    shape: tuple[int, ...] = ()
    min_fraction: Fraction = Field(0.0, description="Least share of rows that have a value.")
    domain: list[str] | None = Field(None, description="string: the only values allowed.")
    min: float | None = Field(None, description="int, float: smallest value allowed.")
    max: float | None = Field(None, description="int, float: largest value allowed.")

    @model_validator(mode="after")
    def _only_what_the_type_has(self) -> FeatureSchema:
        if self.domain is not None and self.type != "string":
            raise ValueError(f"domain is for string features, this one is {self.type}")
        if (self.min is not None or self.max is not None) and self.type not in ("int", "float"):
            raise ValueError(f"min and max are for int and float features, this one is {self.type}")
        return self


class Schema(Section):
    """The features that data must have, and no others."""

    features: dict[str, FeatureSchema]


@dataclass(frozen=True)
class Anomaly:
    """One departure from what data should look like.

    Attributes:
        kind: As TensorFlow Data Validation names it, where it does.
        feature: The column.
        split: Where it was seen.
        severity: `error` stops the pipeline, `warning` is only told.
        message: What is wrong, and how to mend it.
    """

    kind: str
    feature: str
    split: str
    severity: Literal["error", "warning"]
    message: str


def infer_schema(info: ExamplesInfo, train: Statistics) -> Schema:
    """A schema that the train split keeps: its types, bounds, and the values of strings that have few.

    A feature that every row has must always be there; of one that some rows lack, at least 0.9 of its share.
    """
    return Schema(features={name: _infer_feature(feature, train[name]) for name, feature in info.features.items()})


def write_schema(file: Path, schema: Schema) -> None:
    """Write a schema as YAML, a line for each feature."""
    lines = [_HEADER + "features:"]
    for name, feature in schema.features.items():
        fields = feature.model_dump(mode="json", exclude_defaults=True)
        if feature.type == "int":
            fields |= {bound: int(fields[bound]) for bound in ("min", "max") if bound in fields}
        text = yaml.safe_dump({name: fields}, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31)
        lines.append(f"  {text.strip()[1:-1]}")
    file.write_text("\n".join(lines) + "\n")


def load_schema(file: Path) -> Schema:
    """Read a schema that a user wrote.

    Raises:
        ConfigError: it cannot be read or says something that a schema cannot; with the line.
    """
    try:
        text = file.read_text()
        root, fields = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"validate.schema_path: {file} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"validate.schema_path: {file} is not YAML: {' '.join(str(error).split())}.") from error
    try:
        return Schema.model_validate(fields)
    except ValidationError as error:
        problems = [_describe(problem, root, file) for problem in error.errors()]
        raise ConfigError("validate.schema_path:\n" + "\n".join(f"  {problem}" for problem in problems)) from error


def compare(
    statistics: Statistics, info: ExamplesInfo, schema: Schema, *, split: str, supplied: bool
) -> Iterator[Anomaly]:
    """What in one split departs from the schema.

    Args:
        statistics: Of the split.
        info: The columns.
        schema: What they should be.
        split: Its name, for the messages.
        supplied: The user wrote the schema, so departures are errors; from an inferred one they are warnings.

    Yields:
        The anomalies, feature by feature.
    """
    severity: Literal["error", "warning"] = "error" if supplied else "warning"
    for name in info.features:
        if name not in schema.features:
            hint = "Describe it in the schema, or leave it out with data.drop."
            yield Anomaly("SCHEMA_NEW_COLUMN", name, split, severity, f"the schema does not know this column. {hint}")
    for name, expected in schema.features.items():
        if name not in info.features:
            hint = did_you_mean(name, info.features)
            message = f"the data lacks this column of the schema.{hint} Take it out of the schema, or provide it."
            yield Anomaly("SCHEMA_MISSING_COLUMN", name, split, severity, message)
            continue
        for kind, message in _departures(expected, info.features[name], statistics[name]):
            yield Anomaly(kind, name, split, severity, message)


def raise_errors(anomalies: Sequence[Anomaly]) -> None:
    """Stop if there are anomalies of severity `error`.

    Raises:
        DataError: with each of them.
    """
    errors = [anomaly for anomaly in anomalies if anomaly.severity == "error"]
    if errors:
        lines = [f"  {a.split} split, '{a.feature}': {a.message} [{a.kind}]" for a in errors]
        raise DataError(f"The data is not fit to train on ({len(errors)} errors):\n" + "\n".join(lines))


def _infer_feature(feature: Feature, seen: FeatureStatistics) -> FeatureSchema:
    share = seen.present / seen.count
    fields: dict[str, Any] = {"min_fraction": 1.0 if not seen.missing else math.floor(share * 90) / 100}
    # YAML holds no bytes that are not text; `validate` refuses them with a better message.
    all_kept = seen.num_unique == len(seen.top_values) and not seen.num_invalid_utf8
    if feature.type == "string" and all_kept and 0 < len(seen.top_values) <= LOW_CARDINALITY:
        fields["domain"] = sorted(str(value) for value, _ in seen.top_values)
    if feature.type in ("int", "float") and seen.min is not None:
        fields |= {"min": seen.min, "max": seen.max}
    return FeatureSchema(type=feature.type, shape=feature.shape, **fields)


def _departures(expected: FeatureSchema, feature: Feature, seen: FeatureStatistics) -> Iterator[tuple[str, str]]:
    if feature.type != expected.type:
        yield "UNEXPECTED_DATA_TYPE", f"is {feature.type}, the schema says {expected.type}. Change one of the two."
        return
    if feature.shape != expected.shape:
        shapes = f"has shape {list(feature.shape)}, the schema says {list(expected.shape)}"
        yield "INVALID_FEATURE_SHAPE", f"{shapes}. Change one of the two."
    share = seen.present / seen.count if seen.count else 0.0
    if share < expected.min_fraction:
        message = (
            f"{seen.missing} of {seen.count} rows have no value; at least {expected.min_fraction:.0%} must have one."
        )
        yield (
            "FEATURE_TYPE_LOW_FRACTION_PRESENT",
            f"{message} Fill them in, or lower min_fraction in a schema of yours.",
        )
    yield from _outside_domain(expected, seen)
    yield from _outside_bounds(expected, seen)


def _outside_domain(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[tuple[str, str]]:
    if expected.domain is None:
        return
    allowed = set(expected.domain)
    others = [(value, count) for value, count in seen.top_values if value not in allowed]
    if others:
        shown = ", ".join(f"{value!r} ({count})" for value, count in others[:_SHOWN])
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        message = f"{sum(count for _, count in others)} rows hold values outside the domain: {shown}{more}."
        yield "ENUM_TYPE_UNEXPECTED_STRING_VALUES", f"{message} Correct them, or add them to a schema of yours."


def _outside_bounds(expected: FeatureSchema, seen: FeatureStatistics) -> Iterator[tuple[str, str]]:
    if seen.min is None or seen.max is None:
        return
    whole = expected.type == "int"
    advice = "Correct the values, or widen the bounds in a schema of yours."
    if expected.min is not None and seen.min < expected.min:
        kind = "INT_TYPE_SMALL_INT" if whole else "FLOAT_TYPE_SMALL_FLOAT"
        yield kind, f"smallest value {seen.min:g} is below the least allowed, {expected.min:g}. {advice}"
    if expected.max is not None and seen.max > expected.max:
        kind = "INT_TYPE_BIG_INT" if whole else "FLOAT_TYPE_BIG_FLOAT"
        yield kind, f"largest value {seen.max:g} is above the greatest allowed, {expected.max:g}. {advice}"


def _describe(problem: Any, root: yaml.Node | None, file: Path) -> str:
    place = [str(part) for part in problem["loc"]]
    hint = ""
    if problem["type"] == "extra_forbidden":
        known = FeatureSchema.model_fields if len(place) > 1 else Schema.model_fields
        hint = "." + did_you_mean(place[-1], known)
    return f"{file}, line {_line(root, place)}: {'.'.join(place) or 'the file'}: {problem['msg']}{hint}"


def _line(node: yaml.Node | None, place: list[str]) -> int:
    """The line on which a place of the file stands, or the nearest thing around it."""
    line = node.start_mark.line + 1 if node else 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
    return line
