"""Clusters of kernels: how many, where they start, and how they are trained."""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from models.optimization import ClusteringConfig, cluster

RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(32, 12)).astype(np.float32)


def dense_model(*, sparsity=0.0):
    model = keras.Sequential([keras.Input((12,)), layers.Dense(10, name="first"), layers.Dense(7, name="second")])
    rng = np.random.default_rng(0)
    for layer in model.layers:
        kernel = rng.normal(0, 0.3, layer.kernel.shape)
        layer.kernel.assign(np.where(rng.uniform(size=kernel.shape) < sparsity, 0, kernel))
    return model


def kernel_of(model, name="first"):
    return ops.convert_to_numpy(model.get_layer(name).kernel)


def trained(stage, epochs=3):
    stage.model.compile(keras.optimizers.Adam(0.02), "mse")
    stage.model.fit(ROWS, ROWS[:, :7], epochs=epochs, batch_size=16, verbose=0)
    return stage.finish()


@pytest.mark.parametrize("initial", ["linear", "density", "kmeans++"])
def test_kernels_have_so_many_values_each_nearest_to_its_weights(initial):
    model = dense_model()
    clustered = cluster(model, ClusteringConfig(8, initial)).finish()
    for name in ("first", "second"):
        old, new = kernel_of(model, name), kernel_of(clustered, name)
        values = np.unique(new)
        assert len(values) <= 8
        np.testing.assert_array_equal(new, values[np.abs(old[..., None] - values).argmin(-1)])
        for value in values:
            np.testing.assert_allclose(old[new == value].mean(), value, rtol=1e-5)
    np.testing.assert_array_equal(clustered.layers[0].bias, model.layers[0].bias)


def test_initial_values():
    """Three groups of weights: of nine clusters evenly over the range most are empty, and none evenly over the weights."""
    weights = np.concatenate([RNG.normal(size=500) * 0.01 + place for place in (-1, 0, 1)]).astype(np.float32)
    model = keras.Sequential([keras.Input((30,)), layers.Dense(50)])
    model.layers[0].kernel.assign(weights.reshape(30, 50))
    values = {
        initial: len(np.unique(cluster(model, ClusteringConfig(9, initial)).finish().layers[0].kernel))
        for initial in ("linear", "density", "kmeans++")
    }
    assert values["linear"] < values["density"] == 9
    kernels = [cluster(model, ClusteringConfig(9, "kmeans++", seed=s)).finish().layers[0].kernel for s in (1, 1, 2)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.abs(kernels[0] - kernels[2]).max() > 1e-4


def test_the_gradient_of_a_value_is_the_sum_of_those_of_its_weights():
    stage = cluster(dense_model(), ClusteringConfig(4))
    plain = cluster(dense_model(), ClusteringConfig(4)).finish()

    def gradient(model, variable):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ROWS, training=True) - ROWS[:, :7]))
        return tf.convert_to_tensor(tape.gradient(loss, variable.value)).numpy()

    of_weights = gradient(plain, plain.layers[0].kernel)
    part = stage.model.parts[0]
    members = ops.convert_to_numpy(part.assignments)
    expected = [of_weights.ravel()[members == index].sum() for index in range(4)]
    np.testing.assert_allclose(gradient(stage.model, part.centroids), expected, rtol=1e-4)


def test_training_moves_the_values_and_their_number_stays():
    stage = cluster(dense_model(), ClusteringConfig(8))
    before = kernel_of(stage.finish())
    stage = cluster(dense_model(), ClusteringConfig(8))
    after = kernel_of(trained(stage))
    assert np.abs(after - before).min() > 1e-4
    assert len(np.unique(np.stack([before.ravel(), after.ravel()]), axis=1).T) == len(np.unique(after)) == 8
    np.testing.assert_array_equal(stage.finish()(ROWS), stage.model(ROWS))
    assert [weight.name for weight in stage.finish().trainable_weights] == ["kernel", "bias"] * 2


@pytest.mark.parametrize("preserve", [True, False])
def test_zeros_stay_zero_if_asked(preserve):
    model = dense_model(sparsity=0.6)
    after = kernel_of(trained(cluster(model, ClusteringConfig(8, preserve_sparsity=preserve))))
    assert len(np.unique(after)) <= 8
    is_zero = kernel_of(model) == 0
    np.testing.assert_array_equal(after == 0, is_zero if preserve else np.zeros_like(is_zero))


def test_other_layers_stay_as_they_are():
    model = dense_model()
    for settings in ({"layers": ("first",)}, {"skip": ("second",)}):
        clustered = cluster(model, ClusteringConfig(4, **settings)).finish()
        assert len(np.unique(kernel_of(clustered))) == 4
        np.testing.assert_array_equal(kernel_of(clustered, "second"), kernel_of(model, "second"))


def test_the_file_needs_nothing_of_the_stage(tmp_path):
    clustered = trained(cluster(dense_model(), ClusteringConfig(4)), epochs=1)
    clustered.save(file := tmp_path / "model.keras")
    config = zipfile.ZipFile(file).read("config.json").decode()
    assert "registered_name" in config and "optimization" not in config and "headrace" not in config
    np.testing.assert_array_equal(keras.saving.load_model(file)(ROWS), clustered(ROWS))


def test_settings_that_cannot_be():
    with pytest.raises(ValueError, match="num_clusters must be 2 or more, received 1"):
        ClusteringConfig(1)
    with pytest.raises(
        ValueError, match="initial must be one of 'linear', 'density', 'kmeans\\+\\+', received 'random'"
    ):
        ClusteringConfig(initial="random")
    model = keras.Sequential([keras.Input((12,)), layers.ReLU(name="relu")])
    with pytest.raises(ValueError, match="has a trainable weight named kernel or"):
        cluster(model, ClusteringConfig())
