"""Which raw values are missing: NaN, `MISSING_INT` and the empty string."""

from __future__ import annotations

import tensorflow as tf

from components.examples import MISSING_INT


def is_missing(raw: tf.Tensor) -> tf.Tensor:
    """Booleans in the shape of a raw feature."""
    if raw.dtype == tf.string:
        return tf.equal(raw, b"")
    return tf.math.is_nan(raw) if raw.dtype.is_floating else tf.equal(raw, MISSING_INT)


def split_missing(raw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Where a numeric tensor has no value, and the tensor as float32 with 0 there."""
    missing = is_missing(raw)
    return missing, tf.where(missing, 0.0, tf.cast(raw, tf.float32))
