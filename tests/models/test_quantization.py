"""Fake quantization by hand, whole models from Keras to int8 TFLite and ONNX, and training around them."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from keras import layers, ops

from components.formats import Network, convert_onnx
from components.train.engine import Engine
from models import resnet, transformer
from models.layers import gelu_tanh
from models.quantization import (
    FakeQuantize,
    LayerSpec,
    QuantizationConfig,
    QuantizedLayer,
    quantize_aware,
    ranges,
    strip,
)
from models.spec import FeatureSpec, OutputSpec
from tests.models.weights import settle
from tests.processor import needs_exact_int8

IMAGE, OUTPUT = {"image": FeatureSpec((8, 8, 3), "float32")}, OutputSpec("multiclass", 4)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(7)
IMAGES = RNG.normal(size=(96, 8, 8, 3)).astype(np.float32)
ROWS = RNG.normal(size=(96, 9, 6)).astype(np.float32)
TOKENS = RNG.integers(1, 20, (96, 8)) * (np.arange(8) < RNG.integers(3, 9, (96, 1)))
LABELS = RNG.integers(0, 4, 96)


def fake_quantized(values, low, high, *, levels=255):
    """The formula of Jacob et al. (arXiv:1712.05877, equation 12) with the zero point nudged to an integer."""
    scale = (high - low) / levels
    zero = np.clip(np.round(-low / scale), 0, levels)
    return (np.clip(np.floor(values / scale + zero + 0.5), 0, levels) - zero) * scale


def observed(model, inputs):
    """The model after ranges and statistics have met some batches; its weights stay."""
    for _ in range(4):
        model(inputs, training=True)
    return model


def to_tflite(model, folder, io=None):
    model.export(folder, format="tf_saved_model", verbose=False)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if io is not None:
        converter.inference_input_type = converter.inference_output_type = io
    return converter.convert()


def run_tflite(content, inputs):
    signature = Interpreter(model_content=content, num_threads=1).get_signature_runner()
    feed = inputs if isinstance(inputs, dict) else {next(iter(signature.get_input_details())): inputs}
    (outputs,) = signature(**feed).values()
    return outputs


def tensors_of(content):
    """What the file holds, without what a delegate would add."""
    resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=resolver)
    return interpreter.get_tensor_details()


def scales_of(content, *, channels):
    """Scales of int8 tensors, those with one or those with several."""
    found = [t["quantization_parameters"]["scales"] for t in tensors_of(content) if t["dtype"] is np.int8]
    return [scales for scales in found if (len(scales) > 1) == channels]


def check_alike(actual, expected, quantum):
    """Answers of two int8 forms, whose kernels round ties each in their way: by one step, and what comes of it after."""
    steps = np.abs(actual - expected) / quantum
    assert np.mean(steps) < 0.6
    first, second = np.sort(expected, axis=1)[:, :-3:-1].T
    is_clear = first - second > 5.5 * quantum
    np.testing.assert_array_equal(actual.argmax(1)[is_clear], expected.argmax(1)[is_clear])
    assert np.mean(actual.argmax(1) == expected.argmax(1)) > 0.93


# Rounding


@pytest.mark.parametrize(("low", "high"), [(-1.0, 2.0), (0.0, 6.0), (-0.313, 0.172), (-3.0, 0.0)])
def test_rounds_to_the_nudged_grid(low, high):
    values = np.append(RNG.uniform(-4, 7, 1000), 0).astype(np.float32)
    actual = FakeQuantize(fixed=(low, high), always=True)(values)
    np.testing.assert_allclose(actual, fake_quantized(values, low, high), atol=1e-6)
    assert abs(float(actual[-1])) < 1e-7


def test_rounds_in_float32_whatever_comes():
    values = ops.convert_to_tensor([0.1234, 1.0, 2.01], "float16")
    actual = FakeQuantize(fixed=(0, 2.0), always=True, dtype="mixed_float16")(values)
    assert actual.dtype == "float16"
    expected = fake_quantized(np.asarray(values, np.float32), 0, 2.0)
    np.testing.assert_array_equal(actual, expected.astype(np.float16))


def test_gradients_pass_straight_through_within_the_range():
    layer, values = FakeQuantize(fixed=(-1.0, 2.0), always=True), tf.constant([-1.5, -0.4, 0.3, 1.9, 2.5])
    with tf.GradientTape() as tape:
        tape.watch(values)
        outputs = layer(values)
    np.testing.assert_array_equal(tape.gradient(outputs, values), [0, 1, 1, 1, 0])


def test_range_is_the_moving_average_and_then_frozen():
    layer = FakeQuantize(momentum=0.75, start_step=1, freeze_step=3)
    batches = [np.array([-1.0, 0.5]), np.array([-2.0, 3.0]), np.array([1.0, 2.0]), np.array([-9.0, 9.0])]
    expected = [(-1.0, 0.5), (-1.25, 1.125), (-0.9375, 1.34375), (-0.9375, 1.34375)]
    for step, (batch, ends) in enumerate(zip(batches, expected, strict=True)):
        batch = batch.astype(np.float32)
        outputs = layer(batch, training=True)
        np.testing.assert_allclose(layer.range(), ends)
        wanted = batch if step < 1 else fake_quantized(batch, *ends)
        np.testing.assert_allclose(outputs, wanted, atol=1e-6)
        np.testing.assert_allclose(layer(batch), wanted, atol=1e-6)


def test_passes_on_what_it_has_no_range_for():
    values = np.array([0.12345], np.float32)
    np.testing.assert_array_equal(FakeQuantize()(values), values)


def test_a_range_next_to_nothing_is_left_at_once():
    layer = FakeQuantize()
    layer(np.full(3, 1e-9, np.float32), training=True)
    layer(np.full(3, 2.0, np.float32), training=True)
    np.testing.assert_allclose(layer.range(), (0, 2))


def test_inputs_share_one_range():
    layer = FakeQuantize()
    first, second = layer([np.array([-1.0, 0.31], np.float32), np.array([2.0, 0.7], np.float32)], training=True)
    np.testing.assert_allclose(layer.range(), (-1, 2))
    np.testing.assert_allclose(first, fake_quantized(np.array([-1.0, 0.31]), -1, 2), atol=1e-6)
    np.testing.assert_allclose(second, fake_quantized(np.array([2.0, 0.7]), -1, 2), atol=1e-6)


def test_learned_range_follows_its_gradient_until_it_is_frozen():
    """One value in 4 is beyond the range, so the wish for larger outputs widens the upper end: by its own logarithm."""
    layer = FakeQuantize(ranges="learned", freeze_step=2)
    layer(tf.constant([-1.0, 2.0]), training=True)
    values = tf.constant([0.5, 1.0, 3.0, 5.0])
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(values, training=True))
    np.testing.assert_allclose(layer.range(), (-1, 2))
    np.testing.assert_allclose(tape.gradient(total, layer.log_factors.value), [0, 2 * 2], atol=1e-6)
    layer.log_factors.assign([0.0, np.log(2.0)])
    np.testing.assert_allclose(layer.range(), (-1, 4))
    layer(values, training=True)  # the third step, past freeze_step
    layer.log_factors.assign([1.0, 1.0])
    np.testing.assert_allclose(layer.range(), (-1, 2))


# Weights and batch norm


def quantized_layer(layer, weights, shape, **options):
    wrapped = QuantizedLayer(layer, weights, **options)
    wrapped.build(shape)
    return settle(wrapped)


@pytest.mark.parametrize(("axes", "per"), [(1, (0, 1, 2)), (0, None)])
def test_rounds_weights_per_channel_or_at_all(axes, per):
    layer = quantized_layer(layers.Conv2D(5, 3), {"kernel": axes}, (None, 8, 8, 3), always=True)
    kernel, _ = layer.layer.get_weights()
    largest = np.abs(kernel).max(per)
    layer.layer.kernel.assign(fake_quantized(kernel, -largest, largest, levels=254))
    expected = layer.layer(IMAGES[:4])
    layer.layer.kernel.assign(kernel)
    np.testing.assert_allclose(layer(IMAGES[:4]), expected, atol=1e-5)
    assert np.abs(layer.layer(IMAGES[:4]) - expected).max() > 1e-3


def test_weights_have_gradients_even_the_largest():
    """In a few of many channels the largest weight lies outside what it rounds to, by the last digit."""
    layer = quantized_layer(layers.Dense(20000, use_bias=False), {"kernel": 1}, (None, 4), always=True)
    inputs = tf.constant(RNG.normal(size=(1, 4)).astype(np.float32))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(inputs))
    gradient = tape.gradient(total, layer.layer.kernel.value)
    np.testing.assert_allclose(gradient, np.repeat(inputs.numpy().T, 20000, axis=1), rtol=1e-6)


NORM = {"epsilon": 1e-3, "momentum": 0.9}
FOLDED = {
    "convolution": (lambda: layers.Conv2D(5, 3), {"kernel": 1}, -1),
    "depthwise": (lambda: layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False), {"kernel": 2}, -1),
    "transposed": (lambda: layers.Conv2DTranspose(5, 3, strides=2), {"kernel": 0}, -2),
}


@pytest.mark.parametrize("kind", FOLDED)
def test_folding_is_exact_and_unrounded_training_that_of_the_layers(kind):
    make, weights, folds = FOLDED[kind]
    norm = layers.BatchNormalization(**NORM)
    options = {"batch_norm": norm, "folds": folds, "start_step": 9}
    layer = quantized_layer(make(), weights, (None, 8, 8, 3), **options)
    plain, plain_norm = make(), layers.BatchNormalization(**NORM)
    plain_norm(plain(IMAGES[:1]))
    plain.set_weights(layer.layer.get_weights())
    plain_norm.set_weights(norm.get_weights())
    inputs = IMAGES[:8]
    np.testing.assert_allclose(layer(inputs), plain_norm(plain(inputs)), atol=3e-6)
    kernel, bias = layer.folded()
    unfolded, name = layer._run(inputs, {"kernel": kernel}, False), "bias"
    if plain.use_bias:
        unfolded = layer._run(inputs, {"kernel": kernel, name: np.zeros(bias.shape)}, False)
    np.testing.assert_allclose(unfolded + bias, plain_norm(plain(inputs)), atol=3e-6)
    np.testing.assert_allclose(layer(inputs, training=True), plain_norm(plain(inputs), training=True), atol=1e-5)
    np.testing.assert_allclose(norm.moving_mean, plain_norm.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, plain_norm.moving_variance, rtol=1e-5)


def test_training_corrects_to_the_batch_and_after_freezing_does_not():
    """Krishnamoorthi (arXiv:1806.08342), section 3.2.2, with a 1x1 convolution written out in numpy."""
    norm = layers.BatchNormalization(**NORM)
    options = {"batch_norm": norm, "folds": -1, "freeze_step": 1}
    layer = quantized_layer(layers.Conv2D(4, 1, use_bias=False), {"kernel": 1}, (None, 8, 8, 3), **options)
    kernel = layer.layer.get_weights()[0].reshape(3, 4)
    gamma, beta, mean, variance = norm.get_weights()
    inputs = IMAGES[:8].reshape(-1, 3)
    for is_frozen in (False, True):
        std, batch = np.sqrt(variance + 1e-3), inputs @ kernel
        folded = kernel * gamma / std
        largest = np.abs(folded).max(0)
        rounded = inputs @ fake_quantized(folded, -largest, largest, levels=254)
        batch_std = np.sqrt(batch.var(0) + 1e-3)
        expected = rounded * std / batch_std + beta - gamma * batch.mean(0) / batch_std
        if is_frozen:
            expected = rounded + beta - gamma * mean / std
        else:
            mean, variance = 0.9 * mean + 0.1 * batch.mean(0), 0.9 * variance + 0.1 * batch.var(0)
        actual = layer(IMAGES[:8], training=True)
        np.testing.assert_allclose(np.reshape(actual, (-1, 4)), expected, atol=2e-5)
        np.testing.assert_allclose(norm.moving_mean, mean, rtol=1e-5)
        np.testing.assert_allclose(norm.moving_variance, variance, rtol=1e-5)


# Whole models


@keras.saving.register_keras_serializable(package="test")
class Block(layers.Layer):
    """A layer made of layers, two of which have the name of another block's."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.conv = layers.Conv2D(width, 3, padding="same", use_bias=False, name="conv")
        self.norm = layers.BatchNormalization(name="norm")
        self.projection = layers.Conv2D(width, 1, name="projection")

    def call(self, inputs):
        return ops.relu(self.norm(self.conv(inputs)) + self.projection(inputs))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.first, self.second = Block(6, name="first"), Block(8, name="second")
        self.head = keras.Sequential([layers.Dense(12), layers.ReLU(), layers.Dropout(0.1), layers.Dense(4)])

    def call(self, inputs, training=None):
        x = self.second(self.first(inputs))
        return self.head(ops.mean(x, (1, 2)), training=training)


