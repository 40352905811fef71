from __future__ import annotations

import dataclasses
import pickle
import warnings
from typing import Any

import keras
import numpy as np
import pyarrow as pa
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
from components.statistics.builder import MAX_SLICES
from components.statistics.counts import TopCounts
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
    assert builder._features["word"]._top.size <= 24


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


LISTS = ExamplesInfo(
    {"ids": Feature("int", (None,)), "prices": Feature("float", (None,)), "tags": Feature("string", (None,))},
    "ids",
    "multiclass",
    None,
    {},
)
ROWS: dict[str, list[Any]] = {
    "ids": [[1, 2, 2], [], None, [0]],
    "prices": [[1.5], [2.0, 4.0], None, []],
    "tags": [["a", "bcd"], ["a"], [], None],
}


def _lists() -> StatisticsBuilder:
    return StatisticsBuilder(LISTS, text_features=[], max_top_values=10, num_quantiles=4)


def test_lists_are_counted_without_their_padding():
    builder = _lists()
    builder.update(
        {
            "ids": np.array([[1, 2, 2], [MISSING_INT] * 3, [MISSING_INT] * 3, [0, MISSING_INT, MISSING_INT]]),
            "prices": np.array([[1.5, np.nan], [2, 4], [np.nan, np.nan], [np.nan, np.nan]], np.float32),
            "tags": np.array([[b"a", b"bcd"], [b"a", b""], [b"", b""], [b"", b""]], object),
        }
    )
    found = builder.finish()
    assert (found["ids"].count, found["ids"].missing, found["ids"].zeros) == (4, 2, 1)
    assert found["ids"].top_values == ((2, 2), (0, 1), (1, 1))
    assert [getattr(found["ids"], f"{name}_num_values") for name in ("min", "max", "mean")] == [1, 3, 2.0]
    assert found["prices"].mean == pytest.approx(2.5)
    assert (found["prices"].missing, found["prices"].mean_num_values) == (2, 1.5)
    assert (found["tags"].missing, found["tags"].top_values) == (2, (("a", 2), ("bcd", 1)))
    assert (found["tags"].min_length_bytes, found["tags"].max_length_bytes) == (1, 3)
    assert found["tags"].mean_length_bytes == pytest.approx(5 / 3)


def test_a_row_of_several_texts_is_one_document():
    info = ExamplesInfo({"t": Feature("string", (None,))}, "t", "binary", None, {})
    padded, direct = (StatisticsBuilder(info, text_features=["t"], max_top_values=9, num_quantiles=4) for _ in range(2))
    padded.update({"t": np.array([[b"a b", b"a"], [b"", b""], [b"b", b""]], object)})
    direct.update_arrow(pa.record_batch({"t": [["a b", "a"], None, ["b"]]}))
    found = padded.finish()["t"]
    assert (found.count, found.missing, found.num_tokens) == (3, 1, 4)
    assert found.top_tokens == (("a", 2, 1), ("b", 2, 2))
    assert (found.max_num_values, found.mean_num_values) == (2, 1.5)
    assert direct.finish()["t"] == found


def test_arrow_lists_give_what_padded_arrays_give():
    padded, direct = _lists(), _lists()
    padded.update(
        {
            "ids": np.array([[1, 2, 2], [MISSING_INT] * 3, [MISSING_INT] * 3, [0, MISSING_INT, MISSING_INT]]),
            "prices": np.array([[1.5, np.nan], [2, 4], [np.nan, np.nan], [np.nan, np.nan]], np.float32),
            "tags": np.array([[b"a", b"bcd"], [b"a", b""], [b"", b""], [b"", b""]], object),
        }
    )
    direct.update_arrow(pa.record_batch(ROWS))
    assert direct.finish() == padded.finish()


def test_arrow_batches_give_what_arrays_give():
    data, builder = _data(), _builder()
    columns = {
        "n": pa.array(data["n"], mask=data["n"] == MISSING_INT),
        "x": pa.array(data["x"].astype(np.float64)),
        "word": pa.array(data["word"], mask=data["word"] == b"").dictionary_encode(),
        "text": pa.array([text.decode() or None for text in data["text"]]),
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(data["image"]),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(data["vector"].ravel()), 3),
    }
    whole = pa.record_batch(columns)
    for start in range(0, 500, 120):
        builder.update_arrow(whole.slice(start, 120))
    builder.update_arrow(whole.slice(0, 0))
    _assert_close(_statistics(data), builder.finish())


