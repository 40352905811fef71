"""The test split and what the Keras model answers on it: what every form is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from components import formats, metrics
from components.examples import count, read_batches, shard_files
from components.formats import Arrays
from components.model_files import Predictor
from components.preprocessing import Preprocessing

BATCH_SIZE = 256


class HeldOut:
    """The test split, read batch by batch for each form: only labels and answers are held in memory.

    Args:
        examples: Artifact of `ingest`.
        preprocessing: What `transform` fitted.
        model: The Keras model.
        metric: The metric by which forms are judged.
        sample_size: Examples to keep.
        seed: Which ones.

    Attributes:
        metric: Its name.
        output: Name of the numeric output.
        answers: The Keras model's, `(num_examples, num_classes)`, or `(num_examples,)` for regression.
        value: The Keras model's metric; NaN where it is not defined.
        calibration_error: The Keras model's; None for regression.
        sample: Raw features by name, `(sample_size, ...)`: of rows from all over the split, since rows in the order of
            the source are alike where it is sorted.
        sample_rows: Which rows they are.
    """

    def __init__(
        self,
        examples: Path,
        preprocessing: Preprocessing,
        model: keras.Model,
        *,
        metric: str,
        sample_size: int,
        seed: int,
    ) -> None:
        self.metric, self._examples, self._preprocessing = metric, examples, preprocessing
        self.output = formats.output_name(preprocessing.output_spec)
        order = np.random.default_rng(seed).permutation(count(examples, "test"))
        self.sample_rows = np.sort(order[:sample_size])
        predict = Predictor(model, preprocessing.output_spec, BATCH_SIZE)
        labels, answers, sample, start = [], [], [], 0
        for batch in read_batches(examples, "test", batch_size=BATCH_SIZE):
            labels.append(batch[preprocessing.info.label])
            raw = self._raw(batch)
            answers.append(predict(preprocessing.transform_in_batches(raw)))
            end = start + len(labels[-1])
            chosen = self.sample_rows[(self.sample_rows >= start) & (self.sample_rows < end)] - start
            sample.append({name: values[chosen] for name, values in raw.items()})
            start = end
        self._labels = preprocessing.encode_labels(np.concatenate(labels))
        self.answers = np.concatenate(answers)
        self.sample = {name: np.concatenate([part[name] for part in sample]) for name in preprocessing.raw_inputs}
        self.value, self.calibration_error = self._quality(self.answers)

    def feed(self, inputs: str, raw: Arrays) -> Arrays:
        """Raw features as a form with these `inputs` takes them."""
        return raw if inputs == "raw" else self._preprocessing.transform_in_batches(raw)

    def ask(self, run: formats.Runner, inputs: str) -> np.ndarray:
        """The answers of a form on the whole split."""
        batches = read_batches(self._examples, "test", batch_size=BATCH_SIZE)
        feeds = (self.feed(inputs, self._raw(batch)) for batch in batches)
        return np.concatenate([formats.answer_in_batches(run, feed, BATCH_SIZE) for feed in feeds])

    def serialized(self) -> Iterator[tf.Tensor]:
        """The split as serialized `tf.Example`, `(batch,)` of bytes at a time."""
        return iter(
            tf.data.TFRecordDataset([str(file) for file in shard_files(self._examples, "test")]).batch(BATCH_SIZE)
        )

    def compare(self, answers: np.ndarray) -> dict[str, Any]:
        """How far answers on the whole split are from the Keras model's, and what that costs.

        Returns:
            `num_examples, value, drop, calibration_error, calibration_error_increase, max_abs_difference, top1_agreement`;
            None for what is not defined. With answers that are no numbers, `num_examples` and the `reason` alone.
        """
        row = self.differences(answers)
        if "reason" in row:
            return row
        value, calibration_error = self._quality(answers)
        increase = None if self.calibration_error is None else (calibration_error or 0.0) - self.calibration_error
        measured = {"value": value, "drop": metrics.improvement(self.metric, self.value, value)}
        return {
            **row,
            **metrics.jsonable(measured),
            "calibration_error": calibration_error,
            "calibration_error_increase": increase,
        }

    def differences(self, answers: np.ndarray, rows: np.ndarray | None = None) -> dict[str, Any]:
        """How far answers are from the Keras model's on all rows of the split, or on some.

        Returns:
            `num_examples, max_abs_difference, top1_agreement`, or `num_examples` and the `reason` why there are none.
        """
        reference = self.answers if rows is None else self.answers[rows]
        num_examples = len(answers)
        if answers.shape != reference.shape:
            return {
                "num_examples": num_examples,
                "reason": f"answers have shape {answers.shape}, the Keras model's {reference.shape}",
            }
        if broken := num_examples - int(np.isfinite(answers.reshape(num_examples, -1)).all(axis=1).sum()):
            return {"num_examples": num_examples, "reason": f"{broken} answers are NaN or infinite"}
        # Values of a regression are compared on the scale of their own spread, probabilities as they are.
        scale = max(float(self.answers.std()), 1e-12) if self.answers.ndim == 1 else 1.0
        measured = {
            "max_abs_difference": float(np.abs(reference - answers).max()) / scale,
            "top1_agreement": metrics.top1_agreement(reference, answers),
        }
        return {"num_examples": num_examples, **metrics.jsonable(measured)}

    def _raw(self, batch: Arrays) -> dict[str, np.ndarray]:
        return {name: batch[name] for name in self._preprocessing.raw_inputs}

    def _quality(self, answers: np.ndarray) -> tuple[float, float | None]:
        task = self._preprocessing.output_spec.task
        value = metrics.compute(task, self._labels, answers)[self.metric]
        return value, None if task == "regression" else metrics.calibration_error(self._labels, answers)
