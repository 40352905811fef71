"""Keras `fit`, on TensorFlow or JAX: one call that lasts for the whole benchmark, with an epoch for each turn."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras

from benchmarks.training import workloads
from benchmarks.training.contenders.announce import announce
from benchmarks.training.turns import Task, Turns


def train(task: Task, turns: Turns) -> None:
    """Take turns; settings: `jit_compile` and `steps_per_execution`, by default those of Keras."""
    workload = task.workload
    data = workloads.make_data(workload)
    model = workloads.keras_model(workload)
    model.compile(optimizer=workloads.keras_optimizer(workload), loss=workloads.keras_loss(workload), **task.settings)
    batches = _batches(data)
    first_call_steps = task.settings.get("steps_per_execution", 1)
    model.fit(batches, steps_per_epoch=first_call_steps, verbose=0)
    turns.started(first_call_steps)
    announce(task, turns, model, data)
    with contextlib.suppress(_NoMoreTurns):
        model.fit(batches, steps_per_epoch=task.steps, epochs=10**9, verbose=0, callbacks=[_OneTurnAnEpoch(turns)])


def _batches(data: workloads.Batch) -> Any:
    if keras.backend.backend() != "tensorflow":
        return workloads.endless(data)
    from benchmarks.training.contenders.tensorflow_data import dataset

    return dataset(data)


class _NoMoreTurns(Exception):  # noqa: N818
    """The driver has closed the pipe."""


class _OneTurnAnEpoch(keras.callbacks.Callback):
    """Nothing of it runs between the steps of a turn, so that Keras goes on as it does without callbacks."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if next(self._turns, None) is None:
            raise _NoMoreTurns

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._turns.finish(float((logs or {})["loss"]))
