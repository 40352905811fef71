"""The step itself: data and model in, epochs with validation and checkpoints, the best weights out."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import artifacts, metrics, model_files, plugins, progress
from components.config import TrainConfig
from components.errors import ConfigError, DataError, HeadraceError, did_you_mean
from components.examples import read_arrays
from components.preprocessing import Preprocessing
from components.train import cluster as clusters
from components.train import devices, launch, objective
from components.train.batches import TrainBatches
from components.train.engine import Engine
from components.train.team import Team
from models.spec import FeatureSpec, OutputSpec


@dataclass(frozen=True)
class TrainResult:
    """What training gave.

    Attributes:
        num_parameters: Trainable parameters.
        epochs: Epochs run.
        best_epoch: The epoch, from 1, whose weights were kept.
        validation: Metrics of the validation split with these weights.
        xla: `on`, or why the step ran without it.
        num_replicas: Devices that shared each batch.
        skipped_steps: Steps left out since mixed_float16 overflowed.
    """

    num_parameters: int
    epochs: int
    best_epoch: int
    validation: dict[str, float | None]
    xla: str
    num_replicas: int
    skipped_steps: int


@dataclass
class Progress:
    """Where a run stands after a whole epoch; a checkpoint holds it as JSON."""

    epoch: int = 0
    best_epoch: int = 0
    best_value: float | None = None
    skipped_steps: int = 0
    history: list[dict[str, float | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Split:
    """A transformed split in memory."""

    features: dict[str, np.ndarray]
    labels: np.ndarray


def train(*, examples: Path, transform: Path, model: Path, config: TrainConfig) -> TrainResult:
    """Train the configured model; a killed run goes on from its last whole epoch and ends with the same weights.

    With `strategy: multi_worker` this process is one of the workers that TF_CONFIG names. Where nothing names any, it
    starts `num_workers` processes here and watches over them.

    Args:
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        model: Where the artifact is written: `model.keras`, `history.json`, and event files if asked for.
        config: Everything else.

    Raises:
        ConfigError: an unknown model, metric or impossible device setting; or XLA is `on` and cannot compile the model.
        DataError: the train split is smaller than one batch.
        HeadraceError: the loss became NaN or infinite; or the workers died too often.
    """
    cluster = clusters.from_environ() if config.strategy == "multi_worker" else None
    if config.strategy == "multi_worker" and cluster is None:
        launch.run_local(examples=examples, transform=transform, model=model, config=config)
        return TrainResult(**artifacts.read_manifest(model).result)
    devices.prepare(config)
    artifacts.open_artifact(examples, step="ingest")
    artifacts.open_artifact(transform, step="transform")
    inputs = {"examples": examples, "transform": transform}
    if cluster is not None and not cluster.is_chief:
        with _keras_settings(config):
            run = Run(config, Preprocessing.load(transform), examples, None)
            result = run.until_done()
    else:
        with artifacts.writing(model, step="train", inputs=inputs, config=config) as out, _keras_settings(config):
            run = Run(config, Preprocessing.load(transform), examples, out.scratch)
            result = out.result = run.until_done()
            run.save(out.path)
    # None leaves before the artifact is whole; after that it is no matter who is still there.
    with contextlib.suppress(tf.errors.OpError):
        run.team.meet()
    return result


@contextlib.contextmanager
def _keras_settings(config: TrainConfig) -> Iterator[None]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.seed)
    previous_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous_policy)


class Run:
    """One training run: what it holds, and the loop over epochs.

    Args:
        scratch: Folder of checkpoints and event files; `None` in a worker that is not the chief.
    """

    def __init__(self, config: TrainConfig, preprocessing: Preprocessing, examples: Path, scratch: Path | None) -> None:
        self.config, self.output = config, preprocessing.output_spec
        self._splits = {name: _read(preprocessing, examples, name) for name in ("train", "validation")}
        self._check()
        self.strategy = devices.make_strategy(config)
        self.team = Team(self.strategy)
        train_split = self._splits["train"]
        self.batches = TrainBatches(
            train_split.features,
            train_split.labels,
            objective.example_weights(train_split.labels, self.output, config.class_weights),
            batch_size=config.global_batch_size,
            seed=config.seed,
            rows=self.team.part_of(config.global_batch_size),
        )
        with self.strategy.scope():
            self.model = build_model(config, preprocessing.input_spec, self.output)
            optimizer = objective.make_optimizer(config, config.epochs * self.batches.steps_per_epoch)
        self.engine, self.xla = self._make_engine(optimizer)
        self._predict = model_files.Predictor(self.model, self.output)
        self._best = [tf.Variable(v.numpy(), trainable=False) for v in self.model.variables]
        self._state = tf.Variable("{}", trainable=False)
        self.progress = Progress()
        self._checkpoint = tf.train.Checkpoint(**self.engine.checkpoint_state(), best=self._best, state=self._state)
        self._checkpoints = scratch and tf.train.CheckpointManager(
            self._checkpoint, str(scratch / "checkpoints"), max_to_keep=2
        )
        self._events = scratch / "tensorboard" if scratch and config.tensorboard else None

    def until_done(self) -> TrainResult:
        """Run the epochs that are left; keep the best weights in the model."""
        self._restore()
        batches = self._distribute(self.progress.epoch)
        while self.progress.epoch < self.config.epochs and not self._is_out_of_patience():
            self._run_epoch(batches)
            self._save_checkpoint()
        for variable, best in zip(self.model.variables, self._best, strict=True):
            variable.assign(best)
        return TrainResult(
            num_parameters=int(sum(np.prod(v.shape) for v in self.model.trainable_variables)),
            epochs=self.progress.epoch,
            best_epoch=self.progress.best_epoch,
            validation=metrics.jsonable(self._validate()),
            xla=self.xla,
            num_replicas=self.strategy.num_replicas_in_sync,
            skipped_steps=self.progress.skipped_steps,
        )

    def save(self, directory: Path) -> None:
        """Write the model, its history and its event files."""
        model_files.save_model(self.model, directory)
        (directory / "history.json").write_text(json.dumps(self.progress.history, indent=1))
        if self._events is not None:
            shutil.copytree(self._events, directory / artifacts.VOLATILE)

    def _check(self) -> None:
        num_examples = len(self._splits["train"].labels)
        if num_examples < self.config.global_batch_size:
            raise DataError(
                f"The train split has {num_examples} examples, fewer than train.global_batch_size "
                f"({self.config.global_batch_size}). Lower it or bring more data."
            )
        stopping = self.config.early_stopping
        known = metrics.TASK_METRICS[self.output.task]
        if stopping is not None and stopping.metric not in known:
            raise ConfigError(
                f"train.early_stopping.metric: a {self.output.task} task has no '{stopping.metric}'."
                f"{did_you_mean(stopping.metric, known)}"
            )

    def _make_engine(self, optimizer: keras.optimizers.Optimizer) -> tuple[Engine, str]:
        def make(xla: bool) -> Engine:
            return Engine(
                self.model,
                optimizer,
                objective.make_loss(self.output, self.config.label_smoothing),
                strategy=self.strategy,
                global_batch_size=self.config.global_batch_size,
                xla=xla,
                scale_loss=self.config.precision == "mixed_float16",
                clip_norm=self.config.optimizer.clip_norm,
            )

        if self.config.xla == "off":
            return make(False), "off"
        engine = make(True)
        reason = engine.why_it_cannot_run(self._distribute(0))
        if reason is None:
            return engine, "on"
        if self.config.xla == "on":
            raise ConfigError(
                f"train.xla is on, but XLA cannot compile this model: {reason}. Use train.xla=auto or off."
            )
        progress.report(f"XLA cannot compile this model, going on without it: {reason}")
        return make(False), f"off: {reason}"

    def _distribute(self, start_epoch: int) -> Iterator[Any]:
        dataset = self.batches.epochs(start_epoch, self.config.epochs)
        if self.team.size > 1:  # its own rows only, for the one device of this worker
            return iter(dataset)
        return iter(self.strategy.experimental_distribute_dataset(dataset))

    def _run_epoch(self, batches: Iterator[Any]) -> None:
        epoch = self.progress.epoch
        total_loss, taken, done, steps = 0.0, 0, 0, self.batches.steps_per_epoch
        while done < steps:
            count = min(self.config.steps_per_execution, steps - done)
            outcome = self.engine.run(batches, count)
            if not math.isfinite(outcome.total_loss):
                raise _diverged(outcome.total_loss, f"in epoch {epoch + 1}, steps {done + 1} to {done + count}")
            done += count
            taken += outcome.steps
            total_loss += outcome.total_loss
            self.progress.skipped_steps += outcome.skipped_steps
        if not taken:
            raise _diverged(math.nan, f"in every step of epoch {epoch + 1}")
        self._finish_epoch(total_loss / taken)

    def _finish_epoch(self, loss: float) -> None:
        validation = self._validate()
        self.progress.epoch += 1
        entry = {
            "train_loss": loss,
            **{f"validation_{name}": value for name, value in metrics.jsonable(validation).items()},
        }
        self.progress.history.append(entry)
        stopping = self.config.early_stopping
        metric = stopping.metric if stopping else "loss"
        value, best = validation[metric], self.progress.best_value
        if stopping is None or best is None or metrics.improvement(metric, value, best) > 0:
            self.progress.best_value, self.progress.best_epoch = value, self.progress.epoch
            for kept, variable in zip(self._best, self.model.variables, strict=True):
                kept.assign(variable.numpy())
        progress.report(
            f"epoch {self.progress.epoch}/{self.config.epochs}  loss {loss:.4f}  validation {metric} {value:.4f}"
        )
        self._write_events(entry)

    def _validate(self) -> dict[str, float]:
        split, num_examples = self._splits["validation"], len(self._splits["validation"].labels)
        mine = slice(*self.team.part_of(num_examples))
        answers = self._predict({name: values[mine] for name, values in split.features.items()})
        validation = metrics.compute(self.output.task, split.labels, self.team.gather(answers, num_examples))
        return {name: float(value) for name, value in self.team.say(validation).items()}

    def _is_out_of_patience(self) -> bool:
        stopping = self.config.early_stopping
        return stopping is not None and self.progress.epoch - self.progress.best_epoch >= stopping.patience

    def _restore(self) -> None:
        """Go on from the newest checkpoint that can be read; every worker from the one that the chief took."""
        variables = [*self.engine.variables(), *self._best]
        if self._checkpoints:
            self._read_checkpoint(variables, Path(self._checkpoints.directory))
        self.progress = Progress(**self.team.say(vars(self.progress)))
        self.team.share(variables)
        self.engine.set_worker(self.team.index)
        if self.progress.epoch:
            progress.report(f"going on after epoch {self.progress.epoch} of a run that was stopped")

    def _read_checkpoint(self, variables: list[Any], folder: Path) -> None:
        untouched = [variable.numpy() for variable in variables]
        files = sorted(folder.glob("ckpt-*.index"), key=lambda file: int(file.stem.rpartition("-")[2]), reverse=True)
        for file in files:
            try:
                self._checkpoint.restore(str(file.with_suffix(""))).assert_consumed()
                self.progress = Progress(**json.loads(self._state.numpy()))
                return
            except Exception as error:  # what TensorFlow raises depends on where the file is damaged
                reason = str(getattr(error, "message", error)).partition("\n")[0]
                progress.report(f"checkpoint {file.stem} cannot be read and is passed over: {reason}")
                for variable, value in zip(variables, untouched, strict=True):
                    variable.assign(value)

    def _save_checkpoint(self) -> None:
        if self._checkpoints:
            self._state.assign(json.dumps(vars(self.progress)))
            self._checkpoints.save(checkpoint_number=self.progress.epoch)

    def _write_events(self, entry: dict[str, float | None]) -> None:
        if self._events is None:
            return
        writer = tf.summary.create_file_writer(str(self._events))
        with writer.as_default(step=self.progress.epoch):
            for name, value in entry.items():
                tf.summary.scalar(name, math.nan if value is None else value)
        writer.close()


def _diverged(loss: float, where: str) -> HeadraceError:
    return HeadraceError(
        f"The training loss became {loss} {where}. "
        "Lower train.optimizer.learning_rate, set train.optimizer.clip_norm, or look at the data."
    )


def build_model(config: TrainConfig, inputs: dict[str, FeatureSpec], output: OutputSpec) -> keras.Model:
    """Call the builder that `model.name` stands for.

    Raises:
        ConfigError: there is no such builder, or it refuses its arguments or inputs.
    """
    build = plugins.resolve(config.model.name, plugins.MODELS, "model.name")
    plugins.check_arguments(build, config.model.args, f"model.args of model '{config.model.name}'", inputs, output)
    try:
        model: Any = build(inputs, output, **config.model.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model '{config.model.name}' cannot be built with model.args {config.model.args}: {error}"
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model.name: '{config.model.name}' returned {type(model).__name__}, expected a keras.Model.")
    if tuple(model.output_shape) != (None, output.num_logits):
        raise ConfigError(
            f"model.name: '{config.model.name}' gives outputs of shape {model.output_shape}, expected logits of shape "
            f"(batch, {output.num_logits}) for this {output.task} task."
        )
    return model


def _read(preprocessing: Preprocessing, examples: Path, split: str) -> Split:
    raw = read_arrays(examples, split)
    return Split(preprocessing.transform_in_batches(raw), preprocessing.encode_labels(raw[preprocessing.info.label]))