def subclassed():
    model = Subclassed()
    model(IMAGES[:1])
    return model


def preactivation_resnet():
    return resnet.build(IMAGE, OUTPUT, stage_sizes=[1, 1], stage_widths=[4, 8])


def sequential():
    return keras.Sequential(
        [
            layers.Input((8, 8, 3), name="image"),
            layers.Conv2D(8, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(6),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(16, activation="gelu"),
            layers.BatchNormalization(),
            layers.Dense(4, activation="softmax"),
        ]
    )


def dense_net():
    """Concatenations of concatenations, whose ranges the converter must keep apart, and what follows in a decoder."""
    image = x = layers.Input((8, 8, 3), name="image")
    x = layers.Conv2D(6, 3, padding="same")(x)
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Concatenate()([x, layers.Conv2D(4, 3, padding="same")(y)])
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2DTranspose(6, 3, strides=2, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.UpSampling2D()(layers.ZeroPadding2D()(x))
    return keras.Model(image, layers.Dense(4)(layers.GlobalMaxPooling2D()(x)))


def gated():
    """Squeeze-and-excitation, separable and grouped convolutions, and activations that no convolution takes in."""
    image = x = layers.Input((8, 8, 3), name="image")
    x = layers.SeparableConv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.Activation("silu")(layers.BatchNormalization()(x))
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(8, 1, activation="sigmoid")(layers.Conv2D(4, 1, activation="relu")(gate))
    x = layers.Conv2D(8, 3, groups=2, activation="hard_silu")(layers.Multiply()([x, gate]))
    return keras.Model(image, layers.Dense(4, activation="tanh")(layers.Flatten()(x)))


def sequence():
    rows = x = layers.Input((9, 6), name="rows")
    x = layers.Conv1D(8, 3, padding="causal", activation="relu")(layers.BatchNormalization()(x))
    x = layers.LeakyReLU()(layers.BatchNormalization()(layers.Conv1D(8, 3, strides=2)(x)))
    x = layers.BatchNormalization()(layers.DepthwiseConv1D(2)(x))
    return keras.Model(rows, layers.Dense(4)(layers.GlobalAveragePooling1D()(layers.Dense(6)(x))))


MODELS = {
    "functional": (preactivation_resnet, {"image": IMAGES}),
    "sequential": (sequential, IMAGES),
    "subclassed": (subclassed, IMAGES),
    "concatenated": (dense_net, IMAGES),
    "gated": (gated, IMAGES),
    "sequence": (sequence, ROWS),
}


def make_aware(model, config=None):
    inputs = keras.Input((8, 8, 3), name="image") if isinstance(model, Subclassed) else None
    return quantize_aware(model, config, inputs=inputs)


def test_averages_are_rounded_to_the_range_of_what_they_are_of():
    image = layers.Input((8, 8, 3), name="image")
    model = keras.Model(image, layers.AveragePooling2D(2)(layers.Conv2D(2, 1, name="conv")(image)))
    aware = observed(quantize_aware(model), IMAGES)
    assert list(ranges(aware)) == ["image_range", "conv_range"]
    low, high = ranges(aware)["conv_range"]
    integers = aware(IMAGES, training=False).numpy() / ((high - low) / 255)
    np.testing.assert_allclose(integers, np.round(integers), atol=1e-3)


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """A model, the quantization-aware one before and after it has met some batches, and its TFLite file."""
    make, inputs = MODELS[request.param]
    keras.utils.set_random_seed(1)
    model = settle(make())
    weights = model.get_weights()
    aware = make_aware(model, QuantizationConfig(momentum=0.5))
    before = aware(inputs, training=False).numpy()
    observed(aware, inputs)
    content = to_tflite(strip(aware), tmp_path_factory.mktemp("saved_model"))
    found = {"model": model, "inputs": inputs, "before": before, "aware": aware, "content": content}
    return {**found, "weights": weights}


def test_answers_alike_before_training(case):
    np.testing.assert_allclose(case["before"], case["model"](case["inputs"], training=False), atol=3e-5)


def test_every_number_of_the_tflite_file_is_an_integer(case):
    names = [t["name"] for t in tensors_of(case["content"]) if t["dtype"] not in (np.int8, np.int32)]
    assert len(names) == 2  # the input and the output
    assert "serving_default" in names[0] and "PartitionedCall" in names[1]


def test_tflite_has_the_trained_ranges(case):
    """Each scale of an activation is (max - min) / 255 of a trained range, and each range is the scale of some."""
    actual = np.unique(np.concatenate(scales_of(case["content"], channels=False)))
    expected = np.array([(high - low) / 255 for low, high in ranges(case["aware"]).values()], np.float32)
    is_activation = np.isin(actual, expected) | (np.abs(actual[:, None] / expected - 1) < 2e-7).any(1)
    one_scale = [layer for layer in case["aware"].layers if 0 in getattr(layer, "quantized", {}).values()]
    assert (~is_activation).sum() <= len(one_scale)
    assert (np.abs(actual[:, None] / expected - 1) < 2e-7).any(0).all()


def test_tflite_has_the_folded_weights_per_channel(case):
    expected = []
    for layer in case["aware"].layers:
        if 0 not in getattr(layer, "quantized", {0: 0}).values():
            kernel = layer.folded()[0] if layer.batch_norm else layer._values()["kernel"]
            kernel = np.reshape(kernel, (-1, np.prod(kernel.shape[-layer.quantized["kernel"] :])))
            expected.append(np.abs(kernel).max(0) / 127)
    actual = scales_of(case["content"], channels=True)
    assert len(actual) == len(expected) > 2
    for scales in actual:
        assert any(len(e) == len(scales) and np.allclose(e, scales, rtol=1e-5) for e in expected)


def test_tflite_answers_as_the_trained_model(case):
    expected = case["aware"](case["inputs"], training=False).numpy()
    low, high = list(ranges(case["aware"]).values())[-1]
    check_alike(run_tflite(case["content"], case["inputs"]), expected, (high - low) / 255)


def test_stripped_answers_as_the_trained_model(case):
    expected = case["aware"](case["inputs"], training=False)
    np.testing.assert_allclose(strip(case["aware"])(case["inputs"], training=False), expected, atol=1e-5)


def test_saved_and_loaded_is_the_same(case, tmp_path):
    case["aware"].save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    expected = case["aware"](case["inputs"], training=False)
    np.testing.assert_array_equal(loaded(case["inputs"], training=False), expected)
    assert [v.path for v in loaded.weights] == [v.path for v in case["aware"].weights]
    stripped, again = strip(case["aware"]), strip(loaded)
    np.testing.assert_array_equal(again(case["inputs"]), stripped(case["inputs"]))


def test_the_given_model_stays_as_it_is(case):
    for weight, before in zip(case["model"].get_weights(), case["weights"], strict=True):
        np.testing.assert_array_equal(weight, before)
    if not isinstance(case["model"], Subclassed):
        assert all(len(layer._inbound_nodes) == 1 for layer in case["model"].layers)


def test_integer_inputs_and_outputs(tmp_path):
    aware = observed(quantize_aware(settle(preactivation_resnet())), {"image": IMAGES})
    expected = aware({"image": IMAGES}, training=False).numpy()
    for io in (tf.int8, tf.uint8):
        content = to_tflite(strip(aware), tmp_path / io.name, io)
        assert {t["dtype"] for t in tensors_of(content)} <= {np.int8, np.uint8, np.int32}
        signature = Interpreter(model_content=content).get_signature_runner()
        (given,), (got,) = signature.get_input_details().values(), signature.get_output_details().values()
        assert given["dtype"] == got["dtype"] == io.as_numpy_dtype
        (in_scale, in_zero), (out_scale, out_zero) = given["quantization"], got["quantization"]
        images = np.clip(np.round(IMAGES / in_scale) + in_zero, io.min, io.max).astype(io.as_numpy_dtype)
        (outputs,) = signature(image=images).values()
        check_alike((outputs.astype(np.float32) - out_zero) * out_scale, expected, out_scale)


def test_learns_as_well_as_float(tmp_path):
    """Bars of four directions in noise: a small network learns them, with int8's rounding as well as without."""
    rng = np.random.default_rng(3)
    labels = np.arange(600) % 4
    bars = np.stack([np.eye(8), np.eye(8)[::-1], np.eye(8)[[3] * 8], np.eye(8)[[3] * 8].T])
    images = (bars[labels] * 1.2 + rng.normal(0, 0.5, (600, 8, 8)))[..., None].astype(np.float32)
    keras.utils.set_random_seed(0)
    model = resnet.build({"image": FeatureSpec((8, 8, 1), "float32")}, OUTPUT, stage_sizes=[1], stage_widths=[8])
    accuracy = {}
    for name, network, rate in (("float", model, 0.01), ("int8", None, 0.003)):
        network = network or quantize_aware(model, QuantizationConfig(momentum=0.9, start_step=4, freeze_step=48))
        network.compile(keras.optimizers.Adam(rate), LOSS)
        network.fit({"image": images[:400]}, labels[:400], batch_size=50, epochs=8, verbose=0)
        accuracy[name] = np.mean(network.predict({"image": images[400:]}, verbose=0).argmax(1) == labels[400:])
    held_out = {"image": images[400:]}
    answers = run_tflite(to_tflite(strip(network), tmp_path), held_out).argmax(1)
    assert accuracy["float"] > 0.9
    assert np.mean(answers == labels[400:]) > accuracy["float"] - 0.02
    assert np.mean(answers == network.predict(held_out, verbose=0).argmax(1)) >= 0.99


def test_a_channel_without_weights_keeps_its_bias(tmp_path):
    """The scale of its int32 bias is that of its weights, and with next to none the bias would overflow."""
    image = layers.Input((8, 8, 3), name="image")
    model = keras.Model(image, layers.Conv2D(4, 3)(image))
    kernel = RNG.normal(size=(3, 3, 3, 4)).astype(np.float32)
    kernel[..., 0], kernel[..., 1] = 0, kernel[..., 1] * 1e-8
    model.set_weights([kernel, np.array([5.0, -5.0, 1.0, 1.0])])
    aware = quantize_aware(model)
    expected = aware(IMAGES, training=True).numpy()
    np.testing.assert_allclose(expected[..., 0], 5, atol=0.1)
    actual = run_tflite(to_tflite(strip(aware), tmp_path), IMAGES)
    low, high = ranges(aware)["conv2d_range" if "conv2d_range" in ranges(aware) else list(ranges(aware))[-1]]
    assert np.abs(actual - expected).max() < 1.5 * (high - low) / 255


# Transformers


def keras_attention():
    rows = x = layers.Input((9, 6), name="rows")
    x = layers.Dense(8)(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x)])
    return keras.Model(rows, layers.Dense(4)(layers.GlobalAveragePooling1D()(layers.Dense(8, activation=gelu_tanh)(x))))


