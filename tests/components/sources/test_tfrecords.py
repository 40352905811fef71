from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tensorflow as tf

from components.errors import DataError
from components.ingest import sources
from components.ingest.columns import features_of
from tests.components.sources import read


def _write_records(file: Path, rows: list[dict[str, Any]], compression: str = "") -> None:
    fields = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
    with tf.io.TFRecordWriter(str(file), compression) as writer:
        for row in rows:
            example = tf.train.Example()
            for name, values in row.items():
                if not values:
                    example.features.feature[name].float_list.SetInParent()
                    continue
                getattr(example.features.feature[name], fields[type(values[0])]).value.extend(values)
            writer.write(example.SerializeToString())


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_tfrecord(tmp_path, compression):
    file = tmp_path / ("x.tfrecord" + (".gz" if compression else ""))
    rows = [{"v": [1.0, 2.0], "n": [7], "s": [b"a"]}, {"v": [3.0, 4.0], "s": [b"b"]}]
    _write_records(file, rows, compression)
    table = read(sources.tfrecord, file)
    assert table.select(["n", "s"]).to_pydict() == {"n": [7, None], "s": [b"a", b"b"]}
    assert features_of(table.schema)["v"].shape == (2,)


def test_features_that_vary_in_type_are_refused(tmp_path):
    _write_records(tmp_path / "x.tfrecord", [{"a": [1]}, {"a": [1.0]}])
    with pytest.raises(DataError, match=r"'a' is int64_list in some records and float_list in .*x.tfrecord"):
        read(sources.tfrecord, tmp_path / "x.tfrecord")


@pytest.mark.parametrize(
    ("rows", "kind", "expected"),
    [
        ([{"a": [1, 2], "b": [1]}, {"a": [2**63 - 1], "b": [1]}], pa.int64(), [[1, 2], [2**63 - 1]]),
        ([{"a": [1, 2], "b": [1]}, {"b": [1]}], pa.int64(), [[1, 2], None]),
        ([{"a": [b"x", b""]}, {"a": ["ä".encode(), b"y"]}], pa.binary(), [[b"x", b""], ["ä".encode(), b"y"]]),
        ([{"a": [], "b": [1]}, {"a": [0.5, 1.5, 2.5], "b": [1]}], pa.float32(), [[], [0.5, 1.5, 2.5]]),
    ],
    ids=["lengths differ", "missing in one", "strings", "empty in one"],
)
def test_features_of_varying_length_become_lists(tmp_path, rows, kind, expected):
    _write_records(tmp_path / "x.tfrecord", rows)
    table = read(sources.tfrecord, tmp_path / "x.tfrecord")
    assert table.schema.field("a").type == pa.list_(kind)
    assert table["a"].to_pylist() == expected


def _feature(values: list[Any]) -> tf.train.Feature:
    if not values:
        return tf.train.Feature()
    if isinstance(values[0], int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def test_sequence_examples(tmp_path):
    steps = [
        {"ids": [[1], [2], [3]], "tags": [[b"a", b"b"], [], [b"c"]]},
        {"ids": [[4]], "tags": [[b"d"]]},
        {"ids": [], "tags": []},
        {},
    ]
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        for number, lists in enumerate(steps):
            feature_lists = {
                name: tf.train.FeatureList(feature=[_feature(step) for step in each]) for name, each in lists.items()
            }
            record = tf.train.SequenceExample(
                context=tf.train.Features(feature={"n": _feature([number])}),
                feature_lists=tf.train.FeatureLists(feature_list=feature_lists),
            )
            writer.write(record.SerializeToString())
    table = read(sources.tfrecord, tmp_path / "x.tfrecord")
    assert table.schema.types == [pa.list_(pa.int64()), pa.int64(), pa.list_(pa.list_(pa.binary()))]
    assert table.to_pydict() == {
        "ids": [[1, 2, 3], [4], [], None],
        "n": [0, 1, 2, 3],
        "tags": [[[b"a", b"b"], [], [b"c"]], [[b"d"]], [], None],
    }
