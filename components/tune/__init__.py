"""Step `tune`: the best settings of `train` and `model`, found by trials."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.tune.step import TuneResult, tune

__all__ = ["TuneResult", "tune"]


def __getattr__(name: str) -> Any:
    """Load the step, and with it Optuna, when it is asked for: the processes of the trials do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("components.tune.step"), name)
