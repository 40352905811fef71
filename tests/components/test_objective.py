"""Losses, example weights, schedules, optimizers, clipping, frozen layers and learning rates of single layers.

Run as a program it prints what one device and two replicas make of the optimizers, since TensorFlow splits the CPU only
before its first operation.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np
import pytest
import tensorflow as tf

from components.config import LayerRate, OptimizerConfig, TrainConfig
from components.errors import ConfigError
from components.train import devices, objective
from models.spec import OutputSpec

OPTIMIZERS = get_args(OptimizerConfig.model_fields["name"].annotation)
MULTICLASS, BINARY, REGRESSION = OutputSpec("multiclass", 4), OutputSpec("binary", 2), OutputSpec("regression", 1)


def make_optimizer(num_steps: int = 100, ema_decay: float | None = None, **settings: Any) -> keras.Optimizer:
    config = TrainConfig(optimizer=OptimizerConfig.model_validate(settings), ema_decay=ema_decay)
    return objective.make_optimizer(config, num_steps)


def make_model() -> keras.Model:
    """Two layers in a model of their own, and a head."""
    keras.utils.set_random_seed(5)
    x = keras.Input((3,), name="x")
    encoder = [
        keras.Input((3,), name="encoder_input"),
        keras.layers.Dense(4, name="first", bias_initializer="ones"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(name="relu"),
    ]
    y = keras.layers.Dense(2, name="head", bias_initializer="ones")(keras.Sequential(encoder, name="encoder")(x))
    return keras.Model(x, y)


# Losses


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_equal_kerass(smoothing: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4)).astype(np.float32)
    labels = rng.integers(0, 4, 6)
    ours = objective.make_loss(MULTICLASS, smoothing).call(tf.constant(labels), tf.constant(logits))
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction="none")
    np.testing.assert_allclose(ours, keras_loss(np.eye(4, dtype=np.float32)[labels], logits), rtol=1e-5)
    ours = objective.make_loss(BINARY, smoothing).call(tf.constant(labels % 2), tf.constant(logits[:, :1]))
    keras_loss = keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=smoothing, reduction="none")
    np.testing.assert_allclose(ours, keras_loss((labels % 2)[:, None].astype(np.float32), logits[:, :1]), rtol=1e-5)


@pytest.mark.parametrize(
    ("output", "labels", "logits", "expected"),
    [
        (MULTICLASS, [3, 0], [[0.0, 0, 0, 0], [0, 0, 0, 0]], [math.log(4)] * 2),
        (BINARY, [1, 0], [[0.0], [2.0]], [math.log(2), math.log(1 + math.exp(2))]),
        (REGRESSION, [1.5, -1], [[1.0], [2.0]], [0.25, 9.0]),
    ],
    ids=["multiclass", "binary", "regression"],
)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_a_loss_is_the_mean_of_what_each_example_loses_times_its_weight(
    output: OutputSpec, labels: list[float], logits: list[list[float]], expected: list[float], shape: tuple[int, ...]
) -> None:
    loss = objective.make_loss(output, 0.0)
    weights = [2.0, 0.5]
    value = loss(np.reshape(labels, shape), np.array(logits, np.float32), sample_weight=np.array(weights, np.float32))
    assert float(value) == pytest.approx((2.0 * expected[0] + 0.5 * expected[1]) / 2, rel=1e-6)


def test_a_loss_tells_many_classes_apart_though_keras_casts_labels() -> None:
    logits = np.full((1, 70_001), -100, np.float32)
    logits[0, 70_000] = 100
    loss = objective.make_loss(OutputSpec("multiclass", 70_001), 0.0)
    assert float(loss(np.array([70_000]), logits)) == 0
    assert float(loss(np.array([69_999]), logits)) == 200


def test_what_only_classes_can_have_is_refused_for_numbers() -> None:
    with pytest.raises(ConfigError, match=r"train\.label_smoothing: a regression task has no classes"):
        objective.make_loss(REGRESSION, 0.1)
    with pytest.raises(ConfigError, match=r"train\.class_weights: a regression task has no classes"):
        objective.example_weights(np.ones(3), REGRESSION, "balanced")


def test_balanced_weights_give_every_class_the_same_sum() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    weights = objective.example_weights(labels, OutputSpec("multiclass", 3), "balanced")
    np.testing.assert_allclose([weights[labels == c].sum() for c in range(3)], 2.0, rtol=1e-6)
    np.testing.assert_array_equal(objective.example_weights(labels, OutputSpec("multiclass", 3), "none"), 1)
    np.testing.assert_array_equal(objective.example_weights(np.array([0.5, 7]), REGRESSION, "none"), 1)


# Schedules


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, {0: 0.1, 50: 0.1, 100: 0.1}),
        ({"schedule": "constant", "warmup_steps": 10}, {0: 0.0, 5: 0.05, 10: 0.1, 90: 0.1}),
        ({"schedule": "cosine"}, {0: 0.1, 50: 0.05, 100: 0.0, 200: 0.0}),
        ({"schedule": "cosine", "warmup_steps": 20}, {0: 0.0, 10: 0.05, 20: 0.1, 60: 0.05, 100: 0.0}),
        ({"schedule": "cosine", "final_learning_rate": 0.02}, {0: 0.1, 25: 0.08828427, 50: 0.06, 100: 0.02, 150: 0.02}),
        ({"schedule": "linear"}, {0: 0.1, 25: 0.075, 100: 0.0, 150: 0.0}),
        ({"schedule": "linear", "final_learning_rate": 0.02}, {0: 0.1, 25: 0.08, 100: 0.02}),
        ({"schedule": "linear", "warmup_steps": 20}, {0: 0.0, 19: 0.095, 20: 0.1, 60: 0.05, 100: 0.0}),
        ({"schedule": "step", "decay_at": [0.5]}, {0: 0.1, 49: 0.1, 50: 0.01, 100: 0.01}),
        (
            {"schedule": "step", "decay_at": [0.3, 0.6, 0.9], "decay_factor": 0.5, "warmup_steps": 10},
            {0: 0.0, 5: 0.05, 10: 0.1, 29: 0.1, 30: 0.05, 59: 0.05, 60: 0.025, 89: 0.025, 90: 0.0125, 99: 0.0125},
        ),
        ({"schedule": "cosine", "warmup_steps": 200}, {0: 0.0, 100: 0.05, 200: 0.1, 201: 0.0}),
    ],
    ids=str,
)
def test_learning_rate_schedules(settings: dict[str, Any], expected: dict[int, float]) -> None:
    rate = objective.make_learning_rate(OptimizerConfig(learning_rate=0.1, **settings), 100)
    given = {step: float(rate(tf.constant(step, tf.int64)) if callable(rate) else rate) for step in expected}
    assert given == pytest.approx(expected, abs=1e-7)


def test_only_a_schedule_keeps_callbacks_from_setting_the_learning_rate() -> None:
    optimizer = make_optimizer(learning_rate=0.1)
    optimizer.learning_rate = 0.05
    assert float(optimizer.learning_rate) == pytest.approx(0.05)
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        make_optimizer(learning_rate=0.1, warmup_steps=3).learning_rate = 0.05


def test_a_model_saved_by_keras_itself_compiles_again(tmp_path: Path) -> None:
    """As a ModelCheckpoint callback saves it."""
    model = make_model()
    optimizer = make_optimizer(schedule="linear", warmup_steps=20, learning_rate=0.1)
    model.compile(optimizer, objective.make_loss(OutputSpec("multiclass", 2), 0.2))
    optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    rate, loss = again.optimizer._learning_rate, again.loss
    assert [float(rate(step)) for step in (10, 20, 60)] == pytest.approx([0.05, 0.1, 0.05])
    labels, logits = np.array([1, 0]), np.array([[2.0, 1.0], [0.0, 1.0]], np.float32)
    assert float(loss(labels, logits)) == float(model.loss(labels, logits))


# Optimizers

# By hand, from each one's formula: the weight 2 after a step on the gradient 0.5 with the learning rate 0.1.
FIRST_STEP = {
    "adam": 1.9,
    "adamw": 1.9,
    "sgd": 1.95,
    "nadam": 1.8937211,
    "rmsprop": 2 - 0.1 / math.sqrt(0.1),
    "lion": 1.9,
    "lamb": 1.8,
    "adafactor": 1.8,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_takes_its_own_step(name: str) -> None:
    optimizer = make_optimizer(name=name, learning_rate=0.1)
    assert type(optimizer).__name__.lower() == name
    weight = keras.Variable(2.0)
    optimizer.build([weight])
    optimizer.apply([tf.constant(0.5)], [weight])
    assert float(weight) == pytest.approx(FIRST_STEP[name], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"momentum": 0.0}, 1 - 0.1 - 0.1),
        ({"momentum": 0.5}, 1 - 0.1 - (0.1 + 0.05)),
        ({"momentum": 0.5, "nesterov": True}, 1 - (0.1 + 0.05) - (0.1 + 0.5 * (0.1 + 0.05))),
    ],
    ids=str,
)
def test_momentum_carries_the_last_step_on(settings: dict[str, Any], expected: float) -> None:
    optimizer = make_optimizer(name="sgd", learning_rate=0.1, **settings)
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert float(weight) == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adam"])
def test_weight_decay_spares_biases(name: str) -> None:
    optimizer = make_optimizer(name=name, weight_decay=0.5, learning_rate=0.1)
    layer = keras.layers.Dense(2, bias_initializer="ones", name="dense")
    layer.build((None, 3))
    kernel, bias = layer.kernel.numpy(), layer.bias.numpy()
    optimizer.build(layer.trainable_variables)
    optimizer.apply([tf.zeros_like(v) for v in layer.trainable_variables], layer.trainable_variables)
    np.testing.assert_allclose(layer.kernel.numpy(), kernel * 0.95, rtol=1e-5)
    np.testing.assert_array_equal(layer.bias.numpy(), bias)


def test_the_moving_average_follows_the_weights() -> None:
    optimizer = make_optimizer(name="sgd", learning_rate=1.0, momentum=0.0, ema_decay=0.9)
    weight = keras.Variable(0.0)
    optimizer.build([weight])
    for expected in (-1.0, 0.9 * -1.0 + 0.1 * -2.0, 0.9 * -1.1 + 0.1 * -3.0):
        optimizer.apply([tf.constant(1.0)], [weight])
        assert float(optimizer._model_variables_moving_average[0]) == pytest.approx(expected)
    assert float(weight) == -3
    optimizer.finalize_variable_values([weight])
    assert float(weight) == pytest.approx(-1.29)
    assert not make_optimizer().use_ema


# Clipping


GRADIENTS = [np.array([3.0, 4.0], np.float32), np.array([[12.0]], np.float32), np.array([-0.5], np.float32)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"clip_norm": 6.504805}, [[1.5, 2.0], [[6.0]], [-0.25]]),
        ({"clip_norm": 100}, GRADIENTS),
        ({"clip_each_norm": 1}, [[0.6, 0.8], [[1.0]], [-0.5]]),
        ({"clip_value": 3.5}, [[3.0, 3.5], [[3.5]], [-0.5]]),
        ({"clip_value": 0.25}, [[0.25, 0.25], [[0.25]], [-0.25]]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_gradients_are_clipped(settings: dict[str, float], expected: list[Any]) -> None:
    clip = objective.make_clip(OptimizerConfig(**settings))
    assert clip is not None
    for clipped, wanted in zip(clip([tf.constant(each) for each in GRADIENTS]), expected, strict=True):
        np.testing.assert_allclose(clipped, wanted, rtol=1e-6)


def test_gradients_within_the_bound_stay_to_the_bit_and_without_a_bound_there_is_nothing_to_do() -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=(7, 3)).astype(np.float32), rng.normal(size=5).astype(np.float32)]
    for settings in ({"clip_norm": 33.3}, {"clip_each_norm": 33.3}, {"clip_value": 33.3}):
        clip = objective.make_clip(OptimizerConfig(**settings))
        assert clip is not None
        for clipped, gradient in zip(clip([tf.constant(each) for each in gradients]), gradients, strict=True):
            np.testing.assert_array_equal(clipped, gradient)
    assert objective.make_clip(OptimizerConfig()) is None


@pytest.mark.parametrize("option", ["clip_norm", "clip_each_norm"])
def test_norms_of_half_precision_gradients_are_taken_in_float32(option: str) -> None:
    clip = objective.make_clip(OptimizerConfig(**{option: 1.0}))
    assert clip is not None
    (clipped,) = clip([tf.constant([300.0, 400.0], tf.float16)])  # their squares are beyond float16
    assert clipped.dtype == tf.float16
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-3)


@pytest.mark.parametrize("option", ["clip_norm", "clip_each_norm", "clip_value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_clipping_hides_a_gradient_that_is_not_finite(option: str, bad: float) -> None:
    clip = objective.make_clip(OptimizerConfig(**{option: 1.0}))
    assert clip is not None
    clipped = clip([tf.constant([1.0, bad]), tf.constant([2.0])])
    assert not np.isfinite(np.concatenate(clipped)).all()


# Layers


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["head"], {"head"}),
        (["first"], {"encoder/first"}),
        (["encoder/*"], {"encoder/first", "encoder/norm"}),
        (["encoder"], {"encoder/first", "encoder/norm"}),
        (["n?rm", "he*"], {"encoder/norm", "head"}),
        ([], set()),
    ],
    ids=lambda value: str(sorted(value)),
)
def test_frozen_layers_are_found_by_name_and_path(patterns: list[str], frozen: set[str]) -> None:
    model = make_model()
    objective.freeze(model, patterns)
    trained = {variable.path.rpartition("/")[0] for variable in model.trainable_variables}
    assert trained == {"encoder/first", "encoder/norm", "head"} - frozen


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["haed"], r"train\.frozen: no layer of model '.*' matches 'haed': did you mean 'head'\?"),
        (["head", "encoder/furst"], r"'encoder/furst': did you mean 'encoder/first'"),
        (["relu"], r"train\.frozen: 'relu' matches none but layers without weights"),
        (["HEAD"], r"matches 'HEAD': its layers are encoder, first"),
        (["*"], r"train\.frozen: \* match every layer, so nothing is left to train"),
        (["encoder", "head"], r"encoder, head match every layer"),
    ],
    ids=str,
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        objective.freeze(make_model(), patterns)


def run_steps(optimizer: keras.Optimizer, model: keras.Model, rates: list[LayerRate], steps: int = 3) -> list[Any]:
    """The change of each trainable weight over some steps on gradients that are the same in every call."""
    objective.set_learning_rate_factors(optimizer, model, rates)
    variables = model.trainable_variables
    optimizer.build(variables)
    before = [variable.numpy() for variable in variables]
    rng = np.random.default_rng(1)
    for _ in range(steps):
        optimizer.apply([tf.constant(rng.normal(size=v.shape).astype(np.float32)) for v in variables], variables)
    return [variable.numpy() - old for variable, old in zip(variables, before, strict=True)]


RATES = [LayerRate(match="*", learning_rate_factor=3), LayerRate(match="encoder/*", learning_rate_factor=0.25)]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("adafactor", "lamb")])
def test_a_factor_scales_the_step_of_its_layers(name: str) -> None:
    """Without weight decay these depend on the gradients alone, so the whole way scales."""
    plain = run_steps(make_optimizer(name=name, learning_rate=0.01), make_model(), [])
    scaled = run_steps(make_optimizer(name=name, learning_rate=0.01), make_model(), RATES)
    factors = [0.25] * 4 + [3] * 2
    for way, expected, factor in zip(scaled, plain, factors, strict=True):
        np.testing.assert_allclose(way, expected * factor, rtol=2e-3, atol=1e-7)


def test_a_factor_scales_lambs_step() -> None:
    """One step: the next ones depend on the weights, which by then are others."""
    plain = run_steps(make_optimizer(name="lamb"), make_model(), [], steps=1)
    scaled = run_steps(make_optimizer(name="lamb"), make_model(), RATES, steps=1)
    for way, expected, factor in zip(scaled, plain, [0.25] * 4 + [3] * 2, strict=True):
        np.testing.assert_allclose(way, expected * factor, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb"])
def test_a_factor_scales_weight_decay(name: str) -> None:
    optimizer, model = make_optimizer(name=name, learning_rate=0.1, weight_decay=0.5), make_model()
    objective.set_learning_rate_factors(optimizer, model, [LayerRate(match="head", learning_rate_factor=2)])
    head, first = model.get_layer("head"), model.get_layer("encoder").get_layer("first")
    before = [layer.kernel.numpy() for layer in (head, first)]
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.zeros_like(v) for v in model.trainable_variables], model.trainable_variables)
    np.testing.assert_allclose(head.kernel.numpy(), before[0] * 0.9, rtol=1e-6)
    np.testing.assert_allclose(first.kernel.numpy(), before[1] * 0.95, rtol=1e-6)
    np.testing.assert_array_equal([*head.bias.numpy(), *first.bias.numpy()], 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_factor_of_one_changes_no_bit(name: str) -> None:
    settings = {"name": name, "weight_decay": 0.0 if name == "adam" else 0.1}
    plain = run_steps(make_optimizer(**settings), make_model(), [])
    scaled = run_steps(make_optimizer(**settings), make_model(), [LayerRate(match="*", learning_rate_factor=1)])
    for way, expected in zip(scaled, plain, strict=True):
        np.testing.assert_array_equal(way, expected)


def test_factors_for_layers_that_are_not_trained_are_refused() -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=r"train\.optimizer\.layers: no layer of .* matches 'hed'.*'head'"):
        objective.set_learning_rate_factors(make_optimizer(), model, [LayerRate(match="hed", learning_rate_factor=2)])
    objective.freeze(model, ["head"])
    with pytest.raises(ConfigError, match=r"'head' matches none but frozen layers"):
        objective.set_learning_rate_factors(make_optimizer(), model, [LayerRate(match="head", learning_rate_factor=2)])


# Replicas


def train_on(num_devices: int, name: str) -> list[Any]:
    """Weights, and their averages, after three steps of an optimizer with all that is done to it, on every device."""
    chosen: dict[str, Any] = {"strategy": "mirrored", "num_devices": num_devices} if num_devices > 1 else {}
    strategy = devices.make_strategy(TrainConfig(**chosen))
    with strategy.scope():
        model = make_model()
        settings = {"name": name, "schedule": "linear", "warmup_steps": 2, "learning_rate": 0.1}
        optimizer = make_optimizer(ema_decay=0.5, weight_decay=0.0 if name == "adam" else 0.5, **settings)
        objective.set_learning_rate_factors(optimizer, model, RATES if name != "adafactor" else [])
        optimizer.build(model.trainable_variables)
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars  # as the engine, which has summed them
    clip = objective.make_clip(OptimizerConfig(clip_each_norm=0.5))
    rng = np.random.default_rng(0)
    gradients = [tf.constant(rng.normal(size=v.shape).astype(np.float32)) for v in model.trainable_variables]
    step = tf.function(lambda: strategy.run(lambda: optimizer.apply(clip(gradients), model.trainable_variables)))
    for _ in range(3):
        step()
    states = [*model.trainable_variables, *optimizer._model_variables_moving_average]
    return [[copy.numpy().tolist() for copy in strategy.experimental_local_results(v.value)] for v in states]


@pytest.fixture(scope="module")
def on_devices() -> dict[str, dict[str, list[Any]]]:
    command = [sys.executable, "-m", "tests.components.test_objective"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_replicas_do_what_one_device_does(on_devices: dict[str, dict[str, list[Any]]], name: str) -> None:
    one, two = on_devices[name]["1"], on_devices[name]["2"]
    assert [len(copies) for copies in two] == [2] * len(one)
    for (expected,), copies in zip(one, two, strict=True):
        for copy in copies:
            np.testing.assert_array_equal(copy, expected)


if __name__ == "__main__":
    devices.prepare(TrainConfig(strategy="mirrored", num_devices=2))
    print(json.dumps({name: {number: train_on(number, name) for number in (1, 2)} for name in OPTIMIZERS}))
