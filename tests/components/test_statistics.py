from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components.errors import DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.statistics import (
    FeatureStatistics,
    Statistics,
    StatisticsBuilder,
    class_values,
    from_json,
    load_statistics,
    to_json,
)
from components.tokens import tokenize

TEXTS = [b"Hello, world! It's hello.", b"", "Ünder  the_bridge\n(hello)".encode(), b"...", b"a-b c"]
FEATURES = {
    "n": Feature("int"),
    "x": Feature("float"),
    "word": Feature("string"),
    "text": Feature("string"),
    "image": Feature("uint8", (4, 3, 2)),
    "vector": Feature("float", (3,)),
}
INFO = ExamplesInfo(FEATURES, "n", "multiclass", None, {})


def _data(rows: int = 500) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    n = rng.integers(-3, 9, rows)
    x = rng.lognormal(size=rows).astype(np.float32)
    n[::7], x[::5], x[1::50] = MISSING_INT, np.nan, 0
    return {
        "n": n,
        "x": x,
        "word": np.array([[b"", b"red", b"blue", b"red", b"\xff\xfe"][i % 5] for i in range(rows)], object),
        "text": np.array([TEXTS[i % 5] for i in range(rows)], object),
        "image": rng.integers(0, 200, (rows, 4, 3, 2)).astype(np.uint8),
        "vector": rng.normal(size=(rows, 3)).astype(np.float32),
    }


def _builder(max_top_values: int = 1000, num_quantiles: int = 20, **settings: int) -> StatisticsBuilder:
    sizes = {"max_top_values": max_top_values, "num_quantiles": num_quantiles, **settings}
    return StatisticsBuilder(INFO, text_features=["text"], **sizes)


def _statistics(batch: dict[str, np.ndarray], **settings: int) -> Statistics:
    builder = _builder(**settings)
    builder.update(batch)
    return builder.finish()


def _numbers(values: Any, kind: str = "float") -> FeatureStatistics:
    name = "x" if kind == "float" else "n"
    return _statistics({name: np.asarray(values, np.float32 if kind == "float" else np.int64)}, num_quantiles=1000)[
        name
    ]


def _words(*words: str) -> FeatureStatistics:
    return _statistics({"word": np.array([word.encode() for word in words], object)})["word"]


def test_numbers_are_what_numpy_says():
    data = _data()
    found = _statistics(data, num_quantiles=16)["x"]
    present = data["x"][~np.isnan(data["x"])].astype(np.float64)
    assert (found.count, found.missing, found.present) == (500, 100, 400)
    assert found.zeros == int((present == 0).sum()) > 0
    assert (found.min, found.max) == (present.min(), present.max())
    assert found.mean == pytest.approx(present.mean())
    assert found.std == pytest.approx(present.std())
    assert found.log1p_mean == pytest.approx(np.log1p(present).mean())
    assert found.log1p_std == pytest.approx(np.log1p(present).std())
    ranks = np.arange(17) / 16
    np.testing.assert_array_equal(found.quantiles, np.quantile(present, ranks, method="inverted_cdf"))


def test_integers_and_values():
    data = _data()
    found = _statistics(data)["n"]
    present = data["n"][data["n"] != MISSING_INT]
    values, counts = np.unique(present, return_counts=True)
    expected = sorted(zip(values.tolist(), counts.tolist(), strict=True), key=lambda item: (-item[1], item[0]))
    assert list(found.top_values) == expected
    assert found.num_unique == len(values)
    assert found.mean == pytest.approx(present.mean())
    assert found.log1p_mean is None
    assert found.log1p_std is None


def test_strings_and_images_and_tensors():
    data = _data()
    found = _statistics(data)
    assert found["word"].top_values == (("red", 200), ("blue", 100), ("\udcff\udcfe", 100))
    assert (found["word"].missing, found["word"].num_unique, found["word"].mean_length_bytes) == (100, 3, 3.0)
    pixels = data["image"].reshape(-1, 2).astype(np.float64)
    assert found["image"].channel_mean == pytest.approx(pixels.mean(axis=0))
    assert found["image"].channel_std == pytest.approx(pixels.std(axis=0))
    assert (found["image"].min, found["image"].max, found["image"].shape) == (0, 199, (4, 3, 2))
    assert found["vector"].mean == pytest.approx(data["vector"].astype(np.float64).mean())
    assert (found["vector"].count, found["vector"].missing) == (500, 0)


