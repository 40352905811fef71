"""The search space: the values of a setting, combinations of them, and configurations with some of them in place."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from components.config import ModelConfig, TrainConfig, TuneConfig
from components.search_space import as_written, combination, ends_of, num_trials, values_of, with_settings

TRAIN = TrainConfig(
    epochs=7,
    optimizer={"learning_rate": 0.002},
    seed=3,
    model=ModelConfig(args={"dropout": 0.1, "hidden_dims": [8]}),
)


def config(space: dict[str, Any], **settings: Any) -> TuneConfig:
    return TuneConfig.model_validate({"trials": 5, "space": space, "train": TRAIN, **settings})


def candidates(given: Any) -> Any:
    return config({"train.epochs": given}).space["train.epochs"]


@pytest.mark.parametrize(
    ("given", "values", "ends"),
    [
        ({"low": 2, "high": 5}, [2, 3, 4, 5], [2, 5]),
        ({"low": 2, "high": 9, "step": 3}, [2, 5, 8], [2, 8]),
        ({"low": 1, "high": 4, "log": True}, [1, 2, 3, 4], [1, 4]),
        ({"low": 0.1, "high": 0.35, "step": 0.1}, [0.1, 0.2, 0.3], [0.1, 0.3]),
        ({"low": 0, "high": 0.5, "step": 0.25}, [0.0, 0.25, 0.5], [0.0, 0.5]),
        ({"low": 1e-4, "high": 1e-2, "log": True}, None, [1e-4, 1e-2]),
        (["adam", None, [1, 2]], ["adam", None, [1, 2]], ["adam", None, [1, 2]]),
    ],
    ids=str,
)
def test_the_values_of_a_setting(given: Any, values: list[Any] | None, ends: list[Any]) -> None:
    found = values_of(candidates(given))
    assert (found if found is None else list(found)) == values
    assert list(ends_of(candidates(given))) == ends


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"low": 3, "high": 3}, "low must be below high, received 3 and 3"),
        ({"low": 0, "high": 1, "log": True}, "log needs low above 0 and no step"),
        ({"low": 1, "high": 9, "log": True, "step": 2}, "log needs low above 0 and no step"),
        ({"low": 1, "high": 9, "step": 0.5}, "step of whole numbers must be whole, received 0.5"),
        ([1], "at least 2 items"),
    ],
    ids=str,
)
def test_what_is_no_set_of_values(given: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        candidates(given)


def test_a_grid_has_every_combination_once_and_no_more_trials() -> None:
    space = {"train.epochs": {"low": 1, "high": 2}, "model.args.dropout": [0.0, 0.1, 0.2]}
    grid = config(space, sampler="grid", trials=99)
    assert num_trials(grid) == 6
    assert num_trials(config(space, sampler="grid", trials=4)) == 4
    assert num_trials(config(space, sampler="tpe", trials=99)) == 99
    combinations = [tuple(combination(grid.space, number).values()) for number in range(6)]
    assert combinations == [(1, 0.0), (1, 0.1), (1, 0.2), (2, 0.0), (2, 0.1), (2, 0.2)]
    assert list(combination(grid.space, 0)) == ["train.epochs", "model.args.dropout"]


def test_settings_are_put_in_their_places_and_nothing_else_changes() -> None:
    changed = with_settings(
        TRAIN,
        {
            "train.optimizer.learning_rate": 0.05,
            "model.args.dropout": 0.4,
            "model.args.wide": True,
            "train.early_stopping.patience": 2,
            "train.optimizer.layers": [{"match": "a", "learning_rate_factor": 2}],
        },
    )
    assert changed.optimizer.learning_rate == 0.05
    assert changed.optimizer.layers[0].match == "a"
    assert changed.model.args == {"dropout": 0.4, "hidden_dims": [8], "wide": True}
    assert changed.early_stopping is not None and changed.early_stopping.patience == 2
    assert (changed.epochs, changed.seed, changed.model.name) == (7, 3, "tabular")
    assert TRAIN.optimizer.learning_rate == 0.002
    with pytest.raises(ValidationError, match="greater than 0"):
        with_settings(TRAIN, {"train.optimizer.learning_rate": 0})


@pytest.mark.parametrize(
    ("space", "written"),
    [
        ({"train.optimizer.learning_rate": {"low": 1e-4, "high": 1e-2}}, {"train.optimizer.learning_rate": 0.002}),
        ({"train.optimizer.learning_rate": {"low": 1e-2, "high": 1e-1}}, None),
        ({"train.epochs": {"low": 1, "high": 9, "step": 2}}, {"train.epochs": 7}),
        ({"train.epochs": {"low": 2, "high": 9, "step": 2}}, None),
        ({"model.args.hidden_dims": [[8], [8, 8]]}, {"model.args.hidden_dims": [8]}),
        ({"model.args.width": [1, 2]}, None),
        ({"train.early_stopping.patience": [1, 2]}, None),
    ],
    ids=str,
)
def test_the_settings_as_written_are_known_where_the_space_has_them(space: Any, written: Any) -> None:
    assert as_written(config(space)) == written
