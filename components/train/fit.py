"""Training of any compiled Keras model: what the step `train` does once it has a model and batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from components import metrics, progress
from components.config import TrainConfig
from components.errors import ConfigError
from components.train import objective
from components.train.batches import Batches, DatasetBatches
from components.train.engine import Engine
from components.train.loop import Loop
from components.train.team import Team


@dataclass(frozen=True)
class Fitted:
    """What training gave; the kept weights are in the model.

    Attributes:
        epochs: Epochs run.
        best_epoch: The epoch, from 1, whose weights were kept.
        validation: Metrics of the validation data with these weights.
        history: An entry of metrics for each epoch.
        observations: What `observe` returned after each epoch.
        xla: `on`, or why the steps ran without it.
        skipped_steps: Steps left out since they held NaN or Inf.
    """

    epochs: int
    best_epoch: int
    validation: dict[str, float | None]
    history: list[dict[str, float | None]]
    observations: list[Any]
    xla: str
    skipped_steps: int


def fit(
    model: keras.Model,
    dataset: tf.data.Dataset,
    *,
    config: TrainConfig,
    validation_data: tf.data.Dataset | None = None,
    class_weight: dict[int, float] | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    steps_per_epoch: int | None = None,
    scratch: Path | None = None,
) -> Fitted:
    """Train as Keras's `fit` does: any loss, losses by output, loss weights, metrics, sample weights, `train_step`.

    Args:
        model: Compiled, under the strategy that it is to be trained with and with `auto_scale_loss=False`.
        dataset: Batches of `(x, y)` or `(x, y, sample_weight)`, over all devices. Several workers each give their own
            rows.
        config: Epochs, XLA, clipping, accumulation, checkpoints. What `compile` says, it does not: optimizer, loss.
        validation_data: As `dataset`; the model's `test_step` gives its metrics.
        class_weight: Class -> weight of its examples; for one output, of class numbers or one-hot.
        callbacks: Keras's and one's own.
        steps_per_epoch: Batches of an epoch; default: the whole dataset.
        scratch: Folder for checkpoints: a call that was killed goes on from there. Without it none are kept.

    Raises:
        ConfigError: the model is not compiled, or XLA is `on` and cannot compile it; or classes of several outputs have
            weights.
        HeadraceError: training went to NaN or Inf.

    Example:
        >>> model.compile(optimizer="adam", loss={"price": "mse", "sold": "bce"}, auto_scale_loss=False)
        >>> fit(model, train_batches, config=TrainConfig(epochs=3), validation_data=validation_batches)
    """
    if class_weight is not None:
        if not isinstance(dataset.element_spec[1], tf.TensorSpec):
            raise ConfigError(
                "class_weight is for one output of class numbers, but the labels are several: "
                f"{dataset.element_spec[1]}. Give weights of examples as the third part of the dataset instead."
            )
        dataset = dataset.map(lambda *batch: _weighted(class_weight, *batch))
    strategy = model.distribute_strategy
    if config.xla != "off" and (without := _without_static_shape(dataset)):
        progress.report(
            f"batches have no static shape ({without}): XLA compiles again for each new one, for seconds; "
            "drop the remainder and pad, or use xla: off"
        )

    def validate(engine: Engine) -> dict[str, float]:
        if validation_data is None:
            return {}
        return engine.evaluate(distribute(strategy, validation_data))

    return run(
        model,
        DatasetBatches(dataset, steps_per_epoch),
        strategy=strategy,
        config=config,
        validate=validate,
        callbacks=callbacks,
        scratch=scratch,
    )


def run(
    model: keras.Model,
    batches: Batches,
    *,
    strategy: tf.distribute.Strategy,
    config: TrainConfig,
    validate: Callable[[Engine], dict[str, float]],
    callbacks: Sequence[keras.callbacks.Callback] = (),
    scratch: Path | None = None,
    observe: Callable[[int], Any] = lambda _: None,
) -> Fitted:
    """As `fit`, with batches that know how to go on at a step, a validation of one's own, and an observer of each epoch."""
    with _debugging(config):
        engine, xla = make_engine(model, batches, strategy=strategy, config=config)
        loop = Loop(
            engine,
            batches,
            distribute=lambda data: distribute(strategy, data),
            validate=lambda: validate(engine),
            config=config,
            team=Team(strategy),
            callbacks=callbacks,
            scratch=scratch,
            observe=observe,
        )
        validation = loop.until_done()
    state = loop.progress
    return Fitted(
        epochs=state.epoch,
        best_epoch=state.best_epoch,
        validation=metrics.jsonable(validation),
        history=state.history,
        observations=state.observations,
        xla=xla,
        skipped_steps=loop.skipped_steps,
    )


def make_engine(
    model: keras.Model, batches: Batches, *, strategy: tf.distribute.Strategy, config: TrainConfig
) -> tuple[Engine, str]:
    """The engine, compiled by XLA if it can be and shall be; and `on`, or why not.

    Raises:
        ConfigError: XLA is `on` and cannot compile the model.
    """
    dataset = batches.from_step(0)

    def make(xla: bool) -> Engine:
        return Engine(
            model,
            strategy=strategy,
            xla=xla,
            scale_loss=_computes_in_float16(model),
            clip=objective.make_clip(config.optimizer),
            accumulation_steps=config.gradient_accumulation_steps,
            spec=dataset.element_spec,
        )

    if config.xla == "off" or config.debug == "eager":
        return make(False), "off" if config.xla == "off" else "off: train.debug is eager"
    engine = make(True)
    reason = engine.why_it_cannot_run(iter(distribute(strategy, dataset)))
    if reason is None:
        return engine, "on"
    if config.xla == "on":
        raise ConfigError(f"train.xla is on, but XLA cannot compile this model: {reason}. Use train.xla=auto or off.")
    progress.report(f"XLA cannot compile this model, going on without it: {reason}")
    return make(False), f"off: {reason}"


def distribute(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> Any:
    """What the strategy's steps iterate over; a worker's dataset holds its own rows already."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return dataset
    return strategy.experimental_distribute_dataset(dataset)


@contextlib.contextmanager
def _debugging(config: TrainConfig) -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(config.debug == "eager")
    try:
        with warnings.catch_warnings():
            # Of no interest: what is to be looked into is the step.
            warnings.filterwarnings("ignore", ".*does not apply to tf.data functions", UserWarning)
            yield
    finally:
        tf.config.run_functions_eagerly(before)


def _without_static_shape(dataset: tf.data.Dataset) -> str:
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    return ", ".join(sorted({str(tuple(shape)) for shape in shapes if not shape.is_fully_defined()}))


def _computes_in_float16(model: keras.Model) -> bool:
    return any(layer.compute_dtype == "float16" for layer in model._flatten_layers())


def _weighted(class_weight: dict[int, float], x: Any, y: tf.Tensor, weights: tf.Tensor | None = None) -> Any:
    """The batch with the weights of its classes; a class that is not named weighs one."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant(list(class_weight), tf.int64), tf.constant(list(class_weight.values()), tf.float32)
        ),
        default_value=1.0,
    )
    classes = tf.argmax(y, axis=-1) if y.shape.rank == 2 and y.shape[1] > 1 else tf.reshape(tf.cast(y, tf.int64), [-1])
    by_class = table.lookup(classes)
    return x, y, by_class if weights is None else by_class * tf.cast(tf.reshape(weights, [-1]), tf.float32)
