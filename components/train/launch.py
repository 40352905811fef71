"""Start the train step as one worker, or as a set of workers on this machine that is watched over.

    python -m components.train.launch --workers 3 runs/chicago_taxi/config.yaml
    python -m components.train.launch config.json --examples E --transform T --model M      # in a pod: be a worker

Exit codes of a worker, chosen for TFJob's restartPolicy ExitCode (from 128 on the pod starts again): 0 done, 1 and 2
an error that a restart cannot mend, 138 other workers are missing or gone, or one of them was told to stop, 143 told to
stop by SIGTERM. Whoever is told to stop saves first, together with the others; all go on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import click
import yaml
from pydantic import ValidationError

from components import artifacts, progress
from components.config import TrainConfig
from components.environment import set_environment
from components.errors import ConfigError, HeadraceError
from components.search_space import with_settings
from components.train import cluster as clusters
from components.train.preemption import TERMINATED, Preemption, leave_in_time
from components.train.supervisor import START_TIMEOUT, STATUS_FD, Limits, Set, Show

LOG = "train_workers.log"
_BEAT_S = 1.0


def run_local(
    *,
    examples: Path,
    transform: Path,
    model: Path,
    config: TrainConfig,
    limits: Limits | None = None,
    show: Show | None = None,
) -> None:
    """Train with `config.num_workers` processes on this machine; if one dies or freezes, all start again.

    They go on from the last checkpoint and end with the weights of a run in which none died. What they print is kept in
    `train_workers.log` beside `model`. SIGTERM is passed on to them; when they have saved and left, it does what it
    would have done to this process.

    Args:
        examples: As for `train`.
        transform: As for `train`.
        model: As for `train`.
        config: As for `train`.
        limits: How long to wait and how often to start again.
        show: Called with each line and the worker that printed it (`None`: this supervisor); default: the chief's and
            the supervisor's lines are reported as progress.

    Raises:
        ConfigError: the number of workers is not set.
        HeadraceError: what a worker failed with; or they died more often than `limits.max_restarts`.
    """
    if config.num_workers is None:
        raise ConfigError(
            "train.strategy is multi_worker, but TF_CONFIG names no workers. "
            "Set train.num_workers to start that many on this machine."
        )
    limits = limits or Limits()
    with Preemption() as preemption, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.json"
        file.write_text(config.model_dump_json())
        paths = {"--examples": examples, "--transform": transform, "--model": model}
        arguments = [str(file), *(str(part) for pair in paths.items() for part in pair)]
        options = ["--grace-s", str(limits.grace_s)]
        command = [sys.executable, "-m", "components.train.launch", *arguments, *options]
        with _open_log(model.parent / LOG) as log:
            notes = _Notes(log, show or _report)
            _start_until_done(command, config.num_workers, limits, notes, preemption)


def _start_until_done(
    command: list[str], num_workers: int, limits: Limits, notes: _Notes, preemption: Preemption
) -> None:
    for restarts in range(limits.max_restarts + 1):
        with Set(command, clusters.local_clusters(num_workers), limits, notes.show, notes.write) as workers:
            failure = workers.wait(lambda: preemption.is_asked_for)
        if failure is None or preemption.is_asked_for:
            return
        if restarts < limits.max_restarts:
            notes.show(
                None,
                f"{failure}; starting all again from the last checkpoint ({restarts + 1} of {limits.max_restarts})",
            )
    raise HeadraceError(
        f"The workers were started {limits.max_restarts + 1} times and failed each time, at last so: {failure}. "
        f"What they wrote is in {notes.name}. The last checkpoint is kept: run again to go on from it."
    )


def _open_log(file: Path) -> IO[bytes]:
    with artifacts.disk_errors_explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("wb", buffering=0)


class _Notes:
    """The log file of a run, and whoever is shown the lines that matter."""

    def __init__(self, file: IO[bytes], show: Show) -> None:
        self._file, self._show = file, show
        self._is_full = False

    @property
    def name(self) -> str:
        """Of the log file."""
        return self._file.name

    def write(self, worker: int | None, line: str) -> None:
        """Keep a line; a full disk ends the workers with a message of their own, which must be heard."""
        try:
            self._file.write(f"{_prefix(worker)} {line}\n".encode())
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                self._show(None, f"lines are missing in {self.name}: {error.strerror}")

    def show(self, worker: int | None, line: str) -> None:
        """Keep a line and show it."""
        self.write(worker, line)
        self._show(worker, line)


def _prefix(worker: int | None) -> str:
    return "[launcher]" if worker is None else f"[worker {worker}]"


def _report(worker: int | None, line: str) -> None:
    if not worker:
        progress.report(line)


def read_config(file: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The step's configuration from YAML or JSON: its own, or that of a whole run (`runs/<name>/config.yaml`).

    Args:
        file: Where it is.
        overrides: `train.key=value` or `model.args.key=value`, the value in YAML.

    Raises:
        ConfigError: it cannot be read, or an override does not fit.
    """
    try:
        tree = yaml.safe_load(file.read_text())
        if isinstance(tree, dict) and isinstance(tree.get("train"), dict):
            tree = {**tree["train"], **{name: tree[name] for name in ("seed", "model") if name in tree}}
        settings = {path: yaml.safe_load(value) for path, _, value in (each.partition("=") for each in overrides)}
        return with_settings(TrainConfig.model_validate(tree), settings)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{file} is no configuration of the train step: {error}") from error


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("overrides", nargs=-1, metavar="[train.key=value ...]")
@click.option("--workers", type=click.IntRange(1), help="Start so many here; without it, be the one TF_CONFIG names.")
@click.option("--examples", type=click.Path(path_type=Path), help="Default: beside CONFIG.")
@click.option("--transform", type=click.Path(path_type=Path), help="Default: beside CONFIG.")
@click.option("--model", type=click.Path(path_type=Path), help="Default: beside CONFIG.")
@click.option("--max-restarts", type=click.IntRange(0), default=Limits.max_restarts, help="Of the whole set.")
@click.option("--start-timeout-s", type=float, default=Limits.start_timeout_s, help="For all workers to be there.")
@click.option("--heartbeat-timeout-s", type=float, default=Limits.heartbeat_timeout_s, help="After it one is frozen.")
@click.option("--grace-s", type=float, default=Limits.grace_s, help="After SIGTERM: to save and leave.")
def main(
    config: Path,
    overrides: tuple[str, ...],
    workers: int | None,
    examples: Path | None,
    transform: Path | None,
    model: Path | None,
    max_restarts: int,
    start_timeout_s: float,
    heartbeat_timeout_s: float,
    grace_s: float,
) -> None:
    """Train with several workers.

    CONFIG is YAML or JSON: the configuration of the train step, or a run's config.yaml; train.key=value and
    model.args.key=value override its settings.

    Exit codes: 0 done, 1 failed, 2 the configuration is wrong, 138 other workers are gone, 143 told to stop (saved).
    """
    set_environment()
    paths = {"examples": examples, "transform": transform, "model": model}
    found = {name: path or config.parent / name for name, path in paths.items()}
    if workers is None:
        os.environ.setdefault(START_TIMEOUT, str(start_timeout_s))
        _be_a_worker(lambda: _train_as_worker(config, overrides, found), grace_s)
    limits = Limits(max_restarts, start_timeout_s, heartbeat_timeout_s, grace_s)
    signal.signal(signal.SIGTERM, _leave)
    try:
        changes = {"strategy": "multi_worker", "num_workers": workers}
        settings = read_config(config, overrides).model_copy(update=changes)
        run_local(
            **found, config=settings, limits=limits, show=lambda *line: click.echo(f"{_prefix(line[0])} {line[1]}")
        )
    except HeadraceError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(error.exit_code) from error


