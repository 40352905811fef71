"""The end of a run on Kubeflow: what its steps noted of themselves, read by the task `summary`, which tells of it.

Kubeflow tells an exit handler little: a state and, by version, a message; not which step failed, nor what the steps
found. So each step notes its end in a folder that all of them see. Where there is none, the API is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components import errors
from components.config import NotifyConfig
from components.errors import ArtifactError, HeadraceError
from pipelines import notify
from pipelines.exits import INTERRUPTED
from pipelines.local import NOT_BLESSED, RunResult, StepRun, write_whole
from pipelines.steps import STEPS

NOT_SENT = "not_sent"
_DIED = "It ended without an error of its own; it may have been killed for want of memory, or with its node."
# What the states of a task are called in the versions of Kubeflow Pipelines, and the exit code of such a run.
_EXIT_CODES = {"SUCCEEDED": 0, "COMPLETE": 0, "CACHED": 0, "CANCELED": INTERRUPTED, "CANCELLED": INTERRUPTED}
# Where a pod finds the API, who it is there, and its namespace (kfp.client.Client, ServiceAccountTokenVolumeCredentials).
_API = "http://ml-pipeline.kubeflow.svc.cluster.local:8888"
_TOKEN = "/var/run/secrets/kubeflow/pipelines/token"
_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


@contextlib.contextmanager
def noted(step: str, folder: str) -> Iterator[dict[str, Any]]:
    """Note in `folder` what becomes of a step.

    Args:
        step: The step.
        folder: Where; nothing is noted if it is empty.

    Yields:
        What the step returns is put into this, as JSON-able values.
    """
    result: dict[str, Any] = {}
    if not folder:
        yield result
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def note(run: StepRun, error: str | None = None) -> None:
        write_whole(Path(folder) / f"{step}.json", json.dumps(dataclasses.asdict(run) | {"error": error}))

    note(StepRun(step, "failed", 0.0, None, (_DIED,)))
    try:
        yield result
    except BaseException as error:
        ours = next((each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__), None)
        with contextlib.suppress(OSError, ArtifactError):  # what ended the step is what the user must see
            note(StepRun(step, "failed", time.monotonic() - start, None, (str(error) or type(error).__name__,)), ours)
        raise
    note(StepRun(step, "done", time.monotonic() - start, result))


def noted_error(folder: Path) -> HeadraceError | None:
    """The error that a step ended with, if it was one meant for the user."""
    for _, step, error in _notes(folder):
        if error is not None:
            raised: HeadraceError = getattr(errors, error)(*step.reasons)
            return raised
    return None


def _notes(folder: Path) -> Iterator[tuple[str, StepRun, str | None]]:
    """Each note's name, what became of the step, and the class of its error."""
    for file in sorted(folder.glob("*.json")):
        fields = json.loads(file.read_text())
        error = fields.pop("error")
        yield file.stem, StepRun(**fields | {"reasons": tuple(fields["reasons"])}), error


def finish(
    *, config: str, records: str, run_id: str, state: str, message: str | None, summary: str, report: str
) -> None:
    """Write the summary of a run, and tell of its end.

    Args:
        config: The section `notify` as JSON.
        records: Folder of the steps' notes; empty: there is none.
        run_id: The run on Kubeflow.
        state: What Kubeflow says of the steps as a whole.
        message: What it says of an error.
        summary: File to write, in Markdown.
        report: File to write, in HTML.
    """
    from pipelines import summary as pages

    settings = NotifyConfig.model_validate_json(config)
    steps, unknown = _noted_steps(Path(records)) if records else _steps_by_api(run_id)
    result = RunResult(Path(records), steps, _exit_code(state, steps))
    ending = notify.ending_of(result, settings, run_id)
    reasons = ending.reasons or ((message or f"Kubeflow says {state}.",) if ending.state == "failed" else ())
    ending = dataclasses.replace(ending, reasons=(*reasons, *unknown))
    failures = notify.notify(settings, ending)
    for line in failures:
        print(line, file=sys.stderr)
    if records:
        Path(records).mkdir(parents=True, exist_ok=True)
        write_whole(Path(records) / NOT_SENT, json.dumps(failures))
    notes = [ending.details, *failures]
    for file, page in ((summary, pages.markdown), (report, pages.html)):
        Path(file).write_text(page(ending.headline, notes, result, settings.min_slice_examples), encoding="utf-8")


def not_sent(records: Path) -> list[str]:
    """What the task `summary` could not send, one line each."""
    file = records / NOT_SENT
    lines: list[str] = json.loads(file.read_text()) if file.is_file() else []
    return lines


def _noted_steps(folder: Path) -> tuple[list[StepRun], tuple[str, ...]]:
    """The steps that noted their end, and those before them that did not run, because Kubeflow had their results."""
    found = {name: step for name, step, _ in _notes(folder)}
    # `tune` has no part in most runs.
    names = [step.name for step in STEPS if step.name in found or step.name != "tune"]
    reached = max((names.index(name) + 1 for name in found if name in names), default=0)
    steps = [found.pop(name, StepRun(name, "reused", 0.0)) for name in names[:reached]]
    # One task of several that a step is divided into, such as convert-onnx.
    return [*steps, *(part for part in found.values() if part.state == "failed")], ()


def _steps_by_api(run_id: str) -> tuple[list[StepRun], tuple[str, ...]]:
    """What became of the steps that had a pod, as the API in the cluster tells it, or why that is not known."""
    from pipelines.kubeflow import kfp_api

    host = os.environ.get("KF_PIPELINES_ENDPOINT", _API)
    token_file, namespace = Path(_TOKEN), Path(_NAMESPACE)
    access = kfp_api.Access(
        host,
        namespace=namespace.read_text().strip() if namespace.is_file() else None,
        token_file=token_file if token_file.is_file() else None,
    )
    try:
        with kfp_api.explained(host):
            attempts = kfp_api.attempts(kfp_api.connect(access), run_id)
    except Exception as error:
        return [], (f"What became of each step is not known here: {error} It would be with kubeflow.workspace.",)
    last = {attempt.step: attempt for attempt in attempts}
    return [
        StepRun(step, "failed" if attempt.failed else "done", 0.0, None, (attempt.message,) if attempt.message else ())
        for step, attempt in last.items()
    ], ()


def _exit_code(state: str, steps: list[StepRun]) -> int:
    """The exit code that the run would have had on a laptop."""
    code = _EXIT_CODES.get(state.upper(), 1)
    by_name = {step.name: step for step in steps}
    if code or "evaluate" not in by_name:
        return code
    blessed = (by_name["evaluate"].result or {}).get("blessed", "push" in by_name)
    return 0 if blessed else NOT_BLESSED
