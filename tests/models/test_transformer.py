import itertools

import keras
import numpy as np
import pytest

from models import transformer
from models.contract import check_model, predict, random_inputs
from models.spec import FeatureSpec, OutputSpec
from tests.models.converters import run_onnx, run_tflite

TEXT = {"text": FeatureSpec((11,), "int64", num_categories=30, is_sequence=True)}
VARYING = {"text": FeatureSpec((None,), "int64", num_categories=30, is_sequence=True)}
BESIDE = {**TEXT, "tfidf": FeatureSpec((6,), "float32")}
OUTPUT = OutputSpec("multiclass", 5)
TINY = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "mlp_dim": 12}


def sharpened(model):
    """The model with weights ten times as large, so that attention is far from uniform."""
    for weight in model.trainable_weights:
        weight.assign(weight * 10)
    return model


@pytest.mark.parametrize(
    ("spec", "args"), [(TEXT, {}), (BESIDE, {}), (VARYING, {"max_length": 16})], ids=["text", "beside", "varying"]
)
def test_contract(spec, args):
    check_model(transformer.build, spec, OUTPUT, **TINY, **args)


VARIANTS = [
    {"attention": "local", "window": 3, "positions": "relative"},
    {"attention": "linear", "positions": "rotary"},
    {"positions": "sinusoidal"},
]


@pytest.mark.parametrize("args", VARIANTS, ids=lambda args: args["positions"])
def test_contract_of_variants(args):
    check_model(transformer.build, VARYING, OUTPUT, **TINY, **args)


@pytest.mark.parametrize(
    ("attention", "positions"),
    [
        *itertools.product(["full", "local"], ["learned", "sinusoidal", "relative", "rotary"]),
        *itertools.product(["linear"], ["learned", "sinusoidal", "rotary"]),
    ],
)
def test_variants_mask_padding_and_see_the_order(attention, positions):
    args = {"attention": attention, "window": 3, "positions": positions, "max_length": 20}
    model = transformer.build(VARYING, OUTPUT, **TINY, **args)
    if positions == "relative":  # which do not add to what is attended to
        bias = model.get_layer("position_bias").table
        bias.assign(np.random.default_rng(0).normal(size=bias.shape) * 5)
    else:
        sharpened(model)
    tokens = np.array([[3, 7, 7, 1, 9], [4, 2, 0, 0, 0]])
    logits = predict(model, {"text": tokens})
    np.testing.assert_allclose(predict(model, {"text": np.pad(tokens, [(0, 0), (0, 8)])}), logits, rtol=1e-4, atol=1e-4)
    assert np.abs(predict(model, {"text": tokens[:1, ::-1]}) - logits[:1]).max() > 1e-3


def test_contract_of_a_binary_task():
    check_model(transformer.build, TEXT, OutputSpec("binary", 2), **TINY)


def test_padding_does_not_change_the_logits():
    model = sharpened(transformer.build(VARYING, OUTPUT, **TINY, max_length=40))
    tokens = np.array([[3, 7, 7, 1], [4, 0, 0, 0]])
    padded = np.pad(tokens, [(0, 0), (0, 20)])
    np.testing.assert_allclose(predict(model, {"text": padded}), predict(model, {"text": tokens}), atol=1e-5)


def test_what_padding_embeds_to_does_not_matter():
    model = sharpened(transformer.build(TEXT, OUTPUT, **TINY))
    inputs = random_inputs(TEXT, 8)
    before = predict(model, inputs)
    table = model.get_layer("token_embedding").embeddings
    changed = keras.ops.convert_to_numpy(table).copy()
    changed[0] = 100.0
    table.assign(changed)
    np.testing.assert_allclose(predict(model, inputs), before, atol=1e-5)


def test_order_of_tokens_matters():
    model = sharpened(transformer.build(VARYING, OUTPUT, **TINY, max_length=4))
    one, other = predict(model, {"text": np.array([[1, 2, 3], [3, 2, 1]])})
    assert np.abs(one - other).max() > 1e-3


def test_text_without_tokens_has_finite_logits():
    model = transformer.build(TEXT, OUTPUT, **TINY)
    assert np.isfinite(predict(model, {"text": np.zeros((2, 11), np.int64)})).all()


def test_dense_features_matter():
    model = transformer.build(BESIDE, OUTPUT, **TINY)
    inputs = random_inputs(BESIDE, 3)
    changed = {**inputs, "tfidf": inputs["tfidf"] + 1}
    assert np.abs(predict(model, inputs) - predict(model, changed)).max() > 1e-3


