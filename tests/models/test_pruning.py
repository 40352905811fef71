"""Schedules and masks by hand, and smaller models against masked ones."""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest
from keras import layers, ops

from models import resnet
from models.optimization import PruningConfig, prune
from models.spec import FeatureSpec, OutputSpec
from tests.models.weights import settle

RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(32, 12)).astype(np.float32)
IMAGES = RNG.normal(size=(8, 8, 8, 3)).astype(np.float32)


def dense_model():
    return settle(
        keras.Sequential([keras.Input((12,)), layers.Dense(10, name="first"), layers.Dense(7, name="second")])
    )


def pass_schedule(stage, inputs, num_steps=4):
    """Training steps that change nothing but the masks."""
    for _ in range(num_steps):
        stage.model(inputs, training=True)
    return stage.finish()


def kernels_of(model):
    return [ops.convert_to_numpy(weight) for weight in model.trainable_weights if weight.name == "kernel"]


def zeros_of(model):
    return [int((kernel == 0).sum()) for kernel in kernels_of(model)]


# Schedule


@pytest.mark.parametrize("schedule", ["polynomial", "constant"])
def test_sparsity_follows_the_formula(schedule):
    """Zhu and Gupta (arXiv:1710.01878), equation 1, at the steps that are due; in between it stays."""
    end = {"end_step": 9} if schedule == "polynomial" else {}
    config = PruningConfig(sparsity=0.8, schedule=schedule, start_step=2, frequency=3, **end)
    stage = prune(dense_model(), config, num_steps=20)
    sparsity = 0.0
    for step in range(12):
        stage.model(ROWS, training=True)
        stage.model(ROWS, training=False)
        if step in (2, 5, 8, 9):
            sparsity = 0.8 - 0.8 * (1 - (step - 2) / (9 - 2)) ** 3 if schedule == "polynomial" else 0.8
        masked = [int((ops.convert_to_numpy(value) == 0).sum()) for _, value in stage.model.values()]
        assert masked == [round(sparsity * 120), round(sparsity * 70)], step


def test_the_last_choice_is_after_half_of_the_training():
    stage = prune(dense_model(), PruningConfig(frequency=5), num_steps=18)
    for _ in range(9):
        stage.model(ROWS, training=True)
    with pytest.raises(ValueError, match=r"pruning ends at step 9, but the model was trained for 9 steps"):
        stage.finish()
    stage.model(ROWS, training=True)
    assert zeros_of(stage.finish()) == [60, 35]


# What is pruned


@pytest.mark.parametrize("sparsity", [0.37, 0.5, 0.9])
def test_the_smallest_weights_of_each_layer_are_zero(sparsity):
    model = dense_model()
    pruned = pass_schedule(prune(model, PruningConfig(sparsity=sparsity), num_steps=4), ROWS)
    for kernel, old in zip(kernels_of(pruned), kernels_of(model), strict=True):
        expected, order = old.copy(), np.argsort(np.abs(old), axis=None)
        expected.flat[order[: round(sparsity * old.size)]] = 0
        np.testing.assert_array_equal(kernel, expected)
    np.testing.assert_array_equal(pruned.layers[0].bias, model.layers[0].bias)


def test_or_the_smallest_of_all_layers():
    model = dense_model()
    model.layers[0].kernel.assign(model.layers[0].kernel * 0.1)
    pruned = pass_schedule(prune(model, PruningConfig(sparsity=0.6, scope="global"), num_steps=4), ROWS)
    before = np.abs(np.concatenate([kernel.ravel() for kernel in kernels_of(model)]))
    after = np.concatenate([kernel.ravel() for kernel in kernels_of(pruned)])
    np.testing.assert_array_equal(after == 0, before < np.sort(before)[round(0.6 * 190)])
    assert zeros_of(pruned)[0] > 100 > 20 > zeros_of(pruned)[1]


def test_layers_and_skip_choose():
    model = keras.Sequential([keras.Input((12,)), dense_model(), layers.Dense(4, name="head")])
    assert zeros_of(pass_schedule(prune(model, PruningConfig(layers=("*/first",)), num_steps=4), ROWS)) == [60, 0, 0]
    assert zeros_of(pass_schedule(prune(model, PruningConfig(skip=("first",)), num_steps=4), ROWS)) == [0, 35, 14]
    assert zeros_of(pass_schedule(prune(model, PruningConfig(skip=("sequential*",)), num_steps=4), ROWS)) == [0, 0, 14]


def two_of_four_model():
    image = layers.Input((8, 8, 3), name="image")
    x = layers.Conv2D(8, 3, name="of_three")(image)
    x = layers.Conv2D(8, 3, name="conv")(x)
    x = layers.Conv2DTranspose(4, 3, name="transposed")(x)
    x = layers.DepthwiseConv2D(3, name="depthwise")(x)
    x = layers.EinsumDense("bhwc,cde->bhwde", (None, None, 2, 4), name="split")(x)
    x = layers.EinsumDense("bhwde,def->bhwf", (None, None, 8), name="joined")(x)
    return settle(keras.Model(image, layers.Dense(5, name="head")(layers.GlobalAveragePooling2D()(x))))


