"""MLflow tracking against its real server with SQLite: what is recorded, once, in which state, and when nobody answers."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from components import artifacts
from components.artifacts import Output, read_manifest
from components.config import DataConfig
from components.errors import ConfigError, DataError
from pipelines import local, tracking
from pipelines.local import RunResult, run
from tests.pipelines import fakes

pytestmark = pytest.mark.slow  # a server of its own starts

# What MLflow's server needs beside its client. It is installed apart, for the whole package holds pyarrow below 26.
SERVER_NEEDS = ("aiohttp", "alembic", "flask", "flask-cors", "graphene", "huey", "sqlalchemy")
SECONDS_TO_START = 300  # on a crowded machine; a few on a quiet one


@pytest.fixture(scope="module")
def server_packages(request: pytest.FixtureRequest) -> Path:
    """A folder with the server's packages, installed once."""
    version = importlib.metadata.version("mlflow-skinny")
    folder = request.config.cache.mkdir(f"mlflow-{version}")  # type: ignore[union-attr]
    if not (folder / ".whole").is_file():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", f"--target={folder}"]
        subprocess.run([*install, "--no-deps", f"mlflow=={version}"], check=True)
        subprocess.run([*install, *SERVER_NEEDS], check=True)
        (folder / ".whole").touch()
    return folder


@pytest.fixture(scope="module")
def server(server_packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server with SQLite."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder}/artifacts"]
    command = [sys.executable, "-m", "mlflow", "server", *stores, f"--port={port}", "--workers=1"]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONPATH": str(server_packages)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        uri = f"http://127.0.0.1:{port}"
        _wait_for(f"{uri}/health", process, folder / "log")
        yield uri
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"The MLflow server did not start:\n{log.read_text()[-3000:]}")


class Tracked:
    """Runs of fake steps that are recorded under a name of their own, and what the server then has of them."""

    def __init__(self, server: str, folder: Path) -> None:
        from mlflow import MlflowClient

        self.folder, self.server = folder, server
        self.client = MlflowClient(server)
        self.name = folder.name
        self.sections: dict[str, Any] = {
            "tracking": {"kind": "mlflow", "uri": server, "experiment": folder.name},
            "push": {"destination": str(folder / "served")},
            "data": {"path": str(folder / "data.csv"), "task": "binary"},
        }
        (folder / "data.csv").write_text("fare,label\n1,0\n")

    def run(self, steps: Any = None, until: str | None = None, **sections: Any) -> RunResult:
        config = fakes.config_of(**(self.sections | sections))
        steps = steps or fakes.real_table()
        with tracking.recorded(config, self.folder / "runs/tiny"):
            return run(config, runs_dir=self.folder / "runs", steps=steps, until=until, console=fakes.quiet())

    def experiment(self) -> str:
        return str(self.client.get_experiment_by_name(self.name).experiment_id)

    def runs(self) -> list[Any]:
        """Whole runs, the newest first."""
        return [each for each in self._all() if "mlflow.parentRunId" not in each.data.tags]

    def steps_of(self, run_id: str) -> dict[str, Any]:
        return {each.info.run_name: each for each in self._all() if each.data.tags.get("mlflow.parentRunId") == run_id}

    def _all(self) -> list[Any]:
        return list(self.client.search_runs([self.experiment()], order_by=["attributes.start_time DESC"]))


