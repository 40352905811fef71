from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from components.errors import ConfigError, DataError
from components.ingest import sources
from tests.components.sources import read

TABLES = {"trips": "trips/*.parquet", "zones": "zones.csv", "notes": "notes.jsonl"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trips").mkdir()
    for number, (zone, fare) in enumerate([([1, 2], ["1.10", "2.20"]), ([2, 9], ["3.30", "0.05"])]):
        table = pa.table({"zone": zone, "fare": pa.array([Decimal(each) for each in fare], pa.decimal128(9, 2))})
        pa.parquet.write_table(table, tmp_path / "trips" / f"{number}.parquet")
    (tmp_path / "zones.csv").write_text("zone,name\n1,Nord\n2,Süd\n")
    (tmp_path / "notes.jsonl").write_text('{"zone": 2, "note": "x"}\n')
    return tmp_path


def test_a_query_joins_tables_of_three_kinds(folder):
    query = """
        SELECT name, sum(fare) AS total, any_value(note) AS note
        FROM trips JOIN zones USING (zone) LEFT JOIN notes USING (zone) GROUP BY name ORDER BY total
    """
    table = read(sources.sql, folder, query=query, tables=TABLES)
    assert table.to_pylist() == [
        {"name": "Nord", "total": Decimal("1.10"), "note": None},
        {"name": "Süd", "total": Decimal("5.50"), "note": "x"},
    ]


def test_one_file_is_the_table_data_and_its_rows_keep_their_order(folder):
    table = read(sources.sql, folder / "trips" / "*.parquet", query="SELECT zone * 2 AS z FROM data WHERE zone > 1")
    assert table.to_pydict() == {"z": [4, 4, 18]}


def test_tables_take_the_arguments_of_their_source(folder):
    (folder / "other.txt").write_bytes("z;größe\n007;1\n".encode("latin-1"))
    settings = {
        "path": "other.txt",
        "source": "csv",
        "delimiter": ";",
        "types": {"z": "VARCHAR"},
        "encoding": "latin-1",
    }
    table = read(sources.sql, folder, query="FROM other", tables={"other": settings})
    assert table.to_pydict() == {"z": ["007"], "größe": [1]}


@pytest.mark.parametrize(
    ("query", "kind", "message"),
    [
        ("SELEC 1", ConfigError, 'line 1: syntax error at or near "SELEC"'),
        ("SELECT *\nFROM trip", ConfigError, r"query: there is no table 'trip'. Did you mean 'trips'"),
        ("SELECT nmae FROM zones", ConfigError, 'Referenced column "nmae" not found.*"name"'),
        ("SELECT 1; SELECT 2", ConfigError, "must be one SELECT, received SELECT, SELECT"),
        ("DROP VIEW trips", ConfigError, "must be one SELECT, received DROP"),
        ("", ConfigError, "must be one SELECT, received nothing"),
        ("SELECT CAST(name AS INT) AS n FROM zones", DataError, "'Nord' to INT32.*TRY_CAST"),
        ("SELECT * FROM '{folder}/hidden.csv'", ConfigError, "A query reads its tables alone: name the file"),
    ],
)
def test_a_wrong_query_is_explained(folder, query, kind, message):
    (folder / "hidden.csv").write_text("a\n1\n")
    with pytest.raises(kind, match=message):
        read(sources.sql, folder, query=query.replace("{folder}", str(folder)), tables=TABLES)


@pytest.mark.parametrize(
    ("tables", "kind", "message"),
    [
        ({"t": "nothing.csv"}, DataError, "there is no file .*nothing.csv"),
        ({"t": "../x.csv"}, ConfigError, r"tables.t: ../x.csv must lie below data.path"),
        ({"t": {"source": "csv"}}, ConfigError, "tables.t: a path, or a mapping with 'path'"),
        ({"t": "odd.bin"}, ConfigError, "odd.bin ends in none of csv, json"),
        ({"t": {"path": "odd.bin", "source": "cvs"}}, ConfigError, "no source 'cvs' for a table. Did you mean 'csv'"),
        ({"t": {"path": "zones.csv", "delimeter": ";"}}, ConfigError, "takes no 'delimeter'. Did you mean 'delimiter'"),
        ({"t": {"path": "odd.bin", "source": "parquet"}}, DataError, "odd.bin cannot be read"),
    ],
)
def test_wrong_tables_are_explained(folder, tables, kind, message):
    (folder / "odd.bin").write_bytes(b"odd")
    with pytest.raises(kind, match=message):
        read(sources.sql, folder, query="FROM t", tables=tables)


def test_tables_need_a_folder_and_a_query_a_path(folder):
    with pytest.raises(ConfigError, match=r"zones.csv is not a folder; with data.args.tables"):
        read(sources.sql, folder / "zones.csv", query="FROM t", tables={"t": "x.csv"})
    with pytest.raises(ConfigError, match="needs a file or glob"):
        list(sources.sql(path=None, query="SELECT 1"))


def test_memory_is_limited(folder):
    query = "SELECT list(a.range) AS l FROM range(3000000) a, zones GROUP BY zone"
    with pytest.raises(DataError, match=r"Raise data.args.memory_limit"):
        read(sources.sql, folder, query=query, tables={"zones": "zones.csv"}, memory_limit="40MB")
    with pytest.raises(ConfigError, match=r"data.args.memory_limit: .*Such as 2GB"):
        read(sources.sql, folder, query=query, tables=TABLES, memory_limit="much")


def test_times_with_zones_are_the_same_wherever_the_machine_stands(folder, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    table = read(sources.sql, folder / "zones.csv", query="SELECT TIMESTAMPTZ '2020-01-01 00:00:00+02' AS t FROM data")
    assert table.schema.types == [pa.timestamp("us", "UTC")]
    assert table["t"].cast(pa.int64()).to_pylist() == [1577829600_000_000] * 2
