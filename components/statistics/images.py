"""Statistics of images, and of other tensors of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from components.statistics.features import FeatureStatistics


class Images:
    """Adds up a column of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._count, self._pixels = 0, 0
        self._sum: Any = 0
        self._squares: Any = 0
        self._min, self._max = 255, 0

    def update(self, batch: np.ndarray, weights: np.ndarray | None) -> None:
        """Add a batch `(rows, *shape)`; weights change nothing here."""
        flat = batch.reshape(-1, batch.shape[-1])
        histograms = np.stack([np.bincount(channel, minlength=256) for channel in flat.T])
        levels = np.arange(256)
        self._count, self._pixels = self._count + len(batch), self._pixels + len(flat)
        self._sum = self._sum + histograms @ levels
        self._squares = self._squares + histograms @ levels**2
        self._min, self._max = min(self._min, int(batch.min())), max(self._max, int(batch.max()))

    def update_arrow(self, array: pa.Array, weights: np.ndarray | None) -> None:
        """Add an Arrow array of tensors, or of lists of bytes."""
        storage = array.storage if isinstance(array, pa.ExtensionArray) else array
        while not pa.types.is_integer(storage.type):
            storage = storage.flatten()
        flat = storage.cast(pa.uint8()).to_numpy(zero_copy_only=False)
        self.update(flat.reshape(len(array), *self._shape), weights)

    def merge(self, other: Images) -> None:
        """Add what another has seen."""
        self._count, self._pixels = self._count + other._count, self._pixels + other._pixels
        self._sum, self._squares = self._sum + other._sum, self._squares + other._squares
        self._min, self._max = min(self._min, other._min), max(self._max, other._max)

    def finish(self) -> FeatureStatistics:
        """The statistics of all that was added."""
        if not self._count:
            return FeatureStatistics(type="uint8", count=0, missing=0)
        mean = self._sum / self._pixels
        variance = np.maximum(self._squares / self._pixels - mean**2, 0)
        return FeatureStatistics(
            type="uint8",
            count=self._count,
            missing=0,
            min=float(self._min),
            max=float(self._max),
            channel_mean=tuple(mean.tolist()),
            channel_std=tuple(np.sqrt(variance).tolist()),
        )
