"""Run one step of an earlier run again, here: `python -m pipelines.replay RUN STEP`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pdb
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from components.environment import set_environment
from pipelines.exits import reported
from pipelines.kubeflow.kfp_api import Access, access_options, pairs
from pipelines.local import STEP_NAMES, SUMMARY
from pipelines.steps import Step, step_named

# What `tune` makes, an input more of the steps that it finds settings for.
_TUNED = "tuned"


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A step as an earlier run had it.

    Attributes:
        settings: Its configuration.
        inputs: Where its inputs are, by name: folders, or URIs of an object store; `tuned` among them, if settings were
            searched for it.
        error: Why it failed there, as far as it is known.
        code_digest: Digest of its source there; None if it was not recorded.
        image: Image that it ran in.
        environment: Environment variables that the pipeline sets.
        secrets: Environment variables that the pipeline takes from Kubernetes secrets.
    """

    settings: Any
    inputs: Mapping[str, str]
    error: str = ""
    code_digest: str | None = None
    image: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: tuple[str, ...] = ()


def from_folder(run_dir: Path, step: Step) -> Recorded:
    """A step of a run on this machine.

    Args:
        run_dir: `runs/NAME`, or `runs/NAME/kfp` of `--runner kfp`.
        step: The step.

    Raises:
        ConfigError: the folder has no config.yaml, or one that does not fit this code.
    """
    from components.errors import ConfigError
    from pipelines.config import load_config

    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{run_dir} is no folder of a run: it has no config.yaml. Give runs/NAME, or the id of a run."
        )
    config = load_config(file)
    wanted = (*step.inputs, *([_TUNED] if step.is_tuned and config.tune.trials else []))
    inputs = {name: str(run_dir / name) for name in wanted if (run_dir / name).exists()}
    summary = run_dir / SUMMARY
    steps = json.loads(summary.read_text())["steps"] if summary.is_file() else []
    error = next((each["reasons"][0] for each in steps if (each["name"], each["state"]) == (step.name, "failed")), "")
    return Recorded(config.step_config(step.section), inputs, error)


def from_server(client: Any, run_id: str, step: Step) -> Recorded:
    """A step of a run on Kubeflow Pipelines, in its last attempt.

    Raises:
        ConfigError: the run has no such step, or its settings do not fit this code.
        HeadraceError: the API does not give the run.
    """
    from pipelines.kubeflow import kfp_api

    with kfp_api.explained(kfp_api.host_of(client)):
        run = client.get_run(run_id)
        pipeline = kfp_api.pipeline_of_run(client, run)
    key, constants, executor, kubernetes = _compiled(pipeline, run_id, step)
    try:
        tried = [attempt for attempt in kfp_api.attempts(client, run_id) if attempt.step == key]
    except kfp_api.NotToldError:
        tried = []
    tried = [attempt for attempt in tried if attempt.failed] or tried
    last = tried[-1] if tried else None
    given = last.executor_input().get("inputs", {}) if last else {}
    parameters = constants | (run.runtime_config.parameters or {} if run.runtime_config else {})
    parameters |= given.get("parameterValues", {})
    uris = {
        name: each["artifacts"][0]["uri"] for name, each in given.get("artifacts", {}).items() if each.get("artifacts")
    }
    secrets = [each for secret in kubernetes.get("secretAsEnv", ()) for each in secret["keyToEnv"]]
    return Recorded(
        settings=_settings(step, parameters),
        inputs={name: uris[name] for name in (*step.inputs, _TUNED) if name in uris},
        error=last.message if last and last.failed else "",
        code_digest=parameters.get("code_digest"),
        image=executor.get("image"),
        environment={each["name"]: each["value"] for each in executor.get("env", ())},
        secrets=tuple(each["envVar"] for each in secrets),
    )


