"""The compiled training step: the same numbers on any number of replicas, and what it makes of NaN and Inf."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components import progress
from components.config import TrainConfig
from components.errors import ConfigError
from components.train import devices, engine
from components.train.cluster import local_clusters
from components.train.engine import Engine
from tests.components import replicas as cases

ONE_DEVICE = tf.distribute.get_strategy()


@pytest.fixture(scope="module")
def replicas() -> dict[str, Any]:
    return answer_of(start("replicas"))


def start(script: str, *args: str, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"tests.components.{script}", *args]
    return subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    with process:
        out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def assert_close(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """The same up to rounding, of which Adam makes more where a gradient is almost 0."""
    pairs = list(zip(found, expected, strict=True))
    assert pairs
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=tolerance)


# Replicas


@pytest.mark.parametrize("num_replicas", ["2", "3"])
def test_replicas_give_the_weights_of_one_device(replicas: dict[str, Any], num_replicas: str) -> None:
    """With clipping, weights of examples and losses, batches that cannot be divided, and a last batch of one row."""
    one, many = replicas["everything"]["1"], replicas["everything"][num_replicas]
    for copies, (expected,) in zip(many["weights"], one["weights"], strict=True):
        assert len(copies) == int(num_replicas)
        assert_close(copies[0], expected)
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("num_replicas", ["2", "3"])
@pytest.mark.parametrize("which", ["metrics", "evaluation"])
def test_replicas_give_the_metrics_of_one_device(replicas: dict[str, Any], num_replicas: str, which: str) -> None:
    one, many = replicas["everything"]["1"][which], replicas["everything"][num_replicas][which]
    assert list(one) == ["loss", "kind_binary_accuracy", "kind_auc", "size_mae", "kind_loss", "size_loss"]
    assert many == pytest.approx(one, rel=2e-6)


def test_xla_gives_the_same_under_replicas(replicas: dict[str, Any]) -> None:
    compiled, one = replicas["everything_by_xla"], replicas["everything"]["1"]
    assert_close([copies[1] for copies in compiled["weights"]], [copies[0] for copies in one["weights"]], 1e-5)
    assert compiled["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def test_clipping_changes_the_weights(replicas: dict[str, Any]) -> None:
    unclipped, clipped = replicas["everything_unclipped"]["weights"], replicas["everything"]["1"]["weights"]
    assert np.abs(np.subtract(unclipped[0], clipped[0])).max() > 1e-3


@pytest.mark.parametrize("num_replicas", ["2", "3"])
def test_batch_norm_statistics_are_alike_on_all_replicas(replicas: dict[str, Any], num_replicas: str) -> None:
    means, variances = replicas["batch_norm"][num_replicas]
    ((one_mean,), _) = replicas["batch_norm"]["1"]
    for copies in (means, variances):
        assert len(copies) == int(num_replicas)
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0])
    # The means of the replicas' rows, each with the weight of so many rows, are that of all rows.
    assert_close([means[0]], [one_mean])


def test_replicas_draw_dropout_masks_of_their_own_and_the_first_one_those_of_one_device(
    replicas: dict[str, Any],
) -> None:
    one, three = replicas["dropout"]["1"]["masks"], replicas["dropout"]["3"]["masks"]
    assert [step[0] for step in three] == [step[0] for step in one]
    masks = [tuple(np.ravel(mask)) for step in three for mask in step]
    assert len(set(masks)) == 6
    assert 0.4 < np.mean(masks) < 0.6


def test_layers_that_reduce_over_the_replicas_mix_up_no_random_numbers(replicas: dict[str, Any]) -> None:
    found = replicas["dropout_beside_a_reduction"]
    assert found["masks"] == [step[:2] for step in replicas["dropout"]["3"]["masks"]]
    assert found["is_put_back"]


def test_layer_rates_frozen_layers_and_averages_under_replicas(replicas: dict[str, Any]) -> None:
    one, two = replicas["tuned"]["one"], replicas["tuned"]["whole"]
    for name in ("first", "norm"):
        assert one["before"][name] == one["after"][name] == two["after"][name]
    for name in ("second", "head"):
        assert_close(two["after"][name], one["after"][name], 1e-5)
    moved = {
        name: np.abs(np.subtract(one["after"][name][0], one["before"][name][0])).mean() for name in ("second", "head")
    }
    assert 0 < moved["head"] < 0.3 * moved["second"]
    assert two["validation"] == pytest.approx(one["validation"], rel=1e-4)


def test_a_run_stopped_under_replicas_goes_on_to_the_bit(replicas: dict[str, Any]) -> None:
    assert replicas["tuned"]["resumed"] == replicas["tuned"]["whole"]


def test_impossible_device_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 1 CPUs"):
        devices.make_strategy(TrainConfig(strategy="mirrored", num_devices=64))
    with pytest.raises(ConfigError, match="TensorFlow has started with fewer CPU devices"):
        tf.constant(1)
        devices.prepare(TrainConfig(strategy="mirrored", num_devices=64))


# What Keras's own `fit` does not do, on the very same cases

MENDED = "Keras has mended this: the engine's own way may go"


@pytest.fixture(scope="module")
def plain_keras() -> dict[str, Any]:
    return answer_of(start("plain_keras"))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("steps_per_execution", "You must feed a value for placeholder tensor"),
        ("xla", "Trying to access resource .* located in device .*CPU:1 from device .*CPU:0"),
        ("uneven", r"Inputs to operation AddN .* must have the same size and shape"),
        ("accumulation", "`merge_call` called while defining a new graph"),
    ],
)
def test_where_keras_fails_under_replicas(plain_keras: dict[str, Any], case: str, fault: str) -> None:
    found = plain_keras[case]
    assert isinstance(found["fit"], str), MENDED
    assert re.search(fault, found["fit"], re.DOTALL), found["fit"]
    assert_close(found["engine"], found["one_device"])


def test_keras_clips_the_gradients_of_each_replica_by_themselves(plain_keras: dict[str, Any]) -> None:
    found = plain_keras["clipping"]
    difference = np.abs(np.subtract(found["fit"][0], found["one_device"][0])).max()
    assert difference > 1e-3, MENDED
    assert_close(found["engine"], found["one_device"])


def test_keras_lets_an_overflow_on_the_second_replica_into_the_weights(plain_keras: dict[str, Any]) -> None:
    found = plain_keras["overflow"]
    assert not np.isfinite(found["fit"][0]).any(), MENDED
    assert found["engine"] == found["before"]


def test_keras_lets_batch_norm_statistics_drift_apart(plain_keras: dict[str, Any]) -> None:
    found = plain_keras["batch_norm"]
    for (first, second), (ours, ours_too) in zip(found["fit"], found["engine"], strict=True):
        assert first != second, MENDED
        assert ours == ours_too
        np.testing.assert_allclose(ours, np.mean([first, second], axis=0), rtol=1e-4, atol=1e-7)


def test_keras_drops_the_same_on_all_replicas(plain_keras: dict[str, Any]) -> None:
    found = plain_keras["dropout"]
    assert found["fit"][0] == found["fit"][1], MENDED
    assert found["engine"][0] == found["fit"][0]
    assert found["engine"][1] != found["engine"][0]


@pytest.mark.slow
def test_where_keras_fails_on_several_workers() -> None:
    """keras#20585"""
    environs = [cluster.tf_config() for cluster in local_clusters(2)]
    started = [start("plain_keras", "worker", TF_CONFIG=environ) for environ in environs]
    chief, other = [answer_of(process) for process in started]
    for found in (chief, other):
        assert isinstance(found["fit"], str), MENDED
        assert "distribute.values.PerReplica" in found["fit"]
        assert_close(found["engine"], chief["one_device"])


