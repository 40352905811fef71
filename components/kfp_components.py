"""The Kubeflow wrappers of the steps: typed artifacts in and out, the configuration as a JSON string, no logic.

Kubeflow embeds the source of a wrapper into the pipeline. In the image, the wrapper imports `run_step` from here, and
that imports the step. kfp reads annotations as types, so there is no `from __future__ import annotations`.

Of every step's parameters, `config` is its section as JSON text (Kubeflow would make floats of a dict's integers),
`records` the folder where it notes what became of it, and `code_digest` and `outside` are read by nothing: they are part
of Kubeflow's cache key, so that changed code, data or schema misses the cache.
"""

import contextlib
import dataclasses
import functools
import importlib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035 - kfp reads these

from kfp import dsl
from kfp.dsl import (
    HTML,
    Artifact,
    ClassificationMetrics,
    Dataset,
    Input,
    Markdown,
    Metrics,
    Model,
    Output,
    PipelineTaskFinalStatus,
    TaskConfig,
)

from components import artifacts as artifact_files
from components import external
from components.config import SECTIONS, TrainingJobConfig
from components.errors import DataError

ON_CLUSTER = "train_on_cluster"


def make_component(name: str, image: str) -> Any:
    """The Kubeflow component of a step, or of another task of the pipeline, which runs in `image`."""
    passed_on = _passed_on() if name == ON_CLUSTER else None
    return dsl.component(base_image=image, install_kfp_package=False, task_config_passthroughs=passed_on)(
        _WRAPPERS[name]
    )


def _passed_on() -> list[Any]:
    """Its pod only watches: what is said of the step's pod goes to the workers, and to itself only what it needs, too."""
    # In a running step, which imports this module, too, kfp.dsl has neither of the two classes.
    field, both = dsl.TaskConfigField, dsl.TaskConfigPassthrough
    return [
        *(field.RESOURCES, field.KUBERNETES_NODE_SELECTOR, field.KUBERNETES_TOLERATIONS, field.KUBERNETES_AFFINITY),
        both(field.ENV, apply_to_task=True),
        both(field.KUBERNETES_VOLUMES, apply_to_task=True),
    ]


def run_step(
    step: str,
    section: str,
    config: str,
    records: str = "",
    changes: dict[str, Any] | None = None,
    more: dict[str, str] | None = None,
    function: Callable[..., Any] | None = None,
    best: Artifact | None = None,
    **artifacts: Any,
) -> Any:
    """Call the function of a step with the paths of its artifacts and its configuration.

    Args:
        step: The step.
        section: That of its configuration.
        config: The section as JSON.
        records: Folder where its end is noted, if any.
        changes: Settings that are known only when it runs.
        more: Arguments of the function beside its artifacts and its configuration.
        function: Another one that does the step's work.
        best: What `tune` has found, if settings have been searched for the step.
        **artifacts: Those that it reads, then the one that it writes; a list of them where it reads several of a kind.
    """
    from pipelines.kubeflow.exit_handler import noted
    from pipelines.tracking import record_step
    from pipelines.tuned import tuned_section

    with noted("-".join([step, *(more or {}).values()]), records) as note:
        function = function or getattr(importlib.import_module(f"components.{step}"), step)
        settings = SECTIONS[section].model_validate_json(config).model_copy(update=changes)
        if best is not None:
            found = artifact_files.open_artifact(Path(best.path), step="tune").result
            settings = tuned_section(settings, found["settings"])
        paths = {
            name: [Path(each.path) for each in given] if isinstance(given, list) else Path(given.path)
            for name, given in artifacts.items()
        }
        result = function(**paths, **(more or {}), config=settings)
        note.update(dataclasses.asdict(result))
    *_, output = artifacts.values()
    # By which the steps know an artifact: Kubeflow's record of it leads to the manifests, and the other way.
    output.metadata["digest"] = artifact_files.read_manifest(Path(output.path)).digest
    record_step(Path(output.path))
    return result


def on_cluster(job: str, workspace: str, task_config: TaskConfig) -> Callable[..., Any]:
    """The function of the step `train` whose workers are a job of their own.

    Args:
        job: The job's configuration as JSON.
        workspace: Folder of the volume that the workers share.
        task_config: What Kubeflow was told of the step's pod, which is that of the workers.
    """
    from components.launch.manifests import TaskSettings
    from components.launch.step import train_on_cluster

    settings = TrainingJobConfig.model_validate_json(job)
    task = TaskSettings.of(dataclasses.asdict(task_config))
    return functools.partial(train_on_cluster, job=settings, workspace=Path(workspace), task=task)


