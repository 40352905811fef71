"""A schema as YAML: read with the line of what is wrong, written a line for each feature, edited with comments kept."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from components.errors import ConfigError, did_you_mean
from components.schema import spec
from components.schema.spec import FeatureSchema, Schema

SCHEMA_FILE = "schema.yaml"
_HEADER = """\
# What each feature must look like. Edit a copy, name it in validate.schema_path, and departures become errors.
#   type: int, float, string or uint8     shape: of one example, null for any length, absent for a scalar
#   min_fraction: least share of rows that have a value     domain: the only values allowed     min, max: bounds
#   not_in_environment: where it is not, as a label is not in serving     drift, skew: largest distance, in [0, 1]
# All keys: docs/schema.md
"""
_BOUNDS = ("min", "max")
_KINDS_OF_PROBLEMS = {"missing": "FEATURE_MISSING_TYPE", "string_too_short": "FEATURE_MISSING_NAME"}
_NESTED: dict[str, type[BaseModel]] = {
    "dataset": spec.DatasetSchema,
    "defaults": spec.Defaults,
    "drift": spec.Comparator,
    "skew": spec.Comparator,
    "bool_domain": spec.BoolDomain,
}


def fields_of(feature: FeatureSchema) -> dict[str, Any]:
    """What a feature says beyond the defaults, as YAML has it."""
    fields = feature.model_dump(mode="json", exclude_defaults=True)
    if feature.type == "int":
        fields |= {bound: int(fields[bound]) for bound in _BOUNDS if bound in fields}
    return fields


def write_schema(file: Path, schema: Schema) -> None:
    """Write a schema as YAML, a line for each feature."""
    file.write_text(schema_text(schema))


def schema_text(schema: Schema) -> str:
    """A schema as YAML, a line for each feature; equal schemas give equal texts."""
    top = schema.model_dump(mode="json", exclude_defaults=True, exclude={"features"})
    lines = [_HEADER + "".join(f"{_line_of(name, value)}\n" for name, value in top.items()) + "features:"]
    lines += [f"  {_line_of(name, fields_of(feature))}" for name, feature in schema.features.items()]
    return "\n".join(lines) + "\n"


def load_schema(file: Path, *, setting: str = "validate.schema_path") -> Schema:
    """Read a schema that a user wrote.

    Args:
        file: The YAML.
        setting: What named the file, for the messages.

    Raises:
        ConfigError: it cannot be read or says something that a schema cannot; with the line.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {error}.") from error
    return parse_schema(text, file, setting=setting)


def parse_schema(text: str, file: Path, *, setting: str) -> Schema:
    """The schema in the text of a file; the arguments and errors are those of `load_schema`."""
    try:
        root, fields = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{setting}: {file} is not YAML: {' '.join(str(error).split())}.") from error
    try:
        return Schema.model_validate(fields)
    except ValidationError as error:
        problems = [_describe(problem, root, file) for problem in error.errors()]
        raise ConfigError(f"{setting}:\n" + "\n".join(f"  {problem}" for problem in problems)) from error


def edited(
    text: str, features: Mapping[str, Mapping[str, Any]], dataset: Mapping[str, Any], added: Mapping[str, FeatureSchema]
) -> str:
    """The text of a schema with some keys changed; comments, order and layout stay.

    Args:
        text: YAML of a valid schema.
        features: Feature -> key -> new value; `None` takes the key out, of `domain` it is what comes to it.
        dataset: The same for the keys of `dataset`.
        added: Features that are new, put at the end.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 2**31
    editor.indent(mapping=2, sequence=4, offset=2)
    root = editor.load(text)
    for name, changes in features.items():
        _change(root["features"][name], changes)
    if dataset:
        _change(root.setdefault("dataset", CommentedMap()), dataset)
    for name, feature in added.items():
        root["features"][name] = _in_one_line(CommentedMap(fields_of(feature)))
    out = io.StringIO()
    editor.dump(root, out)
    return out.getvalue()


def _in_one_line(node: Any) -> Any:
    node.fa.set_flow_style()
    return node


def _change(node: Any, changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if value is None:
            node.pop(key, None)
        elif key == "domain" and key in node:
            node[key].extend(item for item in value if item not in node[key])
        else:
            node[key] = value


def _line_of(name: str, value: Any) -> str:
    text = yaml.safe_dump({name: value}, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31)
    return text.strip()[1:-1]


def _describe(problem: Any, root: yaml.Node | None, file: Path) -> str:
    place = [str(part) for part in problem["loc"]]
    hint = ""
    if problem["type"] == "extra_forbidden":
        hint = "." + did_you_mean(place[-1], _known_keys(place[:-1]))
    elif len(place) > 1 and (kind := _KINDS_OF_PROBLEMS.get(problem["type"])):
        hint = f". Say what it is [{kind}]"
    return f"{file}, line {_line(root, place)}: {'.'.join(place) or 'the file'}: {problem['msg']}{hint}"


def _known_keys(above: list[str]) -> Mapping[str, Any]:
    if not above:
        return Schema.model_fields
    if above[0] == "features" and len(above) == 2:
        return FeatureSchema.model_fields
    return _NESTED.get(above[-1], spec.TokenBounds).model_fields


def _line(node: yaml.Node | None, place: list[str]) -> int:
    """The line on which a place of the file stands, or the nearest thing around it."""
    line = node.start_mark.line + 1 if node else 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == part]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
    return line
