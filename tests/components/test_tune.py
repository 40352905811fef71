"""The search: what is tried, pruned and kept; that it goes on after a kill; and that a trial that dies ends nothing."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from components import artifacts, progress
from components.config import TuneConfig
from components.errors import HeadraceError
from components.train.callbacks import PrintMetrics
from components.trial import trial
from components.tune import search as searching
from components.tune import tune
from components.tune.search import search
from components.tune.study import TrialRecord, best_of
from components.tune.workers import Outcome, Trial
from tests.components.pretender import RATE, Pretender, config_of
from tests.conftest import StepRun


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Search with workers that only pretend to train: `pretend(config, folder) -> records`."""
    monkeypatch.setattr(searching, "Worker", Pretender)

    def run(config: TuneConfig, folder: str = "study", **options: Any) -> list[TrialRecord]:
        return search(config, examples=tmp_path, transform=tmp_path, folder=tmp_path / folder, **options)

    return run


def facts(records: list[TrialRecord]) -> list[tuple[Any, ...]]:
    """All but the time they took."""
    return [(each.number, each.state, each.settings, each.value, each.by_epoch, each.epochs) for each in records]


def test_the_settings_as_written_come_first_and_the_search_learns(pretend: Any) -> None:
    records = pretend(config_of(trials=20))
    assert [record.number for record in records] == list(range(20))
    assert records[0].settings == {RATE: 0.001, "model.args.units": 2}
    best = best_of(records, "auc")
    assert best is not None and best.value is not None and records[0].value is not None
    assert best.value > records[0].value
    distances = [abs(record.settings[RATE] - 0.01) for record in records]
    assert sum(distances[15:]) < sum(distances[1:6])


def test_the_same_seed_makes_the_same_search_and_another_one_another(pretend: Any) -> None:
    first, again, other = (pretend(config_of(seed=seed), folder) for seed, folder in ((1, "a"), (1, "b"), (2, "c")))
    assert facts(first) == facts(again)
    assert facts(first)[1:] != facts(other)[1:]


def test_a_trial_worse_than_the_median_is_pruned(pretend: Any) -> None:
    pruned = [record for record in pretend(config_of(trials=20)) if record.state == "pruned"]
    assert pruned
    assert all(record.epochs == len(record.by_epoch) < 4 for record in pruned)
    assert pruned[0].value == pruned[0].by_epoch[-1]
    assert {record.state for record in pretend(config_of(trials=20, pruner="none"), "unpruned")} == {"complete"}
    assert "pruned" in {record.state for record in pretend(config_of(trials=20, pruner="hyperband"), "bands")}


def test_a_metric_that_is_to_be_small_is_made_small(pretend: Any) -> None:
    records = pretend(config_of(metric="loss", trials=12))
    best = best_of(records, "loss")
    assert best is not None
    assert best.value == min(record.value for record in records if record.state == "complete")


def test_a_grid_is_tried_once_in_order(pretend: Any) -> None:
    space = {RATE: [0.001, 0.01], "model.args.units": {"low": 1, "high": 2}}
    records = pretend(config_of(space=space, sampler="grid", trials=99, pruner="none"))
    assert [tuple(record.settings.values()) for record in records] == [(0.001, 1), (0.001, 2), (0.01, 1), (0.01, 2)]


def test_a_search_that_is_asked_for_more_goes_on_and_for_less_forgets_nothing(pretend: Any) -> None:
    whole = pretend(config_of(trials=9), "whole")
    assert facts(pretend(config_of(trials=4))) == facts(whole)[:4]
    started: list[str] = []
    with progress.shown_by(started.append):
        assert facts(pretend(config_of(trials=9))) == facts(whole)
    assert not [line for line in started if line.startswith("trial 3 ")]
    assert facts(pretend(config_of(trials=4))) == facts(whole)[:4]


def test_several_at_a_time_are_as_many_and_each_has_its_share(pretend: Any) -> None:
    records = pretend(config_of(trials=9, parallel=3))
    assert [record.number for record in records] == list(range(9))
    assert len({record.settings[RATE] for record in records}) == 9


def test_no_trial_is_started_after_the_time(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000))
    monkeypatch.setattr(searching.time, "monotonic", lambda: float(next(times)))
    assert 0 < len(pretend(config_of(timeout_s=10))) < 8


def test_trials_fail_alone_and_end_the_search_only_if_all_do(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Pretender):
        bad = (4, 8)

        def train(self, trial: Trial) -> Iterator[Any]:
            if trial.config.model.args["units"] in self.bad:
                yield Outcome("failed", "units: too many")
            yield from super().train(trial)

    monkeypatch.setattr(searching, "Worker", Failing)
    records = pretend(config_of(trials=12))
    assert len(records) == 12
    failed = [record for record in records if record.state == "failed"]
    assert failed and all(record.settings["model.args.units"] in (4, 8) for record in failed)
    assert (failed[0].reason, failed[0].value) == ("units: too many", None)
    monkeypatch.setattr(Failing, "bad", (2, 4, 8))
    assert len(pretend(config_of(trials=12), "hopeless")) == 3


def test_combinations_that_the_configuration_refuses_are_failed_trials(pretend: Any) -> None:
    space = {"train.global_batch_size": [8, 9], "train.gradient_accumulation_steps": [1, 2]}
    train = {"model": {"args": {"units": 2}}}
    records = pretend(config_of(space=space, sampler="grid", pruner="none", train=train))
    assert [record.state for record in records] == ["complete", "complete", "complete", "failed"]
    assert "2 does not divide global_batch_size 9" in records[3].reason


