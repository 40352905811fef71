"""Trains by Keras's `fit` and by the engine where `fit` fails or is wrong, and prints what both made of it as JSON.

Run by test_engine.py in processes of its own: on two logical CPU devices, or with `worker` as one of two workers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components.config import TrainConfig
from components.train import devices, fit
from components.train.engine import Engine
from tests.components.replicas import MASK, Outputs, batches_of, copies, dense_model, examples, logits_loss

ONE_DEVICE = tf.distribute.get_strategy()
BATCH = 8


def sgd(**options: Any) -> keras.Optimizer:
    return keras.optimizers.SGD(0.5, **options)


def train(
    how: str,
    strategy: tf.distribute.Strategy,
    dataset: tf.data.Dataset,
    *,
    make_model: Callable[[], keras.Model] = dense_model,
    optimizer: dict[str, Any] | None = None,
    steps_per_call: int = 1,
    of_fit: dict[str, Any] | None = None,
    **of_engine: Any,
) -> keras.Model:
    """An epoch by `fit` or `engine`, with what either takes for the same."""
    with strategy.scope():
        model = make_model()
        options = (of_fit or {}) if how == "fit" else {"auto_scale_loss": False}
        loss = logits_loss() if model.output_shape[-1] == 1 else "mse"
        metrics = [Outputs(MASK)] if model.name == "mask" else []
        model.compile(optimizer=sgd(**(optimizer or {})), loss=loss, metrics=metrics, **options)
    if how == "fit":
        model.fit(dataset, shuffle=False, verbose=0)
        return model
    engine = Engine(model, strategy=strategy, spec=dataset.element_spec, **{"xla": False, **of_engine})
    batches = iter(fit.distribute(strategy, dataset))
    for _ in range(len(dataset) // steps_per_call):
        engine.run(batches, steps_per_call)
    return model


def weights_or_error(*args: Any, **options: Any) -> list[Any] | str:
    try:
        return [weight.numpy().tolist() for weight in train(*args, **options).trainable_variables]
    except Exception as error:  # whatever Keras or TensorFlow fail with
        return f"{type(error).__name__}: {error}"


def with_options(
    two: tf.distribute.Strategy, *, num_rows: int = 2 * BATCH, batch_size: int = BATCH, **options: Any
) -> dict[str, Any]:
    """Weights on one device by `fit`, and on two replicas by both."""
    dataset = batches_of(*examples(num_rows), batch_size=batch_size)
    return {
        "one_device": weights_or_error("fit", ONE_DEVICE, dataset, optimizer=options.get("optimizer")),
        "fit": weights_or_error("fit", two, dataset, **options),
        "engine": weights_or_error("engine", two, dataset, **options),
    }


def with_accumulation(two: tf.distribute.Strategy) -> dict[str, Any]:
    """Keras accumulates over batches, the engine splits them."""
    keras_way = {"optimizer": {"gradient_accumulation_steps": 2}}
    rows = examples(4 * BATCH)
    dataset, large = batches_of(*rows, batch_size=BATCH), batches_of(*rows, batch_size=2 * BATCH)
    return {
        "one_device": weights_or_error("fit", ONE_DEVICE, dataset, **keras_way),
        "fit": weights_or_error("fit", two, dataset, **keras_way),
        "engine": weights_or_error("engine", two, large, accumulation_steps=2),
    }


def with_an_overflow(two: tf.distribute.Strategy) -> dict[str, Any]:
    """mixed_float16, where in the one step there is only the second replica's rows overflow: whether weights stay."""
    x, y = examples(BATCH)
    x[BATCH // 2 :] = 1e5
    dataset = batches_of(x, y, batch_size=BATCH)
    keras.config.set_dtype_policy("mixed_float16")
    found: dict[str, Any] = {"before": [weight.numpy().tolist() for weight in dense_model().trainable_variables]}
    found |= {how: weights_or_error(how, two, dataset, scale_loss=True) for how in ("fit", "engine")}
    keras.config.set_dtype_policy("float32")
    return found


def with_batch_norm(two: tf.distribute.Strategy) -> dict[str, Any]:
    """Moving statistics on both replicas."""
    dataset = batches_of(*examples(BATCH), batch_size=BATCH)
    models = {
        how: train(how, two, dataset, make_model=lambda: dense_model(keras.layers.BatchNormalization()))
        for how in ("fit", "engine")
    }
    return {how: copies(two, model.non_trainable_variables) for how, model in models.items()}


def mask_model() -> keras.Model:
    dropout = keras.layers.Dropout(0.5, seed=3)
    return keras.Sequential([keras.Input(MASK[1:]), keras.layers.Dense(MASK[1]), dropout], name="mask")


def with_dropout(two: tf.distribute.Strategy) -> dict[str, Any]:
    """Masks of both replicas."""
    x = np.random.default_rng(0).normal(size=(2 * MASK[0], MASK[1])).astype(np.float32)
    dataset = batches_of(x, x, batch_size=len(x))
    found = {}
    for how in ("fit", "engine"):
        model = train(how, two, dataset, make_model=mask_model)
        (last,) = [variable for variable in model.metrics_variables if tuple(variable.shape) == MASK]
        found[how] = [(np.array(copy) != 0).tolist() for copy in copies(two, [last])[0]]
    return found


CASES: dict[str, Callable[[tf.distribute.Strategy], Any]] = {
    "clipping": lambda two: with_options(two, optimizer={"global_clipnorm": 0.05}),
    "steps_per_execution": lambda two: with_options(two, of_fit={"steps_per_execution": 2}, steps_per_call=2),
    "xla": lambda two: with_options(two, of_fit={"jit_compile": True}, xla=True),
    "uneven": lambda two: with_options(two, num_rows=14, batch_size=7),
    "accumulation": with_accumulation,
    "overflow": with_an_overflow,
    "batch_norm": with_batch_norm,
    "dropout": with_dropout,
}


def main_of_worker() -> None:
    """By the engine first: after a failure TensorFlow's collectives are of no more use."""
    strategy = devices.make_strategy(TrainConfig(strategy="multi_worker", global_batch_size=BATCH))
    index = strategy.cluster_resolver.task_id
    rows = examples(2 * BATCH)
    batches, half = batches_of(*rows, batch_size=BATCH), BATCH // 2
    mine = batches.map(lambda x, y: (x[index * half : (index + 1) * half], y[index * half : (index + 1) * half]))
    found = {
        "one_device": weights_or_error("fit", ONE_DEVICE, batches) if index == 0 else None,
        "engine": weights_or_error("engine", strategy, mine),
        "fit": weights_or_error("fit", strategy, batches),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # TensorFlow would wait for the other worker, which failed as well


def main() -> None:
    """Print all cases."""
    devices.prepare(TrainConfig(strategy="mirrored", num_devices=2))
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    print(json.dumps({name: case(two) for name, case in CASES.items()}))


if __name__ == "__main__":
    main_of_worker() if sys.argv[1:] == ["worker"] else main()
