"""Values come through whole, whichever source carries them; the files are written by others than the readers."""

from __future__ import annotations

import codecs
import csv
import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from components.errors import ConfigError, DataError
from components.ingest import sources
from tests.components.sources import read

TRICKY = ["plain", "", None, 'Grüße, "quoted"\nsecond line\r\nthird', "日本語 🦉", " spaces ", "NULL", "nan", "007"]
BERLIN = datetime.timezone(datetime.timedelta(hours=1))


def _write_csv(file: Path, columns: dict[str, list[Any]], encoding: str = "utf-8") -> None:
    """By Python's csv module: None is a bare empty field, the empty string a quoted one."""
    with file.open("w", newline="", encoding=encoding) as stream:
        for row in [list(columns), *zip(*columns.values(), strict=True)]:
            fields = ["" if field is None else f'"{str(field).replace(chr(34), chr(34) * 2)}"' for field in row]
            stream.write(",".join(fields) + "\n")


def _write_jsonl(file: Path, columns: dict[str, list[Any]], encoding: str = "utf-8") -> None:
    with file.open("w", newline="", encoding=encoding) as stream:
        for row in zip(*columns.values(), strict=True):
            stream.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n")


WRITERS = {"csv": (sources.csv, _write_csv), "jsonl": (sources.jsonl, _write_jsonl)}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2**53 + 1, -(2**63), 2**63 - 1, None], pa.int64()),
        ([2**64 - 1, 0, None], pa.uint64()),
        ([2**64, -1, None], pa.decimal128(38, 0)),
        ([0.1, -1e-300, 1.7976931348623157e308, None], pa.float64()),
        (TRICKY, pa.string()),
    ],
    ids=["int64", "uint64", "wider", "float64", "text"],
)
def test_values_of_text_files_come_through_whole(tmp_path, kind, values, expected):
    source, write = WRITERS[kind]
    file = tmp_path / f"x.{kind}"
    # A whole number beyond 64 bits is a float to JSON's readers, as its standard has it.
    if kind == "jsonl" and expected == pa.decimal128(38, 0):
        expected = pa.float64()
    write(file, {"n": list(range(len(values))), "v": values})
    table = read(source, file)
    assert table.schema.types == [pa.int64(), expected]
    assert table["n"].to_pylist() == list(range(len(values)))
    assert table["v"].to_pylist() == values


@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "shift_jis"])
@pytest.mark.parametrize("kind", WRITERS)
def test_other_encodings(tmp_path, kind, encoding):
    source, write = WRITERS[kind]
    word = "日本語\n" if encoding == "shift_jis" else "Grüße, é\r\n"
    write(tmp_path / f"x.{kind}", {"größe" if encoding != "shift_jis" else "大": [word, None]}, encoding)
    given = {} if encoding == "utf-8-sig" else {"encoding": encoding}  # the mark of UTF-8 needs no word
    assert read(source, tmp_path / f"x.{kind}", **given).columns[0].to_pylist() == [word, None]


def test_a_wrong_encoding_is_named(tmp_path):
    _write_csv(tmp_path / "x.csv", {"a": ["Grüße"]}, "latin-1")
    with pytest.raises(DataError, match=r"x.csv is not in utf-16"):
        read(sources.csv, tmp_path / "x.csv", encoding="utf-16")
    with pytest.raises(DataError, match=r"x.csv cannot be read: .*needs data.args.encoding"):
        read(sources.csv, tmp_path / "x.csv")
    (tmp_path / "y.csv").write_bytes(codecs.BOM_UTF16_LE + "a\n1\n".encode("utf-16-le"))
    with pytest.raises(DataError, match=r"y.csv is in UTF-16. Set data.args.encoding: utf-16"):
        read(sources.csv, tmp_path / "y.csv")
    with pytest.raises(ConfigError, match=r"no encoding 'utf-61'. Did you mean 'utf_16'"):
        read(sources.csv, tmp_path / "x.csv", encoding="utf-61")
    with pytest.raises(ConfigError, match="no encoding 'zlib'"):
        read(sources.csv, tmp_path / "x.csv", encoding="zlib")
    (tmp_path / "z.csv").write_bytes(b"a,b\n1,2\n1,2,\xe9\n")
    with pytest.raises(DataError, match=rf"{tmp_path}/z.csv"):
        read(sources.csv, tmp_path / "z.csv", encoding="latin-1")


