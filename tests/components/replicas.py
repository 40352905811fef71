"""Trains small networks on 1, 2 and 3 logical CPU devices and prints what came out as JSON.

Run by test_engine.py in a process of its own, since TensorFlow splits the CPU only before its first operation.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import progress
from components.config import LayerRate, OptimizerConfig, TrainConfig
from components.train import devices, fit, objective
from components.train.engine import Engine

# Divides neither by 2 nor by 3; the last batch has fewer rows than there are replicas.
BATCH, ROWS = 31, 63


def strategy_of(num_devices: int) -> tf.distribute.Strategy:
    chosen: dict[str, Any] = {"strategy": "mirrored", "num_devices": num_devices} if num_devices > 1 else {}
    return devices.make_strategy(TrainConfig(**chosen))


def copies(strategy: tf.distribute.Strategy, variables: list[Any]) -> list[list[Any]]:
    """Each variable's value on each replica."""
    return [[copy.numpy().tolist() for copy in strategy.experimental_local_results(v.value)] for v in variables]


def values(variables: list[Any]) -> list[Any]:
    return [variable.numpy().tolist() for variable in variables]


def examples(num_rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`(num_rows, 4)` features and `(num_rows, 1)` labels of two classes."""
    x = np.random.default_rng(seed).normal(size=(num_rows, 4)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)


def batches_of(*arrays: Any, batch_size: int = BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def run_epochs(engine: Engine, strategy: tf.distribute.Strategy, dataset: tf.data.Dataset, epochs: int = 1) -> None:
    engine.run(iter(strategy.experimental_distribute_dataset(dataset.repeat())), epochs * len(dataset))


def dense_model(*before: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh"), *before, keras.layers.Dense(1, dtype="float32")]
    return keras.Sequential([keras.Input((4,)), *layers])


def logits_loss() -> keras.losses.Loss:
    return keras.losses.BinaryCrossentropy(from_logits=True)


# Everything that `compile` takes


def train_everything(num_devices: int, *, clip_norm: float | None = 0.05, xla: bool = False) -> dict[str, Any]:
    """Two epochs of a model with two outputs, losses, weights of losses and examples, metrics of both kinds."""
    strategy = strategy_of(num_devices)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        x = keras.Input((4,), name="x")
        hidden = keras.layers.Dense(8, activation="tanh")(x)
        outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in ("kind", "size")}
        model = keras.Model({"x": x}, outputs)
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss={"kind": logits_loss(), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={
                "kind": [keras.metrics.BinaryAccuracy(threshold=0.0), keras.metrics.AUC(from_logits=True, name="auc")]
            },
            weighted_metrics={"size": ["mae"]},
            auto_scale_loss=False,
        )
    features, kind = examples()
    rng = np.random.default_rng(1)
    weights = {name: rng.uniform(0.2, 3, ROWS).astype(np.float32) for name in outputs}
    labels = {"kind": kind, "size": features.prod(axis=1, keepdims=True)}
    dataset = batches_of({"x": features}, labels, weights)
    clip = objective.make_clip(OptimizerConfig(clip_norm=clip_norm))
    engine = Engine(model, strategy=strategy, xla=xla, clip=clip, spec=dataset.element_spec)
    run_epochs(engine, strategy, dataset, epochs=2)
    return {
        "weights": copies(strategy, model.trainable_variables),
        "metrics": engine.metrics(),
        "evaluation": engine.evaluate(strategy.experimental_distribute_dataset(dataset)),
    }


# What replicas hold for themselves


def batch_norm_statistics(num_devices: int) -> list[list[Any]]:
    """Moving mean and variance of the features, on each replica, after an epoch."""
    strategy = strategy_of(num_devices)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        norm = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss=logits_loss(), auto_scale_loss=False)
    run_epochs(Engine(model, strategy=strategy, xla=False), strategy, batches_of(*examples()))
    return copies(strategy, [norm.moving_mean, norm.moving_variance])


class Outputs(keras.metrics.Metric):
    """Keeps the model's outputs for the last batch, on each replica for itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(name="outputs")
        self.last = self.add_variable(shape, "zeros", name="last")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.last.assign(y_pred)

    def result(self) -> Any:
        return keras.ops.sum(self.last)


MASK = (4, 16)


def train_on_dropout(num_devices: int, *before: str) -> dict[str, Any]:
    """Two steps of a model that puts out a dropout mask: the masks of each replica.

    `before` may be a layer that reduces over the replicas, for which TensorFlow switches between them within a step.
    """
    strategy = strategy_of(num_devices)
    with strategy.scope():
        normalize = {"norm": keras.layers.BatchNormalization(synchronized=True, scale=False, center=False)}
        layers = [keras.layers.Dense(MASK[1]), *(normalize[name] for name in before), keras.layers.Dropout(0.5, seed=3)]
        model = keras.Sequential([keras.Input(MASK[1:]), *layers])
        outputs = Outputs(MASK)
        model.compile(optimizer="sgd", loss="mse", metrics=[outputs], auto_scale_loss=False)
    draw = keras.random.SeedGenerator.next
    x = np.random.default_rng(0).normal(size=(MASK[0] * num_devices, MASK[1])).astype(np.float32)
    dataset = batches_of(x, x, batch_size=len(x))
    engine = Engine(model, strategy=strategy, xla=False, spec=dataset.element_spec)
    masks = []
    for _ in range(2):
        run_epochs(engine, strategy, dataset)
        masks.append([(np.array(copy) != 0).tolist() for copy in copies(strategy, [outputs.last])[0]])
    return {"masks": masks, "is_put_back": keras.random.SeedGenerator.next is draw}


# Steps with NaN or Inf


def around_a_bad_step(
    strategy: tf.distribute.Strategy,
    *,
    precision: str = "float32",
    xla: bool = False,
    accumulation_steps: int = 1,
    bad: float = np.nan,
) -> dict[str, Any]:
    """What a good step, a bad one and a good one change; only the last row of the bad one is bad."""
    num_rows = 8
    keras.config.set_dtype_policy(precision)
    with strategy.scope():
        model = dense_model(keras.layers.BatchNormalization())
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss=logits_loss(), metrics=["mae"], auto_scale_loss=False)
    keras.config.set_dtype_policy("float32")
    x, y = examples(3 * num_rows)
    x[2 * num_rows - 1, 0] = bad
    dataset = batches_of(x, y, batch_size=num_rows)
    engine = Engine(
        model,
        strategy=strategy,
        xla=xla,
        scale_loss=precision == "mixed_float16",
        accumulation_steps=accumulation_steps,
        spec=dataset.element_spec,
    )
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    told: dict[str, Any] = {"changed": [], "skipped": [], "in_a_row": [], "loss_scale": []}
    for _ in range(3):
        before = _state(engine, strategy)
        engine.run(batches, 1)
        after = _state(engine, strategy)
        told["changed"].append(sorted(name for name in before if before[name] != after[name]))
        told["skipped"].append(int(engine.skipped_steps.numpy()))
        told["in_a_row"].append(int(engine.bad_steps_in_a_row.numpy()))
        told["loss_scale"].append(float(engine.loss_scale.numpy()))
    told["is_finite"] = all(np.isfinite(weight.numpy()).all() for weight in model.weights)
    return told


