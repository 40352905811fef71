"""Operations on strings and integers that give numbers of categories: single values `(batch,)`, or lists `(batch, longest)`.

In a list the missing elements are padding and no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.preprocessing.missing import is_missing
from components.preprocessing.numbers import make_lookup


class CategoriesOp(keras.layers.Layer):
    """Category ids as the model takes them.

    Args:
        num_categories: How many there are.
        output: `ids`: `(batch, 1)` int64, of lists `(batch, length)` with 1 added and 0 where there is no value;
            `multi_hot` and `count`: `(batch, num_categories)` float32.
        length: Of `ids` of lists.
    """

    def __init__(self, *, num_categories: int, output: str = "ids", length: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_categories, self.output_mode, self.length = num_categories, output, length

    def call(self, raw: tf.Tensor) -> tf.Tensor:
        ids = self.ids_of(raw)
        if raw.shape.rank == 1:
            ids = ids[:, tf.newaxis]
            return ids if self.output_mode == "ids" else self._vector(ids)
        there = ~is_missing(raw)
        if self.output_mode != "ids":
            return self._vector(tf.where(there, ids, self.num_categories))
        ids = tf.where(there, ids + 1, 0)[:, : self.length]
        padded = tf.pad(ids, [[0, 0], [0, self.length - tf.shape(ids)[1]]])
        return tf.ensure_shape(padded, [None, self.length])

    def ids_of(self, raw: tf.Tensor) -> tf.Tensor:
        """The category of each value, int64 in the shape of `raw`."""
        raise NotImplementedError

    def _vector(self, ids: tf.Tensor) -> tf.Tensor:
        # The last place is that of padding.
        size, is_binary = self.num_categories + 1, self.output_mode == "multi_hot"
        counts = tf.math.bincount(ids, minlength=size, maxlength=size, axis=-1, binary_output=is_binary)
        return tf.ensure_shape(tf.cast(counts[:, :-1], tf.float32), [None, self.num_categories])


class VocabularyOp(CategoriesOp):
    """Place in the vocabulary, after those of all other values.

    Args:
        vocabulary: Strings or integers.
        num_oov_buckets: Places that values outside the vocabulary are hashed onto.
        missing_category: Whether the last category is that of missing single values.
        fill: Stands for a missing single value.
    """

    def __init__(
        self,
        *,
        vocabulary: list[Any],
        num_oov_buckets: int = 1,
        missing_category: bool = False,
        fill: str | int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lookup = make_lookup(vocabulary, num_oov_buckets=num_oov_buckets)
        self.missing_category, self.fill = missing_category, fill

    def ids_of(self, raw: tf.Tensor) -> tf.Tensor:
        if self.fill is not None:
            raw = tf.where(is_missing(raw), tf.constant(self.fill, raw.dtype), raw)
        ids = self.lookup(raw)
        return tf.where(is_missing(raw), np.int64(self.num_categories - 1), ids) if self.missing_category else ids


class HashOp(CategoriesOp):
    """Hash bin of each value; of a missing single one, too."""

    def __init__(self, *, salt: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hashing = keras.layers.Hashing(num_bins=self.num_categories, salt=salt)

    def ids_of(self, raw: tf.Tensor) -> tf.Tensor:
        return tf.cast(self.hashing(_as_text(raw)), tf.int64)


class CrossOp(HashOp):
    """Hash bin of several values together, each `(batch,)` or `(batch, 1)`."""

    def call(self, columns: Sequence[tf.Tensor]) -> tf.Tensor:
        texts = [_as_text(tf.reshape(column, [-1])) for column in columns]
        return super().call(tf.strings.join(texts, separator="\0"))


def _as_text(raw: tf.Tensor) -> tf.Tensor:
    return raw if raw.dtype == tf.string else tf.strings.as_string(raw)
