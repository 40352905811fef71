"""convert_onnx: names, opsets, what is written into the file, int8, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import onnx
import pytest
import tensorflow as tf
from keras import layers

from components.errors import HeadraceError
from components.formats import ConversionError, Network, convert_onnx, load_runner, unmapped_ops
from components.formats import onnx as module
from tests.components.formats.models import CASES, Case, resnet_case, several_case, subclassed_case, transformer_case


@pytest.mark.parametrize("opset", module.OPSETS)
def test_every_opset_that_it_says(network: Network, resnet: Case, tmp_path: Path, opset: int) -> None:
    done = convert_onnx(network, tmp_path / "m.onnx", opset=opset, examples=resnet.features)
    imported = {each.domain: each.version for each in onnx.load(tmp_path / "m.onnx").opset_import}
    assert imported[""] == opset
    assert done.max_abs_difference < 1e-5


@pytest.mark.parametrize("opset", [12, 19, 21])
def test_other_opsets_are_refused(network: Network, tmp_path: Path, opset: int) -> None:
    with pytest.raises(HeadraceError, match=f"ONNX opset {opset}: tf2onnx writes 13 to 18"):
        convert_onnx(network, tmp_path / "m.onnx", opset=opset)


def test_names_and_free_axes(tmp_path: Path) -> None:
    case = several_case()
    done = convert_onnx(Network.of(case.model), tmp_path / "m.onnx", examples=case.features)
    assert {info.name: info.shape for info in done.inputs} == {"image": ("batch", 8, 8, 1), "extra": ("batch", 3)}
    assert {info.name: info.shape for info in done.outputs} == {"kind": ("batch", 3), "size": ("batch", 1)}
    text = convert_onnx(Network.of(transformer_case(None).model), tmp_path / "m.onnx")
    assert [(info.name, info.shape) for info in text.inputs] == [("text", ("batch", "length"))]


def test_several_free_axes_have_names_of_their_own(tmp_path: Path) -> None:
    image, steps = keras.Input((None, None, 2), name="image"), keras.Input((None, 3), name="steps")
    pooled = [layers.GlobalAveragePooling2D()(image), layers.GlobalAveragePooling1D()(steps)]
    model = keras.Model([image, steps], layers.Concatenate(name="joined")(pooled))
    done = convert_onnx(Network.of(model), tmp_path / "m.onnx")
    assert {info.name: info.shape for info in done.inputs} == {
        "image": ("batch", "image_1", "image_2", 2),
        "steps": ("batch", "steps_1", 3),
    }


def test_a_model_that_answers_with_its_input(tmp_path: Path) -> None:
    x = keras.Input((3,), name="x")
    model = keras.Model({"x": x}, {"x": layers.Dense(2)(x), "same": layers.Identity()(x)})
    features = {"x": np.arange(6, dtype="float32").reshape(2, 3)}
    with pytest.raises(ConversionError, match="output 'x': an input has the same name"):
        convert_onnx(Network.of(model), tmp_path / "m.onnx")
    network = Network.of(model, outputs=["same", "y"])
    convert_onnx(network, tmp_path / "m.onnx", examples=features)
    got = load_runner(tmp_path / "m.onnx")(features)
    np.testing.assert_array_equal(got["same"], features["x"])
    np.testing.assert_allclose(got["y"], network.expected(features)["y"], rtol=1e-5)


@pytest.mark.parametrize("form", module.FORMS)
def test_the_same_network_gives_the_same_bytes(resnet: Case, tmp_path: Path, form: str) -> None:
    calibration = resnet.features if form == "static_int8" else None
    for name in "ab":
        convert_onnx(Network.of(resnet.model), tmp_path / name, form=form, calibration=calibration)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_file_says_what_it_is(network: Network, resnet: Case, tmp_path: Path) -> None:
    for form in ("float32", "dynamic_int8"):
        convert_onnx(
            network, tmp_path / "m.onnx", form=form, metadata={"labels": ["cat", "dog"], "version": 3, "note": "é"}
        )
        properties = {each.key: each.value for each in onnx.load(tmp_path / "m.onnx").metadata_props}
        assert json.loads(properties["labels"]) == ["cat", "dog"]
        assert (properties["version"], properties["note"]) == ("3", "é")
        assert properties["weights_sha256"] == network.weights_sha256()
    other = resnet_case().model
    other.get_layer("logits").bias.assign_add([0.0, 0.0, 0.0, 1e-3])
    assert Network.of(other).weights_sha256() != network.weights_sha256()


def test_the_exact_gelu_becomes_erf(tmp_path: Path) -> None:
    case = subclassed_case()
    network = Network.of(case.model, inputs=case.features)
    assert "Erfc" in {node.op for node in network.traced(None, False).graph.as_graph_def().node}
    convert_onnx(network, tmp_path / "m.onnx", examples=case.features)
    assert {"Erf", "Erfc"} & {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node} == {"Erf"}


def test_int8_weights_and_ranges_of_calibration(network: Network, resnet: Case, tmp_path: Path) -> None:
    images = resnet.features["image"]
    scales = []
    for factor in (1, 3):
        calibration = {"image": images * factor}
        convert_onnx(network, tmp_path / "m.onnx", form="static_int8", calibration=calibration)
        graph = onnx.load(tmp_path / "m.onnx").graph
        named = {each.name: each for each in graph.initializer}
        first = next(node for node in graph.node if node.op_type == "QuantizeLinear")
        scales.append(float(onnx.numpy_helper.to_array(named[first.input[1]])))
        kernels = [
            each
            for each in graph.initializer
            if each.data_type == onnx.TensorProto.INT8 and len(each.dims) == 4 and each.dims[0] > 1
        ]
        assert kernels
        for kernel in kernels:
            scale = named[kernel.name.replace("_quantized", "_scale")]
            assert list(scale.dims) == [kernel.dims[0]]
    assert scales[1] == pytest.approx(3 * scales[0], rel=1e-4)
    convert_onnx(network, tmp_path / "m.onnx", form="dynamic_int8")
    ops = {node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert {"DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"} <= ops


def test_what_onnx_lacks_is_told_before_anything_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network.of(CASES["tabular with strings"]().model)
    monkeypatch.setattr("tf2onnx.convert.from_graph_def", None)
    found = unmapped_ops(network)
    assert {(op.op, op.layer, op.why) for op in found} == {
        ("StringToHashBucketFast", "hashing", "there is no operator that hashes strings into the same buckets"),
        ("LookupTableFindV2", "lookup", "the table is no part of the graph that is converted"),
    }
    assert all("split_lookups" in op.way_round for op in found)
    assert str(found[0]) == f"operation {found[0].op} of layer '{found[0].layer}'"


def test_lookups_of_integers_are_refused(tmp_path: Path) -> None:
    x = keras.Input((1,), dtype="int64", name="x")
    model = keras.Model(x, layers.IntegerLookup(vocabulary=[5, 7], name="lookup")(x))
    with pytest.raises(ConversionError) as caught:
        convert_onnx(Network.of(model), tmp_path / "m.onnx")
    assert str(caught.value) == (
        "onnx cannot take this model: operation LookupTableFindV2 of layer 'lookup': there is no lookup of integers. "
        "Split the lookups off with split_lookups, convert its core and ship its lookups beside it."
    )


class Bessel(layers.Layer):
    """Uses an operation that ONNX has not."""

    def call(self, inputs: Any) -> Any:
        return tf.math.bessel_i0e(inputs)


class Compiled(layers.Layer):
    """Calls a function that only XLA may run."""

    def call(self, inputs: Any) -> Any:
        return tf.function(lambda x: x * 2, jit_compile=True)(inputs)


@pytest.mark.parametrize(
    ("layer", "where", "way_round"),
    [
        (Bessel(name="bessel"), "operation BesselI0e of layer 'bessel'", "Write that part of the layer with other"),
        (Compiled(name="fast"), "PartitionedCall of layer 'fast'", "Leave jit_compile=True out of the layer's own"),
    ],
    ids=["BesselI0e", "XLA"],
)
def test_a_refusal_names_operation_and_layer_and_writes_nothing(
    layer: layers.Layer, where: str, way_round: str, tmp_path: Path
) -> None:
    x = keras.Input((3,), name="x")
    network = Network.of(keras.Model(x, layer(x)))
    with pytest.raises(ConversionError) as caught:
        convert_onnx(network, tmp_path / "m.onnx")
    assert where in caught.value.where
    assert caught.value.why == "tf2onnx has no form of it in opset 17"
    assert way_round in caught.value.way_round
    assert list(tmp_path.iterdir()) == []


def test_options_that_do_not_fit(network: Network, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"ONNX has no form 'int8'\. Known: dynamic_int8, float32, static_int8"):
        convert_onnx(network, tmp_path / "m.onnx", form="int8")
    with pytest.raises(HeadraceError, match="static_int8 needs calibration"):
        convert_onnx(network, tmp_path / "m.onnx", form="static_int8")
    with pytest.raises(HeadraceError, match="calibration lacks 'image'"):
        convert_onnx(network, tmp_path / "m.onnx", form="static_int8", calibration={"images": np.zeros(3)})


def test_a_file_of_another_model_is_not_written(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = module.to_onnx_model(network)
    model = resnet_case().model
    model.get_layer("logits").bias.assign_add([0.0, 0.0, 0.1, 0.0])
    monkeypatch.setattr(module, "to_onnx_model", lambda *args: other)
    with pytest.raises(ConversionError, match=r"reported success, but it differs from Keras by 0\.1"):
        convert_onnx(Network.of(model), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
