"""Trains a small network on 1, 2 and 3 logical CPU devices and prints what came out as JSON.

Run by test_engine.py in a process of its own, since TensorFlow splits the CPU only before its first operation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.config import TrainConfig
from components.train import devices, objective
from components.train.batches import TrainBatches
from components.train.engine import Engine
from models.spec import OutputSpec

BATCH = 24
STEPS = 6
OUTPUT = OutputSpec("binary", 2)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    x = keras.Input((4,), name="x")
    y = keras.layers.Dense(8, name="dense")(x)
    y = keras.layers.BatchNormalization(momentum=0.5, name="norm")(y)
    y = keras.layers.Dense(1, name="logits", dtype="float32")(keras.layers.ReLU(name="relu")(y))
    return keras.Model({"x": x}, y)


def make_batches(num_examples: int = BATCH * STEPS, scale: float = 1.0) -> TrainBatches:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_examples, 4)).astype(np.float32) * scale
    labels = (x.sum(axis=1) > 0).astype(np.int64)
    weights = np.ones(num_examples, np.float32)
    return TrainBatches({"x": x}, labels, weights, batch_size=BATCH, seed=0)


def make_engine(
    strategy: tf.distribute.Strategy,
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
    precision: str,
    clip_norm: float | None,
    freeze_norm: bool,
) -> Engine:
    """An engine whose model and optimizer are made under the strategy, in this precision."""
    keras.config.set_dtype_policy(precision)
    with strategy.scope():
        model = make_model()
        model.get_layer("norm").trainable = not freeze_norm
        optimizer = make_optimizer()
    keras.config.set_dtype_policy("float32")
    return Engine(
        model,
        optimizer,
        objective.make_loss(OUTPUT, 0.0),
        strategy=strategy,
        global_batch_size=BATCH,
        xla=True,
        scale_loss=precision == "mixed_float16",
        clip_norm=clip_norm,
    )


def train(
    num_devices: int, *, precision: str = "float32", clip_norm: float | None = 0.05, freeze_norm: bool = False
) -> dict[str, Any]:
    """Six steps; batch norm works on its moving statistics where `freeze_norm`, so that every replica computes alike."""
    config = TrainConfig(
        strategy="mirrored" if num_devices > 1 else "one_device",
        num_devices=num_devices if num_devices > 1 else None,
        global_batch_size=BATCH,
    )
    strategy = devices.make_strategy(config)
    engine = make_engine(strategy, lambda: keras.optimizers.Adam(0.01), precision, clip_norm, freeze_norm)
    model = engine.model
    batches = make_batches()
    outcome = engine.run(iter(strategy.experimental_distribute_dataset(batches.epochs(0, 1))), STEPS)
    copies = [
        [c.numpy().tolist() for c in strategy.experimental_local_results(v.value)]
        for v in model.non_trainable_variables
    ]
    return {
        "loss": outcome.total_loss / outcome.steps,
        "weights": [weight.numpy().tolist() for weight in model.trainable_variables],
        "statistics_by_replica": copies,
    }


def overflow_on_one_replica() -> dict[str, Any]:
    """mixed_float16 on two devices, where only the second one's examples overflow."""
    config = TrainConfig(strategy="mirrored", num_devices=2, global_batch_size=BATCH)
    strategy = devices.make_strategy(config)
    engine = make_engine(strategy, lambda: keras.optimizers.SGD(0.1), "mixed_float16", None, freeze_norm=True)
    model = engine.model
    x = np.ones((2 * BATCH, 4), np.float32)
    x[BATCH // 2 : BATCH] = 6e4
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"x": x}, np.ones(2 * BATCH, np.int64), np.ones(2 * BATCH, np.float32))
    )
    before = [weight.numpy() for weight in model.trainable_variables]
    batches = iter(strategy.experimental_distribute_dataset(dataset.batch(BATCH, drop_remainder=True)))
    first = engine.run(batches, 1)
    unchanged = all(
        (weight.numpy() == old).all() for weight, old in zip(model.trainable_variables, before, strict=True)
    )
    scale = float(engine.loss_scale.numpy())
    second = engine.run(batches, 1)
    finite = all(np.isfinite(weight.numpy()).all() for weight in model.trainable_variables)
    changed = any((weight.numpy() != old).any() for weight, old in zip(model.trainable_variables, before, strict=True))
    return {
        "skipped": [first.skipped_steps, second.skipped_steps],
        "unchanged_after_overflow": unchanged,
        "loss_scale": scale,
        "finite": finite,
        "changed_by_the_good_step": changed,
    }


def main() -> None:
    """Print everything."""
    devices.prepare(TrainConfig(strategy="mirrored", num_devices=3))
    print(
        json.dumps(
            {
                "equal": {n: train(n, freeze_norm=True) for n in (1, 2, 3)},
                "norm": train(2),
                "unclipped": train(1, clip_norm=None, freeze_norm=True),
                "half": {n: train(n, precision="mixed_float16", freeze_norm=True) for n in (1, 2)},
                "overflow": overflow_on_one_replica(),
            }
        )
    )


if __name__ == "__main__":
    main()
