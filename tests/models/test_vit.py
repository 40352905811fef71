import numpy as np
import pytest

from models import vit
from models.contract import check_model, predict, random_inputs
from models.spec import FeatureSpec, OutputSpec
from tests.models.converters import run_onnx, run_tflite

IMAGE = {"image": FeatureSpec((12, 8, 3), "float32")}
OUTPUT = OutputSpec("multiclass", 5)
TINY = {"num_layers": 2, "hidden_dim": 8, "num_heads": 2, "mlp_dim": 16}


@pytest.mark.parametrize("output", [OUTPUT, OutputSpec("binary", 2), OutputSpec("regression", 1)], ids=lambda o: o.task)
def test_contract(output):
    check_model(vit.build, IMAGE, output, **TINY)


def test_a_patch_is_one_step_of_the_sequence():
    """Patch `i` is row `i // 2`, column `i % 2` of a 12 x 8 image, times the kernel, plus bias and position."""
    model = vit.build(IMAGE, OUTPUT, **TINY)
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    images = random_inputs(IMAGE, 2)["image"]
    sequence = model.get_layer("position_embedding")(
        model.get_layer("patches")(model.get_layer("patch_embedding")(images))
    )
    kernel, bias = model.get_layer("patch_embedding").get_weights()
    (positions,) = model.get_layer("position_embedding").get_weights()
    assert sequence.shape == (2, 6, 8)
    for index in range(6):
        row, column = 4 * (index // 2), 4 * (index % 2)
        patch = images[:, row : row + 4, column : column + 4].reshape(2, -1)
        expected = patch @ kernel.reshape(-1, 8) + bias + positions[index]
        np.testing.assert_allclose(sequence[:, index], expected, rtol=1e-4, atol=1e-4)


def test_without_positions_the_order_of_patches_does_not_matter():
    model = vit.build(IMAGE, OUTPUT, **TINY)
    model.get_layer("position_embedding").set_weights([np.zeros((6, 8))])
    images = random_inputs(IMAGE, 2)["image"]
    turned = np.concatenate([images[:, 4:], images[:, :4]], axis=1)
    np.testing.assert_allclose(
        predict(model, {"image": turned}), predict(model, {"image": images}), rtol=1e-4, atol=1e-5
    )


def test_tflite_and_onnx_answer_alike(tmp_path):
    model = vit.build(IMAGE, OUTPUT, **TINY)
    inputs = random_inputs(IMAGE, 3)
    expected = predict(model, inputs)
    np.testing.assert_allclose(run_tflite(model, inputs, tmp_path), expected, atol=1e-4)
    np.testing.assert_allclose(run_onnx(model, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        (
            {"a": FeatureSpec((4,), "float32")},
            {},
            r"vit takes exactly one float32 feature of shape \(height, width, channels\)",
        ),
        (
            {"a": FeatureSpec((None, 8, 3), "float32")},
            {},
            "vit needs images of one size, received height or width None",
        ),
        (IMAGE, {"patch_size": 5}, "patch_size must divide height and width, received 5 for 12 x 8"),
        (IMAGE, {"num_heads": 3}, "num_heads must divide hidden_dim, received 3 heads for 64"),
        (IMAGE, {"num_layers": 0}, "num_layers must be an integer of 1 or more"),
        (IMAGE, {"dropout": 1}, "dropout must be a number in"),
    ],
    ids=["no_image", "no_size", "patch", "heads", "layers", "dropout"],
)
def test_refuses(spec, args, message):
    with pytest.raises(ValueError, match=message):
        vit.build(spec, OUTPUT, **args)
