"""The training pipeline for Kubeflow, made from STEPS, and a local run of it through `kfp.local`.

kfp reads annotations as types, so there is no `from __future__ import annotations`.
"""

import builtins
import contextlib
import importlib.metadata
import io
import re
import shutil
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kfp import dsl, local
from kfp.local import config as kfp_local_config
from rich.console import Console

from components import artifacts
from components.errors import HeadraceError
from components.kfp_components import ON_CLUSTER, make_component
from components.search_space import num_trials
from pipelines import local as runs
from pipelines.config import PipelineConfig
from pipelines.kubeflow import containers, exit_handler, pods
from pipelines.kubeflow.config import CONVERT, ENCODE, FINGERPRINT, SUMMARY, TRIAL
from pipelines.local import NOT_BLESSED, RunResult, StepRun
from pipelines.steps import Step, steps_of
from pipelines.view import View

# What these steps make follows from more than their inputs (the champion, the request log), or is not an artifact (the
# pushed model, the traffic), which Kubeflow's cache cannot know. Of the data and the schema, `fingerprint` tells it.
NEVER_CACHED = ("evaluate", "push", "deploy", "monitor", SUMMARY, FINGERPRINT)

# The parameter that `evaluate` returns. kfp.local 2.17.3 takes a condition on an output of any other name for false.
BLESSED = "Output"

# Folder in which the steps note what became of them, on the volume that they share.
_RECORDS = "records"

# kfp.local runs no image, but warns of a name without "python" in it.
_LOCAL_IMAGE = "python"
_COLOUR = re.compile(r"\x1b\[\d+m")


def default_image() -> str:
    """The image that the project's Containerfile is built as."""
    return f"headrace:{importlib.metadata.version('headrace')}"


def build_pipeline(config: PipelineConfig, *, image: str | None = None, records: str | None = None) -> Any:
    """The Kubeflow pipeline of a configuration.

    Args:
        config: The whole configuration; each step's part of it is baked in.
        image: The image that every step runs in; default: `kubeflow.image`, or else `default_image()`.
        records: Folder where the steps note what became of them; default: on the volume of `kubeflow.workspace`, if any.

    Returns:
        A `kfp.dsl` pipeline with one run-time parameter, `data_path`: where this run's data is (default: `data.path`).
    """
    settings = config.kubeflow
    if records is None:
        records = f"{dsl.WORKSPACE_PATH_PLACEHOLDER}/{_RECORDS}" if settings.workspace else ""

    @dsl.pipeline(
        name=config.name,
        description=f"headrace: from data to a served model, experiment '{config.name}'.",
        pipeline_root=settings.pipeline_root,
        pipeline_config=pods.pipeline_config(settings),
    )
    def pipeline(data_path: str = config.data.path or "") -> None:
        graph = _Graph(config, image or settings.image or default_image(), records, data_path)
        with dsl.ExitHandler(graph.summary(), name="run"):
            for step in steps_of(config):
                if not step.gated:
                    graph.add(step)
            with dsl.If(graph.made[BLESSED] == True, name="blessed"):  # noqa: E712 - builds the condition
                for step in steps_of(config):
                    if step.gated:
                        graph.add(step)

    return pipeline


