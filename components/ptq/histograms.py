"""Which part of a tensor's numbers an int8 range shall cover, told from their histogram."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NUM_BINS = 2048
_LEVELS = 255
_STEP = 8
"""Bins between two ends that `entropy` tries."""


@dataclass(frozen=True)
class Histogram:
    """How often an activation has which values.

    Zeros are not counted: every range has an integer for zero, so they cost nothing.

    Attributes:
        low: Smallest value, or zero.
        high: Largest value, or zero.
        counts: Of bins of equal width from `low` to `high`, `(NUM_BINS,)`.
    """

    low: float
    high: float
    counts: np.ndarray

    @property
    def edges(self) -> np.ndarray:
        """`(NUM_BINS + 1,)`."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)


def range_of(histogram: Histogram, method: str, percentile: float) -> tuple[float, float]:
    """The ends of the range, which holds zero.

    Args:
        histogram: Of the tensor.
        method: `min_max`: all values. `percentile`: all but the same share at both ends. `entropy`: those magnitudes
            whose rounded distribution has the least Kullback-Leibler divergence from the unrounded one (Migacz, "8-bit
            inference with TensorRT", GTC 2017). `mse`: least mean squared error of rounding and clipping.
        percentile: `percentile`: the share that is kept, in percent.
    """
    if method == "min_max" or not histogram.counts.any():
        return histogram.low, histogram.high
    if method == "percentile":
        return _percentile(histogram, percentile)
    return _entropy(histogram) if method == "entropy" else _mean_squared_error(histogram)


def _percentile(histogram: Histogram, percentile: float) -> tuple[float, float]:
    shares = np.append(0, np.cumsum(histogram.counts)) / histogram.counts.sum()
    cut = (100 - percentile) / 200
    low = histogram.edges[np.searchsorted(shares, cut, "right") - 1]
    high = histogram.edges[np.searchsorted(shares, 1 - cut, "left")]
    return min(float(low), 0.0), max(float(high), 0.0)


def _mean_squared_error(histogram: Histogram) -> tuple[float, float]:
    """Rounding within a range errs by step²/12 on average, clipping by the square of the distance to the end."""
    edges, counts = histogram.edges, histogram.counts.astype(np.float64)
    centers = (edges[:-1] + edges[1:]) / 2
    lows, highs = np.append(edges[edges < 0], 0), np.append(0, edges[edges > 0])
    below, above = _clipping(centers, counts, lows), _clipping(-centers[::-1], counts[::-1], -highs)
    steps = (highs[None, :] - lows[:, None]) / _LEVELS
    errors = below[:, None] + above[None, :] + counts.sum() * steps**2 / 12
    row, column = np.unravel_index(np.argmin(errors), errors.shape)
    return float(lows[row]), float(highs[column])


def _clipping(centers: np.ndarray, counts: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Sum of the squared distances of all values below each of `lows`."""
    moments = [np.append(0, np.cumsum(counts * centers**power)) for power in range(3)]
    zeroth, first, second = (moment[np.searchsorted(centers, lows)] for moment in moments)
    return second - 2 * lows * first + lows**2 * zeroth


def _entropy(histogram: Histogram) -> tuple[float, float]:
    edges, counts = histogram.edges, histogram.counts.astype(np.float64)
    largest = max(-histogram.low, histogram.high)
    width = edges[1] - edges[0]
    found, least = (histogram.low, histogram.high), np.inf
    for magnitude in np.arange(largest, _LEVELS * width, -_STEP * width):
        start, stop = np.searchsorted(edges, -magnitude), np.searchsorted(edges, magnitude, "right") - 1
        if stop - start < _LEVELS:
            break
        if (divergence := _divergence(counts, start, stop)) < least:
            found, least = (min(float(edges[start]), 0.0), max(float(edges[stop]), 0.0)), divergence
    return found


def _divergence(counts: np.ndarray, start: int, stop: int) -> float:
    """Of bins `start:stop`, which take in what lies beyond, from the same bins with a constant within each level."""
    inside = counts[start:stop]
    clipped = inside.copy()
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[stop:].sum()
    level = np.arange(len(inside)) * _LEVELS // len(inside)
    is_filled = clipped > 0
    num_filled = np.bincount(level, is_filled, _LEVELS)
    mean = np.bincount(level, inside, _LEVELS) / np.maximum(num_filled, 1)
    rounded = mean[level][is_filled] + 1e-9 * counts.sum()
    share, rounded = clipped[is_filled] / clipped.sum(), rounded / rounded.sum()
    return float((share * np.log(share / rounded)).sum())
