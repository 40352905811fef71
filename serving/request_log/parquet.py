"""A request log as Parquet: a row a call and a column an alias, `inputs.x` say.

A tensor is a nested list, one level for each of its dimensions, of its own number type; strings are bytes. Calls whose
tensors differ in name, type or rank go to files of their own, since a file has one schema.
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from serving.atomic import put_in_place
from serving.errors import Code, ServingError
from serving.request_log.files import forget_oldest, rotated_name
from serving.request_log.sink import LogRecord, Rotation, Sink
from serving.tensors import object_array, to_bytes

MAGIC = b"PAR1"
_ROW_GROUP_BYTES = 8 << 20
_ROW_GROUP_ROWS = 10_000
_MAX_OPEN = 16  # files being written, each with a row group in memory


class ParquetSink(Sink):
    """Writes hidden files, which get their names when they are whole; those that a crash has left are removed first.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, path: Path, rotation: Rotation, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path, rotation, clock)
        self._parts: dict[Any, _ParquetPart] = {}
        self._numbers = itertools.count()
        for left_over in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            left_over.unlink()

    def write(self, records: Sequence[LogRecord]) -> None:
        for record in records:
            try:
                schema = _schema(record)
            except Exception as error:
                self._lose(1, error)
                continue
            if schema not in self._parts and len(self._parts) >= _MAX_OPEN:
                self._finish(min(self._parts, key=lambda key: self._parts[key].began))
            if schema not in self._parts:
                temporary = self._path.with_name(f".{self._path.name}.{next(self._numbers)}.tmp")
                self._parts[schema] = _ParquetPart(temporary, schema, self._clock())
            part = self._parts[schema]
            part.add(record)
            if part.is_row_group:
                self._try(schema, part.write_row_group)
        self.rotate()

    def due_seconds(self) -> float | None:
        began = min((part.began for part in self._parts.values()), default=None)
        return None if began is None else began + self._rotation.max_seconds - self._clock()

    def rotate(self) -> None:
        oldest = self._clock() - self._rotation.max_seconds
        for schema, part in list(self._parts.items()):
            if part.began <= oldest or part.size_bytes >= self._rotation.max_bytes:
                self._finish(schema)

    def close(self) -> None:
        for schema in list(self._parts):
            self._finish(schema)

    def _finish(self, schema: Any) -> None:
        part = self._parts[schema]
        self._try(schema, lambda: part.finish(rotated_name(self._path, part.began)))
        if self._parts.pop(schema, None):
            self._wrote(part.num_rows)
            with contextlib.suppress(OSError):
                forget_oldest(self._path, self._rotation.max_files)

    def _try(self, schema: Any, action: Callable[[], None]) -> None:
        """Do something to a file; when it fails, the whole file is lost, as half a one cannot be read."""
        try:
            action()
        except Exception as error:
            part = self._parts.pop(schema)
            part.abandon()
            self._lose(part.num_rows, error)


class _ParquetPart:
    """A Parquet file that is being written."""

    def __init__(self, temporary: Path, schema: tuple[tuple[str, str, int], ...], began: float) -> None:
        self.began = began
        self.num_rows = self.size_bytes = 0
        self._temporary, self._schema = temporary, schema
        self._waiting: list[LogRecord] = []
        self._waiting_bytes = 0
        self._writer: Any = None

    @property
    def is_row_group(self) -> bool:
        return self._waiting_bytes >= _ROW_GROUP_BYTES or len(self._waiting) >= _ROW_GROUP_ROWS

    def add(self, record: LogRecord) -> None:
        self.num_rows += 1
        self._waiting.append(record)
        self._waiting_bytes += record.size_bytes

    def write_row_group(self) -> None:
        from pyarrow import parquet

        table = _to_table(self._waiting, [column for column, _, _ in self._schema])
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._temporary, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._waiting, self._waiting_bytes = [], 0
        self.size_bytes = self._temporary.stat().st_size

    def finish(self, path: Path) -> None:
        if self._waiting:
            self.write_row_group()
        self._writer.close()
        put_in_place(self._temporary, path)

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        self._temporary.unlink(missing_ok=True)


