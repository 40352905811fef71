"""The batches of a run: of a transformed split in memory, in an order that follows from (seed, epoch), or of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import numpy as np
import tensorflow as tf

from components.errors import ConfigError, DataError

_WITHOUT_END = 2**62


class Batches(Protocol):
    """The batches of a run, from any step on."""

    steps_per_epoch: int

    def from_step(self, step: int) -> tf.data.Dataset:
        """The batches from the global step `step`, counted from 0, on, without end."""


class DatasetBatches:
    """A dataset that is repeated; to go on at a later step, the batches before it are read and dropped.

    Args:
        dataset: Of batches, in the same order each time it is read from the beginning: shuffled with a seed, or not.
        steps_per_epoch: Batches that make an epoch; default: all of them.

    Raises:
        ConfigError: the dataset has no end and `steps_per_epoch` is not given.
        DataError: it is empty.
    """

    def __init__(self, dataset: tf.data.Dataset, steps_per_epoch: int | None = None) -> None:
        size = int(dataset.cardinality())
        if steps_per_epoch is None and size == tf.data.INFINITE_CARDINALITY:
            raise ConfigError("The dataset has no end. Say how many batches make an epoch: steps_per_epoch=...")
        if steps_per_epoch is None and size == tf.data.UNKNOWN_CARDINALITY:
            size = sum(1 for _ in dataset)
        self.steps_per_epoch = steps_per_epoch or size
        if not self.steps_per_epoch:
            raise DataError("The dataset to train on is empty.")
        self._dataset = dataset.repeat().prefetch(tf.data.AUTOTUNE)

    def from_step(self, step: int) -> tf.data.Dataset:
        """The batches from the global step `step` on."""
        return self._dataset.skip(step)


class TrainBatches:
    """The shuffled batches of a split in memory: `(features, labels, weights)`.

    The order is a stateless permutation of (seed, epoch, position), so an epoch can be repeated or resumed without saving
    an iterator. With `last_batch="drop"` batches have one static shape, which XLA compiles once; the examples left over
    at the end of an epoch differ from epoch to epoch.

    Args:
        features: Name -> `(num_examples, ...)`.
        labels: `(num_examples,)`.
        weights: `(num_examples,)` float32.
        batch_size: Examples per batch, over all devices.
        seed: Seed of the order.
        last_batch: Whether the examples left over make a smaller batch.
        part_of: First row and end of what this process takes of a batch of so many rows; default: all of it.
    """

    def __init__(
        self,
        features: Mapping[str, np.ndarray],
        labels: np.ndarray,
        weights: np.ndarray,
        *,
        batch_size: int,
        seed: int,
        last_batch: Literal["drop", "keep"] = "drop",
        part_of: Callable[[int], tuple[int, int]] = lambda num_rows: (0, num_rows),
    ) -> None:
        self._tensors = tf.nest.map_structure(tf.constant, (dict(features), labels, weights))
        self._num_examples, self._batch_size, self._seed = len(labels), batch_size, seed
        self._rest = self._num_examples % batch_size if last_batch == "keep" else 0
        self._part, self._part_of_rest = part_of(batch_size), part_of(self._rest)
        self.steps_per_epoch = self._num_examples // batch_size + (self._rest > 0)

    def from_step(self, step: int) -> tf.data.Dataset:
        """The batches from the global step `step` on, each with this process's rows."""
        steps = tf.data.Dataset.range(step, _WITHOUT_END)
        return steps.map(self._gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(
            tf.data.AUTOTUNE
        )

    def _gather(self, step: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
        epoch, step_in_epoch = step // self.steps_per_epoch, step % self.steps_per_epoch
        positions, start, stop = tf.range(*self._part, dtype=tf.int64), 0, self._part[1] - self._part[0]
        if self._rest and step_in_epoch == self.steps_per_epoch - 1:
            # All workers', since TensorFlow cannot shuffle nothing, which may be this worker's part.
            positions, (start, stop) = tf.range(self._rest, dtype=tf.int64), self._part_of_rest
        rows = tf.random.experimental.index_shuffle(
            step_in_epoch * self._batch_size + positions,
            seed=tf.stack([tf.constant(self._seed, tf.int64), epoch]),
            max_index=self._num_examples - 1,
        )[start:stop]
        if not self._rest:
            rows = tf.ensure_shape(rows, [self._part[1] - self._part[0]])
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), self._tensors)
