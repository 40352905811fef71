"""This project's engine."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.training import workloads
from benchmarks.training.contenders.announce import announce
from benchmarks.training.contenders.tensorflow_data import dataset
from benchmarks.training.turns import Task, Turns
from components.train.engine import Engine


def train(task: Task, turns: Turns) -> None:
    """Take turns; settings: `xla`."""
    workload = task.workload
    data = workloads.make_data(workload)
    model = workloads.keras_model(workload)
    model.compile(
        optimizer=workloads.keras_optimizer(workload), loss=workloads.keras_loss(workload), auto_scale_loss=False
    )
    batches = dataset(data)
    engine = Engine(model, strategy=tf.distribute.get_strategy(), xla=task.settings["xla"], spec=batches.element_spec)
    iterator = iter(batches)
    engine.run(iterator, 1)
    turns.started()
    announce(task, turns, model, data)
    for num_steps in turns:
        model.reset_metrics()
        engine.run(iterator, num_steps)
        turns.finish(engine.metrics()["loss"])
