"""Step `evaluate`: metrics by split and slice, and the gate: is this model good enough to be served?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from components import artifacts, metrics, model_files, object_store
from components.config import EvaluateConfig, Threshold
from components.errors import ConfigError, HeadraceError, did_you_mean
from components.examples import MISSING_INT, check_slices, read_arrays
from components.external import PUSH_RECORD, find_champion
from components.preprocessing import Preprocessing

Metrics = dict[str, float]
SPLITS = ("train", "validation", "test")
FILE = "evaluation.json"
_MOST_CLASSES = 50


@dataclass(frozen=True)
class EvaluateResult:
    """What the gate saw and decided.

    Attributes:
        metrics: Split -> metric -> value; None where a metric is not defined.
        slices: The test split by the values of a feature: `feature, value, num_examples, metrics, baseline`; the worst by
            `primary_metric` first.
        baseline: The test split's metrics of always answering with the train split's class shares.
        champion: The newest other pushed version, its test metrics; None if there is none.
        blessed: Whether every check passed.
        reasons: One line a check, `passed: ...` or `failed: ...`.
        primary_metric: The metric of the first threshold.
        confusion_matrix: The test split's: `classes`, and `rows` of them by answers; None for regression and where there
            are too many classes to look at.
        roc_curve: The test split's, as `metrics.roc_curve` gives it; None for regression.
    """

    metrics: dict[str, dict[str, float | None]]
    slices: list[dict[str, Any]]
    baseline: dict[str, float | None]
    champion: dict[str, Any] | None
    blessed: bool
    reasons: list[str]
    primary_metric: str
    confusion_matrix: dict[str, Any] | None = None
    roc_curve: list[tuple[float, float, float]] | None = None


def evaluate(
    *, examples: Path, transform: Path, model: Path, evaluation: Path, config: EvaluateConfig
) -> EvaluateResult:
    """Measure the model and decide. A model that fails is a result, not an error: `blessed` says so.

    Args:
        examples: Artifact of `ingest`.
        transform: Artifact of `transform`.
        model: Artifact of `train`.
        evaluation: Where the artifact is written: `evaluation.json`.
        config: Slices, thresholds and the comparison with the champion.

    Raises:
        ConfigError: a metric or slice feature that does not exist.
        HeadraceError: the champion cannot be asked the same questions.
    """
    for path, step in ((examples, "ingest"), (transform, "transform"), (model, "train")):
        artifacts.open_artifact(path, step=step)
    inputs = {"examples": examples, "transform": transform, "model": model}
    with artifacts.writing(evaluation, step="evaluate", inputs=inputs, config=config) as out:
        preprocessing = Preprocessing.load(transform)
        _check_config(config, preprocessing)
        out.result = _Evaluation(examples, preprocessing, model, config).result()
        (out.path / FILE).write_text(json.dumps(asdict(out.result), indent=1))
    return out.result


class _Evaluation:
    """One evaluation: the splits, the model's answers, and the checks made of them."""

    def __init__(self, examples: Path, preprocessing: Preprocessing, model: Path, config: EvaluateConfig) -> None:
        self.config, self.preprocessing, self._model_path = config, preprocessing, model
        self.task = preprocessing.output_spec.task
        predict = model_files.Predictor(model_files.load_model(model), preprocessing.output_spec, config.batch_size)
        self.raw = {split: read_arrays(examples, split) for split in SPLITS}
        self.labels = {
            split: preprocessing.encode_labels(raw[preprocessing.info.label]) for split, raw in self.raw.items()
        }
        self.answers = {split: predict(preprocessing.transform_in_batches(raw)) for split, raw in self.raw.items()}

    def result(self) -> EvaluateResult:
        by_split = {split: metrics.compute(self.task, self.labels[split], self.answers[split]) for split in SPLITS}
        baseline = self._baseline(self.labels["test"])
        primary = self.config.thresholds[0].metric
        slices = sorted(self._slices(), key=lambda piece: _worst_first(primary, piece["metrics"][primary]))
        champion = self._champion()
        reasons = [
            line
            for threshold in self.config.thresholds
            for line in self._check(threshold, by_split["test"], baseline, slices)
        ]
        reasons += self._compare(by_split["test"], champion)
        return EvaluateResult(
            metrics={split: metrics.jsonable(values) for split, values in by_split.items()},
            slices=[
                {**piece, **{name: metrics.jsonable(piece[name]) for name in ("metrics", "baseline")}}
                for piece in slices
            ],
            baseline=metrics.jsonable(baseline),
            champion=champion,
            blessed=all(reason.startswith("passed") for reason in reasons),
            reasons=reasons,
            primary_metric=primary,
            **self._curves(),
        )

    def _curves(self) -> dict[str, Any]:
        """What is drawn of a classification."""
        if self.task == "regression":
            return {}
        labels, answers = self.labels["test"], self.answers["test"]
        curves: dict[str, Any] = {"roc_curve": metrics.roc_curve(labels, answers)}
        if answers.shape[1] <= _MOST_CLASSES:
            names = [str(name) for name in self.preprocessing.classes]
            rows = metrics.confusion_matrix(labels, answers)
            curves["confusion_matrix"] = {"classes": names, "rows": rows}
        return curves

    def _slices(self) -> Iterator[dict[str, Any]]:
        for feature in self.config.slices:
            values = self.raw["test"][feature]
            for value in np.unique(values):
                rows = values == value
                yield {
                    "feature": feature,
                    "value": self._name(feature, value),
                    "num_examples": int(rows.sum()),
                    "metrics": metrics.compute(self.task, self.labels["test"][rows], self.answers["test"][rows]),
                    "baseline": self._baseline(self.labels["test"][rows]),
                }

    def _baseline(self, labels: np.ndarray) -> Metrics:
        return metrics.baseline(self.task, self.labels["train"], labels, max(len(self.preprocessing.classes), 1))

    def _name(self, feature: str, value: Any) -> str:
        info = self.preprocessing.info
        if feature == info.label and info.classes and not isinstance(value, bytes):
            return info.classes[value]
        return _readable(value)

    def _check(
        self, threshold: Threshold, test: Metrics, baseline: Metrics, slices: list[dict[str, Any]]
    ) -> Iterator[str]:
        metric = threshold.metric
        yield from _check_bounds("test", threshold, test[metric], baseline[metric])
        for piece in slices if threshold.slices else []:
            if piece["num_examples"] >= self.config.min_slice_examples:
                where = f"test[{piece['feature']}={piece['value']}]"
                yield from _check_bounds(where, threshold, piece["metrics"][metric], piece["baseline"][metric])

    def _champion(self) -> dict[str, Any] | None:
        if self.config.champion is None:
            return None
        digest = artifacts.read_manifest(self._model_path).digest
        with object_store.base_path(self.config.champion_path) as base:
            path = find_champion(base, other_than=digest, manifests=self.config.manifests)
            if path is None:
                return None
            answers = ask_saved_model(path, self.raw["test"], self.preprocessing)
        values = metrics.compute(self.task, self.labels["test"], answers)
        return {"version": path.name, "metrics": metrics.jsonable(values)}

    def _compare(self, test: Metrics, champion: Mapping[str, Any] | None) -> Iterator[str]:
        if self.config.champion is None:
            return
        metric, least = self.config.champion.metric, self.config.champion.min_improvement
        if champion is None:
            yield "passed: there is no champion to compare with"
            return
        reference = champion["metrics"][metric]
        gain = metrics.improvement(metric, test[metric], math.nan if reference is None else reference)
        verdict = "passed" if gain >= least else "failed"
        yield (
            f"{verdict}: test {metric} {test[metric]:.4f} against {reference} of champion version {champion['version']}: "
            f"improvement {gain:+.4f}, asked for {least:+.4f}"
        )


