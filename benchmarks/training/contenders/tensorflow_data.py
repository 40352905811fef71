"""The input pipeline of every contender that runs on TensorFlow."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.training.workloads import Batch


def dataset(data: Batch) -> tf.data.Dataset:
    """The batches, again and again."""
    return tf.data.Dataset.from_tensor_slices(data).repeat().prefetch(tf.data.AUTOTUNE)
