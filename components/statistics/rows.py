"""How the values of a column lie in its rows, whether it comes as a numpy array or from Arrow, and counts of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class Column:
    """Values of a column, one after the other.

    Attributes:
        values: `(num_values,)`, a numpy array of numbers or an Arrow array of bytes; missing ones among them.
        owners: `(num_values,)`, the row of each; `None`: one value a row.
        num_rows: Rows.
        weights: `(num_rows,)`, or `None`: each row counts once.
    """

    values: Any
    owners: np.ndarray | None
    num_rows: int
    weights: np.ndarray | None = None

    def per_row(self, present: np.ndarray) -> np.ndarray:
        """Number of present values of each row, `(num_rows,)`."""
        if self.owners is None:
            return present.astype(np.int64)
        return np.bincount(self.owners[present], minlength=self.num_rows)

    def weights_of(self, present: np.ndarray) -> np.ndarray | None:
        """Weight of each present value."""
        if self.weights is None:
            return None
        return self.weights[present if self.owners is None else self.owners[present]]


def column_of_array(batch: np.ndarray, weights: np.ndarray | None) -> Column:
    """The column of a batch `(rows, ...)`."""
    width = batch[0].size if batch.ndim > 1 else 1
    owners = np.repeat(np.arange(len(batch)), width) if batch.ndim > 1 else None
    flat = batch.ravel()
    return Column(pa.array(flat, pa.binary()) if batch.dtype == object else flat, owners, len(batch), weights)


def column_of_arrow(array: pa.Array, kind: pa.DataType, missing: Any, weights: np.ndarray | None) -> Column:
    """The column of an Arrow array of scalars or lists; its nulls become `missing`.

    Args:
        array: `(rows,)`.
        kind: What the values are cast to.
        missing: Stands for a null.
        weights: `(rows,)`.
    """
    owners = None
    num_rows = len(array)
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        parents = pc.list_parent_indices(array).to_numpy(zero_copy_only=False)
        owners = parents if owners is None else owners[parents]
        array = pc.list_flatten(array)
    values = array.cast(kind, safe=pa.types.is_integer(kind)).fill_null(missing)
    return Column(
        values if pa.types.is_binary(kind) else values.to_numpy(zero_copy_only=False), owners, num_rows, weights
    )


class RowCounts:
    """Rows, missing rows and the numbers of values in them."""

    def __init__(self) -> None:
        self.count = self.missing = self._values = self._most = 0
        self._fewest: int | None = None
        self.weight = self.missing_weight = 0.0
        self.has_weights = False

    def update(self, per_row: np.ndarray, weights: np.ndarray | None) -> None:
        """Add rows that have so many values each."""
        absent = per_row == 0
        missing = int(absent.sum())
        self.count += len(per_row)
        self.missing += missing
        if missing < len(per_row):
            self._values += int(per_row.sum())
            self._most = max(self._most, int(per_row.max()))
            fewest = int(per_row[~absent].min())
            self._fewest = fewest if self._fewest is None else min(self._fewest, fewest)
        if weights is not None:
            self.has_weights = True
            self.weight += float(weights.sum())
            self.missing_weight += float(weights[absent].sum())

    def merge(self, other: RowCounts) -> None:
        """Add the rows of another."""
        self.count, self.missing = self.count + other.count, self.missing + other.missing
        self._values, self._most = self._values + other._values, max(self._most, other._most)
        self._fewest = min((each for each in (self._fewest, other._fewest) if each is not None), default=None)
        self.weight, self.missing_weight = self.weight + other.weight, self.missing_weight + other.missing_weight
        self.has_weights |= other.has_weights

    def of_lists(self) -> dict[str, Any]:
        """The fields that only lists have."""
        if self._fewest is None:
            return {}
        return {
            "min_num_values": self._fewest,
            "max_num_values": self._most,
            "mean_num_values": self._values / (self.count - self.missing),
        }