class _Graph:
    """The tasks of a pipeline while it is being built.

    Attributes:
        made: The outputs of the tasks so far, by name: what later ones read.
    """

    def __init__(self, config: PipelineConfig, image: str, records: str, data_path: Any) -> None:
        self.config, self.image, self.records, self.data_path = config, image, records, data_path
        self.made: dict[str, Any] = {}

    def add(self, step: Step) -> None:
        """Add a step as `_TASKS_OF` says, or else as one task that reads what the table says."""
        task = _TASKS_OF.get(step.name, _Graph.step_task)(self, step)
        self.made.update(task.outputs)

    def step_task(self, step: Step, **more: Any) -> Any:
        """The task of a step; `more` are arguments beside its inputs and its configuration."""
        return self.task(step.name, **self.constants(step), **self.read(step), **more)

    def read(self, step: Step) -> dict[str, Any]:
        """The artifacts that a step reads, and what was found for it, if settings are searched."""
        found = ["tuned"] if step.is_tuned and "tuned" in self.made else []
        return {name: self.made[name] for name in (*step.inputs, *found)}

    def task(self, name: str, component: str | None = None, **arguments: Any) -> Any:
        """A task of the component `name`, or of another one in its place, with its pod as the configuration says."""
        task = make_component(component or name, self.image)(**arguments)
        task.set_caching_options(enable_caching=self.config.kubeflow.cache and name not in NEVER_CACHED)
        pods.configure(task, self.config.kubeflow, name)
        return task

    def constants(self, step: Step) -> dict[str, str]:
        """What a step is given as text: its configuration, the digest of its code, and where to note its end."""
        settings = self.config.step_config(step.section)
        modules = artifacts.source_digests(artifacts.step_modules(step.name, settings.model_dump(mode="json")))
        return {
            "config": settings.model_dump_json(indent=1),
            "code_digest": artifacts.digest_of(modules),
            "records": self.records,
        }

    def fingerprint(self, step: Step) -> Any:
        """The digest of the state outside that a step follows from, taken when the run comes to it."""
        if not self.config.kubeflow.cache:
            return ""
        config = self.config.step_config(step.section).model_dump_json(indent=1)
        return self.task(
            FINGERPRINT, step=step.name, section=step.section, config=config, data_path=self.data_path
        ).output

    def ingest(self, step: Step) -> Any:
        """Its data may be another one at each run, under the same path too; shares of it may each have a pod."""
        data = {"data_path": self.data_path, "outside": self.fingerprint(step)}
        pods = self.config.kubeflow.ingest_pods
        if pods == 1:
            return self.step_task(step, **data)
        with dsl.ParallelFor([str(number) for number in range(pods)], name="shares") as number:
            share = self.task(ENCODE, **self.constants(step), **data, number=number, num_shares=str(pods))
        return self.step_task(step, **data, encoded=dsl.Collected(share.outputs["encoded"]))

    def validate(self, step: Step) -> Any:
        """Its schema and the last span's statistics may be files, which may change."""
        reads = self.config.validate_.schema_path or self.config.validate_.drift_from
        return self.step_task(step, outside=self.fingerprint(step) if reads else "")

    def tune(self, step: Step) -> Any:
        """Its trials may each have a pod of their own."""
        config = self.config.tune
        if config.on_kubeflow == "one_pod":
            return self.step_task(step)
        numbers = [str(number) for number in range(num_trials(config))]
        with dsl.ParallelFor(numbers, name="trials", parallelism=config.parallel) as number:
            trial = self.task(TRIAL, **self.constants(step), number=number, **self.read(step))
        return self.step_task(step, trials=dsl.Collected(trial.outputs["trial"]))

    def train(self, step: Step) -> Any:
        """Its workers may be a job of their own."""
        job = self.config.kubeflow.training_job
        if job is None:
            return self.step_task(step)
        place = {"job": job.model_dump_json(indent=1), "workspace": dsl.WORKSPACE_PATH_PLACEHOLDER}
        task = self.task(step.name, ON_CLUSTER, **self.constants(step), **place, **self.read(step))
        return task.set_display_name(step.name)

    def export(self, step: Step) -> Any:
        """Its conversions may each have a pod of their own."""
        kinds = self.config.export.formats
        if not self.config.kubeflow.parallel_export or not kinds:
            return self.step_task(step)
        with dsl.ParallelFor(list(kinds), name="formats") as kind:
            read = {name: self.made[name] for name in ("examples", "transform", "model", "optimized")}
            converted = self.task(CONVERT, **self.constants(step), kind=kind, **read)
        return self.step_task(step, converted=dsl.Collected(converted.outputs["converted"]))

    def summary(self) -> Any:
        """The exit handler's task, which runs whatever becomes of the others."""
        config = self.config.step_config("notify").model_dump_json(indent=1)
        return self.task(SUMMARY, config=config, records=self.records, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER)


# Steps that are more than one task which reads what STEPS says.
_TASKS_OF: dict[str, Callable[[_Graph, Step], Any]] = {
    "ingest": _Graph.ingest,
    "validate": _Graph.validate,
    "tune": _Graph.tune,
    "train": _Graph.train,
    "export": _Graph.export,
}


def run_local(
    config: PipelineConfig,
    runs_dir: Path,
    *,
    data_path: str | None = None,
    image: str | None = None,
    console: Console | None = None,
) -> RunResult:
    """Run the Kubeflow pipeline on this machine, each step in a process or a container of its own.

    Args:
        config: The whole configuration.
        runs_dir: Artifacts are kept under `<runs_dir>/<config.name>/kfp/<output of the step>`, beside `log.txt`.
        data_path: The run-time parameter of that name.
        image: Run each step in a container of this image, as a cluster does; default: in a process of this Python.
        console: Where progress is shown; default: standard output.

    Returns:
        What became of each step; `exit_code` 3 if the gate closed.

    Raises:
        HeadraceError: a step failed; the error is the step's own, where it was meant for the user.
    """
    root = (runs_dir / config.name / "kfp").absolute()
    with contextlib.ExitStack() as held:
        if image is None:
            _refuse_python3_in_paths(root, config, data_path)
            runner: Any = local.SubprocessRunner(use_venv=False)
        else:
            config, data_path = containers.with_absolute_paths(config, data_path), None
            runner = held.enter_context(containers.docker_runner(config, image))
        held.enter_context(runs.only_run_in(root))
        pipeline_root = held.enter_context(_scratch(root))
        log = _Log(
            root / "log.txt", View(console or Console(file=sys.stdout), [step.name for step in steps_of(config)])
        )
        with contextlib.closing(log), contextlib.redirect_stdout(log):
            here = config.model_copy(update={"kubeflow": config.kubeflow.on_this_machine()})
            pipeline = build_pipeline(here, image=image or _LOCAL_IMAGE, records=f"{pipeline_root}/{_RECORDS}")
            failed_step = _run_pipeline(pipeline, runner, pipeline_root, data_path)
        for line in exit_handler.not_sent(Path(pipeline_root, _RECORDS)):
            print(f"Warning: {line}", file=sys.stderr)
        # There is none where the first task did not come to its end.
        run_dir = next((each for each in Path(pipeline_root).iterdir() if each.name != _RECORDS), Path(pipeline_root))
        if failed_step is not None:
            _keep(run_dir, root, steps_of(config))
            runs.write_config(config, root)
            raise exit_handler.noted_error(Path(pipeline_root, _RECORDS)) or read_failure(root / "log.txt", failed_step)
        return _take_over(run_dir, root, steps_of(config), log.seconds)


