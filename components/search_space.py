"""The search space of `tune`: the values that a setting may take, and configurations with some of them in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from components.config import Candidates, Range, TrainConfig, TuneConfig


def with_settings(config: TrainConfig, settings: Mapping[str, Any]) -> TrainConfig:
    """The configuration of the step `train` with other settings of `train` and `model`.

    Args:
        config: As the step receives it, with the model in it.
        settings: Path, such as `train.optimizer.learning_rate` or `model.args.dropout`, -> value.

    Raises:
        ValidationError: the configuration does not allow them.
    """
    tree = config.model_dump(mode="json")
    for path, value in settings.items():
        put(tree, path.removeprefix("train."), value)
    return TrainConfig.model_validate(tree)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path of a tree of settings."""
    *above, last = path.split(".")
    for key in above:
        tree[key] = tree.get(key) or {}
        tree = tree[key]
    tree[last] = value


def values_of(candidates: Candidates) -> Sequence[Any] | None:
    """Every value, in order; `None` if they are endless."""
    if not isinstance(candidates, Range):
        return candidates
    if candidates.is_whole:
        return range(int(candidates.low), int(candidates.high) + 1, int(candidates.step or 1))
    if candidates.step is None:
        return None
    # In decimals, or 0.1 + 2 * 0.1 would not be 0.3.
    low, high, step = (Decimal(str(number)) for number in (candidates.low, candidates.high, candidates.step))
    return [float(low + place * step) for place in range(math.floor((high - low) / step) + 1)]


def ends_of(candidates: Candidates) -> Sequence[Any]:
    """The least and the greatest value of a range; every one of a list."""
    if not isinstance(candidates, Range):
        return candidates
    values = values_of(candidates)
    return [float(candidates.low), float(candidates.high)] if values is None else [values[0], values[-1]]


def num_trials(config: TuneConfig) -> int:
    """How many trials there will be: no more than a grid has combinations."""
    if config.sampler != "grid":
        return config.trials
    return min(config.trials, math.prod(len(values_of(each) or ()) for each in config.space.values()))


def combination(space: dict[str, Candidates], number: int) -> dict[str, Any]:
    """The `number`-th combination of a finite space, from 0; the last setting changes first."""
    chosen: dict[str, Any] = {}
    for path, candidates in reversed(space.items()):
        values = values_of(candidates) or ()
        number, place = divmod(number, len(values))
        chosen[path] = values[place]
    return {path: chosen[path] for path in space}


def as_written(config: TuneConfig) -> dict[str, Any] | None:
    """The settings that the configuration has without a search, if all of them are in the space."""
    tree = config.train.model_dump(mode="json")
    written: dict[str, Any] = {}
    for path, candidates in config.space.items():
        value: Any = tree
        for key in path.removeprefix("train.").split("."):
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        if not _holds(candidates, value):
            return None
        written[path] = value
    return written


def _holds(candidates: Candidates, value: Any) -> bool:
    values = values_of(candidates)
    if values is not None:
        return value in values
    return (
        isinstance(candidates, Range) and isinstance(value, int | float) and candidates.low <= value <= candidates.high
    )
