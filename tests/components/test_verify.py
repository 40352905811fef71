"""verify: every form is measured on the whole test split, and one that breaks a limit is left out or stops the run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from components import artifacts, formats, model_files
from components.config import ExportConfig, VerifyConfig
from components.errors import ConfigError, HeadraceError
from components.examples import read_arrays
from components.export import write_saved_model
from components.formats import Format
from components.preprocessing import Preprocessing
from components.verify import VerifyResult, speed
from components.verify.held_out import HeldOut
from components.verify.limits import broken_limits, check_patterns, limits_of
from components.verify.step import _jsonable
from tests.components.exports import copy_of, keep_forms, other_core, other_network
from tests.conftest import StepRun

INT8 = Format("tflite_int8", "tflite/model_int8.tflite", "raw", exact=False)
ONNX = Format("onnx", "onnx/model.onnx", "raw", exact=True)


def verify(taxi: StepRun, proof: Path, exported: Path, **settings: Any) -> VerifyResult:
    inputs = {key: taxi.path(key) for key in ("examples", "transform", "model")}
    config = VerifyConfig(**{"metric": "auc", "num_server_examples": 20, "latency_rounds": 2, **settings})
    result: VerifyResult = taxi.call("verify", proof, config, **inputs, exported=exported)
    return result


@pytest.fixture(scope="module")
def broken(taxi: StepRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export whose TFLite file is of another model and whose ONNX file is cut off."""

    def change(path: Path) -> None:
        formats.convert_tflite(other_core(taxi), path / "tflite/model_float32.tflite")
        (path / "onnx/model.onnx").write_bytes((path / "onnx/model.onnx").read_bytes()[:1000])
        keep_forms(path, "saved_model", "tflite_float32", "onnx", "tflite_int8")

    return copy_of(taxi.path("exported"), tmp_path_factory.mktemp("broken") / "exported", change)


@pytest.fixture(scope="module")
def judged(taxi: StepRun, broken: Path) -> VerifyResult:
    return verify(taxi, broken.parent / "proof", broken)


@pytest.fixture(scope="module")
def held_out(taxi: StepRun) -> HeldOut:
    preprocessing = Preprocessing.load(taxi.path("transform"))
    model = model_files.load_model(taxi.path("model"))
    return HeldOut(taxi.path("examples"), preprocessing, model, metric="accuracy", sample_size=40, seed=0)


def test_the_proof_covers_every_form_and_both_protocols(taxi: StepRun) -> None:
    result = taxi.result("verify")
    forms = [form.name for form in formats.read_formats(taxi.path("exported"))]
    assert [row["format"] for row in result.formats] == [*forms, "saved_model: tf.Example"]
    num_examples = artifacts.read_manifest(taxi.path("examples")).result["num_examples"]["test"]
    assert {row["num_examples"] for row in result.formats} == {num_examples} == {result.keras["num_examples"]}
    assert all(row["passed"] and not row["reason"] for row in [*result.formats, *result.server.values()])
    assert all(row["max_abs_difference"] < 1e-5 for row in result.server.values())
    assert result.metric == "auc"
    assert result.keras["value"] == taxi.result("evaluate").metrics["test"]["auc"]
    for row in result.formats[:-1]:
        assert row["drop"] == pytest.approx(result.keras["value"] - row["value"])
        assert 0 < row["zipped_bytes"] < row["size_bytes"] == taxi.result("export").formats[row["format"]]
        assert row["load_ms"] > 0
        for size in (1, 32):
            assert 0 < row[f"latency_ms_p50_batch_{size}"] <= row[f"latency_ms_p99_batch_{size}"]


def test_times_are_in_the_manifest_and_the_picture_alone(taxi: StepRun, broken: Path, judged: VerifyResult) -> None:
    proof = broken.parent / "proof"
    verify(taxi, broken.parent / "again", broken)
    for name in ("proof.json", "example_request.json", "request_log.tfrecord", "predictions.npy"):
        assert (proof / name).read_bytes() == (broken.parent / "again" / name).read_bytes()
    row = json.loads((proof / "proof.json").read_text())["formats"][0]
    missing = set(judged.formats[0]) - set(row)
    times = {f"latency_ms_p{percentile}_batch_{size}" for percentile in (50, 99) for size in (1, 32)}
    assert missing == {"load_ms", "pareto_front", *times}
    assert "tflite_int8" in (proof / "pictures/pareto.svg").read_text()
    assert not [name for name in artifacts.read_manifest(proof).files if "pareto" in name]