def test_words_are_those_of_text_vectorization():
    layer = keras.layers.TextVectorization()
    layer.adapt(TEXTS)
    found = _statistics({"text": np.array(TEXTS, object)})["text"]
    assert {token for token, _, _ in found.top_tokens} == set(layer.get_vocabulary()[2:])
    assert found.top_tokens[0] == ("hello", 3, 2)
    assert found.num_tokens == sum(count for _, count, _ in found.top_tokens) == 9
    assert found.missing == 1
    assert tokenize(tf.constant(TEXTS))[0].numpy().tolist() == [b"hello", b"world", b"its", b"hello"]


def _assert_close(a: Statistics, b: Statistics) -> None:
    for name in a:
        for field, value in dataclasses.asdict(a[name]).items():
            other = getattr(b[name], field)
            if isinstance(value, float) or "channel" in field:
                assert other == pytest.approx(value, rel=1e-9), (name, field)
            else:
                assert other == value, (name, field)


@pytest.mark.parametrize("size", [1, 33, 500])
def test_any_chunks_and_any_merge_give_the_same(size):
    data = _data()
    builders = [_builder() for _ in range(3)]
    for number, start in enumerate(range(0, 500, size)):
        builders[number % 3].update({name: values[start : start + size] for name, values in data.items()})
    builders[0].merge(builders[1])
    builders[0].merge(builders[2])
    _assert_close(_statistics(data), builders[0].finish())


def test_quantiles_stay_close_and_small_beyond_a_bound():
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    builder = _builder(num_quantiles=100, max_exact_values=10_000)
    for start in range(0, len(values), 3000):
        builder.update({"x": values[start : start + 3000]})
    quantiles = np.array(builder.finish()["x"].quantiles)
    ranks = np.searchsorted(np.sort(values), quantiles) / len(values)
    assert abs(ranks - np.arange(101) / 100).max() < 0.005
    assert (quantiles[0], quantiles[-1]) == (values.min(), values.max())
    assert builder._features["x"]._quantiles._size <= 10_000


def test_the_most_frequent_values_survive_a_bound():
    words = [b"often"] * 50 + [b"rare%d" % i for i in range(500)] + [b"often"] * 50
    builder = _builder(max_top_values=3)
    for start in range(0, 600, 20):
        builder.update({"word": np.array(words[start : start + 20], object)})
    found = builder.finish()["word"]
    assert len(found.top_values) == 3
    assert found.top_values[0] == ("often", 100)
    assert len(builder._features["word"]._top._counts) <= 24


def test_every_class_of_the_label_is_kept():
    labels = np.arange(50)
    assert len(_statistics({"n": labels}, max_top_values=1)["n"].top_values) == 50


def test_infinite_values_are_counted_and_kept_out_of_the_mean():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = _numbers([1.0, np.inf, 3.0, -np.inf])
    assert (found.num_infinite, found.mean, found.min, found.max) == (2, 2.0, -np.inf, np.inf)


def test_json_and_back(tmp_path):
    found = {"train": _statistics(_data())}
    assert from_json(to_json(found)) == found
    (tmp_path / "statistics.json").write_text(to_json(found))
    assert load_statistics(tmp_path) == found


@pytest.mark.parametrize("content", [None, "{", '{"train": {"x": {"colour": 1}}}'])
def test_damaged_statistics(tmp_path, content):
    if content is not None:
        (tmp_path / "statistics.json").write_text(content)
    with pytest.raises(DataError, match=r"statistics.json cannot be read"):
        load_statistics(tmp_path)


def test_class_values():
    label = {"n": _numbers([5, 3, 3], "int")}
    assert class_values(INFO, label) == [3, 5]
    assert class_values(dataclasses.replace(INFO, classes=("a", "b", "c")), label) == [0, 1, 2]
    named = dataclasses.replace(INFO, label="word", classes=("b", "a"))
    assert class_values(named, {"word": _words("a")}) == ["b", "a"]
