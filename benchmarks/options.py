"""Command-line options that the benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click


def names_of(known: Mapping[str, object]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A callback that takes `a,b` for a list of names in `known`, and refuses others."""

    def parse(_context: click.Context, _parameter: click.Parameter, value: Any) -> list[str]:
        names = [name.strip() for name in value.split(",")]
        for name in names:
            if name not in known:
                raise click.BadParameter(f"there is no '{name}'; there are {', '.join(known)}")
        return names

    return parse
