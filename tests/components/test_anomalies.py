"""Every kind of anomaly that a schema finds, its message, and that `update` lets the same data pass."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from components.anomalies import KINDS, Anomaly, markdown, page, with_severities
from components.schema import FeatureSchema, Schema
from components.schema.checks import compare
from components.schema.drift import drift
from components.schema.files import schema_text
from components.schema.spec import Comparator, DatasetSchema, Defaults
from components.schema.update import update_schema
from components.statistics import FeatureStatistics

INT = FeatureStatistics("int", 10, 2, min=-1, max=7, quantiles=(-1, 3, 7), num_unique=3, top_values=((3, 8),))
FLOAT = FeatureStatistics("float", 10, 2, min=0.25, max=7.5, quantiles=(0.25, 3, 7.5))
STRING = FeatureStatistics(
    "string", 10, 2, num_unique=3, top_values=(("7", 5), ("x", 2), ("-1", 1)), min_length_bytes=1, max_length_bytes=2
)
TEXT = FeatureStatistics("string", 4, 0, num_unique=2, top_tokens=(("ab", 6, 4), ("abcd", 2, 1)), num_tokens=8)
LIST = FeatureStatistics(
    "int", 10, 0, shape=(None,), min=1, max=5, num_unique=5, min_num_values=1, max_num_values=4, mean_num_values=2.0
)
IMAGE = FeatureStatistics("uint8", 4, 0, shape=(2, 3, 1))
NONE = FeatureStatistics("float", 10, 10)

CASES: list[tuple[FeatureStatistics, dict[str, Any], str, str]] = [
    (INT, {"bool_domain": {}, "min_fraction": 0}, "BOOL_TYPE_BIG_INT", "7 is neither 0 nor 1"),
    (INT, {"bool_domain": {}}, "BOOL_TYPE_SMALL_INT", "-1 is neither 0 nor 1"),
    (FLOAT, {"bool_domain": {}}, "BOOL_TYPE_UNEXPECTED_FLOAT", "0.25 is neither 0 nor 1"),
    (
        STRING,
        {"bool_domain": {"true_value": "7", "false_value": "-1"}},
        "BOOL_TYPE_UNEXPECTED_STRING",
        r"neither '7' nor '-1': 'x' \(2\)",
    ),
    (STRING, {"domain": ["7"]}, "ENUM_TYPE_UNEXPECTED_STRING_VALUES", r"3 rows .*: 'x' \(2\), '-1' \(1\)"),
    (STRING, {"domain": ["7"], "min_domain_mass": 0.7}, "ENUM_TYPE_UNEXPECTED_STRING_VALUES", "3 rows"),
    (LIST, {"max_values": 3}, "FEATURE_TYPE_HIGH_NUMBER_VALUES", "a row has 4 values, at most 3"),
    (LIST, {"min_values": 2}, "FEATURE_TYPE_LOW_NUMBER_VALUES", "a row has 1 values, at least 2"),
    (FLOAT, {"min_fraction": 0.9}, "FEATURE_TYPE_LOW_FRACTION_PRESENT", "2 of 10 rows have no value; at least 90%"),
    (FLOAT, {"min_count": 9}, "FEATURE_TYPE_LOW_NUMBER_PRESENT", "8 rows have a value, at least 9"),
    (NONE, {"min_count": 1}, "FEATURE_TYPE_NOT_PRESENT", "no row of 10 has a value"),
    (STRING, {"max_unique": 2}, "FEATURE_TYPE_HIGH_UNIQUE", "3 distinct values, at most 2"),
    (INT, {"min_unique": 4}, "FEATURE_TYPE_LOW_UNIQUE", "3 distinct values, at least 4"),
    (FLOAT, {"min_unique": 4}, "FEATURE_TYPE_NO_UNIQUE", "distinct values of float features are not counted"),
    (FLOAT, {"max": 7}, "FLOAT_TYPE_BIG_FLOAT", "largest value 7.5 is above the greatest allowed, 7"),
    (FLOAT, {"min": 1}, "FLOAT_TYPE_SMALL_FLOAT", "smallest value 0.25 is below the least allowed, 1"),
    (FLOAT, {"disallow_nan": True}, "FLOAT_TYPE_HAS_NAN", "2 of 10 rows are NaN or missing"),
    (STRING, {"encodes": "float"}, "FLOAT_TYPE_STRING_NOT_FLOAT", r"texts that are no float: 'x' \(2\)"),
    (STRING, {"encodes": "int"}, "INT_TYPE_NOT_INT_STRING", r"texts that are no int: 'x' \(2\)"),
    (INT, {"max": 6}, "INT_TYPE_BIG_INT", "largest value 7 is above"),
    (INT, {"min": 0}, "INT_TYPE_SMALL_INT", "smallest value -1 is below"),
    (IMAGE, {"shape": [2, 2, 1]}, "INVALID_FEATURE_SHAPE", r"has shape \[2, 3, 1\], the schema says \[2, 2, 1\]"),
    (LIST, {"shape": [3]}, "INVALID_FEATURE_SHAPE", r"has shape \[null\], the schema says \[3\]"),
    (IMAGE, {"shape": [6]}, "VALUE_NESTEDNESS_MISMATCH", "nested 1 deep instead of 3"),
    (IMAGE, {"max_bytes": 5}, "MAX_IMAGE_BYTE_SIZE_EXCEEDED", "has 6 bytes, at most 5"),
    (STRING, {"max_bytes": 1}, "MAX_IMAGE_BYTE_SIZE_EXCEEDED", "has 2 bytes, at most 1"),
    (TEXT, {"domain": ["ab"], "min_coverage": 0.8}, "FEATURE_COVERAGE_TOO_LOW", "75.0% of the words"),
    (TEXT, {"min_mean_token_length": 3}, "FEATURE_COVERAGE_TOO_SHORT_AVG_TOKEN_LENGTH", "2.50 characters"),
    (TEXT, {"tokens": {"abcd": {"min_fraction": 0.5}}}, "SEQUENCE_VALUE_TOO_SMALL_FRACTION", "25.0% of the rows"),
    (TEXT, {"tokens": {"ab": {"max_fraction": 0.5}}}, "SEQUENCE_VALUE_TOO_LARGE_FRACTION", "100.0% of the rows"),
    (replace(LIST, max_num_values=None), {"max_values": 3}, "STATS_NOT_AVAILABLE", "how many values each row has"),
    (STRING, {"min_mean_token_length": 3}, "STATS_NOT_AVAILABLE", "in no `op: text`"),
]


def _schema(seen: FeatureStatistics, said: dict[str, Any], **others: Any) -> Schema:
    fields = {"type": seen.type, "shape": seen.shape, **said}
    return Schema(features={"f": FeatureSchema(**fields)}, **others)


def _found(statistics: dict[str, FeatureStatistics], schema: Schema, **settings: Any) -> list[Anomaly]:
    return list(compare(statistics, schema, split="test", supplied=True, **settings))


@pytest.mark.parametrize(("seen", "said", "kind", "message"), CASES, ids=[f"{c[2]}-{i}" for i, c in enumerate(CASES)])
def test_each_kind_is_found_told_and_mended_by_an_update(seen, said, kind, message):
    schema = _schema(seen, said)
    [found] = [anomaly for anomaly in _found({"f": seen}, schema) if anomaly.kind == kind]
    assert kind in KINDS
    assert re.search(message, found.message)
    text, told = update_schema(schema_text(schema), {"test": {"f": seen}})
    again = update_schema(text, {"test": {"f": seen}})
    has_no_fix = kind in (
        "STATS_NOT_AVAILABLE",
        "SEQUENCE_VALUE_TOO_SMALL_FRACTION",
        "SEQUENCE_VALUE_TOO_LARGE_FRACTION",
    )
    assert any(kind in line for line in told)
    assert bool(again[1]) == has_no_fix
    assert again[0] == text


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (STRING, {"domain": ["7"], "min_domain_mass": 0.6}),
        (LIST, {"shape": [None], "min_values": 1, "max_values": 4}),
        (IMAGE, {"shape": [None, None, 1], "max_bytes": 6}),
        (replace(STRING, top_values=(("7", 5), (" 8 ", 2))), {"encodes": "int", "min": 7, "max": 8}),
        (replace(FLOAT, min=0.0, max=1.0, quantiles=(0.0, 1.0)), {"bool_domain": {}}),
        (TEXT, {"domain": ["ab"], "min_coverage": 0.75, "tokens": {"ab": {"min_fraction": 1.0}}}),
        (NONE, {}),
        (INT, {"lifecycle": "debug", "max": 0}),
    ],
    ids=range(8),
)
def test_what_keeps_the_schema_to_the_limit_is_no_anomaly(seen, said):
    assert _found({"f": seen}, _schema(seen, said)) == []


def test_numbers_in_texts_keep_their_bounds():
    seen = replace(STRING, top_values=(("7", 5), ("-1", 1)))
    kinds = [a.kind for a in _found({"f": seen}, _schema(seen, {"encodes": "int", "min": 0, "max": 6}))]
    assert kinds == ["INT_TYPE_SMALL_INT", "INT_TYPE_BIG_INT"]
    kinds = [a.kind for a in _found({"f": seen}, _schema(seen, {"encodes": "float", "min": 0, "max": 6}))]
    assert kinds == ["FLOAT_TYPE_SMALL_FLOAT", "FLOAT_TYPE_BIG_FLOAT"]


def test_a_feature_is_only_expected_in_its_environment():
    label = {"not_in_environment": ["serving"], "min_fraction": 1.0}
    schema = Schema(features={"f": FeatureSchema(type="float"), "y": FeatureSchema(type="int", **label)})
    assert [a.kind for a in _found({"f": FLOAT}, schema)] == ["SCHEMA_MISSING_COLUMN"]
    assert _found({"f": FLOAT}, schema, environment="serving") == []
    only = Schema(
        default_environment=["training"],
        features={"f": FeatureSchema(type="float", in_environment=["serving"]), "y": FeatureSchema(type="int")},
    )
    assert _found({"f": FLOAT}, only, environment="serving") == []
    assert [a.feature for a in _found({}, only)] == ["y"]


@pytest.mark.parametrize(
    ("dataset", "kinds"),
    [
        ({"min_examples": 11}, ["DATASET_LOW_NUM_EXAMPLES"]),
        ({"max_examples": 9}, ["DATASET_HIGH_NUM_EXAMPLES"]),
        ({"min_examples": 10, "max_examples": 10}, []),
    ],
    ids=["low", "high", "right"],
)
def test_the_number_of_rows(dataset, kinds):
    schema = _schema(FLOAT, {}, dataset=DatasetSchema(**dataset))
    assert [a.kind for a in _found({"f": FLOAT}, schema)] == kinds
    text, _ = update_schema(schema_text(schema), {"test": {"f": FLOAT}})
    assert update_schema(text, {"test": {"f": FLOAT}})[1] == []


def _words(**counts: int) -> FeatureStatistics:
    top = tuple(sorted(counts.items(), key=lambda pair: -pair[1]))
    return FeatureStatistics("string", sum(counts.values()), 0, top_values=top, num_unique=len(top))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, [("COMPARATOR_L_INFTY_HIGH", "warning")]),
        ({"l_infinity": 0.49}, [("COMPARATOR_L_INFTY_HIGH", "error")]),
        ({"l_infinity": 0.5}, []),
        # Hand-computed: shares (1, 0) and (1/2, 1/2) are 0.311 apart.
        ({"jensen_shannon": 0.31}, [("COMPARATOR_JENSEN_SHANNON_DIVERGENCE_HIGH", "error")]),
        ({"jensen_shannon": 0.312}, []),
        # |8 - 4| of 8 + 8 rows.
        ({"normalized_difference": 0.24}, [("COMPARATOR_NORMALIZED_ABSOLUTE_DIFFERENCE_HIGH", "error")]),
        ({"normalized_difference": 0.25}, []),
    ],
    ids=range(7),
)
def test_drift_by_the_measure_of_the_feature(own, expected):
    said = {} if own is None else {"drift": Comparator(**own)}
    schema = _schema(_words(a=1), said)
    found = drift({"f": _words(a=4, b=4)}, {"f": _words(a=8)}, schema, split="train", supplied=True)
    assert [(a.kind, a.severity) for a in found] == expected


def test_the_default_threshold_is_the_schemas():
    schema = _schema(_words(a=1), {}, defaults=Defaults(drift=Comparator(l_infinity=0.6)))
    assert list(drift({"f": _words(a=4, b=4)}, {"f": _words(a=8)}, schema, split="train", supplied=True)) == []


def test_a_last_span_without_the_column_or_with_another_number_of_rows():
    rows = DatasetSchema(min_fraction_of_last=0.6, max_fraction_of_last=1.5)
    schema = _schema(_words(a=1), {"drift": Comparator(l_infinity=0.1)}, dataset=rows)

    def kinds(now: int, last: dict[str, FeatureStatistics]) -> list[str]:
        return [a.kind for a in drift({"f": _words(a=now)}, last, schema, split="train", supplied=True)]

    assert kinds(10, {"other": _words(a=10)}) == ["COMPARATOR_CONTROL_DATA_MISSING"]
    assert kinds(10, {"f": _words(a=20)}) == ["COMPARATOR_LOW_NUM_EXAMPLES"]
    assert kinds(10, {"f": _words(a=6)}) == ["COMPARATOR_HIGH_NUM_EXAMPLES"]
    assert kinds(10, {"f": _words(a=9)}) == []


def test_severities_are_changed_by_kind():
    found = [Anomaly(kind, "f", "test", "error", "m") for kind in ("A", "B", "C")] + [
        Anomaly("D", "f", "test", "warning", "m")
    ]
    changed = with_severities(found, {"A": "warning", "B": "ignore", "D": "error"})
    assert [(a.kind, a.severity) for a in changed] == [("A", "warning"), ("C", "error"), ("D", "error")]


def test_the_page_names_all_and_shows_text_as_text():
    found = [Anomaly("B", "g", "test", "warning", "m"), Anomaly("A", "f|<b>", "train", "error", "odd")]
    html = page(found)
    assert html.index("f|&lt;b&gt;") < html.index(">g<")
    assert markdown(found).splitlines()[4:] == [
        "| train | f\\|<b> | error | A | odd |",
        "| test | g | warning | B | m |",
    ]
    assert "as its schema says" in page([])