def _schema(record: LogRecord) -> tuple[tuple[str, str, int], ...]:
    """The columns of a record's tensors: name, type and number of dimensions.

    Raises:
        TypeError: Parquet has no such type.
    """
    found = []
    for side in ("inputs", "outputs"):
        for alias, array in sorted(getattr(record, side).items()):
            kind = "bytes" if array.dtype.kind in "OSU" else array.dtype.name
            if array.dtype.kind == "c":
                raise TypeError(f"Parquet has no complex numbers, as {side}.{alias} has; log to a .tfrecord file")
            found.append((f"{side}.{alias}", kind, array.ndim))
    return tuple(found)


def _to_table(records: Sequence[LogRecord], columns: Sequence[str]) -> Any:
    import pyarrow as pa

    times = [datetime.datetime.fromtimestamp(record.time_seconds, datetime.timezone.utc) for record in records]
    values = {
        "time": pa.array(times, pa.timestamp("us", "UTC")),
        "model": pa.array([record.model_name for record in records]),
        "version": pa.array([record.version for record in records], pa.int64()),
        "signature": pa.array([record.signature_name for record in records]),
        "request_id": pa.array([record.request_id for record in records]),
        "latency_us": pa.array([round(record.latency_seconds * 1e6) for record in records], pa.int64()),
    }
    for column in columns:
        side, _, alias = column.partition(".")
        values[column] = _nested([getattr(record, side)[alias] for record in records])
    return pa.table(values)


def _nested(arrays: Sequence[np.ndarray]) -> Any:
    """Arrays of one type and rank as a column, each a list of lists as deep as its rank."""
    import pyarrow as pa

    flat = np.concatenate([array.ravel() for array in arrays])
    if flat.dtype.kind in "OSU":
        values = pa.array([to_bytes(value) for value in flat.tolist()], pa.binary())
    else:
        values = pa.array(flat.astype(np.float32) if flat.dtype.name == "bfloat16" else flat)
    for level in reversed(range(arrays[0].ndim)):
        lengths = np.concatenate(
            [np.full(math.prod(array.shape[:level]), array.shape[level], np.int64) for array in arrays]
        )
        values = pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), values)
    return values


def _array(column: Any, row: int) -> np.ndarray:
    """The inverse of `_nested` for one row; of an empty tensor, dimensions after the first empty one come back as 0."""
    import pyarrow as pa

    values, shape, count = column.slice(row, 1), [], 1
    while pa.types.is_list(values.type):
        values = values.flatten()
        shape.append(len(values) // count if count else 0)
        count = len(values)
    if pa.types.is_binary(values.type):
        return object_array(values.to_pylist()).reshape(shape)
    return values.to_numpy(zero_copy_only=False).reshape(shape)


def read_parquet(file: BinaryIO) -> Iterator[LogRecord]:
    """The records of an opened Parquet file.

    Raises:
        ServingError: DATA_LOSS when the file is damaged or no request log.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            for group in range(opened.num_row_groups):  # of a bounded size, which a number of rows is not
                for batch in opened.read_row_group(group).to_batches():
                    yield from _from_batch(batch)
    except (pa.ArrowException, KeyError) as error:
        raise ServingError(Code.DATA_LOSS, f"{file.name}: no request log, or damaged: {error}") from error


def _from_batch(batch: Any) -> Iterator[LogRecord]:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    sides = {
        side: [(name.removeprefix(f"{side}."), columns[name]) for name in columns if name.startswith(f"{side}.")]
        for side in ("inputs", "outputs")
    }
    plain = [columns[name].to_pylist() for name in ("model", "version", "signature", "request_id", "latency_us")]
    times = columns["time"].cast("int64").to_pylist()
    for row, (time_us, (model, version, signature, request_id, latency_us)) in enumerate(
        zip(times, zip(*plain, strict=True), strict=True)
    ):
        yield LogRecord(
            model_name=model,
            version=version,
            signature_name=signature,
            **{side: {alias: _array(column, row) for alias, column in found} for side, found in sides.items()},
            time_seconds=time_us / 1e6,
            request_id=request_id,
            latency_seconds=latency_us / 1e6,
        )