# NaN and Inf

EVERYTHING = ["metrics", "optimizer", "statistics", "weights"]


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("path", ["xla", "uncompiled", "accumulated"])
def test_a_bad_step_changes_nothing(precision: str, path: str) -> None:
    accumulation_steps = 2 if path == "accumulated" else 1
    bad = np.inf if path == "accumulated" else np.nan
    told = cases.around_a_bad_step(
        ONE_DEVICE, precision=precision, xla=path == "xla", accumulation_steps=accumulation_steps, bad=bad
    )
    assert told["changed"] == [EVERYTHING, [], EVERYTHING]
    assert (told["skipped"], told["in_a_row"]) == ([0, 1, 1], [0, 1, 0])
    assert told["is_finite"]
    scale = engine.INITIAL_LOSS_SCALE if precision == "mixed_float16" else 1.0
    assert told["loss_scale"] == [scale, max(scale / 2, 1), max(scale / 2, 1)]


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_a_step_that_is_bad_on_one_replica_changes_nothing_on_any(replicas: dict[str, Any], precision: str) -> None:
    told = replicas["bad_step"][precision]
    assert told["changed"] == [EVERYTHING, [], EVERYTHING]
    assert (told["skipped"], told["in_a_row"]) == ([0, 1, 1], [0, 1, 0])
    assert told["is_finite"]
    scale = engine.INITIAL_LOSS_SCALE if precision == "mixed_float16" else 1.0
    assert told["loss_scale"] == [scale, max(scale / 2, 1), max(scale / 2, 1)]


