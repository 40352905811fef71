"""A SQL query over CSV, JSON Lines and Parquet files, by DuckDB."""

from __future__ import annotations

import contextlib
import glob
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from components.errors import ConfigError, DataError, did_you_mean
from components.ingest.sources.files import at_rest, find_files, first_lines, text_files
from components.ingest.sources.tables import (
    batches,
    connected,
    csv_scan,
    json_scan,
    literal,
    quoted,
    scan,
    unreadable_table,
)

_ENDINGS = {"csv": "csv", "tsv": "csv", "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "parquet": "parquet"}
_PLACE = re.compile(r"LINE (\d+):")


def sql(
    *,
    path: str | None,
    query: str,
    tables: Mapping[str, str | Mapping[str, Any]] | None = None,
    memory_limit: str = "80%",
) -> Iterator[pa.RecordBatch]:
    """The rows of one SELECT, in DuckDB's SQL. Without ORDER BY they come in the same order each time, too.

    Args:
        path: File or glob, which is the table `data`; with `tables` the folder that their paths start from.
        query: The SELECT.
        tables: Name -> file, folder or glob below `path`, `{trips: "trips/*.parquet", zones: zones.csv}`, or a mapping with
            `path` and arguments of that source: `{path: zones.txt, source: csv, delimiter: ";"}`.
        memory_limit: What DuckDB may take for joins and sorts before it goes to the disk, such as `2GB`.

    Raises:
        ConfigError: the query is no SELECT, or names a table or column that there is not.
        DataError: a file cannot be read or changed while it was read, or a value does not fit the query.
    """
    if path is None:
        raise ConfigError("data.path: this source needs a file or glob, or with data.args.tables their folder.")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-sql-"))
        settings = {"memory_limit": memory_limit, "temp_directory": folder}
        try:
            connection = stack.enter_context(connected(settings))
        except duckdb.Error as error:
            raise ConfigError(f"data.args.memory_limit: {first_lines(error)} Such as 2GB.") from error
        read = _make_views(connection, _tables(path, tables), stack)
        _forbid_other_files(connection, [*read, Path(folder)])
        _check_select(connection, query)
        try:
            yield from batches(connection, query)
        except duckdb.OutOfMemoryException as error:
            raise _too_little_memory(error) from error
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise _explained(error, list(tables or ["data"])) from error


def _tables(path: str, tables: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Table -> its `path` and the arguments of its source."""
    if tables is None:
        return {"data": {"path": path}}
    if not Path(path).is_dir():
        raise ConfigError(f"data.path: {path} is not a folder; with data.args.tables it is the one that they lie in.")
    found = {}
    for name, given in tables.items():
        settings = {"path": given} if isinstance(given, str) else dict(given)
        if not isinstance(settings.get("path"), str):
            raise ConfigError(f"data.args.tables.{name}: a path, or a mapping with 'path', received {given!r}.")
        inside = Path(settings["path"])
        # Only what lies below data.path belongs to the fingerprint of the data.
        if inside.is_absolute() or ".." in inside.parts:
            raise ConfigError(
                f"data.args.tables.{name}: {inside} must lie below data.path, {path}. Set that further up."
            )
        found[name] = {**settings, "path": str(Path(path) / inside)}
    return found


def _make_views(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, dict[str, Any]], stack: contextlib.ExitStack
) -> list[Path]:
    """A view for each table; the files that they read, watched until the stack is closed."""
    read = []
    for name, settings in tables.items():
        query, files = _scan(connection, name, settings, stack)
        connection.sql(f"CREATE VIEW {quoted(name)} AS {query}")
        read += files
    return read


def _scan(
    connection: duckdb.DuckDBPyConnection, table: str, settings: dict[str, Any], stack: contextlib.ExitStack
) -> tuple[str, list[Path]]:
    args = dict(settings)
    path = args.pop("path")
    kind = args.pop("source", None) or _kind(path, table)
    scans: dict[str, Callable[..., str]] = {"csv": csv_scan, "jsonl": json_scan, "parquet": _parquet_scan}
    if kind not in scans:
        raise ConfigError(
            f"data.args.tables.{table}: there is no source '{kind}' for a table.{did_you_mean(kind, scans)}"
        )
    known = [*list(inspect.signature(scans[kind]).parameters)[2:], *(["encoding"] if kind != "parquet" else [])]
    for unknown in set(args) - set(known):
        hint = did_you_mean(unknown, known) if known else ""
        raise ConfigError(f"data.args.tables.{table}: source '{kind}' takes no '{unknown}'.{hint}")
    if kind == "parquet":
        files = find_files(path)
        stack.enter_context(at_rest(files))
    else:
        files = stack.enter_context(text_files(path, args.pop("encoding", "utf-8")))
    try:
        return scans[kind](connection, files, **args), files
    except duckdb.OutOfMemoryException as error:
        raise _too_little_memory(error) from error
    except duckdb.Error as error:
        raise unreadable_table(files, error) from error


def _parquet_scan(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> str:
    query = scan("read_parquet", files, {"union_by_name": True})
    connection.sql(f"DESCRIBE {query}").fetchall()  # a file that is no Parquet is named here
    return query


def _kind(path: str, table: str) -> str:
    """The source that reads the files of a path, by the ending of the first."""
    file = find_files(path)[0]
    ending = (file.with_suffix("") if file.suffix == ".gz" else file).suffix.removeprefix(".").lower()
    if ending not in _ENDINGS:
        raise ConfigError(
            f"data.args.tables.{table}: {file} ends in none of {', '.join(sorted(_ENDINGS))}. "
            "Say what it is: {path: ..., source: csv}."
        )
    return _ENDINGS[ending]


def _forbid_other_files(connection: duckdb.DuckDBPyConnection, read: list[Path]) -> None:
    """Let the query read its tables alone: nothing else belongs to the fingerprint of the data."""
    files, folders = ([str(path) for path in read if path.is_dir() is is_dir] for is_dir in (False, True))
    # Asked for is first the pattern that `scan` makes of a name.
    connection.sql(f"SET allowed_paths = {literal([*files, *map(glob.escape, files)])}")
    connection.sql(f"SET allowed_directories = {literal(folders)}")
    connection.sql("SET enable_external_access = false")


def _check_select(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise _explained(error, []) from error
    if len(statements) != 1 or statements[0].type is not duckdb.StatementType.SELECT:
        kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
        raise ConfigError(f"data.args.query: must be one SELECT, received {kinds}.")


def _too_little_memory(error: Exception) -> DataError:
    return DataError(f"data.args.query: {first_lines(error)} Raise data.args.memory_limit.")


def _explained(error: Exception, tables: list[str]) -> Exception:
    """What is wrong with the query, or with a value that it meets."""
    lines = str(error).split("\n\nLINE", maxsplit=1)[0]
    message = first_lines(ValueError(lines)).partition(": ")[2] or lines
    place = _PLACE.search(str(error))
    where = f"data.args.query, line {place[1]}" if place else "data.args.query"
    if isinstance(error, duckdb.CatalogException):
        unknown = re.search(r"Table with name (\S+) does not exist", message)
        if unknown:
            return ConfigError(f"{where}: there is no table '{unknown[1]}'.{did_you_mean(unknown[1], tables)}")
    if isinstance(error, duckdb.PermissionException):
        return ConfigError(f"{where}: {message} A query reads its tables alone: name the file in data.args.tables.")
    if isinstance(error, duckdb.ParserException | duckdb.CatalogException | duckdb.BinderException):
        return ConfigError(f"{where}: {message} Correct the query.")
    return DataError(f"{where}: {message} Correct the data, or the query (TRY_CAST makes such values missing).")
