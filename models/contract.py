"""What a model builder must do to run in headrace. Call `check_model` from a test of your own.

Example:
    from models.contract import check_model

    def test_my_model():
        check_model(my_nets.build, {"x": FeatureSpec((8,), "float32")}, OutputSpec("multiclass", 3), hidden_dim=16)
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from models.spec import FeatureSpec, InputSpec, OutputSpec

Arrays = dict[str, np.ndarray]

VARYING_SIZE = 9  # What stands for a `None` in a feature's shape.
BATCH_SIZE = 4


def check_model(build: Callable[..., keras.Model], input_spec: InputSpec, output_spec: OutputSpec, **args: Any) -> None:
    """Assert that a builder's models can be trained, resumed, exported and served.

    Args:
        build: The builder, called as `build(input_spec, output_spec, **args)`.
        input_spec: The features it is to accept.
        output_spec: What it is to predict.
        args: Its further arguments; small ones make a fast test.

    Raises:
        AssertionError: With what the model did, and what it should do.
    """

    def make() -> keras.Model:
        keras.utils.set_random_seed(7)
        return build(input_spec, output_spec, **args)

    inputs = random_inputs(input_spec, BATCH_SIZE)
    model = make()
    _check_logits(model, input_spec, output_spec)
    _check_same_seed(make, inputs)
    _check_reload(model, inputs)
    _check_saved_model(model, inputs)
    _check_xla(model, inputs)
    _check_mixed_precision(make, inputs)
    _check_training_step(make(), inputs, output_spec)


def random_inputs(input_spec: InputSpec, batch_size: int, *, seed: int = 0) -> Arrays:
    """A batch that fits a spec: `{feature: (batch_size, *shape)}`. Sequences of tokens end in padding."""
    rng = np.random.default_rng(seed)
    return {name: _random_feature(spec, batch_size, rng) for name, spec in input_spec.items()}


def _random_feature(spec: FeatureSpec, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    shape = (batch_size, *(VARYING_SIZE if size is None else size for size in spec.shape))
    if spec.num_categories is None:
        return rng.normal(size=shape).astype(spec.dtype)
    if not spec.is_sequence:
        return rng.integers(0, spec.num_categories, shape).astype(spec.dtype)
    tokens = rng.integers(1, spec.num_categories, shape)
    lengths = rng.integers(1, shape[1] + 1, batch_size)
    return np.where(np.arange(shape[1]) < lengths[:, None], tokens, 0).astype(spec.dtype)


def predict(model: Callable[..., Any], inputs: Arrays) -> np.ndarray:
    """Logits `(batch, num_logits)` of a plain call in inference mode."""
    tensors = {name: tf.constant(array) for name, array in inputs.items()}
    return keras.ops.convert_to_numpy(model(tensors, training=False))


def _check_logits(model: keras.Model, input_spec: InputSpec, output_spec: OutputSpec) -> None:
    """One finite float32 logit per class, for whatever batch size, alike for an example alone and in a batch."""
    inputs = random_inputs(input_spec, BATCH_SIZE)
    logits = predict(model, inputs)
    expected = (BATCH_SIZE, output_spec.num_logits)
    assert logits.shape == expected, f"logits have shape {logits.shape}, should be (batch, num_logits) = {expected}"
    assert logits.dtype == np.float32, f"logits are {logits.dtype}: give the last layer dtype='float32'"
    assert np.isfinite(logits).all(), f"logits are not finite: {logits}"
    first = predict(model, {name: array[:1] for name, array in inputs.items()})
    _assert_close(first, logits[:1], 1e-4, "an example's logits depend on the rest of its batch")


def _check_same_seed(make: Callable[[], keras.Model], inputs: Arrays) -> None:
    first, second = make(), make()
    predict(first, inputs), predict(second, inputs)  # Builds the weights of a model that is not functional.
    assert len(first.weights) == len(second.weights), "two builds have different numbers of weights"
    for one, other in zip(first.weights, second.weights, strict=True):
        same = np.array_equal(_numpy(one), _numpy(other))
        assert same, f"{one.path} differs between two builds after the same keras.utils.set_random_seed"


def _check_reload(model: keras.Model, inputs: Arrays) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        reloaded = keras.models.load_model(path)
    _assert_close(
        predict(reloaded, inputs), predict(model, inputs), 0.0, "a model reloaded from .keras answers otherwise"
    )


def _check_saved_model(model: keras.Model, inputs: Arrays) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.export(folder, format="tf_saved_model", verbose=False)
        loaded = tf.saved_model.load(folder)  # Held by a name: the function alone does not keep its variables alive.
        served = loaded.serve({name: tf.constant(array) for name, array in inputs.items()})
    _assert_close(served.numpy(), predict(model, inputs), 1e-4, "the SavedModel answers otherwise than the model")


def _check_xla(model: keras.Model, inputs: Arrays) -> None:
    compiled = tf.function(model, jit_compile=True)
    _assert_close(
        predict(compiled, inputs), predict(model, inputs), 1e-4, "compiled by XLA, the model answers otherwise"
    )


def _check_mixed_precision(make: Callable[[], keras.Model], inputs: Arrays) -> None:
    with _dtype_policy("mixed_bfloat16"):
        logits = predict(make(), inputs)
    assert logits.dtype == np.float32, (
        f"logits are {logits.dtype} under mixed_bfloat16: dtype='float32' on the last layer"
    )
    assert np.isfinite(logits).all(), f"logits are not finite under mixed_bfloat16: {logits}"


def _check_training_step(model: keras.Model, inputs: Arrays, output_spec: OutputSpec) -> None:
    """One step of gradient descent has a finite loss and moves the weights."""
    predict(model, inputs)
    before = [_numpy(weight) for weight in model.trainable_weights]
    assert before, "the model has no trainable weights"
    model.compile(keras.optimizers.SGD(0.1), _loss(output_spec))
    loss = model.train_on_batch(inputs, _labels(output_spec))
    assert np.isfinite(loss), f"the loss of the first training step is {loss}"
    after = [_numpy(weight) for weight in model.trainable_weights]
    assert np.isfinite(np.concatenate([weight.ravel() for weight in after])).all(), "a training step makes weights NaN"
    moved = any(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    assert moved, "a training step changes no weight: no gradient reaches them"


def _loss(output_spec: OutputSpec) -> keras.losses.Loss:
    if output_spec.task == "multiclass":
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if output_spec.task == "binary":
        return keras.losses.BinaryCrossentropy(from_logits=True)
    return keras.losses.MeanSquaredError()


def _labels(output_spec: OutputSpec) -> np.ndarray:
    """`(batch, 1)` labels, all classes in turn; of alternating sign for regression."""
    index = np.arange(BATCH_SIZE)[:, None]
    if output_spec.task == "regression":
        return np.where(index % 2, 1.0, -1.0).astype(np.float32)
    return (index % output_spec.num_classes).astype(np.int64)


def _assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, message: str) -> None:
    difference = float(np.max(np.abs(actual - expected)))
    assert difference <= tolerance, f"{message}: largest difference {difference:.2e}, tolerance {tolerance:.0e}"


def _numpy(weight: keras.Variable) -> np.ndarray:
    return keras.ops.convert_to_numpy(weight)


@contextlib.contextmanager
def _dtype_policy(name: str) -> Iterator[None]:
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)