def _leave(*_: Any) -> None:
    raise SystemExit(TERMINATED)


def _train_as_worker(config: Path, overrides: Sequence[str], paths: dict[str, Path]) -> None:
    settings = read_config(config, overrides)
    if clusters.from_environ() is None:
        raise ConfigError("No TF_CONFIG names this worker. Give --workers N to start N of them on this machine.")
    from components.train.step import train

    train(**paths, config=settings.model_copy(update={"strategy": "multi_worker"}))


def _be_a_worker(work: Callable[[], None], grace_s: float) -> None:
    """Do the work and leave at once: TensorFlow's own end waits for workers that are gone already."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    leave_in_time(grace_s)
    # SIGALRM must end the process even while TensorFlow waits in C++.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    code = 1
    with _heart() as tell:
        try:
            work()
            code = 0
        except HeadraceError as error:
            print(f"Error: {error}", file=sys.stderr)
            tell({"error": type(error).__name__, "message": str(error)})
            code = error.exit_code
        except BaseException as error:
            traceback.print_exc()
            code = clusters.RESTART_ME if _is_of_a_lost_peer(error) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _is_of_a_lost_peer(error: BaseException) -> bool:
    import tensorflow as tf

    lost = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
    )
    return isinstance(error, lost)


@contextlib.contextmanager
def _heart() -> Iterator[Callable[[dict[str, str]], None]]:
    """Beat for the supervisor, if one has started this process, and leave when it is gone."""
    if STATUS_FD not in os.environ:
        yield lambda _: None
        return
    status = int(os.environ[STATUS_FD])

    def tell(message: dict[str, str]) -> None:
        os.write(status, json.dumps(message).encode() + b"\n")

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                tell({})
                time.sleep(_BEAT_S)
        os._exit(TERMINATED)

    threading.Thread(target=beat, daemon=True).start()
    yield tell


if __name__ == "__main__":
    main(prog_name="python -m components.train.launch")
