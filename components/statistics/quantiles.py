"""Quantiles and histograms."""

from __future__ import annotations

import numpy as np

NUM_RANGES = 10
_SKETCH_SHARE = 10


class Quantiles:
    """Values with weights; beyond `max_exact` of them, thinned to a tenth as many points of equal weight."""

    def __init__(self, max_exact: int) -> None:
        self._max_exact = max_exact
        self._chunks: list[tuple[np.ndarray, np.ndarray | None]] = []
        self._size = 0

    def update(self, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add values; without weights each counts once."""
        self._chunks.append((values, weights))
        self._size += len(values)
        if self._size > self._max_exact:
            self._thin()

    def merge(self, other: Quantiles) -> None:
        """Add what another has seen."""
        for values, weights in other._chunks:
            self.update(values, weights)

    def finish(self, num_quantiles: int) -> tuple[float, ...]:
        """The values at `num_quantiles + 1` ranks, from the smallest to the largest."""
        if not self._size:
            return ()
        return tuple(_at_ranks(*self._sorted(), np.arange(num_quantiles + 1) / num_quantiles).tolist())

    def histogram(self) -> tuple[tuple[float, float, int], ...]:
        """`(low, high, count)` of ranges of equal width between the smallest and the largest finite value."""
        if not self._size:
            return ()
        values, weights = self._sorted()
        finite = np.isfinite(values)
        values, weights = values[finite], None if weights is None else weights[finite]
        if not len(values):
            return ()
        # Halves first, since the width of the range may be more than a float can hold.
        edges = np.linspace(values[0] / 2, values[-1] / 2, NUM_RANGES + 1) * 2 if values[0] < values[-1] else values[:1]
        if len(edges) == 1:
            return ((float(edges[0]), float(edges[0]), round(len(values) if weights is None else weights.sum())),)
        edges[0], edges[-1] = values[0], values[-1]
        places = np.searchsorted(values, edges[1:-1])
        ends = np.concatenate([[0], places, [len(values)]])
        running = ends if weights is None else np.concatenate([[0.0], np.cumsum(weights)])[ends]
        counts = np.diff(np.rint(running).astype(np.int64))
        return tuple(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))

    def _thin(self) -> None:
        values, weights = _without_repeats(*self._sorted())
        if len(values) > self._max_exact // 2:
            size = max(self._max_exact // _SKETCH_SHARE, 2)
            middles = (np.arange(size) + 0.5) / size
            low, high, total = values[0], values[-1], weights.sum()
            values = _at_ranks(values, weights, middles)
            values[0], values[-1] = low, high
            weights = np.full(size, total / size)
        self._chunks, self._size = [(values, weights)], len(values)

    def _sorted(self) -> tuple[np.ndarray, np.ndarray | None]:
        values = np.concatenate([values for values, _ in self._chunks]).astype(np.float64)
        if all(weights is None for _, weights in self._chunks):
            values.sort()
            return values, None
        weights = np.concatenate([np.ones(len(v)) if w is None else w for v, w in self._chunks])
        order = np.argsort(values, kind="stable")
        return values[order], weights[order]


def _without_repeats(values: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Each of the sorted values once, with the weight of all of them."""
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    if weights is None:
        return values[starts], np.diff(np.append(starts, len(values))).astype(np.float64)
    return values[starts], np.add.reduceat(weights, starts)


def _at_ranks(values: np.ndarray, weights: np.ndarray | None, ranks: np.ndarray) -> np.ndarray:
    """The smallest value whose cumulative weight reaches each rank in [0, 1] (numpy's `inverted_cdf`)."""
    if weights is None:
        places = np.ceil(ranks * len(values) * (1 - 1e-12)).astype(np.int64) - 1
        return values[np.clip(places, 0, len(values) - 1)]
    cumulative = np.cumsum(weights)
    places = np.searchsorted(cumulative, ranks * cumulative[-1] * (1 - 1e-12))
    return values[np.minimum(places, len(values) - 1)]
