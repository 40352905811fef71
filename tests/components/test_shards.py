"""Records beside those that protobuf's own classes make, value by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.examples import Feature
from components.ingest.columns import features_of
from components.ingest.shards import serialize

INTS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-130, 130)
FLOATS = st.none() | st.floats(width=64) | st.sampled_from([1e39, -0.0, 1e-46])
TEXTS = st.none() | st.text(max_size=300) | st.sampled_from(["", "a" * 127, "a" * 128])
ROWS = st.lists(st.tuples(INTS, FLOATS, TEXTS), max_size=20)
NAMES = ("whole", "f", "täxt")  # not in the order of their bytes
EDGES = [(0, 0.0, "x"), (None, None, None), (127, float("nan"), ""), (128, float("inf"), "y"), (-1, -1.5, "a" * 16_384)]


def by_protobuf(batch: pa.RecordBatch, features: dict[str, Feature]) -> list[bytes]:
    """Each row as protobuf's own classes write it."""
    records = []
    for row in range(batch.num_rows):
        made = tf.train.Example()
        for name, feature in features.items():
            values = [batch.column(name)[row].as_py()] if not feature.shape else tensor(batch.column(name), row)
            if values == [None] or (feature.type == "string" and values == [""]) or values != values:
                continue
            if not feature.shape and feature.type == "float":
                if np.isnan(values[0]):
                    continue
                with np.errstate(over="ignore"):
                    values = [np.float32(values[0])]
            put(made.features.feature[name], feature.type, values)
        records.append(made.SerializeToString(deterministic=True))
    return records


def put(target: tf.train.Feature, kind: str, values: Any) -> None:
    if kind == "int":
        target.int64_list.value.extend(values)
    elif kind == "float":
        target.float_list.value.extend(values)
    elif kind == "uint8":
        target.bytes_list.value.append(bytes(values))
    else:
        target.bytes_list.value.extend(value.encode() for value in values)


def tensor(column: pa.Array, row: int) -> list[Any]:
    found: list[Any] = column.to_numpy_ndarray()[row].ravel().tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(ROWS)
@example(EDGES)
def test_rows_are_what_protobuf_writes(rows: list[tuple[Any, ...]]) -> None:
    kinds = (pa.int64(), pa.float64(), pa.string())
    columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(kinds)]
    batch = pa.RecordBatch.from_arrays(columns, NAMES)
    features = features_of(batch.schema)
    found, expected = serialize(batch, features), by_protobuf(batch, features)
    assert len(found) == len(expected)
    assert [row for row, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]] == []


@pytest.mark.parametrize(
    "values",
    [
        np.arange(-12, 12).reshape(4, 3, 2) * 10**15,
        np.random.default_rng(0).normal(size=(4, 40)).astype(np.float32),
        np.random.default_rng(0).integers(0, 256, (4, 5, 3, 1)).astype(np.uint8),
        np.zeros((4, 200), np.uint8),
    ],
    ids=["int", "float", "image", "long"],
)
def test_tensors_are_what_protobuf_writes(values: np.ndarray) -> None:
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))
    batch = pa.RecordBatch.from_arrays([array, pa.array([1, None, 3, 4])], ["tensor", "n"])
    features = features_of(batch.schema)
    assert serialize(batch, features) == by_protobuf(batch, features)


def test_a_part_of_a_batch_is_encoded_as_it_is() -> None:
    """Arrow's slices have an offset into buffers that hold more."""
    batch = pa.RecordBatch.from_pydict(
        {"a": ["x", None, "zz", ""], "b": [1, 300, None, -1], "c": [0.5, None, 2.0, 3.0]}
    )
    features = features_of(batch.schema)
    assert serialize(batch.slice(1, 2), features) == serialize(batch, features)[1:3]


def test_a_row_without_any_value_is_an_empty_record() -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([None, 1], pa.int64())})
    assert serialize(batch, features_of(batch.schema))[0] == b"" == tf.train.Example().SerializeToString()
