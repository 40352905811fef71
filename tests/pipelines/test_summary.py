"""The summary: each part appears when its step has a result, and says the right thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.local import RunResult, StepRun
from pipelines.summary import curl_command, print_summary, worst_slices
from tests.pipelines import fakes

VERDICT = fakes.EVALUATION | {"blessed": True, "reasons": ["auc 0.94 is at least 0.5 [test]"]}
RESULTS: dict[str, dict[str, Any]] = {
    "evaluate": VERDICT,
    "compress": {
        "formats": [
            {
                "format": "int8",
                "size_bytes": 12_345,
                "metric": "accuracy",
                "value": 0.71,
                "baseline_value": 0.9,
                "drop": 0.19,
                "passed": False,
                "reason": "drop 0.19 is above 0.01",
            }
        ]
    },
    "verify": {
        "formats": [
            {
                "format": "saved_model",
                "size_bytes": 2_500_000,
                "latency_ms_batch_1": 0.41,
                "latency_ms_batch_32": 1.2,
                "max_abs_difference": 2e-7,
                "top1_agreement": 1.0,
                "num_examples": 1000,
                "passed": True,
            },
            {"format": "onnx", "size_bytes": 900, "num_examples": 1000, "passed": False},
            {"format": "tf.Example", "num_examples": 1000, "passed": True},
        ],
        "server": {"grpc": {"num_examples": 64, "max_abs_difference": 0.0, "passed": True}},
    },
    "push": {"version_path": "serving_models/tiny/12", "version": 12, "model_name": "tiny"},
    "monitor": {"status": "skewed", "num_examples": 64, "skewed": [{"feature": "fare"}]},
}


def printed(run_dir: Path, results: dict[str, dict[str, Any]]) -> str:
    console = fakes.quiet()
    steps = [StepRun(name, "done", 1.0, result) for name, result in results.items()]
    print_summary(RunResult(run_dir, steps, 0), fakes.config_of(), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_whole_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = printed(Path("runs/tiny"), RESULTS)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line and not line.startswith(" ")}
    assert rows["auc"] == ["auc", "*", "0.9500", "0.9400", "0.6500", "0.7100", "0.5000"]
    assert rows["loss"] == ["loss", "0.3100", "0.3300"]
    assert "payment_type=Other" in text
    assert "(60 examples)" in text
    assert "payment_type=Card" not in text
    assert "Gate: blessed\n  auc 0.94 is at least 0.5 [test]\n" in text
    assert "12.3 kB" in text
    assert "left out: drop 0.19 is above 0.01" in text
    expected = ["saved_model", "2.50", "MB", "0.410", "1.200", "2.0e-07", "100.00%", "1000", "passed"]
    assert rows["saved_model"] == expected
    assert rows["tf.Example"] == ["tf.Example", "1000", "passed"]
    assert rows["onnx"] == ["onnx", "0.9", "kB", "1000", "FAILED"]
    assert "Server over gRPC: passed, 64 examples, largest difference 0.0e+00" in text
    assert "Monitoring: skewed, 64 requested examples, skewed: fare" in text
    assert f"summary.json: {tmp_path}/runs/tiny" in text
    assert f"version 12: {tmp_path}/serving_models/tiny/12" in text
    serve = f"--model_base_path={tmp_path}/serving_models/tiny --port=8500 --rest_api_port=8501"
    assert f"python -m serving --model_name=tiny {serve}\n" in text
    assert "curl http://localhost:8501/v1/models/tiny/metadata\n" in text


@pytest.mark.parametrize("missing", RESULTS)
def test_a_part_without_a_result_is_left_out(tmp_path: Path, missing: str) -> None:
    text = printed(tmp_path, {name: result for name, result in RESULTS.items() if name != missing})
    headings = {
        "evaluate": "Gate",
        "compress": "Compressed forms",
        "verify": "Exports",
        "push": "Serve it",
        "monitor": "Monitoring",
    }
    assert {name for name, heading in headings.items() if heading not in text} == {missing}


def test_a_refused_model_says_why(tmp_path: Path) -> None:
    text = printed(tmp_path, {"evaluate": VERDICT | {"blessed": False, "reasons": ["auc 0.4 is below 0.5"]}})
    assert "Gate: not blessed: nothing was pushed\n  auc 0.4 is below 0.5\n" in text
    assert "Serve it" not in text


def test_no_compressed_forms_no_table(tmp_path: Path) -> None:
    assert "Compressed forms" not in printed(tmp_path, {"compress": {"formats": []}})


def test_slices_without_the_metric_are_not_shown() -> None:
    slices = [{"feature": "f", "value": v, "num_examples": 9, "metrics": {"auc": v}} for v in (0.6, 0.8, None)]
    assert [each["value"] for each in worst_slices({"primary_metric": "auc", "slices": slices}, 1)] == [0.6, 0.8]
    assert worst_slices({"primary_metric": "loss", "slices": slices}, 1) == []


def test_small_slices_count_only_if_all_are_small() -> None:
    assert [each["value"] for each in worst_slices(VERDICT, 100)] == ["Cash", "Card"]
    assert [each["value"] for each in worst_slices(VERDICT, 1000)] == ["Other", "Cash"]


def test_curl_sends_the_request_of_the_proof(tmp_path: Path) -> None:
    request = {"instances": [{"company": "Taxi 'n' Co"}]}
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof/example_request.json").write_text(json.dumps(request))
    command = curl_command("tiny", tmp_path)
    assert command.startswith('curl -d \'{"instances"')
    assert command.endswith("' http://localhost:8501/v1/models/tiny:predict")
    assert """'"'"'n'"'"'""" in command
