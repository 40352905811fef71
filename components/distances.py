"""How far apart two features are: of two splits, two spans, or training and serving."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from components.statistics import LOW_CARDINALITY, FeatureStatistics

_HISTOGRAM_BINS = 10


def l_infinity(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """Largest difference of any value's share (of any word's, for text), in [0, 1].

    Source: TFDV's `infinity_norm` of the skew and drift comparators.
    """
    _, share_a, share_b = largest_change(a, b)
    return abs(share_a - share_b)


def largest_change(a: FeatureStatistics, b: FeatureStatistics) -> tuple[int | str | None, float, float]:
    """The value (word, for text) whose share differs most, with its share in `a` and in `b`; None if there are none."""
    shares_a, shares_b = _shares(a), _shares(b)
    pairs = ((value, shares_a.get(value, 0.0), shares_b.get(value, 0.0)) for value in shares_a.keys() | shares_b.keys())
    return max(pairs, key=lambda pair: (abs(pair[1] - pair[2]), str(pair[0])), default=(None, 0.0, 0.0))


def normalized_difference(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """Largest difference of any value's count (of any word's, for text), as a share of all values of both, in [0, 1].

    Unlike `l_infinity` it grows with the number of rows, too.

    Source: TFDV's `normalized_abs_difference` of the skew and drift comparators.
    """
    counts_a, counts_b = _counts(a), _counts(b)
    total = _num_values(a) + _num_values(b)
    largest = max((abs(counts_a.get(v, 0) - counts_b.get(v, 0)) for v in counts_a.keys() | counts_b.keys()), default=0)
    return largest / total if total else 0.0


def jensen_shannon(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """Jensen-Shannon divergence, base 2, in [0, 1], of two features: of the values of strings, else of numbers.

    Numbers of both are counted into the same ten bins, which hold equal shares of the two together.

    Source: Lin, "Divergence measures based on the Shannon entropy", IEEE Trans. Inf. Theory 37 (1991).
    """
    if a.type == "string":
        return _divergence_of_values(a, b)
    if not a.quantiles or not b.quantiles:
        return 0.0 if not a.quantiles and not b.quantiles else 1.0
    atoms_a, atoms_b = np.array(a.quantiles[1:]), np.array(b.quantiles[1:])
    both = np.sort(np.concatenate([np.repeat(atoms_a, len(atoms_b)), np.repeat(atoms_b, len(atoms_a))]))
    edges = np.unique(both[(np.arange(1, _HISTOGRAM_BINS) * len(both)) // _HISTOGRAM_BINS - 1])
    p, q = (np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1) / len(x) for x in (atoms_a, atoms_b))
    return _divergence(p, q)


_MEASURES: dict[str, Callable[[FeatureStatistics, FeatureStatistics], float]] = {
    "l_infinity": l_infinity,
    "jensen_shannon": jensen_shannon,
    "normalized_difference": normalized_difference,
}


def distance(a: FeatureStatistics, b: FeatureStatistics, measure: str | None = None) -> tuple[str, float] | None:
    """How far apart two features are.

    Args:
        a: One side.
        b: The other.
        measure: `l_infinity`, `jensen_shannon` or `normalized_difference`; default: the one that suits the feature.

    Returns:
        The measure and the distance. What suits is `l_infinity` for strings and for integers of at most 100 values,
        `jensen_shannon` for other numbers. `None` for images and files and where a side has no rows.
    """
    if a.type == "uint8" or not a.count or not b.count or _is_files(a) or _is_files(b):
        return None
    if measure is None:
        is_category = a.type == "string" or (a.num_unique is not None and a.num_unique <= LOW_CARDINALITY)
        measure = "l_infinity" if is_category else "jensen_shannon"
    return measure, _MEASURES[measure](a, b)


def _divergence_of_values(a: FeatureStatistics, b: FeatureStatistics) -> float:
    shares_a, shares_b = _shares(a), _shares(b)
    if not shares_a or not shares_b:
        return 0.0 if not shares_a and not shares_b else 1.0
    values = sorted(shares_a.keys() | shares_b.keys(), key=str)
    return _divergence(*(np.array([shares.get(value, 0.0) for value in values]) for shares in (shares_a, shares_b)))


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2
    return (_kullback_leibler(p, middle) + _kullback_leibler(q, middle)) / 2


def _kullback_leibler(p: np.ndarray, q: np.ndarray) -> float:
    seen = p > 0
    return float(np.sum(p[seen] * np.log2(p[seen] / q[seen])))


def _is_files(feature: FeatureStatistics) -> bool:
    """Whether it holds strings of which no value was counted."""
    is_counted = bool(feature.top_values) or feature.num_tokens is not None
    return feature.type == "string" and feature.present > 0 and not is_counted


def _shares(feature: FeatureStatistics) -> dict[int | str, float]:
    total = max(_num_values(feature), 1)
    return {value: count / total for value, count in _counts(feature).items()}


def _counts(feature: FeatureStatistics) -> dict[int | str, int]:
    if feature.num_tokens is not None:
        return {token: count for token, count, _ in feature.top_tokens}
    return dict(feature.top_values)


def _num_values(feature: FeatureStatistics) -> int:
    return feature.present if feature.num_tokens is None else feature.num_tokens
