"""What differs between two Kubeflow pipelines: `python -m pipelines.diff A B [section.key=value ...]`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pipelines.exits import DIFFERENT, reported
from pipelines.kubeflow import kfp_api
from pipelines.kubeflow.kfp_api import Access, access_options
from pipelines.steps import STEPS

_KINDS = ("steps", "settings", "code", "images", "resources", "caching", "control flow", "interfaces", "pipeline")
_LONGEST_SHOWN = 100
_INPUT = "pipelinechannel--"


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        kind: steps, settings, code, images, resources, caching, control flow, interfaces or pipeline.
        name: What differs, as in the configuration for settings; empty where the kind says it.
        old: Its value in the first pipeline, as JSON text; None if it is not there.
        new: Its value in the second.
        steps: The steps, or groups of steps, in which it differs so.
    """

    kind: str
    name: str
    old: str | None
    new: str | None
    steps: tuple[str, ...]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Everything in which two compiled pipelines differ, by its meaning: names of components and order play no part.

    Args:
        old: A pipeline as `kfp` compiles it, or with its platform part as `{"pipeline_spec": ..., "platform_spec": ...}`.
        new: Another.

    Returns:
        The differences, in the order of `Change.kind`.
    """
    before, after = _parts(old), _parts(new)
    steps: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for where in sorted({*before, *after}):
        if where not in before or where not in after:
            there = ["true" if where in parts else None for parts in (before, after)]
            steps["steps", where, there[0], there[1]] = [where]
            continue
        left, right = _leaves(before[where]), _leaves(after[where])
        section = _section(where, after[where])
        for path in sorted({*left, *right}):
            values = _json(left, path), _json(right, path)
            if values[0] != values[1]:
                steps.setdefault((*_kind_and_name(where, path, section), *values), []).append(where)
    changes = [Change(*key, tuple(where)) for key, where in steps.items()]
    return sorted(changes, key=lambda change: (_KINDS.index(change.kind), change.name))


def shown(changes: Sequence[Change]) -> str:
    """The differences as text, a line for each that may be of several steps."""
    lines: dict[str, dict[str, list[str]]] = {}
    for change in changes:
        lines.setdefault(change.kind, {}).setdefault(_told(change), []).extend(filter(None, change.steps))
    return "\n".join(
        f"{kind}\n"
        + "\n".join(
            f"  {told}" + (f"  ({', '.join(dict.fromkeys(steps))})" if steps else "") for told, steps in told_of.items()
        )
        for kind, told_of in lines.items()
    )


def load(source: str, overrides: Sequence[str], *, image: str | None, access: Access | None) -> dict[str, Any]:
    """A pipeline from a compiled file, from a configuration that is compiled now, or from the server.

    Args:
        source: A path, `pipeline:NAME[@VERSION]` (default: the newest version) or `run:ID`.
        overrides: `section.key=value`, for a configuration.
        image: The image that the steps of a configuration run in.
        access: Where the server is.

    Raises:
        ConfigError: there is no such file, or the configuration is wrong.
        HeadraceError: the server does not give it.
    """
    kind, _, name = source.partition(":")
    if kind in ("pipeline", "run") and not Path(source).exists():
        return _from_server(kind, name, source, access)
    if (pipeline := _compiled(Path(source))) is not None:
        return pipeline
    from pipelines.compile import compile_pipeline
    from pipelines.config import load_config

    compiled = kfp_api.parse_pipeline(compile_pipeline(load_config(source, overrides), image=image))
    return compiled or {}


def _compiled(file: Path) -> dict[str, Any] | None:
    """The compiled pipeline in a file; None if there is a configuration in it."""
    import yaml

    from components.errors import ConfigError

    try:
        return kfp_api.parse_pipeline(file.read_text())
    except yaml.YAMLError:
        return None  # what is wrong with it, load_config says better
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}). Give a compiled pipeline, a configuration, pipeline:NAME[@VERSION] or run:ID."
        ) from error


def _from_server(kind: str, name: str, source: str, access: Access | None) -> dict[str, Any]:
    from components.errors import ConfigError, HeadraceError

    if access is None:
        raise ConfigError(f"{source} is on a server: give its --host.")
    client = kfp_api.connect(access)
    with kfp_api.explained(access.host):
        if kind == "run":
            return kfp_api.pipeline_of_run(client, client.get_run(name))
        pipeline, _, version = name.partition("@")
        if (pipeline_id := kfp_api.find_pipeline(client, pipeline, access.namespace)) is None:
            raise HeadraceError(f"{access.host} has no pipeline '{pipeline}'.")
        wanted = {"filter": kfp_api.named(version)} if version else {}
        found = client.list_pipeline_versions(pipeline_id, sort_by="created_at desc", **wanted).pipeline_versions
    if not found:
        raise HeadraceError(f"Pipeline '{pipeline}' has no version{f' {version!r}' if version else ''}.")
    return dict(found[0].pipeline_spec)


def _parts(pipeline: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The steps and groups by name, and what belongs to none of them under ""; nothing of the pipeline is left out."""
    spec = pipeline.get("pipeline_spec", pipeline)
    platforms = (pipeline.get("platform_spec") or {}).get("platforms", {})
    found: dict[str, dict[str, Any]] = {}
    _visit(spec, platforms, spec["root"]["dag"], (), {}, found)
    rest = {name: value for name, value in spec.items() if name not in ("components", "deploymentSpec", "root")}
    rest["parameters"] = spec["root"].get("inputDefinitions", {})
    rest["outputs"] = [spec["root"].get("outputDefinitions", {}), spec["root"]["dag"].get("outputs", {})]
    for name, platform in platforms.items():
        rest[name] = {key: value for key, value in platform.items() if key != "deploymentSpec"}
    return found | {"": rest}