def own_transformer():
    text = {"text": FeatureSpec((8,), "int64", num_categories=20, is_sequence=True)}
    sizes = {"num_layers": 1, "hidden_dim": 8, "mlp_dim": 16, "num_heads": 2}
    return transformer.build(text, OUTPUT, **sizes)


def operations_of(content):
    resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=resolver)
    types = {t["index"]: t["dtype"] for t in tensors_of(content)}
    return {(op["op_name"], types[op["outputs"][0]]) for op in interpreter._get_ops_details()}


def test_keras_attention_is_int8_throughout(tmp_path):
    model = settle(keras_attention())
    aware = quantize_aware(model, QuantizationConfig(momentum=0.5))
    np.testing.assert_allclose(aware(ROWS, training=False), model(ROWS, training=False), atol=3e-5)
    observed(aware, ROWS)
    content = to_tflite(strip(aware), tmp_path)
    assert {kind for kind in operations_of(content) if kind[1] is np.float32} == {("DEQUANTIZE", np.float32)}
    assert {("BATCH_MATMUL", np.int8), ("SOFTMAX", np.int8), ("GELU", np.int8)} <= operations_of(content)
    low, high = list(ranges(aware).values())[-1]
    check_alike(run_tflite(content, ROWS), aware(ROWS, training=False).numpy(), (high - low) / 255)


