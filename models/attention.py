"""Attention over `(batch, length, dim)` without the projections: full, within a window, or in linear time.

Queries, keys and values come from ordinary Dense layers outside, so that whatever works on a Dense (LoRA, tensor
parallelism, quantization) works on them. Scores, softmax and sums are float32 under any dtype policy.

Sources: A. Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762). The sliding window: I. Beltagy et al.,
"Longformer" (arXiv:2004.05150). Linear attention: A. Katharopoulos et al., "Transformers are RNNs" (arXiv:2006.16236).
Rotary positions: J. Su et al., "RoFormer" (arXiv:2104.09864). Relative positions: C. Raffel et al., "Exploring the Limits
of Transfer Learning" (arXiv:1910.10683).
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

MASKED_SCORE = -1e9
_ROTARY_BASE = 10000.0


class _Attention(keras.layers.Layer):
    """What the kinds of attention share.

    Args:
        num_heads: Number of heads; divides the last dimension.
        causal: Whether a position attends to none after it.
        rotary: Whether queries and keys are turned by an angle that grows with their position.
    """

    def __init__(self, num_heads: int, *, causal: bool = False, rotary: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.causal, self.rotary = num_heads, causal, rotary

    def _split(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """`(batch, length, dim)` to `(batch, num_heads, length, head_dim)`."""
        shape = (-1, ops.shape(inputs)[1], self.num_heads, inputs.shape[-1] // self.num_heads)
        return ops.transpose(ops.reshape(inputs, shape), (0, 2, 1, 3))

    def _join(self, attended: keras.KerasTensor, like: keras.KerasTensor) -> keras.KerasTensor:
        """Inverse of `_split`."""
        return ops.reshape(ops.transpose(attended, (0, 2, 1, 3)), (-1, ops.shape(like)[1], like.shape[-1]))

    def _turned(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return rotate(inputs) if self.rotary else inputs

    def compute_output_shape(
        self, query_shape: tuple[int | None, ...], *_: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return query_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads, "causal": self.causal, "rotary": self.rotary}


@keras.saving.register_keras_serializable(package="headrace")
class MaskedAttention(_Attention):
    """Scaled dot-product attention over several heads."""

    def call(
        self,
        query: keras.KerasTensor,
        key: keras.KerasTensor,
        value: keras.KerasTensor,
        is_token: keras.KerasTensor | None = None,
        bias: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """Attend from each position to the tokens.

        Args:
            query: `(batch, length, dim)`; so are `key` and `value`.
            key: What each position offers.
            value: What each position gives.
            is_token: `(batch, length)`, boolean: positions where it is false are not attended to; or whole numbers: a
                position attends to those of its own number, which is how packed sequences are kept apart. 0 is padding.
                None: all are tokens.
            bias: `(1, num_heads, length, length)` that is added to the scores, of `RelativePositionBias`.

        Returns:
            `(batch, length, dim)`.
        """
        head_dim = query.shape[-1] // self.num_heads
        queries, keys = self._turned(self._split(query)), self._turned(self._split(key))
        scores = ops.matmul(queries, ops.transpose(keys, (0, 1, 3, 2)))
        # Not of the queries: in int8 models the division is what keeps mask and softmax in float.
        scores = ops.cast(scores, "float32") / head_dim**0.5
        if bias is not None:
            scores = scores + ops.cast(bias, "float32")
        if is_token is not None:
            scores = ops.where(_may_see(is_token, is_token), scores, MASKED_SCORE)
        if self.causal:
            places = ops.arange(ops.shape(query)[1])
            scores = ops.where(places[None, :] <= places[:, None], scores, MASKED_SCORE)
        weights = ops.cast(ops.softmax(scores, axis=-1), self.compute_dtype)
        return self._join(ops.matmul(weights, self._split(value)), query)


@keras.saving.register_keras_serializable(package="headrace")
class LocalAttention(_Attention):
    """Attention to the positions at most `window` away, in time and memory linear in the length.

    Args:
        window: Largest distance, in tokens.
    """

    def __init__(self, num_heads: int, window: int, **kwargs: Any) -> None:
        super().__init__(num_heads, **kwargs)
        self.window = window

    def call(
        self,
        query: keras.KerasTensor,
        key: keras.KerasTensor,
        value: keras.KerasTensor,
        is_token: keras.KerasTensor | None = None,
        bias: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """As `MaskedAttention.call`; `bias` is `(1, num_heads, 1, window, 3 * window)`.

        The sequence is cut into blocks of `window` positions. A block looks at itself and at the one on either side.
        """
        head_dim = query.shape[-1] // self.num_heads
        length = ops.shape(query)[1]
        tokens = ops.ones_like(query[:, :, 0], dtype="bool") if is_token is None else is_token
        queries = self._blocks(self._turned(self._split(query)))
        keys, values = (_with_neighbours(self._blocks(x)) for x in (self._turned(self._split(key)), self._split(value)))
        scores = ops.cast(ops.matmul(queries, ops.transpose(keys, (0, 1, 2, 4, 3))), "float32") / head_dim**0.5
        if bias is not None:
            scores = scores + ops.cast(bias, "float32")
        mine = self._blocks(ops.cast(tokens, "int32")[:, None, :, None])  # (batch, 1, blocks, window, 1)
        theirs = ops.transpose(_with_neighbours(mine), (0, 1, 2, 4, 3))
        offsets = block_offsets(self.window)
        near = (np.abs(offsets) <= self.window) & ((offsets <= 0) if self.causal else True)
        scores = ops.where(ops.logical_and(ops.equal(mine, theirs), theirs > 0), scores, MASKED_SCORE)
        scores = ops.where(near, scores, MASKED_SCORE)
        weights = ops.cast(ops.softmax(scores, axis=-1), self.compute_dtype)
        attended = ops.matmul(weights, values)
        attended = ops.reshape(attended, (-1, self.num_heads, ops.shape(attended)[2] * self.window, head_dim))
        return self._join(attended[:, :, :length], query)

    def _blocks(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """`(batch, heads, length, n)` to `(batch, heads, blocks, window, n)`, padded by zeros."""
        missing = -ops.shape(inputs)[2] % self.window
        padded = ops.pad(inputs, ((0, 0), (0, 0), (0, missing), (0, 0)))
        return ops.reshape(
            padded, (-1, inputs.shape[1], ops.shape(padded)[2] // self.window, self.window, inputs.shape[-1])
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "window": self.window}


@keras.saving.register_keras_serializable(package="headrace")
class LinearAttention(_Attention):
    """Attention whose weights are products of features, so that sums over the keys are shared by all queries.

    The features are elu(x) + 1. Time is linear in the length, memory too.
    """

    def call(
        self,
        query: keras.KerasTensor,
        key: keras.KerasTensor,
        value: keras.KerasTensor,
        is_token: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """As `MaskedAttention.call`, where `is_token` is boolean.

        With rotary positions the weights' numerator is turned and the sum that they are divided by is not, as in RoFormer's
        equation 19.
        """
        queries, keys = (ops.elu(ops.cast(self._split(x), "float32")) + 1.0 for x in (query, key))
        if is_token is not None:
            keys = keys * ops.cast(is_token, "float32")[:, None, :, None]
        values = ops.cast(self._split(value), "float32")
        products = self._sum(self._turned(keys)[..., None] * values[..., None, :])
        attended = ops.matmul(self._turned(queries)[..., None, :], products)[..., 0, :]
        totals = ops.sum(queries * self._sum(keys), axis=-1, keepdims=True)
        return self._join(ops.cast(attended / ops.maximum(totals, 1e-6), self.compute_dtype), query)

    def _sum(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Over the keys that a query may see: those up to it, or all."""
        return ops.cumsum(inputs, axis=2) if self.causal else ops.sum(inputs, axis=2, keepdims=True)


