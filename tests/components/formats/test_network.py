"""Network: any Keras model as one function of named tensors, without a change of its numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from components.errors import HeadraceError
from components.formats import Network
from tests.components.formats.models import CASES, resnext_case, several_case, subclassed_case


def answers(network: Network, features: dict[str, np.ndarray], **how: Any) -> dict[str, np.ndarray]:
    concrete = network.traced(how.get("batch_size"), how.get("unroll", False))
    feed = {name: tf.constant(features[name], spec.dtype) for name, spec in network.specs.items()}
    return {name: value.numpy() for name, value in concrete(**feed).items()}


@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_keras_does(name: str) -> None:
    case = CASES[name]()
    is_graph = bool(getattr(case.model, "inputs", None))
    network = Network.of(case.model, inputs=None if is_graph else case.features)
    fed = {key: tf.constant(values) for key, values in case.features.items()}
    if is_graph:
        direct = case.model(keras.tree.map_structure(lambda tensor: fed[tensor.name], case.model.input))
    else:
        direct = case.model(**fed)
    flat = [np.asarray(value) for value in keras.tree.flatten(direct)]
    mixed = name == "mixed_float16"
    for got, wanted in zip(network.expected(case.features).values(), flat, strict=True):
        np.testing.assert_allclose(got, wanted, atol=5e-3 if mixed else 1e-5)
        assert not mixed or np.abs(got - wanted).max() > 1e-5  # float16 would give the very numbers
    for key, value in answers(network, case.features).items():
        np.testing.assert_allclose(value, network.expected(case.features)[key], atol=1e-5)


def test_names_come_from_dictionaries_inputs_and_layers() -> None:
    network = Network.of(several_case().model)
    assert list(network.specs) == ["extra", "image"]
    assert network.specs["image"].shape.as_list() == [None, 8, 8, 1]
    assert set(network.traced(None, False).structured_outputs) == {"kind", "size"}
    case = subclassed_case()
    assert set(Network.of(case.model, inputs=case.features).expected(case.features)) == {"gate", "tags"}


def test_outputs_can_be_named() -> None:
    case = several_case()
    assert set(Network.of(case.model, outputs=["what", "how_large"]).expected(case.features)) == {"what", "how_large"}
    with pytest.raises(
        HeadraceError, match=r"gives 2 answers, which need as many different names, received \['x', 'x'\]"
    ):
        Network.of(case.model, outputs=["x", "x"]).expected(case.features)
    with pytest.raises(HeadraceError, match="gives 2 answers"):
        Network.of(case.model, outputs=["x"]).expected(case.features)


class Pair(keras.Model):
    """Takes one dictionary and gives a list."""

    def __init__(self) -> None:
        super().__init__(name="pair")
        self.dense = layers.Dense(2)

    def call(self, features: dict[str, Any]) -> list[Any]:
        return [self.dense(features["a"]), ops.sum(features["b"], axis=-1)]


def test_a_subclassed_model_takes_one_dictionary_and_numbers_its_answers() -> None:
    features = {"a": np.ones((3, 2), "float32"), "b": np.ones((3, 4), "float32")}
    model = Pair()
    model(features)
    network = Network.of(model, inputs={name: tf.TensorSpec((None, *v.shape[1:])) for name, v in features.items()})
    got = network.expected(features)
    assert list(got) == ["output", "output_1"]
    np.testing.assert_array_equal(got["output_1"], [4, 4, 4])


def test_a_call_of_ones_own() -> None:
    case = subclassed_case()
    swapped = {"l": case.features["left"], "r": case.features["right"]}
    network = Network.of(case.model, inputs=swapped, call=lambda x: case.model(left=x["l"], right=x["r"])["tags"])
    wanted = Network.of(case.model, inputs=case.features).expected(case.features)["tags"]
    np.testing.assert_array_equal(network.expected(swapped)["output"], wanted)


def test_a_sequential_model() -> None:
    model = keras.Sequential([keras.Input((3,), name="x"), layers.Dense(2, name="y")])
    features = {"x": np.ones((2, 3), "float32")}
    np.testing.assert_allclose(Network.of(model).expected(features)["y"], model(features["x"]), rtol=1e-6)


def test_what_is_not_known_is_asked_for() -> None:
    with pytest.raises(HeadraceError, match="'pair' has no weights yet: call it once on a batch"):
        Network.of(Pair())
    with pytest.raises(HeadraceError, match=r"'tagger' is subclassed, so its inputs have no names: give inputs="):
        Network.of(subclassed_case().model)
    with pytest.raises(HeadraceError, match="Input 'left': a batch of examples has shape"):
        Network.of(subclassed_case().model, inputs={"left": np.float32(3)})


def test_the_model_is_left_as_it_was() -> None:
    case = resnext_case()
    grouped = case.model.get_layer("grouped")
    before = dict(vars(grouped))
    network = Network.of(case.model)
    graph = network.traced(None, False).graph.as_graph_def()
    assert vars(grouped) == before
    calls = [node.op for node in graph.node if "PartitionedCall" in node.op]
    assert calls == []
    assert [f for f in _plain_graph(case.model).library.function if "_XlaMustCompile" in f.attr], "Keras needs no help"


def _plain_graph(model: keras.Model) -> Any:
    return tf.function(model).get_concrete_function(tf.TensorSpec((None, 12, 12, 3))).graph.as_graph_def()


@pytest.mark.parametrize("padding", ["causal", "same", "valid"])
def test_grouped_convolutions_in_one_dimension(padding: str) -> None:
    model = keras.Sequential([keras.Input((9, 4), name="x"), layers.Conv1D(6, 3, groups=2, padding=padding, name="y")])
    features = {"x": np.random.default_rng(0).normal(size=(2, 9, 4)).astype("float32")}
    network = Network.of(model)
    assert not [node.op for node in network.traced(None, False).graph.as_graph_def().node if "Partitioned" in node.op]
    np.testing.assert_allclose(answers(network, features)["y"], model(features["x"]), atol=1e-6)


def test_grouped_convolutions_in_three_dimensions() -> None:
    model = keras.Sequential([keras.Input((4, 4, 4, 4), name="x"), layers.Conv3D(4, 2, groups=2, name="y")])
    features = {"x": np.random.default_rng(0).normal(size=(2, 4, 4, 4, 4)).astype("float32")}
    np.testing.assert_allclose(Network.of(model).expected(features)["y"], model(features["x"]), atol=1e-6)
    assert not [
        node.op for node in Network.of(model).traced(None, False).graph.as_graph_def().node if "Partitioned" in node.op
    ]


def test_unrolling_and_a_fixed_batch_change_no_number() -> None:
    case = CASES["LSTM, masked"]()
    network = Network.of(case.model)
    wanted = network.expected(case.features)["logits"]
    assert not [n for n in network.traced(None, True).graph.as_graph_def().node if n.op == "While"]
    np.testing.assert_allclose(answers(network, case.features, unroll=True)["logits"], wanted, atol=1e-6)
    one = {name: values[:1] for name, values in case.features.items()}
    np.testing.assert_allclose(answers(network, one, batch_size=1)["logits"], wanted[:1], atol=1e-6)
    assert not case.model.get_layer("recurrent").unroll


def test_a_saved_model_holds_each_weight_once() -> None:
    case = resnext_case()
    with Network.of(case.model).saved_model() as folder:
        size = (folder / "variables" / "variables.data-00000-of-00001").stat().st_size
        loaded = tf.saved_model.load(str(folder)).signatures["serving_default"]
        got = loaded(image=tf.constant(case.features["image"]))["logits"]
    weights = sum(weight.nbytes for weight in case.model.get_weights())
    assert weights <= size < 1.2 * weights + 3_000
    np.testing.assert_allclose(got, case.model(case.features["image"]), atol=1e-5)
    assert not folder.exists()