def outside_state(step: str, section: str, config: str, data_path: str) -> str:
    """Digest of what a step follows from outside its inputs; another one each time where nobody can tell."""
    settings: Any = SECTIONS[section].model_validate_json(config)
    if step == "ingest" and data_path:
        settings = settings.model_copy(update={"path": data_path})
    with contextlib.suppress(DataError):  # the step meets with it, too, and says so
        state = external.state(step, settings, {})
        found_none = getattr(settings, "path", None) is not None and None in state.values()
        if not found_none and external.why_unknown(step, settings) is None:
            return artifact_files.digest_of(state)
    return uuid.uuid4().hex


def log_classification(shown: ClassificationMetrics, result: Any) -> None:
    """Show the confusion matrix and the ROC curve of an evaluation, where the task has them."""
    if result.confusion_matrix is not None:
        shown.log_confusion_matrix(result.confusion_matrix["classes"], result.confusion_matrix["rows"])
    for threshold, false_positive_rate, true_positive_rate in result.roc_curve or ():
        shown.log_roc_data_point(fpr=false_positive_rate, tpr=true_positive_rate, threshold=threshold)


def write_page(page: Callable[[dict[str, Any]], str], report: HTML, result: Any) -> None:
    """Write what a step returned as a page."""
    Path(report.path).write_text(page(dataclasses.asdict(result)), encoding="utf-8")


def log_numbers(metrics: Metrics, result: Any) -> None:
    """Show the numbers of a result, and those of the dictionaries in it, beside the task in Kubeflow's UI."""
    from pipelines.reuse import leaves

    for name, value in leaves(dataclasses.asdict(result)).items():
        if isinstance(value, int | float):
            metrics.log_metric(name, float(value))


def fingerprint(step: str, section: str, config: str, data_path: str) -> str:
    from components.kfp_components import outside_state

    return outside_state(step, section, config, data_path)


