"""The loss, the example weights and the optimizer that a configuration names."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from components.config import OptimizerConfig, TrainConfig
from components.train.engine import LossFunction
from models.spec import OutputSpec

NOT_DECAYED = ["bias", "gamma", "beta"]


def make_loss(output: OutputSpec, label_smoothing: float) -> LossFunction:
    """`(labels (batch,), logits (batch, num_logits)) -> (batch,)`: cross-entropy, or squared error for regression."""

    def regression(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.square(tf.cast(labels, tf.float32) - tf.squeeze(logits, axis=1))

    def binary(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        targets = tf.cast(labels, tf.float32) * (1 - label_smoothing) + 0.5 * label_smoothing
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=tf.squeeze(logits, axis=1))

    def multiclass(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        targets = tf.one_hot(labels, output.num_classes) * (1 - label_smoothing) + label_smoothing / output.num_classes
        return tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits)

    return {"regression": regression, "binary": binary, "multiclass": multiclass}[output.task]


def example_weights(labels: np.ndarray, output: OutputSpec, mode: str) -> np.ndarray:
    """`(num_examples,)` float32: all one, or such that every class weighs the same and the mean is one."""
    if mode == "none" or output.task == "regression":
        return np.ones(len(labels), np.float32)
    counts = np.maximum(np.bincount(labels, minlength=output.num_classes), 1)
    return (len(labels) / (np.count_nonzero(counts) * counts))[labels].astype(np.float32)


def make_optimizer(config: TrainConfig, num_steps: int) -> keras.optimizers.Optimizer:
    """The optimizer with its schedule over `num_steps` steps."""
    settings = config.optimizer
    rate = make_learning_rate(settings, num_steps)
    if settings.name == "sgd":
        optimizer = keras.optimizers.SGD(rate, momentum=settings.momentum, weight_decay=settings.weight_decay or None)
    elif settings.name == "adamw":
        optimizer = keras.optimizers.AdamW(rate, weight_decay=settings.weight_decay)
    else:
        return keras.optimizers.Adam(rate)
    if settings.weight_decay:
        optimizer.exclude_from_weight_decay(var_names=NOT_DECAYED)
    return optimizer


def make_learning_rate(
    settings: OptimizerConfig, num_steps: int
) -> float | keras.optimizers.schedules.LearningRateSchedule:
    """A constant or a cosine decay to zero, either after a linear warm-up."""
    schedules = keras.optimizers.schedules
    warmup = settings.warmup_steps
    if settings.schedule == "cosine":
        return schedules.CosineDecay(
            initial_learning_rate=0.0 if warmup else settings.learning_rate,
            decay_steps=max(num_steps - warmup, 1),
            warmup_target=settings.learning_rate if warmup else None,
            warmup_steps=warmup,
        )
    if warmup:
        return schedules.PolynomialDecay(
            settings.learning_rate / warmup, warmup, end_learning_rate=settings.learning_rate
        )
    return settings.learning_rate