@keras.saving.register_keras_serializable(package="headrace")
class RelativePositionBias(keras.layers.Layer):
    """A learned number for each head and each bucket of distances, to add to attention scores: T5's.

    Half of the buckets are of keys after the query. In each half, half of the buckets stand for one distance each, the
    others for distances that grow by a constant factor up to `max_distance`.

    Args:
        num_heads: Number of attention heads.
        window: That of `LocalAttention`, whose scores it is for; None: of full attention.
        num_buckets: Numbers of each head, divisible by 4.
        max_distance: Distance in tokens from which on all share a bucket.
    """

    def __init__(
        self,
        num_heads: int,
        window: int | None = None,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.window, self.num_buckets, self.max_distance = num_heads, window, num_buckets, max_distance

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.table = self.add_weight(name="table", shape=(self.num_buckets, self.num_heads), initializer=initializer)

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Of a sequence `(batch, length, dim)`: the `bias` that `MaskedAttention` or `LocalAttention` takes."""
        if self.window is not None:
            offsets = ops.convert_to_tensor(block_offsets(self.window), dtype="int32")[None]
        else:
            places = ops.arange(ops.shape(inputs)[1])
            offsets = places[None, :] - places[:, None]
        bias = ops.take(self.table, self._buckets(offsets), axis=0)
        return ops.moveaxis(bias, -1, 0)[None]

    def _buckets(self, offsets: keras.KerasTensor) -> keras.KerasTensor:
        half = self.num_buckets // 2
        exact = half // 2
        distance = ops.abs(offsets)
        growth = ops.log(ops.maximum(ops.cast(distance, "float32"), 1.0) / exact) / math.log(self.max_distance / exact)
        grown = exact + ops.cast(growth * (half - exact), "int32")
        bucket = ops.where(distance < exact, ops.cast(distance, "int32"), ops.minimum(grown, half - 1))
        return bucket + ops.cast(offsets > 0, "int32") * half

    def get_config(self) -> dict[str, Any]:
        sizes = {"num_buckets": self.num_buckets, "max_distance": self.max_distance}
        return {**super().get_config(), "num_heads": self.num_heads, "window": self.window, **sizes}


def rotate(inputs: keras.KerasTensor) -> keras.KerasTensor:
    """Turn pairs of numbers by angles that grow with the position, so that products depend on differences of positions.

    Args:
        inputs: `(batch, heads, length, head_dim)` of even `head_dim`; number `i` is paired with `i + head_dim / 2`.
    """
    half = inputs.shape[-1] // 2
    rates = (_ROTARY_BASE ** -(np.arange(half) / half)).astype(np.float32)
    angles = ops.cast(ops.arange(ops.shape(inputs)[2]), "float32")[:, None] * rates
    cosines, sines = (ops.cast(f(angles), inputs.dtype) for f in (ops.cos, ops.sin))
    first, second = inputs[..., :half], inputs[..., half:]
    return ops.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def block_offsets(window: int) -> np.ndarray:
    """Position of the key minus that of the query, `(window, 3 * window)`, within a block and its neighbours."""
    return np.arange(3 * window)[None, :] - window - np.arange(window)[:, None]


def _may_see(queries: keras.KerasTensor, keys: keras.KerasTensor) -> keras.KerasTensor:
    """`(batch, 1, length, length)`, or 1 for a length where it does not matter, of tokens or numbers of sequences."""
    if keras.backend.standardize_dtype(keys.dtype) == "bool":
        return keys[:, None, None, :]
    same = ops.equal(queries[:, None, :, None], keys[:, None, None, :])
    return ops.logical_and(same, keys[:, None, None, :] > 0)


def _with_neighbours(blocks: keras.KerasTensor) -> keras.KerasTensor:
    """Each block of `(batch, heads, blocks, window, n)` between those before and after: `(..., 3 * window, n)`."""
    nothing = ops.zeros_like(blocks[:, :, :1])
    before = ops.concatenate([nothing, blocks[:, :, :-1]], axis=2)
    after = ops.concatenate([blocks[:, :, 1:], nothing], axis=2)
    return ops.concatenate([before, blocks, after], axis=3)
