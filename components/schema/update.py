"""A schema that gives way to data: what departs becomes allowed, as TFDV's `update_schema` does it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from components.anomalies import DATASET
from components.schema.checks import departures
from components.schema.files import edited, parse_schema
from components.schema.infer import infer_feature
from components.schema.spec import Environment, FeatureSchema
from components.statistics import Statistics


def update_schema(
    text: str,
    splits: dict[str, Statistics],
    *,
    environment: Environment = "training",
    kinds: Collection[str] = (),
    features: Collection[str] = (),
) -> tuple[str, list[str]]:
    """Relax a schema until data passes.

    Args:
        text: YAML of the schema; its comments and order stay.
        splits: Statistics of each split.
        environment: Where the data is from.
        kinds: Only these anomalies; empty: all.
        features: Only of these features; empty: all.

    Returns:
        The new text, and a line for each thing that was changed.

    Raises:
        ConfigError: the schema is wrong.
    """
    told = []
    for split, statistics in splits.items():
        schema = parse_schema(text, Path("the schema"), setting="schema")
        changes: dict[str, dict[str, Any]] = defaultdict(dict)
        added: dict[str, FeatureSchema] = {}
        for name, departure in departures(statistics, schema, environment):
            if (kinds and departure.kind not in kinds) or (features and name not in features):
                continue
            if departure.kind == "SCHEMA_NEW_COLUMN":
                added[name] = infer_feature(statistics[name])
            elif departure.fix:
                changes[name] |= departure.fix
            else:
                told.append(f"{name}: not changed [{departure.kind}]: {departure.message}")
                continue
            told.append(f"{name}: {_said(departure.fix) or 'added'} [{departure.kind}, {split} split]")
        dataset = changes.pop(DATASET, {})
        if changes or dataset or added:
            text = edited(text, changes, dataset, added)
    return text, told


def _said(fix: dict[str, Any]) -> str:
    return ", ".join(f"{key} taken out" if value is None else f"{key} {value}" for key, value in fix.items())
