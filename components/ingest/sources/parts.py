"""Sources whose files can be read apart: what some files say of the types, and some files read with the types of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from components.ingest.sources.files import at_rest, find_files, text_files
from components.ingest.sources.tables import (
    batches,
    connected,
    csv_files,
    csv_options,
    csv_types,
    json_types,
    parquet_schema,
    quoted,
    scan,
    typed_csv_scan,
    typed_json_scan,
    typed_parquet,
    unreadable_table,
)
from components.ingest.sources.tfrecords import RecordTypes, record_types, typed_records

_WIDER = ("BIGINT", "DOUBLE", "VARCHAR")  # each holds the values of those before
_ABSENT = ""  # the kind of a column that was given a type, but is not in these files


@dataclass(frozen=True)
class Parts:
    """How the files of a source are read apart. All three take the arguments of the source, too.

    Attributes:
        types: What some files say of the types.
        together: The types of all files, from those of each in their order; `None` where that takes a look at all of
            them at once.
        read: The record batches of some files, with the types of all.
    """

    types: Callable[..., Any]
    together: Callable[[Sequence[Any]], Any]
    read: Callable[..., Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class CsvColumn:
    """What some CSV files say of a column."""

    kind: str
    has_values: bool


def _csv_types(
    files: Sequence[Path],
    *,
    delimiter: str = ",",
    columns: list[str] | None = None,
    types: Mapping[str, str] | None = None,
    null_values: list[str] | None = None,
    encoding: str = "utf-8",
) -> dict[str, CsvColumn]:
    with csv_files(files, encoding, delimiter) as local, connected() as connection:
        options = csv_options(delimiter, columns, null_values)
        names = _csv_names(connection, local, options)
        given = dict(types or {})
        found = csv_types(connection, local, options, {name: kind for name, kind in given.items() if name in names})
        counts = ", ".join(f"count({quoted(name)})" for name in found)
        query = scan("read_csv", local, {**options, "types": found})
        present = connection.sql(f"SELECT {counts} FROM ({query})").fetchall()[0]
        columns_found = {
            name: CsvColumn(kind, number > 0 or name in given)
            for (name, kind), number in zip(found.items(), present, strict=True)
        }
        return columns_found | {name: CsvColumn(_ABSENT, False) for name in given if name not in names}


def _csv_names(connection: duckdb.DuckDBPyConnection, files: list[Path], options: Mapping[str, object]) -> list[str]:
    query = scan("read_csv", files, {**options, "all_varchar": True})
    return [str(row[0]) for row in connection.sql(f"DESCRIBE {query}").fetchall()]


def _csv_together(files: Sequence[dict[str, CsvColumn]]) -> dict[str, CsvColumn] | None:
    """DuckDB's own rule: a column without values fits every type, and is text if it has none anywhere."""
    merged: dict[str, CsvColumn] = {}
    absent = {name for found in files for name, column in found.items() if column.kind == _ABSENT}
    for found in files:
        for name, column in found.items():
            known = merged.get(name)
            if column.kind == _ABSENT:
                continue
            if known is None or (column.has_values and not known.has_values):
                merged[name] = column
            elif column.has_values and column.kind != known.kind:
                if not {column.kind, known.kind} <= set(_WIDER):
                    return None
                merged[name] = max(column, known, key=lambda each: _WIDER.index(each.kind))
    return None if absent - set(merged) else merged  # all files together tell which name is wrong


def _read_csv(
    files: Sequence[Path],
    found: Mapping[str, CsvColumn],
    *,
    delimiter: str = ",",
    columns: list[str] | None = None,
    types: Mapping[str, str] | None = None,
    null_values: list[str] | None = None,
    encoding: str = "utf-8",
) -> Iterator[pa.RecordBatch]:
    with csv_files(files, encoding, delimiter) as local, connected() as connection:
        options = csv_options(delimiter, columns, null_values)
        kinds = {name: found[name].kind for name in _csv_names(connection, local, options)}
        query = typed_csv_scan(local, options, kinds, quotes_count=not (types or null_values))
        values = [
            quoted(name) if name in kinds else f"CAST(NULL AS {column.kind}) AS {quoted(name)}"
            for name, column in found.items()
        ]
        yield from batches(connection, f"SELECT {', '.join(values)} FROM ({query})")


def _jsonl_types(
    files: Sequence[Path], *, types: Mapping[str, str] | None = None, encoding: str = "utf-8"
) -> dict[str, str]:
    with text_files(files, encoding) as local:
        try:
            with connected() as connection:
                return json_types(connection, local, types)
        except duckdb.Error as error:
            raise unreadable_table(local, error) from error


def _jsonl_together(files: Sequence[dict[str, str]]) -> dict[str, str] | None:
    merged: dict[str, str] = {}
    for found in files:
        for name, kind in found.items():
            if merged.setdefault(name, kind) != kind:
                return None
    return merged


def _read_jsonl(
    files: Sequence[Path],
    found: Mapping[str, str],
    *,
    types: Mapping[str, str] | None = None,  # are among those found
    encoding: str = "utf-8",
) -> Iterator[pa.RecordBatch]:
    with text_files(files, encoding) as local:
        try:
            with connected() as connection:
                yield from batches(connection, typed_json_scan(local, found))
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise unreadable_table(local, error) from error


def _parquet_together(files: Sequence[pa.Schema]) -> pa.Schema | None:
    try:
        return pa.unify_schemas(files, promote_options="permissive")
    except pa.ArrowException:
        return None


def _read_parquet(files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    local = find_files(files)
    with at_rest(local):
        yield from typed_parquet(local, schema)


def _record_types(files: Sequence[Path]) -> RecordTypes:
    local = find_files(files)
    with at_rest(local):
        return record_types(local)


def _records_together(files: Sequence[RecordTypes]) -> RecordTypes | None:
    merged = RecordTypes()
    return merged if all(merged.merge(each) for each in files) else None


def _read_records(files: Sequence[Path], types: RecordTypes) -> Iterator[pa.RecordBatch]:
    local = find_files(files)
    with at_rest(local):
        yield from typed_records(local, types)


PARTS = {
    "csv": Parts(_csv_types, _csv_together, _read_csv),
    "jsonl": Parts(_jsonl_types, _jsonl_together, _read_jsonl),
    "parquet": Parts(lambda files: parquet_schema(find_files(files)), _parquet_together, _read_parquet),
    "tfrecord": Parts(_record_types, _records_together, _read_records),
}
