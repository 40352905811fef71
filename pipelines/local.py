"""Run a pipeline on this machine: `python -m pipelines.local [CONFIG] [section.key=value ...]`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from components.environment import noise_kept_in, set_environment
from pipelines.exits import INTERRUPTED, reported
from pipelines.steps import STEPS, Step, steps_of

if TYPE_CHECKING:
    from rich.console import Console

    from pipelines.config import PipelineConfig
    from pipelines.view import View

STEP_NAMES = click.Choice([step.name for step in STEPS])
NOT_BLESSED = 3
SUMMARY = "summary.json"
BEST = "best.yaml"
LOG = "log.txt"
LOG_WIDTH = 140


@dataclasses.dataclass(frozen=True)
class StepRun:
    """What became of one step.

    Attributes:
        name: The step.
        state: done, reused or skipped (behind a gate that is closed); failed ends the run.
        seconds: Wall time, that of checking included.
        result: What the step returned, now or when it ran.
        reasons: Why it ran, was reused, skipped or failed.
    """

    name: str
    state: Literal["done", "reused", "skipped", "failed"]
    seconds: float
    result: dict[str, Any] | None = None
    reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What became of a run.

    Attributes:
        run_dir: Where its artifacts, `config.yaml` and `summary.json` are.
        steps: Its steps in order.
        exit_code: 0, or 3 if the model was not blessed.
    """

    run_dir: Path
    steps: list[StepRun]
    exit_code: int

    def result_of(self, name: str) -> dict[str, Any] | None:
        """What a step returned, `None` if it has no part in this run."""
        return next((step.result for step in self.steps if step.name == name), None)


def run(
    config: PipelineConfig,
    *,
    runs_dir: Path,
    from_step: str | None = None,
    until: str | None = None,
    force: Sequence[str] = (),
    explain: bool = False,
    artifact_store: str | None = None,
    console: Console | None = None,
    steps: Sequence[Step] = STEPS,
) -> RunResult:
    """Run the steps in this process; one whose artifact still holds is reused.

    Args:
        config: The experiment.
        runs_dir: Artifacts are kept under `<runs_dir>/<config.name>/<output of the step>`.
        from_step: Run this step and all later ones again.
        until: Stop after this step.
        force: Run these steps again.
        explain: Show why each step ran or was reused.
        artifact_store: URI below which the artifacts are kept as well, under `<config.name>/`, and taken from where there
            are none here: a run on another machine goes on from them.
        console: Where progress is shown; default: standard output.
        steps: The table of steps.

    Returns:
        What became of each step; `exit_code` 3 if the gate closed.

    Raises:
        HeadraceError: a step failed in a way the user can mend, or another run uses the folder.
    """
    from pipelines.view import View

    chosen = _up_to(steps_of(config, steps), until)
    forced = _forced(chosen, from_step, force)
    run_dir = Path(runs_dir) / config.name
    view = View(console or _console(), [step.name for step in chosen])
    with only_run_in(run_dir):
        return _Run(config, run_dir, view, explain, artifact_store).through(chosen, forced)


