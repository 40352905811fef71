"""convert_tflite: the forms, what they hold inside, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from keras import layers, ops

from components.errors import HeadraceError
from components.formats import ConversionError, Network, convert_tflite, load_runner
from components.formats import tflite as module
from tests.components.formats.models import Case, resnet_case, several_case


@pytest.fixture
def no_loop_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*args: Any) -> bytes:
        raise AssertionError("the converter would end the process")

    monkeypatch.setattr(tf.lite.TFLiteConverter, "from_saved_model", convert)


def tensors(file: Path) -> tuple[list[dict[str, Any]], set[int]]:
    """All tensors of a file, and the indices of its inputs and outputs."""
    interpreter = Interpreter(model_path=str(file))
    interpreter.allocate_tensors()
    ends = {each["index"] for each in (*interpreter.get_input_details(), *interpreter.get_output_details())}
    return interpreter.get_tensor_details(), ends


def test_int8_is_int8_throughout_and_per_channel(resnet: Case, network: Network, tmp_path: Path) -> None:
    done = convert_tflite(network, tmp_path / "m.tflite", form="int8", calibration=resnet.features)
    details, ends = tensors(tmp_path / "m.tflite")
    inside = [each for each in details if each["index"] not in ends]
    assert {np.dtype(each["dtype"]).name for each in inside} == {"int8", "int32"}
    kernels = [
        each for each in inside if len(each["shape"]) == 4 and each["quantization_parameters"]["scales"].size > 1
    ]
    assert kernels
    assert all(len(each["quantization_parameters"]["scales"]) == each["shape"][0] for each in kernels)
    assert [(info.name, info.dtype, info.quantization) for info in done.inputs] == [("image", "float32", None)]
    assert done.size_bytes == (tmp_path / "m.tflite").stat().st_size


@pytest.mark.parametrize(("form", "io_dtype"), [("int8", "int8"), ("int8", "uint8"), ("int16x8", "int16")])
def test_inputs_and_outputs_of_integers(form: str, io_dtype: str, tmp_path: Path) -> None:
    case = several_case()
    options: Any = {"form": form, "calibration": case.features, "examples": case.features}
    floats = convert_tflite(Network.of(case.model), tmp_path / "f.tflite", **options)
    integers = convert_tflite(Network.of(case.model), tmp_path / "i.tflite", io_dtype=io_dtype, **options)
    assert {info.dtype for info in (*integers.inputs, *integers.outputs)} == {io_dtype}
    assert all(info.quantization for info in (*integers.inputs, *integers.outputs))
    # The runner quantizes as the file with float inputs does inside.
    runners = [load_runner(tmp_path / name) for name in ("f.tflite", "i.tflite")]
    for name, values in runners[0](case.features).items():
        np.testing.assert_array_equal(runners[1](case.features)[name], values)
    assert integers.max_abs_difference == floats.max_abs_difference


def test_float16_and_dynamic_range_hold_what_they_say(network: Network, tmp_path: Path) -> None:
    for form, dtype in (("float16", "float16"), ("dynamic_range", "int8")):
        convert_tflite(network, tmp_path / "m.tflite", form=form)
        assert dtype in {np.dtype(each["dtype"]).name for each in tensors(tmp_path / "m.tflite")[0]}
    convert_tflite(network, tmp_path / "m.tflite")
    assert {np.dtype(each["dtype"]).name for each in tensors(tmp_path / "m.tflite")[0]} <= {"float32", "int32"}


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_the_same_network_gives_the_same_bytes(resnet: Case, tmp_path: Path, form: str) -> None:
    calibration = resnet.features if form == "int8" else None
    for name in "ab":
        convert_tflite(Network.of(resnet.model), tmp_path / name, form=form, calibration=calibration)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_calibration_sets_the_ranges(resnet: Case, network: Network, tmp_path: Path) -> None:
    images = resnet.features["image"]
    for name, scale in (("a", 1), ("b", 3)):
        options: Any = {"form": "int8", "io_dtype": "int8", "calibration": {"image": images * scale}}
        convert_tflite(network, tmp_path / f"{name}.tflite", **options)
    scales = [load_runner(tmp_path / f"{name}.tflite").inputs[0].quantization for name in "ab"]
    assert scales[0] is not None and scales[1] is not None
    assert scales[1].scale == pytest.approx(3 * scales[0].scale, rel=1e-4)
    assert scales[0].scale == pytest.approx(np.ptp(images) / 255, rel=1e-3)


def test_a_batch_of_ones_own(network: Network, resnet: Case, tmp_path: Path) -> None:
    done = convert_tflite(network, tmp_path / "m.tflite", batch_size=5, examples=resnet.features)
    assert done.inputs[0].shape == (5, 12, 12, 3)
    assert done.notes == ("the batch is fixed to 5",)
    assert len(load_runner(tmp_path / "m.tflite")(resnet.features)["logits"]) == 48


def recurrent(length: int | None) -> keras.Model:
    x = keras.Input((length, 4), name="x")
    return keras.Model(x, layers.Dense(2, name="y")(layers.GRU(16, name="gru")(x)))


def test_an_unrolled_layer_has_a_free_batch_and_a_larger_file(tmp_path: Path) -> None:
    network = Network.of(recurrent(6))
    one = convert_tflite(network, tmp_path / "one.tflite")
    unrolled = convert_tflite(network, tmp_path / "unrolled.tflite", unroll=True)
    assert (one.inputs[0].shape, unrolled.inputs[0].shape) == ((1, 6, 4), (None, 6, 4))
    assert one.notes == ("the batch is fixed to 1",)
    assert unrolled.notes == ("recurrent layers are unrolled",)
    assert unrolled.size_bytes > 2 * one.size_bytes


def test_a_recurrent_layer_of_free_length(tmp_path: Path) -> None:
    network = Network.of(recurrent(None))
    x = np.random.default_rng(0).normal(size=(3, 9, 4)).astype("float32")
    convert_tflite(network, tmp_path / "m.tflite", examples={"x": x})
    for length in (9, 4):
        part = {"x": x[:, :length]}
        got = load_runner(tmp_path / "m.tflite")(part)["y"]
        np.testing.assert_allclose(got, network.expected(part)["y"], atol=1e-5)
    with pytest.raises(ConversionError) as caught:
        convert_tflite(network, tmp_path / "m.tflite", form="int8", calibration={"x": x})
    assert str(caught.value) == (
        "tflite_int8 cannot take this model: input 'x': recurrent layers have to be unrolled, and its length is free. "
        "Give its Input a fixed length and pad to it, or take float32, float16 or dynamic_range."
    )


@pytest.mark.usefixtures("no_loop_is_calibrated")
def test_a_loop_is_refused_before_it_ends_the_process(tmp_path: Path) -> None:
    features = {"x": np.zeros((2, 6, 4), "float32")}
    for form in module.INTEGER_FORMS:
        options: Any = {"form": form, "calibration": features, "unroll": False}
        with pytest.raises(
            ConversionError, match="operation While of layer 'gru': the ranges inside of a loop"
        ) as caught:
            convert_tflite(Network.of(recurrent(6)), tmp_path / "m.tflite", **options)
        assert caught.value.format == f"tflite_{form}"


class Bessel(layers.Layer):
    """Uses an operation that TFLite has not."""

    def call(self, inputs: Any) -> Any:
        return tf.math.bessel_i0e(inputs)


def test_a_refusal_names_operation_and_layer_and_writes_nothing(tmp_path: Path) -> None:
    x = keras.Input((3,), name="x")
    network = Network.of(keras.Model(x, Bessel(name="bessel")(x)))
    with pytest.raises(ConversionError) as caught:
        convert_tflite(network, tmp_path / "m.tflite")
    assert caught.value.where == "operation BesselI0e of layer 'bessel'"
    assert caught.value.why == "the plain interpreter has no such operation"
    assert "Write that part of the layer with other operations of keras.ops" in caught.value.way_round
    assert list(tmp_path.iterdir()) == []


def test_operations_without_an_integer_form_may_stay_float(tmp_path: Path) -> None:
    x = keras.Input((16,), name="x")
    network = Network.of(keras.Model(x, layers.Dense(4, name="y")(ops.round(layers.Dense(16)(x)))))
    calibration = {"x": np.random.default_rng(0).normal(size=(30, 16)).astype("float32")}
    for form in module.INTEGER_FORMS:
        options: Any = {"form": form, "calibration": calibration}
        with pytest.raises(ConversionError) as caught:
            convert_tflite(network, tmp_path / "m.tflite", **options)
        assert caught.value.where == "operation ROUND"
        assert caught.value.why == f"it has no {form} form, so that the converter left it in float"
        done = convert_tflite(network, tmp_path / "m.tflite", float_fallback=True, **options)
        assert done.notes == ("computed in float: ROUND",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "int4"}, "TFLite has no form 'int4'. Did you mean 'int8'"),
        ({"form": "int8"}, r"TFLite int8 needs calibration=\{name: examples\}"),
        ({"form": "int8", "calibration": {"imag": 0}}, "calibration lacks 'image'. Did you mean 'imag'"),
        ({"form": "float16", "io_dtype": "int8"}, "TFLite float16 has inputs and outputs of float32, not of int8"),
        (
            {"form": "int8", "io_dtype": "int16", "calibration": {"image": 0}},
            "TFLite int8 has inputs and outputs of float32 or int8 or uint8, not of int16",
        ),
    ],
    ids=str,
)
def test_options_that_do_not_fit(network: Network, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(HeadraceError, match=message):
        convert_tflite(network, tmp_path / "m.tflite", **options)


def test_a_file_of_another_model_is_not_written(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = module.to_tflite_bytes(Network.of(resnet_case().model), "float32")
    model = resnet_case().model
    model.get_layer("logits").bias.assign_add([0.0, 0.0, 0.1, 0.0])
    monkeypatch.setattr(module, "to_tflite_bytes", lambda *args, **options: other)
    with pytest.raises(
        ConversionError, match=r"output 'logits': the converter reported success, but it differs from Keras by 0\.1"
    ):
        convert_tflite(Network.of(model), tmp_path / "m.tflite")
    assert list(tmp_path.iterdir()) == []