@pytest.fixture
def tracked(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracked:
    monkeypatch.delenv(tracking.RUN_ID, raising=False)
    monkeypatch.delenv(tracking.TRACKING_URI, raising=False)
    return Tracked(server, tmp_path)


def test_a_run_is_recorded_with_settings_metrics_reports_and_its_steps(
    tracked: Tracked, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked.run(train={"epochs": 2})
    (whole,) = tracked.runs()
    assert capsys.readouterr() == (f"MLflow: run {whole.info.run_id} at {tracked.server}\n", "")
    assert (whole.info.status, whole.info.run_name) == ("FINISHED", "tiny")
    assert whole.data.params["train.epochs"] == "2"
    assert (
        whole.data.params["evaluate.thresholds"]
        == '[{"metric": "auc", "min": 0.5, "max": null, "above_baseline": null, "slices": false}]'
    )
    assert whole.data.metrics["evaluate.test.auc"] == 0.94
    history = tracked.client.get_metric_history(whole.info.run_id, "train_loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.4)]
    assert len(tracked.client.get_metric_history(whole.info.run_id, "validation_auc")) == 1
    run_dir = tracked.folder / "runs/tiny"
    tags = whole.data.tags
    assert tags["headrace.blessed"] == "true"
    assert tags["headrace.data_fingerprint"] == read_manifest(run_dir / "examples").made_from["outside"]["data"]
    assert len(tags["headrace.code_digest"]) == 64
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert tags.get("mlflow.source.git.commit", "") == commit
    files = {file.path for file in tracked.client.list_artifacts(whole.info.run_id)}
    assert {"config.yaml", "summary.json", "lineage.json", "model", "evaluation"} <= files
    assert "model/history.json" in {file.path for file in tracked.client.list_artifacts(whole.info.run_id, "model")}

    steps = tracked.steps_of(whole.info.run_id)
    assert set(steps) == {step.name for step in fakes.real_table()} - {"tune"}
    assert {step.info.status for step in steps.values()} == {"FINISHED"}
    train = steps["train"]
    assert train.data.params["train.epochs"] == "2"
    assert train.data.metrics["epochs"] == 2
    assert train.data.tags["headrace.digest"] == read_manifest(run_dir / "model").digest
    assert whole.info.start_time <= steps["ingest"].info.start_time <= train.info.end_time <= whole.info.end_time


def test_what_is_reused_is_recorded_once(tracked: Tracked, capsys: pytest.CaptureFixture[str]) -> None:
    tracked.run()
    (first,) = tracked.runs()
    capsys.readouterr()
    tracked.run()
    assert [each.info.run_id for each in tracked.runs()] == [first.info.run_id]
    assert first.info.run_id in capsys.readouterr().out
    tracked.run(push={"destination": str(tracked.folder / "served"), "keep_versions": 5})
    (second,) = [each for each in tracked.runs() if each.info.run_id != first.info.run_id]
    assert set(tracked.steps_of(second.info.run_id)) == {"push", "deploy", "monitor"}
    train = tracked.steps_of(first.info.run_id)["train"]
    assert second.data.tags["headrace.reused.train"] == train.info.run_id
    assert second.data.params["push.keep_versions"] == "5"


def test_a_failure_is_recorded_and_is_what_ends_the_run(tracked: Tracked) -> None:
    def fail(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        raise DataError("data.csv has no rows")

    table = [
        step if step.name != "train" else fakes.FakeStep(step.name, step.inputs, step.output, step.section, work=fail)
        for step in fakes.real_table()
    ]
    with pytest.raises(DataError, match="no rows"):
        tracked.run(table)
    (whole,) = tracked.runs()
    assert whole.info.status == "FAILED"
    steps = tracked.steps_of(whole.info.run_id)
    assert {name: step.info.status for name, step in steps.items()} == {
        "ingest": "FINISHED",
        "validate": "FINISHED",
        "transform": "FINISHED",
        "train": "FAILED",
    }
    assert steps["train"].data.tags["headrace.reasons"] == "data.csv has no rows"


def test_an_interrupt_is_recorded_as_killed(tracked: Tracked) -> None:
    def interrupt(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    table = [fakes.FakeStep("ingest", (), "examples", "data", work=interrupt)]
    with pytest.raises(KeyboardInterrupt):
        tracked.run(table)
    (whole,) = tracked.runs()
    assert whole.info.status == "KILLED"


def test_a_model_that_is_not_blessed_is_a_finished_run(tracked: Tracked) -> None:
    assert tracked.run(fakes.real_table(blessed=False)).exit_code == 3
    (whole,) = tracked.runs()
    assert (whole.info.status, whole.data.tags["headrace.blessed"]) == ("FINISHED", "false")
    assert "push" not in tracked.steps_of(whole.info.run_id)


def test_a_run_that_somebody_has_made_is_used_and_left_to_them(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tracked.client.create_run(tracked.client.create_experiment(tracked.name))
    monkeypatch.setenv(tracking.RUN_ID, theirs.info.run_id)
    tracked.run(until="evaluate")
    (whole,) = tracked.runs()
    assert (whole.info.run_id, whole.info.status) == (theirs.info.run_id, "RUNNING")
    assert whole.data.metrics["evaluate.test.auc"] == 0.94
    assert "train" in tracked.steps_of(theirs.info.run_id)


def test_a_pod_adds_to_the_run_that_kubeflow_made_for_its_task(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(fakes.config_of(), runs_dir=tracked.folder, steps=fakes.real_table(), console=fakes.quiet(), until="train")
    model = tracked.folder / "tiny/model"
    tracking.record_step(model)  # no run, nothing to do
    task = tracked.client.create_run(tracked.client.create_experiment(tracked.name))
    monkeypatch.setenv(tracking.TRACKING_URI, tracked.server)
    monkeypatch.setenv(tracking.RUN_ID, task.info.run_id)
    tracking.record_step(model)
    (recorded,) = tracked.runs()
    assert recorded.info.status == "RUNNING"
    assert recorded.data.params["train.optimizer.name"] == "adam"
    assert [point.value for point in tracked.client.get_metric_history(task.info.run_id, "train_loss")] == [0.5, 0.4]
    assert "epochs" not in recorded.data.metrics  # Kubeflow's launcher logs it
    assert tracked.client.list_artifacts(task.info.run_id, "model")


def test_every_step_on_kubeflow_records_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from components import kfp_components

    result = dataclasses.make_dataclass("Result", ["label"])("tip")

    def ingest(*, examples: Path, config: DataConfig) -> Any:
        with artifacts.writing(examples, step="ingest", inputs={}, config=config) as out:
            out.result = result
        return out.result

    recorded: list[Path] = []
    monkeypatch.setattr(tracking, "record_step", recorded.append)
    output: Any = SimpleNamespace(path=str(tmp_path / "examples"), metadata={})
    kfp_components.run_step("ingest", "data", DataConfig().model_dump_json(), examples=output, function=ingest)
    assert recorded == [tmp_path / "examples"]


def test_a_server_that_is_gone_costs_the_record_only_and_a_later_run_makes_it(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
    result = tracked.run(until="train", tracking={"kind": "mlflow", "uri": nobody})
    assert result.exit_code == 0
    said = capsys.readouterr().err
    assert f"MLflow: this run is not recorded at {nobody}: " in said
    assert "Nothing else is lost" in said
    assert {step.state for step in tracked.run(until="train").steps} == {"reused"}
    (whole,) = tracked.runs()
    assert "train" in tracked.steps_of(whole.info.run_id)


def test_half_a_record_is_taken_away(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", lambda *_: (_ for _ in ()).throw(OSError("connection lost")))
        tracked.run(until="validate")
    assert tracked._all() == []
    tracked.run(until="validate")
    (whole,) = tracked.runs()
    assert set(tracked.steps_of(whole.info.run_id)) == {"ingest", "validate"}


def test_the_command_records_after_its_summary_and_keeps_its_exit_code(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tracked.folder / "config.yaml"
    config.write_text(json.dumps(fakes.settings(**tracked.sections) | {"tracking": "mlflow"}))
    monkeypatch.setenv(tracking.TRACKING_URI, tracked.server)
    table = fakes.real_table(blessed=False)
    monkeypatch.setattr(local, "run", lambda *args, **options: run(*args, **options, steps=table))
    result = CliRunner().invoke(
        local.main, [str(config), f"--runs-dir={tracked.folder / 'runs'}", f"name={tracked.name}"]
    )
    assert result.exit_code == 3, result.output
    (whole,) = tracked.runs()
    assert result.output.splitlines()[-1] == f"MLflow: run {whole.info.run_id} at {tracked.server}"


def test_a_run_that_could_not_begin_records_nothing(tracked: Tracked) -> None:
    tracked.run(until="ingest")
    before = len(tracked._all())
    with pytest.raises(ConfigError, match="has no step 'nothing'"):
        tracked.run(until="nothing")
    assert len(tracked._all()) == before


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("uri", "tracking.uri is not set, and neither is MLFLOW_TRACKING_URI"),
        ("mlflow", r"pip install 'headrace\[mlflow\]'"),
    ],
)
def test_what_is_missing_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, message: str
) -> None:
    monkeypatch.delenv(tracking.TRACKING_URI, raising=False)
    if missing == "mlflow":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message), tracking.recorded(fakes.config_of(tracking="mlflow"), tmp_path):
        raise AssertionError("ran")
