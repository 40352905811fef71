"""Mean and deviation of a number for each value of a key: mergeable, bounded in memory, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from components.examples import MISSING_INT

KeyMoments = tuple[int | str, int, float, float, float, float]
"""Key, rows with it, mean and population standard deviation of the number, and of log(1 + max(number, 0))."""

_KEEP_FACTOR = 4


class KeyedMoments:
    """Adds up batches of a number and its key; rows that lack either, or whose number is infinite, are left out.

    Args:
        max_keys: Keys that `finish` gives, the most frequent ones. Of keys that come after far more than these, the
            rarest are forgotten, so that their counts may be too small.

    Source of the updates: Chan, Golub, LeVeque, "Updating formulae ... sample variances" (1979).
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._places: dict[Any, int] = {}
        # (keys, 2): of the number and of its logarithm.
        self._count, self._mean, self._squares = np.zeros(0), np.zeros((0, 2)), np.zeros((0, 2))

    def update(self, numbers: np.ndarray, keys: np.ndarray) -> None:
        """Add `(batch,)` numbers and `(batch,)` keys, int64 or bytes."""
        missing = numbers == MISSING_INT if numbers.dtype.kind == "i" else ~np.isfinite(numbers)
        there = ~missing & (keys != (b"" if keys.dtype == object else MISSING_INT))
        if not there.any():
            return
        encoded = pa.array(keys[there], pa.binary() if keys.dtype == object else pa.int64()).dictionary_encode()
        groups = encoded.indices.to_numpy()
        values = numbers[there].astype(np.float64)
        values = np.stack([values, np.log1p(np.maximum(values, 0))], axis=1)
        count = np.bincount(groups)
        mean = np.stack([np.bincount(groups, column) for column in values.T], axis=1) / count[:, np.newaxis]
        distances = (values - mean[groups]) ** 2
        squares = np.stack([np.bincount(groups, column) for column in distances.T], axis=1)
        self._add(encoded.dictionary.to_pylist(), count, mean, squares)

    def merge(self, other: KeyedMoments) -> None:
        """Add what another one has seen."""
        self._add(list(other._places), other._count, other._mean, other._squares)

    def finish(self) -> tuple[KeyMoments, ...]:
        """The most frequent keys first, then by key."""
        rows = []
        for key, place in self._ranked(self._max_keys):
            count = self._count[place]
            (mean, log_mean), (std, log_std) = self._mean[place], (self._squares[place] / count) ** 0.5
            name = key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else key
            rows.append((name, int(count), float(mean), float(std), float(log_mean), float(log_std)))
        return tuple(rows)

    def _add(self, keys: Sequence[Any], count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> None:
        places = np.array([self._places.setdefault(key, len(self._places)) for key in keys], np.int64)
        new = len(self._places) - len(self._count)
        self._count = np.pad(self._count, (0, new))
        self._mean, self._squares = (np.pad(each, ((0, new), (0, 0))) for each in (self._mean, self._squares))
        before, total = self._count[places][:, np.newaxis], (self._count[places] + count)[:, np.newaxis]
        added, difference = count[:, np.newaxis], mean - self._mean[places]
        self._squares[places] += squares + difference**2 * before * added / total
        self._mean[places] += difference * added / total
        self._count[places] += count
        if len(self._places) > 2 * _KEEP_FACTOR * self._max_keys:
            self._forget_rare()

    def _forget_rare(self) -> None:
        kept = self._ranked(_KEEP_FACTOR * self._max_keys)
        rows = [place for _, place in kept]
        self._count, self._mean, self._squares = self._count[rows], self._mean[rows], self._squares[rows]
        self._places = {key: place for place, (key, _) in enumerate(kept)}

    def _ranked(self, limit: int) -> list[tuple[Any, int]]:
        return sorted(self._places.items(), key=lambda item: (-self._count[item[1]], item[0]))[:limit]
