"""Cross-validation: a run for each fold, and what is told of all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from components.artifacts import Output
from components.errors import ConfigError
from pipelines import folds
from tests.pipelines import fakes

FOLD = {"path": "data.csv", "task": "binary", "split": {"method": "fold", "num_folds": 3}}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration with three folds, beside its data, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("data.csv").write_text("x,label\n1,0\n")
    Path("tiny.yaml").write_text(yaml.safe_dump(fakes.settings(data=FOLD)))
    return "tiny.yaml"


def steps(metrics: list[dict[str, float | None]], calls: list[str]) -> list[fakes.FakeStep]:
    """Fakes of all steps, of which evaluate gives the metrics of its fold."""
    waiting = iter(metrics)

    def evaluate(output: Output, inputs: dict[str, Path], config: Any) -> dict[str, Any]:
        found = {"metrics": {"test": next(waiting)}, "blessed": False, "reasons": ["no"]}
        return fakes.write_words(output, inputs, config) | found

    return [
        dataclasses.replace(step, calls=calls, **({"work": evaluate} if step.name == "evaluate" else {}))
        for step in fakes.real_table()
    ]


def test_each_fold_is_a_run_that_differs_in_its_fold_alone(config: str) -> None:
    configs = folds.fold_configs([config, "train.epochs=3"])
    assert list(configs) == ["tiny_fold_0", "tiny_fold_1", "tiny_fold_2"]
    assert [each.data.split.fold for each in configs.values()] == [0, 1, 2]
    assert {each.train.epochs for each in configs.values()} == {3}


def test_folds_are_evaluated_and_not_pushed_and_done_ones_are_reused(config: str) -> None:
    calls: list[str] = []
    metrics: list[dict[str, float | None]] = [{"auc": 0.8}, {"auc": 0.9}, {"auc": 1.0}]
    configs = folds.fold_configs([config])
    for _ in range(2):
        found = folds.run_folds(configs, runs_dir=Path("runs"), steps=steps(metrics, calls), console=fakes.quiet())
        assert found == metrics
        assert calls.count("evaluate") == calls.count("train") == 3
    assert not {"export", "push"} & set(calls)


def test_mean_and_deviation_are_over_the_folds() -> None:
    metrics: list[dict[str, float | None]] = [
        {"auc": 0.8, "f1": 0.5},
        {"auc": 0.9, "f1": None},
        {"auc": 1.0, "f1": 0.1},
    ]
    found = folds.summarized(metrics)
    assert found["mean"] == {"auc": pytest.approx(0.9), "f1": None}
    assert found["standard_deviation"] == {"auc": pytest.approx(0.1), "f1": None}
    assert [line.split() for line in folds.table(metrics)] == [
        ["fold", "0", "fold", "1", "fold", "2", "mean", "standard", "deviation"],
        ["auc", "0.8000", "0.9000", "1.0000", "0.9000", "0.1000"],
        ["f1", "0.5000", "0.1000"],
    ]
    assert len({len(line) for line in folds.table(metrics)}) == 1


def test_the_command_writes_what_it_shows(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics: list[dict[str, float | None]] = [{"auc": 0.8}, {"auc": 0.9}, {"auc": 1.0}]
    monkeypatch.setattr(folds, "run_folds", lambda configs, **_: metrics)
    Path("runs").mkdir()
    outcome = CliRunner().invoke(folds.main, [config])
    assert outcome.exit_code == 0, outcome.output
    assert ["auc", "0.8000", "0.9000", "1.0000", "0.9000", "0.1000"] in map(str.split, outcome.output.splitlines())
    written = json.loads(Path("runs/tiny_folds.json").read_text())
    assert written["folds"] == metrics
    assert written["mean"]["auc"] == pytest.approx(0.9)


def test_other_splits_are_refused(config: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.split\.method: is hash, .* 'data\.split=\{method: fold, num_folds: 5\}'"
    ):
        folds.fold_configs([config, "data.split={}"])
    outcome = CliRunner().invoke(folds.main, [config, "data.split={}"])
    assert outcome.exit_code == 2
