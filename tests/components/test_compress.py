"""compress: the forms it writes, where their ranges are from, and what is on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter

from components import compress as module
from components import formats, metrics, model_files
from components.config import CompressConfig
from components.examples import read_arrays
from components.formats import ConversionError
from components.preprocessing import Preprocessing
from models.quantization import QuantizationConfig, quantize_aware
from models.quantization import ranges as ranges_of
from tests.conftest import StepRun

ALL = ["float16", "dynamic_range", "int8", "onnx_dynamic_int8", "onnx_static_int8", "openvino_float16", "openvino_int8"]


def compress(taxi: StepRun, path: Path, **settings: Any) -> list[dict[str, Any]]:
    fields = {"calibration": {"num_examples": 50}, "sensitivity": False, "primary_metric": "auc", **settings}
    return taxi.call("compress", path, CompressConfig.model_validate(fields)).formats


def record(path: Path) -> dict[str, Any]:
    return json.loads((path / module.RECORD_FILE).read_text())


@pytest.fixture(scope="module")
def every(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with all forms that the taxi model takes, and everything measured."""
    path = tmp_path_factory.mktemp("compressed") / "every"
    compress(taxi, path, formats=ALL, sensitivity=True)
    return path


def test_every_form_is_listed_and_answers_as_the_keras_model(taxi: StepRun, every: Path) -> None:
    forms = formats.read_formats(every)
    assert [form.name.removeprefix("tflite_") for form in forms] == ALL
    preprocessing = Preprocessing.load(taxi.path("transform"))
    raw = {name: values[:100] for name, values in read_arrays(taxi.path("examples"), "test").items()}
    features = preprocessing.transform_in_batches(raw)
    expected = model_files.Predictor(model_files.load_model(taxi.path("model")), preprocessing.output_spec)(features)
    for form in forms:
        assert not form.exact
        answers = formats.answer_in_batches(formats.make_runner(form, every, "probabilities"), features)
        np.testing.assert_allclose(answers, expected, atol=0.1)
        assert np.abs(answers - expected).max() > 1e-6


def test_the_record_says_where_ranges_are_from_and_what_was_measured(every: Path) -> None:
    rows = {row["format"]: row for row in record(every)["formats"]}
    assert {name: row["ranges"] for name, row in rows.items()} == {
        "tflite_float16": None,
        "tflite_dynamic_range": None,
        "tflite_int8": "ptq",
        "onnx_dynamic_int8": None,
        "onnx_static_int8": "ptq",
        "openvino_float16": None,
        "openvino_int8": None,
    }
    assert rows["tflite_int8"]["size_bytes"] == (every / "tflite/model_int8.tflite").stat().st_size
    found = record(every)["quantization"]
    # There is nothing to equalize where no pair of layers follows each other.
    assert {row["change"] for row in found["tried"]} <= {"equalize", "correct_bias"}
    assert [row["sqnr_db"] for row in found["sensitivity"]] == sorted(row["sqnr_db"] for row in found["sensitivity"])
    assert "logits" in {row["layer"] for row in found["sensitivity"]}
    assert all(row["min"] <= 0 <= row["max"] for row in found["ranges"])


def test_the_drop_is_that_of_the_metric_on_validation_examples(taxi: StepRun, tmp_path: Path) -> None:
    compress(taxi, tmp_path / "a", formats=["onnx_static_int8"], calibration={"num_examples": 10**6})
    preprocessing = Preprocessing.load(taxi.path("transform"))
    raw = read_arrays(taxi.path("examples"), "validation")
    features, labels = preprocessing.transform_in_batches(raw), preprocessing.encode_labels(raw["big_tipper"])
    (form,) = formats.read_formats(tmp_path / "a")
    answers = formats.answer_in_batches(formats.make_runner(form, tmp_path / "a", "probabilities"), features)
    predict = model_files.Predictor(model_files.load_model(taxi.path("model")), preprocessing.output_spec)
    before, after = (metrics.compute("binary", labels, each)["auc"] for each in (predict(features), answers))
    assert record(tmp_path / "a")["quantization"]["drop"] == pytest.approx(before - after, abs=5e-4)


