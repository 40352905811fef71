"""Each operation gives the values worked out by hand, on edge values too, eagerly and inside tf.data alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from components import transform_config as cfg
from components.errors import ConfigError, DataError
from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.preprocessing import Preprocessing
from components.statistics import StatisticsBuilder
from components.transform import default_operations, fit, fit_all

COLUMNS: dict[str, tuple[Feature, np.ndarray]] = {
    "amount": (Feature("float"), np.array([0.0, 1.0, 3.0, np.nan, 8.0], np.float32)),
    "count": (Feature("int"), np.array([4, 4, 9, MISSING_INT, 7])),
    "city": (Feature("string"), np.array([b"oslo", b"rome", b"oslo", b"", "città".encode()], object)),
    "words": (Feature("string"), np.array([b"The cat, the DOG!", b"a cat", b"", b"dog", b"cat"], object)),
    "picture": (Feature("uint8", (2, 2, 1)), np.arange(20, dtype=np.uint8).reshape(5, 2, 2, 1) * 12),
    "label": (Feature("int"), np.array([0, 1, 0, 1, 0])),
}
RAW = {name: values for name, (_, values) in COLUMNS.items()}
INFO = ExamplesInfo(
    features={name: feature for name, (feature, _) in COLUMNS.items()},
    label="label",
    task="binary",
    classes=None,
    num_examples={"train": 5},
)


@pytest.fixture(scope="module")
def statistics() -> dict[str, Any]:
    builder = StatisticsBuilder(INFO, text_features=["words"], max_top_values=100, num_quantiles=8)
    builder.update(RAW)
    return builder.finish()


def make(statistics: dict[str, Any], **operations: Any) -> Preprocessing:
    return Preprocessing(INFO, fit_all(operations, INFO, statistics), [0, 1])


def test_normalize_takes_the_train_mean_and_puts_missing_at_zero(statistics) -> None:
    out = make(statistics, amount=cfg.Normalize(missing_indicator=True)).transform_in_batches(RAW)["amount"]
    present = np.array([0, 1, 3, 8], np.float64)
    expected = (present - present.mean()) / present.std()
    np.testing.assert_allclose(out[[0, 1, 2, 4], 0], expected, rtol=1e-5)
    np.testing.assert_array_equal(out[3], [0, 1])
    np.testing.assert_array_equal(out[[0, 1, 2, 4], 1], 0)


def test_normalize_with_log(statistics) -> None:
    out = make(statistics, x=cfg.Normalize(input="amount", log=True)).transform_in_batches(RAW)["x"][:, 0]
    logs = np.log1p([0, 1, 3, 8])
    np.testing.assert_allclose(out[[0, 1, 2, 4]], (logs - logs.mean()) / logs.std(), rtol=1e-5)
    assert out[3] == 0


def test_normalize_of_integers_knows_their_missing_value(statistics) -> None:
    out = make(statistics, count=cfg.Normalize()).transform_in_batches(RAW)["count"][:, 0]
    assert out[3] == 0
    np.testing.assert_allclose(out[2], (9 - 6) / np.std([4, 4, 9, 7]), rtol=1e-5)


def test_bucketize_is_monotone_and_gives_missing_a_bucket_of_its_own(statistics) -> None:
    preprocessing = make(statistics, amount=cfg.Bucketize(op="bucketize", num_buckets=3))
    values = np.array([-1e30, 0, 1, 3, 8, 1e30, np.nan], np.float32)
    out = preprocessing.transform_in_batches({"amount": values})["amount"][:, 0]
    last = preprocessing.input_spec["amount"].num_categories - 1
    assert out[-1] == last
    assert (np.diff(out[:-1]) >= 0).all()
    assert out[0] == 0 and out[5] == last - 1 > 0


def test_vocabulary_is_by_frequency_with_zero_for_the_unseen(statistics) -> None:
    preprocessing = make(statistics, city=cfg.Vocabulary(op="vocabulary"))
    out = preprocessing.transform_in_batches({"city": np.array([b"oslo", b"paris", b"", "città".encode()], object)})
    ids = out["city"][:, 0]
    assert ids[0] == 1 and ids[1] == 0
    assert ids.max() < preprocessing.input_spec["city"].num_categories
    assert ids[3] in (2, 3)


def test_vocabulary_of_integers(statistics) -> None:
    preprocessing = make(statistics, count=cfg.Vocabulary(op="vocabulary", max_tokens=2))
    ids = preprocessing.transform_in_batches({"count": np.array([4, 7, 9, 5, -1, MISSING_INT])})["count"][:, 0]
    assert ids[0] == 1
    assert sorted(ids[1:3]) == [0, 2]
    np.testing.assert_array_equal(ids[3:], 0)


def test_hash_is_stable_and_within_its_bins(statistics) -> None:
    out = make(statistics, city=cfg.Hash(op="hash", num_bins=4)).transform_in_batches(RAW)["city"][:, 0]
    assert ((out >= 0) & (out < 4)).all()
    assert out[0] == out[2]


def test_text_ids_pad_with_zero_and_mark_unknown_words_with_one(statistics) -> None:
    preprocessing = make(statistics, words=cfg.Text(op="text", length=4))
    texts = np.array([b"the CAT... zebra", b"", b"dog dog dog dog dog"], object)
    ids = preprocessing.transform_in_batches({"words": texts})["words"]
    vocabulary = preprocessing.fitted["words"].params["vocabulary"]
    assert vocabulary[0] == "cat"
    np.testing.assert_array_equal(ids[0], [vocabulary.index("the") + 2, 2, 1, 0])
    np.testing.assert_array_equal(ids[1], 0)
    np.testing.assert_array_equal(ids[2], [vocabulary.index("dog") + 2] * 4)


def test_text_tf_idf_weighs_by_the_train_documents(statistics) -> None:
    preprocessing = make(statistics, words=cfg.Text(op="text", output="tf_idf"))
    row = preprocessing.transform_in_batches({"words": np.array([b"cat cat the", b""], object)})["words"]
    vocabulary = preprocessing.fitted["words"].params["vocabulary"]
    # 5 documents; 'cat' is in 3 of them, 'the' in 1.
    assert row[0, vocabulary.index("cat") + 1] == pytest.approx(2 * np.log(1 + 5 / 4), rel=1e-5)
    assert row[0, vocabulary.index("the") + 1] == pytest.approx(np.log(1 + 5 / 2), rel=1e-5)
    assert not row[1].any()


def test_image_is_scaled_resized_and_normalised(statistics) -> None:
    out = make(statistics, picture=cfg.Image(op="image", mean=[0.5], std=[0.25])).transform_in_batches(RAW)["picture"]
    np.testing.assert_allclose(out, (RAW["picture"] / 255 - 0.5) / 0.25, atol=1e-6)
    preprocessing = make(statistics, picture=cfg.Image(op="image", size=(4, 6)))
    assert preprocessing.transform_in_batches(RAW)["picture"].shape == (5, 4, 6, 1)
    assert preprocessing.input_spec["picture"].shape == (4, 6, 1)


ALL_OPERATIONS = {
    "amount": cfg.Normalize(log=True, missing_indicator=True),
    "bucket": cfg.Bucketize(op="bucketize", input="amount", num_buckets=3),
    "city": cfg.Vocabulary(op="vocabulary"),
    "hashed": cfg.Hash(op="hash", input="city", num_bins=4),
    "ids": cfg.Text(op="text", input="words", length=4),
    "tf_idf": cfg.Text(op="text", input="words", output="tf_idf"),
    "picture": cfg.Image(op="image", size=(3, 3)),
}


def test_eager_tf_data_and_reloaded_give_the_same(statistics, tmp_path: Path) -> None:
    preprocessing = make(statistics, **ALL_OPERATIONS)
    expected = preprocessing.transform_in_batches(RAW)
    used = {name: RAW[name] for name in preprocessing.raw_inputs}
    in_pipeline = next(iter(tf.data.Dataset.from_tensor_slices(used).batch(5).map(preprocessing)))
    preprocessing.save(tmp_path)
    reloaded = Preprocessing.load(tmp_path)
    again = reloaded.transform_in_batches(RAW)
    assert reloaded.input_spec == preprocessing.input_spec
    for name, value in expected.items():
        # log1p may differ in the last digit where TensorFlow vectorises it otherwise.
        np.testing.assert_allclose(in_pipeline[name], value, rtol=1e-6)
        np.testing.assert_array_equal(again[name], value)
        assert value.shape[1:] == preprocessing.input_spec[name].shape
        assert value.dtype == preprocessing.input_spec[name].dtype


def test_only_lookup_free_preprocessing_is_convertible(statistics) -> None:
    assert make(statistics, picture=cfg.Image(op="image"), amount=cfg.Normalize()).is_convertible
    assert not make(statistics, city=cfg.Vocabulary(op="vocabulary")).is_convertible


def test_labels_become_class_ids() -> None:
    def encode(labels: np.ndarray, classes: list, configured: tuple[str, ...] | None) -> list[int]:
        info = ExamplesInfo(INFO.features, "label", "multiclass", configured, {})
        return Preprocessing(info, {}, classes).encode_labels(labels).tolist()

    assert encode(np.array([b"b", b"a"], object), ["a", "b"], None) == [1, 0]
    assert encode(np.array([7, 3, 7]), [3, 7], None) == [1, 0, 1]
    assert encode(np.array([1, 0]), ["no", "yes"], ("no", "yes")) == [1, 0]
    with pytest.raises(KeyError):
        encode(np.array([b"c"], object), ["a", "b"], None)


@pytest.mark.parametrize(
    ("name", "op", "error", "message"),
    [
        ("amont", cfg.Normalize(), ConfigError, "no feature 'amont'. Did you mean 'amount'"),
        ("label", cfg.Normalize(), ConfigError, "no feature 'label'"),
        ("city", cfg.Normalize(), ConfigError, "'normalize' takes int or float features, but 'city' is of type string"),
        ("amount", cfg.Hash(op="hash", num_bins=3), ConfigError, "'hash' takes int or string"),
        ("picture", cfg.Image(op="image", mean=[0.1, 0.2]), ConfigError, "one number or one per channel"),
        ("city", cfg.Vocabulary(op="vocabulary", min_count=100), DataError, "no value occurs 100 times"),
    ],
)
def test_impossible_operations_are_refused(
    statistics, name: str, op: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(name, op, INFO, statistics)


@pytest.mark.parametrize(
    ("name", "op", "wanted"),
    [
        ("city", cfg.Vocabulary(op="vocabulary", max_tokens=3), 3),
        ("count", cfg.Vocabulary(op="vocabulary", max_tokens=3), 3),
        ("words", cfg.Text(op="text", max_tokens=5), 3),
    ],
)
def test_a_vocabulary_larger_than_what_the_statistics_keep_is_refused(name: str, op: Any, wanted: int) -> None:
    def keeping(max_top_values: int) -> dict[str, Any]:
        builder = StatisticsBuilder(INFO, text_features=["words"], max_top_values=max_top_values, num_quantiles=8)
        builder.update(RAW)
        return builder.finish()

    assert len(fit(name, op, INFO, keeping(4)).params["vocabulary"]) == wanted
    assert len(fit(name, op.model_copy(update={"max_tokens": op.max_tokens - 1}), INFO, keeping(2)).params) > 0
    with pytest.raises(ConfigError, match=rf"{name}\.max_tokens: {wanted} values are wanted .* more than the 2 that"):
        fit(name, op, INFO, keeping(2))


def test_a_vocabulary_cut_by_its_counts_needs_no_more_to_be_kept() -> None:
    builder = StatisticsBuilder(INFO, text_features=["words"], max_top_values=2, num_quantiles=8)
    builder.update(RAW)
    op = cfg.Vocabulary(op="vocabulary", max_tokens=9, min_count=2)
    assert fit("city", op, INFO, builder.finish()).params["vocabulary"] == ["oslo"]


def test_every_feature_has_a_default_operation() -> None:
    assert {name: op.op for name, op in default_operations(INFO).items()} == {
        "amount": "normalize",
        "count": "normalize",
        "city": "vocabulary",
        "words": "vocabulary",
        "picture": "image",
    }
