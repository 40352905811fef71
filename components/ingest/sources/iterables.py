"""What a source of the user's may yield or return, made into record batches: Arrow, pandas, numpy, rows, `datasets`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from components.errors import DataError
from components.ingest.sources.arrays import array_column, tensor_array

_ROWS_PER_BATCH = 8192
_BYTES_PER_BATCH = 64 << 20
_TAKEN = (
    "a pyarrow RecordBatch or Table, a DataFrame, a dict of columns, a dict for each row, or a dataset of Hugging Face"
)


def record_batches(data: Any) -> Iterator[pa.RecordBatch]:
    """Make record batches of what a source of the user's gave.

    Args:
        data: A RecordBatch, a Table, a pandas DataFrame or anything else with `__arrow_c_stream__`; a dict of columns
            (sequences or arrays `(rows, *shape)` of equal length); a `datasets.Dataset`-like, which has `features` and
            whose iterator gives dicts, or a dict of those by split, which adds the column `split`; or an iterable of
            batches of these kinds, or of rows, which are dicts with a scalar among their values.

    Raises:
        DataError: it is something else, or a column mixes types.
    """
    if (whole := _whole(data)) is not None:
        yield from whole
    elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        yield from _each(data)
    else:
        raise DataError(f"data.source: it gave a {type(data).__name__}; give {_TAKEN}, or an iterable of them.")


def _whole(data: Any) -> Iterator[pa.RecordBatch] | None:
    """The batches of a thing that holds many rows; None for any other."""
    if isinstance(data, pa.RecordBatch):
        return iter([data])
    if isinstance(data, pa.Table):
        return iter(data.to_batches(_ROWS_PER_BATCH))
    if _is_dataset(data):
        return _dataset(data)
    if isinstance(data, Mapping) and data and all(_is_dataset(part) for part in data.values()):
        return _with_splits(data)
    if _is_pandas(data):
        return iter(_table_of_pandas(data).to_batches(_ROWS_PER_BATCH))
    if hasattr(data, "__arrow_c_stream__"):
        return iter(pa.RecordBatchReader.from_stream(data))
    if isinstance(data, Mapping) and data and all(_is_column(values) for values in data.values()):
        return _columns(data)
    return None


def _each(items: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """The batches of an iterator; rows that come one by one are gathered."""
    rows = _Rows()
    for item in items:
        if (whole := _whole(item)) is not None:
            yield from rows.flush()
            yield from whole
        elif isinstance(item, Mapping):
            yield from rows.add(item)
        else:
            raise DataError(f"data.source: it yielded a {type(item).__name__}; yield {_TAKEN}.")
    yield from rows.flush()


class _Rows:
    """Gathers rows, dicts of one value a column; the first batch decides the types that are not given.

    Args:
        schema: Types of columns, as far as they are known.
    """

    def __init__(self, schema: Mapping[str, pa.DataType] | None = None) -> None:
        self._types: dict[str, pa.DataType] = dict(schema or {})
        self._rows: list[Mapping[str, Any]] = []
        self._num_bytes = self._num_rows = 0

    def add(self, row: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        self._rows.append(row)
        self._num_bytes += sum(len(v) if isinstance(v, str | bytes) else getattr(v, "nbytes", 8) for v in row.values())
        if len(self._rows) == _ROWS_PER_BATCH or self._num_bytes >= _BYTES_PER_BATCH:
            yield from self.flush()

    def flush(self) -> Iterator[pa.RecordBatch]:
        if not self._rows:
            return
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        names = [*self._types, *(name for name in names if name not in self._types)]
        columns = {name: self._column(name, [row.get(name) for row in self._rows]) for name in names}
        self._types = {name: column.type for name, column in columns.items()}
        self._num_rows += len(self._rows)
        self._rows, self._num_bytes = [], 0
        yield pa.RecordBatch.from_pydict(columns)

    def _column(self, name: str, values: list[Any]) -> pa.Array:
        kind = self._types.get(name)
        try:
            if any(isinstance(value, np.ndarray) and value.ndim for value in values) or _is_picture(values[0]):
                return array_column(name, np.stack([np.asarray(value) for value in values]))
            column = pa.array(values, kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            rows = f"rows {self._num_rows + 1} to {self._num_rows + len(values)}"
            known = f", which is {kind} in the rows before," if kind is not None else ""
            raise DataError(
                f"data.source: column '{name}'{known} cannot hold {rows}: {error}. Give each column one type and shape."
            ) from error
        # Of nothing but missing values no type follows; they count as text.
        return column.cast(pa.string()) if pa.types.is_null(column.type) else column


def _is_dataset(data: Any) -> bool:
    """Whether it is as a dataset of Hugging Face is: features by name, and rows by iteration."""
    return isinstance(getattr(data, "features", None), Mapping) and hasattr(data, "__iter__")


def _dataset(data: Any, split: str | None = None) -> Iterator[pa.RecordBatch]:
    """The rows of a dataset, class labels by their names."""
    schema = getattr(data.features, "arrow_schema", None)
    types = {} if schema is None else {field.name: field.type for field in schema if not pa.types.is_struct(field.type)}
    classes = {name: names for name, f in data.features.items() if (names := getattr(f, "names", None)) is not None}
    types |= dict.fromkeys(classes, pa.string())
    rows = _Rows(types)
    for row in data:
        # Hugging Face marks a label that nobody knows by -1.
        named = {
            name: None if row[name] is None or row[name] < 0 else names[row[name]] for name, names in classes.items()
        }
        yield from rows.add({**row, **named, **({} if split is None else {"split": split})})
    yield from rows.flush()


def _with_splits(parts: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    for split, part in parts.items():
        yield from _dataset(part, split)


def _is_pandas(data: Any) -> bool:
    return type(data).__name__ == "DataFrame" and type(data).__module__.partition(".")[0] == "pandas"


def _table_of_pandas(frame: Any) -> pa.Table:
    frame = frame.rename(columns=str)
    try:
        return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"data.source: a DataFrame has a column of mixed types: {error}. Give each one type."
        ) from error


def _is_picture(value: Any) -> bool:
    """Whether it is an image of Pillow, as datasets yield them."""
    return hasattr(value, "__array_interface__") and not isinstance(value, np.ndarray | np.generic)


def _is_column(values: Any) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim > 0
    return isinstance(values, list | tuple | pa.Array | pa.ChunkedArray) or type(values).__name__ == "Series"


def _columns(data: Mapping[str, Sequence[Any]]) -> Iterator[pa.RecordBatch]:
    lengths = {name: len(values) for name, values in data.items()}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"data.source: a dict of columns has columns of different lengths: {told}.")
    columns = {name: _column_of(name, values) for name, values in data.items()}
    yield from pa.table(columns).to_batches(_ROWS_PER_BATCH)


def _column_of(name: str, values: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, np.ndarray) and values.dtype != object:
        return array_column(name, values)
    try:
        if isinstance(values, list | tuple) and values and isinstance(values[0], np.ndarray) and values[0].ndim:
            return tensor_array(np.stack(values))
        return pa.array(values, from_pandas=type(values).__name__ == "Series")
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"data.source: column '{name}' cannot be read: {error}. Give it one type and shape.") from error