class _Run:
    """One pass over the steps: what is done so far, and whether the gate is open."""

    def __init__(
        self, config: PipelineConfig, run_dir: Path, view: View, explain: bool, artifact_store: str | None
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.view = view
        self.explain = explain
        self.artifact_store = artifact_store
        self.steps: list[StepRun] = []
        self.blessed = False
        self.objections: tuple[str, ...] = ()
        self.exit_code = 0

    def through(self, steps: Sequence[Step], forced: Mapping[str, str]) -> RunResult:
        """Run, reuse or skip each step, and write summary and lineage whatever happens."""
        from components.errors import ArtifactError

        (self.run_dir / SUMMARY).unlink(missing_ok=True)
        (self.run_dir / LOG).unlink(missing_ok=True)
        write_config(self.config, self.run_dir)
        try:
            for step in steps:
                self._take(step, forced.get(step.name))
        except BaseException:
            # On a full disk the summary cannot be written either; what ended the run is what the user must see.
            with contextlib.suppress(OSError, ArtifactError):
                write_summary(self._result(), self.config)
            self._notify()
            raise
        write_summary(self._result(), self.config)
        self._notify()
        return self._result()

    def _notify(self) -> None:
        """Tell those whom the configuration names how the run ended, and the user whom it could not be told."""
        if self.config.notify.is_on:
            from pipelines.notify import ending_of, notify

            settings = self.config.step_config("notify")
            for line in notify(settings, ending_of(self._result(), settings, str(self.run_dir.absolute()))):
                print(f"Warning: {line}", file=sys.stderr)

    def _result(self) -> RunResult:
        return RunResult(self.run_dir, self.steps, self.exit_code)

    def _take(self, step: Step, forced_by: str | None) -> None:
        start = time.monotonic()
        if step.gated and not self.blessed:
            self._ended(StepRun(step.name, "skipped", 0.0, None, self.objections or ("no model was blessed",)))
            self.exit_code = NOT_BLESSED
            return
        try:
            state, result, reasons = self._reuse_or_run(step, forced_by)
        except BaseException as error:
            self.exit_code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
            message = str(error) or type(error).__name__
            self._ended(StepRun(step.name, "failed", time.monotonic() - start, None, (message,)))
            raise
        self._ended(StepRun(step.name, state, time.monotonic() - start, result, reasons))
        if "blessed" in result:
            self.blessed = result["blessed"] is True
            self.objections = tuple(result.get("reasons", ()))
            self.exit_code = 0 if self.blessed else NOT_BLESSED
        if step.name == "tune":
            self.config = write_best(self.config, self.run_dir, result["settings"])

    def _reuse_or_run(
        self, step: Step, forced_by: str | None
    ) -> tuple[Literal["done", "reused"], dict[str, Any], tuple[str, ...]]:
        from components import artifacts
        from components.artifact_store import ArtifactStore
        from pipelines.reuse import decide

        path = self.run_dir / step.output
        store = ArtifactStore(f"{self.artifact_store}/{self.config.name}") if self.artifact_store else None
        if store is not None:
            store.bring(path)
        decision = decide(step, self.run_dir, self.config, forced_by=forced_by)
        if decision.manifest is None:
            paths = {name: self.run_dir / name for name in (*step.inputs, step.output)}
            with self.view.running(step.name), noise_kept_in(self.run_dir / LOG):
                self._divide_devices()
                step.load()(**paths, config=self.config.step_config(step.section))
        if store is not None:
            store.keep(path)
        if decision.manifest is not None:
            return "reused", decision.manifest.result, decision.reasons
        return "done", artifacts.read_manifest(path).result, decision.reasons

    def _divide_devices(self) -> None:
        """Divide the CPU for training before the first step that runs: TensorFlow allows it only before it starts."""
        if self.config.train.strategy == "mirrored":
            from components.train import devices

            devices.prepare(self.config.train)

    def _ended(self, step: StepRun) -> None:
        self.steps.append(step)
        shown = step.state == "skipped" or (self.explain and step.state != "failed")
        self.view.ended(step.name, step.state, step.seconds, step.reasons if shown else ())


def _up_to(steps: Sequence[Step], until: str | None) -> Sequence[Step]:
    return steps if until is None else steps[: _position(steps, until, "--until") + 1]


def _forced(steps: Sequence[Step], from_step: str | None, force: Sequence[str]) -> dict[str, str]:
    forced = {step.name: f"--force {step.name}" for step in steps if step.name in force}
    for name in force:
        _position(steps, name, "--force")
    if from_step is not None:
        start = _position(steps, from_step, "--from-step")
        forced |= {step.name: f"--from-step {from_step}" for step in steps[start:]}
    return forced


def _position(steps: Sequence[Step], name: str, option: str) -> int:
    from components.errors import ConfigError, did_you_mean

    names = [step.name for step in steps]
    if name not in names:
        raise ConfigError(f"{option}: this run has no step '{name}'.{did_you_mean(name, names)}")
    return names.index(name)


@contextlib.contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, so that two runs never write the same artifacts; it goes with the process."""
    from components.artifacts import disk_errors_explained
    from components.errors import HeadraceError

    with disk_errors_explained(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise HeadraceError(
                f"Another run (process {owner}) is using {run_dir}. Wait for it to end, or choose another --runs-dir."
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def write_config(config: PipelineConfig, run_dir: Path) -> None:
    """Write the resolved configuration beside the artifacts."""
    from pipelines.config import resolved

    write_whole(run_dir / "config.yaml", resolved(config))


def write_best(config: PipelineConfig, run_dir: Path, settings: Mapping[str, Any]) -> PipelineConfig:
    """Write the configuration with the best settings of a search beside the artifacts, and return it."""
    from pipelines.config import resolved
    from pipelines.tuned import tuned_config

    best = tuned_config(config, settings)
    write_whole(run_dir / BEST, resolved(best))
    return best


def write_summary(result: RunResult, config: PipelineConfig) -> None:
    """Write what became of a run, and where its artifacts come from, as JSON for programs."""
    from components import lineage

    fields = {"run_dir": str(result.run_dir.absolute()), "exit_code": result.exit_code}
    steps = [dataclasses.asdict(step) for step in result.steps]
    write_whole(result.run_dir / SUMMARY, json.dumps(fields | {"steps": steps}, indent=1) + "\n")
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    events = lineage.events(config.name, _origins(result), time=now)
    write_whole(result.run_dir / lineage.FILE, json.dumps(events, indent=1) + "\n")


def _origins(result: RunResult) -> dict[str, dict[str, Any]]:
    """What each artifact that belongs to a run was made from, by its name."""
    from components import artifacts
    from components.errors import ArtifactError

    ended = [step.name for step in result.steps if step.state in ("done", "reused")]
    origins = {}
    for file in sorted(result.run_dir.glob(f"[!.]*/{artifacts.MANIFEST}")):
        with contextlib.suppress(ArtifactError):  # one that is damaged has no part in this run
            manifest = artifacts.read_manifest(file.parent)
            if manifest.step in ended:
                origins[file.parent.name] = artifacts.origin(manifest)
    return origins


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a reader sees all of it or what was there before."""
    from components.artifacts import disk_errors_explained
    from serving import atomic

    with disk_errors_explained(path):
        atomic.write_text(path, text)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [section.key=value ...]")
@click.option("--from-step", type=STEP_NAMES, help="Run this step and all later ones again.")
@click.option("--until", type=STEP_NAMES, help="Stop after this step.")
@click.option("--force", type=STEP_NAMES, multiple=True, help="Run this step again; may be given several times.")
@click.option("--explain", is_flag=True, help="Say of each step why it ran or was reused.")
@click.option(
    "--runner",
    type=click.Choice(["in-process", "kfp", "kfp-docker"]),
    default="in-process",
    help="kfp: the compiled Kubeflow pipeline, each step a process of its own; kfp-docker: a container.",
)
@click.option("--image", help="kfp-docker: the image of the steps.  [default: headrace:<version>]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), help="Where artifacts are kept.")
@click.option(
    "--artifact-store",
    metavar="URI",
    help="s3:// or gs:// below which artifacts are kept as well: a run on another machine goes on from them.",
)
@click.option("--print-config", is_flag=True, help="Print the resolved configuration first.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    arguments: tuple[str, ...],
    from_step: str | None,
    until: str | None,
    force: tuple[str, ...],
    explain: bool,
    runner: str,
    image: str | None,
    runs_dir: Path,
    artifact_store: str | None,
    print_config: bool,
    debug: bool,
) -> None:
    """Run every step from raw data to a served model on this machine; steps whose inputs did not change are reused.

    CONFIG is a YAML file (default: the only one in configs/, or chicago_taxi.yaml); section.key=value overrides a setting.

    Exit codes: 0 done, 1 failed, 2 the configuration is wrong, 3 the model was not blessed, 130 interrupted.
    """
    if image is not None and runner != "kfp-docker":
        raise click.UsageError(f"nothing reads --image with --runner {runner}: add --runner kfp-docker")
    interrupted = "Interrupted. Run the same command again: it goes on from the last whole step."
    with reported(debug=debug, interrupted=interrupted), interruptible():
        from pipelines.tracking import recorded

        config = _load(arguments, print_config=print_config)
        set_environment()
        options: dict[str, Any] = {"from_step": from_step, "until": until, "force": force, "explain": explain}
        options["artifact_store"] = artifact_store
        run_dir = runs_dir / config.name / ("" if runner == "in-process" else "kfp")
        with recorded(config, run_dir):
            if runner == "in-process":
                result = run(config, runs_dir=runs_dir, **options)
            else:
                result = _run_kfp(config, runs_dir, options, runner, image)
            _print_summary(result, config)
    raise SystemExit(result.exit_code)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM, which schedulers send, and Ctrl-C end the run: cleaned up and with a summary."""
    numbers = [signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, frame: types.FrameType | None) -> None:
    """Raise KeyboardInterrupt, but a little later where a finalizer runs: Python drops what is raised there."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _load(arguments: Sequence[str], *, print_config: bool) -> PipelineConfig:
    from pipelines.config import load_config, resolved, split_arguments

    path, overrides = split_arguments(arguments)
    config = load_config(path, overrides)
    if print_config:
        click.echo(resolved(config))
    return config


def _run_kfp(
    config: PipelineConfig, runs_dir: Path, options: dict[str, Any], runner: str, image: str | None
) -> RunResult:
    from components.errors import ConfigError
    from pipelines import training

    if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value]:
        raise ConfigError(f"--runner {runner} runs every step: leave out {', '.join(given)}.")
    (runs_dir / config.name / "kfp" / SUMMARY).unlink(missing_ok=True)
    if runner == "kfp-docker":
        image = image or training.default_image()
    result = training.run_local(config, runs_dir, image=image)
    write_config(config, result.run_dir)
    if tuned := result.result_of("tune"):
        write_best(config, result.run_dir, tuned["settings"])
    write_summary(result, config)
    return result


def _print_summary(result: RunResult, config: PipelineConfig) -> None:
    from pipelines.summary import print_summary

    print_summary(result, config, _console())


def _console() -> Console:
    from rich.console import Console

    # Tables in a log file are as wide as they need to be; a terminal knows its own width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.local")