def test_weights_are_what_repeated_rows_are():
    rng = np.random.default_rng(3)
    info = ExamplesInfo({name: FEATURES[name] for name in ("n", "x", "word")}, "n", "multiclass", None, {})
    info = dataclasses.replace(info, features={**info.features, "w": Feature("int")})
    rows = {name: values for name, values in _data().items() if name in info.features}
    rows["w"] = rng.integers(0, 4, 500)
    settings: dict[str, Any] = {"text_features": [], "max_top_values": 100, "num_quantiles": 10}
    weighted, repeated = StatisticsBuilder(info, weight="w", **settings), StatisticsBuilder(info, **settings)
    for start in (0, 250):
        weighted.update({name: values[start : start + 250] for name, values in rows.items()})
    repeated.update({name: np.repeat(values, rows["w"]) for name, values in rows.items()})
    found, expected = weighted.finish(), repeated.finish()
    for name in ("n", "x", "word"):
        side, truth = found[name].weighted, expected[name]
        assert side is not None
        assert (side.count, side.missing, side.zeros) == (truth.count, truth.missing, truth.zeros)
        assert (side.mean, side.std) == (pytest.approx(truth.mean), pytest.approx(truth.std))
        assert side.quantiles == truth.quantiles
        assert side.top_values == truth.top_values
        assert truth.weighted is None
    assert found["x"].mean == pytest.approx(np.nanmean(rows["x"].astype(np.float64)))
    assert from_json(to_json({"a": found})) == {"a": found}


def test_arrow_batches_are_sliced_as_arrays_are():
    data = _data()
    settings: dict[str, Any] = {"text_features": [], "max_top_values": 9, "num_quantiles": 4, "slices": ["n", "word"]}
    arrays, direct = StatisticsBuilder(INFO, **settings), StatisticsBuilder(INFO, **settings)
    columns = {name: data[name] for name in ("n", "x", "word")}
    arrays.update(columns)
    table = {"n": pa.array(data["n"]), "x": pa.array(data["x"]), "word": pa.array(data["word"]).dictionary_encode()}
    direct.update_arrow(pa.record_batch(table))
    assert direct.finish_slices() == arrays.finish_slices()


def test_numbers_that_are_no_integers_are_not_cut_off():
    with pytest.raises(pa.ArrowInvalid, match="truncated"):
        _builder().update_arrow(pa.record_batch({"n": pa.array([1.5])}))


@pytest.mark.parametrize("weight", [np.nan, -1.0, np.inf])
def test_a_row_without_a_weight_is_an_error(weight):
    builder = StatisticsBuilder(INFO, text_features=[], max_top_values=9, num_quantiles=4, weight="x")
    with pytest.raises(DataError, match="1 rows have a 'x' that is missing, negative or infinite"):
        builder.update({"x": np.array([1, weight], np.float32)})
    with pytest.raises(DataError, match="1 rows have a 'x' that is missing, negative or infinite"):
        builder.update_arrow(pa.record_batch({"x": pa.array([1, weight])}))


def _sliced(batch: dict[str, np.ndarray], pieces: list[np.ndarray]) -> StatisticsBuilder:
    builders = []
    for rows in pieces:
        builder = StatisticsBuilder(INFO, text_features=[], max_top_values=9, num_quantiles=4, slices=["n", "word"])
        builder.update({name: values[rows] for name, values in batch.items()})
        builders.append(StatisticsBuilder.from_bytes(builder.to_bytes()))
    for other in builders[1:]:
        builders[0].merge(other)
    return builders[0]


def test_each_slice_has_the_statistics_of_its_rows():
    data = _data()
    found = _sliced(data, [np.arange(500)]).finish_slices()
    assert {name for name in found if name.startswith("word=")} == {"word=blue", "word=red", r"word=\xff\xfe"}
    assert "n=-3" in found
    assert f"n={MISSING_INT}" not in found
    chosen = data["x"][data["word"] == b"red"].astype(np.float64)
    assert found["word=red"]["x"].count == len(chosen)
    assert found["word=red"]["x"].mean == pytest.approx(np.nanmean(chosen))


