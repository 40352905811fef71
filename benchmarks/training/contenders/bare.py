"""The limit: one `tf.function` of forward, backward and update, called for each batch, and nothing else.

With the engine's faster operations: without them the engine would be ahead of its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.training import workloads
from benchmarks.training.contenders.announce import announce
from benchmarks.training.contenders.tensorflow_data import dataset
from benchmarks.training.turns import Task, Turns
from benchmarks.training.workloads import Workload
from components.train import fast_ops


def train(task: Task, turns: Turns) -> None:
    """Take turns; settings: `xla`."""
    data = workloads.make_data(task.workload)
    model, step = make_step(task.workload, xla=task.settings["xla"])
    batches = iter(dataset(data))
    float(step(*next(batches)))
    turns.started()
    announce(task, turns, model, data)
    for num_steps in turns:
        for _ in range(num_steps):
            loss = step(*next(batches))
        turns.finish(float(loss))


def make_step(workload: Workload, *, xla: bool) -> tuple[keras.Model, Callable[[Any, tf.Tensor], tf.Tensor]]:
    """The model, and a function from a batch `(x, y)` to its loss that updates the model."""
    model, optimizer = workloads.keras_model(workload), workloads.keras_optimizer(workload)
    optimizer.build(model.trainable_variables)
    weights = [variable.value for variable in model.trainable_variables]

    @tf.function(jit_compile=xla)
    def step(x: Any, y: tf.Tensor) -> tf.Tensor:
        with fast_ops.in_place(), tf.GradientTape() as tape:
            logits = model(x, training=True)
            if workload.output.task == "binary":
                losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits)
            else:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)
        return loss

    return model, step
