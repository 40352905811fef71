"""Checkpoints of a run: the newest that can be read is taken, and what has been kept is never half a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from components import artifacts, progress
from components.train.engine import Engine

_KEPT = 2


class Checkpoints:
    """Checkpoints of everything that a run must have to go on exactly.

    Args:
        engine: Its variables are saved.
        best: Further variables, of the best weights so far.
        directory: Where they lie; `None` in a worker that is not the chief, which then saves and finds nothing.
    """

    def __init__(self, engine: Engine, best: Sequence[tf.Variable], directory: Path | None) -> None:
        self._variables = [*engine.variables(), *best]
        self._state = tf.Variable("{}", trainable=False)
        self._checkpoint = tf.train.Checkpoint(**engine.checkpoint_state(), best=list(best), state=self._state)
        self._directory = directory
        self._whole: list[int] = []

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save the variables and a JSON-able `state` under a step's number; then delete all but the last two.

        Raises:
            ArtifactError: the disk is full or may not be written; the checkpoints before are still whole.
        """
        if self._directory is None:
            return
        self._state.assign(json.dumps(state))
        with artifacts.disk_errors_explained(self._directory):
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._checkpoint.write(str(self._directory / f"ckpt-{step}"))
                for file in self._directory.glob(f"ckpt-{step}.*"):
                    _flush(file)
                # Not by their numbers: one that could not be read may have a higher one.
                self._whole = [*self._whole, step][-_KEPT:]
            finally:
                self._sweep(self._directory)

    def restore(self) -> dict[str, Any] | None:
        """Put back the newest checkpoint that can be read, and return its `state`; `None` if there is none."""
        if self._directory is None:
            return None
        untouched = [variable.numpy() for variable in self._variables]
        files = sorted(self._directory.glob("ckpt-*.index"), key=_step_of)
        while files:
            file = files[-1]
            try:
                self._checkpoint.read(str(file.with_suffix(""))).assert_consumed()
                state: dict[str, Any] = json.loads(self._state.numpy())
                self._whole = [_step_of(file) for file in files][-_KEPT:]
                return state
            except Exception as error:  # what TensorFlow raises depends on where the file is damaged
                reason = str(getattr(error, "message", error)).partition("\n")[0]
                progress.report(f"checkpoint {file.stem} cannot be read and is passed over: {reason}")
                for variable, value in zip(self._variables, untouched, strict=True):
                    variable.assign(value)
                files.pop()
        return None

    def _sweep(self, directory: Path) -> None:
        """Delete checkpoints that are not whole, or too old, and what a save that was cut short has left."""
        for entry in directory.glob("ckpt-*"):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif _step_of(entry) not in self._whole:
                entry.unlink(missing_ok=True)


def _step_of(file: Path) -> int:
    """Of `ckpt-12.index` or `ckpt-12.data-00000-of-00001`."""
    return int(file.name.removeprefix("ckpt-").partition(".")[0])


def _flush(file: Path) -> None:
    """Let it outlive the machine, not the process only."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