def encode(
    config: str,
    code_digest: str,
    outside: str,
    records: str,
    data_path: str,
    number: str,
    num_shares: str,
    encoded: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    changes = {"path": data_path} if data_path else {}
    share = {"number": number, "num_shares": num_shares}
    run_step("encode", "data", config, records, changes, share, encoded=encoded)


def ingest(
    config: str,
    code_digest: str,
    outside: str,
    records: str,
    data_path: str,
    examples: Output[Dataset],
    encoded: Optional[Input[List[Artifact]]] = None,  # noqa: UP006, UP045
) -> None:
    from components.kfp_components import run_step

    changes = {"path": data_path} if data_path else {}
    run_step("ingest", "data", config, records, changes, encoded=encoded or [], examples=examples)


def validate(
    config: str,
    code_digest: str,
    outside: str,
    records: str,
    examples: Input[Dataset],
    statistics: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("validate", "validate", config, records, examples=examples, statistics=statistics)


def transform(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    statistics: Input[Artifact],
    transform: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("transform", "transform", config, records, examples=examples, statistics=statistics, transform=transform)


def trial(
    config: str,
    code_digest: str,
    records: str,
    number: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    trial: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "transform": transform}
    run_step("trial", "tune", config, records, more={"number": number}, **inputs, trial=trial)


def tune(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    tuned: Output[Artifact],
    metrics: Output[Metrics],
    report: Output[HTML],
    trials: Optional[Input[List[Artifact]]] = None,  # noqa: UP006, UP045
) -> None:
    import shutil

    from components.kfp_components import log_numbers, run_step

    inputs = {"examples": examples, "transform": transform, "trials": trials or []}
    log_numbers(metrics, run_step("tune", "tune", config, records, **inputs, tuned=tuned))
    shutil.copy(f"{tuned.path}/trials/report.html", report.path)


def train(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Output[Model],
    metrics: Output[Metrics],
    tuned: Optional[Input[Artifact]] = None,  # noqa: UP045
) -> None:
    from components.kfp_components import log_numbers, run_step

    inputs = {"examples": examples, "transform": transform}
    log_numbers(metrics, run_step("train", "train", config, records, best=tuned, **inputs, model=model))


def train_on_cluster(
    config: str,
    code_digest: str,
    records: str,
    job: str,
    workspace: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Output[Model],
    metrics: Output[Metrics],
    task_config: TaskConfig,
    tuned: Optional[Input[Artifact]] = None,  # noqa: UP045
) -> None:
    from components.kfp_components import log_numbers, on_cluster, run_step

    function = on_cluster(job, workspace, task_config)
    inputs = {"examples": examples, "transform": transform}
    result = run_step("train", "train", config, records, function=function, best=tuned, **inputs, model=model)
    log_numbers(metrics, result)


def evaluate(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    evaluation: Output[Artifact],
    metrics: Output[Metrics],
    classification: Output[ClassificationMetrics],
    report: Output[HTML],
) -> bool:
    from components.kfp_components import log_classification, log_numbers, run_step, write_page
    from pipelines.summary import evaluation_page

    inputs = {"examples": examples, "transform": transform, "model": model}
    result = run_step("evaluate", "evaluate", config, records, **inputs, evaluation=evaluation)
    log_numbers(metrics, result)
    log_classification(classification, result)
    write_page(evaluation_page, report, result)
    return bool(result.blessed)


def optimize(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    optimized: Output[Model],
    tuned: Optional[Input[Artifact]] = None,  # noqa: UP045
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "transform": transform, "model": model}
    run_step("optimize", "optimize", config, records, best=tuned, **inputs, optimized=optimized)


def compress(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    optimized: Input[Model],
    compressed: Output[Model],
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "transform": transform, "optimized": optimized}
    run_step("compress", "compress", config, records, **inputs, compressed=compressed)


def convert(
    config: str,
    code_digest: str,
    records: str,
    kind: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    optimized: Input[Model],
    converted: Output[Model],
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "transform": transform, "model": model, "optimized": optimized}
    run_step("convert", "export", config, records, more={"kind": kind}, **inputs, converted=converted)


def export(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    statistics: Input[Artifact],
    transform: Input[Artifact],
    model: Input[Model],
    optimized: Input[Model],
    compressed: Input[Model],
    exported: Output[Model],
    converted: Optional[Input[List[Model]]] = None,  # noqa: UP006, UP045
) -> None:
    from components.kfp_components import run_step

    inputs = {"examples": examples, "statistics": statistics, "transform": transform, "converted": converted or []}
    models = {"model": model, "optimized": optimized, "compressed": compressed}
    run_step("export", "export", config, records, **inputs, **models, exported=exported)


def verify(
    config: str,
    code_digest: str,
    records: str,
    examples: Input[Dataset],
    transform: Input[Artifact],
    model: Input[Model],
    exported: Input[Model],
    proof: Output[Artifact],
    metrics: Output[Metrics],
    report: Output[HTML],
) -> None:
    from components.kfp_components import log_numbers, run_step, write_page
    from pipelines.summary import verification_page

    inputs = {"examples": examples, "transform": transform, "model": model, "exported": exported}
    result = run_step("verify", "verify", config, records, **inputs, proof=proof)
    log_numbers(metrics, result)
    write_page(verification_page, report, result)


def push(
    config: str,
    code_digest: str,
    records: str,
    model: Input[Model],
    evaluation: Input[Artifact],
    exported: Input[Model],
    proof: Input[Artifact],
    pushed: Output[Artifact],
    tuned: Optional[Input[Artifact]] = None,  # noqa: UP045
) -> None:
    from components.kfp_components import run_step

    inputs = {"model": model, "evaluation": evaluation, "exported": exported, "proof": proof}
    run_step("push", "push", config, records, best=tuned, **inputs, pushed=pushed)


def deploy(
    config: str,
    code_digest: str,
    records: str,
    pushed: Input[Artifact],
    deployed: Output[Artifact],
) -> None:
    from components.kfp_components import run_step

    run_step("deploy", "deploy", config, records, pushed=pushed, deployed=deployed)


def monitor(
    config: str,
    code_digest: str,
    records: str,
    statistics: Input[Artifact],
    proof: Input[Artifact],
    pushed: Input[Artifact],
    monitoring: Output[Artifact],
    report: Output[HTML],
) -> None:
    import shutil

    from components.kfp_components import run_step

    inputs = {"statistics": statistics, "proof": proof, "pushed": pushed}
    run_step("monitor", "monitor", config, records, **inputs, monitoring=monitoring)
    shutil.copy(f"{monitoring.path}/report.html", report.path)


def summary(
    config: str,
    records: str,
    run_id: str,
    status: PipelineTaskFinalStatus,
    summary: Output[Markdown],
    report: Output[HTML],
) -> None:
    from pipelines.kubeflow.exit_handler import finish

    finish(
        config=config,
        records=records,
        run_id=run_id,
        state=status.state,
        message=status.error_message,
        summary=summary.path,
        report=report.path,
    )


_WRAPPERS = {
    function.__name__: function
    for function in (
        *(fingerprint, encode, ingest, validate, transform, trial, tune, train, train_on_cluster, evaluate, optimize),
        *(compress, convert, export, verify, push, deploy, monitor, summary),
    )
}