def test_the_loss_scale_grows_after_good_steps_and_falls_no_lower_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LOSS_SCALE_GROWTH_STEPS", 2)
    monkeypatch.setattr(engine, "INITIAL_LOSS_SCALE", 2.0)
    model = cases.dense_model()
    model.compile(optimizer="sgd", loss="mse", auto_scale_loss=False)
    x, y = cases.examples(4)
    trained = Engine(model, strategy=ONE_DEVICE, xla=False, scale_loss=True)
    scales = []
    for is_bad in [False, False, False, True, False, True, True, True, False, False]:
        trained.run(iter(cases.batches_of(x * np.nan if is_bad else x, y)), 1)
        scales.append(float(trained.loss_scale))
    assert scales == [2, 4, 4, 2, 2, 1, 1, 1, 1, 2]


def test_the_loss_scale_changes_no_weight() -> None:
    weights = []
    for scale_loss in (False, True):
        model = cases.dense_model()
        model.compile(optimizer="sgd", loss="mse", auto_scale_loss=False)
        trained = Engine(model, strategy=ONE_DEVICE, xla=False, scale_loss=scale_loss)
        trained.run(iter(cases.batches_of(*cases.examples())), 3)
        weights.append(model.get_weights())
        assert trained.metrics()["loss"] < 2
    assert_close(*weights)


# Accumulation


def test_micro_batches_give_the_weights_of_the_whole_batch(replicas: dict[str, Any]) -> None:
    """With parts of 11, 11 and 9 rows, and a last batch of 1, 0 and 0."""
    whole = cases.train_accumulated(ONE_DEVICE, 1)
    for found in (cases.train_accumulated(ONE_DEVICE, 3), replicas["accumulated"]):
        assert_close(found["weights"], whole["weights"])
        assert found["metrics"] == pytest.approx(whole["metrics"], rel=1e-6)


def test_accumulation_in_half_precision() -> None:
    whole = cases.train_accumulated(ONE_DEVICE, 1)
    half = cases.train_accumulated(ONE_DEVICE, 3, precision="mixed_float16")
    assert half["skipped"] == 0
    assert half["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-3)
    assert half["metrics"]["loss"] != whole["metrics"]["loss"]


def test_the_step_that_tries_xla_leaves_no_trace() -> None:
    model = cases.dense_model(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3))
    model.compile(optimizer="adam", loss="mse", metrics=["mae"], auto_scale_loss=False)
    dataset = cases.batches_of(*cases.examples())
    tried = Engine(model, strategy=ONE_DEVICE, xla=False, scale_loss=True, spec=dataset.element_spec)
    tried.run(iter(dataset), 1)

    def state() -> list[Any]:
        return [*(variable.numpy().tolist() for variable in tried.variables()), tried.local_state().tolist()]

    before = state()
    assert tried.why_it_cannot_run(iter(dataset)) is None
    assert state() == before
    tried.run(iter(dataset), 1)
    assert state() != before


