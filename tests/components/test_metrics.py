"""Metrics against values worked out by hand or by a direct loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from components import metrics


def test_area_under_roc_equals_the_share_of_ordered_pairs_with_ties_counted_half() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    scores = rng.integers(0, 20, 200) / 20
    positive, negative = scores[labels == 1], scores[labels == 0]
    pairs = np.sign(positive[:, None] - negative[None, :])
    assert metrics.area_under_roc(labels, scores) == pytest.approx((pairs + 1).mean() / 2, abs=1e-12)


def test_area_under_roc_of_one_class_is_not_defined() -> None:
    assert math.isnan(metrics.area_under_roc(np.ones(3, int), np.array([0.1, 0.2, 0.3])))


def test_the_roc_curve_has_the_rates_of_its_thresholds_and_the_area_of_the_statistic() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 300)
    scores = rng.integers(0, 40, 300) / 40
    curve = metrics.roc_curve(labels, np.stack([1 - scores, scores], axis=1), num_points=10_000)
    for threshold, false_positive_rate, true_positive_rate in curve:
        assert false_positive_rate == (scores[labels == 0] >= threshold).mean()
        assert true_positive_rate == (scores[labels == 1] >= threshold).mean()
    _, x, y = np.array(curve).T
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    area = ((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum()
    assert area == pytest.approx(metrics.area_under_roc(labels, scores), abs=1e-12)


def test_a_long_roc_curve_is_thinned_from_end_to_end() -> None:
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 5000), rng.random(5000)
    curve = metrics.roc_curve(labels, np.stack([1 - scores, scores], axis=1))
    assert 90 < len(curve) <= 101
    assert (curve[0][1:], curve[-1][1:]) == ((0.0, 0.0), (1.0, 1.0))


def test_the_roc_curve_of_several_classes_takes_each_answer_for_a_yes_or_no() -> None:
    labels = np.array([0, 1, 2])
    probabilities = np.array([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8]])
    curve = metrics.roc_curve(labels, probabilities)
    assert [point[1:] for point in curve if point[0] in (0.7, 0.5, 0.4)] == [(0, 2 / 3), (1 / 6, 2 / 3), (1 / 6, 1)]


def test_one_class_alone_has_no_roc_curve() -> None:
    assert metrics.roc_curve(np.zeros(3, int), np.full((3, 2), 0.5)) == []


def test_the_confusion_matrix_has_labels_as_rows_and_answers_as_columns() -> None:
    probabilities = np.array([[0.9, 0.1, 0], [0.1, 0.9, 0], [0.1, 0.9, 0], [0.1, 0.2, 0.7]])
    assert metrics.confusion_matrix(np.array([0, 0, 1, 1]), probabilities) == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]


def test_calibration_error_by_hand() -> None:
    # Of 15 bins the tenth, (0.6, 0.667], holds 0.65 and 0.66 (one of two right), the fourteenth 0.9 (wrong), the last 0.95
    # and 1 (both right).
    positive = np.array([0.65, 0.34, 0.95, 0.0, 0.9])
    probabilities = np.stack([1 - positive, positive], axis=1)
    labels = np.array([1, 1, 1, 0, 0])
    expected = (abs(1 - 0.65 - 0.66) + 0.9 + abs(2 - 0.95 - 1.0)) / 5
    assert metrics.calibration_error(labels, probabilities) == pytest.approx(expected)
    # In one bin alone: accuracy 3/5 beside the mean confidence.
    assert metrics.calibration_error(labels, probabilities, num_bins=1) == pytest.approx(0.832 - 0.6)


def test_binary_metrics_by_hand() -> None:
    labels = np.array([1, 1, 0, 0])
    positive = np.array([0.9, 0.4, 0.6, 0.2])
    values = metrics.compute("binary", labels, np.stack([1 - positive, positive], axis=1))
    assert values["accuracy"] == 0.5
    assert values["precision"] == 0.5
    assert values["recall"] == 0.5
    assert values["f1"] == 0.5
    assert values["auc"] == 0.75
    assert values["loss"] == pytest.approx(-np.log([0.9, 0.4, 0.4, 0.8]).mean())


def test_multiclass_metrics_by_hand() -> None:
    labels = np.array([0, 1, 2, 2])
    probabilities = np.array([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.1, 0.2, 0.7]])
    values = metrics.compute("multiclass", labels, probabilities)
    assert values["accuracy"] == 0.75
    assert values["macro_f1"] == pytest.approx((2 / 3 + 0 + 1) / 3)


def test_regression_metrics_by_hand() -> None:
    values = metrics.compute("regression", np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 5.0]))
    assert values["mae"] == pytest.approx(2 / 3)
    assert values["rmse"] == pytest.approx((4 / 3) ** 0.5)
    assert values["r2"] == pytest.approx(1 - (4 / 3) / (2 / 3))


def test_the_majority_baseline_has_the_majority_accuracy_and_no_ranking() -> None:
    train, test = np.array([0, 0, 0, 1]), np.array([0, 1, 0, 0, 1])
    values = metrics.baseline("binary", train, test, 2)
    assert values["accuracy"] == 0.6
    assert values["auc"] == 0.5


@pytest.mark.parametrize(("metric", "gain"), [("auc", 0.1), ("loss", -0.1), ("rmse", -0.1), ("r2", 0.1)])
def test_improvement_points_the_way_of_the_metric(metric: str, gain: float) -> None:
    assert metrics.improvement(metric, 0.6, 0.5) == pytest.approx(gain)


def test_every_metric_of_every_task_has_a_direction() -> None:
    assert {name for names in metrics.TASK_METRICS.values() for name in names} == set(metrics.HIGHER_IS_BETTER)


def test_top1_agreement() -> None:
    reference = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    assert metrics.top1_agreement(reference, reference[:, ::-1]) == 0
    assert metrics.top1_agreement(reference, np.array([[0.6, 0.4], [0.6, 0.4], [0.2, 0.8]])) == pytest.approx(2 / 3)
    values = np.array([0.0, 1.0, 2.0])
    assert metrics.top1_agreement(values, values + np.array([0.0, 0.001, 0.5])) == pytest.approx(2 / 3)