def _visit(
    spec: Mapping[str, Any],
    platforms: Mapping[str, Any],
    dag: Mapping[str, Any],
    path: tuple[str, ...],
    given: Mapping[str, str],
    found: dict[str, dict[str, Any]],
) -> None:
    """Collect the tasks of a group of steps and of the groups in it; `given` says where the group's inputs are from."""
    names = {key: task.get("taskInfo", {}).get("name", key) for key, task in dag["tasks"].items()}
    for key, task in dag["tasks"].items():
        name = names[key]
        component = spec.get("components", {}).get(task["componentRef"]["name"], {})
        inputs = {
            each: _origin(source, given, names)
            for sort in ("artifacts", "parameters")
            for each, source in task.get("inputs", {}).get(sort, {}).items()
        }
        part = {field: value for field, value in task.items() if field not in ("inputs", "componentRef", "taskInfo")}
        part["group"] = "/".join(path)
        part["dependentTasks"] = sorted(names.get(before, before) for before in task.get("dependentTasks", ()))
        inner = component.get("dag")
        if inner is not None:
            _visit(spec, platforms, inner, (*path, name), inputs, found)
            part |= {"outputs": inner.get("outputs", {}), "inputs": _own(inputs, json.dumps(task))}
        else:
            label = component.get("executorLabel", "")
            part |= {"inputs": inputs, "executor": spec["deploymentSpec"]["executors"].get(label, {})}
            part["interface"] = {field: value for field, value in component.items() if field != "executorLabel"}
            part["platforms"] = {
                platform: content.get("deploymentSpec", {}).get("executors", {}).get(label, {})
                for platform, content in platforms.items()
            }
        found["/".join((*path, name)) if name in found else name] = part


