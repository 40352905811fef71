"""The training pipeline for Kubeflow, made from STEPS, and a local run of it through `kfp.local`.

kfp reads annotations as types, so there is no `from __future__ import annotations`.
"""

import contextlib
import importlib.metadata
import io
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfp import dsl, local
from kfp.local import config as kfp_local_config
from rich.console import Console

from components import artifacts, errors
from components.errors import HeadraceError
from components.kfp_components import make_component
from pipelines import local as runs
from pipelines.config import PipelineConfig
from pipelines.local import NOT_BLESSED, RunResult, StepRun
from pipelines.steps import STEPS, Step
from pipelines.view import View

# What these steps make follows from more than their inputs (the data, the champion, the request log), or is not an
# artifact (the pushed model, the traffic), which Kubeflow's cache cannot know.
NEVER_CACHED = ("ingest", "evaluate", "push", "deploy", "monitor")

# The parameter that `evaluate` returns. kfp.local 2.17.3 takes a condition on an output of any other name for false.
BLESSED = "Output"

# kfp.local runs no image, but warns of a name without "python" in it.
_LOCAL_IMAGE = "python"
_COLOUR = re.compile(r"\x1b\[\d+m")


def default_image() -> str:
    """The image that the project's Containerfile is built as."""
    return f"headrace:{importlib.metadata.version('headrace')}"


def build_pipeline(config: PipelineConfig, *, image: str | None = None) -> Any:
    """The Kubeflow pipeline of a configuration.

    Args:
        config: The whole configuration; each step's part of it is baked in.
        image: The image that every step runs in; default: `default_image()`.

    Returns:
        A `kfp.dsl` pipeline with one run-time parameter, `data_path`: where this run's data is (default: `data.path`).
    """
    never_cached = (*NEVER_CACHED, *(["validate"] if config.validate_.schema_path else []))
    components = {step.name: make_component(step.name, image or default_image()) for step in STEPS}

    @dsl.pipeline(name=config.name, description=f"headrace: from data to a served model, experiment '{config.name}'.")
    def pipeline(data_path: str = config.data.path or "") -> None:
        made: dict[str, Any] = {}

        def add(step: Step) -> None:
            arguments = {name: made[name] for name in step.inputs} | _constants(step, config)
            if step.name == "ingest":
                arguments["data_path"] = data_path
            task = components[step.name](**arguments)
            task.set_caching_options(enable_caching=step.name not in never_cached)
            made.update(task.outputs)

        for step in STEPS:
            if not step.gated:
                add(step)
        with dsl.If(made[BLESSED] == True, name="blessed"):  # noqa: E712 - builds the condition, does not compare
            for step in STEPS:
                if step.gated:
                    add(step)

    return pipeline


def run_local(
    config: PipelineConfig, runs_dir: Path, *, data_path: str | None = None, console: Console | None = None
) -> RunResult:
    """Run the Kubeflow pipeline on this machine, each step in a process of its own.

    Args:
        config: The whole configuration.
        runs_dir: Artifacts are kept under `<runs_dir>/<config.name>/kfp/<output of the step>`, beside `log.txt`.
        data_path: The run-time parameter of that name.
        console: Where progress is shown; default: standard output.

    Returns:
        What became of each step; `exit_code` 3 if the gate closed.

    Raises:
        HeadraceError: a step failed; the error is the step's own, where it was meant for the user.
    """
    root = (runs_dir / config.name / "kfp").absolute()
    _refuse_python3_in_paths(root, config, data_path)
    with runs.only_run_in(root), _scratch(root) as pipeline_root:
        log = _Log(root / "log.txt", View(console or Console(file=sys.stdout), [step.name for step in STEPS]))
        with contextlib.closing(log), contextlib.redirect_stdout(log):
            failed_step = _run_pipeline(build_pipeline(config, image=_LOCAL_IMAGE), pipeline_root, data_path)
        if failed_step is not None:
            raise read_failure(root / "log.txt", failed_step)
        (run_dir,) = Path(pipeline_root).iterdir()
        return _take_over(run_dir, root, log.seconds)


