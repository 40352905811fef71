"""Which examples an int8 form is calibrated with."""

from __future__ import annotations

from typing import Any

import numpy as np


def stratified(labels: Any, num: int, *, seed: int = 0) -> np.ndarray:
    """Rows such that the classes have equal shares, as far as there are examples of them.

    A random choice leaves a rare class out, and with it the ranges that only its examples reach.

    Args:
        labels: `(num_examples,)` class ids or names.
        num: How many rows; more than there are gives all.
        seed: Of the choice within a class.

    Returns:
        Indices in ascending order, `(min(num, num_examples),)` int64.

    Raises:
        ValueError: `labels` is not one value per example, or `num` is not positive.

    Example:
        >>> rows = stratified(train["label"], 200)
        >>> convert_tflite(network, file, form="int8", calibration={"image": train["image"][rows]})
    """
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels must hold one class per example, (num_examples,), received shape {labels.shape}")
    if num < 1:
        raise ValueError(f"num must be 1 or more, received {num}")
    rng = np.random.default_rng(seed)
    classes = np.unique(labels, return_inverse=True)[1]
    order = rng.permutation(len(labels))
    # The place of each row within its class: taking rows by place fills all classes alike.
    places = np.empty(len(labels), np.int64)
    for number in range(classes.max(initial=-1) + 1):
        members = order[classes[order] == number]
        places[members] = np.arange(len(members))
    chosen = order[np.argsort(places[order], kind="stable")][:num]
    return np.sort(chosen)
