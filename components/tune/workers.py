"""Processes that train the trials, each with its share of the machine; one that dies takes no other with it."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from multiprocessing import connection
from pathlib import Path
from typing import Literal

from components.config import TrainConfig

_LEAVING_S = 5.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a worker is to train.

    Attributes:
        config: With the settings of the trial in it.
        metric: Of the validation split, to be reported after each epoch.
        scratch: Folder of checkpoints.
    """

    config: TrainConfig
    metric: str
    scratch: Path


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What a worker reports after an epoch; it waits for the answer, whether to stop.

    Attributes:
        number: From 1.
        value: Of the metric; NaN where it is not defined.
    """

    number: int
    value: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        state: complete, pruned (it was told to stop) or failed.
        reason: Why it failed.
        value: The metric of the kept weights.
        epochs: Epochs run.
        best_epoch: The epoch, from 1, whose weights were kept.
        num_parameters: Trainable parameters.
    """

    state: Literal["complete", "pruned", "failed"]
    reason: str = ""
    value: float | None = None
    epochs: int = 0
    best_epoch: int = 0
    num_parameters: int = 0


class Worker:
    """A process that trains one trial after the other, and leaves when this process is gone.

    Args:
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        place: Its number among the workers, from 0.
        num_workers: How many share the machine.
    """

    def __init__(self, examples: Path, transform: Path, place: int, num_workers: int) -> None:
        # TensorFlow does not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_train_trials, args=(theirs, examples, transform, place, num_workers), daemon=True
        )
        try:
            self.process.start()
        finally:
            theirs.close()

    def start(self, trial: Trial) -> None:
        """Let it train a trial; the worker has to be free."""
        self._send(trial)

    def hear(self) -> Epoch | Outcome:
        """What it has to say, once `connection` is ready; a failed outcome if it has died."""
        try:
            heard: Epoch | Outcome = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_LEAVING_S)
            return Outcome("failed", f"its process {_how_it_ended(self.process.exitcode)}")
        return heard

    def answer(self, *, stop: bool) -> None:
        """Answer to an epoch."""
        self._send(stop)

    def _send(self, message: Trial | bool) -> None:
        with contextlib.suppress(OSError):  # it has died, which `hear` will say
            self.connection.send(message)

    @property
    def is_alive(self) -> bool:
        """Whether it can be given a trial."""
        return self.process.is_alive()

    def end(self) -> None:
        """Kill it: what it has to remember is on the disk."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        hint = ", as the system does for want of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"ended with exit code {code}"


def _train_trials(work: connection.Connection, examples: Path, transform: Path, place: int, num_workers: int) -> None:
    """What the process does: train what comes until nothing more will."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if num_workers > 1:
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
    from components.tune import trials

    def tell(epoch: Epoch) -> bool:
        work.send(epoch)
        return bool(work.recv())

    if num_workers > 1:
        trials.share_gpus(place)
    while True:
        trial: Trial = work.recv()
        work.send(trials.run_trial(trial, examples=examples, transform=transform, tell=tell))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(1)
