"""The training engine: batches, losses, schedules, and the same numbers on any number of replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components.config import OptimizerConfig, TrainConfig
from components.errors import ConfigError
from components.train import devices, objective
from components.train.batches import TrainBatches
from models.spec import OutputSpec


@pytest.fixture(scope="module")
def replicas() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.components.replicas"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_replicas", ["2", "3"])
def test_replicas_give_the_weights_of_one_device_with_clipping(replicas: dict[str, Any], num_replicas: str) -> None:
    one, many = replicas["equal"]["1"], replicas["equal"][num_replicas]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)
    for weight, expected in zip(many["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)


def test_clipping_changes_the_weights(replicas: dict[str, Any]) -> None:
    difference = np.abs(np.subtract(replicas["unclipped"]["weights"][0], replicas["equal"]["1"]["weights"][0])).max()
    assert difference > 1e-4


def test_batch_norm_statistics_are_alike_on_all_replicas(replicas: dict[str, Any]) -> None:
    copies = replicas["norm"]["statistics_by_replica"]
    assert all(len(copy) == 2 for copy in copies)
    for first, second in copies:
        np.testing.assert_array_equal(first, second)
    assert np.abs(copies[0][0]).max() > 0


def test_half_precision_is_near_and_alike_on_replicas(replicas: dict[str, Any]) -> None:
    assert replicas["half"]["1"]["loss"] == pytest.approx(replicas["equal"]["1"]["loss"], rel=2e-2)
    assert replicas["half"]["2"]["loss"] == pytest.approx(replicas["half"]["1"]["loss"], rel=5e-3)


def test_an_overflow_on_one_replica_skips_the_step_on_all_and_halves_the_scale(replicas: dict[str, Any]) -> None:
    overflow = replicas["overflow"]
    assert overflow["skipped"] == [1, 0]
    assert overflow["unchanged_after_overflow"]
    assert overflow["loss_scale"] == 2.0**14
    assert overflow["finite"] and overflow["changed_by_the_good_step"]


def make_batches(seed: int = 0, num_examples: int = 50) -> TrainBatches:
    rows = np.arange(num_examples)
    return TrainBatches({"x": rows}, rows * 2, rows.astype(np.float32) + 1, batch_size=8, seed=seed)


def rows_of(batches: TrainBatches, epoch: int) -> list[int]:
    return [int(row) for features, _, _ in batches.epochs(epoch, epoch + 1) for row in features["x"]]


def test_an_epoch_visits_no_example_twice_and_keeps_rows_together() -> None:
    rows = rows_of(make_batches(), 0)
    assert len(rows) == len(set(rows)) == 48
    for features, labels, weights in make_batches().epochs(0, 1):
        np.testing.assert_array_equal(labels, features["x"] * 2)
        np.testing.assert_array_equal(weights, features["x"] + 1)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    assert rows_of(make_batches(), 3) == rows_of(make_batches(), 3)
    assert rows_of(make_batches(), 3) != rows_of(make_batches(), 4)
    assert rows_of(make_batches(seed=0), 3) != rows_of(make_batches(seed=1), 3)


def test_epochs_follow_one_another_as_they_would_alone() -> None:
    together = [int(row) for features, _, _ in make_batches().epochs(1, 3) for row in features["x"]]
    assert together == rows_of(make_batches(), 1) + rows_of(make_batches(), 2)


def test_examples_left_over_differ_from_epoch_to_epoch() -> None:
    left = [set(range(50)) - set(rows_of(make_batches(), epoch)) for epoch in range(8)]
    assert len({frozenset(rows) for rows in left}) > 1


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_equal_kerass(smoothing: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4)).astype(np.float32)
    labels = rng.integers(0, 4, 6)
    ours = objective.make_loss(OutputSpec("multiclass", 4), smoothing)(tf.constant(labels), tf.constant(logits))
    keras_loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing, reduction="none")
    np.testing.assert_allclose(ours, keras_loss(np.eye(4, dtype=np.float32)[labels], logits), rtol=1e-5)
    ours = objective.make_loss(OutputSpec("binary", 2), smoothing)(tf.constant(labels % 2), tf.constant(logits[:, :1]))
    keras_loss = keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=smoothing, reduction="none")
    np.testing.assert_allclose(ours, keras_loss((labels % 2)[:, None].astype(np.float32), logits[:, :1]), rtol=1e-5)


def test_balanced_weights_give_every_class_the_same_sum() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    weights = objective.example_weights(labels, OutputSpec("multiclass", 3), "balanced")
    np.testing.assert_allclose([weights[labels == c].sum() for c in range(3)], 2.0, rtol=1e-6)
    np.testing.assert_array_equal(objective.example_weights(labels, OutputSpec("multiclass", 3), "none"), 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant"}, {0: 0.1, 50: 0.1, 100: 0.1}),
        ({"schedule": "cosine"}, {0: 0.1, 50: 0.05, 100: 0.0}),
        ({"schedule": "constant", "warmup_steps": 10}, {0: 0.01, 10: 0.1, 90: 0.1}),
        ({"schedule": "cosine", "warmup_steps": 20}, {0: 0.0, 10: 0.05, 20: 0.1, 60: 0.05, 100: 0.0}),
    ],
)
def test_learning_rate_schedules(settings: dict[str, Any], expected: dict[int, float]) -> None:
    rate = objective.make_learning_rate(OptimizerConfig(learning_rate=0.1, **settings), 100)
    for step, value in expected.items():
        assert float(rate(step) if callable(rate) else rate) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_spares_biases(name: str) -> None:
    config = TrainConfig(optimizer=OptimizerConfig(name=name, weight_decay=0.5, learning_rate=0.1))
    optimizer = objective.make_optimizer(config, 10)
    layer = keras.layers.Dense(2, bias_initializer="ones", name="dense")
    layer.build((None, 3))
    kernel, bias = layer.kernel.numpy(), layer.bias.numpy()
    optimizer.build(layer.trainable_variables)
    optimizer.apply([tf.zeros_like(v) for v in layer.trainable_variables], layer.trainable_variables)
    np.testing.assert_allclose(layer.kernel.numpy(), kernel * 0.95, rtol=1e-5)
    np.testing.assert_array_equal(layer.bias.numpy(), bias)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_carries_the_last_step_on(momentum: float) -> None:
    config = TrainConfig(optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, momentum=momentum))
    optimizer = objective.make_optimizer(config, 10)
    weight = keras.Variable(1.0)
    optimizer.build([weight])
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [weight])
    assert float(weight) == pytest.approx(1 - 0.1 - (0.1 + momentum * 0.1))


def test_adam_refuses_a_weight_decay_that_it_would_not_read() -> None:
    with pytest.raises(ValueError, match="use name: adamw"):
        OptimizerConfig(name="adam", weight_decay=0.1)


def test_impossible_device_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 1 CPUs"):
        devices.make_strategy(TrainConfig(strategy="mirrored", num_devices=64))
    with pytest.raises(ConfigError, match="TensorFlow has started with fewer CPU devices"):
        tf.constant(1)
        devices.prepare(TrainConfig(strategy="mirrored", num_devices=64))
