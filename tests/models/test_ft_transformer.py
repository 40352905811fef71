import keras
import numpy as np
import pytest

from models import ft_transformer
from models.contract import check_model, predict, random_inputs
from models.spec import FeatureSpec, OutputSpec
from tests.models.converters import run_onnx, run_tflite
from tests.models.test_tabular import TABLE

OUTPUT = OutputSpec("binary", 2)
TINY = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "mlp_dim": 16}


@pytest.mark.parametrize("output", [OUTPUT, OutputSpec("multiclass", 3)], ids=lambda output: output.task)
def test_contract(output):
    check_model(ft_transformer.build, TABLE, output, **TINY)


@pytest.mark.parametrize("name", TABLE)
def test_contract_of_one_feature(name):
    check_model(ft_transformer.build, {name: TABLE[name]}, OutputSpec("regression", 1), **TINY)


@pytest.mark.parametrize("name", TABLE)
def test_each_feature_matters(name):
    model = ft_transformer.build(TABLE, OUTPUT, **TINY)
    inputs = random_inputs(TABLE, 16)
    change = inputs[name] + 1 if TABLE[name].num_categories is None else (inputs[name] + 1) % 5
    changed = predict(model, {**inputs, name: change})
    assert np.abs(changed - predict(model, inputs)).max() > 1e-4


def test_tokens_are_columns():
    """A number times a vector plus a vector; an id's embedding plus a vector; the summary token first."""
    model = ft_transformer.build(TABLE, OUTPUT, **TINY)
    inputs = random_inputs(TABLE, 4)
    tokens = keras.Model(model.inputs, model.get_layer("summary_token").output)(inputs).numpy()
    assert tokens.shape == (4, 1 + 1 + 1 + 2 + 3, 8)
    weights = {layer.name: layer.get_weights() for layer in model.layers}
    company = weights["company_embedding"][0][inputs["company"]] + weights["company_bias"][0]
    fare = inputs["fare"][:, :, None] * weights["fare_tokens"][0] + weights["fare_tokens"][1]
    place = inputs["place"][:, :, None] * weights["place_tokens"][0] + weights["place_tokens"][1]
    tags = weights["tags_embedding"][0][inputs["tags"]] + weights["tags_bias"][0]
    summary = np.broadcast_to(weights["summary_token"][0], (4, 1, 8))
    np.testing.assert_allclose(tokens, np.concatenate([summary, company, fare, place, tags], axis=1), atol=1e-6)


def test_tflite_and_onnx_answer_alike(tmp_path):
    model = ft_transformer.build(TABLE, OUTPUT, **TINY)
    inputs = random_inputs(TABLE, 3)
    expected = predict(model, inputs)
    np.testing.assert_allclose(run_tflite(model, inputs, tmp_path), expected, atol=1e-4)
    np.testing.assert_allclose(run_onnx(model, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ({}, {}, r"ft_transformer takes float32 features of shape \(k,\), .* received no features"),
        ({"x": FeatureSpec((2, 2), "float32")}, {}, r"ft_transformer takes float32 features of shape \(k,\)"),
        (TABLE, {"num_heads": 3}, "num_heads must divide hidden_dim, received 3 heads for 32"),
        (TABLE, {"num_layers": 0}, "num_layers must be an integer of 1 or more"),
        (TABLE, {"dropout": 1.0}, "dropout must be a number in"),
    ],
    ids=["none", "shape", "heads", "layers", "dropout"],
)
def test_refuses(spec, args, message):
    with pytest.raises(ValueError, match=message):
        ft_transformer.build(spec, OUTPUT, **args)
