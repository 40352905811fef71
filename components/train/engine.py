"""The training loop: one compiled step under one device or MirroredStrategy.

Keras's `fit` is wrong or fails under replicas in several places (clipping before the reduction, loss scaling by one
replica, batch-norm statistics that drift apart, XLA around the collectives). Here the gradient computation alone is
compiled by XLA; the reduction over replicas, the finiteness check, the clipping and the update follow it, in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

LossFunction = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

INITIAL_LOSS_SCALE = 2.0**15
LOSS_SCALE_GROWTH_STEPS = 2000
_XLA_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError)


@dataclass(frozen=True)
class EpochOutcome:
    """What a run over some steps gave.

    Attributes:
        total_loss: Sum over the steps taken of the mean loss per example.
        steps: Steps taken.
        skipped_steps: Steps left out since mixed_float16 overflowed.
    """

    total_loss: float
    steps: int
    skipped_steps: int


class Engine:
    """Runs training steps of a Keras model.

    Args:
        model: A built model, made under `strategy`'s scope, that returns float32 logits.
        optimizer: A Keras optimizer, made under the same scope.
        loss: `(labels, logits) -> (batch,)`, the loss of each example.
        strategy: One device or MirroredStrategy.
        global_batch_size: Examples per step, over all replicas.
        xla: Whether to compile the gradient computation.
        scale_loss: Dynamic loss scaling, for mixed_float16.
        clip_norm: Largest global norm of the reduced, unscaled gradients.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: LossFunction,
        *,
        strategy: tf.distribute.Strategy,
        global_batch_size: int,
        xla: bool,
        scale_loss: bool,
        clip_norm: float | None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._strategy = loss, strategy
        self._global_batch_size, self._clip_norm, self._scales_loss = global_batch_size, clip_norm, scale_loss
        with strategy.scope():
            optimizer.build(model.trainable_variables)
            self.loss_scale = tf.Variable(INITIAL_LOSS_SCALE if scale_loss else 1.0, trainable=False)
            self.good_steps = tf.Variable(0, trainable=False)
        # The gradients that reach the optimizer are reduced already; without this it would sum them a second time.
        optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
        self._gradients = tf.function(self._compute_gradients, jit_compile=xla)
        self._run = tf.function(self._run_steps)

    def run(self, batches: Iterator[Any], num_steps: int) -> EpochOutcome:
        """Run `num_steps` steps on the batches of a distributed iterator, in one call of the compiled loop."""
        loss, skipped = self._run(batches, tf.constant(num_steps))
        return EpochOutcome(float(loss), num_steps - int(skipped), int(skipped))

    def why_it_cannot_run(self, batches: Iterator[Any]) -> str | None:
        """Run one step and undo it: the reason if XLA cannot compile the model, None if it can."""
        states = self.variables()
        before = [state.numpy() for state in states]
        try:
            if isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
                # Without the collectives: TensorFlow lets none succeed after one step has failed.
                self._strategy.run(self._gradients, args=(*next(batches), tf.convert_to_tensor(self.loss_scale)))
            else:
                self.run(batches, 1)
        except _XLA_ERRORS as error:
            return _xla_reason(error.message)
        finally:
            for state, value in zip(states, before, strict=True):
                state.assign(value)
        return None

    def variables(self) -> list[Any]:
        """Everything that a step changes."""
        return [*self.model.variables, *self.optimizer.variables, self.loss_scale, self.good_steps]

    def set_worker(self, index: int) -> None:
        """Let this worker draw dropout masks of its own; those of worker 0 are those of the checkpoint."""
        for state in [v for v in self.model.variables if index and "seed_generator" in v.path]:
            value = state.numpy()
            value[0] ^= index * 0x9E3779B1 & 0x7FFFFFFF
            state.assign(value)

    def checkpoint_state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on exactly, beside the counters of the loop."""
        return {
            # Not the model itself: as an object it leaves out the states of its random generators.
            "variables": [variable.value for variable in self.model.variables],
            "optimizer": self.optimizer,
            "loss_scale": self.loss_scale,
            "good_steps": self.good_steps,
        }

    def _run_steps(self, batches: Iterator[Any], num_steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        total_loss, skipped = tf.constant(0.0), tf.constant(0)
        for _ in tf.range(num_steps):
            loss, gradients = self._strategy.run(self._reduced_gradients, args=(next(batches),))
            loss = self._strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
            if not self._scales_loss:
                self._strategy.run(self._apply, args=(gradients,))
                total_loss += loss
            elif self._all_finite(gradients):
                self._strategy.run(self._apply, args=(gradients,))
                self._count_good_step()
                total_loss += loss
            else:
                self._shrink_scale()
                skipped += 1
        return total_loss, skipped

    def _reduced_gradients(self, batch: tuple[Any, tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """In a replica: its share of the loss, and the gradients of the global batch, unscaled and clipped."""
        loss, gradients = self._gradients(*batch, tf.convert_to_tensor(self.loss_scale))
        replica = tf.distribute.get_replica_context()
        if self._strategy.num_replicas_in_sync > 1:
            gradients = replica.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            self._average_statistics(replica)
        gradients = [gradient / tf.cast(self.loss_scale, gradient.dtype) for gradient in gradients]
        if self._clip_norm is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, self._clip_norm)
        return loss, gradients

    def _compute_gradients(
        self, features: Any, labels: tf.Tensor, weights: tf.Tensor, loss_scale: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        variables = [variable.value for variable in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            logits = self.model(features, training=True)
            loss = tf.reduce_sum(self._loss(labels, logits) * weights) / self._global_batch_size
            if self.model.losses:
                loss += tf.add_n(self.model.losses) / self._strategy.num_replicas_in_sync
            scaled = loss * loss_scale
        gradients = tape.gradient(scaled, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss, [tf.convert_to_tensor(gradient) for gradient in gradients]

    def _apply(self, gradients: list[tf.Tensor]) -> None:
        self.optimizer.apply(gradients, self.model.trainable_variables)

    def _average_statistics(self, replica: Any) -> None:
        """Keep the moving statistics of batch norm alike on all replicas; Keras lets them drift apart."""
        moving = [v for v in self.model.non_trainable_variables if v.dtype.startswith("float") and "seed" not in v.path]
        if moving:
            means = replica.all_reduce(tf.distribute.ReduceOp.MEAN, [tf.convert_to_tensor(v.value) for v in moving])
            for variable, mean in zip(moving, means, strict=True):
                variable.value.assign(mean)

    def _all_finite(self, gradients: list[Any]) -> tf.Tensor:
        local = [self._strategy.experimental_local_results(gradient)[0] for gradient in gradients]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in local])

    def _count_good_step(self) -> None:
        self.good_steps.assign_add(1)
        if self.good_steps >= LOSS_SCALE_GROWTH_STEPS:
            self.loss_scale.assign(self.loss_scale * 2.0)
            self.good_steps.assign(0)

    def _shrink_scale(self) -> None:
        self.loss_scale.assign(tf.maximum(self.loss_scale / 2.0, 1.0))
        self.good_steps.assign(0)


def _xla_reason(message: str) -> str:
    """The line of a TensorFlow error that says what XLA lacks; the lines around it are places in the code."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if "unsupported operations" in line or "not compilable" in line]
    return (telling or [line for line in lines if not line.endswith("error:")] or lines)[0]
