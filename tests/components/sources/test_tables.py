from __future__ import annotations

import gzip
import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest

from components.errors import ConfigError, DataError
from components.ingest import sources
from tests.components.sources import kinds, read

CSV = "id,when,flag,price,word\n1,2020-01-02,true,1.5,a\n2,2020-01-03,false,,\n3,2021-01-01,true,2,c d\n"


@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_csv_types_and_missing_values(tmp_path, ending):
    file = tmp_path / f"x.{ending}"
    file.write_bytes(gzip.compress(CSV.encode()) if ending.endswith("gz") else CSV.encode())
    table = read(sources.csv, file)
    assert kinds(table) == {"id": "int", "when": "string", "flag": "string", "price": "float", "word": "string"}
    assert table["when"].to_pylist()[0] == "2020-01-02"
    assert table["price"].to_pylist() == [1.5, None, 2.0]
    assert table["word"].to_pylist() == ["a", None, "c d"]


def test_csv_types_follow_from_the_whole_file(tmp_path):
    file = tmp_path / "x.csv"
    file.write_text("a,b\n" + "1,2\n" * 30_000 + "1.5,late\n")
    table = read(sources.csv, file)
    assert kinds(table) == {"a": "float", "b": "string"}
    assert table.num_rows == 30_001
    assert table["b"].to_pylist()[-2:] == ["2", "late"]


def test_csv_globs_are_read_in_order_and_columns_matched_by_name(tmp_path):
    (tmp_path / "a1.csv").write_text("x,y\n1,2\n")
    (tmp_path / "a2.csv").write_text("y,x,z\n4,3,5\n")
    table = read(sources.csv, tmp_path / "a*.csv")
    assert table.to_pydict() == {"x": [1, 3], "y": [2, 4], "z": [None, 5]}
    assert read(sources.csv, tmp_path).to_pydict() == table.to_pydict()


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("a;b\n1,5;2\n", {"delimiter": ";"}, {"a": ["1,5"], "b": [2]}),
        ("1,2\n3,4\n", {"columns": ["x", "y"]}, {"x": [1, 3], "y": [2, 4]}),
        ("zip\n01234\n", {"types": {"zip": "VARCHAR"}}, {"zip": ["01234"]}),
        ("b\nyes\nno\n", {"types": {"b": "BOOLEAN"}}, {"b": [True, False]}),
        ("b\nyes\nno\n", {}, {"b": ["yes", "no"]}),
        ("a\n?\n1\n", {"null_values": ["?"]}, {"a": [None, 1]}),
        ('q\n"it\'s"\n', {"null_values": ["it's"]}, {"q": [None]}),
    ],
)
def test_csv_options(tmp_path, text, args, expected):
    file = tmp_path / "it's.csv"
    file.write_text(text)
    assert read(sources.csv, file, **args).to_pydict() == expected


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_jsonl(tmp_path, ending):
    rows = [{"a": 1, "b": "x", "t": "2020-01-02T03:04:05"}, {"b": "y", "c": 2.5, "t": None}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file = tmp_path / f"x.{ending}"
    file.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    table = read(sources.jsonl, file)
    assert kinds(table) == {"a": "int", "b": "string", "t": "string", "c": "float"}
    assert table["c"].to_pylist() == [None, 2.5]


def test_parquet(tmp_path):
    table = pa.table({"a": [1, 2], "price": pa.array([1.5, None]), "s": ["x", None]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert read(sources.parquet, tmp_path / "x.parquet").to_pydict() == table.to_pydict()


@pytest.mark.parametrize(
    ("source", "name", "content", "message"),
    [
        (sources.csv, "x.csv", b"", "x.csv is empty"),
        (
            sources.csv,
            "x.csv",
            bytes(range(128, 256)) * 9 + b"\n\xff,\xfe\n",
            "cannot be read: .* data.args.encoding",
        ),
        (
            sources.csv,
            "x.csv.gz",
            gzip.compress(CSV.encode() * 99, mtime=0)[:60],
            "x.csv.gz is cut off, damaged or not gzipped",
        ),
        (sources.csv, "x.csv", b"a,b\n1,2\n1,2,3,4\n", "x.csv, line 3 has 4 fields, the first line has 2"),
        (sources.csv, "x.csv", b"a,b\n1,2\n3\n", "x.csv, line 3 has 1 fields, the first line has 2"),
        (sources.csv, "x.csv", b'a,b\n"open,2\n3,4\n', "x.csv"),
        (sources.jsonl, "x.jsonl", b'{"a": 1}\n{"a": \n', "x.jsonl cannot be read"),
        (sources.parquet, "x.parquet", b"PAR1 this is not it", "x.parquet cannot be read"),
        (sources.tfrecord, "x.tfrecord", b"not a TFRecord at all", "x.tfrecord is truncated or damaged"),
        (sources.tfrecord, "x.tfrecord", b"abc", "x.tfrecord is truncated or damaged"),
        (sources.numpy_arrays, "x.npz", b"PK nothing", "x.npz cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path, source, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(source, tmp_path / name)


@pytest.mark.parametrize(
    "source", [sources.csv, sources.jsonl, sources.parquet, sources.tfrecord, sources.numpy_arrays]
)
def test_no_file_and_no_path(tmp_path, source):
    with pytest.raises(DataError, match="there is no file"):
        read(source, tmp_path / "nothing*.x")
    with pytest.raises(ConfigError, match="this source needs a file"):
        list(source(path=None))


def test_numbers_are_read_as_the_csv_writes_them(tmp_path):
    (tmp_path / "x.csv").write_text("a\n0.1\n-1e-7\nnan\n")
    values = read(sources.csv, tmp_path / "x.csv")["a"].to_pylist()
    assert values[:2] == [0.1, -1e-7]
    assert math.isnan(values[2])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "sql", "parquet"])
def test_a_name_is_no_pattern(tmp_path, kind):
    """The neighbour is what DuckDB reads if the name is taken for a pattern."""
    ending = "csv" if kind == "sql" else kind
    for name, value in (("x[1]?", 1), ("x1b", 2)):
        file = tmp_path / f"{name}.{ending}"
        if kind == "parquet":
            pa.parquet.write_table(pa.table({"a": [value]}), file)
        else:
            file.write_text(json.dumps({"a": value}) + "\n" if kind == "jsonl" else f"a\n{value}\n")
    args = {"query": "FROM data"} if kind == "sql" else {}
    assert read(getattr(sources, kind), tmp_path / f"x[1]?.{ending}", **args).to_pydict() == {"a": [1]}
