"""What every contender that runs Keras says before its first turn."""

from __future__ import annotations

import importlib

import keras

from benchmarks.training import workloads
from benchmarks.training.turns import Task, Turns


def announce(task: Task, turns: Turns, model: keras.Model, data: workloads.Batch) -> None:
    """Check the model against the reference and say that it is ready."""
    backend = keras.backend.backend()
    turns.ready(
        num_parameters=workloads.num_parameters(model),
        forward_difference=workloads.check_keras(model, data, task.reference),
        versions={backend: importlib.import_module(backend).__version__, "keras": keras.__version__},
    )