KILLED = """
import os, signal, sys
from pathlib import Path
from components.tune import search as searching
from tests.components.pretender import Pretender, config_of

class Killed(Pretender):
    def answer(self, *, stop):
        with open("told", "a") as told:
            told.write(".")
        if os.path.getsize("told") == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().answer(stop=stop)

searching.Worker = Killed
here = Path()
searching.search(config_of(), examples=here, transform=here, folder=here / "study")
"""


@pytest.mark.parametrize("told", [2, 9])
def test_a_search_that_is_killed_goes_on_and_ends_as_if_it_was_not(pretend: Any, tmp_path: Path, told: int) -> None:
    whole = pretend(config_of(), "whole")
    project = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(project)}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(told)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert facts(pretend(config_of())) == facts(whole)


def test_metrics_are_printed_as_katib_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    PrintMetrics().on_epoch_end(0, {"loss": 0.5, "val_auc": 0.93, "val_loss": 4e-7})
    lines = capsys.readouterr().out.splitlines()
    assert all(datetime.datetime.fromisoformat(line.split()[0]).tzinfo is not None for line in lines)
    # Katib 0.19, pkg/metricscollector/v1beta1/common/const.go: DefaultFilter
    found = [re.findall(r"([\w|-]+)\s*=\s*([+-]?\d*(?:\.\d+)?(?:[Ee][+-]?\d+)?)", line) for line in lines]
    assert found == [[("validation_auc", "0.93")], [("validation_loss", "4e-07")]]


def build(inputs: Any, output: Any, *, units: int = 4) -> keras.Model:
    """A network on two features; with 8 units it dies, with 16 it is refused."""
    if units == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if units == 16:
        raise ValueError("units: at most 8")
    features = {name: keras.Input(spec.shape, name=name, dtype=spec.dtype) for name, spec in inputs.items()}
    both = keras.layers.Concatenate()([features["fare"], features["trip_miles"]])
    hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(units, activation="relu", name="hidden")(both))
    return keras.Model(features, keras.layers.Dense(output.num_logits, name="logits", dtype="float32")(hidden))


TRAIN = {
    "epochs": 2,
    "global_batch_size": 64,
    "optimizer": {"learning_rate": 0.02},
    "xla": "off",
    "model": {"name": "tests.components.test_tune:build", "args": {"units": 4}},
}


@pytest.mark.slow
def test_a_trial_that_dies_or_is_refused_leaves_the_others_and_in_a_pod_it_is_the_same(
    taxi: StepRun, tmp_path: Path
) -> None:
    inputs = {"examples": taxi.path("examples"), "transform": taxi.path("transform")}
    config = config_of(space={"model.args.units": [8, 16, 2]}, sampler="grid", pruner="none", trials=3, train=TRAIN)
    result = tune(**inputs, tuned=tmp_path / "tuned", config=config)
    died, refused, trained = json.loads((tmp_path / "tuned/trials/trials.json").read_text())
    assert (died["state"], refused["state"], trained["state"]) == ("failed", "failed", "complete")
    assert died["reason"] == "its process was killed by SIGKILL, as the system does for want of memory"
    assert "units: at most 8" in refused["reason"]
    assert result.value == trained["value"] > 0.5
    assert (result.settings, len(trained["by_epoch"])) == ({"model.args.units": 2}, 2)
    assert not list(tmp_path.glob(".tuned.study/*/trials/*"))

    trial(**inputs, trial=tmp_path / "pod", number="2", config=config)
    chosen = tune(**inputs, trials=[tmp_path / "pod"], tuned=tmp_path / "chosen", config=config)
    assert (chosen.trial, chosen.value) == (2, result.value)
    assert artifacts.read_manifest(tmp_path / "chosen").digest == artifacts.read_manifest(tmp_path / "tuned").digest


def test_no_trial_that_ends_well_is_an_error_and_the_next_run_tries_again(
    pretend: Any, taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Pretender):
        def train(self, trial: Trial) -> Iterator[Any]:
            yield Outcome("failed", "no memory")

    inputs = {"examples": taxi.path("examples"), "transform": taxi.path("transform")}
    monkeypatch.setattr(searching, "Worker", Failing)
    with pytest.raises(HeadraceError, match="none of 3 trials came to its end: no memory"):
        tune(**inputs, tuned=tmp_path / "tuned", config=config_of())
    assert not (tmp_path / "tuned").exists()
    monkeypatch.setattr(searching, "Worker", Pretender)
    assert tune(**inputs, tuned=tmp_path / "tuned", config=config_of()).num_trials["failed"] == 0


def test_the_artifact_is_the_settings_and_beside_them_what_differs_from_run_to_run(
    pretend: Any, taxi: StepRun, tmp_path: Path
) -> None:
    inputs = {"examples": taxi.path("examples"), "transform": taxi.path("transform")}
    result = tune(**inputs, tuned=tmp_path / "tuned", config=config_of())
    assert list(artifacts.open_artifact(tmp_path / "tuned", step="tune").files) == ["best.json"]
    assert result.value_as_written is not None and result.value > result.value_as_written
    assert sum(result.num_trials.values()) == 8
    lines = (tmp_path / "tuned/trials/trials.csv").read_text().splitlines()
    assert lines[0].startswith("number,state,value") and lines[0].endswith(f"{RATE},model.args.units")
    assert len(lines) == 9
    page = (tmp_path / "tuned/trials/report.html").read_text()
    assert "<script" not in page and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<figure>") == 4
    assert f"validation auc {result.value:.4f}" in page
    more = tune(**inputs, tuned=tmp_path / "tuned", config=config_of(trials=9))
    assert sum(more.num_trials.values()) == 9
    tune(**inputs, tuned=tmp_path / "tuned", config=config_of(seed=5))
    assert len(list((tmp_path / ".tuned.study").iterdir())) == 1
