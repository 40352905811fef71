"""A search in a run: what its space may be, and that all later steps have the settings that it has found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from components import artifacts
from components.artifacts import Output
from components.errors import ConfigError
from pipelines.config import PipelineConfig, load_config, resolved
from pipelines.local import run
from pipelines.steps import STEPS, steps_of
from pipelines.summary import print_summary
from pipelines.tuned import tuned_config, tuned_section
from tests.pipelines import fakes
from tests.pipelines.test_config import HEAD, load, problems

RATE = "train.optimizer.learning_rate"
FOUND = {RATE: 0.03, "model.args.dropout": 0.5}
SPACE = {RATE: {"low": 0.001, "high": 0.1, "log": True}, "model.args.dropout": [0.0, 0.5]}


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (f"{{{RATE[:-1]}: [1, 2]}}", f"there is no such setting. Did you mean '{RATE}'?"),
        ("{transform.features: [1, 2]}", "only settings of train and model are tuned"),
        ("{train.model: [1, 2]}", "there is no such setting."),
        ("{model.name: [a, b]}", "this cannot differ from trial to trial: the arguments of one model"),
        ("{train.strategy: [one_device, mirrored]}", "this cannot differ from trial to trial: the devices"),
        ("{train.optimizer: [{}, {name: sgd}], train.optimizer.name: [adam, sgd]}", "a part of 'train.optimizer'"),
        (f"{{{RATE}: [0.1, 0]}}", f"with {RATE} 0: expected greater than 0; received 0"),
        (f"{{{RATE}: {{low: 0, high: 0.1}}}}", f"with {RATE} 0.0: expected greater than 0; received 0.0"),
        ("{train.optimizer.name: [adam, sdg]}", "with train.optimizer.name 'sdg': 'sdg' is none of: adam, adamw"),
        (
            "{train.optimizer.weight_decay: [0.0, 0.1], train.optimizer.name: [adam, adamw]}",
            "with train.optimizer.weight_decay 0.1: adam has no weight_decay",
        ),
        (
            "{train.gradient_accumulation_steps: {low: 1, high: 3}}",
            "with train.gradient_accumulation_steps 3: gradient_accumulation_steps 3 does not divide",
        ),
        (f"{{{RATE}: {{low: 0.2, high: 0.1}}}}", "low must be below high, received 0.2 and 0.1"),
        (f"{{{RATE}: {{low: 0.2, hgih: 0.1}}}}", "there is no such key. Did you mean 'high'?"),
        (f"{{{RATE}: [0.1]}}", "at least 2 items"),
        (f"{{{RATE}: 0.1}}", "expected a section with keys from: low, high, step, log; received 0.1"),
    ],
    ids=str,
)
def test_a_space_that_cannot_be_searched_is_told_before_anything_runs(
    tmp_path: Path, space: str, expected: str
) -> None:
    lines = problems(tmp_path, f"{HEAD}tune:\n  trials: 3\n  space: {space}\n")
    assert any(line.startswith("c.yaml:8: tune.space.") and expected in line for line in lines), lines


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("trials: 3", "trials need a space"),
        (
            f"sampler: grid, space: {{{RATE}: {{low: 0.1, high: 0.2}}}}",
            f"needs a list of values, or a step, for '{RATE}'",
        ),
        ("on_kubeflow: parallel_for", "has no trials to learn from: use sampler: random or grid"),
        ("on_kubeflow: parallel_for, sampler: random", "set pruner: none"),
        ("metric: acuracy", "a binary task has no metric 'acuracy'. Did you mean 'accuracy'?"),
    ],
)
def test_settings_of_the_search_that_do_not_go_together(tmp_path: Path, settings: str, expected: str) -> None:
    (line,) = problems(tmp_path, f"{HEAD}tune: {{{settings}}}\n")
    assert expected in line


def test_values_that_only_fit_with_others_of_the_space_are_fine(tmp_path: Path) -> None:
    space = "{train.optimizer.name: [adamw, sgd], train.optimizer.weight_decay: [0.01, 0.1]}"
    config = load(tmp_path, f"{HEAD}tune: {{trials: 3, space: {space}}}\n")
    assert config.tune.space["train.optimizer.weight_decay"] == [0.01, 0.1]


def test_paths_may_be_nested_as_overrides_are(tmp_path: Path) -> None:
    config = load(tmp_path, HEAD, f"tune.space.{RATE}={{low: 0.1, high: 1}}", "tune.space.model.args.a=[1, 2]")
    assert list(config.tune.space) == [RATE, "model.args.a"]
    assert load_config_text(tmp_path, resolved(config)) == config


def load_config_text(folder: Path, text: str) -> PipelineConfig:
    (folder / "again.yaml").write_text(text)
    return load_config(folder / "again.yaml")


def config_of(**settings: Any) -> PipelineConfig:
    return fakes.config_of(tune={"trials": 4, "space": SPACE, **settings}, seed=7)


def test_the_search_is_a_step_only_where_it_is_asked_for() -> None:
    assert steps_of(config_of()) == STEPS
    assert [step.name for step in STEPS if step not in steps_of(config_of(trials=0))] == ["tune"]


def test_every_step_is_cut_from_the_configuration_with_the_best_settings() -> None:
    config = config_of()
    best = tuned_config(config, FOUND)
    assert (best.train.optimizer.learning_rate, best.model.args, best.tune.trials) == (0.03, {"dropout": 0.5}, 0)
    assert best.step_config("optimize").train.model.args == {"dropout": 0.5}
    assert "dropout: 0.5" in best.step_config("push").resolved_config
    for step in STEPS:
        as_written, wanted = config.step_config(step.section), best.step_config(step.section)
        if step.is_tuned:
            assert as_written != wanted
            assert tuned_section(as_written, FOUND) == wanted
        elif step.name != "tune":
            assert as_written == wanted


def test_a_run_goes_on_with_the_best_settings_and_writes_them_as_a_config(tmp_path: Path) -> None:
    calls: list[str] = []

    def search(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        return fakes.write_words(output, inputs, config) | {"settings": FOUND, **OUTCOME}

    table = tuple(
        dataclasses.replace(step, calls=calls, **({"work": search} if step.name == "tune" else {}))
        for step in fakes.real_table()
    )
    config = config_of().model_copy(update={"push": config_of().push.model_copy(update={"destination": str(tmp_path)})})
    first = run(config, runs_dir=tmp_path, steps=table, console=fakes.quiet())
    assert [step.name for step in first.steps] == [step.name for step in STEPS]
    made_from = artifacts.read_manifest(tmp_path / "tiny/model").made_from["config"]
    assert (made_from["optimizer"]["learning_rate"], made_from["model"]["args"]) == (0.03, {"dropout": 0.5})
    shown = fakes.quiet()
    print_summary(first, config, shown)
    assert "best is trial 2, validation auc 0.9000, as written 0.8000" in shown.file.getvalue()
    assert f"{RATE}: 0.03" in shown.file.getvalue() and "best.yaml" in shown.file.getvalue()
    calls.clear()
    again = run(config, runs_dir=tmp_path, steps=table, console=fakes.quiet())
    assert {step.state for step in again.steps} == {"reused"}

    best = load_config(tmp_path / "tiny/best.yaml")
    assert best == tuned_config(config, FOUND)
    alone = run(best, runs_dir=tmp_path, steps=table, console=fakes.quiet())
    assert {step.state for step in alone.steps} == {"reused"}
    assert "tune" not in [step.name for step in alone.steps]
    assert calls == []


OUTCOME = {
    "metric": "auc",
    "value": 0.9,
    "value_as_written": 0.8,
    "trial": 2,
    "num_trials": {"complete": 3, "pruned": 1, "failed": 0},
}


def test_a_step_that_has_no_part_in_the_run_is_not_one_to_stop_after(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this run has no step 'tune'"):
        run(config_of(trials=0), runs_dir=tmp_path, until="tune", steps=fakes.real_table(), console=fakes.quiet())