def test_own_transformer_multiplies_in_int8_and_normalizes_in_float(tmp_path):
    model = settle(own_transformer())
    aware = quantize_aware(model, QuantizationConfig(momentum=0.5))
    np.testing.assert_allclose(aware({"text": TOKENS}, training=False), model({"text": TOKENS}), atol=3e-5)
    observed(aware, {"text": TOKENS})
    content = to_tflite(strip(aware), tmp_path)
    operations = operations_of(content)
    for name in ("CONV_2D", "BATCH_MATMUL", "GATHER", "GELU"):
        assert (name, np.int8) in operations and (name, np.float32) not in operations
    assert ("SOFTMAX", np.float32) in operations and ("RSQRT", np.float32) in operations
    low, high = list(ranges(aware).values())[-1]
    check_alike(
        run_tflite(content, {"text": TOKENS}), aware({"text": TOKENS}, training=False).numpy(), (high - low) / 255
    )


# ONNX


@needs_exact_int8
def test_onnx_has_pairs_that_onnxruntime_runs_in_int8(tmp_path):
    aware = observed(make_aware(settle(subclassed())), IMAGES)
    convert_onnx(Network.of(strip(aware)), tmp_path / "model.onnx", form="static_int8", examples={"image": IMAGES})
    graph = onnx.load(tmp_path / "model.onnx").graph
    kinds = [node.op_type for node in graph.node]
    num_kernels = sum(isinstance(layer, QuantizedLayer) for layer in aware.layers)
    assert kinds.count("QuantizeLinear") == len(ranges(aware))
    assert kinds.count("DequantizeLinear") == len(ranges(aware)) + num_kernels
    expected = aware(IMAGES, training=False).numpy()
    low, high = list(ranges(aware).values())[-1]
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    check_alike(session.run(None, {"image": IMAGES})[0], expected, (high - low) / 255)
    run = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    assert run.count("QLinearConv") == 6 and "Conv" not in run