def test_a_form_that_answers_otherwise_or_cannot_be_run_fails_with_the_reason(judged: VerifyResult) -> None:
    rows = {row["format"]: row for row in judged.formats}
    assert {name: row["passed"] for name, row in rows.items()} == {
        "saved_model": True,
        "tflite_float32": False,
        "onnx": False,
        "tflite_int8": True,
        "saved_model: tf.Example": True,
    }
    difference = rows["tflite_float32"]["max_abs_difference"]
    assert difference > 1e-3
    assert f"max_abs_difference is {difference:.4g}, at most 0.0001 allowed" in rows["tflite_float32"]["reason"]
    assert "onnxruntime cannot load" in rows["onnx"]["reason"]
    assert rows["tflite_float32"]["pareto_front"] == []
    assert any(row["pareto_front"] for row in judged.formats)


def test_a_form_that_may_not_be_left_out_stops_the_run(taxi: StepRun, broken: Path, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="tflite_float32: max_abs_difference is") as caught:
        verify(taxi, tmp_path / "proof", broken, limits={"tflite_*": {"on_failure": "fail"}})
    assert "onnx: " not in str(caught.value)
    assert not (tmp_path / "proof").exists()


def test_a_saved_model_that_answers_otherwise_always_stops_the_run(taxi: StepRun, tmp_path: Path) -> None:
    def swap(path: Path) -> None:
        preprocessing = Preprocessing.load(taxi.path("transform"))
        test = read_arrays(taxi.path("examples"), "test")
        raw = {name: test[name][:9] for name in preprocessing.raw_inputs}
        write_saved_model(preprocessing, other_network(taxi), path / "other", ExportConfig(), raw)
        shutil.copytree(path / "other", path / "saved_model", dirs_exist_ok=True)
        keep_forms(path, "saved_model", "tflite_float32")

    exported = copy_of(taxi.path("exported"), tmp_path / "other", swap)
    with pytest.raises(HeadraceError) as caught:
        verify(taxi, tmp_path / "proof", exported, on_failure="omit")
    for name in ("saved_model", "saved_model: tf.Example", "server over grpc", "server over rest"):
        assert f"{name}: max_abs_difference is" in str(caught.value)
    assert "tflite_float32: " not in str(caught.value)
    assert not (tmp_path / "proof").exists()


def test_the_server_gets_as_many_examples_as_asked_and_the_seed_chooses_them(
    taxi: StepRun, broken: Path, judged: VerifyResult, tmp_path: Path
) -> None:
    exported = copy_of(taxi.path("exported"), tmp_path / "exported", lambda path: keep_forms(path, "saved_model"))
    result = verify(taxi, tmp_path / "proof", exported, seed=1, num_server_examples=3)
    assert {row["num_examples"] for row in result.server.values()} == {3}
    assert {row["num_examples"] for row in judged.server.values()} == {20}
    requests = [(proof / "example_request.json").read_text() for proof in (broken.parent / "proof", tmp_path / "proof")]
    assert requests[0] != requests[1]


def test_verify_refuses_a_metric_of_another_task(taxi: StepRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify\.metric: a binary task has no metric 'macro_f1'"):
        verify(taxi, tmp_path / "proof", taxi.path("exported"), metric="macro_f1")


def test_a_wrong_answer_in_the_last_row_alone_is_found(held_out: HeldOut) -> None:
    seen = 0

    def run(arrays: formats.Arrays) -> np.ndarray:
        nonlocal seen
        start, seen = seen, seen + len(next(iter(arrays.values())))
        answers = held_out.answers[start:seen].copy()
        if seen == len(held_out.answers):
            answers[-1] = answers[-1, ::-1]
        return answers

    row = held_out.compare(held_out.ask(run, "raw"))
    first, second = held_out.answers[-1]
    assert row["num_examples"] == len(held_out.answers)
    assert row["max_abs_difference"] == pytest.approx(abs(first - second))
    assert row["top1_agreement"] == pytest.approx(1 - 1 / len(held_out.answers))
    assert abs(row["drop"]) == pytest.approx(1 / len(held_out.answers))
    assert row["calibration_error_increase"] == pytest.approx(row["calibration_error"] - held_out.calibration_error)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            lambda answers: np.where(np.arange(len(answers))[:, None] < 3, np.nan, answers),
            "3 answers are NaN or infinite",
        ),
        (lambda answers: answers[:, :1], r"answers have shape \(\d+, 1\), the Keras model's \(\d+, 2\)"),
    ],
    ids=["nan", "shape"],
)
def test_answers_that_cannot_be_compared_are_a_reason(
    held_out: HeldOut, answer: Callable[..., Any], reason: str
) -> None:
    assert "reason" not in held_out.compare(held_out.answers)
    assert re.fullmatch(reason, held_out.compare(answer(held_out.answers))["reason"])


def test_the_sample_is_of_the_rows_it_says(taxi: StepRun, held_out: HeldOut) -> None:
    test = read_arrays(taxi.path("examples"), "test")
    assert len(held_out.sample_rows) == 40
    assert held_out.sample_rows.max() > len(held_out.answers) // 2
    for name, values in held_out.sample.items():
        np.testing.assert_array_equal(values, test[name][held_out.sample_rows])


