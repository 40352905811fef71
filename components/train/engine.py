"""The compiled training step of a Keras model, the same on one device, under MirroredStrategy and on several workers.

Keras's `fit` is wrong or fails under replicas in several places (clipping before the reduction, loss scaling by one
replica, batch-norm statistics that drift apart, one dropout mask for all, XLA around the collectives). Here the model's
`train_step` computes a replica's gradients, compiled by XLA; the reduction over replicas, the check for NaN and Inf, the
clipping and the update follow it, in that order. On one device all of it is one compiled function.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import progress
from components.errors import ConfigError
from components.train import fast_ops

Clip = Callable[[list[tf.Tensor]], list[tf.Tensor]]

INITIAL_LOSS_SCALE = 2.0**15
LOSS_SCALE_GROWTH_STEPS = 2000
_XLA_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError)


@dataclass
class _Record:
    """What `train_step` hands to its optimizer while it is traced."""

    replica: tf.Tensor
    gradients: list[tf.Tensor] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)
    losses: list[tf.Tensor] = field(default_factory=list)
    num_updates: int = 0

    def is_finite(self) -> tf.Tensor:
        """Whether there is neither NaN nor Inf in it."""
        values = (*self.gradients, *self.losses)
        return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(value)) for value in values)])


class Engine:
    """Runs training steps of a compiled Keras model, of its own `train_step` if it has one.

    A step whose loss or gradients hold NaN or Inf changes nothing but random states and counters. The loss must be
    scaled for replicas as Keras's own losses do, that is by `1 / num_replicas_in_sync` in a `train_step` of one's own.
    One with optimizers of its own (a GAN's) updates by itself: it is taken on one device, and none of its steps is left
    out.

    Args:
        model: Compiled under `strategy`'s scope, with `auto_scale_loss=False`.
        strategy: One device, MirroredStrategy or MultiWorkerMirroredStrategy.
        xla: Whether XLA compiles the gradients (on one device the whole step).
        scale_loss: Dynamic loss scaling, for mixed_float16.
        clip: Takes and returns the reduced, unscaled gradients.
        accumulation_steps: Micro-batches that each replica's rows are split into, for less memory.
        spec: `element_spec` of the batches, for a model or metrics that are built by the first of them.

    Attributes:
        loss_scale: By which the loss is multiplied.
        skipped_steps: Steps left out since the engine was made or restored.
        bad_steps_in_a_row: Steps left out since the last good one.
        traces: How often TensorFlow has traced `train_step`.

    Raises:
        ConfigError: the model is not compiled, or its optimizer accumulates gradients itself.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        strategy: tf.distribute.Strategy,
        xla: bool,
        scale_loss: bool = False,
        clip: Clip | None = None,
        accumulation_steps: int = 1,
        spec: Any = None,
    ) -> None:
        self.model, self.optimizer = model, _plain_optimizer(model)
        self._strategy, self._clip, self._scales_loss = strategy, clip, scale_loss
        self._accumulation_steps, self._num_replicas = accumulation_steps, strategy.num_replicas_in_sync
        self._is_in_parts = self._num_replicas * accumulation_steps > 1
        self.traces = 0
        with strategy.scope():
            if spec is not None:
                _build(model, spec)
            self.optimizer.build(model.trainable_variables)
            self.loss_scale = tf.Variable(INITIAL_LOSS_SCALE if scale_loss else 1.0, trainable=False)
            self.good_steps = tf.Variable(0, trainable=False)
            self.skipped_steps = tf.Variable(0, trainable=False)
            self.bad_steps_in_a_row = tf.Variable(0, trainable=False)
        self._local = threading.local()
        self._take_over(self.optimizer)
        self._weigh_losses_of_outputs()
        self._updated: list[Any] = []
        self._own_optimizers = _own_optimizers(model)
        if spec is not None and self._num_replicas == 1 and not all(each.built for each in self._own_optimizers):
            # Traced, not run: their states have to be there before they are saved or put back.
            with _plain_refusals():
                tf.function(self._compute_gradients).get_concrete_function(spec, tf.TensorSpec([], tf.int32))
            self.traces = 0
        self._is_fused = xla and not self._is_in_parts
        # Without XLA no function of its own, in which no layer could reduce over the replicas.
        compiled = tf.function(self._compute_gradients, jit_compile=True)
        self._gradients = compiled if xla and not self._is_fused else self._compute_gradients
        self._whole_step = tf.function(self._compute_and_update, jit_compile=xla)
        self._run = tf.function(self._run_steps)
        self._evaluate = tf.function(self._test_steps)

    def run(self, batches: Iterator[Any], num_steps: int) -> None:
        """Run steps on the batches of a (distributed) iterator, in one call of the compiled loop.

        Args:
            batches: Of `(x, y)` or `(x, y, sample_weight)`, as Keras's `train_step` takes them.
            num_steps: Steps to run.
        """
        traces = self.traces
        with _plain_refusals():
            self._run(batches, tf.constant(num_steps))
        if 0 < traces < self.traces:
            progress.report(
                "the training step was traced again, for batches of another shape or type, which costs seconds each "
                "time: give all batches one static shape (pad, or bucket by length)"
            )

    def evaluate(self, batches: Any) -> dict[str, float]:
        """The compiled loss and metrics over all batches of a (distributed) dataset, reduced over the replicas."""
        self.model.reset_metrics()
        self._evaluate(iter(batches))
        values = self.metrics()
        self.model.reset_metrics()
        return values

    def metrics(self) -> dict[str, float]:
        """The model's metrics, loss first, over the steps since they were reset; of all replicas together.

        One that gives several numbers, by class for instance, is `name_0`, `name_1` and so on.
        """
        values: dict[str, float] = {}
        for name, value in self.model.get_metrics_result().items():
            numbers = np.ravel(value)
            names = [name] if numbers.size == 1 else [f"{name}_{index}" for index in range(numbers.size)]
            values |= zip(names, map(float, numbers), strict=True)
        return values

    def why_it_cannot_run(self, batches: Iterator[Any]) -> str | None:
        """Run one step and undo it: the reason if XLA cannot compile the model, None if it can."""
        states = self.variables()
        before = [state.numpy() for state in states]
        local = self.local_state()
        try:
            if isinstance(self._strategy, tf.distribute.MultiWorkerMirroredStrategy):
                # Without the collectives: TensorFlow lets none succeed after one step has failed.
                with self._own_random_numbers(), fast_ops.in_place():
                    self._strategy.run(self._gradients, args=(next(batches), tf.constant(0)))
            else:
                self.run(batches, 1)
        except _XLA_ERRORS as error:
            return _xla_reason(error.message)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            return "a layer reduces over the replicas within a step"
        finally:
            for state, value in zip(states, before, strict=True):
                state.assign(value)
            self.set_local_state(local)
        return None

    def variables(self) -> list[Any]:
        """Everything that a step changes and that is alike on all replicas."""
        return [*self.model.variables, *self._optimizer_variables(), *self._counters().values()]

    def _optimizer_variables(self) -> list[Any]:
        return [variable for each in (self.optimizer, *self._own_optimizers) for variable in each.variables]

    def checkpoint_state(self) -> dict[str, Any]:
        """`variables`, as a checkpoint takes them."""
        return {
            # Not the model itself: as an object it leaves out the states of its random generators.
            "variables": [variable.value for variable in self.model.variables],
            "optimizer": [variable.value for variable in self._optimizer_variables()],
            **self._counters(),
        }

    def _counters(self) -> dict[str, tf.Variable]:
        names = ("loss_scale", "good_steps", "skipped_steps", "bad_steps_in_a_row")
        return {name: getattr(self, name) for name in names}

    def local_state(self) -> np.ndarray:
        """`(local replicas, n)` float64: what each replica of this process has counted for the metrics."""
        rows = [[copy.numpy().reshape(-1) for copy in self._copies(v)] for v in self._metric_variables()]
        return np.array([np.concatenate(parts) for parts in zip(*rows, strict=True)], np.float64)

    def set_local_state(self, state: np.ndarray) -> None:
        """Put back what `local_state` gave."""
        start = 0
        for variable in self._metric_variables():
            size = int(np.prod(variable.shape))
            for copy, row in zip(self._copies(variable), state, strict=True):
                copy.assign(row[start : start + size].reshape(copy.shape).astype(copy.dtype.as_numpy_dtype))
            start += size

    def _run_steps(self, batches: Iterator[Any], num_steps: tf.Tensor) -> None:
        # Around all replicas, whose threads take turns.
        with fast_ops.in_place():
            for _ in tf.range(num_steps):
                if self._is_fused:
                    self._whole_step(next(batches))
                else:
                    self._step(next(batches))

    def _step(self, batch: Any) -> None:
        with self._own_random_numbers():
            gradients, bad = self._strategy.run(self._reduced_gradients, args=(batch,))
        is_good = self._strategy.experimental_local_results(bad)[0] == 0
        if is_good:
            self._strategy.run(self._update, args=(gradients,))
        self._count(is_good)

    def _compute_and_update(self, batch: Any) -> None:
        """A step of one device in one piece: XLA fuses the choice between old and new with the update itself."""
        changed = [*self.model.trainable_variables, *self.optimizer.variables, *self._counted()]
        with _undone_unless(lambda: bad == 0, changed):
            gradients, _, bad = self._compute_gradients(batch, tf.constant(0))
            self._update(self._finish(gradients))
        self._count(bad == 0)

    def _reduced_gradients(self, batch: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """In a replica: the gradients of the global batch, unscaled and clipped, and how many parts of it were bad."""
        replica = tf.distribute.get_replica_context()
        index = tf.convert_to_tensor(replica.replica_id_in_sync_group) if self._num_replicas > 1 else tf.constant(0)
        with _undone_unless(lambda: bad == 0, self._counted()):
            gradients, rows, bad = self._accumulate(batch, index)
            if self._num_replicas > 1:
                moving = self._moving_statistics()
                values = [tf.convert_to_tensor(variable) * tf.cast(rows, variable.dtype) for variable in moving]
                gradients, values, rows, bad = replica.all_reduce(
                    tf.distribute.ReduceOp.SUM, (gradients, values, rows, bad)
                )
                # Keras lets them drift apart; without a replica's rows its values do not count.
                for variable, value in zip(moving, values, strict=True):
                    variable.value.assign(value / tf.cast(rows, value.dtype))
        if self._is_in_parts:
            gradients = [gradient / tf.cast(rows, gradient.dtype) for gradient in gradients]
        return self._finish(gradients), bad

    def _accumulate(self, batch: Any, index: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Sums over the micro-batches of a replica: gradients times rows, rows, and those with NaN or Inf."""
        if self._accumulation_steps == 1:
            return self._gradients(batch, index)
        gradients: list[tf.Tensor] = []
        rows = bad = tf.constant(0.0)
        for part in _split(batch, self._accumulation_steps):
            more, more_rows, more_bad = self._gradients(part, index)
            gradients = [a + b for a, b in zip(gradients, more, strict=True)] if gradients else more
            rows, bad = rows + more_rows, bad + more_bad
        return gradients, rows, bad

    def _compute_gradients(self, batch: Any, index: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """In a replica: gradients (times rows where they are to be added up), rows, and 1 if there is NaN or Inf."""
        self.traces += not tf.executing_eagerly()
        rows = _num_rows(batch)
        # A whole batch has rows, a part of it may have none.
        with _undone_unless(lambda: rows > 0, self._counted() if self._is_in_parts else []):
            with self._recording(index, rows) as record:
                self.model.train_step(batch)
            self._check(record)
        self._updated = record.variables
        gradients = record.gradients
        if self._is_in_parts:
            # A replica without rows has gradients that are no numbers.
            weight = rows * self._num_replicas
            gradients = [tf.math.multiply_no_nan(g, tf.cast(weight, g.dtype)) for g in gradients]
        return gradients, rows, tf.cast(~record.is_finite() & (rows > 0), tf.float32)

    def _finish(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        if self._scales_loss:
            gradients = [gradient / tf.cast(self.loss_scale, gradient.dtype) for gradient in gradients]
        return self._clip(gradients) if self._clip else gradients

    def _update(self, gradients: list[tf.Tensor]) -> None:
        if gradients:
            self.optimizer.apply(gradients, self._updated)

    def _count(self, is_good: tf.Tensor) -> None:
        bad = tf.cast(~is_good, tf.int32)
        self.skipped_steps.assign_add(bad)
        self.bad_steps_in_a_row.assign((self.bad_steps_in_a_row + 1) * bad)
        if self._scales_loss:
            good_steps = (self.good_steps + 1) * (1 - bad)
            grows = good_steps >= LOSS_SCALE_GROWTH_STEPS
            kept = tf.where(grows, self.loss_scale * 2.0, self.loss_scale)
            self.loss_scale.assign(tf.where(is_good, kept, tf.maximum(self.loss_scale / 2.0, 1.0)))
            self.good_steps.assign(tf.where(grows, 0, good_steps))

    def _test_steps(self, batches: Iterator[Any]) -> None:
        for batch in batches:
            self._strategy.run(self._test_step, args=(batch,))

    def _test_step(self, batch: Any) -> None:
        self._local.rows = rows = _num_rows(batch)
        with _undone_unless(lambda: rows > 0, self._metric_variables()):
            self.model.test_step(batch)
        self._local.rows = None

    def _take_over(self, optimizer: keras.optimizers.Optimizer) -> None:
        """While `train_step` is traced, let the optimizer note the gradients in place of applying them."""
        apply = optimizer.apply

        def note_or_apply(grads: Any, trainable_variables: Any = None) -> None:
            record = getattr(self._local, "record", None)
            if record is None:
                apply(grads, trainable_variables)
                return
            variables = self.model.trainable_variables if trainable_variables is None else list(trainable_variables)
            pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            record.gradients = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
            record.variables = [variable for _, variable in pairs]
            record.num_updates += 1

        def note_and_scale(loss: tf.Tensor) -> tf.Tensor:
            if (record := getattr(self._local, "record", None)) is not None:
                record.losses.append(loss)
            return loss * tf.cast(self.loss_scale, loss.dtype) if self._scales_loss else loss

        optimizer.apply, optimizer.scale_loss = note_or_apply, note_and_scale
        # The gradients that reach the optimizer are reduced already; without this it would sum them a second time.
        optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars

    def _weigh_losses_of_outputs(self) -> None:
        """Let a batch count by its rows; to Keras those of dynamic shape are all alike."""

        def weighed(update: Callable[..., None]) -> Callable[..., None]:
            def update_state(values: Any, sample_weight: Any = None) -> None:
                update(values, getattr(self._local, "rows", None) if sample_weight is None else sample_weight)

            return update_state

        for metric in getattr(self.model._compile_loss, "metrics", ()):
            metric.update_state = weighed(metric.update_state)

    @contextlib.contextmanager
    def _recording(self, replica: tf.Tensor, rows: tf.Tensor) -> Iterator[_Record]:
        self._local.record, self._local.rows = (record := _Record(replica)), rows
        try:
            yield record
        finally:
            self._local.record = self._local.rows = None

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Let dropout draw other masks in every replica; replica 0 draws those of one device."""
        draw = keras.random.SeedGenerator.next

        def draw_own(generator: Any, ordered: bool = True) -> tf.Tensor:
            seed = draw(generator, ordered)
            replica = self._local.record.replica
            return seed ^ tf.cast([replica * 0x1E3779B1, tf.zeros_like(replica)], seed.dtype)

        # From outside of the replicas, whose threads may take turns within a step.
        keras.random.SeedGenerator.next = draw_own
        try:
            yield
        finally:
            keras.random.SeedGenerator.next = draw

    def _check(self, record: _Record) -> None:
        name = type(self.model).__name__
        is_alone = not self._is_in_parts and self._clip is None
        if record.num_updates > 1 or (not record.num_updates and not is_alone):
            raise ConfigError(
                f"{name}.train_step calls self.optimizer.apply {record.num_updates} times, expected once. "
                "A train_step with several optimizers of its own (a GAN's) is taken on one device, "
                "where self.optimizer is not one of them, without accumulation and clipping."
            )
        if self._scales_loss and not record.losses:
            raise ConfigError(
                f"{name}.train_step does not call self.optimizer.scale_loss(loss), without which mixed_float16 "
                "loses small gradients. Call it before the gradients are taken, or use mixed_bfloat16."
            )
        if record.num_updates and not record.gradients:
            raise ConfigError(f"{name}: the loss depends on no trainable weight. Unfreeze a layer, or mend the loss.")

    def _moving_statistics(self) -> list[Any]:
        """Batch norm's and the like: numbers that the forward pass changes, each replica by its own rows."""
        variables = self.model.non_trainable_variables
        frozen = {id(v) for layer in self.model._flatten_layers() if not layer.trainable for v in layer.weights}
        return [v for v in variables if v.dtype.startswith("float") and id(v) not in frozen]

    def _counted(self) -> list[Any]:
        """What the forward pass changes, beside random states."""
        return [*self._moving_statistics(), *self._metric_variables()]

    def _metric_variables(self) -> list[Any]:
        return list(self.model.metrics_variables)

    def _copies(self, variable: Any) -> list[Any]:
        return list(self._strategy.experimental_local_results(variable.value))


@contextlib.contextmanager
def _undone_unless(condition: Callable[[], tf.Tensor], variables: list[Any]) -> Iterator[None]:
    """Give the variables back the values from before the block, where the condition turns out false after it."""
    before = [tf.convert_to_tensor(variable) for variable in variables]
    yield
    is_kept = condition()
    for variable, old in zip(variables, before, strict=True):
        variable.assign(tf.where(is_kept, tf.convert_to_tensor(variable), old))


@contextlib.contextmanager
def _plain_refusals() -> Iterator[None]:
    """Errors of our own without the places in the code that TensorFlow puts before them."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).rpartition(f"{ConfigError.__name__}: ")[2].strip()) from None


def _plain_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise ConfigError(f"model '{model.name}' is not compiled. Call model.compile(optimizer=..., loss=...) first.")
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        # It looks at one replica alone; the engine scales and looks at all.
        model.optimizer = model.optimizer.inner_optimizer
    if model.optimizer.gradient_accumulation_steps:
        raise ConfigError(
            "The optimizer has gradient_accumulation_steps, which fails under replicas and carries a rest into the "
            "next epoch. Set train.gradient_accumulation_steps in its place."
        )
    return model.optimizer


def _own_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Those that a model has beside `model.optimizer`, as attributes or in lists and dicts among them."""
    attributes = [value for name, value in vars(model).items() if name not in ("optimizer", "_optimizer")]
    held = [
        list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else [value]
        for value in attributes
    ]
    found = [each for values in held for each in values if isinstance(each, keras.optimizers.Optimizer)]
    return [each for each in found if each is not model.optimizer]


def _build(model: keras.Model, spec: Any) -> None:
    """Create what the first batch would: weights of a subclassed model, metrics, optimizer slots."""
    try:
        model._symbolic_build(
            data_batch=tf.nest.map_structure(lambda s: keras.KerasTensor(tuple(s.shape), s.dtype.name), spec)
        )
    except (RuntimeError, ValueError):
        # A train_step of one's own need not call the model, as a GAN's does not.
        if type(model).train_step is keras.Model.train_step or not model.weights:
            raise


def _num_rows(batch: Any) -> tf.Tensor:
    # Not an integer: TensorFlow reduces those on the host, apart from the gradients.
    return tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)


def _split(batch: Any, num_parts: int) -> list[Any]:
    """Micro-batches of `ceil(rows / num_parts)` rows; the last ones may have fewer, or none."""
    rows = tf.nest.flatten(batch)[0].shape[0]
    if rows is None:
        rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    size = -(-rows // num_parts)
    return [
        tf.nest.map_structure(lambda tensor, i=i: tensor[i * size : (i + 1) * size], batch) for i in range(num_parts)
    ]


def _xla_reason(message: str) -> str:
    """The line of a TensorFlow error that says what XLA lacks; the lines around it are places in the code."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if "unsupported operations" in line or "not compilable" in line]
    return (telling or [line for line in lines if not line.endswith("error:")] or lines)[0]
