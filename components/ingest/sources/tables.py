"""CSV, JSON Lines and Parquet. DuckDB reads the texts; pyarrow reads Parquet, whose types are Arrow's own."""

from __future__ import annotations

import contextlib
import glob
import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from csv import Error as CsvError
from csv import reader as csv_reader
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

from components.errors import DataError
from components.ingest.sources.files import at_rest, find_files, first_lines, names_of, text_files

ROWS_PER_BATCH = 8192
_JSON: dict[str, object] = {"format": "newline_delimited", "records": True}
_BYTES_PER_BATCH = 64 << 20
# No BOOLEAN: it would take yes and no, Y and N, and turn named classes into numbers.
CSV_TYPES = ["BIGINT", "HUGEINT", "DOUBLE", "VARCHAR"]
# What DuckDB makes of JSON strings that look like it: the string stays, its zone and digits with it.
_FROM_JSON_STRINGS = re.compile(r"\b(?:DATE|TIME|TIMESTAMP(?:_\w+| WITH TIME ZONE)?|UUID|JSON)(?=[\[),]|$)")


def csv(
    *,
    path: str | None,
    delimiter: str = ",",
    columns: list[str] | None = None,
    types: Mapping[str, str] | None = None,
    null_values: list[str] | None = None,
    encoding: str = "utf-8",
) -> Iterator[pa.RecordBatch]:
    """Comma-separated files, plain or gzipped. Types follow from the whole file: whole numbers,
    numbers, or else text.

    A bare empty field is missing, a quoted one the empty string; with `types` or `null_values` quotes make no difference.

    Args:
        path: File, folder or glob.
        delimiter: Between the fields.
        columns: Names for files without a header line.
        types: SQL types of columns that are not to be inferred, as `{zip: VARCHAR, price: "DECIMAL(12,2)"}`.
        null_values: Texts that stand for a missing value; default: the empty field.
        encoding: Of the files, such as `latin-1` or `utf-16`.

    Raises:
        ConfigError: there is no such encoding.
        DataError: a file cannot be read, is not a CSV, or changed while it was read.
    """
    with csv_files(path, encoding, delimiter) as files, connected() as connection:
        yield from batches(connection, csv_scan(connection, files, delimiter, columns, types, null_values))


@contextlib.contextmanager
def csv_files(path: str | Sequence[Path] | None, encoding: str, delimiter: str) -> Iterator[list[Path]]:
    """The CSV files in UTF-8, as `text_files` gives them; what goes wrong in the block is told with its line.

    Raises:
        ConfigError, DataError: as `csv`.
    """
    with text_files(path, encoding) as files:
        try:
            yield files
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if (place := _odd_line(files, delimiter)) is not None:
                raise DataError(f"data.path: {place}. Correct it, or set data.args.delimiter.") from error
            raise unreadable_table(files, error) from error


def jsonl(
    *, path: str | None, types: Mapping[str, str] | None = None, encoding: str = "utf-8"
) -> Iterator[pa.RecordBatch]:
    """JSON Lines, plain or gzipped: one object a line. Types follow from the whole file; strings stay strings.

    Args:
        path: File, folder or glob.
        types: SQL types of columns that are not to be inferred, as `{when: TIMESTAMPTZ}`.
        encoding: Of the files.

    Raises:
        ConfigError: there is no such encoding.
        DataError: a file cannot be read, a line is not JSON, or a file changed while it was read.
    """
    with text_files(path, encoding) as files:
        try:
            with connected() as connection:
                yield from batches(connection, json_scan(connection, files, types))
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise unreadable_table(files, error) from error


def parquet(*, path: str | None) -> Iterator[pa.RecordBatch]:
    """Parquet files, with the types that they hold. Columns of several files are matched by name, their types widened.

    Raises:
        DataError: a file cannot be read, is no Parquet file, or changed while it was read.
    """
    files = find_files(path)
    with at_rest(files):
        yield from typed_parquet(files, parquet_schema(files))


