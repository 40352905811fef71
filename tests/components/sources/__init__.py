"""What the tests of the sources share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from components.ingest.columns import features_of


def read(source: Callable[..., Any], path: object, **args: Any) -> pa.Table:
    """All that a source yields of a path."""
    return pa.Table.from_batches(list(source(path=str(path), **args)))


def kinds(table: pa.Table) -> dict[str, str]:
    """The type of the feature that each column becomes."""
    return {name: feature.type for name, feature in features_of(table.schema).items()}
