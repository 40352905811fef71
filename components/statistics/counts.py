"""How often each value occurs, and how many there are."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

import datasketches
import pyarrow as pa

_KEEP_FACTOR = 4
_MAX_PENDING_ROWS = 1 << 16
_MAX_PENDING_BATCHES = 1 << 9
_LOG2_HASHES = 14


class TopCounts:
    """Counts of the most frequent values; the rarest are forgotten when there are far too many.

    As long as no more than `8 * max_kept` different values were seen, every count is exact. Beyond, a count is too low
    by at most `max_error`: what a value that was forgotten can have had, over all times of forgetting.

    Args:
        max_kept: Values that `finish` returns.
        kind: Of the values: `int64` or `binary`.
        sums: Columns that are added up for each value; values are ranked by the first.
    """

    def __init__(self, max_kept: int, kind: str, sums: tuple[str, ...] = ("count",)) -> None:
        self._max_kept, self._sums = max_kept, sums
        self._pending: list[pa.Table] = []
        self._kind = kind
        self._size = self._num_combined = 0
        self._uniques: bytes | None = None
        self.max_error = 0.0

    def update(self, values: pa.Array, *sums: pa.Array) -> None:
        """Add to the sums of the values; the values of one call may repeat."""
        self._append(pa.table([values, *sums], names=["value", *self._sums]))

    def merge(self, other: TopCounts) -> None:
        """Add what another has seen."""
        self.max_error += other.max_error
        if other._uniques is not None:
            self._uniques = _union(self._uniques, other._uniques)
        for table in other._pending:
            self._append(table)

    def finish(self) -> tuple[tuple[Any, ...], ...]:
        """`(value, *sums)` of the most frequent values; of the same count, the smaller first. Bytes become text."""
        self._combine()
        rows = self._ranked(self._max_kept).to_pydict()
        values = [_as_text(value) for value in rows.pop("value")]
        return tuple(zip(values, *rows.values(), strict=True))

    @property
    def num_unique(self) -> int:
        """Distinct values; an estimate once some were forgotten."""
        self._combine()
        if self._uniques is None:
            return self._size
        return max(round(_load(_counted(self._uniques, self._table()["value"])).get_estimate()), self._size)

    @property
    def size(self) -> int:
        """Rows held now."""
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the table as Arrow's stream, so that whoever loads it need not trust names in the pickle."""
        self._combine()
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, self._table().schema) as writer:
            writer.write_table(self._table())
        return {**self.__dict__, "_pending": stream.getvalue().to_pybytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        table = pa.ipc.open_stream(state["_pending"]).read_all()
        self._pending = [table] if len(table) else []

    def _append(self, table: pa.Table) -> None:
        self._pending.append(table)
        self._size += len(table)
        # Half as many as are there already: each row is then grouped a bounded number of times.
        is_full = self._size - self._num_combined > max(self._num_combined // 2, _MAX_PENDING_ROWS)
        if is_full or len(self._pending) > _MAX_PENDING_BATCHES:
            self._combine()

    def _combine(self) -> None:
        """Let each value stand once, and forget the rarest if there are too many."""
        if len(self._pending) > 0:
            grouped = self._table().group_by("value", use_threads=False)
            combined = grouped.aggregate([(name, "sum") for name in self._sums])
            combined = combined.rename_columns(["value", *self._sums]).combine_chunks()
            self._pending, self._size = [combined], len(combined)
        kept = _KEEP_FACTOR * self._max_kept
        if self._size > 2 * kept:
            self._uniques = _counted(self._uniques, self._table()["value"])
            ranked = self._ranked(self._size)
            self.max_error += ranked[self._sums[0]][kept].as_py()
            self._pending, self._size = [ranked.slice(0, kept)], kept
        self._num_combined = self._size

    def _table(self) -> pa.Table:
        if self._pending:
            return pa.concat_tables(self._pending, promote_options="permissive")
        empty = [pa.array([], pa.type_for_alias(self._kind)), *(pa.array([], pa.int64()) for _ in self._sums)]
        return pa.table(empty, names=["value", *self._sums])

    def _ranked(self, limit: int) -> pa.Table:
        keys = [(self._sums[0], "descending"), ("value", "ascending")]
        return self._table().sort_by(keys).slice(0, limit)


def _counted(state: bytes | None, values: pa.ChunkedArray) -> bytes:
    sketch = datasketches.update_theta_sketch(_LOG2_HASHES)
    items = iter(values.to_pylist())
    if pa.types.is_binary(values.type):
        items = map(operator.methodcaller("decode", "latin-1"), items)
    deque(map(sketch.update, items), maxlen=0)  # The fastest loop that Python has: there may be millions.
    sketch.trim()
    return _union(state, sketch.compact().serialize())


def _union(a: bytes | None, b: bytes) -> bytes:
    if a is None:
        return b
    union = datasketches.theta_union(_LOG2_HASHES)
    union.update(_load(a))
    union.update(_load(b))
    found: bytes = union.get_result().serialize()
    return found


def _load(state: bytes) -> Any:
    return datasketches.compact_theta_sketch.deserialize(state)


def _as_text(value: Any) -> Any:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
