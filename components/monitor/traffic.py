"""What a request log says of the served examples: their features and predictions, by window of time.

The log is read once and in any order; only the statistics of the newest windows are held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components.config import MonitorConfig
from components.errors import DataError
from components.examples import ExamplesInfo, Feature, parse
from components.monitor.quality import Labelled
from components.statistics import Statistics, StatisticsBuilder
from serving.errors import ServingError
from serving.request_log.log import LogRecord, read_records

_EXAMPLES_INPUTS = ("examples", "inputs")  # of `serve_examples`, and of `classify` and `regress`
_PROBABILITIES = ("probabilities", "scores")
_VALUES = ("value", "outputs")
_DTYPES = {"int": np.int64, "float": np.float32, "string": object, "uint8": np.uint8}
_BATCH_ROWS = 2048
# So that many windows fit into memory; a rank is still off by less than 0.001.
_BOUNDS = {"max_top_values": 1000, "num_quantiles": 100, "max_exact_values": 20_000}
# The only window of a log that is not divided is read as exactly as the train split.
_WIDE_BOUNDS = {"max_top_values": 100_000, "num_quantiles": 1000}


class Window:
    """The examples of a span of time.

    Attributes:
        start_seconds: Where it begins, Unix time; None for the whole log.
        num_requests: Calls in it.
        num_examples: Examples in them.
        version: The newest version that answered; `predictions` are its.
        features: Statistics of the raw features, once finished.
        predictions: Statistics of the predictions, once finished.
    """

    def __init__(
        self, start_seconds: float | None, info: ExamplesInfo, text_features: Sequence[str], task: str
    ) -> None:
        self.start_seconds = start_seconds
        self.num_requests = self.num_examples = self.version = 0
        self.features: Statistics = {}
        self.predictions: Statistics = {}
        bounds: dict[str, Any] = _WIDE_BOUNDS if start_seconds is None else _BOUNDS
        self._features = _Batcher(StatisticsBuilder(info, text_features=text_features, **bounds))
        self._task, self._bounds = task, bounds
        self._predictions = self._new_predictions()

    def _new_predictions(self) -> _Batcher:
        return _Batcher(predictions_builder(self._task, **self._bounds))

    def add(self, version: int, features: Mapping[str, np.ndarray], predictions: Mapping[str, np.ndarray]) -> None:
        """Add one call."""
        self.num_requests += 1
        if features:
            self.num_examples += len(next(iter(features.values())))
        # Images are large, and there is no distance of them.
        if small := {name: values for name, values in features.items() if values.dtype != np.uint8}:
            self._features.add(small)
        if version > self.version:
            # Another model answers in another way; that is no drift.
            self.version, self._predictions = version, self._new_predictions()
        if version == self.version and predictions:
            self._predictions.add(predictions)

    def finish(self) -> None:
        """Compute the statistics."""
        self.features, self.predictions = self._features.finish(), self._predictions.finish()
        del self._features, self._predictions


class _Batcher:
    """Hands rows to a builder of statistics many at a time, which is much faster than one by one."""

    def __init__(self, builder: StatisticsBuilder) -> None:
        self._builder = builder
        self._waiting: list[Mapping[str, np.ndarray]] = []
        self._rows = 0

    def add(self, batch: Mapping[str, np.ndarray]) -> None:
        self._waiting.append(batch)
        self._rows += len(next(iter(batch.values())))
        if self._rows >= _BATCH_ROWS:
            self._flush()

    def finish(self) -> Statistics:
        self._flush()
        return self._builder.finish()

    def _flush(self) -> None:
        names = {name for batch in self._waiting for name in batch}
        self._builder.update(
            {name: np.concatenate([batch[name] for batch in self._waiting if name in batch]) for name in names}
        )
        self._waiting, self._rows = [], 0


class Traffic:
    """A log, read.

    Args:
        log: A file, folder or glob.
        train: Statistics of the train split, without the label.
        classes: Names of the classes; empty for regression.
        config: Which calls, and the windows.
        labelled: Is given every call whose answers are known.
        now_seconds: Unix time, from which windows are counted back.

    Attributes:
        windows: Those with a call, oldest first.
        num_requests: Calls in all of them.
        num_examples: Examples in all of them.

    Raises:
        DataError: there is no log, it is damaged, its records have no times where windows are asked for, or its calls
            hold none of the trained features, or other types or shapes of them.
    """

    def __init__(
        self,
        log: Path | str,
        train: Statistics,
        classes: Sequence[str | int],
        config: MonitorConfig,
        labelled: Labelled,
        now_seconds: float,
    ) -> None:
        self._info = _info_of(train)
        self._texts = [name for name, feature in train.items() if feature.num_tokens is not None]
        self._config = config
        found: dict[int, Window] = {}
        seconds = config.window_seconds
        since = 0.0 if seconds is None else (math.floor(now_seconds / seconds) - config.num_windows + 1) * seconds
        for record in _records(log, since):
            if config.model_name in (None, record.model_name):
                window = self._window_of(record, found, log)
                features = self._features_of(record, log)
                answers = answers_of(record.outputs, config.task, len(classes))
                window.add(record.version, features, {} if answers is None else predictions_of(answers, classes))
                if answers is not None:
                    labelled.add(record, features, answers)
        self.windows = [found[number] for number in sorted(found)]
        for window in self.windows:
            window.finish()
        self.num_requests = sum(window.num_requests for window in self.windows)
        self.num_examples = sum(window.num_examples for window in self.windows)
        if self.num_requests and not self.num_examples:
            raise DataError(
                f"monitor.request_log: none of the {self.num_requests} requests in {log} holds a feature of the train "
                f"split ({', '.join(sorted(train))}). Give the log of this model."
            )

    def _features_of(self, record: LogRecord, log: Path | str) -> dict[str, np.ndarray]:
        try:
            return _raw_features(record.inputs, self._info)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            raise DataError(
                f"monitor.request_log: a request to model {record.model_name} in {log} does not fit the train split: "
                f"{error}. If it is of another model, name yours in monitor.model_name."
            ) from error

    def _window_of(self, record: LogRecord, found: dict[int, Window], log: Path | str) -> Window:
        seconds, number = self._config.window_seconds, 0
        if seconds is not None:
            if not record.time_seconds:
                raise DataError(
                    f"monitor.window_seconds: the records of {log} do not say when they were made. Leave it out, or "
                    "give a log of headrace's server."
                )
            number = math.floor(record.time_seconds / seconds)
        if number not in found:
            start = None if seconds is None else number * seconds
            found[number] = Window(start, self._info, self._texts, self._config.task)
        return found[number]


def predictions_builder(task: str, **bounds: Any) -> StatisticsBuilder:
    """Takes what `predictions_of` gives."""
    features = {"predicted_value": Feature("float")}
    if task != "regression":
        features = {"predicted_label": Feature("string"), "predicted_score": Feature("float")}
    return StatisticsBuilder(_as_info(features), text_features=[], **bounds)


def answers_of(outputs: Mapping[str, np.ndarray], task: str, num_classes: int) -> np.ndarray | None:
    """What a call answered, by whichever of our signatures, as `metrics.compute` takes it.

    Returns:
        Probabilities `(batch, num_classes)` or values `(batch,)`; None if the client asked for other outputs only.
    """
    for name in _VALUES if task == "regression" else _PROBABILITIES:
        if name in outputs and (task == "regression" or outputs[name].shape[1:] == (num_classes,)):
            return outputs[name].reshape(-1) if task == "regression" else outputs[name]
    return None


def predictions_of(answers: np.ndarray, classes: Sequence[str | int]) -> dict[str, np.ndarray]:
    """Answers as features: `predicted_value`, or `predicted_label` and `predicted_score`.

    The score is the probability of the second of two classes, else the largest one.
    """
    if answers.ndim == 1:
        return {"predicted_value": answers.astype(np.float32)}
    names = np.array([str(name).encode() for name in classes], object)
    scores = answers[:, 1] if len(classes) == 2 else answers.max(axis=1)
    return {"predicted_label": names[answers.argmax(axis=1)], "predicted_score": scores.astype(np.float32)}


def _records(log: Path | str, since_seconds: float) -> Iterator[LogRecord]:
    try:
        yield from read_records(log, since_seconds=since_seconds)
    except FileNotFoundError as error:
        raise DataError(
            f"monitor.request_log: there is no file {log}. Start the server with --request_log_file, send requests, "
            "and name that file."
        ) from error
    except (OSError, ServingError) as error:
        raise DataError(f"monitor.request_log: {log} cannot be read: {error}. Give another log.") from error


def _info_of(train: Statistics) -> ExamplesInfo:
    return _as_info({name: Feature(feature.type, feature.shape) for name, feature in train.items()})


def _as_info(features: dict[str, Feature]) -> ExamplesInfo:
    return ExamplesInfo(features=features, label="", task="regression", classes=None, num_examples={})


def _raw_features(inputs: Mapping[str, np.ndarray], info: ExamplesInfo) -> dict[str, np.ndarray]:
    """The trained features of one call, as `examples.read_arrays` would give them."""
    (only, *others) = inputs or [""]
    if only in _EXAMPLES_INPUTS and not others and only not in info.features:
        parsed = parse(tf.constant(inputs[only].ravel(), tf.string), info, with_label=False)
        inputs = {name: tensor.numpy() for name, tensor in parsed.items()}
    return {
        name: values.astype(_DTYPES[feature.type]).reshape(-1, *feature.shape)
        for name, feature in info.features.items()
        if (values := inputs.get(name)) is not None
    }
