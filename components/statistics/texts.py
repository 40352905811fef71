"""Statistics of texts, whose words are counted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import tensorflow as tf

from components.statistics.counts import TopCounts
from components.statistics.features import FeatureStatistics, WeightedStatistics
from components.statistics.rows import RowCounts
from components.statistics.strings import Lengths

# As keras.layers.TextVectorization(standardize="lower_and_strip_punctuation", split="whitespace") does it.
_PUNCTUATION = r'[!"#$%&()\*\+,-\./:;<=>?@\[\\\]^_`{|}~\']'


def tokenize(texts: tf.Tensor) -> tf.RaggedTensor:
    """Words of each text `(batch,)`, lower-cased and without punctuation, as Keras's TextVectorization finds them."""
    return tf.strings.split(tf.strings.regex_replace(tf.strings.lower(texts), _PUNCTUATION, ""))


class Texts:
    """Adds up a column of texts."""

    def __init__(self, max_top_values: int) -> None:
        self._rows, self._lengths = RowCounts(), Lengths()
        self._num_tokens = 0
        self._tokens = TopCounts(max_top_values, "binary", ("count", "documents"))

    def update(self, batch: np.ndarray, weights: np.ndarray | None) -> None:
        """Add a batch `(rows,)` of bytes."""
        present = batch != b""
        self._rows.update(present.astype(np.int64), weights)
        texts = batch[present]
        self._lengths.update(pa.array(texts, pa.binary()), np.ones(len(texts), np.int64))
        words = tokenize(tf.constant(texts, tf.string))
        tokens, places, counts = tf.unique_with_counts(words.flat_values, tf.int64)
        pairs = np.unique(words.value_rowids().numpy() * max(len(tokens), 1) + places.numpy())
        documents = np.bincount(pairs % max(len(tokens), 1), minlength=len(tokens))
        self._num_tokens += len(places)
        self._tokens.update(pa.array(tokens.numpy(), pa.binary()), pa.array(counts.numpy()), pa.array(documents))

    def update_arrow(self, array: pa.Array, weights: np.ndarray | None) -> None:
        """Add an Arrow array of strings."""
        self.update(array.cast(pa.binary()).fill_null(b"").to_numpy(zero_copy_only=False), weights)

    def merge(self, other: Texts) -> None:
        """Add what another has seen."""
        self._rows.merge(other._rows)
        self._lengths.merge(other._lengths)
        self._num_tokens += other._num_tokens
        self._tokens.merge(other._tokens)

    def finish(self) -> FeatureStatistics:
        """The statistics of all that was added."""
        rows = self._rows
        return FeatureStatistics(
            type="string",
            count=rows.count,
            missing=rows.missing,
            num_unique=self._tokens.num_unique,
            top_tokens=self._tokens.finish(),
            num_tokens=self._num_tokens,
            weighted=WeightedStatistics(rows.weight, rows.missing_weight) if rows.has_weights else None,
            **self._lengths.finish(),
        )
