"""stratified: classes have equal shares, as far as there are examples."""

from __future__ import annotations

import numpy as np
import pytest

from components.formats import stratified

LABELS = np.array(["common"] * 90 + ["rare"] * 4 + ["seldom"] * 6)


def shares(rows: np.ndarray) -> dict[str, int]:
    names, counts = np.unique(LABELS[rows], return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def test_classes_have_equal_shares_until_they_run_out() -> None:
    assert shares(stratified(LABELS, 9)) == {"common": 3, "rare": 3, "seldom": 3}
    assert shares(stratified(LABELS, 30)) == {"common": 20, "rare": 4, "seldom": 6}
    assert stratified(LABELS, 1000).tolist() == list(range(100))


def test_rows_are_distinct_sorted_and_follow_from_the_seed() -> None:
    rows = stratified(LABELS, 20, seed=3)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert rows.tolist() == stratified(LABELS, 20, seed=3).tolist() != stratified(LABELS, 20, seed=4).tolist()


def test_the_rest_is_not_always_of_the_first_classes() -> None:
    kinds = {tuple(shares(stratified(LABELS, 1, seed=seed))) for seed in range(20)}
    assert kinds == {("common",), ("rare",), ("seldom",)}


def test_bad_arguments() -> None:
    with pytest.raises(
        ValueError, match=r"labels must hold one class per example, \(num_examples,\), received shape \(2, 3\)"
    ):
        stratified(np.zeros((2, 3)), 2)
    with pytest.raises(ValueError, match="num must be 1 or more, received 0"):
        stratified(LABELS, 0)