def _state(engine: Engine, strategy: tf.distribute.Strategy) -> dict[str, Any]:
    return {
        "weights": copies(strategy, engine.model.trainable_variables),
        "statistics": copies(strategy, engine.model.non_trainable_variables),
        "optimizer": values(engine.optimizer.variables),
        "metrics": engine.local_state().tolist(),
    }


# Accumulation


def train_accumulated(
    strategy: tf.distribute.Strategy, accumulation_steps: int, *, precision: str = "float32", xla: bool = False
) -> dict[str, Any]:
    """Two epochs, with Adam and clipping, in batches of which none can be split evenly."""
    keras.config.set_dtype_policy(precision)
    with strategy.scope():
        model = dense_model()
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=logits_loss(),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
            auto_scale_loss=False,
        )
    keras.config.set_dtype_policy("float32")
    dataset = batches_of(*examples())
    engine = Engine(
        model,
        strategy=strategy,
        xla=xla,
        scale_loss=precision == "mixed_float16",
        clip=objective.make_clip(OptimizerConfig(clip_norm=0.05)),
        accumulation_steps=accumulation_steps,
        spec=dataset.element_spec,
    )
    run_epochs(engine, strategy, dataset, epochs=2)
    return {
        "weights": values(model.trainable_variables),
        "metrics": engine.metrics(),
        "skipped": int(engine.skipped_steps.numpy()),
    }


# A train_step of one's own


