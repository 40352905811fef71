"""The faster operations give what Keras's own give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components.train import fast_ops


def outcome(make: Callable[[], keras.layers.Layer], x: np.ndarray, *, jit: bool = False) -> dict[str, Any]:
    """Outputs, gradients and states after one call in training."""
    layer = make()
    layer.build(x.shape)

    @tf.function(jit_compile=jit)
    def step(inputs: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True)
            loss = tf.reduce_sum(tf.sin(tf.cast(outputs, tf.float32)))
        return outputs, tape.gradient(loss, [inputs, *(v.value for v in layer.trainable_variables)])

    outputs, gradients = step(tf.constant(x))
    return {
        "outputs": outputs.numpy().astype(np.float32),
        "gradients": [np.asarray(g, np.float32) for g in gradients],
        "states": [v.numpy() for v in layer.non_trainable_variables if v.dtype == "float32"],
    }


def images(dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).normal(3.0, 2.0, (5, 4, 3, 6)).astype(dtype)


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": False}, {"center": False}, {"momentum": 0.5, "epsilon": 0.1}, {"axis": 3}],
    ids=str,
)
@pytest.mark.parametrize("jit", [False, True])
def test_batch_norm_is_fused_and_equal(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], jit: bool) -> None:
    def make() -> keras.layers.Layer:
        return keras.layers.BatchNormalization(**options)

    expected = outcome(make, images(), jit=jit)
    fused: list[int] = []
    run = tf.compat.v1.nn.fused_batch_norm
    monkeypatch.setattr(tf.compat.v1.nn, "fused_batch_norm", lambda *a, **k: fused.append(1) or run(*a, **k))
    with fast_ops.in_place():
        ours = outcome(make, images(), jit=jit)
    assert fused
    np.testing.assert_allclose(ours["outputs"], expected["outputs"], atol=2e-6)
    for ours_each, expected_each in zip(ours["gradients"], expected["gradients"], strict=True):
        np.testing.assert_allclose(ours_each, expected_each, rtol=1e-6, atol=3e-5)
    for ours_each, expected_each in zip(ours["states"], expected["states"], strict=True):
        np.testing.assert_allclose(ours_each, expected_each, rtol=1e-5)
    assert np.abs(expected["states"][0]).max() > 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_is_near(policy: str) -> None:
    def make() -> keras.layers.Layer:
        return keras.layers.BatchNormalization(dtype=policy)

    expected = outcome(make, images())
    with fast_ops.in_place():
        ours = outcome(make, images())
    np.testing.assert_allclose(ours["outputs"], expected["outputs"], atol=0.03)
    for ours_each, expected_each in zip(ours["states"], expected["states"], strict=True):
        np.testing.assert_allclose(ours_each, expected_each, rtol=2e-3)


@pytest.mark.parametrize(
    ("options", "shape"),
    [({"axis": 1}, (5, 4, 3, 6)), ({}, (5, 6)), ({"trainable": False}, (5, 4, 3, 6)), ({"renorm": True}, (5, 4, 3, 6))],
    ids=str,
)
def test_what_the_fused_operation_does_not_know_is_left_to_keras(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    def make() -> keras.layers.Layer:
        return keras.layers.BatchNormalization(**options)

    monkeypatch.delattr(tf.compat.v1.nn, "fused_batch_norm")
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = outcome(make, x)
    with fast_ops.in_place():
        np.testing.assert_array_equal(outcome(make, x)["outputs"], expected["outputs"])


def test_dropout_draws_the_masks_of_keras_and_by_philox_under_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> keras.layers.Layer:
        return keras.layers.Dropout(0.5, seed=3)

    x = np.ones((64, 32), np.float32)
    expected = outcome(make, x)["outputs"]
    with fast_ops.in_place():
        np.testing.assert_array_equal(outcome(make, x)["outputs"], expected)
        compiled = [outcome(make, x, jit=True)["outputs"] for _ in range(2)]
    np.testing.assert_array_equal(*compiled)
    assert set(np.unique(compiled[0])) == {0.0, 2.0}
    assert compiled[0].mean() == pytest.approx(1.0, abs=0.05)
    algorithms: list[str] = []
    draw = tf.nn.experimental.stateless_dropout
    monkeypatch.setattr(
        tf.nn.experimental,
        "stateless_dropout",
        lambda *a, rng_alg="auto_select", **k: algorithms.append(rng_alg) or draw(*a, rng_alg=rng_alg, **k),
    )
    with fast_ops.in_place():
        outcome(make, x)
    assert algorithms == ["philox"]


def test_keras_has_its_own_back_after_an_error() -> None:
    norm, dropout = keras.layers.BatchNormalization.call, tf.nn.experimental.stateless_dropout
    with pytest.raises(RuntimeError), fast_ops.in_place():
        raise RuntimeError
    assert keras.layers.BatchNormalization.call is norm
    assert tf.nn.experimental.stateless_dropout is dropout


@pytest.mark.parametrize(("policy", "tolerance"), [("float32", 2e-6), ("mixed_bfloat16", 0.02)])
@pytest.mark.parametrize("jit", [False, True])
def test_gelu_by_tanh_is_the_same_with_fewer_operations(policy: str, tolerance: float, jit: bool) -> None:
    def make() -> keras.layers.Layer:
        return keras.layers.Activation(lambda x: keras.ops.gelu(x, approximate=True), dtype=policy)

    x = np.concatenate([np.linspace(-8, 8, 161), [0.0, -30.0, 30.0, 1e4, -1e4]]).astype(np.float32)
    expected = outcome(make, x, jit=jit)
    with fast_ops.in_place():
        ours = outcome(make, x, jit=jit)
    np.testing.assert_allclose(ours["outputs"], expected["outputs"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(ours["gradients"], expected["gradients"], atol=10 * tolerance)


def test_the_exact_gelu_is_left_to_keras() -> None:
    def make() -> keras.layers.Layer:
        return keras.layers.Activation(lambda x: keras.ops.gelu(x, approximate=False))

    x = np.linspace(-4, 4, 33).astype(np.float32)
    expected = outcome(make, x)
    with fast_ops.in_place():
        np.testing.assert_array_equal(outcome(make, x)["outputs"], expected["outputs"])
    assert tf.nn.gelu.__module__.startswith("tensorflow")