def bring_home(
    recorded: Recorded, step: Step, folder: Path, *, client: Any = None, namespace: str | None = None
) -> dict[str, Path]:
    """The inputs of a step as folders here; those of an object store are copied below `folder`.

    Raises:
        HeadraceError: it is not known where an input is, or it cannot be had.
    """
    from components.errors import HeadraceError
    from pipelines.kubeflow.fetch import fetch

    if missing := [name for name in step.inputs if name not in recorded.inputs]:
        options = " ".join(f"--input {name}=URI" for name in missing)
        raise HeadraceError(
            f"Where the run has {', '.join(missing)} for step '{step.name}' is not known: the step before may have failed, "
            f"or the API does not tell. Give {options}; the run's page in the UI shows them."
        )
    paths = {}
    for name, uri in recorded.inputs.items():
        paths[name] = folder / name if "://" in uri else Path(uri)
        if "://" in uri:
            fetch(uri, paths[name], client=client, namespace=namespace)
    return paths


def differences(recorded: Recorded, step: Step, inputs: Mapping[str, Path]) -> Iterator[str]:
    """In what the code and the libraries here differ from those of the run, one line each.

    The run records one digest of the step's source. Which module differs can be told of those that the steps before
    share with it: the manifests of their artifacts have the digest of each, and the versions.
    """
    from components import artifacts
    from pipelines import reuse

    sources: dict[str, str] = {}
    versions: dict[str, str] = {}
    for path in inputs.values():
        made_from = artifacts.read_manifest(path).made_from
        sources |= made_from["source"]
        versions |= made_from["versions"]
    modules = artifacts.step_modules(step.name, recorded.settings.model_dump(mode="json"))
    now = artifacts.source_digests(modules)
    shared = sources.keys() & now.keys()
    yield from reuse.differences(
        {"source": {name: sources[name] for name in shared}, "versions": versions},
        {"source": {name: now[name] for name in shared}, "versions": {name: _version(name) for name in versions}},
        step.section,
    )
    here = artifacts.digest_of(now)
    if recorded.code_digest not in (None, here):
        yield f"the source of step {step.name}: digest {recorded.code_digest[:12]} there, {here[:12]} here"
    for name in recorded.secrets:
        if name not in os.environ:
            yield f"the environment variable {name}, a Kubernetes secret there, is not set here"


def run_here(
    recorded: Recorded, step: Step, inputs: Mapping[str, Path], folder: Path, *, debugger: bool = False
) -> None:
    """Run a step in this process, its output below `folder`.

    Args:
        recorded: The step.
        step: The same in the table of steps.
        inputs: Its inputs.
        folder: Where its output goes; what `push` would push, too, which is registered nowhere.
        debugger: Start pdb where it fails.

    Raises:
        HeadraceError: the step failed; its own error, where that was meant for the user.
    """
    from components.errors import HeadraceError

    settings = recorded.settings
    if step.name == "push":
        settings = settings.model_copy(update={"destination": str(folder / "served"), "registry": None})
    with _environment(recorded.environment):
        try:
            step.load()(**inputs, **{step.output: folder / step.output}, config=settings)
        except Exception as error:
            traceback.print_exc()
            if debugger:
                pdb.post_mortem(error.__traceback__)
            if isinstance(error, HeadraceError):
                raise
            raise HeadraceError(f"Step '{step.name}' failed here: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    set_environment()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _compiled(pipeline: Mapping[str, Any], run_id: str, step: Step) -> tuple[str, dict[str, Any], Any, Any]:
    """The key of a step's task in a compiled pipeline, its constant parameters, container and Kubernetes settings."""
    from components.errors import ConfigError, did_you_mean
    from pipelines.kubeflow.kfp_api import task_names

    spec = pipeline.get("pipeline_spec", pipeline)
    names = task_names(spec)
    if step.name not in names.values():
        raise ConfigError(f"Run {run_id} has no step '{step.name}'.{did_you_mean(step.name, names.values())}")
    key = next(key for key, name in names.items() if name == step.name)
    dags = [each["dag"] for each in (spec["root"], *spec["components"].values()) if "dag" in each]
    task = next(dag["tasks"][key] for dag in dags if key in dag["tasks"])
    given = task.get("inputs", {}).get("parameters", {})
    constants = {
        name: source["runtimeValue"]["constant"]
        for name, source in given.items()
        if "constant" in source.get("runtimeValue", {})
    }
    label = spec["components"][task["componentRef"]["name"]]["executorLabel"]
    platforms = (pipeline.get("platform_spec") or {}).get("platforms", {})
    kubernetes = platforms.get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {}).get(label, {})
    return key, constants, spec["deploymentSpec"]["executors"][label].get("container", {}), kubernetes


