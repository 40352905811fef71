"""Each operation against numpy or Python on edge values; eagerly, in tf.data and in the exported signature alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components.config import ExportConfig
from components.examples import MISSING_INT, ExamplesInfo
from components.export import write_saved_model
from components.formats import Network, convert_onnx, convert_tflite, load_runner
from components.preprocessing import CONVERTIBLE_OPS, OPS, Preprocessing
from components.statistics import StatisticsBuilder, from_json, to_json
from components.transform import fit_all
from components.transform_config import TransformConfig
from tests.components.operations_truth import (
    AMOUNT,
    CITIES,
    CODES,
    COUNT,
    EDGES,
    FEATURES,
    INFO,
    LOG,
    MISSING,
    PARTS,
    TAGS,
    TRAIN,
    C,
    F,
    N,
    X,
    as_texts,
    bins,
    bucketed,
    by_key,
    column,
    crossed,
    dates,
    decoded,
    filled,
    halved,
    looked_up,
    masked,
    min_max,
    normalized,
    of_lists,
    one_hot,
    padded,
    quantile,
    robust,
    texts,
)

CASES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "normalize": (
        {"op": "normalize", "input": "amount", "missing_indicator": True},
        np.stack([normalized(X, AMOUNT), MISSING], axis=1),
    ),
    "normalize_int": ({"op": "normalize", "input": "count"}, column(normalized(C, COUNT))),
    "normalize_log": ({"op": "normalize", "input": "amount", "log": True}, column(normalized(LOG, np.log1p(AMOUNT)))),
    "normalize_constant": (
        {"op": "normalize", "input": "amount", "impute": "constant", "fill_value": 8.0},
        column(normalized(filled(EDGES["amount"], 8.0), AMOUNT)),
    ),
    "normalize_vector": (
        {"op": "normalize", "input": "vector"},
        normalized(masked(EDGES["vector"]), masked(TRAIN["vector"])),
    ),
    "by_city": ({"op": "normalize", "input": "amount", "key": "city"}, by_key()),
    "min_max": ({"op": "min_max", "input": "amount"}, min_max(0, 1, clip=True)),
    "min_max_wide": (
        {"op": "min_max", "input": "amount", "range": [-1, 3], "clip": False},
        min_max(-1, 3, clip=False),
    ),
    "robust": ({"op": "robust", "input": "amount"}, robust(0.25, 0.75)),
    "robust_wide": ({"op": "robust", "input": "amount", "quantile_range": [0.1, 0.9]}, robust(0.1, 0.9)),
    "log": ({"op": "log", "input": "amount"}, column(np.nan_to_num(LOG, nan=0.0, posinf=np.inf))),
    "impute_mean": ({"op": "impute", "input": "amount"}, column(filled(EDGES["amount"], float(np.nanmean(AMOUNT))))),
    "impute_median": (
        {"op": "impute", "input": "amount", "impute": "median", "missing_indicator": True},
        np.stack([filled(EDGES["amount"], quantile(AMOUNT, 0.5)), MISSING], axis=1),
    ),
    "impute_mode": ({"op": "impute", "input": "count", "impute": "most_frequent"}, column(filled(EDGES["count"], 4))),
    "buckets": (
        {"op": "bucketize", "input": "amount", "num_buckets": 4},
        bucketed([quantile(AMOUNT, q) for q in (0.25, 0.5, 0.75)]),
    ),
    "boundaries": ({"op": "bucketize", "input": "amount", "boundaries": [-1, 0, 2.5]}, bucketed([-1, 0, 2.5])),
    "city": ({"op": "vocabulary"}, looked_up(EDGES["city"], CITIES)[:, np.newaxis]),
    "city_top": (
        {"op": "vocabulary", "input": "city", "max_tokens": 2, "num_oov_buckets": 3},
        looked_up(EDGES["city"], CITIES[:2], 3)[:, np.newaxis],
    ),
    "city_frequent": (
        {"op": "vocabulary", "input": "city", "min_count": 2, "missing": "category"},
        np.where(EDGES["city"] == b"", 4, looked_up(EDGES["city"], CITIES[:3]))[:, np.newaxis],
    ),
    "city_imputed": (
        {"op": "vocabulary", "input": "city", "missing": "most_frequent"},
        looked_up(np.where(EDGES["city"] == b"", b"oslo", EDGES["city"]), CITIES)[:, np.newaxis],
    ),
    "city_given": (
        {"op": "vocabulary", "input": "city", "vocabulary": ["OSLO", "oslo"], "output": "multi_hot"},
        one_hot(looked_up(EDGES["city"], [b"OSLO", b"oslo"]), 3),
    ),
    "code": ({"op": "vocabulary"}, looked_up(EDGES["code"], CODES)[:, np.newaxis]),
    "code_oov": (
        {"op": "vocabulary", "input": "code", "num_oov_buckets": 2, "vocabulary": [-1, 8]},
        looked_up(EDGES["code"], [-1, 8], 2)[:, np.newaxis],
    ),
    "tags": (
        {"op": "vocabulary", "output": "multi_hot"},
        of_lists(lambda v: looked_up(v, TAGS), "tags", 4, binary=True),
    ),
    "tags_count": (
        {"op": "vocabulary", "input": "tags", "output": "count", "num_oov_buckets": 2},
        of_lists(lambda v: looked_up(v, TAGS, 2), "tags", 5, binary=False),
    ),
    "tags_ids": (
        {"op": "vocabulary", "input": "tags", "length": 7},
        padded(lambda v: looked_up(v, TAGS), "tags", 7),
    ),
    "tags_short": ({"op": "vocabulary", "input": "tags", "length": 2}, padded(lambda v: looked_up(v, TAGS), "tags", 2)),
    "numbers": (
        {"op": "vocabulary", "output": "count"},
        of_lists(lambda v: looked_up(v, [5, 6, 7]), "numbers", 4, binary=False),
    ),
    "tags_hashed": (
        {"op": "hash", "input": "tags", "num_bins": 5, "output": "multi_hot"},
        of_lists(lambda v: bins(v.tolist(), 5)[:, 0], "tags", 5, binary=True),
    ),
    "hash": ({"op": "hash", "input": "city", "num_bins": 7}, bins(as_texts("city"), 7)),
    "hash_salted": ({"op": "hash", "input": "city", "num_bins": 7, "salt": 3}, bins(as_texts("city"), 7, 3)),
    "hash_int": ({"op": "hash", "input": "code", "num_bins": 7, "salt": 9}, bins(as_texts("code"), 7, 9)),
    "cross": (
        {"op": "cross", "inputs": ["city", "code", "boundaries"], "num_bins": 50, "salt": 1},
        bins(
            crossed(
                as_texts("city"), as_texts("code"), [str(b).encode() for b in bucketed([-1, 0, 2.5])[:, 0].tolist()]
            ),
            50,
            1,
        ),
    ),
    "words": ({"op": "text", "length": 3}, texts("ids")),
    "words_tf_idf": ({"op": "text", "input": "words", "output": "tf_idf"}, texts("tf_idf")),
    "words_multi_hot": (
        {"op": "text", "input": "words", "output": "multi_hot", "min_count": 2},
        texts("multi_hot", min_count=2),
    ),
    "bigrams_tf_idf": ({"op": "text", "input": "words", "output": "tf_idf", "ngrams": 2}, texts("tf_idf", ngrams=2)),
    "cased": (
        {"op": "text", "input": "words", "output": "count", "standardize": "none"},
        texts("count", lower=False, strip=False),
    ),
    "stripped": (
        {"op": "text", "input": "words", "length": 3, "standardize": "strip_punctuation"},
        texts("ids", lower=False),
    ),
    "lowered": ({"op": "text", "input": "words", "length": 3, "standardize": "lower"}, texts("ids", strip=False)),
    "characters": (
        {"op": "text", "input": "words", "output": "count", "split": "character", "ngrams": 2},
        texts("count", characters=True, ngrams=2),
    ),
    "date_cyclic": (
        {"op": "date", "input": "when", "parts": ["month", "weekday", "hour"], "missing_indicator": True},
        dates("when", ["month", "weekday", "hour"], "cyclic", indicator=True),
    ),
    "date_number": (
        {"op": "date", "input": "when", "parts": list(PARTS), "output": "number", "since": "2013-01-01"},
        dates("when", list(PARTS), "number"),
    ),
    "date_written": (
        {"op": "date", "input": "when", "parts": ["day", "hour"], "output": "number", "zone": "written"},
        dates("when", ["day", "hour"], "number", written=True),
    ),
    "date_ids": (
        {"op": "date", "input": "when", "parts": ["day_of_year"], "output": "ids"},
        dates("when", ["day_of_year"], "ids"),
    ),
    "stamp": (
        {"op": "date", "parts": ["year", "month", "day", "minute"], "output": "number"},
        dates("stamp", ["year", "month", "day", "minute"], "number"),
    ),
    "moment": ({"op": "date", "parts": ["hour"], "output": "ids"}, dates("moment", ["hour"], "ids")),
    "picture": (
        {"op": "image", "size": [2, 2], "mean": [0.5], "std": [0.25]},
        ((halved(EDGES["picture"]) - 0.5) / 0.25).astype(F),
    ),
    "file": (
        {"op": "image", "decode": True, "size": [2, 2], "mean": [0.5], "std": [0.25, 0.5, 1.0]},
        decoded(),
    ),
}
LISTS = [name for name, (op, _) in CASES.items() if op.get("input", name) in ("tags", "numbers")]
SINGLES = [name for name in CASES if name not in LISTS]


def fitted(names: list[str]) -> Preprocessing:
    """Fitted as the steps do it: by way of the statistics' file."""
    config = TransformConfig.model_validate({"features": {name: CASES[name][0] for name in names}})
    builder = StatisticsBuilder(
        INFO, text_features=config.text_features, max_top_values=100, num_quantiles=1000, needs=config.needs
    )
    builder.update(TRAIN)
    statistics = from_json(to_json({"train": builder.finish()}))["train"]
    used = {name: feature for name, feature in FEATURES.items() if names == list(CASES) or None not in feature.shape}
    info = ExamplesInfo(used, "label", "binary", None, {"train": N})
    return Preprocessing(info, fit_all(config.features, info, statistics), [0, 1])


