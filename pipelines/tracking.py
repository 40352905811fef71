"""Records runs in MLflow: of a run on this machine all of it, when it has ended; in a pod of Kubeflow Pipelines its step.

A record is made after the work and with the work's own times, so that a server which is slow or gone costs no run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.exits import INTERRUPTED
from pipelines.local import NOT_BLESSED, SUMMARY
from pipelines.reuse import leaves
from pipelines.steps import STEPS

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from components.artifacts import Manifest
    from pipelines.config import PipelineConfig

TRACKING_URI, RUN_ID = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
# With its defaults the client takes minutes to say that nobody answers.
_CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_LATER = "\nNothing else is lost. The same command, when the server answers, reuses every step and records them."
_FINGERPRINT = "headrace.fingerprint"
# What one can read of an artifact; its data and models stay where they are.
_REPORTS = (".html", ".json", ".md", ".svg", ".yaml")
_MOST_REPORT_BYTES = 2_000_000
# MLflow's limits, of a parameter's value and of one request.
_LONGEST_VALUE, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000


@contextlib.contextmanager
def recorded(config: PipelineConfig, run_dir: Path) -> Iterator[None]:
    """Record what becomes of the run in the block, however it ends; if that cannot be done, say so and no more.

    Args:
        config: The experiment; without `tracking` nothing is recorded.
        run_dir: Where the run leaves its artifacts and its summary.

    Raises:
        ConfigError: MLflow is not installed, or nobody says where its server is.
    """
    if config.tracking is None:
        yield
        return
    uri = _uri(config)
    start_seconds, before = time.time(), _stamp(run_dir / SUMMARY)
    try:
        yield
    finally:
        # A run that could not begin leaves the summary of the one before.
        if _stamp(run_dir / SUMMARY) not in (None, before):
            with _told_if_it_fails(f"this run is not recorded at {uri}", _LATER):
                click.echo(f"MLflow: run {_record_run(config, run_dir, uri, start_seconds)} at {uri}")


def record_step(artifact: Path) -> None:
    """Add to the run that Kubeflow Pipelines made for this task what its launcher does not log; do nothing without one.

    The launcher logs scalar metrics and the parameters as they are passed. To them come each setting, the history of
    the training and the reports: https://github.com/kubeflow/pipelines/tree/master/proposals/12862-mlflow-integration.

    Args:
        artifact: What the step has just written.
    """
    if not (run_id := os.environ.get(RUN_ID)):
        return
    with _told_if_it_fails(f"this step is not recorded in run {run_id}"):
        from mlflow import MlflowClient

        from components.artifacts import read_manifest

        log = _Log(MlflowClient(), run_id, time.time())
        log.artifact(manifest := read_manifest(artifact))
        if manifest.step == "train":
            log.history(artifact)
        log.reports(artifact, artifact.name)


def _uri(config: PipelineConfig) -> str:
    from components.errors import ConfigError

    if importlib.util.find_spec("mlflow") is None:
        raise ConfigError("tracking: MLflow's client is not installed: pip install 'headrace[mlflow]'")
    uri = (config.tracking and config.tracking.uri) or os.environ.get(TRACKING_URI)
    if not uri:
        raise ConfigError(f"tracking.uri is not set, and neither is {TRACKING_URI}: give the address of the server.")
    return uri


def _stamp(file: Path) -> tuple[int, int] | None:
    status = file.stat() if file.is_file() else None
    return status and (status.st_ino, status.st_mtime_ns)


@contextlib.contextmanager
def _told_if_it_fails(what: str, then: str = "") -> Iterator[None]:
    """Use MLflow in the block, with some patience; whatever goes wrong is printed and ends there."""
    for name, value in _CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        click.echo(f"MLflow: {what}: {first_line}{then}", err=True)


def _record_run(config: PipelineConfig, run_dir: Path, uri: str, start_seconds: float) -> str:
    """Record a run and return its id; one that reused everything has the record of the run that made it."""
    from mlflow import MlflowClient

    from components.artifacts import digest_of, read_manifest

    summary = json.loads((run_dir / SUMMARY).read_text())
    steps = [step for step in summary["steps"] if step["state"] != "skipped"]
    places = {step.name: run_dir / step.output for step in STEPS}
    manifests = {step["name"]: read_manifest(places[step["name"]]) for step in steps if step["state"] != "failed"}
    fingerprint = digest_of({name: manifest.fingerprint for name, manifest in manifests.items()})

    given = os.environ.get(RUN_ID)
    experiment = _Experiment.of(MlflowClient(uri), config, given)
    reused_all = all(step["state"] == "reused" for step in steps)
    if reused_all and not given and (found := experiment.find(fingerprint)):
        return found
    with experiment.whole_or_nothing():
        run_id = given or experiment.create(config.name, start_seconds)
        seconds = start_seconds
        for step in steps:
            _record_step(experiment, run_id, step, manifests.get(step["name"]), seconds)
            seconds += step["seconds"]
        log = _Log(experiment.client, run_id, seconds)
        _log_whole(log, config, run_dir, {name: (places[name], manifest) for name, manifest in manifests.items()})
        log.tags({_FINGERPRINT: fingerprint})
        if not given:  # else whoever made the run ends it
            experiment.client.set_terminated(run_id, _status(summary["exit_code"]), _milliseconds(seconds))
    return run_id


def _log_whole(
    log: _Log, config: PipelineConfig, run_dir: Path, artifacts: Mapping[str, tuple[Path, Manifest]]
) -> None:
    """Of a whole run: all settings, the training, the verdict and the reports."""
    import yaml

    from pipelines.config import resolved

    log.params(yaml.safe_load(resolved(config)))
    log.tags(_code_and_data({name: manifest for name, (_, manifest) in artifacts.items()}))
    if "train" in artifacts:
        log.history(artifacts["train"][0])
    if "evaluate" in artifacts:
        verdict = artifacts["evaluate"][1].result
        log.numbers({"evaluate": verdict["metrics"]})
        log.tags({"headrace.blessed": json.dumps(verdict["blessed"])})
    log.reports(run_dir, None)
    for path, _ in artifacts.values():
        log.reports(path, path.name)


def _record_step(
    experiment: _Experiment, parent: str, step: Mapping[str, Any], manifest: Manifest | None, start_seconds: float
) -> None:
    """Record a step as a run below that of the whole, unless it is reused and has been recorded."""
    if manifest and step["state"] == "reused" and (found := experiment.find(manifest.fingerprint)):
        experiment.client.set_tag(parent, f"headrace.reused.{step['name']}", found)
        return
    run_id = experiment.create(step["name"], start_seconds, parent)
    end_seconds = start_seconds + step["seconds"]
    log = _Log(experiment.client, run_id, end_seconds)
    log.tags({"headrace.step": step["name"], "headrace.reasons": "\n".join(step["reasons"])})
    if manifest:
        log.artifact(manifest)
        log.numbers({name: _by_form(value) for name, value in manifest.result.items()})
        log.tags({_FINGERPRINT: manifest.fingerprint})
    experiment.client.set_terminated(run_id, "FINISHED" if manifest else "FAILED", _milliseconds(end_seconds))


def _by_form(value: Any) -> Any:
    """What a step says of each form, by the form's name."""
    rows = value if isinstance(value, list) else []
    return {each["format"]: each for each in rows if isinstance(each, dict) and "format" in each} or value


