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


def test_published_size():
    """ResNet-20 of the CIFAR-10 experiments has 0.27 million parameters (arXiv:1512.03385, table 6)."""
    model = resnet.resnet20({"image": FeatureSpec((32, 32, 3), "float32")}, OutputSpec("multiclass", 10))
    assert round(model.count_params() / 1e6, 2) == 0.27


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
    ],
    ids=str,
)
def test_refuses_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        resnet.build(IMAGE, OUTPUT, **args)
