"""What operations cannot be fitted to is refused with the place and a way to mend it; defaults; needs of the statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from components import external
from components.config import ValidateConfig
from components.distances import distance
from components.errors import ConfigError, DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.statistics import StatisticsBuilder
from components.transform import default_operations, fit_all
from components.transform_config import TransformConfig, TransformNeeds, Vocabulary
from components.validate import _check_single
from pipelines.config import PipelineConfig
from pipelines.kubeflow import containers
from tests.conftest import PROJECT
from tests.pipelines import fakes

COLUMNS: dict[str, tuple[Feature, np.ndarray]] = {
    "amount": (Feature("float"), np.array([1, 2, 2, 9], np.float32)),
    "flat": (Feature("float"), np.array([2, 2, 2, 2], np.float32)),
    "none": (Feature("float"), np.full(4, np.nan, np.float32)),
    "endless": (Feature("float"), np.array([1, 2, 3, np.inf], np.float32)),
    "count": (Feature("int"), np.array([4, 4, MISSING_INT, 7])),
    "city": (Feature("string"), np.array([b"oslo", b"rome", b"oslo", b""], object)),
    "words": (Feature("string"), np.array([b"a b", b"a", b"c", b""], object)),
    "picture": (Feature("uint8", (2, 2, 1)), np.zeros((4, 2, 2, 1), np.uint8)),
    "vector": (Feature("float", (3,)), np.ones((4, 3), np.float32)),
    "scores": (Feature("float", (None,)), np.ones((4, 2), np.float32)),
    "tags": (Feature("string", (None,)), np.array([[b"x", b"y"]] * 4, object)),
    "codes": (Feature("int", (None,)), np.ones((4, 2), np.int64)),
    "label": (Feature("int"), np.array([0, 1, 0, 1])),
}
INFO = ExamplesInfo({name: feature for name, (feature, _) in COLUMNS.items()}, "label", "binary", None, {})


@pytest.fixture(scope="module")
def train() -> dict[str, Any]:
    builder = StatisticsBuilder(INFO, text_features=["words"], max_top_values=2, num_quantiles=8)
    builder.update({name: values for name, (_, values) in COLUMNS.items()})
    return builder.finish()


def config_of(**features: Any) -> TransformConfig:
    return TransformConfig.model_validate({"features": features})


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no_such_key": (
        {"op": "normalize", "input": "amount", "key": "ctiy"},
        DataError,
        "no row .* has both 'amount' and",
    ),
    "list_scaled": ({"op": "normalize", "input": "scores"}, ConfigError, "is a list whose length varies"),
    "tensor_indicator": (
        {"op": "log", "input": "vector", "missing_indicator": True},
        ConfigError,
        "is for single numbers",
    ),
    "min_max_of_nothing": ({"op": "min_max", "input": "none"}, DataError, "'none' has no values"),
    "min_max_of_infinity": ({"op": "min_max", "input": "endless"}, DataError, "has infinite values"),
    "robust_flat": ({"op": "robust", "input": "flat"}, DataError, "are both 2.0. Widen quantile_range"),
    "mode_of_floats": (
        {"op": "impute", "input": "amount", "impute": "most_frequent"},
        ConfigError,
        "most frequent value is known of integers and of strings",
    ),
    "mean_of_nothing": ({"op": "impute", "input": "none"}, DataError, "'none' has no values"),
    "bucketize_list": ({"op": "bucketize", "input": "scores"}, ConfigError, "takes single values"),
    "bucketize_flat": ({"op": "bucketize", "input": "flat"}, DataError, "nearly all values are 2.0"),
    "list_ids": ({"op": "vocabulary", "input": "tags"}, ConfigError, "output: multi_hot or count, or give .* a length"),
    "single_length": (
        {"op": "hash", "input": "city", "num_bins": 3, "length": 2},
        ConfigError,
        "is for lists, but 'city'",
    ),
    "image_ids": ({"op": "hash", "input": "picture", "num_bins": 3}, ConfigError, "takes int or string features"),
    "list_missing": (
        {"op": "vocabulary", "input": "tags", "missing": "category", "output": "count"},
        ConfigError,
        "missing: is for single values",
    ),
    "words_looked_up": (
        {"op": "vocabulary", "input": "words"},
        ConfigError,
        "its words are counted and not its values",
    ),
    "given_words": (
        {"op": "vocabulary", "input": "count", "vocabulary": ["four"]},
        ConfigError,
        "'four', is no integer",
    ),
    "given_twice": (
        {"op": "vocabulary", "input": "city", "vocabulary": ["a", "a"]},
        ConfigError,
        "a is there more than",
    ),
    "given_empty": ({"op": "vocabulary", "input": "city", "vocabulary": [""]}, ConfigError, "there is an empty value"),
    "no_file": (
        {"op": "vocabulary", "input": "city", "vocabulary_path": "/no/file"},
        ConfigError,
        "cannot be read as UTF-8",
    ),
    "text_list": ({"op": "text", "input": "tags"}, ConfigError, "takes single values, but 'tags'"),
    "rare_tokens": ({"op": "text", "input": "words", "min_count": 9}, DataError, "no token occurs 9 times"),
    "uncounted_tokens": (
        {"op": "text", "input": "words", "ngrams": 2},
        DataError,
        "do not count such tokens. Run validate",
    ),
    "zone_of_seconds": (
        {"op": "date", "input": "count", "parts": ["hour"], "zone": "written"},
        ConfigError,
        "seconds, which are UTC. Leave zone out",
    ),
    "undecoded": ({"op": "image", "input": "city"}, ConfigError, "need decode: true and size"),
    "decoded_twice": (
        {"op": "image", "input": "picture", "decode": True, "size": [2, 2]},
        ConfigError,
        "of type uint8. Leave decode out",
    ),
    "decoded_list": (
        {"op": "image", "input": "tags", "decode": True, "size": [2, 2]},
        ConfigError,
        r"has the shape \(\)",
    ),
    "cross_floats": ({"op": "cross", "inputs": ["amount", "city"], "num_bins": 5}, ConfigError, "such as bucketize"),
    "cross_unknown": ({"op": "cross", "inputs": ["city", "cuont"], "num_bins": 5}, ConfigError, "Did you mean 'count'"),
    "cross_scaled": (
        {"op": "cross", "inputs": ["city", "scaled"], "num_bins": 5},
        ConfigError,
        "gives float32 of shape",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fitted_is_refused_with_its_place(train: dict[str, Any], name: str) -> None:
    op, error, message = REFUSED[name]
    config = config_of(scaled={"op": "log", "input": "amount"}, **{name: op})
    with pytest.raises(error, match=rf"transform\.features\.{name}.*{message}"):
        fit_all(config.features, INFO, train)


UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "range": ({"op": "min_max", "range": [1, 1]}, "range must ascend"),
    "quantiles": ({"op": "robust", "quantile_range": [0.7, 0.2]}, "quantile_range must ascend"),
    "constant": ({"op": "impute", "impute": "constant"}, "impute: constant and fill_value belong together"),
    "fill": ({"op": "log", "fill_value": 3}, "impute: constant and fill_value belong together"),
    "buckets": ({"op": "bucketize", "boundaries": [1, 2], "num_buckets": 3}, "nothing reads num_buckets"),
    "order": ({"op": "bucketize", "boundaries": [2, 1]}, "must be finite and ascend"),
    "infinite": ({"op": "bucketize", "boundaries": [1, float("inf")]}, "must be finite and ascend"),
    "length": ({"op": "vocabulary", "output": "count", "length": 3}, "nothing reads length"),
    "places": ({"op": "vocabulary", "vocabulary": ["a"], "vocabulary_path": "b"}, "come from one place"),
    "min_count": ({"op": "vocabulary", "vocabulary": ["a"], "min_count": 2}, "nothing reads min_count"),
    "one": ({"op": "cross", "inputs": ["a"], "num_bins": 3}, "at least 2"),
    "cyclic_year": ({"op": "date", "parts": ["year"]}, "year has no end: give it with output: number"),
    "two_ids": ({"op": "date", "parts": ["hour", "day"], "output": "ids"}, "output: ids is of one part"),
    "since": ({"op": "date", "parts": ["hour"], "since": "2020-01-01"}, "nothing reads since"),
    "no_day": (
        {"op": "date", "parts": ["days_since"], "output": "number", "since": "2023-02-29"},
        "must be a day such as",
    ),
    "decode": ({"op": "image", "decode": True}, "decode needs size"),
    "channels": ({"op": "image", "channels": 1}, "nothing reads channels"),
    "salt": ({"op": "hash", "num_bins": 3, "salt": -1}, "greater than or equal to 0"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_options_without_sense_or_reader_are_refused(name: str) -> None:
    settings, message = UNREAD[name]
    with pytest.raises(ValidationError, match=message):
        config_of(x=settings)


def test_a_day_that_yaml_has_read_as_a_date_is_taken() -> None:
    import datetime

    op = {"op": "date", "parts": ["days_since"], "output": "number", "since": datetime.date(2013, 1, 1)}
    assert config_of(x=op).features["x"].since == "2013-01-01"


def test_every_feature_but_a_list_of_floats_has_a_default_operation(train: dict[str, Any]) -> None:
    defaults = default_operations(INFO)
    assert set(INFO.inputs) - set(defaults) == {"scores"}
    assert {name: op.op for name, op in defaults.items() if None in INFO.features[name].shape} == {
        "tags": "vocabulary",
        "codes": "vocabulary",
    }
    fitted = fit_all({name: defaults[name] for name in ("tags", "codes", "vector", "city")}, INFO, train)
    assert {name: op.output.shape for name, op in fitted.items()} == {
        "tags": (3,),
        "codes": (2,),
        "vector": (3,),
        "city": (1,),
    }


def test_a_vocabulary_of_a_file_is_read_and_watched(train: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "cities.txt"
    file.write_text("\ufeffrome\r\ncittà\n", "utf-8")
    config = config_of(city={"op": "vocabulary", "vocabulary_path": str(file)})
    (op,) = fit_all(config.features, INFO, train).values()
    assert op.params["vocabulary"] == ["rome", "città"]
    before = external.state("transform", config, {})
    file.write_text("rome\n")
    after = external.state("transform", config, {})
    assert set(before) == {"vocabulary of city"} and before != after
    assert external.state("transform", config_of(city={"op": "vocabulary"}), {}) == {}


def test_a_container_sees_the_file_of_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cities.txt").write_text("rome\n")
    features = {"city": {"op": "vocabulary", "vocabulary_path": "cities.txt"}}
    settings = fakes.settings(transform={"features": features}, push={"destination": "pushed"})
    config = containers.with_absolute_paths(PipelineConfig.model_validate(settings))
    assert config.transform.vocabulary_paths == {"city": f"{tmp_path}/cities.txt"}
    assert (f"{tmp_path}/cities.txt", True) in containers._mounts(config)


def test_the_example_of_the_docs_is_a_config(tmp_path: Path) -> None:
    docs = (PROJECT / "docs/transform.md").read_text()
    example = yaml.safe_load(docs.rpartition("```yaml\n")[2].partition("```")[0])
    default = yaml.safe_load((PROJECT / "configs/chicago_taxi.yaml").read_text())
    default["data"] |= example["data"]
    config = PipelineConfig.model_validate({**default, "transform": example["transform"]})
    assert len(config.transform.features) == 18
    assert {op.op for op in config.transform.features.values()} >= {"date", "cross", "min_max", "robust"}


def test_the_statistics_are_told_what_the_operations_need_once() -> None:
    features = {
        "a": {"op": "text", "input": "words"},
        "b": {"op": "text", "input": "words", "ngrams": 2, "output": "tf_idf"},
        "c": {"op": "text", "input": "words", "ngrams": 2, "output": "count"},
        "d": {"op": "normalize", "input": "amount", "key": "city"},
        "e": {"op": "normalize", "input": "amount", "key": "city", "log": True},
        "amount": {"op": "normalize"},
        "photo": {"op": "image", "decode": True, "size": [2, 2]},
    }
    config = PipelineConfig.model_validate(fakes.settings(transform={"features": features}))
    received: ValidateConfig = config.step_config("validate")
    assert received.text_features == ["words", "words", "words"]
    assert [(each.feature, each.tokenization.ngrams) for each in received.needs.tokens] == [("words", 2)]
    assert [(each.number, each.key) for each in received.needs.moments] == [("amount", "city")]
    assert received.needs.files == ["photo"]


def test_of_files_no_value_is_kept_and_no_distance_told() -> None:
    info = ExamplesInfo({"photo": Feature("string"), "label": Feature("int")}, "label", "binary", None, {})
    builders = [
        StatisticsBuilder(
            info, text_features=[], max_top_values=9, num_quantiles=4, needs=TransformNeeds(files=["photo"])
        )
        for _ in range(2)
    ]
    for builder, files in zip(builders, ([b"\xff\xd8", b""], [b"\x89PNG"]), strict=True):
        builder.update({"photo": np.array(files, object)})
    builders[0].merge(builders[1])
    found = builders[0].finish()["photo"]
    assert (found.count, found.missing, found.mean_length_bytes) == (3, 1, 3.0)
    assert (found.top_values, found.num_invalid_utf8, found.num_unique) == ((), 0, None)
    assert distance(found, found) is None


@pytest.mark.parametrize(
    ("name", "types", "message"),
    [
        ("ctiy", ("string",), "reads 'ctiy', which the data lacks. Did you mean 'city'"),
        ("amount", ("int", "string"), "takes 'amount' as a single int or string, but it is float"),
        ("tags", ("string",), "single string, but it is string of shape"),
    ],
)
def test_moments_by_key_want_a_number_and_a_key(name: str, types: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _check_single(INFO, name, types)


def test_more_tokens_than_the_statistics_keep_are_refused() -> None:
    config = config_of(words={"op": "text", "max_tokens": 5, "ngrams": 2})
    builder = StatisticsBuilder(INFO, text_features=["words"], max_top_values=2, num_quantiles=8, needs=config.needs)
    builder.update({"words": COLUMNS["words"][1]})
    train = builder.finish()
    with pytest.raises(ConfigError, match=r"words\.max_tokens: 3 values are wanted .* more than the 2 that"):
        fit_all(config.features, INFO, train)
    fewer = config_of(words={"op": "text", "max_tokens": 4, "ngrams": 2})
    assert fit_all(fewer.features, INFO, train)["words"].params["vocabulary"] == ["a", "a b"]


def test_vocabulary_sizes_follow_the_oov_buckets_and_the_category_of_missing_values(train: dict[str, Any]) -> None:
    ops = {
        "plain": Vocabulary(op="vocabulary", input="city"),
        "oov": Vocabulary(op="vocabulary", input="city", num_oov_buckets=4),
        "own": Vocabulary(op="vocabulary", input="city", missing="category"),
    }
    sizes = {name: op.output.num_categories for name, op in fit_all(ops, INFO, train).items()}
    assert sizes == {"plain": 3, "oov": 6, "own": 4}
