"""Whole models: what helps is kept, and the files have the ranges and the float layers that were chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from components.config import CompressConfig
from components.errors import HeadraceError
from components.formats import Network, convert_onnx, convert_tflite, load_runner
from components.ptq import Quantized, quantize
from tests.components.ptq.conftest import CALIBRATION, HELD_OUT, IMAGES, small_network, spread
from tests.processor import int8_saturates

ALONE: dict[str, Any] = {"equalize": False, "correct_bias": False, "sensitivity": False}


def quantized(model: keras.Model, drop: Any = None, **settings: Any) -> Quantized:
    config = CompressConfig.model_validate({**ALONE, **settings})
    return quantize(model, calibration=CALIBRATION, validation=HELD_OUT, config=config, drop=drop)


def largest_error(model: keras.Model) -> Any:
    reference = model.predict(IMAGES[128:], verbose=0)
    return lambda answers: float(np.abs(answers[0] - reference).max())


def tensors(file: Path) -> list[dict[str, Any]]:
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    return Interpreter(str(file), experimental_op_resolver_type=plain).get_tensor_details()


def answers(file: Path) -> np.ndarray:
    (found,) = load_runner(file)(HELD_OUT).values()
    return found


@pytest.fixture(scope="module")
def by_percentile() -> Quantized:
    return quantized(small_network(), calibration={"method": "percentile", "percentile": 99})


def test_the_record_has_both_the_range_and_what_was_observed(by_percentile: Quantized) -> None:
    rows = {row["layer"]: row for row in by_percentile.ranges}
    image = rows["image"]
    assert image["method"] == "percentile"
    assert (image["min"], image["max"]) == pytest.approx(np.percentile(IMAGES[:128], [0.5, 99.5]), abs=0.02)
    assert (image["observed_min"], image["observed_max"]) == pytest.approx((IMAGES[:128].min(), IMAGES[:128].max()))
    assert rows["first_relu"]["min"] == 0


def test_tflite_and_onnx_have_the_ranges_of_the_record_and_int8_weights(
    by_percentile: Quantized, tmp_path: Path
) -> None:
    network = Network.of(by_percentile.model)
    expected = np.array([(row["max"] - row["min"]) / 255 for row in by_percentile.ranges], "float32")
    tflite, qdq = tmp_path / "m.tflite", tmp_path / "m.onnx"
    convert_tflite(network, tflite, form="int8", examples=HELD_OUT)
    found = [t["quantization_parameters"]["scales"] for t in tensors(tflite) if t["dtype"] is np.int8]
    actual = np.unique(np.concatenate([scales for scales in found if len(scales) == 1]))
    for scales in (actual, expected):
        other = expected if scales is actual else actual
        assert np.all((np.abs(scales[:, None] / other - 1) < 1e-5).any(1))
    convert_onnx(network, qdq, form="static_int8", examples=HELD_OUT)
    graph = onnx.load(qdq).graph
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    scales = [weights[n.input[1]] for n in graph.node if n.op_type == "QuantizeLinear"]
    np.testing.assert_allclose(np.sort(scales), np.sort(expected), rtol=1e-5)
    assert all(values.dtype == np.int8 for values in weights.values() if values.ndim > 2)
    if not int8_saturates():
        step = by_percentile.ranges[-1]["max"] - by_percentile.ranges[-1]["min"]
        assert np.abs(answers(tflite) - answers(qdq)).max() < 3 * step / 255


def test_onnxruntime_runs_its_convolutions_in_int8(by_percentile: Quantized, tmp_path: Path) -> None:
    convert_onnx(Network.of(by_percentile.model), tmp_path / "m.onnx", form="static_int8", examples=HELD_OUT)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimized.onnx"), 3
    onnxruntime.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QLinearConv") == 5
    assert "Conv" not in kinds


def test_equalization_is_kept_where_it_helps() -> None:
    done = quantized(spread(small_network()), equalize=True)
    (row,) = done.tried
    assert row["change"] == "equalize"
    assert row["kept"]
    assert row["sqnr_db_after"] > row["sqnr_db_before"] + 10
    assert done.sqnr_db == row["sqnr_db_after"]


def test_what_does_not_help_is_taken_back(model: keras.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def harm(simulation: Any, features: Any) -> None:
        for weight in simulation.aware.trainable_weights:
            weight.assign(weight * 0.9)

    monkeypatch.setattr("components.ptq.quantizer.correct_biases", harm)
    plain, harmed = quantized(model), quantized(model, correct_bias=True)
    assert not harmed.tried[0]["kept"]
    assert harmed.tried[0]["sqnr_db_after"] < harmed.tried[0]["sqnr_db_before"] == plain.sqnr_db == harmed.sqnr_db
    for before, after in zip(plain.model.get_weights(), harmed.model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_fine_tuning_comes_nearer_keeps_the_ranges_and_ends_the_same(model: keras.Model) -> None:
    settings = {"calibration": {"method": "percentile", "percentile": 95}}
    plain = quantized(model, **settings)
    tuned, again = (quantized(model, **settings, finetune_steps=40) for _ in "ab")
    assert tuned.tried[0]["kept"]
    assert tuned.sqnr_db > plain.sqnr_db + 1
    assert tuned.ranges == plain.ranges
    assert again.to_json() == tuned.to_json()
    for one, other in zip(again.model.get_weights(), tuned.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_most_sensitive_layers_stay_float_in_the_file(model: keras.Model, tmp_path: Path) -> None:
    done = quantized(model, mixed={"keep_float": 2})
    assert done.float_layers == [row.layer for row in done.sensitivity[:2]]
    assert done.sqnr_db > quantized(model).sqnr_db
    convert_tflite(Network.of(done.model), tmp_path / "m.tflite", form="int8", examples=HELD_OUT, float_fallback=True)
    with_weights = {"first", "second", "third", "fourth", "logits"}
    shapes = [tuple(t["shape"]) for t in tensors(tmp_path / "m.tflite") if t["dtype"] is np.float32]
    kernels = {"first": (6, 3, 3, 3), "second": (1, 3, 3, 6), "third": (8, 1, 1, 6), "fourth": (8, 3, 3, 8)}
    kernels["logits"] = (4, 1, 1, 8)
    assert {name for name in with_weights if kernels[name] in shapes} == with_weights & set(done.float_layers)
    assert with_weights & set(done.float_layers)
    expected = done.model.predict(IMAGES[128:], verbose=0)
    assert np.abs(answers(tmp_path / "m.tflite") - expected).max() < 0.05 * np.abs(expected).max()


def test_no_more_layers_stay_float_than_the_largest_drop_asks_for(model: keras.Model) -> None:
    drop = largest_error(model)
    drops = [quantized(model, drop, mixed={"keep_float": count}).drop for count in (1, 2)]
    limit = drops[1]
    assert limit is not None
    done = quantized(model, drop, mixed={"max_drop": limit})
    assert done.drop is not None
    assert done.drop <= limit
    assert len(done.float_layers) == 1 + next(index for index, each in enumerate(drops) if each <= limit)


def test_a_drop_that_no_int8_model_has_is_refused(model: keras.Model) -> None:
    with pytest.raises(
        HeadraceError, match=r"compress\.mixed\.max_drop: with one layer in int8 the metric still falls"
    ):
        quantized(model, largest_error(model), mixed={"max_drop": 0})