def test_limits_are_those_of_the_kind_and_then_of_every_pattern_in_order() -> None:
    config = VerifyConfig.model_validate(
        {
            "exact": {"max_size_bytes": 9},
            "inexact": {"min_top1_agreement": 0.9},
            "limits": {
                "*": {"max_drop": 0.5},
                "tflite_*": {"max_drop": 0.2, "on_failure": "fail"},
                "*8": {"max_load_ms": 3},
            },
        }
    )
    int8 = limits_of(INT8, config).model_dump(exclude_none=True)
    assert int8 == {"min_top1_agreement": 0.9, "max_drop": 0.2, "max_load_ms": 3.0, "on_failure": "fail"}
    onnx = limits_of(ONNX, config).model_dump(exclude_none=True)
    assert onnx == {
        "max_abs_difference": 1e-4,
        "min_top1_agreement": 0.999,
        "max_drop": 0.5,
        "max_size_bytes": 9,
        "on_failure": "omit",
    }
    # A resolved config writes out what was left out, and that changes nothing.
    assert (
        limits_of(ONNX, VerifyConfig.model_validate(config.model_dump(mode="json"))).model_dump(exclude_none=True)
        == onnx
    )
    assert limits_of(ONNX, config.model_copy(update={"on_failure": "fail"})).on_failure == "fail"
    check_patterns(config, [INT8, ONNX])
    with pytest.raises(ConfigError, match=r"has no form 'tflite_\*'\. Known: onnx"):
        check_patterns(config, [ONNX])
    with pytest.raises(
        ConfigError, match=r"verify\.limits: this export has no form 'tflite_in8'\. Did you mean 'tflite_int8'"
    ):
        check_patterns(VerifyConfig.model_validate({"limits": {"tflite_in8": {}}}), [INT8, ONNX])


MEASURED = {
    "max_abs_difference": 0.5,
    "top1_agreement": 0.5,
    "drop": 0.5,
    "calibration_error_increase": 0.5,
    "size_bytes": 50,
    "zipped_bytes": 50,
    "load_ms": 5.0,
    "latency_ms_p50_batch_1": 5.0,
    "latency_ms_p99_batch_1": 5.0,
    "latency_ms_p50_batch_32": 5.0,
    "latency_ms_p99_batch_32": 5.0,
}


@pytest.mark.parametrize("limit", list(VerifyConfig().exact.model_dump()))
def test_each_limit_holds_at_its_value_and_no_further(limit: str) -> None:
    (measured,) = (name for name in MEASURED if limit in (name, f"max_{name}", f"min_{name}"))

    def judge(value: float, row: dict[str, Any]) -> list[str]:
        free = {"exact": {"max_abs_difference": None, "min_top1_agreement": None}, "limits": {"onnx": {limit: value}}}
        return broken_limits(row, limits_of(ONNX, VerifyConfig.model_validate(free)), "auc")

    value, sign = MEASURED[measured], -1 if limit.startswith("min_") else 1
    assert judge(value, MEASURED) == []
    title = "auc drop" if measured == "drop" else measured
    (reason,) = judge(value, {measured: value + sign * value / 10})
    assert reason.startswith(f"{title} is ") and reason.endswith(
        f"at {'least' if sign < 0 else 'most'} {value:g} allowed"
    )
    assert "not defined" in judge(value, {measured: None})[0]
    assert judge(value, {}) == []


def test_the_saved_model_cannot_be_left_out() -> None:
    with pytest.raises(ValidationError, match="the SavedModel cannot be left out"):
        VerifyConfig.model_validate({"limits": {"saved_model": {"on_failure": "omit"}}})


def test_latency_is_of_the_rounds_asked_for_after_some_that_warm_up() -> None:
    sizes: list[int] = []

    def run(arrays: formats.Arrays) -> np.ndarray:
        sizes.append(len(arrays["x"]))
        assert arrays["x"].tolist() == ([[1], [2], [3]] * 11)[: sizes[-1]]
        return arrays["x"]

    measured = speed.latency_ms(run, {"x": np.array([[1], [2], [3]])}, rounds=7)
    counts = {size: sizes.count(size) for size in sizes}
    assert set(counts) == {1, 32}
    assert set(counts.values()) == {7 + 3}
    assert len(measured) == 4


def test_the_example_request_holds_bytes_as_the_rest_api_takes_them() -> None:
    values = (np.float32(1.5), np.array([[1], [2]]), "é".encode(), b"\xff\xd8", np.array([b"a", b"\xff"], object))
    assert [_jsonable(value) for value in values] == [1.5, [[1], [2]], "é", {"b64": "/9g="}, ["a", {"b64": "/w=="}]]
