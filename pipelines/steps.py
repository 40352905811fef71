"""STEPS: the one table of stages. The local runner and the Kubeflow pipeline are both built from it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.config import PipelineConfig


@dataclass(frozen=True)
class Step:
    """One stage of the pipeline.

    Attributes:
        name: Its name; the function `components.<name>:<name>` does the work.
        inputs: The outputs of earlier steps that it reads, which are also its parameters' names.
        output: The one artifact directory that it writes, which is also its parameter's name.
        section: The section of the configuration that it is given as `config`.
        gated: Runs only for a blessed model.
        is_tuned: It is configured with the best settings of `tune`, where those are searched.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    section: str
    gated: bool = False
    is_tuned: bool = False

    def load(self) -> Callable[..., Any]:
        """Import the step's function, and with it TensorFlow."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"components.{self.name}"), self.name)
        return function


STEPS = (
    Step("ingest", (), "examples", "data"),
    Step("validate", ("examples",), "statistics", "validate"),
    Step("transform", ("examples", "statistics"), "transform", "transform"),
    Step("tune", ("examples", "transform"), "tuned", "tune"),
    Step("train", ("examples", "transform"), "model", "train", is_tuned=True),
    Step("evaluate", ("examples", "transform", "model"), "evaluation", "evaluate"),
    Step("optimize", ("examples", "transform", "model"), "optimized", "optimize", gated=True, is_tuned=True),
    Step("compress", ("examples", "transform", "optimized"), "compressed", "compress", gated=True),
    Step(
        "export",
        ("examples", "statistics", "transform", "model", "optimized", "compressed"),
        "exported",
        "export",
        gated=True,
    ),
    Step("verify", ("examples", "transform", "model", "exported"), "proof", "verify", gated=True),
    Step("push", ("model", "evaluation", "exported", "proof"), "pushed", "push", gated=True, is_tuned=True),
    Step("deploy", ("pushed",), "deployed", "deploy", gated=True),
    Step("monitor", ("statistics", "proof", "pushed"), "monitoring", "monitor", gated=True),
)


def steps_of(config: PipelineConfig, steps: Sequence[Step] = STEPS) -> tuple[Step, ...]:
    """Those that have a part in a run of a configuration: `tune` only where it asks for trials."""
    return tuple(step for step in steps if step.name != "tune" or config.tune.trials)


def step_named(name: str) -> Step:
    """The step of that name.

    Raises:
        KeyError: there is none.
    """
    return {step.name: step for step in STEPS}[name]
