"""The step itself: data and model in, epochs with validation and checkpoints, the best weights out."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import artifacts, metrics, model_files, plugins
from components.config import ModelConfig, TrainConfig
from components.errors import ConfigError, DataError, did_you_mean
from components.examples import read_arrays
from components.preprocessing import Preprocessing
from components.train import cluster as clusters
from components.train import devices, fit, launch, objective
from components.train.augment import AugmentedBatches, image_changes
from components.train.batches import Batches, TrainBatches
from components.train.callbacks import make_callbacks
from components.train.layer_statistics import measure, write_summaries
from components.train.result import TrainResult
from components.train.team import Team
from models.spec import FeatureSpec, OutputSpec

CALLBACKS = "callbacks"
# Validation examples whose layer outputs are looked at.
_WATCHED = 256


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
        with keras_settings(config):
            run = Run(config, Preprocessing.load(transform), examples, None)
            result = run.until_done()
    else:
        with artifacts.writing(model, step="train", inputs=inputs, config=config) as out, keras_settings(config):
            run = Run(config, Preprocessing.load(transform), examples, out.scratch)
            result = out.result = run.until_done()
            run.save(out.path)
    # None leaves before the artifact is whole; after that it is no matter who is still there.
    with contextlib.suppress(tf.errors.OpError):
        run.team.meet()
    return result


@contextlib.contextmanager
def keras_settings(config: TrainConfig) -> Iterator[None]:
    """Keras with the seed and the precision of the config, and without names of models before."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.seed)
    previous_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous_policy)


