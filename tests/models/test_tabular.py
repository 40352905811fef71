import keras
import numpy as np
import pytest

from models import tabular
from models.contract import check_model, predict, random_inputs
from models.spec import FeatureSpec, OutputSpec
from tests.models.converters import run_onnx, run_tflite

TABLE = {
    "fare": FeatureSpec((1,), "float32"),
    "place": FeatureSpec((2,), "float32"),
    "company": FeatureSpec((1,), "int64", num_categories=7),
    "tags": FeatureSpec((3,), "int64", num_categories=5),
}
OUTPUT = OutputSpec("binary", 2)
TINY = {"hidden_dims": [6, 4]}


@pytest.mark.parametrize("args", [{}, {"wide": True, "batch_norm": True}], ids=str)
@pytest.mark.parametrize("output", [OUTPUT, OutputSpec("multiclass", 3)], ids=lambda output: output.task)
def test_contract(output, args):
    check_model(tabular.build, TABLE, output, **TINY, **args)


@pytest.mark.parametrize("name", TABLE)
def test_contract_of_one_feature(name):
    check_model(tabular.build, {name: TABLE[name]}, OutputSpec("regression", 1), **TINY, wide=True)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_each_feature_matters(name, wide):
    model = tabular.build(TABLE, OUTPUT, hidden_dims=[32], wide=wide)
    inputs = random_inputs(TABLE, 16)
    change = inputs[name] + 1 if TABLE[name].num_categories is None else (inputs[name] + 1) % 5
    changed = predict(model, {**inputs, name: change})
    assert np.abs(changed - predict(model, inputs)).max() > 1e-4


def test_embeds_ids():
    model = tabular.build(TABLE, OUTPUT, **TINY, embedding_dim=3)
    assert model.get_layer("company_embedding").embeddings.shape == (7, 3)
    assert model.get_layer("tags_embedding").embeddings.shape == (5, 3)
    assert model.get_layer("hidden1").kernel.shape == (1 + 2 + 3 + 3 * 3, 6)


@pytest.mark.parametrize(("num_categories", "dim"), [(1, 2), (2, 2), (10, 6), (60, 16), (10**6, 32)])
def test_default_width_of_embeddings(num_categories, dim):
    spec = {"id": FeatureSpec((1,), "int64", num_categories=num_categories)}
    assert tabular.build(spec, OUTPUT, **TINY).get_layer("id_embedding").output_dim == dim


def test_wide_part_is_a_linear_model():
    """With the deep part silenced, logits are the measures times weights plus the mean weight of each feature's ids."""
    model = tabular.build(TABLE, OUTPUT, **TINY, wide=True)
    model.get_layer("deep_logits").kernel.assign(np.zeros((4, 1)))
    rng = np.random.default_rng(0)
    weights = {}
    for name, width in {"fare": 1, "place": 2, "company": 7, "tags": 5}.items():
        weights[name] = rng.normal(size=(width, 1)).astype(np.float32)
        model.get_layer(f"{name}_wide").set_weights([weights[name]])
    inputs = random_inputs(TABLE, 4)
    expected = sum(inputs[name] @ weights[name] for name in ("fare", "place"))
    expected += sum(weights[name][inputs[name]].mean(axis=1) for name in ("company", "tags"))
    np.testing.assert_allclose(predict(model, inputs), expected, rtol=1e-4, atol=1e-6)


def test_wide_part_starts_at_zero():
    logits = []
    for wide in (False, True):
        keras.utils.set_random_seed(3)
        logits.append(predict(tabular.build(TABLE, OUTPUT, **TINY, wide=wide), random_inputs(TABLE, 4)))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_options_reach_the_layers():
    model = tabular.build(TABLE, OUTPUT, **TINY, dropout=0.25, batch_norm=True, batch_norm_momentum=0.8)
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    dropouts = [layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    assert [norm.momentum for norm in norms] == [0.8, 0.8]
    assert [dropout.rate for dropout in dropouts] == [0.25, 0.25]


def test_order_of_the_spec_does_not_matter():
    names = []
    for spec in (TABLE, dict(reversed(TABLE.items()))):
        keras.utils.set_random_seed(3)
        names.append(predict(tabular.build(spec, OUTPUT, **TINY), random_inputs(TABLE, 4)))
    np.testing.assert_array_equal(names[0], names[1])


def test_names_are_stable():
    names = [[layer.name for layer in tabular.build(TABLE, OUTPUT, wide=True).layers] for _ in range(2)]
    assert names[0] == names[1]


@pytest.mark.parametrize("args", [{}, {"wide": True, "batch_norm": True}], ids=str)
def test_tflite_and_onnx_answer_alike(args, tmp_path):
    model = tabular.build(TABLE, OUTPUT, **TINY, **args)
    inputs = random_inputs(TABLE, 3)
    expected = predict(model, inputs)
    np.testing.assert_allclose(run_tflite(model, inputs, tmp_path), expected, atol=1e-4)
    np.testing.assert_allclose(run_onnx(model, inputs), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "received"),
    [
        ({}, "no features"),
        ({"a": FeatureSpec((4, 4), "float32")}, r"a: float32 \(4, 4\)"),
        ({"a": FeatureSpec((), "float32")}, r"a: float32 \(\)"),
        ({"a": FeatureSpec((None,), "float32")}, r"a: float32 \(None,\)"),
        ({"a": FeatureSpec((1,), "int64")}, r"a: int64 \(1,\)"),
        ({"a": FeatureSpec((4,), "int64", num_categories=3, is_sequence=True)}, "3 categories, sequence"),
        ({"a": FeatureSpec((1,), "string"), **TABLE}, r"a: string \(1,\): normalize"),
    ],
    ids=str,
)
def test_refuses_specs(spec, received):
    with pytest.raises(ValueError, match=f"int64 ids of shape .* with num_categories, received .*{received}"):
        tabular.build(spec, OUTPUT)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hidden_dims": []}, "hidden_dims must be a non-empty list"),
        ({"embedding_dim": 0}, "embedding_dim must be an integer of 1 or more"),
        ({"dropout": 1}, "dropout must be a number in"),
        ({"batch_norm_momentum": 1}, "batch_norm_momentum must be a number in"),
    ],
    ids=str,
)
def test_refuses_arguments(args, message):
    with pytest.raises(ValueError, match=message):
        tabular.build(TABLE, OUTPUT, **args)
