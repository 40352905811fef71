"""Moments by key against numpy: in any chunks, merged, with values missing, and bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from components.examples import MISSING_INT, ExamplesInfo, Feature
from components.keyed_moments import KeyedMoments
from components.statistics import StatisticsBuilder, from_json, to_json
from components.transform_config import GroupedMoments, TransformNeeds

RNG = np.random.default_rng(0)
NUMBERS = RNG.lognormal(3, 2, 500).astype(np.float32)
NUMBERS[::7], NUMBERS[5] = np.nan, np.inf
KEYS = np.array([b"a", b"b", b"", b"\xff", b"c"], object)[RNG.integers(0, 5, 500)]


def truth(numbers: np.ndarray, keys: np.ndarray) -> dict[Any, tuple[float, ...]]:
    out = {}
    for key in set(keys.tolist()) - {b"", MISSING_INT}:
        own = numbers[(keys == key) & np.isfinite(numbers) & (numbers != MISSING_INT)].astype(np.float64)
        logs = np.log1p(np.maximum(own, 0))
        name = key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else key
        out[name] = (len(own), own.mean(), own.std(), logs.mean(), logs.std())
    return out


def assert_is(found: Any, expected: dict[Any, tuple[float, ...]]) -> None:
    assert {row[0] for row in found} == set(expected)
    for key, *numbers in found:
        np.testing.assert_allclose(numbers, expected[key], rtol=1e-9)


@pytest.mark.parametrize("size", [1, 33, 500])
def test_any_chunks_and_any_merge_give_numpys_moments(size: int) -> None:
    parts = [KeyedMoments(100) for _ in range(3)]
    for number, start in enumerate(range(0, 500, size)):
        parts[number % 3].update(NUMBERS[start : start + size], KEYS[start : start + size])
    parts[0].merge(parts[1])
    parts[0].merge(parts[2])
    assert_is(parts[0].finish(), truth(NUMBERS, KEYS))
    counts = [row[1] for row in parts[0].finish()]
    assert counts == sorted(counts, reverse=True)


def test_integers_as_numbers_and_as_keys() -> None:
    numbers = np.array([MISSING_INT, -5, 3, 7, 9])
    keys = np.array([1, 1, 1, MISSING_INT, 2])
    moments = KeyedMoments(10)
    moments.update(numbers, keys)
    assert_is(moments.finish(), {1: (2, -1.0, 4.0, np.log(4) / 2, np.log(4) / 2), 2: (1, 9.0, 0.0, np.log(10), 0.0)})


def test_the_most_frequent_keys_survive_a_bound() -> None:
    moments = KeyedMoments(3)
    keys = [b"often"] * 50 + [b"rare%d" % i for i in range(500)] + [b"often"] * 50
    for start in range(0, 600, 20):
        moments.update(np.arange(start, start + 20.0), np.array(keys[start : start + 20], object))
    found = moments.finish()
    assert len(found) == 3
    expected = np.concatenate([np.arange(50.0), np.arange(550.0, 600.0)])
    np.testing.assert_allclose(found[0][1:4], (100, expected.mean(), expected.std()))
    assert len(moments._places) <= 24


def test_the_statistics_keep_them_where_they_are_needed() -> None:
    info = ExamplesInfo({"x": Feature("float"), "k": Feature("string")}, "k", "binary", None, {})
    needs = TransformNeeds(moments=[GroupedMoments(number="x", key="k")])
    builders = [
        StatisticsBuilder(info, text_features=[], max_top_values=10, num_quantiles=4, needs=needs) for _ in range(2)
    ]
    for builder, rows in zip(builders, (slice(0, 200), slice(200, None)), strict=True):
        builder.update({"x": NUMBERS[rows], "k": KEYS[rows]})
    builders[0].merge(builders[1])
    found = from_json(to_json({"train": builders[0].finish()}))["train"]
    assert_is(found["x"].moments_by_key["k"], truth(NUMBERS, KEYS))
    assert found["k"].moments_by_key == {}
