"""The operation on images."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.preprocessing.missing import is_missing


class ImageOp(keras.layers.Layer):
    """Images as `(batch, height, width, channels)` float32, scaled to [0, 1], resized and normalised per channel.

    Args:
        size: (height, width) to resize to, bilinearly.
        mean: One number, or one a channel.
        std: As `mean`.
        channels: The raw feature is not uint8 of this shape but `(batch,)` files, decoded to so many channels; an empty
            one becomes 0 everywhere. EXIF orientation is not looked at.
    """

    def __init__(
        self,
        *,
        size: list[int] | None,
        mean: list[float],
        std: list[float],
        channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.size, self.mean, self.std = size, np.asarray(mean, np.float32), np.asarray(std, np.float32)
        self.channels = channels
        self.file_shape = [*(size or ()), channels]

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        if self.channels is None:
            return self._normalised(self._resized(raw))
        spec = tf.TensorSpec(self.file_shape, tf.float32)
        images = tf.map_fn(self._decoded, raw, fn_output_signature=spec)
        return tf.where(is_missing(raw)[:, tf.newaxis, tf.newaxis, tf.newaxis], 0.0, self._normalised(images))

    def _decoded(self, file: tf.Tensor) -> tf.Tensor:
        """One image `(height, width, channels)` in [0, 1]."""

        def decoded() -> tf.Tensor:
            return self._resized(tf.io.decode_image(file, self.channels, expand_animations=False)[tf.newaxis])[0]

        return tf.cond(is_missing(file), lambda: tf.zeros(self.file_shape), decoded)

    def _resized(self, images: tf.Tensor) -> tf.Tensor:
        x = tf.cast(images, tf.float32) * (1.0 / 255.0)
        if self.size is None or tuple(self.size) == tuple(x.shape[1:3]):
            return x
        return tf.image.resize(x, self.size)

    def _normalised(self, images: tf.Tensor) -> tf.Tensor:
        return (images - self.mean) / self.std