# Training


def tiny(config=None, dtype="float32", dropout=0.0):
    keras.utils.set_random_seed(1)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        model = settle(resnet.build(IMAGE, OUTPUT, stage_sizes=[1], stage_widths=[4], dropout=dropout))
        return quantize_aware(model, config)
    finally:
        keras.config.set_dtype_policy(before)


def losses(model, **options):
    model.compile(keras.optimizers.SGD(0.02), LOSS, **options)
    return model.fit({"image": IMAGES}, LABELS, batch_size=48, epochs=3, shuffle=False, verbose=0).history["loss"]


def test_the_same_seed_gives_the_same_model():
    first, second = tiny(dropout=0.1), tiny(dropout=0.1)
    assert losses(first) == losses(second)
    assert [v.path for v in first.weights] == [v.path for v in second.weights]
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_xla_trains_alike():
    """But for ties, which it rounds the other way."""
    config = QuantizationConfig(ranges="learned", freeze_step=4)
    plain, compiled = tiny(config), tiny(config)
    np.testing.assert_allclose(losses(compiled, jit_compile=True), losses(plain, jit_compile=False), rtol=2e-3)
    for (low, high), ends in zip(ranges(plain).values(), ranges(compiled).values(), strict=True):
        np.testing.assert_allclose((low, high), ends, atol=0.02 * (high - low))


