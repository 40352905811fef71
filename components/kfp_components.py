"""The Kubeflow wrappers of the steps: typed artifacts in and out, the configuration as a JSON string, no logic.

Kubeflow embeds the source of a wrapper into the pipeline. In the image, the wrapper imports `run_step` from here, and
that imports the step. kfp reads annotations as types, so there is no `from __future__ import annotations`.
"""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.dsl import Artifact, Dataset, Input, Metrics, Model, Output

from components.config import SECTIONS


def make_component(step: str, image: str) -> Any:
    """The Kubeflow component of a step, which runs in `image`.

    Every component takes `config`, its section as JSON text (Kubeflow would make floats of a dict's integers), and
    `code_digest`, which nothing reads: it is part of Kubeflow's cache key, so that changed code misses the cache.
    """
    return dsl.component(base_image=image, install_kfp_package=False)(_WRAPPERS[step])


def run_step(step: str, section: str, config: str, changes: dict[str, Any] | None = None, **artifacts: Artifact) -> Any:
    """Call the function of a step with the paths of its artifacts and its configuration."""
    function = getattr(importlib.import_module(f"components.{step}"), step)
    settings = SECTIONS[section].model_validate_json(config).model_copy(update=changes)
    return function(**{name: Path(artifact.path) for name, artifact in artifacts.items()}, config=settings)


def log_numbers(metrics: Metrics, result: Any) -> None:
    """Show the numbers of a result, and those of the dictionaries in it, beside the task in Kubeflow's UI."""
    for name, number in _numbers(dataclasses.asdict(result), ""):
        metrics.log_metric(name, number)


def _numbers(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def ingest(config: str, code_digest: str, data_path: str, examples: Output[Dataset]) -> None:
    from components.kfp_components import run_step

    run_step("ingest", "data", config, {"path": data_path} if data_path else {}, examples=examples)


def validate(config: str, code_digest: str, examples: Input[Dataset], statistics: Output[Artifact]) -> None:
    from components.kfp_components import run_step

    run_step("validate", "validate", config, examples=examples, statistics=statistics)


def transform(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    statistics: Input[Artifact],
    transform: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("transform", "transform", config, examples=examples, statistics=statistics, transform=transform)


def train(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Output[Model],
    metrics: Output[Metrics],
) -> None:
    from components.kfp_components import log_numbers, run_step

    result = run_step("train", "train", config, examples=examples, transform=transform, model=model)
    log_numbers(metrics, result)


def evaluate(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    evaluation: Output[Artifact],
    metrics: Output[Metrics],
) -> bool:
    from components.kfp_components import log_numbers, run_step

    result = run_step(
        "evaluate", "evaluate", config, examples=examples, transform=transform, model=model, evaluation=evaluation
    )
    log_numbers(metrics, result)
    return bool(result.blessed)


def optimize(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    optimized: Output[Model],
) -> None:
    from components.kfp_components import run_step

    run_step("optimize", "optimize", config, examples=examples, transform=transform, model=model, optimized=optimized)


def compress(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    optimized: Input[Model],
    compressed: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "transform": transform, "optimized": optimized}
    run_step("compress", "compress", config, **inputs, compressed=compressed)


def export(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    statistics: Input[Artifact],
    transform: Input[Artifact],
    model: Input[Model],
    optimized: Input[Model],
    compressed: Input[Artifact],
    exported: Output[Model],
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "statistics": statistics, "transform": transform}
    models = {"model": model, "optimized": optimized, "compressed": compressed}
    run_step("export", "export", config, **inputs, **models, exported=exported)


def verify(
    config: str,
    code_digest: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    exported: Input[Model],
    proof: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step(
        "verify", "verify", config, examples=examples, transform=transform, model=model, exported=exported, proof=proof
    )


def push(
    config: str,
    code_digest: str,
    model: Input[Model],
    evaluation: Input[Artifact],
    exported: Input[Model],
    proof: Input[Artifact],
    pushed: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("push", "push", config, model=model, evaluation=evaluation, exported=exported, proof=proof, pushed=pushed)


def deploy(
    config: str,
    code_digest: str,
    pushed: Input[Artifact],
    deployed: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("deploy", "deploy", config, pushed=pushed, deployed=deployed)


def monitor(
    config: str,
    code_digest: str,
    statistics: Input[Artifact],
    proof: Input[Artifact],
    pushed: Input[Artifact],
    monitoring: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("monitor", "monitor", config, statistics=statistics, proof=proof, pushed=pushed, monitoring=monitoring)


_WRAPPERS = {
    function.__name__: function
    for function in (
        *(ingest, validate, transform, train, evaluate, optimize),
        *(compress, export, verify, push, deploy, monitor),
    )
}
