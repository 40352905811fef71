import numpy as np
import pytest

from models import dcn
from models.contract import check_model, predict, random_inputs
from models.spec import FeatureSpec, OutputSpec
from tests.models.converters import run_onnx, run_tflite
from tests.models.test_tabular import TABLE

OUTPUT = OutputSpec("binary", 2)
TINY = {"hidden_dims": [6, 4]}


@pytest.mark.parametrize(
    ("output", "args"),
    [(OUTPUT, {}), (OutputSpec("multiclass", 3), {"structure": "stacked", "low_rank": 2})],
    ids=["parallel", "stacked"],
)
def test_contract(output, args):
    check_model(dcn.build, TABLE, output, **TINY, **args)


@pytest.mark.parametrize("low_rank", [None, 2])
def test_cross_layers_are_the_formula(low_rank):
    """x1 = x0 * (W1 x0 + b1) + x0, x2 = x0 * (W2 x1 + b2) + x1; the logits of the cross part are linear in x2."""
    spec = {"x": FeatureSpec((3,), "float32")}
    model = dcn.build(spec, OUTPUT, num_cross_layers=2, low_rank=low_rank, hidden_dims=[2])
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    head, bias = model.get_layer("logits").get_weights()
    head[3:] = 0  # of the deep part
    model.get_layer("logits").set_weights([head, bias])
    x0 = x = random_inputs(spec, 5)["x"]
    for name in ("cross1", "cross2"):
        matrix, shift = model.get_layer(name).get_weights()
        if low_rank is not None:
            matrix = model.get_layer(f"{name}_project").get_weights()[0] @ matrix
        x = x0 * (x @ matrix + shift) + x
    np.testing.assert_allclose(predict(model, {"x": x0}), x @ head[:3] + bias, rtol=1e-4, atol=1e-4)


def test_a_product_of_two_features_needs_one_cross_layer_and_no_hidden_one():
    """A table whose answer is a * b is exactly a cross layer; no linear model of a and b gives it."""
    spec = {"a": FeatureSpec((1,), "float32"), "b": FeatureSpec((1,), "float32")}
    model = dcn.build(spec, OutputSpec("regression", 1), num_cross_layers=1, hidden_dims=[1])
    for weight in model.weights:
        weight.assign(np.zeros(weight.shape))
    model.get_layer("cross1").set_weights([np.array([[0, 1], [0, 0]]), np.zeros(2)])  # b gets a * b
    model.get_layer("logits").set_weights([np.array([[0], [1], [0]]), np.zeros(1)])
    inputs = random_inputs(spec, 6)
    expected = inputs["b"] * inputs["a"] + inputs["b"]
    np.testing.assert_allclose(predict(model, inputs), expected, rtol=1e-5)


def test_low_rank_saves_weights():
    full, low = (dcn.build(TABLE, OUTPUT, **TINY, low_rank=rank).count_params() for rank in (None, 1))
    assert low < full


@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_tflite_and_onnx_answer_alike(structure, tmp_path):
    model = dcn.build(TABLE, OUTPUT, **TINY, structure=structure)
    inputs = random_inputs(TABLE, 3)
    expected = predict(model, inputs)
    np.testing.assert_allclose(run_tflite(model, inputs, tmp_path), expected, atol=1e-4)
    np.testing.assert_allclose(run_onnx(model, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ({"x": FeatureSpec((2, 2), "float32")}, {}, r"dcn takes float32 features of shape \(k,\)"),
        (TABLE, {"num_cross_layers": 0}, "num_cross_layers must be an integer of 1 or more"),
        (TABLE, {"low_rank": 0}, "low_rank must be an integer of 1 or more"),
        (TABLE, {"structure": "both"}, "structure must be 'stacked' or 'parallel', received 'both'"),
        (TABLE, {"hidden_dims": []}, "hidden_dims must be a non-empty list"),
    ],
    ids=["shape", "layers", "rank", "structure", "hidden"],
)
def test_refuses(spec, args, message):
    with pytest.raises(ValueError, match=message):
        dcn.build(spec, OUTPUT, **args)