# A train_step of one's own


@pytest.mark.parametrize("num_replicas", ["1", "2"])
def test_a_train_step_of_ones_own(replicas: dict[str, Any], num_replicas: str) -> None:
    own, standard = replicas["own_step"][num_replicas], replicas["standard_step"]
    assert_close(own["weights"], standard["weights"])
    assert own["metrics"]["binary_accuracy"] == pytest.approx(standard["metrics"]["binary_accuracy"])


def test_two_optimizers_are_refused_on_two_replicas(replicas: dict[str, Any]) -> None:
    kind, message = replicas["gan"]
    assert kind == "ConfigError"
    assert message.startswith(
        "Gan.train_step calls self.optimizer.apply 0 times, expected once. A train_step with several"
    )


@pytest.mark.parametrize("option", [{"accumulation_steps": 2}, {"clip": lambda gradients: gradients}])
def test_two_optimizers_are_refused_with_what_they_would_not_read(option: dict[str, Any]) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(cases.examples()[0]).batch(16)
    gan = cases.make_gan()
    with pytest.raises(ConfigError, match=r"^Gan\.train_step calls .* without accumulation and clipping\.$"):
        Engine(gan, strategy=ONE_DEVICE, xla=False, spec=dataset.element_spec, **option).run(iter(dataset), 1)


class OneOptimizerTwice(cases.OwnStep):
    def train_step(self, data: Any) -> dict[str, Any]:
        super().train_step(data)
        return super().train_step(data)


def compiled(kind: type[keras.Model], **options: Any) -> keras.Model:
    model = kind(cases.dense_model())
    model.compile(**{"optimizer": "sgd", "loss": "mse", "auto_scale_loss": False, **options})
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda: compiled(cases.OwnStep),
            {"scale_loss": True},
            r"^OwnStep\.train_step does not call .*scale_loss\(loss\)",
        ),
        (lambda: compiled(OneOptimizerTwice), {}, r"calls self\.optimizer\.apply 2 times, expected once"),
        (cases.dense_model, {}, r"is not compiled\. Call model\.compile"),
        (
            lambda: compiled(cases.OwnStep, optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)),
            {},
            r"Set train\.gradient_accumulation_steps in its place",
        ),
    ],
)
def test_what_the_engine_cannot_train_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    dataset = cases.batches_of(*cases.examples())
    with pytest.raises(ConfigError, match=message):
        Engine(make(), strategy=ONE_DEVICE, xla=False, spec=dataset.element_spec, **options).run(iter(dataset), 1)


def test_a_loss_that_depends_on_no_weight_is_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss=lambda y, y_pred: y, auto_scale_loss=False)
    with pytest.raises(ConfigError, match="the loss depends on no trainable weight"):
        Engine(model, strategy=ONE_DEVICE, xla=False).run(iter(cases.batches_of(*cases.examples())), 1)


def test_batches_of_another_shape_are_reported_since_the_step_is_traced_again() -> None:
    lines: list[str] = []
    model = cases.dense_model()
    model.compile(optimizer="sgd", loss="mse", auto_scale_loss=False)
    one = Engine(model, strategy=ONE_DEVICE, xla=False)
    data = tf.data.Dataset.from_tensor_slices(cases.examples(48)).repeat()
    with progress.shown_by(lines.append):
        for num_steps in (1, 3):
            one.run(iter(data.batch(8, drop_remainder=True)), num_steps)
        assert (one.traces, lines) == (1, [])
        one.run(iter(data.batch(12, drop_remainder=True)), 1)
    assert one.traces == 2
    assert len(lines) == 1 and "traced again, for batches of another shape" in lines[0]
