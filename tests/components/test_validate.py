from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from components.artifacts import read_manifest
from components.config import DataConfig, LeakageConfig, SplitConfig, ValidateConfig
from components.errors import ArtifactError, ConfigError, DataError
from components.ingest import ingest
from components.schema import load_schema
from components.statistics import load_slices, load_statistics
from components.validate import ValidateResult, validate

TAXI = Path(__file__).parents[2] / "configs" / "data" / "chicago_taxi.csv.gz"
LABELS = {"train": ["a", "b"] * 6, "validation": ["a", "b"], "test": ["a", "b"]}
_rows: dict[str, list[Any]] = {}


def rows(*, path):
    """A source of one's own: the rows of the test that runs."""
    yield pa.RecordBatch.from_pydict(_rows)


def _validate(
    folder: Path, data: dict[str, Any] | None = None, check_leakage: bool = False, **fields: Any
) -> ValidateResult:
    """Ingest `{column: {split: values}}` with the label of LABELS unless given, and validate it."""
    columns = {"label": LABELS, **(data or {})}
    splits = {split: len(values) for split, values in columns["label"].items()}
    columns = {"x": {split: [float(i % 2) for i in range(number)] for split, number in splits.items()}, **columns}
    _rows.clear()
    _rows["split"] = [split for split, number in splits.items() for _ in range(number)]
    _rows.update({name: [v for split in splits for v in values[split]] for name, values in columns.items()})
    about = {name: fields.pop(name) for name in ("task", "classes") if name in fields}
    config = DataConfig(
        source="tests.components.test_validate:rows",
        split=SplitConfig(method="column"),
        # The rows of most tests are alike in all splits.
        leakage=LeakageConfig(check=check_leakage),
        **{"task": "binary", **about},
    )
    ingest(examples=folder / "examples", config=config)
    return validate(examples=folder / "examples", statistics=folder / "statistics", config=ValidateConfig(**fields))


def test_good_data_passes_without_a_word(tmp_path):
    result = _validate(tmp_path)
    assert (result.num_classes, result.label, result.warnings) == (2, "label", [])
    statistics = load_statistics(tmp_path / "statistics")
    assert {split: found["x"].count for split, found in statistics.items()} == {"train": 12, "validation": 2, "test": 2}
    assert load_schema(tmp_path / "statistics" / "schema.yaml").features["label"].domain == ["a", "b"]
    assert json.loads((tmp_path / "statistics" / "anomalies.json").read_text()) == []


def test_what_splits_share_is_told_and_can_be_an_error(tmp_path):
    result = _validate(tmp_path, check_leakage=True)
    assert [(found["kind"], found["split"], found["severity"]) for found in result.anomalies] == [
        ("SPLITS_SHARE_ROWS", split, "warning") for split in ("validation", "test", "test")
    ]
    with pytest.raises(DataError, match=r"rows that the train split has, too, .*: 2 of 2\. .* \[SPLITS_SHARE_ROWS\]"):
        _validate(tmp_path, check_leakage=True, severities={"SPLITS_SHARE_ROWS": "error"})