def test_int8_computes_in_integers_between_its_inputs_and_its_output(every: Path) -> None:
    interpreter = Interpreter(model_path=str(every / "tflite" / "model_int8.tflite"))
    interpreter.allocate_tensors()
    ends = {detail["index"] for detail in (*interpreter.get_input_details(), *interpreter.get_output_details())}
    inside = [detail for detail in interpreter.get_tensor_details() if detail["index"] not in ends]
    assert not [detail["name"] for detail in inside if detail["dtype"] == np.float32]
    assert [detail for detail in inside if detail["dtype"] == np.int8]


def test_compressed_forms_are_smaller(every: Path) -> None:
    sizes = {row["format"]: row["size_bytes"] for row in record(every)["formats"]}
    assert max(sizes["tflite_int8"], sizes["tflite_dynamic_range"]) < sizes["tflite_float16"]
    assert sizes["onnx_static_int8"] < 1.5 * sizes["onnx_dynamic_int8"]


def test_the_bytes_follow_from_the_settings(taxi: StepRun, tmp_path: Path) -> None:
    def int8(name: str, num_examples: int = 5, **settings: Any) -> bytes:
        calibration = {"num_examples": num_examples}
        compress(taxi, tmp_path / name, formats=["int8"], calibration=calibration, correct_bias=False, **settings)
        return (tmp_path / name / "tflite" / "model_int8.tflite").read_bytes()

    first = int8("a")
    assert int8("b") == first
    assert int8("c", seed=1) != first
    assert int8("d", num_examples=20) != first


def test_inputs_and_outputs_may_be_integers(taxi: StepRun, tmp_path: Path) -> None:
    compress(taxi, tmp_path / "a", formats=["int8"], io_dtype="uint8")
    runner = formats.load_runner(tmp_path / "a/tflite/model_int8.tflite")
    assert {info.dtype for info in runner.outputs} == {"uint8"}
    assert "float32" not in {info.dtype for info in runner.inputs}


def test_a_model_that_cannot_be_quantized_is_left_to_the_converter(
    taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConversionError("int8", where="layer 'mine'", why="it is not known", way_round="Say how")

    monkeypatch.setattr(module.ptq, "quantize", refuse)
    (row,) = compress(taxi, tmp_path / "a", formats=["int8"])
    assert row["ranges"] == "converter"
    assert row["notes"][0] == "int8 cannot take this model: layer 'mine': it is not known. Say how."
    assert "quantization" not in record(tmp_path / "a")
    assert (tmp_path / "a/tflite/model_int8.tflite").stat().st_size == row["size_bytes"]


def test_ranges_of_training_are_taken_as_they_are(
    taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = quantize_aware(model_files.load_model(taxi.path("model")), QuantizationConfig(momentum=0.5))
    preprocessing = Preprocessing.load(taxi.path("transform"))
    features = preprocessing.transform_in_batches(read_arrays(taxi.path("examples"), "train"))
    trained(keras.tree.map_structure(keras.ops.convert_to_tensor, features), training=True)
    monkeypatch.setattr(module.model_files, "load_model", lambda path: trained)
    row, in_float = compress(taxi, tmp_path / "a", formats=["int8", "float16"])
    assert (row["ranges"], in_float["ranges"]) == ("training", None)
    floats = Interpreter(model_path=str(tmp_path / "a/tflite/model_float16.tflite")).get_tensor_details()
    assert np.int8 not in {each["dtype"] for each in floats}
    details = Interpreter(model_path=str(tmp_path / "a/tflite/model_int8.tflite")).get_tensor_details()
    scales = {float(t["quantization"][0]) for t in details if t["dtype"] == np.int8}
    low, high = ranges_of(trained)["logits_range"]
    assert any(scale == pytest.approx((high - low) / 255, rel=1e-5) for scale in scales)


def test_a_form_that_cannot_take_the_model_is_named_and_nothing_is_left(taxi: StepRun, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="tflite_int16x8 cannot take this model: input 'company'"):
        compress(taxi, tmp_path / "a", formats=["float16", "int16x8"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"calibration": {"method": "mse", "percentile": 99}}, "nothing reads percentile with method: mse"),
        ({"mixed": {}}, "give either max_drop or keep_float"),
        ({"mixed": {"max_drop": 0.1, "keep_float": 1}}, "give either max_drop or keep_float"),
    ],
    ids=str,
)
def test_settings_that_nothing_reads_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressConfig.model_validate(settings)
