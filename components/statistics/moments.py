"""Mean and variance."""

from __future__ import annotations

import numpy as np


class Moments:
    """Mean and variance. Source: Chan, Golub, LeVeque, "Updating formulae ... sample variances" (1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0.0, 0.0, 0.0

    def update(self, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add values, each with its weight."""
        count = float(len(values) if weights is None else weights.sum())
        if count:
            mean = float(values.mean() if weights is None else values @ weights / count)
            squares = np.square(values - mean)
            self._add(count, mean, float(squares.sum() if weights is None else squares @ weights))

    def merge(self, other: Moments) -> None:
        """Add what another has seen."""
        if other._count:
            self._add(other._count, other._mean, other._squares)

    def finish(self) -> tuple[float, float] | tuple[None, None]:
        """Mean and population standard deviation."""
        return (self._mean, (self._squares / self._count) ** 0.5) if self._count else (None, None)

    def _add(self, count: float, mean: float, squares: float) -> None:
        total, difference = self._count + count, mean - self._mean
        self._squares += squares + difference**2 * self._count * count / total
        self._mean += difference * count / total
        self._count = total