def test_norms_are_float32_under_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = transformer.build(TEXT, OUTPUT, **TINY)
    finally:
        keras.config.set_dtype_policy("float32")
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.LayerNormalization)]
    assert len(norms) == 3
    assert {layer.compute_dtype for layer in norms} == {"float32"}
    assert model.get_layer("block1_query").compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("args", "num_params"),
    [
        # embeddings + positions + layers * (4 attention + 2 mlp + 2 norms) + final norm + head
        ({}, 30 * 8 + 11 * 8 + (4 * 72 + 8 * 12 + 12 + 12 * 8 + 8 + 32) + 16 + 45),
        ({"num_layers": 2}, 30 * 8 + 11 * 8 + 2 * (4 * 72 + 8 * 12 + 12 + 12 * 8 + 8 + 32) + 16 + 45),
        ({"mlp_dim": 5}, 30 * 8 + 11 * 8 + (4 * 72 + 8 * 5 + 5 + 5 * 8 + 8 + 32) + 16 + 45),
        ({"max_length": 20}, 30 * 8 + 20 * 8 + (4 * 72 + 8 * 12 + 12 + 12 * 8 + 8 + 32) + 16 + 45),
    ],
    ids=str,
)
def test_number_of_parameters(args, num_params):
    assert transformer.build(TEXT, OUTPUT, **{**TINY, **args}).count_params() == num_params


def test_options_reach_the_layers():
    model = transformer.build(TEXT, OUTPUT, **{**TINY, "num_heads": 4}, dropout=0.25)
    dropouts = [layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    assert model.get_layer("block1_attention").num_heads == 4
    assert len(dropouts) == 4
    assert {layer.rate for layer in dropouts} == {0.25}


def test_names_are_stable():
    names = [[layer.name for layer in transformer.build(BESIDE, OUTPUT, **TINY).layers] for _ in range(2)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("spec", "args"),
    [(TEXT, {}), (BESIDE, {}), *((TEXT, args) for args in VARIANTS)],
    ids=["text", "beside", *(args["positions"] for args in VARIANTS)],
)
def test_tflite_and_onnx_answer_alike(spec, args, tmp_path):
    model = sharpened(transformer.build(spec, OUTPUT, **TINY, **args))
    inputs = random_inputs(spec, 3)
    expected = predict(model, inputs)
    np.testing.assert_allclose(run_tflite(model, inputs, tmp_path), expected, atol=1e-4)
    np.testing.assert_allclose(run_onnx(model, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"a": FeatureSpec((4,), "float32")},
        {"a": FeatureSpec((4,), "int64", is_sequence=True)},
        {"a": FeatureSpec((4,), "float32", num_categories=3, is_sequence=True)},
        {**TEXT, "a": FeatureSpec((1,), "int64", num_categories=3)},
        {**TEXT, "a": FeatureSpec((4,), "int64", num_categories=3, is_sequence=True)},
    ],
    ids=str,
)
def test_refuses_specs(spec):
    with pytest.raises(ValueError, match=r"exactly one sequence of token ids, .* received"):
        transformer.build(spec, OUTPUT)


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        (TEXT, {"num_heads": 3}, "num_heads must divide hidden_dim, received 3 heads for 64"),
        (TEXT, {"num_layers": 0}, "num_layers must be an integer of 1 or more"),
        (TEXT, {"dropout": 1.5}, "dropout must be a number in"),
        (TEXT, {"max_length": 5}, "max_length=5 is less than the length of 'text', 11: raise it or omit it"),
        (VARYING, {}, "feature 'text' has no fixed length, so the position table has no size: give max_length"),
        (TEXT, {"attention": "sparse"}, "attention must be one of full, local, linear, received 'sparse'"),
        (
            TEXT,
            {"positions": "none"},
            "positions must be one of learned, sinusoidal, relative, rotary, received 'none'",
        ),
        (TEXT, {"attention": "linear", "positions": "relative"}, "linear attention has no scores to add relative"),
        (TEXT, {"positions": "rotary", "hidden_dim": 12}, "rotary positions turn pairs, received heads of 3"),
        (TEXT, {"window": 0}, "window must be an integer of 1 or more"),
    ],
    ids=str,
)
def test_refuses_arguments(spec, args, message):
    with pytest.raises(ValueError, match=message):
        transformer.build(spec, OUTPUT, **args)