def test_two_of_each_four_input_channels_are_zero():
    model = two_of_four_model()
    stage = prune(model, PruningConfig(pattern="2:4", frequency=1), num_steps=6)
    pruned = pass_schedule(stage, IMAGES, 6)
    for name, axis in {"conv": 2, "transposed": 3, "split": 0, "joined": 1, "head": 0}.items():
        new, old = (
            np.moveaxis(ops.convert_to_numpy(m.get_layer(name).kernel), axis, -1).reshape(-1, 4)
            for m in (pruned, model)
        )
        largest = np.argsort(np.argsort(np.abs(old), axis=1), axis=1) >= 2
        np.testing.assert_array_equal(new, np.where(largest, old, 0))
    assert stage.left == {
        "of_three": "its 3 input channels are no multiple of 4",
        "depthwise": "DepthwiseConv2D: its kernel has no axis of input channels",
    }


def test_what_is_out_stays_out_and_the_rest_is_trained():
    stage = prune(dense_model(), PruningConfig(sparsity=0.5, schedule="constant"), num_steps=9)
    # Weight decay and momentum move the variables that are masked.
    stage.model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
    stage.model(ROWS, training=True)
    first = kernels_of(stage.finish())
    stage.model.fit(ROWS, ROWS[:, :7], epochs=4, batch_size=16, verbose=0)
    for old, new in zip(first, kernels_of(stage.finish()), strict=True):
        np.testing.assert_array_equal(new == 0, old == 0)
        assert np.abs(new - old)[old != 0].min() > 1e-4


# Channels


def plain():
    """Convolutions, batch norm and all that lies between, into a Dense layer by way of a Flatten."""
    return keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            layers.Conv2D(8, 3, name="first"),
            layers.BatchNormalization(),
            layers.Activation("sigmoid"),
            layers.MaxPooling2D(),
            layers.SeparableConv2D(10, 3, padding="same", name="separable"),
            layers.LeakyReLU(),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.Flatten(),
            layers.BatchNormalization(),
            layers.Dense(6, activation="relu", name="hidden"),
            layers.Dropout(0.5),
            layers.Dense(4, name="head"),
        ]
    )


def residual():
    spec = {"image": FeatureSpec((8, 8, 3), "float32")}
    return resnet.build(spec, OutputSpec("multiclass", 4), stage_sizes=[2, 1], stage_widths=[8, 12])


def dense_net():
    """Concatenations, a transposed convolution, a gate, operations, a layer that is used twice."""
    image = layers.Input((8, 8, 3), name="image")
    x = layers.Conv2D(6, 3, padding="same", name="stem")(image)
    shared = layers.Conv2D(4, 1, name="shared")
    x = layers.Concatenate()([x, ops.relu(shared(x)), shared(ops.tanh(x) * 2)])
    gate = layers.Dense(14, activation="sigmoid", name="gate")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    x = layers.Multiply()([layers.BatchNormalization()(x), gate])
    x = layers.Conv2DTranspose(6, 3, strides=2, name="up")(x)
    return keras.Model(image, layers.Dense(4, name="head")(layers.GlobalMaxPooling2D()(x)))


def nested():
    image = layers.Input((8, 8, 3), name="image")
    block = keras.Sequential([layers.Input((8, 8, 6)), layers.Conv2D(6, 3, padding="same", name="conv"), layers.ReLU()])
    stem = layers.Conv2D(6, 1, name="stem")(image)
    x = layers.Add()([stem, block(stem)])
    return keras.Model(image, layers.Dense(4, name="head")(layers.GlobalAveragePooling2D()(x)))


WIDTHS = {
    plain: {"first": 4, "separable": 5, "hidden": 3, "head": 4},
    residual: {"stem_conv": 4, "stage1_block1_conv1": 4, "stage1_block2_conv2": 4, "stage2_block1_projection": 6},
    dense_net: {"stem": 3, "shared": 2, "gate": 7, "up": 3},
    nested: {"stem": 3, "conv": 3, "head": 4},
}


@pytest.mark.parametrize("make", WIDTHS)
def test_without_half_of_the_channels_the_answers_are_those_of_the_masked_model(make):
    model = settle(make())
    inputs = {"image": IMAGES} if make is residual else IMAGES
    stage = prune(model, PruningConfig(pattern="channels"), num_steps=4)
    smaller = pass_schedule(stage, inputs)
    assert {name: smaller.get_layer(name).get_weights()[-1].shape[-1] for name in WIDTHS[make]} == WIDTHS[make]
    masked = stage.model(inputs, training=False)
    np.testing.assert_allclose(smaller(inputs), masked, atol=1e-5)
    assert np.abs(masked - model(inputs)).max() > 0.01
    assert list(stage.left) == [model.layers[-1].name]


