"""Weights as training would leave them."""

from __future__ import annotations

import numpy as np


def settle(model, seed=0):
    """Random numbers in the place of zero weights and of statistics, as training would give them."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if weight.path.endswith(("moving_variance", "gamma")):
            weight.assign(rng.uniform(0.5, 2, weight.shape))
        elif "float" in weight.dtype:
            weight.assign(rng.normal(0, 0.3, weight.shape))
    return model