class OwnStep(keras.Model):
    """As in Keras's guide "Customizing what happens in fit() with TensorFlow"."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network

    def call(self, x: Any, training: bool = False) -> Any:
        return self.network(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def train_own_step(num_devices: int, *, is_own: bool) -> dict[str, Any]:
    strategy = strategy_of(num_devices)
    with strategy.scope():
        network = dense_model()
        model = OwnStep(network) if is_own else network
        accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
        model.compile(
            optimizer=keras.optimizers.Adam(0.01), loss=logits_loss(), metrics=[accuracy], auto_scale_loss=False
        )
    x, y = examples()
    dataset = batches_of(x, y)
    engine = Engine(model, strategy=strategy, xla=False, spec=dataset.element_spec)
    run_epochs(engine, strategy, dataset, epochs=2)
    return {"weights": values(network.trainable_variables), "metrics": engine.metrics()}


class Gan(keras.Model):
    """Two networks and two optimizers, as in Keras's guide on GANs."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense
        self.discriminator = keras.Sequential([keras.Input((4,)), dense(8, activation="relu"), dense(1)])
        self.generator = keras.Sequential([keras.Input((2,)), dense(8, activation="relu"), dense(4)])
        self.seed_generator = keras.random.SeedGenerator(1)
        self.losses_of = {name: keras.metrics.Mean(name=f"{name}_loss") for name in ("d", "g")}

    def compile(self, d_optimizer: keras.Optimizer, g_optimizer: keras.Optimizer) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return list(self.losses_of.values())

    def train_step(self, real: Any) -> dict[str, Any]:
        num_rows = tf.shape(real)[0]
        noise = keras.random.normal((num_rows, 2), seed=self.seed_generator)
        is_fake = tf.concat([tf.ones((num_rows, 1)), tf.zeros((num_rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = logits_loss()(is_fake, self.discriminator(tf.concat([self.generator(noise), real], axis=0)))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = logits_loss()(tf.zeros((num_rows, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.losses_of["d"].update_state(d_loss)
        self.losses_of["g"].update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def make_gan() -> Gan:
    gan = Gan()
    gan.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    return gan


def error_of_a_gan(num_devices: int) -> list[str]:
    strategy = strategy_of(num_devices)
    with strategy.scope():
        gan = make_gan()
    dataset = tf.data.Dataset.from_tensor_slices(examples()[0]).batch(16, drop_remainder=True)
    try:
        fit.fit(gan, dataset, config=TrainConfig(epochs=1, xla="off"))
    except Exception as error:  # the test looks at its type
        return [type(error).__name__, str(error)]
    return []


# Rates of single layers, frozen layers, averages, and a run that was stopped


class StopAfter(keras.callbacks.Callback):
    """Ctrl-C after so many batches."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.left = num_batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def fit_tuned(num_devices: int, scratch: Path | None = None, *callbacks: keras.callbacks.Callback) -> dict[str, Any]:
    """`fit` with frozen layers, a learning rate for one layer, and averaged weights."""
    config = TrainConfig(
        epochs=3, xla="off", ema_decay=0.5, checkpoint_steps=1, optimizer=OptimizerConfig(learning_rate=0.05)
    )
    strategy = strategy_of(num_devices)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Dense(8, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(8, name="second", activation="tanh"),
            keras.layers.Dense(1, name="head"),
        ]
        model = keras.Sequential([keras.Input((4,)), *layers])
        objective.freeze(model, ["first", "norm"])
        optimizer = objective.make_optimizer(config, 9)
        optimizer.build(model.trainable_variables)
        objective.set_learning_rate_factors(optimizer, model, [LayerRate(match="head", learning_rate_factor=0.1)])
        model.compile(optimizer=optimizer, loss=logits_loss(), metrics=["mae"], auto_scale_loss=False)
    before = {layer.name: values(layer.weights) for layer in layers}
    dataset = batches_of(*examples())
    fitted = fit.fit(model, dataset, config=config, validation_data=dataset, scratch=scratch, callbacks=callbacks)
    return {
        "before": before,
        "after": {layer.name: values(layer.weights) for layer in layers},
        "history": fitted.history,
        "validation": fitted.validation,
    }


def fit_with_and_without_a_stop(num_devices: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, progress.shown_by(lambda _: None):
        one, whole = fit_tuned(1), fit_tuned(num_devices, Path(folder) / "whole")
        with contextlib.suppress(KeyboardInterrupt):
            fit_tuned(num_devices, Path(folder) / "stopped", StopAfter(5))
        return {"one": one, "whole": whole, "resumed": fit_tuned(num_devices, Path(folder) / "stopped")}


CASES: dict[str, Callable[[], Any]] = {
    "everything": lambda: {n: train_everything(n) for n in (1, 2, 3)},
    "everything_by_xla": lambda: train_everything(2, xla=True),
    "everything_unclipped": lambda: train_everything(1, clip_norm=None),
    "batch_norm": lambda: {n: batch_norm_statistics(n) for n in (1, 2, 3)},
    "dropout": lambda: {n: train_on_dropout(n) for n in (1, 3)},
    "dropout_beside_a_reduction": lambda: train_on_dropout(2, "norm"),
    "bad_step": lambda: {p: around_a_bad_step(strategy_of(2), precision=p) for p in ("float32", "mixed_float16")},
    "accumulated": lambda: train_accumulated(strategy_of(2), 3),
    "own_step": lambda: {n: train_own_step(n, is_own=True) for n in (1, 2)},
    "standard_step": lambda: train_own_step(1, is_own=False),
    "gan": lambda: error_of_a_gan(2),
    "tuned": lambda: fit_with_and_without_a_stop(2),
}


def main(names: list[str]) -> None:
    """Print the cases of these names; by default all."""
    devices.prepare(TrainConfig(strategy="mirrored", num_devices=3))
    print(json.dumps({name: CASES[name]() for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