def read_failure(log_file: Path, step: str) -> HeadraceError:
    """What a step ended with that it could not say itself, from the log of a `kfp.local` run."""
    _, _, rest = log_file.read_text().rpartition(f"Executing task '{step}'")
    output = re.split(r"\n *[\d:.]+ - ERROR - Task ", rest)[0]
    *_, last_traceback = output.split("Traceback (most recent call last):\n")
    # kfp.local indents what a task writes, ever further after a ParallelFor.
    lines = textwrap.dedent(last_traceback).splitlines()
    end = next((i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(: |$)", line)), None)
    if end is None or last_traceback is output:
        return HeadraceError(
            f"Step '{step}' ended without an error of its own; it may have been killed for want of memory. "
            f"What it wrote last is in {log_file}."
        )
    error = "\n".join(lines[end:]).strip()
    return HeadraceError(f"Step '{step}' failed: {error}\nThe traceback is in {log_file}.")


def _run_pipeline(pipeline: Any, runner: Any, root: str, data_path: str | None) -> str | None:
    """Run a pipeline through `kfp.local` and return the name of the step that failed, if one did."""
    arguments = {} if data_path is None else {"data_path": data_path}
    try:
        with _kfp_local(runner, root), warnings.catch_warnings():
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
def _kfp_local(runner: Any, root: str) -> Iterator[None]:
    """Make pipelines run here when they are called, for the length of the block; kfp itself has no way back."""
    before, original_print = kfp_local_config.LocalExecutionConfig.instance, builtins.print
    local.init(runner, pipeline_root=root)
    try:
        yield
    finally:
        kfp_local_config.LocalExecutionConfig.instance = before
        builtins.print = original_print  # two tasks at a time leave one of their own, which indents


def _take_over(run_dir: Path, root: Path, steps: Sequence[Step], seconds: dict[str, float]) -> RunResult:
    """Move the artifacts of a run to their places in `root`; those of skipped steps are gone from there."""
    manifests = _read_manifests(run_dir, steps)
    gate = manifests["evaluate"].result
    taken: list[StepRun] = []
    for step in steps:
        if manifest := manifests.get(step.name):
            artifacts.replace_directory(run_dir / step.name / step.output, root / step.output)
            taken.append(StepRun(step.name, "done", seconds.get(step.name, 0.0), manifest.result))
        else:
            shutil.rmtree(root / step.output, ignore_errors=True)
            taken.append(StepRun(step.name, "skipped", 0.0, None, tuple(gate.get("reasons", ()))))
    return RunResult(root, taken, 0 if gate["blessed"] is True else NOT_BLESSED)


def _keep(run_dir: Path, root: Path, steps: Sequence[Step]) -> None:
    """Move what a failed run has made to its places in `root`, where `headrace replay` finds it; what was there is gone."""
    for step in steps:
        shutil.rmtree(root / step.output, ignore_errors=True)
        if (run_dir / step.name / step.output / artifacts.MANIFEST).is_file():
            artifacts.replace_directory(run_dir / step.name / step.output, root / step.output)


def _read_manifests(run_dir: Path, steps: Sequence[Step]) -> dict[str, artifacts.Manifest]:
    """The manifest of each step that had to run. kfp's SUCCESS is not believed: it has been wrong both ways."""
    manifests: dict[str, artifacts.Manifest] = {}
    for step in steps:
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
        self._starts: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def write(self, text: str) -> int:
        text = _COLOUR.sub("", text)
        self._file.write(text)
        if began := re.search(r" - INFO - Executing task '([^']+)'", text):
            self._starts[began[1]] = time.monotonic()
        if ended := re.search(r" - (?:INFO|ERROR) - Task '([^']+)' finished with status (\w+)", text):
            name, state = ended[1], "done" if ended[2] == "SUCCESS" else "failed"
            self.seconds[name] = time.monotonic() - self._starts[name]
            self._view.ended(name, state, self.seconds[name])
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()
