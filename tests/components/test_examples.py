from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from components.errors import ConfigError, DataError
from components.examples import (
    MISSING_INT,
    ExamplesInfo,
    Feature,
    check_slices,
    count,
    parse,
    read_arrays,
    read_batches,
    read_info,
    write_info,
)
from components.ingest.encoding import serialize
from components.ingest.shards import ShardWriter

FEATURES = {
    "age": Feature("int"),
    "fare": Feature("float"),
    "name": Feature("string"),
    "image": Feature("uint8", (2, 3, 1)),
    "vector": Feature("float", (2,)),
    "label": Feature("int"),
}
INFO = ExamplesInfo(FEATURES, "label", "multiclass", ("a", "b"), {"train": 5})
IMAGES = np.arange(5 * 6, dtype=np.uint8).reshape(5, 2, 3, 1)
VECTORS = np.arange(10, dtype=np.float32).reshape(5, 2)


def _batch() -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "age": pa.array([1, None, -3, 2**40, 0]),
            "fare": pa.array([0.5, None, float("nan"), -1.0, 1e6]),
            "name": pa.array(["x", None, "", "é", "a b"]),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(IMAGES),
            "vector": pa.FixedShapeTensorArray.from_numpy_ndarray(VECTORS),
            "label": pa.array([0, 1, 0, 1, 0]),
        }
    )


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    writer = ShardWriter(tmp_path / "train", examples_per_shard=2)
    for record in serialize(_batch(), FEATURES):
        writer.write(record)
    writer.close()
    write_info(tmp_path, INFO)
    return tmp_path


def test_what_is_written_is_read(examples):
    arrays = read_arrays(examples, "train")
    assert arrays["age"].tolist() == [1, MISSING_INT, -3, 2**40, 0]
    np.testing.assert_array_equal(arrays["fare"], np.array([0.5, np.nan, np.nan, -1, 1e6], np.float32))
    assert arrays["name"].tolist() == [b"x", b"", b"", "é".encode(), b"a b"]
    np.testing.assert_array_equal(arrays["image"], IMAGES)
    np.testing.assert_array_equal(arrays["vector"], VECTORS)
    assert {name: array.dtype for name, array in arrays.items()} == {
        "age": np.int64,
        "fare": np.float32,
        "name": object,
        "image": np.uint8,
        "vector": np.float32,
        "label": np.int64,
    }


LISTS = {
    "int": (pa.array([[1, None, 3], None, [4]]), [[1, MISSING_INT, 3], [MISSING_INT] * 3, [4, *[MISSING_INT] * 2]]),
    "float": (pa.array([[0.5, None], [], [float("nan")]]), [[0.5, np.nan], [np.nan] * 2, [np.nan] * 2]),
    "string": (pa.array([["é", None, ""], None, ["x"]]), [["é".encode(), b"", b""], [b""] * 3, [b"x", b"", b""]]),
    "empty": (pa.array([[], None, []], pa.list_(pa.int64())), [[], [], []]),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_are_padded_to_the_longest(tmp_path, kind):
    array, expected = LISTS[kind]
    features = {"list": Feature("int" if kind == "empty" else kind, (None,)), "label": Feature("int")}
    batch = pa.RecordBatch.from_pydict({"list": array, "label": [0, 1, 2]})
    writer = ShardWriter(tmp_path / "train", examples_per_shard=2)
    for record in serialize(batch, features):
        writer.write(record)
    writer.close()
    write_info(tmp_path, ExamplesInfo(features, "label", "multiclass", None, {"train": 3}))
    read = read_arrays(tmp_path, "train")["list"]
    np.testing.assert_array_equal(read, np.array(expected, read.dtype))
    widths = [batch["list"].shape[1] for batch in read_batches(tmp_path, "train", batch_size=1)]
    assert widths == [0 if element is None else len(element) for element in array.to_pylist()]


def test_files_are_named_and_counted(examples):
    assert sorted(file.name for file in (examples / "train").iterdir()) == [
        f"part-0000{i}-of-00003.tfrecord" for i in range(3)
    ]
    assert count(examples, "train") == 5
    assert read_info(examples) == INFO
    assert ExamplesInfo.from_json(INFO.to_json()) == INFO
    assert list(INFO.inputs) == ["age", "fare", "name", "image", "vector"]


def test_batches_are_as_large_as_asked(examples):
    assert [len(batch["age"]) for batch in read_batches(examples, "train", batch_size=1)] == [1] * 5


def test_missing_values_are_left_out_of_the_example():
    example = tf.train.Example.FromString(list(serialize(_batch(), FEATURES))[1])
    assert set(example.features.feature) == {"image", "vector", "label"}


@pytest.mark.parametrize("with_label", [True, False])
def test_parse_in_a_function_as_in_serving(with_label):
    records = list(serialize(_batch(), FEATURES))
    run = tf.function(
        lambda serialized: parse(serialized, INFO, with_label=with_label),
        input_signature=[tf.TensorSpec((None,), tf.string)],
    )
    parsed = run(tf.constant(records[:3]))
    assert set(parsed) == set(FEATURES) if with_label else set(INFO.inputs)
    assert run.get_concrete_function().structured_outputs["image"].shape == (None, 2, 3, 1)
    np.testing.assert_array_equal(parsed["image"], IMAGES[:3])
    assert parsed["age"].numpy().tolist() == [1, MISSING_INT, -3]


def test_an_image_of_another_size_is_refused():
    wrong = tf.train.Example()
    wrong.features.feature["image"].bytes_list.value.append(b"12345")
    with pytest.raises(tf.errors.InvalidArgumentError):
        parse(tf.constant([wrong.SerializeToString()]), INFO, with_label=False)


@pytest.mark.parametrize("keep", [-3, 5, 40])
def test_a_truncated_file_is_named(examples, keep):
    file = examples / "train" / "part-00001-of-00003.tfrecord"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"part-00001-of-00003.tfrecord is truncated or damaged"):
        read_arrays(examples, "train")


def test_a_flipped_byte_is_found(examples):
    file = examples / "train" / "part-00002-of-00003.tfrecord"
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"part-00002-of-00003.tfrecord is truncated or damaged"):
        read_arrays(examples, "train")


def test_a_missing_shard_is_noticed(examples):
    (examples / "train" / "part-00002-of-00003.tfrecord").unlink()
    with pytest.raises(DataError, match=r"holds 4 examples, features.json says 5"):
        read_arrays(examples, "train")


def test_features_to_slice_by_are_single_strings_or_integers():
    info = ExamplesInfo({**FEATURES, "ids": Feature("int", (3,))}, "label", "multiclass", None, {})
    check_slices(info, ["age", "name", "label"])
    for name, message in (
        ("ids", r"'ids' is no string or integer feature but a tensor of shape \(3,\)\. Known: age, label, name\."),
        ("image", r"'image' is no string or integer feature but a tensor of shape \(2, 3, 1\)"),
        ("fare", r"'fare' is no string or integer feature\. "),
        ("nam", r"'nam' is no string or integer feature\. Did you mean 'name'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_slices(info, [name])


def test_an_unknown_split_and_a_missing_file(examples, tmp_path):
    with pytest.raises(DataError, match=r"has no split 'test'. It has: train"):
        count(examples, "test")
    with pytest.raises(DataError, match=r"features.json cannot be read"):
        read_info(tmp_path / "nothing")
