"""Metrics of predictions, exact and in float64, and what always answering with the majority would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from components.config import TASK_METRICS as TASK_METRICS
from models.spec import Task

HIGHER_IS_BETTER = {
    "accuracy": True,
    "auc": True,
    "f1": True,
    "loss": False,
    "macro_f1": True,
    "mae": False,
    "precision": True,
    "r2": True,
    "recall": True,
    "rmse": False,
}
_SMALLEST_PROBABILITY = 1e-7


def compute(task: Task, labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """Every metric of the task.

    Args:
        task: `binary`, `multiclass` or `regression`.
        labels: Class ids `(num_examples,)`, or the values for regression.
        predictions: Probabilities `(num_examples, num_classes)`, or values `(num_examples,)` for regression.

    Returns:
        Name -> value. `auc` and `r2` are NaN where the labels are all alike, since they are not defined there.
    """
    functions: dict[str, Callable[[np.ndarray, np.ndarray], dict[str, float]]] = {
        "binary": _binary,
        "multiclass": _multiclass,
        "regression": _regression,
    }
    return functions[task](labels, predictions.astype(np.float64))


def baseline(task: Task, train_labels: np.ndarray, labels: np.ndarray, num_classes: int) -> dict[str, float]:
    """The metrics of always answering with the train split's class shares, or its mean for regression."""
    if task == "regression":
        return compute(task, labels, np.full(len(labels), train_labels.mean()))
    shares = np.bincount(train_labels, minlength=num_classes) / len(train_labels)
    return compute(task, labels, np.tile(shares, (len(labels), 1)))


def improvement(metric: str, value: float, reference: float) -> float:
    """How much better `value` is than `reference`: positive is better, whichever way the metric points."""
    return value - reference if HIGHER_IS_BETTER[metric] else reference - value


def area_under_roc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve, by the Mann-Whitney statistic with ties counted half; NaN with one class only."""
    num_positive = int(labels.sum())
    num_negative = len(labels) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    rank_sum = ranks[labels == 1].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def roc_curve(labels: np.ndarray, probabilities: np.ndarray, num_points: int = 101) -> list[tuple[float, float, float]]:
    """Points of the ROC curve, from (0, 0) to (1, 1), at most so many, evenly along it.

    With two classes it is that of the second; with more, each is told from the others and all pairs of example and class
    are taken together (micro average).

    Args:
        labels: Class ids `(num_examples,)`.
        probabilities: `(num_examples, num_classes)`.
        num_points: Most points.

    Returns:
        `(threshold, false positive rate, true positive rate)` each; none where the labels are all of one class.
    """
    num_classes = probabilities.shape[1]
    positive = (labels[:, None] == np.arange(num_classes))[:, 1 if num_classes == 2 else 0 :].ravel()
    scores = probabilities[:, 1 if num_classes == 2 else 0 :].ravel().astype(np.float64)
    if positive.all() or not positive.any():
        return []
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true_positives = np.cumsum(positive[order])[ends]
    false_positives = ends + 1 - true_positives
    rates = np.stack([false_positives / false_positives[-1], true_positives / true_positives[-1]], axis=1)
    # The highest threshold is one that no score reaches.
    thresholds = np.append(np.nextafter(scores.max(), np.inf), scores[order][ends])
    rates = np.concatenate([np.zeros((1, 2)), rates])
    kept = np.unique(np.searchsorted(rates.sum(axis=1), np.linspace(0, 2, num_points)).clip(max=len(rates) - 1))
    return [(float(thresholds[i]), float(rates[i, 0]), float(rates[i, 1])) for i in kept]


def confusion_matrix(labels: np.ndarray, probabilities: np.ndarray) -> list[list[int]]:
    """How many examples of each class (row) got each answer (column)."""
    num_classes = probabilities.shape[1]
    pairs = np.bincount(labels * num_classes + probabilities.argmax(axis=1), minlength=num_classes**2)
    rows: list[list[int]] = pairs.reshape(num_classes, num_classes).tolist()
    return rows


def top1_agreement(reference: np.ndarray, answers: np.ndarray) -> float:
    """Share of examples with the same class; for regression, of values within 1 % of the reference's spread."""
    if reference.ndim == 1:
        return float((np.abs(reference - answers) <= 0.01 * max(float(reference.std()), 1e-12)).mean())
    return float((reference.argmax(axis=1) == answers.argmax(axis=1)).mean())


def calibration_error(labels: np.ndarray, probabilities: np.ndarray, num_bins: int = 15) -> float:
    """Expected calibration error: how far confidence is from accuracy, over bins of equal width, weighted by their examples.

    Source: Guo et al. 2017, https://arxiv.org/abs/1706.04599, equation 3.

    Args:
        labels: Class ids `(num_examples,)`.
        probabilities: `(num_examples, num_classes)`; the largest of each example is its confidence.
        num_bins: Bins `(0, 1/num_bins], ...`.
    """
    confidences = probabilities.max(axis=1).astype(np.float64)
    gaps = (probabilities.argmax(axis=1) == labels) - confidences
    bins = np.clip(np.ceil(confidences * num_bins).astype(np.int64) - 1, 0, num_bins - 1)
    return float(np.abs(np.bincount(bins, weights=gaps)).sum() / len(labels))


def jsonable(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics with NaN as None, which JSON can hold."""
    return {name: None if np.isnan(value) else float(value) for name, value in metrics.items()}


def _binary(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    answers = probabilities.argmax(axis=1)
    hits = int(((answers == 1) & (labels == 1)).sum())
    precision, recall = _ratio(hits, (answers == 1).sum()), _ratio(hits, (labels == 1).sum())
    return {
        "auc": area_under_roc(labels, probabilities[:, 1]),
        "accuracy": float((answers == labels).mean()),
        "loss": _log_loss(labels, probabilities),
        "precision": precision,
        "recall": recall,
        "f1": _ratio(2 * precision * recall, precision + recall),
    }


def _multiclass(labels: np.ndarray, probabilities: np.ndarray) -> dict[str, float]:
    answers = probabilities.argmax(axis=1)
    scores = []
    for class_id in np.unique(labels):
        hits = int(((answers == class_id) & (labels == class_id)).sum())
        scores.append(_ratio(2 * hits, (answers == class_id).sum() + (labels == class_id).sum()))
    return {
        "accuracy": float((answers == labels).mean()),
        "loss": _log_loss(labels, probabilities),
        "macro_f1": float(np.mean(scores)),
    }


def _regression(labels: np.ndarray, values: np.ndarray) -> dict[str, float]:
    residuals = labels.astype(np.float64) - values
    mean_square = float((residuals**2).mean())
    variance = float(labels.astype(np.float64).var())
    return {
        "rmse": mean_square**0.5,
        "mae": float(np.abs(residuals).mean()),
        "r2": 1 - mean_square / variance if variance else float("nan"),
        "loss": mean_square,
    }


def _log_loss(labels: np.ndarray, probabilities: np.ndarray) -> float:
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(chosen, _SMALLEST_PROBABILITY)).mean())


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else 0.0