def test_csv_columns_take_the_types_that_are_named(tmp_path):
    columns = {
        "price": ["12.10", "0.05"],
        "day": ["2020-02-29", ""],
        "at": ["2020-01-02 03:04:05.000006+01", "1969-12-31 23:59:59Z"],
        "yes": ["true", "false"],
        "id": ["18446744073709551615", "1"],
    }
    types = {"price": "DECIMAL(12,2)", "day": "DATE", "at": "TIMESTAMPTZ", "yes": "BOOLEAN", "id": "UBIGINT"}
    with (tmp_path / "x.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([list(columns), *zip(*columns.values(), strict=True)])
    table = read(sources.csv, tmp_path / "x.csv", types=types)
    utc = datetime.timezone.utc
    assert table.schema.types[2] == pa.timestamp("us", "UTC")
    assert table.to_pydict() == {
        "price": [Decimal("12.10"), Decimal("0.05")],
        "day": [datetime.date(2020, 2, 29), None],
        "at": [
            datetime.datetime(2020, 1, 2, 2, 4, 5, 6, utc),
            datetime.datetime(1969, 12, 31, 23, 59, 59, 0, utc),
        ],
        "yes": [True, False],
        "id": [2**64 - 1, 1],
    }


def test_json_keeps_strings_lists_and_booleans_as_they_are(tmp_path):
    row = {
        "when": "2020-01-02T03:04:05+02:00",
        "day": "2020-01-02",
        "uuid": "b0f0b2a0-0000-4000-8000-00000000000A",
        "yes": True,
        "list": [2**53 + 1, None],
        "texts": ["2020-01-02", ""],
        "mixed": "1",
        "empty": "",
        "place": {"x": 0.5, "on": "2020-01-02"},
    }
    (tmp_path / "x.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({"mixed": 2, "list": [], "empty": None}) + "\n"
    )
    table = read(sources.jsonl, tmp_path / "x.jsonl")
    assert table.to_pylist() == [
        row,
        {**dict.fromkeys(row), "mixed": "2", "list": []},
    ]
    assert table.schema.field("list").type == pa.list_(pa.int64())
    typed = read(sources.jsonl, tmp_path / "x.jsonl", types={"when": "TIMESTAMPTZ"})
    assert typed["when"].to_pylist()[0] == datetime.datetime.fromisoformat(row["when"])


def test_json_tells_nan_from_null(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": NaN}\n{"a": null}\n{"a": 1.5}\n')
    first, *rest = read(sources.jsonl, tmp_path / "x.jsonl")["a"].to_pylist()
    assert math.isnan(first)
    assert rest == [None, 1.5]


def test_every_type_of_parquet_comes_through(tmp_path):
    at = datetime.datetime(2020, 1, 2, 3, 4, 5, 6)
    columns = {
        "int64": pa.array([2**53 + 1, None]),
        "uint64": pa.array([2**64 - 1, 0], pa.uint64()),
        "int8": pa.array([-128, None], pa.int8()),
        "decimal": pa.array([Decimal("12345678901234567890.12"), None], pa.decimal128(38, 2)),
        "wide": pa.array([Decimal(10) ** 60, None], pa.decimal256(70, 0)),
        "date": pa.array([datetime.date(1582, 10, 14), None]),
        "time": pa.array([datetime.time(1, 2, 3, 4), None], pa.time64("us")),
        "naive": pa.array([at, None], pa.timestamp("ns")),
        "berlin": pa.array([at.replace(tzinfo=BERLIN), None], pa.timestamp("us", "Europe/Berlin")),
        "bool": pa.array([True, None]),
        "float": pa.array([math.inf, None]),
        "text": pa.array(["", None]),
        "large": pa.array(TRICKY[4:6], pa.large_string()),
        "bytes": pa.array([b"\0\xff", None]),
        "list": pa.array([[1, None], None], pa.list_(pa.int32())),
        "word": pa.array(["a", None]).dictionary_encode(),
        "tensor": sources.tensor_array(np.arange(12.0).reshape(2, 2, 3)),
    }
    written = pa.table(columns)
    pa.parquet.write_table(written, tmp_path / "x.parquet")
    table = read(sources.parquet, tmp_path / "x.parquet")
    assert table.schema == written.schema
    assert table.equals(written)


def test_parquet_tells_nan_from_null(tmp_path):
    pa.parquet.write_table(pa.table({"a": pa.array([math.nan, None, 1.5])}), tmp_path / "x.parquet")
    column = read(sources.parquet, tmp_path / "x.parquet")["a"]
    assert column.null_count == 1
    assert math.isnan(column[0].as_py())


def test_parquet_files_are_matched_by_name_and_widened(tmp_path):
    pa.parquet.write_table(pa.table({"a": [1], "b": pa.array([1], pa.int32())}), tmp_path / "1.parquet")
    pa.parquet.write_table(pa.table({"b": [0.5], "c": ["x"]}), tmp_path / "2.parquet")
    assert read(sources.parquet, tmp_path).to_pydict() == {"a": [1, None], "b": [1.0, 0.5], "c": [None, "x"]}
    pa.parquet.write_table(pa.table({"a": ["x"]}), tmp_path / "3.parquet")
    with pytest.raises(DataError, match=r"1.parquet, .* cannot be read: .*Unable to merge: Field a"):
        read(sources.parquet, tmp_path)