def test_mixed_precision_trains_alike_and_strips_to_float32():
    mixed = tiny(dtype="mixed_float16")
    assert mixed.get_layer("stem_conv").compute_dtype == "float16"
    np.testing.assert_allclose(losses(mixed), losses(tiny()), rtol=5e-3)
    assert mixed({"image": IMAGES}).dtype == "float32"  # the logits', as the model has them
    stripped = strip(mixed)
    assert {layer.compute_dtype for layer in stripped.layers} == {"float32"}
    np.testing.assert_allclose(stripped({"image": IMAGES}), mixed({"image": IMAGES}, training=False), atol=0.1)


def train_on_replicas():
    """Prints the ranges on each replica before and after they are frozen; in a process of its own, with two devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = tiny(QuantizationConfig(freeze_step=3))
        model.compile(keras.optimizers.SGD(0.02), LOSS, auto_scale_loss=False)
        engine = Engine(model, strategy=strategy, xla=False)
    data = tf.data.Dataset.from_tensor_slices(({"image": IMAGES}, LABELS)).batch(48).repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))
    found = []
    for num_steps in (2, 1, 2):
        engine.run(batches, num_steps)
        ends = [layer.observed.value for layer in model.layers if isinstance(layer, FakeQuantize)]
        found.append([[copy.numpy().tolist() for copy in strategy.experimental_local_results(v)] for v in ends])
    answers = strip(model)({"image": IMAGES[:2]}).numpy().tolist()
    print(json.dumps({"ranges": found, "answers": answers}))


def test_replicas_of_the_engine_keep_one_range():
    code = "from tests.models.test_quantization import train_on_replicas; train_on_replicas()"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout.splitlines()[-1])
    second, third, last = found["ranges"]
    assert all(len(copies) == 2 and copies[0] == copies[1] for copies in last)
    assert second != third == last
    assert np.isfinite(found["answers"]).all()


def test_layers_are_float_until_start_step():
    aware = tiny(QuantizationConfig(start_step=2))
    for _ in range(3):
        float_answers = strip_free(aware)
        is_float = np.allclose(aware({"image": IMAGES}, training=False), float_answers, atol=1e-5)
        assert is_float == (float(aware.get_layer("image_range").steps) <= 2)
        aware({"image": IMAGES}, training=True)
    with_rounding = aware({"image": IMAGES}, training=False)
    assert not np.allclose(with_rounding, strip_free(aware), atol=1e-5)


def strip_free(aware):
    """The answers with nothing rounded."""
    steps = [(layer, layer.steps.numpy()) for layer in aware.layers if hasattr(layer, "steps")]
    for layer, _ in steps:
        layer.steps.assign(0)
    answers = aware({"image": IMAGES}, training=False)
    for layer, value in steps:
        layer.steps.assign(value)
    return answers


def test_a_shared_layer_counts_a_step_once():
    image = layers.Input((8, 8, 3))
    shared = layers.Dense(4, name="shared")
    x = layers.Add()([shared(image), shared(layers.Conv2D(3, 1)(image))])
    aware = quantize_aware(keras.Model(image, x), QuantizationConfig(start_step=2))
    layer = aware.get_layer("shared")
    active = []
    for _ in range(4):
        aware(IMAGES[:2], training=True)
        active.append(bool(layer.is_active()))
    assert active == [False, False, True, True]


def test_batch_norm_that_was_called_for_inference_keeps_its_statistics():
    backbone = settle(preactivation_resnet())
    image = layers.Input((8, 8, 3), name="image")
    outputs = layers.Dense(4, name="head")(backbone({"image": image}, training=False))
    aware = quantize_aware(keras.Model(image, outputs))
    norms = [layer.batch_norm for layer in aware.layers if getattr(layer, "batch_norm", None)]
    before = [norm.moving_mean.numpy() for norm in norms]
    aware(IMAGES * 3, training=True)
    assert len(norms) == 5
    for norm, mean in zip(norms, before, strict=True):
        np.testing.assert_array_equal(norm.moving_mean, mean)


def test_masks_go_past_what_is_quantized():
    ids = layers.Input((8,), dtype="int64")
    x = layers.Dense(6, activation="relu")(layers.Embedding(20, 6, mask_zero=True)(ids))
    model = keras.Model(ids, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    aware = quantize_aware(model)
    np.testing.assert_allclose(aware(TOKENS, training=False), model(TOKENS), atol=1e-6)
    cut = TOKENS * (np.arange(8) < 3)
    assert np.abs(model(cut) - model(TOKENS)).max() > 1e-4
    np.testing.assert_allclose(aware(cut, training=False), model(cut), atol=1e-6)


# What users say


@keras.saving.register_keras_serializable(package="test")
class Scaled(layers.Layer):
    """A layer that says itself how it is quantized."""

    def build(self, input_shape):
        self.factor = self.add_weight(name="factor", shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.factor

    def quantization_spec(self):
        return LayerSpec({"factor": 0})


def scaled_model(**options):
    image = layers.Input((8, 8, 3), name="image")
    return keras.Model(image, Scaled(name="scaled", **options)(layers.Conv2D(3, 1, name="conv")(image)))


def test_a_layer_says_how_it_is_quantized(tmp_path):
    model = settle(scaled_model())
    aware = quantize_aware(model)
    assert isinstance(aware.get_layer("scaled"), QuantizedLayer)
    expected = aware(IMAGES, training=True).numpy()
    content = to_tflite(strip(aware), tmp_path)
    assert sum(t["dtype"] is np.float32 for t in tensors_of(content)) == 2
    low, high = ranges(aware)["scaled_range"]
    assert np.abs(run_tflite(content, IMAGES) - expected).max() < 1.5 * (high - low) / 255


def test_the_config_has_the_last_word_on_a_class():
    aware = quantize_aware(scaled_model(), QuantizationConfig(specs={Scaled: LayerSpec(output="float")}))
    assert type(aware.get_layer("scaled")) is Scaled
    assert list(ranges(aware)) == [] or "scaled_range" not in ranges(aware)


def test_skipped_layers_stay_float(tmp_path):
    aware = quantize_aware(settle(preactivation_resnet()), QuantizationConfig(skip=("stage1_*", "logits")))
    assert [n for n in ranges(aware) if n.startswith(("stage1_", "logits"))] == ["stage1_block1_add_range"]
    assert type(aware.get_layer("stage1_block1_conv1")) is layers.Conv2D
    assert type(aware.get_layer("logits")) is layers.Dense
    assert isinstance(aware.get_layer("stage2_block1_conv1"), QuantizedLayer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranges": "fixed"}, "ranges must be 'moving_average' or 'learned', received 'fixed'"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"start_step": -1}, "start_step must be 0 or more"),
        ({"start_step": 5, "freeze_step": 5}, "freeze_step must come after start_step, received 5 and 5"),
    ],
    ids=str,
)
def test_refuses_settings(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationConfig(**options)


class Conditional(keras.Model):
    def call(self, inputs, training=None):
        return ops.relu(inputs) if training else inputs * 2


class Unseen(keras.Model):
    def call(self, inputs):
        return ops.convert_to_tensor(inputs.numpy())


def test_refuses_models(tmp_path):
    with pytest.raises(ValueError, match="does not say what it takes: give inputs, such as"):
        quantize_aware(subclassed())
    image = keras.Input((8, 8, 3))
    with pytest.raises(ValueError, match=r"see through Conditional.call: it computes something else in training"):
        quantize_aware(Conditional(), inputs=image)
    with pytest.raises(ValueError, match=r"see through Unseen.call: AttributeError.*of layers and keras.ops alone"):
        quantize_aware(Unseen(), inputs=image)
    with pytest.raises(ValueError, match="no layer of model 'resnet' matches 'stem_con': did you mean 'stem_conv'"):
        quantize_aware(preactivation_resnet(), QuantizationConfig(skip=("stem_con",)))
    with pytest.raises(ValueError, match="'resnet' has no quantized layer: make it by quantize_aware"):
        strip(preactivation_resnet())
    with pytest.raises(ValueError, match=r"has not been rounded yet.*more than start_step=3 steps"):
        strip(quantize_aware(preactivation_resnet(), QuantizationConfig(start_step=3)))


def test_refuses_layers():
    class Wrong(Scaled):
        def quantization_spec(self):
            return "int8"

    class Misnamed(Scaled):
        def quantization_spec(self):
            return LayerSpec({"kernel": 1})

    class Two(Scaled):
        def call(self, inputs, other=None):
            return inputs * self.factor + other

    image = layers.Input((8, 8, 3))
    with pytest.raises(TypeError, match=r"Wrong.quantization_spec\(\) must return a LayerSpec, received 'int8'"):
        quantize_aware(keras.Model(image, Wrong()(image)))
    with pytest.raises(ValueError, match=r"has no weight 'kernel': its quantization spec may name \['factor'\]"):
        quantize_aware(keras.Model(image, Misnamed()(image)))
    with pytest.raises(ValueError, match="'two' is called with more than its inputs"):
        quantize_aware(keras.Model(image, Two(name="two")(image, other=image)))
    dense = layers.Dense(4, kernel_constraint="max_norm", name="bounded")
    with pytest.raises(ValueError, match="'bounded' has a constraint on its kernel"):
        quantize_aware(keras.Model(image, dense(image)))
    lora = keras.Model(image, layers.Dense(4, name="adapted")(image))
    lora.get_layer("adapted").enable_lora(2)
    with pytest.raises(ValueError, match="'adapted' has integer or LoRA weights already"):
        quantize_aware(lora)
