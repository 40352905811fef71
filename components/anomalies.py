"""Anomalies: departures of data from what it should look like, under TensorFlow Data Validation's names where it has one.

Source of the names: tensorflow_metadata, anomalies.proto, and TFDV's g3doc/anomalies.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from components import html_page
from components.errors import DataError

Severity = Literal["error", "warning"]
DATASET = "(dataset)"

# What is seen in the data; a schema file that is wrong is a ConfigError, see docs/schema.md.
KINDS = (
    "BOOL_TYPE_BIG_INT",
    "BOOL_TYPE_SMALL_INT",
    "BOOL_TYPE_UNEXPECTED_FLOAT",
    "BOOL_TYPE_UNEXPECTED_STRING",
    "COMPARATOR_CONTROL_DATA_MISSING",
    "COMPARATOR_HIGH_NUM_EXAMPLES",
    "COMPARATOR_JENSEN_SHANNON_DIVERGENCE_HIGH",
    "COMPARATOR_LOW_NUM_EXAMPLES",
    "COMPARATOR_L_INFTY_HIGH",
    "COMPARATOR_NORMALIZED_ABSOLUTE_DIFFERENCE_HIGH",
    "DATASET_HIGH_NUM_EXAMPLES",
    "DATASET_LOW_NUM_EXAMPLES",
    "ENUM_TYPE_INVALID_UTF8",
    "ENUM_TYPE_UNEXPECTED_STRING_VALUES",
    "FEATURE_COVERAGE_TOO_LOW",
    "FEATURE_COVERAGE_TOO_SHORT_AVG_TOKEN_LENGTH",
    "FEATURE_TYPE_HIGH_NUMBER_VALUES",
    "FEATURE_TYPE_HIGH_UNIQUE",
    "FEATURE_TYPE_LOW_FRACTION_PRESENT",
    "FEATURE_TYPE_LOW_NUMBER_PRESENT",
    "FEATURE_TYPE_LOW_NUMBER_VALUES",
    "FEATURE_TYPE_LOW_UNIQUE",
    "FEATURE_TYPE_NOT_PRESENT",
    "FEATURE_TYPE_NO_UNIQUE",
    "FEATURE_TYPE_NO_VALUES",
    "FLOAT_TYPE_BIG_FLOAT",
    "FLOAT_TYPE_HAS_INF",
    "FLOAT_TYPE_HAS_NAN",
    "FLOAT_TYPE_SMALL_FLOAT",
    "FLOAT_TYPE_STRING_NOT_FLOAT",
    "INT_TYPE_BIG_INT",
    "INT_TYPE_NOT_INT_STRING",
    "INT_TYPE_SMALL_INT",
    "INVALID_FEATURE_SHAPE",
    "LABEL_CLASS_ABSENT",
    "LABEL_FEW_EXAMPLES",
    "LABEL_MISSING",
    "LABEL_NUM_CLASSES",
    "LABEL_ONE_CLASS",
    "LABEL_TYPE",
    "LABEL_UNKNOWN_CLASS",
    "MAX_IMAGE_BYTE_SIZE_EXCEEDED",
    "SCHEMA_MISSING_COLUMN",
    "SCHEMA_NEW_COLUMN",
    "SEQUENCE_VALUE_TOO_LARGE_FRACTION",
    "SEQUENCE_VALUE_TOO_SMALL_FRACTION",
    "SPLITS_SHARE_ENTITIES",
    "SPLITS_SHARE_ROWS",
    "STATS_NOT_AVAILABLE",
    "UNEXPECTED_DATA_TYPE",
    "VALUE_NESTEDNESS_MISMATCH",
)
# Nothing downstream works without these, so no setting makes them warnings.
FATAL = ("ENUM_TYPE_INVALID_UTF8", "LABEL_MISSING", "LABEL_NUM_CLASSES", "LABEL_TYPE", "LABEL_UNKNOWN_CLASS")


@dataclass(frozen=True)
class Anomaly:
    """One departure from what data should look like.

    Attributes:
        kind: One of `KINDS`.
        feature: The column, or `(dataset)`.
        split: Where it was seen.
        severity: `error` stops the pipeline, `warning` is only told.
        message: What is wrong, and how to mend it.
    """

    kind: str
    feature: str
    split: str
    severity: Severity
    message: str


def with_severities(anomalies: Iterable[Anomaly], severities: Mapping[str, str]) -> Iterator[Anomaly]:
    """The anomalies with the severity set for their kind: `error`, `warning`, or `ignore`, which leaves them out."""
    for anomaly in anomalies:
        severity = severities.get(anomaly.kind, anomaly.severity)
        if severity != "ignore":
            yield replace(anomaly, severity="error" if severity == "error" else "warning")


def raise_errors(anomalies: Sequence[Anomaly]) -> None:
    """Stop if there are anomalies of severity `error`.

    Raises:
        DataError: with each of them.
    """
    errors = [anomaly for anomaly in anomalies if anomaly.severity == "error"]
    if errors:
        lines = [f"  {a.split} split, '{a.feature}': {a.message} [{a.kind}]" for a in errors]
        raise DataError(f"The data is not fit to train on ({len(errors)} errors):\n" + "\n".join(lines))


def page(anomalies: Sequence[Anomaly]) -> str:
    """The anomalies as a page of HTML, the errors first."""
    rows = [("alarm" if a.severity == "error" else "", _cells(a)) for a in _ordered(anomalies)]
    found = html_page.table(_COLUMNS, rows) if rows else f"<p>{escape(_NOTHING)}</p>"
    return html_page.document("Anomalies", ["<h1>Anomalies</h1>", found])


def markdown(anomalies: Sequence[Anomaly]) -> str:
    """The same as Markdown."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, _ordered(anomalies))]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"# Anomalies\n\n{table if anomalies else _NOTHING}\n"


_COLUMNS = ("split", "feature", "severity", "kind", "what is wrong, and what to do")
_NOTHING = "The data is as its schema says."


def _ordered(anomalies: Sequence[Anomaly]) -> list[Anomaly]:
    return sorted(anomalies, key=lambda anomaly: anomaly.severity != "error")


def _cells(anomaly: Anomaly) -> tuple[str, ...]:
    return anomaly.split, anomaly.feature, anomaly.severity, anomaly.kind, anomaly.message
