"""A short training of the model in int8, towards the answers that it gave in float."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from components.config import TrainConfig
from components.formats.network import Arrays
from components.ptq.simulation import Simulation
from components.train.fit import fit

_BATCH_SIZE = 32


def finetune(
    simulation: Simulation,
    features: Arrays,
    targets: list[np.ndarray],
    *,
    num_steps: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Train the weights; ranges and batch-norm statistics stay as they are.

    The loss is the mean squared error of each output, as a part of its power, so that no labels are needed and every
    output counts alike.
    """
    simulation.switch()
    simulation.student.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)),
        loss=["mse"] * len(targets),
        loss_weights=[1 / max(float(np.square(target).mean()), 1e-30) for target in targets],
        auto_scale_loss=False,
    )
    num_examples = len(targets[0])
    dataset = tf.data.Dataset.from_tensor_slices((dict(features), tuple(targets)))
    dataset = dataset.shuffle(num_examples, seed=seed).repeat()
    dataset = dataset.batch(min(_BATCH_SIZE, num_examples), drop_remainder=True)
    with _without_dropout(simulation.aware):
        fit(simulation.student, dataset, config=TrainConfig(epochs=1, xla="off", seed=seed), steps_per_epoch=num_steps)


@contextlib.contextmanager
def _without_dropout(model: keras.Model) -> Iterator[None]:
    """The answers that are to be learned are those of inference."""
    rates = [(layer, layer.rate) for layer in model.layers if hasattr(layer, "rate")]
    for layer, _ in rates:
        layer.rate = 0.0
    try:
        yield
    finally:
        for layer, rate in rates:
            layer.rate = rate
