from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from components.distances import distance, jensen_shannon, l_infinity
from components.examples import ExamplesInfo, Feature
from components.statistics import FeatureStatistics, StatisticsBuilder


def _one(feature: Feature, values: Any, *, is_text: bool = False) -> FeatureStatistics:
    info = ExamplesInfo({"a": feature}, "a", "multiclass", None, {})
    builder = StatisticsBuilder(info, text_features=["a"] if is_text else [], max_top_values=1000, num_quantiles=1000)
    builder.update({"a": values})
    return builder.finish()["a"]


def _numbers(values: Any, kind: str = "float") -> FeatureStatistics:
    return _one(Feature(kind), np.asarray(values, np.float32 if kind == "float" else np.int64))


def _words(*words: str) -> FeatureStatistics:
    return _one(Feature("string"), np.array([word.encode() for word in words], object))


def test_l_infinity():
    assert l_infinity(_words("a", "b"), _words("a", "b", "a", "b")) == 0
    assert l_infinity(_words("a", "a", "a", "b"), _words("a", "b", "c", "d")) == pytest.approx(0.5)
    assert l_infinity(_words("a"), _words("b")) == 1
    a, b = (_one(Feature("string"), np.array([text], object), is_text=True) for text in (b"x y", b"x x x y"))
    assert l_infinity(a, b) == pytest.approx(0.25)


def test_jensen_shannon():
    rng = np.random.default_rng(0)
    base = rng.normal(size=5000)
    assert jensen_shannon(_numbers(base), _numbers(base)) == 0
    assert jensen_shannon(_numbers(base), _numbers(rng.normal(size=100))) < 0.05
    near, far = (jensen_shannon(_numbers(base), _numbers(base + shift)) for shift in (0.5, 2.0))
    assert 0.02 < near < 0.2 < far < 1
    assert jensen_shannon(_numbers(base), _numbers(base + 100)) == pytest.approx(1)
    assert jensen_shannon(_numbers(base), _numbers([np.nan])) == 1
    assert jensen_shannon(_numbers([0, 1] * 50), _numbers([0, 1, 1, 1] * 50)) == pytest.approx(0.0488, abs=1e-3)


@pytest.mark.parametrize(
    ("a", "b", "measure"),
    [
        (_words("a"), _words("b"), "l_infinity"),
        (_numbers([1, 2], "int"), _numbers([1, 2], "int"), "l_infinity"),
        (_numbers(range(101), "int"), _numbers([1, 2], "int"), "jensen_shannon"),
        (_numbers([1, 2]), _numbers([1, 2]), "jensen_shannon"),
        (_words("a"), FeatureStatistics("string", 0, 0), None),
        (FeatureStatistics("uint8", 1, 0), FeatureStatistics("uint8", 1, 0), None),
    ],
)
def test_the_measure_suits_the_feature(a, b, measure):
    found = distance(a, b)
    assert (found and found[0]) == measure
