"""Ranges told from histograms, against the values themselves."""

from __future__ import annotations

import numpy as np
import pytest

from components.ptq import Histogram, range_of
from components.ptq.histograms import NUM_BINS

RNG = np.random.default_rng(3)
NORMAL = RNG.normal(size=20_000)
POSITIVE = np.abs(NORMAL)
TAILED = np.concatenate([NORMAL, [12.0, -10.0]])


def histogram(values: np.ndarray) -> Histogram:
    low, high = min(values.min(), 0.0), max(values.max(), 0.0)
    return Histogram(float(low), float(high), np.histogram(values[values != 0], NUM_BINS, (low, high))[0])


def found(values: np.ndarray, method: str, percentile: float = 99.99) -> tuple[float, float]:
    return range_of(histogram(values), method, percentile)


def test_min_max_is_that_of_the_values_and_zero() -> None:
    assert found(TAILED, "min_max") == (-10, 12)
    assert found(POSITIVE + 1, "min_max") == (0, POSITIVE.max() + 1)


@pytest.mark.parametrize("percentile", [90, 99])
def test_percentile_cuts_the_same_share_at_both_ends(percentile: float) -> None:
    cut = (100 - percentile) / 2
    width = np.ptp(NORMAL) / NUM_BINS
    np.testing.assert_allclose(
        found(NORMAL, "percentile", percentile), np.percentile(NORMAL, [cut, 100 - cut]), atol=2 * width
    )


def test_a_percentile_range_holds_zero() -> None:
    low, high = found(NORMAL + 20, "percentile", 99)
    assert low == 0
    assert high == pytest.approx(np.percentile(NORMAL + 20, 99.5), abs=0.02)


def squared_error(values: np.ndarray, low: float, high: float) -> float:
    step = (high - low) / 255
    zero = np.round(-low / step)
    rounded = (np.clip(np.round(values / step) + zero, 0, 255) - zero) * step
    return float(np.square(values - rounded).mean())


@pytest.mark.parametrize("values", [NORMAL, POSITIVE, TAILED], ids=["normal", "positive", "tailed"])
def test_mse_is_nearly_the_best_of_all_ranges(values: np.ndarray) -> None:
    best = min(
        squared_error(values, values.min() * a, values.max() * b)
        for a in np.linspace(0.1, 1, 19)
        for b in np.linspace(0.1, 1, 19)
    )
    assert squared_error(values, *found(values, "mse")) < 1.05 * best
    assert squared_error(values, *found(values, "mse")) <= 1.01 * squared_error(values, *found(values, "min_max"))


def test_the_mse_range_of_a_normal_distribution_ends_at_four_deviations() -> None:
    """Banner et al. (arXiv:1810.05723): 3.92 deviations for 8 bits."""
    np.testing.assert_allclose(np.abs(found(RNG.normal(size=500_000), "mse")), 3.92, rtol=0.03)


def test_entropy_leaves_a_lone_outlier_and_keeps_what_is_even() -> None:
    low, high = found(TAILED, "entropy")
    assert -6 < low < -2.5
    assert 2.5 < high < 6
    even = RNG.uniform(0, 3, 20_000)
    np.testing.assert_allclose(found(even, "entropy"), (0, 3), atol=0.05)


@pytest.mark.parametrize("method", ["min_max", "percentile", "entropy", "mse"])
def test_nothing_but_zero_has_an_empty_range(method: str) -> None:
    assert found(np.zeros(9), method) == (0, 0)


@pytest.mark.parametrize("method", ["percentile", "entropy", "mse"])
def test_the_other_side_of_zero_gives_the_mirrored_range(method: str) -> None:
    low, high = found(-POSITIVE, method)
    width = POSITIVE.max() / NUM_BINS
    assert high == 0
    assert -low == pytest.approx(found(POSITIVE, method)[1], abs=9 * width)