@pytest.fixture(scope="module")
def preprocessing(tmp_path_factory: pytest.TempPathFactory) -> Preprocessing:
    """Every case, written and read again."""
    path = tmp_path_factory.mktemp("transform")
    made = fitted(list(CASES))
    made.save(path)
    loaded = Preprocessing.load(path)
    assert loaded.fitted == made.fitted
    return loaded


@pytest.fixture(scope="module")
def eager(preprocessing: Preprocessing) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in preprocessing(tensors(preprocessing, slice(None))).items()}


def tensors(preprocessing: Preprocessing, rows: slice) -> dict[str, tf.Tensor]:
    return {name: tf.constant(EDGES[name][rows]) for name in preprocessing.raw_inputs}


def assert_same(found: Any, expected: np.ndarray) -> None:
    if expected.dtype.kind == "f":
        # The last digit may differ where a graph is vectorised otherwise.
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_the_truth_on_edge_values(preprocessing: Preprocessing, eager: dict[str, np.ndarray], name: str) -> None:
    found, expected = eager[name], CASES[name][1]
    spec = preprocessing.input_spec[name]
    assert found.shape == expected.shape == (N, *spec.shape)
    assert found.dtype == spec.dtype
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=2e-2 if name == "file" else 2e-6)
    if spec.num_categories is not None:
        assert found.min() >= 0 and found.max() < spec.num_categories


