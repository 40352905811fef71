"""YAML with comments: a key that begins with `# ` and has no value is written as a comment line.

So the reason of a field stands beside it, in the code that makes the object and in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

HEADER = "# Made by `headrace manifests`: change its config, not this.\n"
# Beside the manifests: the config that they follow from.
CONFIG_FILE = "serving.resolved.yaml"

_COMMENT = re.compile(r"^( *)(['\"]?)(# .*)\2: null$", re.MULTILINE)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def why(text: str) -> dict[str, None]:
    """A comment, to be unpacked into a mapping above the key that it explains."""
    return {f"# {text}": None}


def without_comments(value: Any) -> Any:
    """The object itself."""
    if isinstance(value, dict):
        return {key: without_comments(inner) for key, inner in value.items() if not key.startswith("# ")}
    if isinstance(value, list):
        return [without_comments(item) for item in value]
    return value


def to_yaml(documents: Iterable[Any]) -> str:
    """The text of a YAML file with these documents, keys in their order."""
    texts = (yaml.dump(each, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000) for each in documents)
    return HEADER + _COMMENT.sub(_as_comment, "---\n".join(texts))


def _as_comment(line: re.Match[str]) -> str:
    indent, quote, comment = line.groups()
    return indent + comment.replace(quote * 2, quote)