def ask_saved_model(
    path: Path, raw: Mapping[str, np.ndarray], preprocessing: Preprocessing, batch_size: int = 1024
) -> np.ndarray:
    """The answers of a pushed version to raw features, as `Predictor` gives them.

    Raises:
        HeadraceError: it needs other features or answers with other classes.
    """
    record = path / PUSH_RECORD
    classes = json.loads(record.read_text())["classes"] if record.is_file() else preprocessing.classes
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    wanted = signature.structured_input_signature[1]
    absent = sorted(set(wanted) - set(raw))
    if absent or classes != preprocessing.classes:
        difference = f"it needs the features {absent}" if absent else f"its classes are {classes}"
        raise HeadraceError(
            f"The champion {path} cannot be compared on this data: {difference}. "
            "Set evaluate.champion to null, or push under another name."
        )
    output = "value" if preprocessing.output_spec.task == "regression" else "probabilities"
    answers = [
        signature(
            **{name: tf.constant(raw[name][start : start + batch_size], spec.dtype) for name, spec in wanted.items()}
        )
        for start in range(0, len(next(iter(raw.values()))), batch_size)
    ]
    return np.concatenate([answer[output].numpy() for answer in answers])


def _check_bounds(where: str, threshold: Threshold, value: float, baseline: float) -> Iterator[str]:
    metric = threshold.metric
    if math.isnan(value):
        yield f"failed: {where} {metric} is not defined (all labels are alike)"
        return
    if threshold.min is not None:
        yield f"{_verdict(value >= threshold.min)}: {where} {metric} {value:.4f}, at least {threshold.min}"
    if threshold.max is not None:
        yield f"{_verdict(value <= threshold.max)}: {where} {metric} {value:.4f}, at most {threshold.max}"
    if threshold.above_baseline is not None:
        margin = metrics.improvement(metric, value, baseline)
        yield (
            f"{_verdict(margin >= threshold.above_baseline)}: {where} {metric} {value:.4f}, baseline {baseline:.4f}, "
            f"margin {margin:.4f}, at least {threshold.above_baseline}"
        )


def _worst_first(metric: str, value: float) -> float:
    return math.inf if math.isnan(value) else metrics.improvement(metric, value, 0.0)


def _verdict(passed: bool) -> str:
    return "passed" if passed else "failed"


def _check_config(config: EvaluateConfig, preprocessing: Preprocessing) -> None:
    task = preprocessing.output_spec.task
    known = metrics.TASK_METRICS[task]
    asked = [("evaluate.thresholds", threshold.metric) for threshold in config.thresholds]
    if config.champion is not None:
        asked.append(("evaluate.champion", config.champion.metric))
    for where, metric in asked:
        if metric not in known:
            raise ConfigError(f"{where}: a {task} task has no metric '{metric}'.{did_you_mean(metric, known)}")
    check_slices(preprocessing.info, config.slices)


def _readable(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace") or "(missing)"
    return "(missing)" if value == MISSING_INT else str(value)
