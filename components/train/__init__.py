"""Step `train`: a Keras model from transformed examples."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.train.step import TrainResult, train

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    """Load the step, and with it TensorFlow, when it is asked for: the launcher of workers does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("components.train.step"), name)
