"""Keras layers of the zoo that Keras does not have. None of them has weights except the position table.
Attention is in `models.attention`.

They are registered under `headrace>`: a process that loads a saved model which uses them imports this module first.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

PADDING_ID = 0


@keras.saving.register_keras_serializable(package="headrace")
def gelu_tanh(inputs: keras.KerasTensor) -> keras.KerasTensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel, arXiv:1606.08415).

    The exact GELU is an Erfc node, for which ONNX has no operator.
    """
    return ops.gelu(inputs, approximate=True)


@keras.saving.register_keras_serializable(package="headrace")
class PaddingMask(keras.layers.Layer):
    """Token ids `(batch, length)` to booleans of that shape: true for a token, false for padding."""

    def call(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        return ops.not_equal(ids, PADDING_ID)


@keras.saving.register_keras_serializable(package="headrace")
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector per position to embeddings `(batch, length, dim)` (Vaswani et al., arXiv:1706.03762).

    Args:
        max_length: Number of positions in the table; a longer input is an error.
    """

    def __init__(self, max_length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_length = max_length

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        initializer = keras.initializers.RandomNormal(stddev=0.02)
        shape = (self.max_length, input_shape[-1])
        self.positions = self.add_weight(name="positions", shape=shape, initializer=initializer)

    def call(self, embeddings: keras.KerasTensor) -> keras.KerasTensor:
        return embeddings + self.positions[: ops.shape(embeddings)[1]]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "max_length": self.max_length}


@keras.saving.register_keras_serializable(package="headrace")
class SinusoidalPositions(keras.layers.Layer):
    """Adds sines and cosines of the position to embeddings `(batch, length, dim)` times sqrt(dim).

    Even places hold `sin(position / 10000^(place / dim))`, the odd one after each the cosine; no weights, any length.
    Source: Vaswani et al., sections 3.4 and 3.5; without the factor the embeddings would be lost beside the positions.
    """

    def call(self, embeddings: keras.KerasTensor) -> keras.KerasTensor:
        dim = embeddings.shape[-1]
        places = np.arange(dim)
        rates = 10000.0 ** -(places // 2 * 2 / dim)
        angles = ops.cast(ops.arange(ops.shape(embeddings)[1]), "float32")[:, None] * rates.astype(np.float32)
        table = ops.where(places % 2 == 0, ops.sin(angles), ops.cos(angles))
        return embeddings * dim**0.5 + ops.cast(table, embeddings.dtype)


@keras.saving.register_keras_serializable(package="headrace")
class MaskedMean(keras.layers.Layer):
    """Mean over tokens: `(batch, length, dim)` and a mask `(batch, length)` to `(batch, dim)`; zero without tokens."""

    def call(self, inputs: keras.KerasTensor, is_token: keras.KerasTensor) -> keras.KerasTensor:
        weights = ops.cast(is_token, inputs.dtype)[:, :, None]
        return ops.sum(inputs * weights, axis=1) / ops.maximum(ops.sum(weights, axis=1), 1)
