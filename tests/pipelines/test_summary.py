"""The summary: each part appears when its step has a result, and says the right thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from pipelines.local import RunResult, StepRun
from pipelines.summary import (
    curl_command,
    evaluation_page,
    html,
    markdown,
    print_summary,
    verification_page,
    worst_slices,
)
from tests.pipelines import fakes


def form_row(name: str, latency_ms: float, **changed: Any) -> dict[str, Any]:
    """What `verify` measures of a form."""
    times = {
        f"latency_ms_p{percentile}_batch_{size}": latency_ms * (1 if percentile == 50 else 2) * (1 if size == 1 else 4)
        for percentile in (50, 99)
        for size in (1, 32)
    }
    accuracy = {"value": 0.94, "drop": 0.001, "max_abs_difference": 2e-7, "top1_agreement": 1.0}
    measured = {"size_bytes": 2_500_000, "zipped_bytes": 300_000, "load_ms": 12.5, "calibration_error": 0.0213}
    verdict = {"passed": True, "reason": "", "pareto_front": []}
    return {"format": name, **measured, **times, **accuracy, **verdict, **changed}


VERDICT = fakes.EVALUATION | {"blessed": True, "reasons": ["auc 0.94 is at least 0.5 [test]"]}
RESULTS: dict[str, dict[str, Any]] = {
    "evaluate": VERDICT,
    "optimize": {
        "stages": [
            {
                "method": "prune",
                "validation": {"auc": 0.93, "loss": None},
                "num_parameters": 12_345,
                "zero_share": 0.75,
                "distinct_values": 999,
                "size_bytes": 60_000,
                "zipped_bytes": 20_000,
            }
        ]
    },
    "compress": {
        "formats": [
            {"format": "tflite_float16", "ranges": None, "notes": []},
            {"format": "tflite_int8", "ranges": "ptq", "notes": ["a fixed batch"]},
        ]
    },
    "verify": {
        "metric": "auc",
        "keras": {"num_examples": 1000, "value": 0.94, "calibration_error": 0.0213},
        "formats": [
            form_row("saved_model", 0.41, pareto_front=["size"]),
            form_row("onnx", 0.01, passed=False, reason="auc drop is 0.03, at most 0.01 allowed"),
            form_row("tflite_float32", 0.2),
            {"format": "tf.Example", "value": 0.94, "passed": True, "reason": "", "pareto_front": []},
        ],
        "server": {"grpc": {"num_examples": 64, "max_abs_difference": 0.0, "passed": True}},
    },
    "push": {
        "version_path": "serving_models/tiny/12",
        "version": 12,
        "model_name": "tiny",
        "formats": ["saved_model", "onnx"],
    },
    "deploy": {"version": 12, "stable": 11, "canary": 12, "canary_share": 0.05},
    "monitor": {"status": "alarm", "num_examples": 64, "alarms": [{"kind": "skew", "name": "fare"}] * 2},
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
    assert rows["tflite_int8"] == ["tflite_int8", "ptq", "a", "fixed", "batch"]
    assert "tflite_float16" not in rows
    sizes, accuracy = ["2.50", "MB", "300.0", "kB", "12.5"], ["0.9400", "0.0010", "2.0e-07", "100.00%", "0.0213"]
    times = ["0.410", "/", "0.820", "1.64", "/", "3.28"]
    assert rows["saved_model"] == ["saved_model", "*", *sizes, *times, *accuracy]
    assert rows["tf.Example"] == ["tf.Example", "0.9400"]
    assert [name for name in rows if name in ("saved_model", "onnx", "tflite_float32", "tf.Example")] == [
        "tflite_float32",
        "saved_model",
        "tf.Example",
        "onnx",
    ]
    assert "The Keras model on 1000 test examples: auc 0.9400, expected calibration error (ECE) 0.0213" in text
    assert "Left out: onnx: auc drop is 0.03, at most 0.01 allowed\n" in text
    assert "Left out: saved" not in text
    assert "Forms: saved_model, onnx\n" in text
    assert "Server over gRPC: passed, 64 examples, largest difference 0.0e+00" in text
    assert "Deployed: version 12 gets 5% of the requests, version 11 the rest" in text
    assert "Monitoring: alarm, 64 requested examples, skew of fare" in text
    assert f"summary.json: {tmp_path}/runs/tiny" in text
    assert f"version 12: {tmp_path}/serving_models/tiny/12" in text
    serve = f"--model_base_path={tmp_path}/serving_models/tiny --port=8500 --rest_api_port=8501"
    assert f"python -m serving --model_name=tiny {serve}\n" in text
    assert "curl http://localhost:8501/v1/models/tiny/metadata\n" in text


def _run(results: dict[str, dict[str, Any]]) -> RunResult:
    failed = StepRun("monitor", "failed", 0.5, None, ("no [labels] | <b>none</b>",))
    return RunResult(
        Path("runs"), [*(StepRun(name, "done", 1.0, result) for name, result in results.items()), failed], 1
    )


def test_the_summary_in_markdown_has_every_table() -> None:
    text = markdown("tiny failed", ["one\ntwo"], _run(RESULTS), 50)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert [token.type for token in tokens].count("table_open") == 5
    cells = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type in ("td_open", "th_open")]
    assert "no [labels] | <b>none</b>" in cells
    assert "payment_type=Other<br>(60 examples)" in cells
    assert cells[cells.index("auc *") :][:6] == ["auc *", "0.9500", "0.9400", "0.6500", "0.7100", "0.5000"]
    assert text.startswith("# tiny failed\n\none  \ntwo\n\n## Steps\n\n| step | state | seconds | why |\n")


def test_the_summary_as_a_page_shows_markup_and_does_not_obey_it() -> None:
    page = html("tiny <failed>", ["one\ntwo"], _run(RESULTS), 50)
    assert "<h1>tiny &lt;failed&gt;</h1>\n<p>one<br>two</p>\n<h2>Steps</h2>" in page
    assert "<td>no [labels] | &lt;b&gt;none&lt;/b&gt;</td>" in page
    assert page.count("<table>") == 5


def test_pages_of_steps_have_every_slice_and_every_form() -> None:
    evaluated, verified = evaluation_page(VERDICT), verification_page(RESULTS["verify"])
    for value, examples, auc in (("Other", 60, 0.65), ("Cash", 900, 0.71), ("Card", 800, 0.93)):
        assert f"<td>payment_type={value}</td><td>{examples}</td><td>{auc:.4f}</td>" in evaluated
    assert "<td>tflite_float32</td>" in verified
    assert "Slices" not in evaluation_page(VERDICT | {"slices": []})


@pytest.mark.parametrize("missing", RESULTS)
def test_a_part_without_a_result_is_left_out(tmp_path: Path, missing: str) -> None:
    text = printed(tmp_path, {name: result for name, result in RESULTS.items() if name != missing})
    headings = {
        "evaluate": "Gate",
        "optimize": "Optimized model",
        "compress": "Compressed forms",
        "verify": "Forms  ",
        "push": "Serve it",
        "deploy": "Deployed",
        "monitor": "Monitoring",
    }
    assert {name for name, heading in headings.items() if heading not in text} == {missing}


def test_a_refused_model_says_why(tmp_path: Path) -> None:
    text = printed(tmp_path, {"evaluate": VERDICT | {"blessed": False, "reasons": ["auc 0.4 is below 0.5"]}})
    assert "Gate: not blessed: nothing was pushed\n  auc 0.4 is below 0.5\n" in text
    assert "Serve it" not in text


def test_stages_are_told_with_their_sizes(tmp_path: Path) -> None:
    text = printed(tmp_path, {"optimize": RESULTS["optimize"]})
    (line,) = [line for line in text.splitlines() if line.startswith("prune")]
    assert line.split() == ["prune", "12,345", "75.0%", "999", "60.0", "kB", "20.0", "kB", "auc", "0.9300,", "loss"]
    assert "Optimized model" not in printed(tmp_path, {"optimize": {"stages": []}})


def test_nothing_to_tell_of_compressed_forms_no_table(tmp_path: Path) -> None:
    forms = RESULTS["compress"]["formats"][:1]
    assert "Compressed forms" not in printed(tmp_path, {"compress": {"formats": forms}})


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