@dataclass(frozen=True)
class _Experiment:
    """Where runs are made and found.

    Attributes:
        client: Of the server.
        id: Of the experiment.
        made: The runs that were made.
    """

    client: MlflowClient
    id: str
    made: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, client: MlflowClient, config: PipelineConfig, run_id: str | None) -> _Experiment:
        """That of a run, or else the one that the config names; it is made if there is none."""
        if run_id:
            return cls(client, client.get_run(run_id).info.experiment_id)
        from mlflow.exceptions import MlflowException

        name = (config.tracking and config.tracking.experiment) or config.name
        if found := client.get_experiment_by_name(name):
            return cls(client, found.experiment_id)
        try:
            return cls(client, client.create_experiment(name))
        except MlflowException:
            if found := client.get_experiment_by_name(name):  # another run has just made it
                return cls(client, found.experiment_id)
            raise

    def create(self, name: str, start_seconds: float, parent: str | None = None) -> str:
        """Make a run and return its id."""
        tags = {"mlflow.parentRunId": parent} if parent else {}
        run = self.client.create_run(self.id, start_time=_milliseconds(start_seconds), tags=tags, run_name=name)
        self.made.append(run.info.run_id)
        return self.made[-1]

    def find(self, fingerprint: str) -> str | None:
        """The finished run of that fingerprint, if there is one."""
        wanted = f"attributes.status = 'FINISHED' and tags.`{_FINGERPRINT}` = '{fingerprint}'"
        runs = self.client.search_runs([self.id], wanted, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    @contextlib.contextmanager
    def whole_or_nothing(self) -> Iterator[None]:
        """Delete the runs that were made if the block fails, so that half a record is not taken for one."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the block is what is told
                for run_id in self.made:
                    self.client.delete_run(run_id)
            raise


def _code_and_data(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    from components.artifacts import digest_of

    tags = {"headrace.code_digest": digest_of({name: each.made_from["source"] for name, each in manifests.items()})}
    if "ingest" in manifests and (data := manifests["ingest"].made_from["outside"]["data"]):
        tags["headrace.data_fingerprint"] = data
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or no repository
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        tags["mlflow.source.git.commit"] = commit
    return tags


def _status(exit_code: int) -> str:
    return {0: "FINISHED", NOT_BLESSED: "FINISHED", INTERRUPTED: "KILLED"}.get(exit_code, "FAILED")


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


@dataclass(frozen=True)
class _Log:
    """Writes into one run of MLflow.

    Attributes:
        client: Of the server.
        run_id: The run.
        seconds: Unix time of the metrics.
    """

    client: MlflowClient
    run_id: str
    seconds: float

    def artifact(self, manifest: Manifest) -> None:
        """The settings of the step that made an artifact, and its digest."""
        settings = {name: value for name, value in manifest.made_from["config"].items() if name != "resolved_config"}
        self.params({manifest.step: settings})
        self.tags({"headrace.digest": manifest.digest})

    def tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def params(self, tree: Mapping[str, Any]) -> None:
        """Every value of a tree of settings by its dotted name."""
        from mlflow.entities import Param

        texts = {
            _key(name): value if isinstance(value, str) else json.dumps(value) for name, value in leaves(tree).items()
        }
        params = [Param(name, text[:_LONGEST_VALUE]) for name, text in texts.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self.client.log_batch(self.run_id, params=params[start : start + _MOST_PARAMS])

    def numbers(self, *trees: Mapping[str, Any], first_step: int = 0) -> None:
        """Every number of some trees by its dotted name; each tree is a step of its own."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_key(name), float(value), _milliseconds(self.seconds), step)
            for step, tree in enumerate(trees, first_step)
            for name, value in leaves(tree).items()
            if isinstance(value, int | float)
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _MOST_METRICS])

    def history(self, model: Path) -> None:
        """What the training said of each epoch."""
        self.numbers(*json.loads((model / "history.json").read_text()), first_step=1)

    def reports(self, folder: Path, name: str | None) -> None:
        """The files of a folder that one can read, below a folder of that name."""
        for file in sorted([*folder.iterdir(), *folder.glob("pictures/*")]):
            if file.suffix in _REPORTS and file.is_file() and file.stat().st_size <= _MOST_REPORT_BYTES:
                self.client.log_artifact(self.run_id, str(file), name)


def _key(name: str) -> str:
    """A name as MLflow takes it."""
    return re.sub(r"[^\w./ :-]", "_", name)[:250]
