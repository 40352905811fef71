"""How far apart two features are: of two splits, two spans, or training and serving."""

from __future__ import annotations

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


def jensen_shannon(a: FeatureStatistics, b: FeatureStatistics) -> float:
    """Jensen-Shannon divergence, base 2, in [0, 1], of two numeric features.

    Both are counted into the same ten bins, which hold equal shares of the two together.

    Source: Lin, "Divergence measures based on the Shannon entropy", IEEE Trans. Inf. Theory 37 (1991).
    """
    if not a.quantiles or not b.quantiles:
        return 0.0 if not a.quantiles and not b.quantiles else 1.0
    atoms_a, atoms_b = np.array(a.quantiles[1:]), np.array(b.quantiles[1:])
    both = np.sort(np.concatenate([np.repeat(atoms_a, len(atoms_b)), np.repeat(atoms_b, len(atoms_a))]))
    edges = np.unique(both[(np.arange(1, _HISTOGRAM_BINS) * len(both)) // _HISTOGRAM_BINS - 1])
    p, q = (np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1) / len(x) for x in (atoms_a, atoms_b))
    middle = (p + q) / 2
    return (_kullback_leibler(p, middle) + _kullback_leibler(q, middle)) / 2


def distance(a: FeatureStatistics, b: FeatureStatistics) -> tuple[str, float] | None:
    """How far apart two features are, by the measure that suits them.

    Returns:
        `("l_infinity", x)` for strings and for integers of at most 100 values, `("jensen_shannon", x)` for other
        numbers, `None` for images and files and where a side has no rows.
    """
    if a.type == "uint8" or not a.count or not b.count or _is_files(a) or _is_files(b):
        return None
    if a.type == "string" or (a.num_unique is not None and a.num_unique <= LOW_CARDINALITY):
        return "l_infinity", l_infinity(a, b)
    return "jensen_shannon", jensen_shannon(a, b)


def _kullback_leibler(p: np.ndarray, q: np.ndarray) -> float:
    seen = p > 0
    return float(np.sum(p[seen] * np.log2(p[seen] / q[seen])))


def _is_files(feature: FeatureStatistics) -> bool:
    """Whether it holds strings of which no value was counted."""
    is_counted = bool(feature.top_values) or feature.num_tokens is not None
    return feature.type == "string" and feature.present > 0 and not is_counted


def _shares(feature: FeatureStatistics) -> dict[int | str, float]:
    if feature.num_tokens is not None:
        return {token: count / max(feature.num_tokens, 1) for token, count, _ in feature.top_tokens}
    return {value: count / feature.present for value, count in feature.top_values}
