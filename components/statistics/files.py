"""Statistics of strings that are no text: files within a column."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.statistics.features import FeatureStatistics, WeightedStatistics
from components.statistics.rows import Column, RowCounts, column_of_array, column_of_arrow
from components.statistics.strings import Lengths


class Files:
    """Adds up a column of files: how many there are, and of which length."""

    def __init__(self, *, is_list: bool) -> None:
        self._is_list = is_list
        self._rows, self._lengths = RowCounts(), Lengths()

    def update(self, batch: np.ndarray, weights: np.ndarray | None) -> None:
        """Add a batch `(rows,)` or `(rows, values)` of bytes."""
        self._add(column_of_array(batch, weights))

    def update_arrow(self, array: pa.Array, weights: np.ndarray | None) -> None:
        """Add an Arrow array of bytes or lists of them."""
        self._add(column_of_arrow(array, pa.binary(), b"", weights))

    def merge(self, other: Files) -> None:
        """Add what another has seen."""
        self._rows.merge(other._rows)
        self._lengths.merge(other._lengths)

    def finish(self) -> FeatureStatistics:
        """The statistics of all that was added."""
        rows = self._rows
        found = FeatureStatistics(
            type="string",
            count=rows.count,
            missing=rows.missing,
            weighted=WeightedStatistics(rows.weight, rows.missing_weight) if rows.has_weights else None,
            **self._lengths.finish(),
            **(rows.of_lists() if self._is_list else {}),
        )
        return dataclasses.replace(found, num_invalid_utf8=0)  # which nobody asks of a file

    def _add(self, column: Column) -> None:
        present = pc.greater(pc.binary_length(column.values), 0).to_numpy(zero_copy_only=False)
        self._rows.update(column.per_row(present), column.weights)
        files = column.values.filter(pa.array(present))
        self._lengths.update(files, np.ones(len(files), np.int64))
