"""Statistics of integers and floating-point numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from components.examples import MISSING_INT
from components.statistics.counts import TopCounts
from components.statistics.features import FeatureStatistics, WeightedStatistics
from components.statistics.moments import Moments
from components.statistics.quantiles import Quantiles
from components.statistics.rows import Column, RowCounts, column_of_array, column_of_arrow


class Numbers:
    """Adds up a column of numbers."""

    def __init__(
        self, kind: str, max_top_values: int, num_quantiles: int, max_exact_values: int, *, is_list: bool
    ) -> None:
        self._kind, self._num_quantiles, self._is_list = kind, num_quantiles, is_list
        self._rows = RowCounts()
        self._zeros = self._infinite = 0
        self._min, self._max = np.inf, -np.inf
        self._moments, self._log_moments, self._quantiles = Moments(), Moments(), Quantiles(max_exact_values)
        self._top = TopCounts(max_top_values, "int64")
        self._weighted = WeightedNumbers(max_top_values, max_exact_values)

    def update(self, batch: np.ndarray, weights: np.ndarray | None) -> None:
        """Add a batch `(rows, ...)`."""
        self._add(column_of_array(batch, weights))

    def update_arrow(self, array: pa.Array, weights: np.ndarray | None) -> None:
        """Add an Arrow array of numbers or lists of them."""
        if self._kind == "int":
            self._add(column_of_arrow(array, pa.int64(), MISSING_INT, weights))
        else:
            self._add(column_of_arrow(array, pa.float32(), np.nan, weights))

    def merge(self, other: Numbers) -> None:
        """Add what another has seen."""
        self._rows.merge(other._rows)
        self._zeros, self._infinite = self._zeros + other._zeros, self._infinite + other._infinite
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)
        self._moments.merge(other._moments)
        self._log_moments.merge(other._log_moments)
        self._quantiles.merge(other._quantiles)
        self._top.merge(other._top)
        self._weighted.merge(other._weighted)

    def finish(self) -> FeatureStatistics:
        """The statistics of all that was added."""
        mean, std = self._moments.finish()
        log_mean, log_std = self._log_moments.finish() if self._min >= 0 else (None, None)
        whole = self._kind == "int"
        seen = self._max >= self._min
        return FeatureStatistics(
            type=self._kind,
            count=self._rows.count,
            missing=self._rows.missing,
            zeros=self._zeros,
            min=float(self._min) if seen else None,
            max=float(self._max) if seen else None,
            mean=mean,
            std=std,
            quantiles=self._quantiles.finish(self._num_quantiles),
            histogram=self._quantiles.histogram(),
            log1p_mean=log_mean,
            log1p_std=log_std,
            num_infinite=self._infinite,
            top_values=self._top.finish() if whole else (),
            num_unique=self._top.num_unique if whole else None,
            weighted=self._weighted.finish(self._rows, self._num_quantiles) if self._rows.has_weights else None,
            **(self._rows.of_lists() if self._is_list else {}),
        )

    def _add(self, column: Column) -> None:
        is_int = self._kind == "int"
        present = column.values != MISSING_INT if is_int else ~np.isnan(column.values)
        self._rows.update(column.per_row(present), column.weights)
        exact = column.values[present]
        if not len(exact):
            return
        weights = column.weights_of(present)
        if is_int:
            counted = pa.array(exact).value_counts()
            self._top.update(counted.field("values"), counted.field("counts"))
        values = exact.astype(np.float64)
        is_finite = np.isfinite(values)
        finite = values if is_finite.all() else values[is_finite]
        self._zeros += int((values == 0).sum())
        self._infinite += len(values) - len(finite)
        self._min, self._max = min(self._min, values.min()), max(self._max, values.max())
        self._moments.update(finite)
        self._quantiles.update(values)
        if self._min >= 0:
            self._log_moments.update(np.log1p(finite))
        if weights is not None:
            self._weighted.update(exact, values, is_finite, weights)


class WeightedNumbers:
    """What the weights of the rows change."""

    def __init__(self, max_top_values: int, max_exact_values: int) -> None:
        self._zeros = 0.0
        self._moments, self._quantiles = Moments(), Quantiles(max_exact_values)
        self._top = TopCounts(max_top_values, "int64", ("weight",))

    def update(self, exact: np.ndarray, values: np.ndarray, is_finite: np.ndarray, weights: np.ndarray) -> None:
        self._zeros += float(weights[values == 0].sum())
        self._moments.update(values[is_finite], weights[is_finite])
        heavy = weights > 0
        if heavy.any():
            self._quantiles.update(values[heavy], weights[heavy])
        if exact.dtype == np.int64:
            self._top.update(pa.array(exact), pa.array(weights))

    def merge(self, other: WeightedNumbers) -> None:
        self._zeros += other._zeros
        self._moments.merge(other._moments)
        self._quantiles.merge(other._quantiles)
        self._top.merge(other._top)

    def finish(self, rows: RowCounts, num_quantiles: int) -> WeightedStatistics:
        mean, std = self._moments.finish()
        return WeightedStatistics(
            count=rows.weight,
            missing=rows.missing_weight,
            zeros=self._zeros,
            mean=mean,
            std=std,
            quantiles=self._quantiles.finish(num_quantiles),
            top_values=self._top.finish(),
        )
