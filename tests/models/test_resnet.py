import keras
import numpy as np
import pytest

from models import resnet
from models.contract import check_model, predict, random_inputs
from models.spec import FeatureSpec, OutputSpec
from tests.models.converters import run_onnx, run_tflite

IMAGE = {"image": FeatureSpec((12, 10, 3), "float32")}
OUTPUT = OutputSpec("multiclass", 5)
TINY = {"stage_sizes": [1, 2], "stage_widths": [4, 8]}


def settled(model, seed=0):
    """The model after its zero weights and moving statistics took random values, as training would give them."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        value = rng.uniform(0.5, 1.5, weight.shape) if "norm" in weight.path else rng.normal(0, 0.3, weight.shape)
        weight.assign(value)
    return model


def outputs_of(model, *names):
    return keras.Model(model.input, [model.get_layer(name).output for name in names])


@pytest.mark.parametrize("output", [OUTPUT, OutputSpec("binary", 2), OutputSpec("regression", 1)], ids=lambda o: o.task)
def test_contract(output):
    check_model(resnet.build, IMAGE, output, **TINY, dropout=0.1)


def test_contract_of_varying_image_size():
    check_model(resnet.build, {"image": FeatureSpec((None, None, 1), "float32")}, OUTPUT, **TINY)


def test_blocks_start_as_the_identity():
    model = resnet.build(IMAGE, OUTPUT, **TINY)
    names = ["stem_conv", "stage1_block1_add", "stage2_block1_projection", "stage2_block1_add", "stage2_block2_add"]
    stem, first, projection, downsampled, last = outputs_of(model, *names)(random_inputs(IMAGE, 2))
    np.testing.assert_array_equal(first, stem)
    np.testing.assert_array_equal(downsampled, projection)
    np.testing.assert_array_equal(last, projection)
    assert np.abs(stem).max() > 0


def test_projects_only_where_it_downsamples():
    model = resnet.build(IMAGE, OUTPUT, stage_sizes=[2, 2, 1], stage_widths=[4, 4, 8])
    projections = [layer for layer in model.layers if layer.name.endswith("_projection")]
    assert [layer.name for layer in projections] == ["stage2_block1_projection", "stage3_block1_projection"]
    assert all(layer.kernel_size == (1, 1) and layer.strides == (2, 2) for layer in projections)


def test_residual_branch_is_added():
    """A block computes x + conv2(relu(norm2(conv1(relu(norm1(x)))))), checked by hand on a 1x1 image."""
    model = resnet.build({"image": FeatureSpec((1, 1, 1), "float32")}, OUTPUT, stage_sizes=[1], stage_widths=[1])
    values = {"stem_conv": [np.full((3, 3, 1, 1), 1.0)], "stage1_block1_conv1": [np.full((3, 3, 1, 1), 3.0)]}
    values["stage1_block1_conv2"] = [np.full((3, 3, 1, 1), -2.0)]
    for name, weights in values.items():
        model.get_layer(name).set_weights(weights)
    for norm in ("stage1_block1_norm1", "stage1_block1_norm2"):
        model.get_layer(norm).set_weights([np.ones(1), np.zeros(1), np.zeros(1), np.full(1, 1 - 1e-5)])
    block = outputs_of(model, "stage1_block1_add")
    images = np.array([2.0, -5.0], np.float32).reshape(2, 1, 1, 1)
    np.testing.assert_allclose(np.ravel(block({"image": images})), [2 - 2 * 3 * 2, -5], rtol=1e-5)


@pytest.mark.parametrize(("stem_strides", "size"), [(1, (6, 5)), (2, (3, 3)), (4, (2, 2))])
def test_strides(stem_strides, size):
    model = resnet.build(IMAGE, OUTPUT, **TINY, stem_strides=stem_strides)
    assert model.get_layer("final_relu").output.shape == (None, *size, 8)


def test_options_reach_the_layers():
    model = resnet.build(IMAGE, OUTPUT, **TINY, dropout=0.25, batch_norm_momentum=0.8)
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert model.get_layer("head_dropout").rate == 0.25
    assert len(norms) == 7
    assert {norm.momentum for norm in norms} == {0.8}


@pytest.mark.parametrize(
    ("build", "size", "num_classes", "millions"),
    [
        (resnet.resnet20, 32, 10, 0.27),  # arXiv:1512.03385, table 6
        (resnet.resnet18, 32, 1000, 11.69),  # torchvision's models of the same names, whose norms lie elsewhere
        (resnet.resnet34, 32, 1000, 21.80),
        (resnet.resnet50, 32, 1000, 25.56),
        (resnet.resnext50, 32, 1000, 25.03),
    ],
    ids=["resnet20", "resnet18", "resnet34", "resnet50", "resnext50"],
)
def test_published_size(build, size, num_classes, millions):
    model = build({"image": FeatureSpec((size, size, 3), "float32")}, OutputSpec("multiclass", num_classes))
    count = sum(np.prod(weight.shape) for weight in model.trainable_weights)
    assert count / 1e6 == pytest.approx(millions, rel=0.002, abs=0.005)


BOTTLENECK = {**TINY, "stage_widths": [8, 16], "block": "bottleneck", "bottleneck_ratio": 0.5}


@pytest.mark.parametrize(
    "args",
    [BOTTLENECK, {**BOTTLENECK, "groups": 2}, {**TINY, "squeeze_ratio": 0.25}, {**TINY, "stem": "conv7_pool"}],
    ids=["bottleneck", "resnext", "squeeze", "stem"],
)
def test_contract_of_variants(args):
    check_model(resnet.build, IMAGE, OUTPUT, **args)


def test_wide_and_squeezed_blocks_start_as_the_identity_too():
    model = resnet.build(IMAGE, OUTPUT, **BOTTLENECK, groups=4, squeeze_ratio=0.5, stem_width=4)
    names = ["stage1_block1_projection", "stage1_block1_add", "stage2_block2_add", "stage2_block1_projection"]
    widened, first, last, downsampled = outputs_of(model, *names)(random_inputs(IMAGE, 2))
    np.testing.assert_array_equal(first, widened)
    np.testing.assert_array_equal(last, downsampled)
    assert np.abs(widened).max() > 0


def test_grouped_convolution_equals_its_groups_side_by_side():
    model = settled(resnet.build(IMAGE, OUTPUT, **BOTTLENECK, groups=4))
    layer = model.get_layer("stage1_block1_conv2")
    inputs = np.random.default_rng(1).normal(size=(2, 6, 5, 4)).astype(np.float32)
    kernel = layer.get_weights()[0]
    assert kernel.shape == (3, 3, 1, 4)
    alone = [
        keras.ops.conv(inputs[..., group : group + 1], kernel[..., group : group + 1], padding="same")
        for group in range(4)
    ]
    np.testing.assert_allclose(layer(inputs), np.concatenate(alone, axis=-1), atol=1e-5)


def test_excitation_scales_each_channel():
    """Every channel times sigmoid(W2 relu(W1 mean + b1) + b2) (arXiv:1709.01507, equation 3)."""
    model = settled(resnet.build(IMAGE, OUTPUT, **TINY, squeeze_ratio=0.5))
    x, scaled = outputs_of(model, "stage1_block1_conv2", "stage1_block1_scale")(random_inputs(IMAGE, 3))
    w1, b1 = model.get_layer("stage1_block1_squeeze_hidden").get_weights()
    w2, b2 = model.get_layer("stage1_block1_excitation").get_weights()
    assert w1.shape == (4, 2)
    hidden = np.maximum(np.mean(x, axis=(1, 2)) @ w1 + b1, 0)
    factor = 1 / (1 + np.exp(-(hidden @ w2 + b2)))
    np.testing.assert_allclose(scaled, x * factor[:, None, None, :], rtol=1e-4, atol=1e-5)


def test_names_are_stable():
    names = [[layer.name for layer in resnet.build(IMAGE, OUTPUT, **TINY).layers] for _ in range(2)]
    assert names[0] == names[1]
    assert "stage2_block1_conv1" in names[0]


def test_tflite_and_onnx_answer_alike(tmp_path):
    model = settled(resnet.build(IMAGE, OUTPUT, **TINY))
    inputs = random_inputs(IMAGE, 3)
    expected = predict(model, inputs)
    np.testing.assert_allclose(run_tflite(model, inputs, tmp_path), expected, atol=1e-4)
    np.testing.assert_allclose(run_onnx(model, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"a": FeatureSpec((4,), "float32")},
        {"a": FeatureSpec((4, 4, None), "float32")},
        {"a": FeatureSpec((4, 4, 3), "int64", num_categories=256)},
        {"a": FeatureSpec((4, 4, 3), "float32"), "b": FeatureSpec((4, 4, 3), "float32")},
    ],
    ids=str,
)
def test_refuses_specs(spec):
    with pytest.raises(ValueError, match=r"exactly one float32 feature of shape \(height, width, channels\), received"):
        resnet.build(spec, OUTPUT)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"stage_sizes": [1], "stage_widths": [4, 8]}, "received 1 sizes .* and 2 widths .*: give one width per size"),
        ({"stage_sizes": [], "stage_widths": []}, "stage_sizes must be a non-empty list"),
        ({"stage_sizes": [0], "stage_widths": [4]}, r"stage_sizes\[0\] must be an integer of 1 or more"),
        ({"dropout": 1.0}, "dropout must be a number in"),
        ({"batch_norm_momentum": -1}, "batch_norm_momentum must be a number in"),
        ({"stem_strides": 0}, "stem_strides must be an integer"),
        ({"block": "wide"}, "block must be 'basic' or 'bottleneck', received 'wide'"),
        ({"groups": 2}, "only a bottleneck has groups, received groups=2: set block='bottleneck'"),
        ({"block": "bottleneck", "groups": 3}, r"a stage of 16 channels has 4 inside .* groups=3 must divide"),
        ({"block": "bottleneck", "bottleneck_ratio": 0}, r"bottleneck_ratio must be a number in \(0, 1\]"),
        ({"squeeze_ratio": 1}, "squeeze_ratio must be a number in"),
        ({"stem": "conv5"}, "stem must be 'conv3' or 'conv7_pool', received 'conv5'"),
        ({"stem_width": 0}, "stem_width must be an integer"),
    ],
    ids=str,
)
def test_refuses_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        resnet.build(IMAGE, OUTPUT, **args)
