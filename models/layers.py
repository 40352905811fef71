"""Keras layers of the zoo that Keras does not have. None of them has weights except the position table.

They are registered under `headrace>`: a process that loads a saved model which uses them imports this module first.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

PADDING_ID = 0
MASKED_SCORE = -1e9


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
class MaskedAttention(keras.layers.Layer):
    """Scaled dot-product attention over several heads, without the projections (Vaswani et al., arXiv:1706.03762).

    Queries, keys and values come from ordinary Dense layers outside, so that whatever works on a Dense (LoRA, tensor
    parallelism, quantization) works on them. Scores and softmax are float32 under any dtype policy.

    Args:
        num_heads: Number of heads; divides the last dimension.
    """

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def call(
        self,
        query: keras.KerasTensor,
        key: keras.KerasTensor,
        value: keras.KerasTensor,
        is_token: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """Attend from each position to the tokens.

        Args:
            query: `(batch, length, dim)`; so are `key` and `value`.
            key: What each position offers.
            value: What each position gives.
            is_token: `(batch, length)` boolean; positions where it is false are not attended to. None: all are.

        Returns:
            `(batch, length, dim)`.
        """
        head_dim = query.shape[-1] // self.num_heads
        scores = ops.matmul(self._split(query), ops.transpose(self._split(key), (0, 1, 3, 2)))
        # Not of the queries: in int8 models the division is what keeps mask and softmax in float.
        scores = ops.cast(scores, "float32") / head_dim**0.5
        if is_token is not None:
            scores = ops.where(is_token[:, None, None, :], scores, MASKED_SCORE)
        weights = ops.cast(ops.softmax(scores, axis=-1), self.compute_dtype)
        attended = ops.transpose(ops.matmul(weights, self._split(value)), (0, 2, 1, 3))
        return ops.reshape(attended, (-1, ops.shape(query)[1], query.shape[-1]))

    def _split(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """`(batch, length, dim)` to `(batch, num_heads, length, head_dim)`."""
        shape = (-1, ops.shape(inputs)[1], self.num_heads, inputs.shape[-1] // self.num_heads)
        return ops.transpose(ops.reshape(inputs, shape), (0, 2, 1, 3))

    def compute_output_shape(
        self, query_shape: tuple[int | None, ...], *_: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return query_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads}


@keras.saving.register_keras_serializable(package="headrace")
class MaskedMean(keras.layers.Layer):
    """Mean over tokens: `(batch, length, dim)` and a mask `(batch, length)` to `(batch, dim)`; zero without tokens."""

    def call(self, inputs: keras.KerasTensor, is_token: keras.KerasTensor) -> keras.KerasTensor:
        weights = ops.cast(is_token, inputs.dtype)[:, :, None]
        return ops.sum(inputs * weights, axis=1) / ops.maximum(ops.sum(weights, axis=1), 1)