def _settings(step: Step, parameters: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError

    from components.config import SECTIONS
    from components.errors import ConfigError

    try:
        settings = SECTIONS[step.section].model_validate_json(parameters["config"])
    except (ValidationError, KeyError) as error:
        raise ConfigError(
            f"The settings that the run has for step '{step.name}' do not fit this code: {error}\nReplay it with the "
            "version of the code that the run was compiled with."
        ) from error
    changed = {"path": parameters["data_path"]} if step.name == "ingest" and parameters.get("data_path") else {}
    return settings.model_copy(update=changed)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("run")
@click.argument("step_name", metavar="STEP", type=STEP_NAMES)
@access_options
@click.option("--to", "folder", type=click.Path(path_type=Path), help="Working folder.  [default: replay/RUN/STEP]")
@click.option("--input", "given", multiple=True, callback=pairs, metavar="NAME=URI", help="Where an input is instead.")
@click.option("--debugger", is_flag=True, help="Start pdb where the step fails.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error of this command.")
def main(
    run: str,
    step_name: str,
    access: Access | None,
    folder: Path | None,
    given: dict[str, str],
    debugger: bool,
    debug: bool,
) -> None:
    """Bring the inputs and settings of a step of a run home, and run it here.

    RUN is the id of a run of the Kubeflow Pipelines at --host, or the folder of a run on this machine, runs/NAME. What the
    step fetches from an object store and what it makes lies in the working folder; a second replay fetches nothing again.

    Exit codes: 0 the step ran well here; otherwise it failed, with the exit code that its error has in a run.
    """
    step = step_named(step_name)
    with reported(debug=debug):
        from components.errors import ConfigError

        if step.name == "deploy":
            raise ConfigError("Step 'deploy' only says who gets requests: to replay it would say it again.")
        client = None
        if Path(run).is_dir():
            recorded = from_folder(Path(run), step)
        elif access is None:
            raise ConfigError(f"There is no folder {run}. For the run of that id on Kubeflow Pipelines give --host.")
        else:
            from pipelines.kubeflow import kfp_api

            client = kfp_api.connect(access)
            recorded = from_server(client, run, step)
        if unknown := set(given) - {*step.inputs, *([_TUNED] if step.is_tuned else [])}:
            raise ConfigError(f"--input: step '{step.name}' has no input {', '.join(sorted(unknown))}.")
        recorded = dataclasses.replace(recorded, inputs={**recorded.inputs, **given})
        folder = folder or Path("replay", run.strip("./"), step.name)
        inputs = bring_home(recorded, step, folder, client=client, namespace=access.namespace if access else None)
        found = list(differences(recorded, step, inputs))
        recorded = _with_best(recorded, inputs.pop(_TUNED, None))
        _say(recorded, step, inputs, found, folder)
        run_here(recorded, step, inputs, folder, debugger=debugger)
        click.echo(f"Step '{step.name}' ran well here; its output: {folder / step.output}")


def _with_best(recorded: Recorded, best: Path | None) -> Recorded:
    """The same with the settings that `tune` found, as the step takes them when it runs."""
    from components.artifacts import open_artifact
    from pipelines.tuned import tuned_section

    if best is None:
        return recorded
    found = open_artifact(best, step="tune").result["settings"]
    return dataclasses.replace(recorded, settings=tuned_section(recorded.settings, found))


def _say(recorded: Recorded, step: Step, inputs: Mapping[str, Path], found: Sequence[str], folder: Path) -> None:
    from pipelines.local import write_whole

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.json", recorded.settings.model_dump_json(indent=1) + "\n")
    if recorded.error:
        click.echo(f"There, step '{step.name}' failed: {recorded.error}")
    if recorded.image:
        click.echo(f"Image: {recorded.image}")
    click.echo(f"Settings: {folder / 'config.json'}")
    for name, path in inputs.items():
        click.echo(f"Input {name}: {path}")
    for difference in found:
        click.echo(f"Not as there: {difference}")


if __name__ == "__main__":
    main(prog_name="python -m pipelines.replay")