def test_every_operation_has_a_case(preprocessing: Preprocessing) -> None:
    assert {op.op for op in preprocessing.fitted.values()} == set(OPS)


def test_tf_data_gives_the_same_for_none_one_and_many(
    preprocessing: Preprocessing, eager: dict[str, np.ndarray]
) -> None:
    sizes = [0, 1, N]
    batches = [tensors(preprocessing, slice(0, size)) for size in sizes]
    dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=preprocessing.raw_signature())
    dataset = dataset.map(preprocessing)
    for size, batch in zip(sizes, dataset, strict=True):
        for name, found in batch.items():
            assert_same(found.numpy(), eager[name][:size])
            assert dataset.element_spec[name].shape[1:] == preprocessing.input_spec[name].shape


@pytest.mark.parametrize("size", [0, N])
def test_a_split_in_memory_gives_the_same(
    preprocessing: Preprocessing, eager: dict[str, np.ndarray], size: int
) -> None:
    raw = {name: EDGES[name][:size] for name in preprocessing.raw_inputs}
    for name, found in preprocessing.transform_in_batches(raw, batch_size=5).items():
        assert_same(found, eager[name][:size])


@pytest.fixture(scope="module")
def signature(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The `transform` signature of an exported model."""
    made, path = fitted(SINGLES), tmp_path_factory.mktemp("export") / "saved_model"
    inputs = {name: keras.Input(spec.shape, dtype=spec.dtype, name=name) for name, spec in made.input_spec.items()}
    network = keras.Model(inputs, keras.layers.Dense(1)(inputs["min_max"]))
    raw = {name: EDGES[name][:4] for name in made.raw_inputs}
    write_saved_model(made, network, path, ExportConfig(num_warmup_examples=0), raw)
    return tf.saved_model.load(str(path)).signatures["transform"]


@pytest.mark.parametrize("size", [0, 1, N])
def test_the_exported_signature_gives_the_same(signature: Any, eager: dict[str, np.ndarray], size: int) -> None:
    names = signature.structured_input_signature[1]
    found = signature(**{name: tf.constant(EDGES[name][:size]) for name in names})
    assert sorted(found) == sorted(SINGLES)
    for name, values in found.items():
        assert_same(values.numpy(), eager[name][:size])


CONVERTIBLE = [
    name for name, (op, _) in CASES.items() if op["op"] in CONVERTIBLE_OPS and name not in ("file", "by_city")
]


@pytest.mark.parametrize("name", CASES)
def test_what_reads_strings_or_looks_up_is_not_convertible(preprocessing: Preprocessing, name: str) -> None:
    needed = {
        i: preprocessing.fitted[i] for i in preprocessing.fitted[name].inputs if i not in preprocessing.info.inputs
    }
    alone = Preprocessing(preprocessing.info, {name: preprocessing.fitted[name], **needed}, [0, 1])
    assert alone.is_convertible == (name in CONVERTIBLE)


@pytest.mark.parametrize(
    ("convert", "suffix"), [(convert_tflite, "tflite"), (convert_onnx, "onnx")], ids=["tflite", "onnx"]
)
def test_plain_runtimes_run_the_convertible_operations(
    preprocessing: Preprocessing, tmp_path: Path, convert: Any, suffix: str
) -> None:
    used = {name: preprocessing.fitted[name] for name in CONVERTIBLE}
    made = Preprocessing(preprocessing.info, used, [0, 1])
    layers = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    rows = [0, 2, 3, 9]
    raw = {name: EDGES[name][rows] for name in made.raw_inputs} | {"count": np.array([MISSING_INT, 4, -1, 12])}
    raw["vector"] = np.array([[np.nan, 1, 2], [3, -4, 1e6], [0, 0, 0], [7, 8, 9]], F)
    file = tmp_path / f"ops.{suffix}"

    def call(features: Any) -> Any:
        return {f"{name}_out": tensor for name, tensor in made(features).items()}

    convert(Network(layers, made.raw_signature(), call), file, examples=raw)
    found, expected = load_runner(file)(raw), made.transform_in_batches(raw)
    for name in CONVERTIBLE:
        np.testing.assert_allclose(found[f"{name}_out"], expected[name], rtol=1e-5, atol=1e-6)
