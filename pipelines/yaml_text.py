"""YAML as this project reads and writes it: YAML 1.2's plain values, and the line of every key.

PyYAML follows YAML 1.1, in which `on` is true, `1e-3` a text, `010` eight, `1:30` ninety and `2024-01-01` a date. None
of that is what someone who writes a config means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

Path = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_RESOLVERS = (
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(rf"({_INT.pattern})$"), "-+0123456789"),
    ("float", re.compile(rf"({_FLOAT.pattern})$"), "-+.0123456789"),
    ("null", re.compile(r"(~|null|Null|NULL|)$"), "~nN\0"),
    ("merge", re.compile(r"<<$"), "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something else; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


for _name, _pattern, _first in _RESOLVERS:
    _characters = ["" if character == "\0" else character for character in _first]
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, _characters)
_Dumper.add_implicit_resolver(f"{_TAG}float", _RESOLVERS[2][1], list(_RESOLVERS[2][2]))
_Loader.add_constructor(f"{_TAG}int", _construct_int)


def compose(text: str, name: str) -> yaml.Node | None:
    """The node tree of a YAML text; `name` is what errors call it.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def construct(node: yaml.Node) -> Any:
    """The value of a node; merge keys (`<<`) are resolved in the node, too."""
    loader = _Loader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def parse(text: str) -> Any:
    """The value of a YAML text."""
    node = compose(text, "value")
    return None if node is None else construct(node)


def dump(value: Any) -> str:
    """A value as YAML, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def key_lines(node: yaml.Node, path: Path = (), above: tuple[int, ...] = ()) -> Iterator[tuple[Path, int]]:
    """The path and line, from 1, of every key and list item; of two equal keys the later comes last.

    Raises:
        yaml.YAMLError: an alias contains itself.
    """
    for name, line, value in _children(node, above):
        yield (*path, name), line
        yield from key_lines(value, (*path, name), (*above, id(node)))


def repeated_keys(node: yaml.Node, path: Path = (), above: tuple[int, ...] = ()) -> Iterator[tuple[Path, int, int]]:
    """Path, first and later line of every key that its mapping has more than once. Call it before `construct`."""
    first: dict[str, int] = {}
    for name, line, value in _children(node, above):
        if first.setdefault(name, line) != line:
            yield (*path, name), first[name], line
        yield from repeated_keys(value, (*path, name), (*above, id(node)))


def _children(node: yaml.Node, above: tuple[int, ...]) -> Iterator[tuple[str, int, yaml.Node]]:
    if id(node) in above:
        raise yaml.constructor.ConstructorError(None, None, "an alias contains itself", node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield str(index), item.start_mark.line + 1, item
