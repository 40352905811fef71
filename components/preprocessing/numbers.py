"""Operations on numbers: int64 or float32, `(batch,)` as `(batch, 1)`, or tensors of a fixed shape as they are.

They compute in float32. An infinite value stays infinite, but for `min_max` with `clip`, and for `log` below 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.examples import MISSING_INT
from components.preprocessing.missing import split_missing


class NumberOp(keras.layers.Layer):
    """The numbers as they are, float32; the base of those that scale them.

    Args:
        fill: What a missing value is replaced by before it is scaled; `None`: the result is 0.
        missing_indicator: Whether a second column says, by 1, where the value is missing.
    """

    def __init__(self, *, fill: float | None = None, missing_indicator: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fill, self.missing_indicator = fill, missing_indicator

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        return self._scaled(raw, self.scale)

    def scale(self, x: tf.Tensor) -> tf.Tensor:
        """The scaled numbers, float32 in the shape of `x`."""
        return x

    def _scaled(self, raw: tf.Tensor, scale: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        missing, x = split_missing(raw)
        x = tf.where(missing, 0.0, scale(x)) if self.fill is None else scale(tf.where(missing, self.fill, x))
        if x.shape.rank > 1:
            return x
        columns = [x, tf.cast(missing, tf.float32)] if self.missing_indicator else [x]
        return tf.stack(columns, axis=1)


class NormalizeOp(NumberOp):
    """`(x - mean) / std`, of log(1 + x) if asked; a deviation of 0 counts as 1."""

    def __init__(self, *, mean: float, std: float, log: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mean, self.std, self.log = mean, std or 1.0, log

    def scale(self, x: tf.Tensor) -> tf.Tensor:
        return ((log1p(x) if self.log else x) - self.mean) / self.std


class NormalizeByKeyOp(NumberOp):
    """As `NormalizeOp`, with the moments of the row's key `(batch,)`; the first ones are those of any other key."""

    def __init__(self, *, keys: list[Any], means: list[float], stds: list[float], log: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lookup, self.log = make_lookup(keys, num_oov_buckets=1), log
        self.means, self.stds = np.array(means, np.float32), np.array([std or 1.0 for std in stds], np.float32)

    def call(self, raw_and_key: Sequence[tf.Tensor]) -> tf.Tensor:
        raw, key = raw_and_key
        places = self.lookup(key)
        means, stds = tf.gather(self.means, places), tf.gather(self.stds, places)
        return self._scaled(raw, lambda x: ((log1p(x) if self.log else x) - means) / stds)


class MinMaxOp(NumberOp):
    """`[low, high]` onto `range`; of a single value onto its beginning."""

    def __init__(self, *, low: float, high: float, range: list[float], clip: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.low, self.width, self.range, self.clip = low, high - low or 1.0, range, clip

    def scale(self, x: tf.Tensor) -> tf.Tensor:
        begin, end = self.range
        x = (x - self.low) / self.width * (end - begin) + begin
        return tf.clip_by_value(x, begin, end) if self.clip else x


class RobustOp(NumberOp):
    """`(x - median) / width`; a width of 0 counts as 1."""

    def __init__(self, *, median: float, width: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.median, self.width = median, width or 1.0

    def scale(self, x: tf.Tensor) -> tf.Tensor:
        return (x - self.median) / self.width


class LogOp(NumberOp):
    """`log(1 + x)`, of negative numbers 0."""

    def scale(self, x: tf.Tensor) -> tf.Tensor:
        return log1p(x)


class BucketizeOp(keras.layers.Layer):
    """Index of the bucket as `(batch, 1)` int64; the last index stands for missing values."""

    def __init__(self, *, boundaries: list[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.boundaries = boundaries
        self.discretization = keras.layers.Discretization(bin_boundaries=boundaries)

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        missing, x = split_missing(raw)
        buckets = tf.cast(self.discretization(x), tf.int64)
        return tf.where(missing, np.int64(len(self.boundaries) + 1), buckets)[:, tf.newaxis]


def log1p(x: tf.Tensor) -> tf.Tensor:
    """`log(1 + x)`, of negative numbers 0."""
    return tf.math.log1p(tf.maximum(x, 0.0))


def make_lookup(vocabulary: list[Any], *, num_oov_buckets: int) -> keras.layers.Layer:
    """Value -> place in the vocabulary, counted from `num_oov_buckets`; below it are those of all other values."""
    if isinstance(vocabulary[0], str):
        # Keras refuses its token for other values as an entry; this one no data has.
        return keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=num_oov_buckets, oov_token="\0oov")
    # For integers it is -1, which data may have.
    return keras.layers.IntegerLookup(vocabulary=vocabulary, num_oov_indices=num_oov_buckets, oov_token=MISSING_INT)