def _labels(train: list[Any], validation: list[Any], test: list[Any]) -> dict[str, Any]:
    return {"label": {"train": train, "validation": validation, "test": test}}


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (_labels(["a", "b", None], ["a", "b"], ["a", "b"]), {}, "train split, 'label': 1 of 3 rows have no label"),
        (_labels([0, 1, 1], [0, 1], [0, 1, None]), {}, "test split, 'label': 1 of 3 rows have no label"),
        (
            _labels([1.0, float("nan")], [1.0], [2.0]),
            {"task": "regression"},
            "train split, 'label': 1 of 2 rows have no label",
        ),
        (
            _labels(["a", "b"], ["a", "c"], ["a", "b"]),
            {},
            "validation split.*no class: 'c'; the train split has 'a', 'b'",
        ),
        (
            _labels(["a", "b"], ["a", "b"], ["a", "B"]),
            {"classes": ["a", "b"]},
            "test split.*1 rows have a label that is no class: 'B'; data.classes are 'a', 'b'",
        ),
        (
            _labels([0, 1, 2], [0, 1], [0, 1]),
            {"classes": ["a", "b"]},
            "train split.*no class: 2; with 2 data.classes, labels are 0 to 1",
        ),
        (_labels(["a", "b", "c"], ["a", "b"], ["a", "b"]), {}, "binary needs 2 classes, there are 3"),
        (_labels(["a", "a"], ["a", "a"], ["a"]), {}, "binary needs 2 classes, there are 1"),
        (_labels(["a", "b"], ["a", "a"], ["a", "b"]), {}, "validation split.*every row is of the one class 'a'"),
        (
            _labels(["a", "b"], ["a", "b"], ["a", "b"]),
            {"task": "multiclass", "classes": ["a", "b", "c"]},
            "train split.*class 'c' has 0 examples, at least 1 are needed",
        ),
        ({}, {"min_class_examples": 7}, "class 'a' has 6 examples, at least 7"),
        (
            _labels([0.5, 1.0], [0.5, 1.0], [0.5, 1.0]),
            {"task": "multiclass"},
            "the label is a fractional number, multiclass needs",
        ),
        ({}, {"task": "regression"}, "a string cannot be regressed on"),
        (
            {"x": {"train": [float("inf"), *[0.0, 1.0] * 5, 1.0], "validation": [0.0, 1.0], "test": [0.0, 1.0]}},
            {},
            "train split, 'x': 1 values are infinite",
        ),
        (
            {"w": {"train": [b"u"] * 12, "validation": [b"u", b"v"], "test": [b"\xff", b"u"]}},
            {},
            r"test split, 'w': 1 of 2 rows hold bytes that are not text in UTF-8\. Convert them.*ENUM_TYPE_INVALID_UTF8",
        ),
        (
            {"w": {"train": [b"a b", b"\xe9"] * 6, "validation": [b"u", b"v"], "test": [b"u", b"v"]}},
            {"text_features": ["w"]},
            "train split, 'w': 6 of 12 rows hold bytes that are not text in UTF-8",
        ),
        (
            _labels([b"a", b"\xe9", b"a"], [b"a", b"\xe9"], [b"a", b"\xe9"]),
            {},
            "train split, 'label': 1 of 3 rows hold bytes that are not text in UTF-8",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_and_nothing_written(tmp_path, data, fields, message):
    with pytest.raises(DataError, match=message):
        _validate(tmp_path, data, **fields)
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (_labels(["a", "b", "c"] * 2, ["a", "b"], ["a", "b", "c"]), "LABEL_CLASS_ABSENT"),
        (
            {"w": {"train": ["u"] * 12, "validation": ["u", "v"], "test": ["u"] * 2}},
            "ENUM_TYPE_UNEXPECTED_STRING_VALUES",
        ),
        ({"n": {"train": [None] * 12, "validation": [None] * 2, "test": [None] * 2}}, "FEATURE_TYPE_NO_VALUES"),
        ({"n": {"train": [1, 2] * 6, "validation": [1, 2], "test": [2, 2]}}, "COMPARATOR_L_INFTY_HIGH"),
        (
            {"f": {"train": [1.0, 2.0] * 6, "validation": [1.0, 2.0], "test": [1.0, 1.0]}},
            "COMPARATOR_JENSEN_SHANNON_DIVERGENCE_HIGH",
        ),
    ],
)
def test_what_is_only_odd_is_a_warning(tmp_path, data, kind):
    result = _validate(tmp_path, data, task="multiclass")
    found = json.loads((tmp_path / "statistics" / "anomalies.json").read_text())
    assert kind in {anomaly["kind"] for anomaly in found}
    assert {anomaly["severity"] for anomaly in found} == {"warning"}
    assert len(result.warnings) == len(found)


def test_a_supplied_schema_makes_departures_errors_and_is_kept(tmp_path):
    schema = tmp_path / "mine.yaml"
    schema.write_text("features:\n  x: {type: float, max: 0.5}\n  label: {type: string}\n")
    with pytest.raises(
        DataError, match=r"'x': largest value 1 is above the greatest allowed, 0.5.*FLOAT_TYPE_BIG_FLOAT"
    ):
        _validate(tmp_path, schema_path=str(schema))
    schema.write_text("features:\n  x: {type: float, max: 2}\n  label: {type: string}\n")
    _validate(tmp_path, schema_path=str(schema))
    assert load_schema(tmp_path / "statistics" / "schema.yaml") == load_schema(schema)