def parquet_schema(files: list[Path]) -> pa.Schema:
    """The schema of Parquet files, as all of them together have it.

    Raises:
        DataError: a file cannot be read or is no Parquet file, or a column has types that go together in none.
    """
    try:
        schemas = [pa.parquet.read_schema(file).remove_metadata() for file in files]
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowException, OSError) as error:
        raise unreadable_table(files, error) from error


def typed_parquet(files: list[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of Parquet files in a schema that may be wider than theirs.

    Raises:
        DataError: a file cannot be read.
    """
    try:
        parts = [pa.parquet.read_metadata(file) for file in files]
        dataset = pa.dataset.dataset([str(file) for file in files], schema=schema, format="parquet")
        # Little is read ahead, so that the memory does not grow with the row groups.
        for batch in dataset.to_batches(batch_size=_batch_size(parts), batch_readahead=2, fragment_readahead=1):
            if batch.num_rows:
                yield batch
    except (pa.ArrowException, OSError) as error:
        raise unreadable_table(files, error) from error


@contextlib.contextmanager
def connected(settings: Mapping[str, str] | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckDB in memory, the same everywhere: rows in the order of the files, times with zones in UTC."""
    # One thread: rows keep the order of the file.
    with duckdb.connect(config={"threads": 1, **(settings or {})}) as connection:
        connection.sql("SET TimeZone = 'UTC'")
        yield connection


def batches(connection: duckdb.DuckDBPyConnection, query: str) -> Iterator[pa.RecordBatch]:
    """The rows of a query, as they come."""
    yield from connection.sql(query).to_arrow_reader(ROWS_PER_BATCH)


def csv_scan(
    connection: duckdb.DuckDBPyConnection,
    files: list[Path],
    delimiter: str = ",",
    columns: list[str] | None = None,
    types: Mapping[str, str] | None = None,
    null_values: list[str] | None = None,
) -> str:
    """The query that reads CSV files in UTF-8; the options are those of `csv`."""
    options = csv_options(delimiter, columns, null_values)
    found = csv_types(connection, files, options, types)
    return typed_csv_scan(files, options, found, quotes_count=not (types or null_values))


def csv_types(
    connection: duckdb.DuckDBPyConnection,
    files: list[Path],
    options: Mapping[str, object],
    types: Mapping[str, str] | None,
) -> dict[str, str]:
    """The SQL type of each column of CSV files, as all of them together have it."""
    guess: dict[str, object] = {"auto_type_candidates": CSV_TYPES}
    guess |= {"types": types} if types else {}
    return _types(connection, scan("read_csv", files, {**options, **guess}))


def typed_csv_scan(
    files: list[Path],
    options: Mapping[str, object],
    found: Mapping[str, str],
    *,
    quotes_count: bool,
) -> str:
    """The query that reads CSV files whose types are known; with `quotes_count`, `""` is the empty string."""
    if not quotes_count:
        return scan("read_csv", files, {**options, "types": found})
    # Nothing is left to guess. Numbers are read as text first, for which a quoted empty field may be told from a bare one.
    as_text = {"types": dict.fromkeys(found, "VARCHAR"), "allow_quoted_nulls": False, "sample_size": 1}
    values = [
        quoted(name) if kind == "VARCHAR" else f"CAST(NULLIF({quoted(name)}, '') AS {kind}) AS {quoted(name)}"
        for name, kind in found.items()
    ]
    return f"SELECT {', '.join(values)} FROM ({scan('read_csv', files, {**options, **as_text})})"


def csv_options(delimiter: str, columns: list[str] | None, null_values: list[str] | None) -> dict[str, object]:
    """The options of DuckDB that say all but the types."""
    # Everything but the types is said, because DuckDB's own guess skips lines that do not fit the rest.
    options: dict[str, object] = {
        "header": columns is None,
        "delim": delimiter,
        "quote": '"',
        "escape": '"',
        "comment": "",
        "skip": 0,
        "sample_size": -1,
        "union_by_name": True,
    }
    given = {"names": columns, "nullstr": null_values}
    return options | {name: value for name, value in given.items() if value is not None}


def json_scan(connection: duckdb.DuckDBPyConnection, files: list[Path], types: Mapping[str, str] | None = None) -> str:
    """The query that reads JSON Lines files in UTF-8."""
    return typed_json_scan(files, json_types(connection, files, types))


def json_types(
    connection: duckdb.DuckDBPyConnection, files: list[Path], types: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The SQL type of each column of JSON Lines files, as all of them together have it."""
    # A map's threshold below 0: an object is always a struct.
    guess = {"sample_size": -1, "union_by_name": True, "map_inference_threshold": -1}
    found = _types(connection, scan("read_json", files, _JSON | guess))
    found = {name: _FROM_JSON_STRINGS.sub("VARCHAR", kind) for name, kind in found.items()}
    return found | dict(types or {})


def typed_json_scan(files: list[Path], found: Mapping[str, str]) -> str:
    """The query that reads JSON Lines files whose types are known; a column that they lack is missing."""
    return scan("read_json", files, {**_JSON, "columns": found})


def unreadable_table(files: list[Path], error: Exception) -> DataError:
    """The error for files that DuckDB or pyarrow cannot make sense of."""
    mend = "Write it again, or set data.source and data.args to what it holds"
    if files[0].suffix != ".parquet":
        mend += "; text that is not in UTF-8 needs data.args.encoding"
    return DataError(f"data.path: {names_of(files)} cannot be read: {first_lines(error)} {mend}.")


def scan(function: str, files: list[Path], options: Mapping[str, object]) -> str:
    """The query that reads files with a table function of DuckDB."""
    # To DuckDB every name is a pattern: of x[1].csv it would read x1.csv.
    names = [glob.escape(str(file)) for file in files]
    arguments = [literal(names), *(f"{key}={literal(each)}" for key, each in options.items())]
    return f"SELECT * FROM {function}({', '.join(arguments)})"


def literal(value: object) -> str:
    """A Python value in SQL."""
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(str(key))}: {literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    return "'" + str(value).replace("'", "''") + "'"


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _batch_size(parts: list[pa.parquet.FileMetaData]) -> int:
    """Rows of a batch of bounded size; images make wide rows."""
    num_rows = sum(part.num_rows for part in parts)
    num_bytes = sum(part.row_group(number).total_byte_size for part in parts for number in range(part.num_row_groups))
    return min(max(_BYTES_PER_BATCH * num_rows // max(num_bytes, 1), 1), ROWS_PER_BATCH)


def _types(connection: duckdb.DuckDBPyConnection, query: str) -> dict[str, str]:
    """The SQL type of each column; those of HUGEINT narrowed as far as their values allow."""
    found = {str(row[0]): str(row[1]) for row in connection.sql(f"DESCRIBE {query}").fetchall()}
    huge = [name for name, kind in found.items() if kind == "HUGEINT"]
    if huge:
        ends = ", ".join(f"min({quoted(name)}), max({quoted(name)})" for name in huge)
        limits = connection.sql(f"SELECT {ends} FROM ({query})").fetchall()[0]
        for name, least, most in zip(huge, limits[::2], limits[1::2], strict=True):
            if least >= -(2**63) and most < 2**63:
                found[name] = "BIGINT"
            elif least >= 0 and most < 2**64:
                found[name] = "UBIGINT"
    return found


def _odd_line(files: list[Path], delimiter: str) -> str | None:
    """The first line of CSV files with another number of fields than the line at the top."""
    for file in files:
        open_text = gzip.open if file.suffix == ".gz" else open
        try:
            with open_text(file, "rt", newline="", encoding="utf-8") as stream:
                rows = csv_reader(stream, delimiter=delimiter)
                width = len(next(rows))
                for row in rows:
                    if row and len(row) != width:
                        return f"{file}, line {rows.line_num} has {len(row)} fields, the first line has {width}"
        except (OSError, EOFError, ValueError, TypeError, StopIteration, CsvError):
            return None
    return None
