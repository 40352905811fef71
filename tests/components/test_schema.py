from __future__ import annotations

import numpy as np
import pytest

from components.anomalies import Anomaly, raise_errors
from components.errors import ConfigError, DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.schema import load_schema, write_schema
from components.schema.checks import compare
from components.schema.infer import infer_schema
from components.statistics import Statistics, StatisticsBuilder

FEATURES = {
    "age": Feature("int"),
    "fare": Feature("float"),
    "word": Feature("string"),
    "image": Feature("uint8", (2, 2, 1)),
}
INFO = ExamplesInfo(FEATURES, "age", "multiclass", None, {})


def _statistics(max_top_values: int = 1000, **changes: object) -> Statistics:
    data = {
        "age": np.array([1, 5, 9, MISSING_INT]),
        "fare": np.array([0.5, 2.5, 1, 1], np.float32),
        "word": np.array([b"yes", b"no", b"yes", b"on"], object),
        "image": np.zeros((4, 2, 2, 1), np.uint8),
    }
    builder = StatisticsBuilder(INFO, text_features=[], max_top_values=max_top_values, num_quantiles=10)
    builder.update({**data, **changes})
    return builder.finish()


def _kinds(statistics: Statistics, schema, *, supplied=True) -> list[tuple[str, str, str]]:
    found = compare(statistics, schema, split="test", supplied=supplied)
    return [(a.kind, a.feature, a.severity) for a in found]


def test_an_inferred_schema_fits_its_own_split_and_survives_yaml(tmp_path):
    statistics = _statistics()
    schema = infer_schema(statistics, "age")
    write_schema(tmp_path / "schema.yaml", schema)
    assert load_schema(tmp_path / "schema.yaml") == schema
    assert _kinds(statistics, schema) == []
    text = (tmp_path / "schema.yaml").read_text()
    assert "  age: {type: int, not_in_environment: [serving], min_fraction: 0.67}\n" in text
    # YAML 1.1 reads a bare yes, no or on as a truth value.
    assert schema.features["word"].domain == ["no", "on", "yes"]


def test_only_strings_of_few_values_have_a_domain():
    words = np.array([b"w%d" % i for i in range(101)], object)
    assert infer_schema(_statistics(word=words), "age").features["word"].domain is None
    assert infer_schema(_statistics(word=words[:100]), "age").features["word"].domain is not None
    assert infer_schema(_statistics(max_top_values=99, word=words[:100]), "age").features["word"].domain is None


@pytest.mark.parametrize(
    ("changes", "kind", "feature"),
    [
        ({"age": np.array([0, 5])}, "INT_TYPE_SMALL_INT", "age"),
        ({"age": np.array([5, 10])}, "INT_TYPE_BIG_INT", "age"),
        ({"fare": np.array([0.25], np.float32)}, "FLOAT_TYPE_SMALL_FLOAT", "fare"),
        ({"fare": np.array([2.75], np.float32)}, "FLOAT_TYPE_BIG_FLOAT", "fare"),
        ({"fare": np.array([1, np.nan], np.float32)}, "FEATURE_TYPE_LOW_FRACTION_PRESENT", "fare"),
        ({"age": np.array([1, MISSING_INT])}, "FEATURE_TYPE_LOW_FRACTION_PRESENT", "age"),
        ({"word": np.array([b"maybe"], object)}, "ENUM_TYPE_UNEXPECTED_STRING_VALUES", "word"),
    ],
)
@pytest.mark.parametrize(("supplied", "severity"), [(True, "error"), (False, "warning")])
def test_departures(changes, kind, feature, supplied, severity):
    schema = infer_schema(_statistics(), "age")
    bounds = {"age": {"min": 1, "max": 9}, "fare": {"min": 0.5, "max": 2.5}}
    bounded = {name: schema.features[name].model_copy(update=fields) for name, fields in bounds.items()}
    schema = schema.model_copy(update={"features": {**schema.features, **bounded}})
    assert _kinds(_statistics(**changes), schema, supplied=supplied) == [(kind, feature, severity)]


@pytest.mark.parametrize(
    ("line", "kind", "feature"),
    [
        ("fare: {type: int}", "UNEXPECTED_DATA_TYPE", "fare"),
        ("image: {type: uint8, shape: [4, 4, 1]}", "INVALID_FEATURE_SHAPE", "image"),
        ("tip: {type: float}", "SCHEMA_MISSING_COLUMN", "tip"),
        ("", "SCHEMA_NEW_COLUMN", "word"),
    ],
)
def test_columns_types_and_shapes(tmp_path, line, kind, feature):
    lines = {
        "age": "age: {type: int}",
        "fare": "fare: {type: float}",
        "image": "image: {type: uint8, shape: [2, 2, 1]}",
        "word": "word: {type: string}",
        feature: line,
    }
    (tmp_path / "s.yaml").write_text("features:\n" + "".join(f"  {line}\n" for line in lines.values()))
    assert _kinds(_statistics(), load_schema(tmp_path / "s.yaml")) == [(kind, feature, "error")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("features:\n  a: {type: int}\n  b: {type: text}\n", "line 3: features.b.type: Input should be 'int'"),
        ("features:\n  a:\n    type: int\n    minn: 3\n", "line 4: features.a.minn: .*Did you mean 'min'"),
        ("features:\n  a: {type: int, domain: [x]}\n", "line 2: features.a: .*domain is for string features"),
        ("features:\n  a: {type: string, max: 3}\n", "line 2: .*min and max are for int and float"),
        ("fetures:\n  a: {type: int}\n", "line 1: fetures: .*Did you mean 'features'"),
        ("features: [\n", "is not YAML"),
        ("", "line 1: the file"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_schema_is_told_by_its_line(tmp_path, text, message):
    file = tmp_path / "s.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_schema(file)


def test_errors_are_raised_together_and_warnings_are_not():
    warning = Anomaly("A", "x", "train", "warning", "hm.")
    raise_errors([warning])
    errors = [Anomaly("B", "y", "test", "error", "bad."), Anomaly("C", "z", "train", "error", "worse.")]
    with pytest.raises(DataError) as raised:
        raise_errors([warning, *errors])
    assert str(raised.value).splitlines() == [
        "The data is not fit to train on (2 errors):",
        "  test split, 'y': bad. [B]",
        "  train split, 'z': worse. [C]",
    ]
