from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from components.errors import DataError
from components.ingest import sources
from components.ingest.columns import features_of
from components.ingest.contract import check_source

TABLE = pa.table({"n": [2**53 + 1, None], "s": ["ä", ""], "label": ["a", "b"]})


def _table(data: Any) -> pa.Table:
    return pa.Table.from_batches(list(sources.record_batches(data)))


class Stream:
    """As polars and others hand their tables on, by Arrow's C stream."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return TABLE.__arrow_c_stream__(requested_schema)


KINDS = {
    "record batch": lambda: TABLE.to_batches()[0],
    "table": lambda: TABLE,
    "C stream": Stream,
    "columns": lambda: {name: TABLE[name].to_pylist() for name in TABLE.column_names},
    "Arrow columns": lambda: {name: TABLE[name] for name in TABLE.column_names},
    "pandas": lambda: TABLE.to_pandas(types_mapper=pd.ArrowDtype),
    "pandas series": lambda: dict(TABLE.to_pandas(types_mapper=pd.ArrowDtype).items()),
    "rows": lambda: iter(TABLE.to_pylist()),
    "tables": lambda: (TABLE.slice(row, 1) for row in range(2)),
    "frames": lambda: (TABLE.slice(row, 1).to_pandas(types_mapper=pd.ArrowDtype) for row in range(2)),
    "a row, a table": lambda: iter([TABLE.to_pylist()[0], TABLE.slice(1)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_may_give_rows_in_many_forms(kind):
    table = _table(KINDS[kind]())
    assert table.to_pydict() == TABLE.to_pydict()
    assert features_of(table.schema) == features_of(TABLE.schema)
    check_source(lambda *, path: KINDS[kind]())


def test_pandas_types_and_missing_values():
    frame = pd.DataFrame(
        {
            "f": [0.5, np.nan],
            "t": pd.to_datetime(["2020-01-02T03:04:05+01:00", None], utc=True).tz_convert("Europe/Berlin"),
            "c": pd.Categorical(["x", None]),
            "i": pd.array([2**53 + 1, None], dtype="Int64"),
            7: ["a", None],
        },
        index=["one", "two"],
    )
    table = _table(frame)
    assert table.column_names == ["f", "t", "c", "i", "7"]
    assert table.schema.field("t").type.tz == "Europe/Berlin"
    assert table["t"].to_pylist()[0] == datetime.datetime(2020, 1, 2, 2, 4, 5, tzinfo=datetime.timezone.utc)
    assert table.select(["f", "c", "i", "7"]).to_pylist() == [
        {"f": 0.5, "c": "x", "i": 2**53 + 1, "7": "a"},
        dict.fromkeys(["f", "c", "i", "7"]),
    ]


@pytest.mark.parametrize("by_row", [True, False])
def test_arrays_become_tensors_and_images(by_row):
    images = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    vectors = np.array([[0.5, 1.5], [2.5, 3.5]])
    rows = [{"image": i, "vector": v, "label": n} for n, (i, v) in enumerate(zip(images, vectors, strict=True))]
    columns = {"image": images, "vector": list(vectors), "label": np.array([0, 1])}
    table = _table(iter(rows) if by_row else columns)
    features = features_of(table.schema)
    assert (features["image"].type, features["image"].shape) == ("uint8", (2, 2, 3))
    assert (features["vector"].type, features["vector"].shape) == ("float", (2,))
    np.testing.assert_array_equal(table["image"].combine_chunks().to_numpy_ndarray(), images)
    np.testing.assert_array_equal(table["vector"].combine_chunks().to_numpy_ndarray(), vectors)
    assert table["label"].to_pylist() == [0, 1]


class ClassLabel:
    """As Hugging Face's."""

    def __init__(self, names: list[str]) -> None:
        self.names = names


class Features(dict[str, Any]):
    """As Hugging Face's: a dict with an Arrow schema."""

    @property
    def arrow_schema(self) -> pa.Schema:
        types = {"text": pa.string(), "small": pa.uint8(), "label": pa.int64(), "tokens": pa.list_(pa.int32())}
        return pa.schema([(name, types.get(name, pa.null())) for name in self if name != "image"])


class Dataset:
    """As Hugging Face's: features, and rows by iteration."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.features = Features(
            {name: ClassLabel(["neg", "pos"]) if name == "label" else object() for name in rows[0]}
        )

    def __iter__(self) -> Any:
        return iter(self.rows)


ROWS = [
    {"text": "good", "small": 1, "label": 1, "tokens": [1, 2]},
    {"text": None, "small": 255, "label": 0, "tokens": []},
    {"text": "?", "small": None, "label": -1, "tokens": None},
]


def test_a_dataset_keeps_its_types_and_names_its_classes():
    table = _table(Dataset(ROWS))
    assert table.schema.field("small").type == pa.uint8()
    assert pa.types.is_list(table.schema.field("tokens").type)
    assert table["label"].to_pylist() == ["pos", "neg", None]
    assert table["text"].to_pylist() == ["good", None, "?"]
    assert table["tokens"].to_pylist() == [[1, 2], [], None]


def test_datasets_by_split_get_the_column_split():
    table = _table({"train": Dataset(ROWS[:2]), "test": Dataset(ROWS[2:])})
    assert table["split"].to_pylist() == ["train", "train", "test"]
    assert table["small"].to_pylist() == [1, 255, None]


def test_pictures_of_a_dataset_become_images():
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    rows = [{"image": Image.fromarray(each), "label": number} for number, each in enumerate(pixels)]
    table = _table(Dataset(rows))
    np.testing.assert_array_equal(table["image"].combine_chunks().to_numpy_ndarray(), pixels)


def test_many_rows_come_in_batches_of_one_type():
    batches = list(sources.record_batches({"n": None if n < 9000 else "x", "label": n} for n in range(20_000)))
    assert [batch.num_rows for batch in batches] == [8192, 8192, 3616]
    assert {batch.schema.field("n").type for batch in batches} == {pa.string()}
    big = list(sources.record_batches({"a": np.zeros(4 << 20, np.float64), "label": n} for n in range(3)))
    assert [batch.num_rows for batch in big] == [2, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "it gave a int; give a pyarrow RecordBatch or Table"),
        (["text"], "it yielded a str; yield a pyarrow RecordBatch"),
        ({"a": [1], "b": [1, 2]}, "columns of different lengths: a 1, b 2"),
        ([{"a": 1, "b": 2}, {"a": "x", "b": 2}], "column 'a' cannot hold rows 1 to 2: .*Give each column one type"),
        ([{"a": np.zeros(2), "b": 1}, {"a": np.zeros(3), "b": 1}], "column 'a' cannot hold rows 1 to 2"),
        ({"a": [1, "x"]}, "column 'a' cannot be read"),
        (pd.DataFrame({"a": [1, "x"]}), "a DataFrame has a column of mixed types: .*column a"),
        ({"a": np.zeros(2, complex)}, "array 'a' holds complex128"),
    ],
)
def test_what_is_no_table_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        _table(data)


def test_a_type_that_changes_late_is_named():
    rows = ({"a": n if n < 8192 else "x", "label": n} for n in range(9000))
    with pytest.raises(DataError, match="column 'a', which is int64 in the rows before, cannot hold rows 8193 to 9000"):
        list(sources.record_batches(rows))