def _own(inputs: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The inputs of a group of which its condition or loop speaks; the steps in it say themselves where theirs are from."""
    return {name: origin for name, origin in inputs.items() if task.count(name) > 1 or not name.startswith(_INPUT)}


def _origin(source: Mapping[str, Any], given: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Where an input is from: a value, or `step.output`, whatever groups it passes through."""
    if "runtimeValue" in source:
        return _expanded(source["runtimeValue"].get("constant"))
    for kind, key in (("taskOutputArtifact", "outputArtifactKey"), ("taskOutputParameter", "outputParameterKey")):
        if kind in source:
            producer = source[kind]["producerTask"]
            return f"{names.get(producer, producer)}.{source[kind][key]}"
    for kind in ("componentInputArtifact", "componentInputParameter"):
        if kind in source and len(source) == 1:
            return given.get(source[kind], f"pipeline input {source[kind]}")
    return dict(source)


def _expanded(value: Any) -> Any:
    """A text that is JSON, as the settings of a step are, as what it stands for; the whole configuration in it, too."""
    from pipelines import yaml_text

    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, dict) and isinstance(value.get("resolved_config"), str):
        return value | {"resolved_config": yaml_text.parse(value["resolved_config"])}
    return value


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The values of a tree by their paths; lists of plain values are values, of other things trees."""
    if isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        tree = {str(number): item for number, item in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {leaf: value for name, child in tree.items() for leaf, value in _leaves(child, (*path, name)).items()}


def _section(where: str, part: Mapping[str, Any]) -> str:
    """The section of the configuration that a task is given, by its name, or, if it is of use to several, by an argument."""
    from pipelines.kubeflow.config import CONVERT, ENCODE, SUMMARY, TRIAL

    sections = {step.name: step.section for step in STEPS}
    sections |= {ENCODE: "data", TRIAL: "tune", CONVERT: "export", SUMMARY: "notify"}
    return str(part.get("inputs", {}).get("section") or sections.get(where.rpartition("/")[2], where))


def _kind_and_name(where: str, path: tuple[str, ...], section: str) -> tuple[str, str]:
    """Under which heading and name a difference is told."""
    name = ".".join(path)
    if where == "":
        return "pipeline", name
    if path[:2] == ("inputs", "config"):
        return "settings", _setting(section, path[2:])
    if path[:2] == ("inputs", "code_digest") or path[:3] in (_executor("command"), _executor("args")):
        return "code", "" if "inputs" in path else "wrapper"
    if path[:3] == _executor("image"):
        return "images", ""
    if path[0] in ("executor", "platforms"):
        return "resources", ".".join(part for part in path if part not in ("executor", "container", "platforms"))
    if path[0] == "cachingOptions":
        return "caching", path[-1]
    if path[0] == "interface":
        return "interfaces", ".".join(path[1:])
    return "control flow", name


def _executor(field: str) -> tuple[str, str, str]:
    return ("executor", "container", field)


def _setting(section: str, path: tuple[str, ...]) -> str:
    """The name of a setting in the configuration, by its place in the settings of a step."""
    from components.config import SECTIONS, inherited_fields

    if path[:1] == ("resolved_config",):
        return ".".join(path[1:])
    if section in SECTIONS and path[:1] and path[0] in inherited_fields(SECTIONS[section]):
        return ".".join(path)
    return ".".join((section, *path))


def _json(values: Mapping[Any, Any], key: Any) -> str | None:
    return json.dumps(values[key], sort_keys=True, ensure_ascii=False) if key in values else None


def _told(change: Change) -> str:
    if change.kind == "steps":
        return "added" if change.old is None else "removed"
    values = [value or "absent" for value in (change.old, change.new)]
    told = " -> ".join(values) if max(map(len, values)) <= _LONGEST_SHOWN and change.kind != "code" else "changed"
    return f"{change.name}: {told}" if change.name else told


def _fields(change: Change) -> dict[str, Any]:
    """A change for `--json`; a value that is not there is left out."""
    values = {name: json.loads(text) for name in ("old", "new") if (text := getattr(change, name)) is not None}
    return {"kind": change.kind, "name": change.name, "steps": change.steps, **values}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@click.argument("overrides", nargs=-1, metavar="[section.key=value ...]")
@access_options
@click.option(
    "--image",
    help="Image of the steps, where A or B is a configuration.  [default: kubeflow.image, or headrace:<version>]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    old: str,
    new: str,
    overrides: tuple[str, ...],
    access: Access | None,
    image: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Say in what two Kubeflow pipelines differ.

    A and B are each a compiled pipeline, a configuration (which is compiled now, with the overrides), or on the server
    at --host pipeline:NAME[@VERSION] or run:ID.

    Exit codes: 0 nothing differs, 1 failed, 2 the configuration is wrong, 5 something differs.
    """
    with reported(debug=debug):
        changes = differences(*(load(each, overrides, image=image, access=access) for each in (old, new)))
        if as_json:
            click.echo(json.dumps([_fields(change) for change in changes], indent=1, ensure_ascii=False))
        elif changes:
            click.echo(shown(changes))
    raise SystemExit(DIFFERENT if changes else 0)


if __name__ == "__main__":
    main(prog_name="python -m pipelines.diff")
