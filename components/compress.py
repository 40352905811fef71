"""Step `compress`: smaller TFLite forms of the model, each measured on the test split and kept only if it is good enough."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components import artifacts, formats, metrics, model_files, progress
from components.config import CompressConfig
from components.errors import ConfigError, HeadraceError, did_you_mean
from components.examples import read_arrays
from components.preprocessing import Preprocessing


@dataclass(frozen=True)
class CompressResult:
    """What became of each form.

    Attributes:
        formats: For each: `format, size_bytes, metric, value, baseline_value, drop, top1_agreement, passed, reason`.
    """

    formats: list[dict[str, Any]]


def compress(
    *, examples: Path, transform: Path, model: Path, compressed: Path, config: CompressConfig
) -> CompressResult:
    """Write the TFLite forms that pass their gate.

    Args:
        examples: Artifact of `ingest`: the train split calibrates int8, the test split judges.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        compressed: Where the artifact is written: `tflite/model_<form>.tflite`, `formats.json`, `compression.json`.
        config: The forms and their limits.

    Raises:
        ConfigError: the task has no such metric.
        HeadraceError: a form fails its gate and `on_failure` is `fail`.
    """
    for path, step in ((examples, "ingest"), (transform, "transform"), (model, "train")):
        artifacts.open_artifact(path, step=step)
    inputs = {"examples": examples, "transform": transform, "model": model}
    with artifacts.writing(compressed, step="compress", inputs=inputs, config=config) as out:
        judge = _Judge(examples, Preprocessing.load(transform), model, config)
        (out.path / "tflite").mkdir()
        kept, rows = [], []
        for name in config.formats:
            progress.report(f"converting to TFLite {name}")
            row, form = judge.convert(name, out.path)
            rows.append(row)
            kept += [form] if row["passed"] else []
        _stop_on_failure(rows, config)
        formats.write_formats(kept, out.path)
        (out.path / "compression.json").write_text(json.dumps(rows, indent=1))
        out.result = CompressResult(formats=rows)
    return out.result


class _Judge:
    """Converts a model form by form and compares each with the float32 Keras model on the test split."""

    def __init__(self, examples: Path, preprocessing: Preprocessing, model_path: Path, config: CompressConfig) -> None:
        self.config, self.task, self.output = (
            config,
            preprocessing.output_spec.task,
            formats.output_name(preprocessing.output_spec),
        )
        self.metric = config.metric or config.primary_metric
        known = metrics.TASK_METRICS[self.task]
        if self.metric not in known:
            raise ConfigError(
                f"compress.metric: a {self.task} task has no metric '{self.metric}'.{did_you_mean(self.metric, known)}"
            )
        model = model_files.load_model(model_path)
        self.core = formats.Core(preprocessing, model)
        test = read_arrays(examples, "test")
        self.labels = preprocessing.encode_labels(test[preprocessing.info.label])
        self.feed = self.core.feed(preprocessing, test)
        self.reference = model_files.Predictor(model, preprocessing.output_spec)(
            preprocessing.transform_in_batches(test)
        )
        self.reference_value = metrics.compute(self.task, self.labels, self.reference)[self.metric]
        self.calibration = self._calibration_examples(examples, preprocessing) if "int8" in config.formats else None

    def convert(self, name: str, directory: Path) -> tuple[dict[str, Any], formats.Format]:
        """Write one form and judge it; a form that fails is removed again."""
        file = directory / "tflite" / f"model_{name}.tflite"
        form = formats.Format(
            name=f"tflite_{name}",
            path=f"tflite/{file.name}",
            inputs=self.core.inputs,
            exact=False,
            min_top1_agreement=self.config.min_top1_agreement,
        )
        file.write_bytes(formats.to_tflite(self.core, name, self.calibration))
        answers = formats.answer_in_batches(formats.make_runner(form, directory, self.output), self.feed)
        row = self._row(form.name, formats.size_bytes(file), answers)
        if not row["passed"]:
            file.unlink()
        return row, form

    def _row(self, name: str, size_bytes: int, answers: np.ndarray) -> dict[str, Any]:
        value = metrics.compute(self.task, self.labels, answers)[self.metric]
        drop = metrics.improvement(self.metric, self.reference_value, value)
        agreement = metrics.top1_agreement(self.reference, answers)
        failures = []
        if not drop <= self.config.max_drop:
            failures.append(f"{self.metric} falls by {drop:.4f}, at most {self.config.max_drop} allowed")
        if agreement < self.config.min_top1_agreement:
            failures.append(
                f"answers as the Keras model does on {agreement:.4f}, at least {self.config.min_top1_agreement} wanted"
            )
        return {
            "format": name,
            "size_bytes": size_bytes,
            "metric": self.metric,
            "value": value,
            "baseline_value": self.reference_value,
            "drop": drop,
            "top1_agreement": agreement,
            "passed": not failures,
            "reason": "; ".join(failures),
        }

    def _calibration_examples(self, examples: Path, preprocessing: Preprocessing) -> dict[str, np.ndarray]:
        train = read_arrays(examples, "train")
        num_examples = len(train[preprocessing.info.label])
        count = min(self.config.num_calibration_examples, num_examples)
        rows = np.random.default_rng(self.config.seed).choice(num_examples, count, replace=False)
        return self.core.feed(preprocessing, {name: values[rows] for name, values in train.items()})


def _stop_on_failure(rows: list[dict[str, Any]], config: CompressConfig) -> None:
    failed = [f"{row['format']}: {row['reason']}" for row in rows if not row["passed"]]
    if failed and config.on_failure == "fail":
        raise HeadraceError(
            f"Compressed forms fail their gate: {'; '.join(failed)}. "
            "Raise compress.max_drop, leave the form out of compress.formats, or set compress.on_failure to omit."
        )
