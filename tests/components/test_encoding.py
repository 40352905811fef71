"""The vectorised encoder against protobuf's own deterministic serialisation, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from components.examples import MISSING, Feature
from components.ingest.columns import features_of
from components.ingest.encoding import serialize

INTS = [0, 1, -1, 127, 128, 2**14 - 1, 2**14, 2**31, 2**35, 2**56 - 1, 2**63 - 1, -(2**63), None]
FLOATS = [0.0, -0.0, 1.5, 1e300, -1e300, 1e-45, float("inf"), float("nan"), None]
TEXTS = ["", "a", "é", "a\0b", "x" * 127, "x" * 128, "y" * 20_000, None]


def _present(value: Any, feature: Feature) -> list[Any]:
    """What protobuf is given of one cell."""
    if value is None:
        return []
    if feature.shape and feature.type != "uint8":
        return [MISSING[feature.type] if element is None else element for element in value]
    if feature.type == "uint8":
        return [bytes(value)]
    return [] if value == "" or value != value else [value]


def _by_protobuf(rows: list[dict[str, Any]], features: Mapping[str, Feature]) -> list[bytes]:
    records = []
    for row in rows:
        example = tf.train.Example()
        for name, feature in features.items():
            if elements := _present(row[name], feature):
                target = example.features.feature[name]
                if feature.type == "int":
                    target.int64_list.value.extend(elements)
                elif feature.type == "float":
                    with np.errstate(over="ignore"):
                        target.float_list.value.extend(np.array(elements).astype(np.float32).tolist())
                else:
                    target.bytes_list.value.extend(e.encode() if isinstance(e, str) else e for e in elements)
        records.append(example.SerializeToString(deterministic=True))
    return records


def _random(rows: int, seed: int) -> pa.RecordBatch:
    """Rows drawn from the edge values; names that sort otherwise than they stand, one long enough for a longer header."""
    random = np.random.default_rng(seed)

    def draw(values: list[Any]) -> list[Any]:
        return [values[i] for i in random.integers(len(values), size=rows)]

    def lists(values: list[Any]) -> list[Any]:
        some = [[values[i] for i in random.integers(len(values), size=n)] for n in random.integers(5, size=rows)]
        return [None if random.random() < 0.2 else each for each in some]

    images = random.integers(256, size=(rows, 5, 4, 3), dtype=np.uint8)
    return pa.RecordBatch.from_pydict(
        {
            "z": pa.array(draw(INTS), pa.int64()),
            "é": pa.array(draw(FLOATS), pa.float64()),
            "text": pa.array(draw(TEXTS)),
            "n" * 200: pa.array(draw(INTS), pa.int64()),
            "ints": pa.array(lists(INTS), pa.list_(pa.int64())),
            "floats": pa.array(lists(FLOATS), pa.large_list(pa.float64())),
            "texts": pa.array(lists(TEXTS), pa.list_(pa.string())),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "vector": pa.FixedShapeTensorArray.from_numpy_ndarray(random.normal(size=(rows, 3))),
            "counts": pa.FixedShapeTensorArray.from_numpy_ndarray(random.integers(-9, 999, size=(rows, 2))),
            "te": pa.array(draw(INTS), pa.int64()),
            "texté": pa.array(draw(INTS), pa.int64()),
            "category": pa.array(draw(["a", "b", None])).dictionary_encode(),
        }
    )


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    columns = {
        name: [row.ravel().tolist() for row in column.to_numpy_ndarray()]
        if isinstance(column.type, pa.FixedShapeTensorType)
        else column.to_pylist()
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [{name: values[row] for name, values in columns.items()} for row in range(batch.num_rows)]


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_the_bytes_are_those_of_protobuf(rows):
    batch = _random(300, seed=rows).slice(0, rows)
    features = features_of(batch.schema)
    assert list(serialize(batch, features)) == _by_protobuf(_rows(batch), features)


def test_a_part_of_a_batch_is_encoded_alike():
    batch = _random(40, seed=1)
    features = features_of(batch.schema)
    assert list(serialize(batch.slice(7, 20), features)) == list(serialize(batch, features))[7:27]


def test_a_row_of_which_all_is_missing_is_empty():
    batch = pa.RecordBatch.from_pydict({"a": pa.array([None, 1]), "b": pa.array([None, "x"])})
    assert next(serialize(batch, features_of(batch.schema))) == b""
