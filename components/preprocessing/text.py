"""The operation on text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf


class TextOp(keras.layers.Layer):
    """Token ids as `(batch, length)` int64, or `(batch, vocabulary + 1)` float32 of weights, presence or counts.

    The first place of a vector is that of unknown tokens, whose weight is the mean of the others'.
    """

    def __init__(
        self,
        *,
        vocabulary: list[str],
        output: str,
        length: int,
        idf: list[float],
        standardize: str,
        split: str,
        ngrams: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.vectorize = keras.layers.TextVectorization(
            vocabulary=vocabulary,
            output_mode="int" if output == "ids" else output,
            output_sequence_length=length if output == "ids" else None,
            idf_weights=np.asarray(idf, np.float32) if output == "tf_idf" else None,
            standardize=None if standardize == "none" else standardize,
            split=split,
            ngrams=ngrams if ngrams > 1 else None,
        )
        self.output_dtype = tf.int64 if output == "ids" else tf.float32

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.vectorize(raw), self.output_dtype)