def read_failure(log_file: Path, step: str) -> HeadraceError:
    """The error that a step ended with, from the log of a `kfp.local` run."""
    _, _, rest = log_file.read_text().rpartition(f"Executing task '{step}'")
    output = re.split(r"\n[\d:.]+ - ERROR - Task ", rest)[0]
    *_, last_traceback = output.split("Traceback (most recent call last):\n")
    lines = [line.removeprefix("    ") for line in last_traceback.splitlines()]
    end = next((i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(: |$)", line)), None)
    if end is None or last_traceback is output:
        return HeadraceError(
            f"Step '{step}' ended without an error of its own; it may have been killed for want of memory. "
            f"What it wrote last is in {log_file}."
        )
    name, _, message = "\n".join(lines[end:]).strip().partition(": ")
    module, _, class_name = name.rpartition(".")
    if module == errors.__name__:
        error: HeadraceError = getattr(errors, class_name)(message)
        return error
    return HeadraceError(f"Step '{step}' failed: {name}: {message}\nThe traceback is in {log_file}.")


def _constants(step: Step, config: PipelineConfig) -> dict[str, str]:
    settings = config.step_config(step.section)
    modules = artifacts.source_digests(artifacts.step_modules(step.name, settings.model_dump(mode="json")))
    return {"config": settings.model_dump_json(indent=1), "code_digest": artifacts.digest_of(modules)}


def _run_pipeline(pipeline: Any, root: str, data_path: str | None) -> str | None:
    """Run a pipeline through `kfp.local` and return the name of the step that failed, if one did."""
    arguments = {} if data_path is None else {"data_path": data_path}
    try:
        with _kfp_local(root), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipeline(**arguments)
    except RuntimeError as error:
        failed = re.search(r"Inner task failed: '([^']+)'", _COLOUR.sub("", str(error)))
        if failed is None:
            raise
        return failed[1]
    return None


@contextlib.contextmanager
def _scratch(root: Path) -> Iterator[str]:
    """A folder for one run; those of killed runs are removed first."""
    for old in root.glob(".run-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=root, prefix=".run-") as folder:
        yield folder


@contextlib.contextmanager
def _kfp_local(root: str) -> Iterator[None]:
    """Make pipelines run here when they are called, for the length of the block; kfp itself has no way back."""
    before = kfp_local_config.LocalExecutionConfig.instance
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root)
    try:
        yield
    finally:
        kfp_local_config.LocalExecutionConfig.instance = before


def _take_over(run_dir: Path, root: Path, seconds: dict[str, float]) -> RunResult:
    """Move the artifacts of a run to their places in `root`; those of skipped steps are gone from there."""
    manifests = _read_manifests(run_dir)
    gate = manifests["evaluate"].result
    taken: list[StepRun] = []
    for step in STEPS:
        if manifest := manifests.get(step.name):
            artifacts.replace_directory(run_dir / step.name / step.output, root / step.output)
            taken.append(StepRun(step.name, "done", seconds.get(step.name, 0.0), manifest.result))
        else:
            shutil.rmtree(root / step.output, ignore_errors=True)
            taken.append(StepRun(step.name, "skipped", 0.0, None, tuple(gate.get("reasons", ()))))
    return RunResult(root, taken, 0 if gate["blessed"] is True else NOT_BLESSED)


def _read_manifests(run_dir: Path) -> dict[str, artifacts.Manifest]:
    """The manifest of each step that had to run. kfp's SUCCESS is not believed: it has been wrong both ways."""
    manifests: dict[str, artifacts.Manifest] = {}
    for step in STEPS:
        path = run_dir / step.name / step.output
        if not step.gated or manifests["evaluate"].result["blessed"] is True:
            manifests[step.name] = artifacts.read_manifest(path)
            artifacts.check_files(path, manifests[step.name], sizes_only=True)
        elif path.exists():
            raise HeadraceError(f"kfp.local ran step '{step.name}' although the model is not blessed.")
    return manifests


def _refuse_python3_in_paths(root: Path, config: PipelineConfig, data_path: str | None) -> None:
    """kfp.local replaces `python3` by the interpreter's path in every argument of a step, thus in paths, too."""
    if "python3" in f"{root} {data_path} {config.model_dump_json()}":
        raise HeadraceError(
            f"kfp.local cannot run with 'python3' in a path or setting: it would replace it by the interpreter's path. "
            f"Rename what is called so in the configuration or in {root}, or use the in-process runner."
        )


class _Log(io.TextIOBase):
    """What kfp.local prints, kept in a file without its colours; what it says of the steps is shown as progress.

    Attributes:
        seconds: Wall time of each step that has ended.
    """

    def __init__(self, path: Path, view: View) -> None:
        self._file = path.open("w", buffering=1)
        self._view = view
        self._start = 0.0
        self.seconds: dict[str, float] = {}

    def write(self, text: str) -> int:
        text = _COLOUR.sub("", text)
        self._file.write(text)
        if re.search(r" - INFO - Executing task '", text):
            self._start = time.monotonic()
        if ended := re.search(r" - (?:INFO|ERROR) - Task '([^']+)' finished with status (\w+)", text):
            name, state = ended[1], "done" if ended[2] == "SUCCESS" else "failed"
            self.seconds[name] = time.monotonic() - self._start
            self._view.ended(name, state, self.seconds[name])
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()
