"""Statistics of strings that are categories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.statistics.counts import TopCounts
from components.statistics.features import FeatureStatistics, WeightedStatistics
from components.statistics.rows import Column, RowCounts, column_of_array, column_of_arrow


class Lengths:
    """Lengths in bytes and validity of strings."""

    def __init__(self) -> None:
        self._number = self._total = self._invalid = 0
        self._min: int | None = None
        self._max: int | None = None

    def update(self, values: pa.Array, counts: np.ndarray) -> None:
        """Add different values with how often each occurs."""
        if not len(values):
            return
        lengths = pc.binary_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
        self._number += int(counts.sum())
        self._total += int(lengths @ counts)
        self._invalid += int(counts[_invalid(values)].sum())
        self._widen(int(lengths.min()), int(lengths.max()))

    def merge(self, other: Lengths) -> None:
        """Add what another has seen."""
        self._number, self._total = self._number + other._number, self._total + other._total
        self._invalid += other._invalid
        if other._min is not None and other._max is not None:
            self._widen(other._min, other._max)

    def finish(self) -> dict[str, Any]:
        """The fields of `FeatureStatistics` that tell of it."""
        return {
            "num_invalid_utf8": self._invalid,
            "min_length_bytes": self._min,
            "max_length_bytes": self._max,
            "mean_length_bytes": self._total / self._number if self._number else None,
        }

    def _widen(self, low: int, high: int) -> None:
        self._min = low if self._min is None else min(self._min, low)
        self._max = high if self._max is None else max(self._max, high)


class Strings:
    """Adds up a column of strings."""

    def __init__(self, max_top_values: int, *, is_list: bool) -> None:
        self._is_list = is_list
        self._rows, self._lengths = RowCounts(), Lengths()
        self._top = TopCounts(max_top_values, "binary")
        self._weighted = TopCounts(max_top_values, "binary", ("weight",))

    def update(self, batch: np.ndarray, weights: np.ndarray | None) -> None:
        """Add a batch `(rows,)` or `(rows, values)` of bytes."""
        self._add(column_of_array(batch, weights))

    def update_arrow(self, array: pa.Array, weights: np.ndarray | None) -> None:
        """Add an Arrow array of strings or lists of them."""
        self._add(column_of_arrow(array, pa.binary(), b"", weights))

    def merge(self, other: Strings) -> None:
        """Add what another has seen."""
        self._rows.merge(other._rows)
        self._lengths.merge(other._lengths)
        self._top.merge(other._top)
        self._weighted.merge(other._weighted)

    def finish(self) -> FeatureStatistics:
        """The statistics of all that was added."""
        rows = self._rows
        weighted = WeightedStatistics(rows.weight, rows.missing_weight, top_values=self._weighted.finish())
        return FeatureStatistics(
            type="string",
            count=rows.count,
            missing=rows.missing,
            top_values=self._top.finish(),
            num_unique=self._top.num_unique,
            weighted=weighted if rows.has_weights else None,
            **self._lengths.finish(),
            **(rows.of_lists() if self._is_list else {}),
        )

    def _add(self, column: Column) -> None:
        is_present = pc.greater(pc.binary_length(column.values), 0)
        present = is_present.to_numpy(zero_copy_only=False)
        self._rows.update(column.per_row(present), column.weights)
        values = column.values if present.all() else column.values.filter(is_present)
        if not len(values):
            return
        counted = values.value_counts()
        self._lengths.update(counted.field("values"), counted.field("counts").to_numpy())
        self._top.update(counted.field("values"), counted.field("counts"))
        if (weights := column.weights_of(present)) is not None:
            self._weighted.update(values, pa.array(weights))


def _invalid(values: pa.Array) -> np.ndarray:
    """Which values are not text in UTF-8."""
    try:
        values.cast(pa.utf8())
    except pa.ArrowInvalid:
        return np.array([not _is_utf8(value) for value in values.to_pylist()])
    return np.zeros(len(values), bool)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
