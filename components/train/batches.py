"""Batches of a transformed split in memory, in an order that follows from (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf


class TrainBatches:
    """The shuffled, full batches of each epoch.

    The order is a stateless permutation of (seed, epoch, position), so an epoch can be repeated or resumed without saving
    an iterator. Batches have one static shape, which XLA compiles once; the examples left over at the end of an epoch
    differ from epoch to epoch.

    Args:
        features: Name -> `(num_examples, ...)`.
        labels: `(num_examples,)`.
        weights: `(num_examples,)` float32.
        batch_size: Examples per batch, over all devices.
        seed: Seed of the order.
        rows: First row and end of the part of each batch that this process takes; default: all of it.
    """

    def __init__(
        self,
        features: Mapping[str, np.ndarray],
        labels: np.ndarray,
        weights: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self._tensors = tf.nest.map_structure(tf.constant, (dict(features), labels, weights))
        self._num_examples = len(labels)
        self._batch_size = batch_size
        self._seed = seed
        self._rows = rows or (0, batch_size)
        self.steps_per_epoch = self._num_examples // batch_size

    def epochs(self, start: int, stop: int) -> tf.data.Dataset:
        """The batches of the epochs `start` to `stop - 1`: `(features, labels, weights)`, each with the rows asked for."""
        positions = tf.range(*self._rows, dtype=tf.int64)

        def gather(step: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
            epoch, step_in_epoch = step // self.steps_per_epoch, step % self.steps_per_epoch
            rows = tf.random.experimental.index_shuffle(
                step_in_epoch * self._batch_size + positions,
                seed=tf.stack([tf.constant(self._seed, tf.int64), epoch]),
                max_index=self._num_examples - 1,
            )
            rows = tf.ensure_shape(rows, [self._rows[1] - self._rows[0]])
            return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), self._tensors)

        steps = tf.data.Dataset.range(start * self.steps_per_epoch, stop * self.steps_per_epoch)
        return steps.map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)
