"""The settings as given: a tree from the YAML file and the overrides, which remembers where each value was set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from components.errors import ConfigError, did_you_mean
from pipelines import yaml_text
from pipelines.config_problems import Problem

_EXAMPLE = "train.epochs=3"


@dataclasses.dataclass
class Settings:
    """A tree of settings.

    Attributes:
        file: The YAML file.
        tree: What the file and the overrides say.
        origins: Path -> where it was set: `file:line` or `override '...'`.
        problems: What is wrong already.
        overrides: The overrides applied so far, as `origins` names them.
    """

    file: Path
    tree: dict[str, Any]
    origins: dict[tuple[str, ...], str]
    problems: list[Problem]
    overrides: list[str] = dataclasses.field(default_factory=list)

    def origin(self, path: Sequence[str]) -> str:
        """Where the setting at `path`, or else the nearest one above it, was set."""
        for end in range(len(path), 0, -1):
            if (place := self.origins.get(tuple(path[:end]))) is not None:
                return place
        return str(self.file)

    def rank(self, path: Sequence[str]) -> tuple[int, int]:
        """Sorts settings by their line in the file, then by their place among the overrides."""
        place = self.origin(path)
        if place in self.overrides:
            return 1, self.overrides.index(place)
        line = place.rpartition(":")[2]
        return 0, int(line) if line.isdigit() else 0

    def override(self, text: str) -> None:
        """Apply `section.key=value`."""
        dotted, equals, value_text = text.partition("=")
        path = dotted.strip().split(".")
        place = f"override '{text}'"
        self.overrides.append(place)
        try:
            if not equals or not all(path):
                raise ConfigError(f"is not section.key=value, as in {_EXAMPLE}")
            value = yaml_text.parse(value_text)
            _set(self.tree, path, value)
        except (ConfigError, yaml.YAMLError) as error:
            message = str(error) if isinstance(error, ConfigError) else f"its value is not YAML: {_one_line(error)}"
            self.origins.setdefault((text,), place)
            self.problems.append(Problem((text,), message, shown=False))
            return
        self.origins = {at: where for at, where in self.origins.items() if at[: len(path)] != tuple(path)}
        self.origins[tuple(path)] = place


def read_settings(file: Path, overrides: Sequence[str]) -> Settings:
    """Read the YAML file and apply the overrides.

    Raises:
        ConfigError: there is no such file, or it is no YAML mapping.
    """
    text = _read(file)
    try:
        settings = _parse(file, text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: this is not YAML: {_one_line(error)}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: this is not YAML: {_one_line(error)}.") from error
    for override in overrides:
        settings.override(override)
    return settings


def _parse(file: Path, text: str) -> Settings:
    node = yaml_text.compose(text, str(file))
    if node is None:
        raise ConfigError(f"{file} is empty. It needs at least: name, data, evaluate.")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{file}:{node.start_mark.line + 1}: expected `key: value` lines, received {_kind(node)}.")
    problems = [
        Problem(path, f"this key is set on line {first}, too") for path, first, _ in yaml_text.repeated_keys(node)
    ]
    tree = yaml_text.construct(node)
    origins = {path: f"{file}:{line}" for path, line in yaml_text.key_lines(node)}
    return Settings(file, tree, origins, problems)


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"There is no config {file}.{_near(file)}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{file} is a folder. Give one of the YAML files in it.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise ConfigError(f"The config {file} cannot be read: {error.strerror}.") from error


def _near(file: Path) -> str:
    others = [str(other) for folder in (file.parent, Path("configs")) for other in folder.glob("*.yaml")]
    return did_you_mean(str(file), others) if others else " Give the path of a YAML file."


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return " ".join(part for part in (error.context, error.problem) if part)
    return " ".join(str(error).split())


def _set(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    inner: Any = tree
    for depth, key in enumerate(path[:-1]):
        inner = _inside(inner, key, path[:depth])
    last, above = path[-1], path[:-1]
    if isinstance(inner, list):
        inner[_index(inner, last, above)] = value
    elif isinstance(inner, dict):
        inner[last] = value
    else:
        raise ConfigError(f"{'.'.join(above)} is {inner!r}, which has no '{last}' inside")


def _inside(container: Any, key: str, above: Sequence[str]) -> Any:
    if isinstance(container, list):
        return container[_index(container, key, above)]
    if isinstance(container, Mapping):
        if container.get(key) is None:
            container[key] = {}  # type: ignore[index]
        return container[key]
    raise ConfigError(f"{'.'.join(above)} is {container!r}, which has no '{key}' inside")


def _index(items: list[Any], key: str, above: Sequence[str]) -> int:
    if not key.isdigit() or int(key) >= len(items):
        allowed = f"its items are 0 to {len(items) - 1}" if items else "it is empty"
        raise ConfigError(f"{'.'.join(above)} is a list without an item '{key}': {allowed}")
    return int(key)