def test_the_same_slices_remain_however_rows_are_parted():
    rng = np.random.default_rng(5)
    data = {"n": rng.integers(0, 3 * MAX_SLICES, 900), "x": rng.normal(size=900).astype(np.float32)}
    whole = _sliced(data, [np.arange(900)]).finish_slices()
    parted = _sliced(data, np.array_split(rng.permutation(900), 4)).finish_slices()
    assert list(whole) == [f"n={value}" for value in range(MAX_SLICES)]
    assert list(parted) == list(whole)
    for name, found in whole.items():
        _assert_close(found, parted[name])


@pytest.mark.parametrize("seed", range(4))
def test_any_partition_in_any_order_through_bytes_gives_the_same(seed):
    rng = np.random.default_rng(seed)
    data = _data()
    owners = rng.integers(0, 5, 500)
    builders = []
    for owner in rng.permutation(5):
        builder = _builder()
        builder.update({name: values[owners == owner] for name, values in data.items()})
        builders.append(StatisticsBuilder.from_bytes(builder.to_bytes()))
    for other in builders[1:]:
        builders[0].merge(other)
    _assert_close(_statistics(data), builders[0].finish())


@pytest.mark.parametrize("state", [b"", b"nonsense", pickle.dumps([1, 2]), pickle.dumps(warnings.warn)])
def test_bytes_that_are_no_statistics_are_refused(state):
    with pytest.raises(DataError, match=r"no state of statistics.*Compute it again"):
        StatisticsBuilder.from_bytes(state)


def test_counts_beyond_the_bound_are_within_the_error_that_is_told():
    rng = np.random.default_rng(0)
    values = rng.zipf(1.3, 200_000) % 50_000
    truth = dict(zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True))
    parts = []
    for piece in np.array_split(values, 4):
        counts = TopCounts(500, "int64")
        for batch in np.array_split(piece, 5):
            counted = pa.array(batch).value_counts()
            counts.update(counted.field("values"), counted.field("counts"))
        parts.append(counts)
    for other in parts[1:]:
        parts[0].merge(other)
    top = parts[0].finish()
    assert 0 < parts[0].max_error < 200
    assert all(truth[value] - parts[0].max_error <= count <= truth[value] for value, count in top)
    assert [value for value, _ in top[:20]] == sorted(truth, key=lambda value: (-truth[value], value))[:20]
    assert parts[0].num_unique == pytest.approx(len(truth), rel=0.03)


def test_distinct_values_do_not_depend_on_the_order_of_rows():
    values = np.arange(120_000)
    found = []
    for order in (values, values[::-1], np.random.default_rng(1).permutation(values)):
        counts = TopCounts(50, "int64")
        for batch in np.array_split(order, 7):
            counts.update(pa.array(batch), pa.array(np.ones(len(batch), np.int64)))
        found.append(counts.num_unique)
    assert found == [found[0]] * 3
    assert found[0] == pytest.approx(120_000, rel=0.03)


@pytest.mark.parametrize("values", [[1.0, 2, 2, 5, 9], [3.0, 3, 3], [-3e38, 3e38, 0], [1.0, np.inf, 2, -np.inf, 3]])
def test_histograms_are_those_of_numpy(values):
    array = np.array(values, np.float32).astype(np.float64)
    finite = array[np.isfinite(array)]
    found = _numbers(values).histogram
    assert sum(count for _, _, count in found) == len(finite)
    assert (found[0][0], found[-1][1]) == (finite.min(), finite.max())
    if finite.min() < finite.max():
        expected, _ = np.histogram(finite / 4, bins=10)
        assert [count for _, _, count in found] == expected.tolist()


def test_the_same_rows_give_the_same_bytes_beyond_the_bound():
    values = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    texts = []
    for _ in range(2):
        builder = _builder(max_exact_values=1_000, max_top_values=5)
        for start in range(0, len(values), 700):
            part = values[start : start + 700]
            builder.update({"x": part, "n": (part * 1e6).astype(np.int64)})
        texts.append(to_json({"train": builder.finish()}))
    assert texts[0] == texts[1]
