"""The epochs of a run: callbacks, validation, early stopping, checkpoints, and the end of a run that diverges."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import metrics, progress
from components.config import TrainConfig
from components.errors import ConfigError, HeadraceError, did_you_mean
from components.train import callbacks as callback_states
from components.train.batches import Batches
from components.train.checkpoints import Checkpoints
from components.train.cluster import PeerError
from components.train.diagnosis import first_non_finite
from components.train.engine import Engine
from components.train.preemption import Preemption
from components.train.team import Team


@dataclass
class Progress:
    """Where a run stands; a checkpoint holds it as JSON."""

    step: int = 0
    epoch: int = 0
    best_epoch: int = 0
    best_value: float | None = None
    skipped_before: int = 0
    is_stopped: bool = False
    history: list[dict[str, float | None]] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)


class Loop:
    """Trains a model for the epochs that are left.

    Args:
        engine: The compiled step.
        batches: What it trains on.
        distribute: Makes of a dataset what the strategy iterates over.
        validate: Metrics of the validation data, the same in every worker.
        config: Epochs, early stopping, checkpoints, limits.
        team: The workers.
        callbacks: Of Keras.
        scratch: Folder of checkpoints and event files; `None` in a worker that is not the chief.
        observe: Called after each epoch with its number, from 1, while the weights that were validated are in the
            model; what it returns, JSON-able, is kept.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        *,
        distribute: Callable[[tf.data.Dataset], Any],
        validate: Callable[[], dict[str, float]],
        config: TrainConfig,
        team: Team,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        scratch: Path | None = None,
        observe: Callable[[int], Any] = lambda _: None,
    ) -> None:
        self.engine, self.model, self.progress = engine, engine.model, Progress()
        self._batches, self._distribute, self._validate = batches, distribute, validate
        self._config, self._team, self._observe = config, team, observe
        self._callbacks = list(callbacks)
        self._hooks = keras.callbacks.CallbackList(
            self._callbacks, model=self.model, epochs=config.epochs, steps=batches.steps_per_epoch, verbose=0
        )
        self._wants_batches = any(_has_batch_hooks(callback) for callback in callbacks)
        # Keras's own callback does the same by sums, which lose the last digits.
        swaps = any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks)
        self._swaps_averages = bool(engine.optimizer.use_ema) and config.ema_decay is not None and not swaps
        self._best = [tf.Variable(v.numpy(), trainable=False) for v in self.model.variables if config.early_stopping]
        self._checkpoints = Checkpoints(engine, self._best, scratch and scratch / "checkpoints")
        self._events = scratch / "tensorboard" if scratch and config.tensorboard else None

    def until_done(self) -> dict[str, float]:
        """Run the epochs that are left and leave the kept weights in the model.

        Returns:
            The validation metrics of these weights.

        Raises:
            HeadraceError: the run went to NaN or Inf; it names the first bad step and where the NaN arose.
            PeerError: another worker was told to stop; everything is saved.
        """
        with Preemption() as preemption:
            self._begin()
            batches = iter(self._distribute(self._batches.from_step(self.progress.step)))
            while self.progress.epoch < self._config.epochs and not self.progress.is_stopped:
                self._run_epoch(batches, preemption)
            if self.skipped_steps == self.progress.step:
                self._raise_diverged(self.skipped_steps)
            self._hooks.on_train_end()
        if self._best:
            for variable, best in zip(self.model.variables, self._best, strict=True):
                variable.assign(best)
        elif self.engine.optimizer.use_ema:
            self.engine.optimizer.finalize_variable_values(self.model.trainable_variables)
        return self._validate()

    @property
    def skipped_steps(self) -> int:
        """Steps left out in the whole run, since they held NaN or Inf."""
        return int(self.engine.skipped_steps.numpy())

    def _begin(self) -> None:
        """Go on from the newest checkpoint that can be read; every worker from the one that the chief took."""
        saved = self._team.say(self._checkpoints.restore())
        self._team.share([*self.engine.variables(), *self._best])
        self.model.stop_training = False
        if saved is None:
            self._hooks.on_train_begin()
            return
        self.progress = Progress(**saved["progress"])
        self.engine.set_local_state(np.array(saved["metrics"][self._team.index]))
        for callback in self._callbacks:
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True
        self._hooks.on_train_begin()
        callback_states.restore_state(self._callbacks, saved["callbacks"][self._team.index])
        done = self.progress.step % self._batches.steps_per_epoch
        place = f"step {done} of epoch {self.progress.epoch + 1}" if done else f"epoch {self.progress.epoch}"
        progress.report(f"going on after {place} of a run that was stopped")

    def _save(self) -> None:
        state = {
            "progress": vars(self.progress),
            "metrics": self._team.hear(self.engine.local_state().tolist()),
            "callbacks": self._team.hear(callback_states.state_of(self._callbacks)),
        }
        self._checkpoints.save(self.progress.step, state)

    def _run_epoch(self, batches: Iterator[Any], preemption: Preemption) -> None:
        steps = self._batches.steps_per_epoch
        done = self.progress.step % steps
        if not done:
            self.model.reset_metrics()
            self.progress.skipped_before = self.skipped_steps
            self._hooks.on_epoch_begin(self.progress.epoch)
        while done < steps and not self.progress.is_stopped:
            count = self._steps_until_a_stop(done)
            self._hooks.on_train_batch_begin(done)
            self.engine.run(batches, count)
            done += count
            self.progress.step += count
            if self._wants_batches:
                self._hooks.on_train_batch_end(done - 1, self._team.say(self.engine.metrics()))
                self.progress.is_stopped = self._team.any(self.model.stop_training)
            self._stop_if_diverged()
            if done == steps or self.progress.is_stopped:
                break
            leaves, every = self._team.any(preemption.is_asked_for), self._config.checkpoint_steps
            if leaves or (every is not None and self.progress.step % every == 0):
                self._save()
            if leaves:
                self._leave(preemption, f"step {done} of epoch {self.progress.epoch + 1}")
        self._finish_epoch(done)
        self._save()
        if self._team.any(preemption.is_asked_for):
            self._leave(preemption, f"epoch {self.progress.epoch}")

    def _steps_until_a_stop(self, done: int) -> int:
        """Steps for one call of the compiled loop: a checkpoint or the end of the epoch cuts it short."""
        left = self._batches.steps_per_epoch - done
        if (every := self._config.checkpoint_steps) is not None:
            left = min(left, every - self.progress.step % every)
        return min(left, self._config.steps_per_execution)

    def _leave(self, preemption: Preemption, place: str) -> None:
        """SIGTERM has come, here or to another worker, and everything is saved: leave together."""
        progress.report(f"told to stop: saved after {place}")
        self._team.meet()
        if preemption.is_asked_for:
            preemption.leave()
        raise PeerError("Another worker was told to stop. Everything is saved: start all again to go on from there.")

    def _finish_epoch(self, num_steps: int) -> None:
        trained, skipped = self._team.say(self.engine.metrics()), self.skipped_steps - self.progress.skipped_before
        if skipped == num_steps:  # metrics of nothing are zero
            trained = dict.fromkeys(trained, math.nan)
        with self._validated_weights():
            validation = self._validate()
            self.progress.epoch += 1
            self._keep_if_best(validation)
            self.progress.observations.append(self._observe(self.progress.epoch))
        entry = {f"train_{name}": value for name, value in metrics.jsonable(trained).items()}
        entry |= {f"validation_{name}": value for name, value in metrics.jsonable(validation).items()}
        self.progress.history.append(entry)
        self._hooks.on_epoch_end(
            self.progress.epoch - 1, {**trained, **{f"val_{name}": value for name, value in validation.items()}}
        )
        self.progress.is_stopped |= self._is_out_of_patience() or self._team.any(self.model.stop_training)
        self._report_epoch(trained, validation, skipped)
        self._write_events(entry)

    @contextlib.contextmanager
    def _validated_weights(self) -> Iterator[None]:
        """Averaged weights in the model, if there are any."""
        optimizer = self.engine.optimizer
        pairs = (
            list(zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True))
            if self._swaps_averages
            else []
        )
        _swap(pairs)
        self._hooks.on_test_begin()
        yield
        self._hooks.on_test_end()
        _swap(pairs)

    def _keep_if_best(self, validation: dict[str, float]) -> None:
        stopping, best = self._config.early_stopping, self.progress.best_value
        if stopping is None:
            self.progress.best_epoch = self.progress.epoch
            return
        if stopping.metric not in validation:
            raise ConfigError(
                f"train.early_stopping.metric: validation gives no '{stopping.metric}'."
                f"{did_you_mean(stopping.metric, validation) if validation else ' There is no validation data.'}"
            )
        if stopping.metric not in metrics.HIGHER_IS_BETTER:
            raise ConfigError(
                f"train.early_stopping.metric: nobody knows whether more of '{stopping.metric}' is better. Use the "
                "callback EarlyStopping, which has a mode."
            )
        value = validation[stopping.metric]
        if best is None or math.isnan(best) or metrics.improvement(stopping.metric, value, best) > 0:
            self.progress.best_value, self.progress.best_epoch = value, self.progress.epoch
            for kept, variable in zip(self._best, self.model.variables, strict=True):
                kept.assign(variable.numpy())

    def _is_out_of_patience(self) -> bool:
        stopping = self._config.early_stopping
        return stopping is not None and self.progress.epoch - self.progress.best_epoch >= stopping.patience

    def _stop_if_diverged(self) -> None:
        bad = int(self.engine.bad_steps_in_a_row.numpy())
        # A loss scale that is still falling may yet end the row.
        if bad >= self._config.max_bad_steps and float(self.engine.loss_scale.numpy()) <= 1.0:
            self._raise_diverged(bad)

    def _raise_diverged(self, num_bad: int) -> None:
        step = self.progress.step - num_bad
        batch = next(iter(self._batches.from_step(step)))
        finding = first_non_finite(self.model, batch, loss_scale=float(self.engine.loss_scale.numpy()))
        found = [text for text in self._team.hear(finding and str(finding)) if text]
        epoch, step_in_epoch = divmod(step, self._batches.steps_per_epoch)
        raise HeadraceError(
            f"Training went to NaN or Inf at step {step_in_epoch + 1} of epoch {epoch + 1} and stayed there for "
            f"{num_bad} steps: {found[0] if found else 'not so when it is computed again, op by op'}. "
            "Lower train.optimizer.learning_rate, set train.optimizer.clip_norm, or look at the data."
        )

    def _report_epoch(self, trained: dict[str, float], validation: dict[str, float], skipped: int) -> None:
        stopping = self._config.early_stopping
        metric = stopping.metric if stopping else "loss"
        parts = [f"epoch {self.progress.epoch}/{self._config.epochs}"]
        parts += [f"loss {trained['loss']:.4f}"] if "loss" in trained else []
        parts += [f"validation {metric} {validation[metric]:.4f}"] if metric in validation else []
        parts += [f"{skipped} steps skipped"] if skipped else []
        progress.report("  ".join(parts))

    def _write_events(self, entry: dict[str, float | None]) -> None:
        if self._events is None:
            return
        writer = tf.summary.create_file_writer(str(self._events))
        with writer.as_default(step=self.progress.epoch):
            for name, value in entry.items():
                tf.summary.scalar(name, math.nan if value is None else value)
        writer.close()


def _swap(pairs: Sequence[tuple[Any, Any]]) -> None:
    for one, other in pairs:
        value = one.numpy()
        one.assign(other.numpy())
        other.assign(value)


def _has_batch_hooks(callback: keras.callbacks.Callback) -> bool:
    base = keras.callbacks.Callback
    # Of the object, not of its class: a LambdaCallback holds its functions itself.
    hooks = [(getattr(callback, name), getattr(base, name)) for name in ("on_batch_end", "on_train_batch_end")]
    return any(getattr(hook, "__func__", None) is not default for hook, default in hooks)