class Run:
    """One training run: its data, its model, and what it writes.

    Args:
        config: How to train, and the model unless `make_model` makes it.
        preprocessing: What the examples go through.
        examples: Artifact of `ingest`.
        scratch: Folder of checkpoints, event files and what callbacks write; `None` in a worker that is not the chief.
        make_model: Gives the model for the number of steps to train, under the strategy's scope.
    """

    def __init__(
        self,
        config: TrainConfig,
        preprocessing: Preprocessing,
        examples: Path,
        scratch: Path | None,
        make_model: Callable[[int], keras.Model] | None = None,
    ) -> None:
        self.config, self.output, self._scratch = config, preprocessing.output_spec, scratch
        self._splits = {name: _read(preprocessing, examples, name) for name in ("train", "validation")}
        self._check()
        self.strategy = devices.make_strategy(config)
        self.team = Team(self.strategy)
        train_split = self._splits["train"]
        self.batches: Batches = TrainBatches(
            train_split.features,
            train_split.labels,
            objective.example_weights(train_split.labels, self.output, config.class_weights),
            batch_size=config.global_batch_size,
            seed=config.seed,
            last_batch=config.last_batch,
            part_of=self.team.part_of,
        )
        if config.augment:
            rest = len(train_split.labels) % config.global_batch_size if config.last_batch == "keep" else 0
            self.batches = AugmentedBatches(
                self.batches,
                image_changes(config.augment, preprocessing),
                seed=config.seed,
                batch_size=config.global_batch_size,
                rest=rest,
                part_of=self.team.part_of,
            )
        with self.strategy.scope():
            if make_model is None:
                self.model = build_model(config.model, preprocessing.input_spec, self.output)
            else:
                self.model = make_model(self._num_steps)
            objective.freeze(self.model, config.frozen)
            self._compile()
        self._predict = model_files.Predictor(self.model, self.output)
        if config.layer_statistics:
            objective.find_layers(self.model, config.layer_statistics, "train.layer_statistics")

    def until_done(self, callbacks: Sequence[keras.callbacks.Callback] = ()) -> TrainResult:
        """Run the epochs that are left; keep the best weights in the model.

        Args:
            callbacks: To be called after those of the configuration.
        """
        with tempfile.TemporaryDirectory() as unread:  # what callbacks of other workers than the chief write
            folder = self._scratch or Path(unread)
            fitted = fit.run(
                self.model,
                self.batches,
                strategy=self.strategy,
                config=self.config,
                validate=lambda _: self._validate(),
                callbacks=[
                    *make_callbacks(self.config.callbacks, folder / CALLBACKS, is_chief=self.team.is_chief),
                    *callbacks,
                ],
                scratch=self._scratch,
                observe=self._layer_statistics,
            )
        self._tables = {"history.json": fitted.history}
        if self.config.layer_statistics:
            self._tables["layer_statistics.json"] = fitted.observations
        return TrainResult(
            num_parameters=int(sum(np.prod(v.shape) for v in self.model.trainable_variables)),
            epochs=fitted.epochs,
            best_epoch=fitted.best_epoch,
            validation=fitted.validation,
            xla=fitted.xla,
            num_replicas=self.strategy.num_replicas_in_sync,
            skipped_steps=fitted.skipped_steps,
        )

    def save(self, directory: Path) -> None:
        """Write the model, its history, its event files and those of the callbacks."""
        model_files.save_model(self.model, directory, self.config.storage_dtype)
        for name, rows in self._tables.items():
            (directory / name).write_text(json.dumps(rows, indent=1))
        for name in artifacts.VOLATILE:
            if self._scratch and (self._scratch / name).is_dir():
                shutil.copytree(self._scratch / name, directory / name)

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

    @property
    def _num_steps(self) -> int:
        return self.config.epochs * self.batches.steps_per_epoch

    def _compile(self) -> None:
        """Give the model its loss and optimizer, where it does not come with its own."""
        if self.config.objective == "model":
            if not self.model.compiled:
                raise ConfigError(
                    f"train.objective is model, but '{self.config.model.name}' returns a model that is not compiled. "
                    "Call model.compile(...) in its builder, or use objective: config."
                )
            return
        optimizer = objective.make_optimizer(self.config, self._num_steps)
        optimizer.build(self.model.trainable_variables)
        objective.set_learning_rate_factors(optimizer, self.model, self.config.optimizer.layers)
        loss = objective.make_loss(self.output, self.config.label_smoothing)
        self.model.compile(optimizer=optimizer, loss=loss, auto_scale_loss=False)

    def _validate(self) -> dict[str, float]:
        split, num_examples = self._splits["validation"], len(self._splits["validation"].labels)
        mine = slice(*self.team.part_of(num_examples))
        answers = self._predict({name: values[mine] for name, values in split.features.items()})
        validation = metrics.compute(self.output.task, split.labels, self.team.gather(answers, num_examples))
        return {name: float(value) for name, value in self.team.say(validation).items()}

    def _layer_statistics(self, epoch: int) -> dict[str, Any] | None:
        """Of the layers' outputs for the first validation examples, if asked for; also written as event files."""
        if not self.config.layer_statistics or self._scratch is None:
            return None
        features = {name: values[:_WATCHED] for name, values in self._splits["validation"].features.items()}
        statistics = measure(self.model, self.config.layer_statistics, features)
        with tf.summary.create_file_writer(str(self._scratch / "tensorboard")).as_default():
            write_summaries(statistics, epoch)
        return {path: each.as_dict() for path, each in statistics.items()}


def build_model(config: ModelConfig, inputs: dict[str, FeatureSpec], output: OutputSpec) -> keras.Model:
    """Call the builder that `model.name` stands for.

    Raises:
        ConfigError: there is no such builder, or it refuses its arguments or inputs.
    """
    build = plugins.resolve(config.name, plugins.MODELS, "model.name")
    plugins.check_arguments(build, config.args, f"model.args of model '{config.name}'", inputs, output)
    try:
        model: Any = build(inputs, output, **config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model '{config.name}' cannot be built with model.args {config.args}: {error}") from error
    if not isinstance(model, keras.Model):
        raise ConfigError(f"model.name: '{config.name}' returned {type(model).__name__}, expected a keras.Model.")
    if tuple(model.output_shape) != (None, output.num_logits):
        raise ConfigError(
            f"model.name: '{config.name}' gives outputs of shape {model.output_shape}, expected logits of shape "
            f"(batch, {output.num_logits}) for this {output.task} task."
        )
    return model


def _read(preprocessing: Preprocessing, examples: Path, split: str) -> Split:
    raw = read_arrays(examples, split)
    return Split(preprocessing.transform_in_batches(raw), preprocessing.encode_labels(raw[preprocessing.info.label]))
