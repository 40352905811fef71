"""Whole runs on real data: from a config to a pushed model that a real server answers from, in both runners."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from components import artifacts, model_files
from components.examples import read_arrays
from pipelines import local, summary, training
from pipelines.config import PipelineConfig, load_config
from serving.client import RestClient
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

SMALL_TAXI = [
    f"data.path={PROJECT / 'configs/data/chicago_taxi.csv.gz'}",
    "data.limit=2400",
    "train.epochs=4",
    "train.global_batch_size=64",
    "train.early_stopping=null",
    "evaluate.thresholds.0.above_baseline=0.3",
    "evaluate.thresholds.1.above_baseline=0.02",
    "compress.formats=[int8]",
    "compress.calibration.num_examples=50",
]


def load(name: str, folder: Path, *overrides: str) -> PipelineConfig:
    return load_config(PROJECT / f"configs/{name}.yaml", [f"push.destination={folder / 'served'}", *overrides])


def run(config: PipelineConfig, folder: Path) -> local.RunResult:
    return local.run(config, runs_dir=folder / "runs", console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def taxi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("taxi")


@pytest.fixture(scope="module")
def taxi_run(taxi_folder: Path) -> local.RunResult:
    return run(load("chicago_taxi", taxi_folder, *SMALL_TAXI), taxi_folder)


def test_the_default_config_ends_in_a_pushed_model_and_a_summary(taxi_run: local.RunResult, taxi_folder: Path) -> None:
    assert taxi_run.exit_code == 0
    assert [step.state for step in taxi_run.steps] == ["done"] * 12
    assert (taxi_folder / "served/chicago_taxi/1/saved_model.pb").is_file()
    printed = io.StringIO()
    config = load("chicago_taxi", taxi_folder, *SMALL_TAXI)
    summary.print_summary(taxi_run, config, Console(file=printed, width=140))
    for expected in (
        "Gate: blessed",
        "payment_type=",
        "tflite_int8",
        "onnx",
        "Server over gRPC: passed",
        "--model_base_path=",
    ):
        assert expected in printed.getvalue()


def test_a_second_run_reuses_every_step(taxi_run: local.RunResult, taxi_folder: Path) -> None:
    again = run(load("chicago_taxi", taxi_folder, *SMALL_TAXI), taxi_folder)
    assert [step.state for step in again.steps] == ["reused"] * 12
    assert [step.result for step in again.steps] == [step.result for step in taxi_run.steps]


def test_a_change_reruns_what_follows_from_it_and_no_more(taxi_run: local.RunResult, taxi_folder: Path) -> None:
    config = load("chicago_taxi", taxi_folder, *SMALL_TAXI, "verify.num_server_examples=100")
    states = {step.name: step.state for step in run(config, taxi_folder).steps}
    assert [name for name, state in states.items() if state == "done"] == ["verify", "push", "deploy", "monitor"]
    assert [path.name for path in (taxi_folder / "served/chicago_taxi").iterdir()] == ["1"]


def test_the_same_pipeline_through_kfp_gives_the_same_bytes(taxi_run: local.RunResult, tmp_path: Path) -> None:
    config = load("chicago_taxi", tmp_path, *SMALL_TAXI, "kubeflow.parallel_export=true", "kubeflow.ingest_pods=2")
    through_kfp = training.run_local(config, tmp_path, console=Console(file=io.StringIO()))
    assert through_kfp.exit_code == 0
    for name in ("examples", "statistics", "transform", "model"):
        ours, theirs = (artifacts.read_manifest(result.run_dir / name) for result in (taxi_run, through_kfp))
        assert ours.files == theirs.files, name
    assert through_kfp.result_of("evaluate") == taxi_run.result_of("evaluate")
    forms = [_converted_forms(result.run_dir) for result in (taxi_run, through_kfp)]
    assert forms[0] == forms[1] and len(forms[0]) == 2
    answers = [_answers_of_export(result.run_dir) for result in (taxi_run, through_kfp)]
    np.testing.assert_array_equal(*answers)
    assert (tmp_path / "served/chicago_taxi/1/saved_model.pb").is_file()


def _converted_forms(run_dir: Path) -> dict[str, Any]:
    """Size and digest of each file that may be converted in a task of its own."""
    files = artifacts.read_manifest(run_dir / "exported").files
    return {name: files[name] for name in files if name in ("tflite/model_float32.tflite", "onnx/model.onnx")}


def _answers_of_export(run_dir: Path) -> np.ndarray:
    from components import formats

    raw = read_arrays(run_dir / "examples", "test")
    return formats.run_file(run_dir / "exported" / "saved_model", "probabilities")(raw)


@pytest.mark.parametrize("runner", ["in-process", "kfp"])
def test_a_model_below_its_threshold_is_not_pushed_in_either_runner(tmp_path: Path, runner: str) -> None:
    arguments = [
        *SMALL_TAXI,
        "train.epochs=1",
        "evaluate.thresholds.0.min=0.999",
        f"push.destination={tmp_path / 'served'}",
    ]
    command = [
        sys.executable,
        "-m",
        "pipelines.local",
        *arguments,
        "--runner",
        runner,
        "--runs-dir",
        str(tmp_path / "runs"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Gate: not blessed: nothing was pushed" in done.stdout
    assert "failed: test auc" in done.stdout
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize(("name", "least"), [("reuters_r8_quick", 0.93), ("fashion_mnist_quick", 0.8)])
def test_quick_configs_train_for_real(tmp_path: Path, name: str, least: float) -> None:
    result = run(load(name, tmp_path), tmp_path)
    assert result.exit_code == 0
    evaluated, verified = result.result_of("evaluate"), result.result_of("verify")
    assert evaluated is not None and verified is not None
    assert evaluated["metrics"]["test"]["accuracy"] > least
    assert {row["format"] for row in verified["formats"]} >= {"saved_model", "tflite_float32", "onnx", "tflite_float16"}
    form = json.loads((result.run_dir / "exported" / "formats.json").read_text())[1]
    assert form["inputs"] == ("raw" if name.startswith("fashion") else "transformed")


@contextlib.contextmanager
def served(name: str, base_path: Path, **options: Any) -> Iterator[str]:
    """The REST address of `python -m serving` in a process of its own."""
    command = [sys.executable, "-m", "serving", f"--model_name={name}", f"--model_base_path={base_path}"]
    flags = ["--port=auto", "--rest_api_port=auto", *(f"--{key}={value}" for key, value in options.items())]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, cwd=PROJECT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"REST port (\d+)", line)
            assert found, line
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(timeout=30) == 0


def test_the_pushed_model_is_served_and_its_requests_are_monitored(
    taxi_run: local.RunResult, taxi_folder: Path, tmp_path: Path
) -> None:
    raw = read_arrays(taxi_run.run_dir / "examples", "test")
    log = tmp_path / "requests.tfrecord"
    with (
        served("chicago_taxi", taxi_folder / "served/chicago_taxi", request_log_file=log) as address,
        RestClient(address) as client,
    ):
        names = client.metadata("chicago_taxi").signatures["serving_default"].inputs
        shifted = {name: raw[name][:200] for name in names}
        shifted["fare"] = shifted["fare"] * 30
        answers = np.asarray(client.predict("chicago_taxi", shifted)["probabilities"])
    assert answers.shape == (200, 2)
    np.testing.assert_allclose(answers.sum(axis=1), 1, atol=1e-5)
    config = load("chicago_taxi", taxi_folder, *SMALL_TAXI, f"monitor.request_log={log}")
    monitored = run(config, taxi_folder).result_of("monitor")
    assert monitored is not None
    assert (monitored["status"], monitored["num_examples"]) == ("alarm", 200)
    assert ("skew", "fare") in [(alarm["kind"], alarm["name"]) for alarm in monitored["alarms"]]


def test_a_model_of_ones_own_and_data_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README shows, from a folder outside the project."""
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "import numpy as np\n"
        "import pyarrow as pa\n"
        "\n"
        "def build(input_spec, output_spec, *, width=8):\n"
        "    inputs = {name: keras.Input(s.shape, name=name, dtype=s.dtype) for name, s in input_spec.items()}\n"
        "    x = keras.layers.Concatenate(name='all')(list(inputs.values()))\n"
        "    x = keras.layers.Dense(width, activation='relu', name='hidden')(x)\n"
        "    return keras.Model(inputs, keras.layers.Dense(output_spec.num_logits, dtype='float32', name='logits')(x))\n"
        "\n"
        "def source(*, path, rows=600):\n"
        "    rng = np.random.default_rng(0)\n"
        "    a, b = rng.normal(size=(2, rows))\n"
        "    yield pa.RecordBatch.from_pydict({'a': a, 'b': b, 'price': 3 * a - b + 5})\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "name: mine\n"
        "data: {source: 'mine:source', label: price, task: regression, args: {rows: 1500}}\n"
        "model: {name: 'mine:build', args: {width: 16}}\n"
        "train: {epochs: 30, global_batch_size: 32, optimizer: {learning_rate: 0.02}}\n"
        "evaluate: {thresholds: [{metric: r2, min: 0.95}]}\n"
        "compress: {formats: [float16]}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    result = local.run(load_config("mine.yaml"), runs_dir=tmp_path / "runs", console=Console(file=io.StringIO()))
    assert result.exit_code == 0, result.steps[-1].reasons
    assert (tmp_path / "serving_models/mine/1/saved_model.pb").is_file()
    model = model_files.load_model(tmp_path / "runs/mine/model")
    assert model.get_layer("hidden").units == 16
    before = result.steps[3].reasons
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text().replace("'relu'", "'tanh'"))
    again = local.run(
        load_config("mine.yaml"), runs_dir=tmp_path / "runs", until="train", console=Console(file=io.StringIO())
    )
    assert again.steps[3].state == "done" and again.steps[3].reasons != before
    assert "source of mine changed" in again.steps[3].reasons