def test_the_channels_of_the_least_norm_go():
    model = settle(plain())
    kernel = ops.convert_to_numpy(model.get_layer("first").kernel)
    pruned = pass_schedule(prune(model, PruningConfig(pattern="channels", layers=("first",)), num_steps=4), IMAGES)
    kept = np.sort(np.argsort((kernel**2).sum((0, 1, 2)))[4:])
    np.testing.assert_array_equal(pruned.get_layer("first").kernel, kernel[..., kept])
    pointwise = ops.convert_to_numpy(model.get_layer("separable").pointwise_kernel)
    np.testing.assert_array_equal(pruned.get_layer("separable").pointwise_kernel, pointwise[:, :, kept])


def widths_of_plain(sparsity, *, scale=1.0):
    model = settle(plain())
    model.get_layer("first").kernel.assign(model.get_layer("first").kernel * scale)
    smaller = pass_schedule(prune(model, PruningConfig("channels", sparsity, "global"), num_steps=4), IMAGES)
    return [smaller.get_layer(name).get_weights()[-1].shape[-1] for name in ("first", "separable", "hidden")]


def test_channels_of_all_layers_are_compared_relative_to_their_layer():
    widths = widths_of_plain(0.5)
    assert sum(widths) == 12
    assert widths != [4, 5, 3]
    assert widths_of_plain(0.5, scale=1e-2) == widths


def test_of_each_layer_a_channel_stays_whatever_is_asked():
    assert widths_of_plain(0.95) == [1, 1, 1]


def test_what_cannot_be_cut_is_left_and_said():
    image = layers.Input((8, 8, 3), name="image")
    x = layers.Conv2D(8, 3, name="first")(image)
    x = layers.Conv2D(8, 3, groups=2, name="grouped")(x)
    x = layers.Conv2D(8, 1, activation="softmax", name="attention")(x)
    skipped, free = layers.Conv2D(8, 1, name="skipped")(x), layers.Conv2D(8, 1, name="joined")(x)
    x = layers.Conv2D(8, 1, name="free")(layers.Add()([skipped, free]))
    x = layers.Dense(4, name="last")(layers.Reshape((-1,))(layers.Conv2D(2, 1, name="reshaped")(x)))
    stage = prune(keras.Model(image, x), PruningConfig("channels", skip=("skipped",)), num_steps=4)
    assert stage.left == {
        "first": "they meet 'grouped' (Conv2D), which is not cut",
        "attention": "the activation of 'attention' mixes them",
        "joined": "they share an addition with 'skipped', which is not chosen",
        "reshaped": "they meet 'reshape' (Reshape), which is not cut",
        "last": "they are the model's outputs",
    }
    smaller = pass_schedule(stage, IMAGES)
    assert smaller.get_layer("free").filters == 4
    assert smaller.get_layer("joined").filters == 8


# Files and errors


@pytest.mark.parametrize("pattern", ["unstructured", "channels"])
def test_the_file_needs_nothing_of_the_stage(pattern, tmp_path):
    pruned = pass_schedule(prune(settle(plain()), PruningConfig(pattern), num_steps=4), IMAGES)
    pruned.save(file := tmp_path / "model.keras")
    config = zipfile.ZipFile(file).read("config.json").decode()
    assert "registered_name" in config and "optimization" not in config and "headrace" not in config
    np.testing.assert_array_equal(keras.saving.load_model(file)(IMAGES), pruned(IMAGES))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "4:8"}, "pattern must be one of 'unstructured', '2:4', 'channels', received '4:8'"),
        ({"sparsity": 1.0}, r"sparsity must be a number in \[0, 1\), received 1.0"),
        ({"frequency": 0}, "frequency must be an integer of 1 or more"),
        ({"start_step": 5, "end_step": 4}, "end_step must not come before start_step, received 4, 5"),
        ({"pattern": "2:4", "sparsity": 0.7}, "leave out sparsity and scope, received 0.7 and 'layer'"),
        ({"schedule": "constant", "end_step": 4}, "nothing reads end_step with schedule 'constant'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        PruningConfig(**settings)


def test_models_that_cannot_be_pruned():
    with pytest.raises(ValueError, match="at step 10, but the training has 10 steps"):
        prune(dense_model(), PruningConfig(end_step=10), num_steps=10)
    with pytest.raises(ValueError, match=r"no layer .* matches 'frist': did you mean"):
        prune(dense_model(), PruningConfig(layers=("frist",)), num_steps=10)
    with pytest.raises(ValueError, match="no layer can be pruned: head: its 6 input channels are no multiple of 4"):
        prune(plain(), PruningConfig("2:4", layers=("head",)), num_steps=10)
    with pytest.raises(ValueError, match="can be cut out: second: they are the model's outputs"):
        prune(dense_model(), PruningConfig("channels", layers=("second",)), num_steps=10)
