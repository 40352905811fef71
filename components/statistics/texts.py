"""Statistics of texts, whose words are counted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from components.statistics.counts import TopCounts
from components.statistics.features import FeatureStatistics, TokenCounts, WeightedStatistics
from components.statistics.rows import Column, RowCounts, column_of_array, column_of_arrow
from components.statistics.strings import Lengths
from components.tokens import tokenize
from components.transform_config import WORDS, Tokenization


class Texts:
    """Adds up a column of texts, cut into words or otherwise."""

    def __init__(self, max_top_values: int, *, is_list: bool, tokenization: Tokenization = WORDS) -> None:
        self._is_list, self._tokenization = is_list, tokenization
        self._rows, self._lengths = RowCounts(), Lengths()
        self._num_tokens = 0
        self._tokens = TopCounts(max_top_values, "binary", ("count", "documents"))

    def update(self, batch: np.ndarray, weights: np.ndarray | None) -> None:
        """Add a batch `(rows,)` or `(rows, values)` of bytes."""
        self._add(column_of_array(batch, weights))

    def update_arrow(self, array: pa.Array, weights: np.ndarray | None) -> None:
        """Add an Arrow array of strings or lists of them."""
        self._add(column_of_arrow(array, pa.binary(), b"", weights))

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
            **(rows.of_lists() if self._is_list else {}),
        )

    def finish_tokens(self) -> TokenCounts:
        """What was counted, alone."""
        return TokenCounts(self._tokens.num_unique, self._tokens.finish())

    def _add(self, column: Column) -> None:
        present = pc.greater(pc.binary_length(column.values), 0).to_numpy(zero_copy_only=False)
        self._rows.update(column.per_row(present), column.weights)
        texts = column.values.filter(pa.array(present))
        self._lengths.update(texts, np.ones(len(texts), np.int64))
        words = tokenize(tf.constant(texts.to_numpy(zero_copy_only=False), tf.string), self._tokenization)
        tokens, places, counts = tf.unique_with_counts(words.flat_values, tf.int64)
        # A row is a document, however many texts it has.
        rows = np.flatnonzero(present) if column.owners is None else column.owners[present]
        pairs = np.unique(rows[words.value_rowids().numpy()] * max(len(tokens), 1) + places.numpy())
        documents = np.bincount(pairs % max(len(tokens), 1), minlength=len(tokens))
        self._num_tokens += len(places)
        self._tokens.update(pa.array(tokens.numpy(), pa.binary()), pa.array(counts.numpy()), pa.array(documents))