def test_settings_change_the_statistics(tmp_path):
    words = {split: ["red fox", "blue fox"] * (len(labels) // 2) for split, labels in LABELS.items()}
    _validate(tmp_path, {"w": words}, text_features=["w"], num_quantiles=4, max_top_values=1)
    found = load_statistics(tmp_path / "statistics")["train"]
    assert found["w"].top_tokens == (("fox", 12, 12),)
    assert len(found["x"].quantiles) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [("ward", "reads 'ward', which the data lacks.*Did you mean 'word'"), ("x", "is float, not string")],
)
def test_a_text_feature_must_be_a_string(tmp_path, name, message):
    words = {split: ["u"] * len(labels) for split, labels in LABELS.items()}
    with pytest.raises(ConfigError, match=message):
        _validate(tmp_path, {"word": words}, text_features=[name])


def test_weights_and_slices_are_counted_and_a_page_is_made(tmp_path):
    data = {"w": {"train": [0.5] * 6 + [2.0] * 6, "validation": [1.0, 1.0], "test": [1.0, 1.0]}}
    _validate(tmp_path, data, weight_feature="w", slice_features=["label"])
    found = load_statistics(tmp_path / "statistics")["train"]["label"]
    assert found.weighted is not None
    assert (found.count, found.weighted.count) == (12, 15.0)
    assert found.weighted.top_values == (("a", 7.5), ("b", 7.5))
    slices = load_slices(tmp_path / "statistics")
    assert list(slices) == [f"{split}/label={value}" for split in LABELS for value in "ab"]
    assert (slices["train/label=b"]["x"].count, slices["train/label=b"]["x"].mean) == (6, 1.0)
    assert "<td>validation</td>" in (tmp_path / "statistics" / "statistics.html").read_text()


def test_without_slices_there_are_none(tmp_path):
    _validate(tmp_path)
    assert load_slices(tmp_path / "statistics") == {}


@pytest.mark.parametrize(
    ("name", "message"), [("labels", "no 'labels'. Did you mean 'label'"), ("label", "not one number a row")]
)
def test_weights_must_be_numbers(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        _validate(tmp_path, weight_feature=name)


def test_a_row_without_a_weight_is_refused_and_nothing_written(tmp_path):
    data = {"w": {"train": [1.0] * 11 + [-1.0], "validation": [1.0, 1.0], "test": [1.0, 1.0]}}
    with pytest.raises(DataError, match=r"validate.weight_feature: 1 rows have a 'w' that is missing, negative"):
        _validate(tmp_path, data, weight_feature="w")
    assert not (tmp_path / "statistics").exists()


def test_twice_the_same_bytes(tmp_path):
    digests = []
    for name in "ab":
        (tmp_path / name).mkdir()
        _validate(tmp_path / name)
        digests.append(read_manifest(tmp_path / name / "statistics").digest)
    assert digests[0] == digests[1]


def test_examples_that_were_changed_are_refused(tmp_path):
    _validate(tmp_path)
    shard = next((tmp_path / "examples" / "train").iterdir())
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match=f"{shard.name} is missing or has another size"):
        validate(examples=tmp_path / "examples", statistics=tmp_path / "s", config=ValidateConfig())


def test_the_taxi_trips(tmp_path):
    ingest(
        examples=tmp_path / "e",
        config=DataConfig(source="csv", path=str(TAXI), label="big_tipper", task="binary", drop=["tips"]),
    )
    result = validate(examples=tmp_path / "e", statistics=tmp_path / "s", config=ValidateConfig())
    assert any("'pickup_census_tract': no row has a value" in warning for warning in result.warnings)
    train = load_statistics(tmp_path / "s")["train"]
    assert [value for value, _ in train["payment_type"].top_values[:2]] == ["Cash", "Credit Card"]
    assert train["trip_miles"].max == 1710


DRIFTED = {"city": {"train": ["x"] * 12, "validation": ["x"] * 2, "test": ["x"] * 2}}
EVEN = {"city": {"train": ["x", "y"] * 6, "validation": ["x", "y"], "test": ["x", "y"]}}


def _kinds(folder: Path) -> list[tuple[str, str, str]]:
    found = json.loads((folder / "statistics" / "anomalies.json").read_text())
    return [(each["split"], each["feature"], each["kind"]) for each in found]


@pytest.mark.parametrize("form", ["run", "statistics", "file", "latest"])
def test_drift_from_the_last_span_is_told(tmp_path, form):
    """Half of the last span's rows were y, none is now: a difference of 0.5, above the 0.2 of default."""
    _validate(tmp_path / "runs/last", EVEN)
    last = tmp_path / "runs/last"
    places = {"run": last, "statistics": last / "statistics", "file": last / "statistics/statistics.json"}
    result = _validate(tmp_path / "runs/now", DRIFTED, drift_from=str(places.get(form, "latest")))
    expected = [(split, "city", "COMPARATOR_L_INFTY_HIGH") for split in ("train", "validation", "test")]
    assert _kinds(tmp_path / "runs/now") == expected
    assert all("0.5" in warning for warning in result.warnings)


def test_the_first_span_has_none_to_differ_from(tmp_path):
    assert _validate(tmp_path / "runs/first", EVEN, drift_from="latest").warnings == []


def test_a_last_span_without_statistics_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"validate\.drift_from: .*nowhere has no statistics\.json"):
        _validate(tmp_path, drift_from=str(tmp_path / "nowhere"))


def test_a_kind_of_anomaly_is_an_error_a_warning_or_nothing_as_the_config_says(tmp_path):
    kind = "COMPARATOR_L_INFTY_HIGH"
    _validate(tmp_path / "last", EVEN)
    drift = {"drift_from": str(tmp_path / "last")}
    with pytest.raises(DataError, match=rf"train split, 'city': differs from the last span.*\[{kind}\]"):
        _validate(tmp_path / "error", DRIFTED, **drift, severities={kind: "error"})
    assert not (tmp_path / "error/statistics").exists()
    assert _validate(tmp_path / "ignored", DRIFTED, **drift, severities={kind: "ignore"}).warnings == []
    assert _kinds(tmp_path / "ignored") == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("COMPARATOR_L_INFTY", "is no kind of anomaly. Did you mean 'COMPARATOR_L_INFTY_HIGH'"),
        ("LABEL_TYPE", "LABEL_TYPE"),
    ],
)
def test_severities_of_kinds_that_are_none_or_always_errors_are_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        ValidateConfig(severities={kind: "warning"})
