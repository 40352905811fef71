"""STEPS: the one table of stages. The local runner and the Kubeflow pipeline are both built from it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """One stage of the pipeline.

    Attributes:
        name: Its name; the function `components.<name>:<name>` does the work.
        inputs: The outputs of earlier steps that it reads, which are also its parameters' names.
        output: The one artifact directory that it writes, which is also its parameter's name.
        section: The section of the configuration that it is given as `config`.
        gated: Runs only for a blessed model.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    section: str
    gated: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the step's function, and with it TensorFlow."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"components.{self.name}"), self.name)
        return function


STEPS = (
    Step("ingest", (), "examples", "data"),
    Step("validate", ("examples",), "statistics", "validate"),
    Step("transform", ("examples", "statistics"), "transform", "transform"),
    Step("train", ("examples", "transform"), "model", "train"),
    Step("evaluate", ("examples", "transform", "model"), "evaluation", "evaluate"),
    Step("optimize", ("examples", "transform", "model"), "optimized", "optimize", gated=True),
    Step("compress", ("examples", "transform", "optimized"), "compressed", "compress", gated=True),
    Step(
        "export",
        ("examples", "statistics", "transform", "model", "optimized", "compressed"),
        "exported",
        "export",
        gated=True,
    ),
    Step("verify", ("examples", "transform", "model", "exported"), "proof", "verify", gated=True),
    Step("push", ("model", "evaluation", "exported", "proof"), "pushed", "push", gated=True),
    Step("deploy", ("pushed",), "deployed", "deploy", gated=True),
    Step("monitor", ("statistics", "proof", "pushed"), "monitoring", "monitor", gated=True),
)


def step_named(name: str) -> Step:
    """The step of that name.

    Raises:
        KeyError: there is none.
    """
    return {step.name: step for step in STEPS}[name]
