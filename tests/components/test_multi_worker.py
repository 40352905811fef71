"""Several workers train as one does, and go on where they were when any of them is killed, frozen or terminated."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from components import artifacts, errors, model_files, progress
from components.config import TrainConfig
from components.errors import ConfigError, HeadraceError
from components.train import cluster as clusters
from components.train import launch, objective, supervisor, train
from components.train.engine import Engine
from components.train.supervisor import Limits
from models.spec import OutputSpec
from tests.conftest import StepRun

SETTINGS: dict[str, Any] = {
    "epochs": 12,
    "global_batch_size": 64,
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "clip_norm": 0.5, "schedule": "cosine"},
    "seed": 5,
    "model": {"name": "tabular", "args": {"hidden_dims": [8], "dropout": 0.3}},
    "xla": "off",
    "strategy": "multi_worker",
    "num_workers": 2,
}
WITHOUT_DROPOUT = {"name": "tabular", "args": {"hidden_dims": [8], "dropout": 0.0}}


@pytest.fixture(scope="module")
def inputs(taxi: StepRun) -> dict[str, Path]:
    return {"examples": taxi.path("examples"), "transform": taxi.path("transform")}


@pytest.fixture(scope="module")
def undisturbed(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers whom nothing befalls."""
    path = tmp_path_factory.mktemp("undisturbed") / "model"
    lines: list[str] = []
    with progress.shown_by(lines.append):
        result = train(**inputs, model=path, config=TrainConfig.model_validate(SETTINGS))
    assert result.num_replicas == 2
    assert result.validation["auc"] > 0.8
    assert sum("epoch 12/12" in line for line in lines) == 1
    log = (path.parent / launch.LOG).read_text()
    assert "[worker 0] epoch 12/12" in log and "[worker 1] epoch 12/12" in log
    assert sorted(file.name for file in path.parent.iterdir()) == ["model", launch.LOG]
    return path


@pytest.mark.slow
def test_one_two_and_three_workers_give_the_same_numbers(inputs: dict[str, Path], tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "one": {"strategy": "one_device", "num_workers": None},
        "two": {"num_workers": 2, "xla": "auto"},
        "three": {"num_workers": 3},
    }
    results, weights = {}, {}
    for name, change in changes.items():
        config = TrainConfig.model_validate({**SETTINGS, "epochs": 2, "model": WITHOUT_DROPOUT, **change})
        with progress.shown_by(lambda _: None):
            results[name] = train(**inputs, model=tmp_path / name / "model", config=config)
        model = keras.saving.load_model(tmp_path / name / "model" / model_files.FILE, compile=False)
        weights[name] = model.get_weights()
    assert results["two"].xla == "on"
    for name in ("two", "three"):
        assert results[name].validation == pytest.approx(results["one"].validation, rel=1e-4)
        for ours, expected in zip(weights[name], weights["one"], strict=True):
            np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=2e-5)


class Faults:
    """Does something to a worker of each start, at a random moment after its first new epochs; then corrupts."""

    def __init__(self, faults: list[tuple[int, int]], checkpoints: Path | None = None) -> None:
        self._faults, self._checkpoints = faults, checkpoints
        self._random = random.Random(7)
        self._pids: dict[int, int] = {}
        self._epochs = 0
        self.lines: list[str] = []

    def __call__(self, worker: int | None, line: str) -> None:
        self.lines.append(line)
        if started := re.match(r"worker (\d+) is process (\d+)", line):
            self._pids[int(started[1])] = int(started[2])
            self._epochs = 0
        elif worker is None and "starting all again" in line and self._checkpoints:
            newest = max(self._checkpoints.rglob("ckpt-*.data*"), key=lambda file: file.stat().st_mtime)
            newest.write_bytes(newest.read_bytes()[:-100])
            self._checkpoints = None
        elif worker == 0 and line.startswith("epoch "):
            self._epochs += 1
            if self._epochs == 2 and self._faults:
                victim, number = self._faults.pop(0)
                threading.Timer(self._random.uniform(0, 0.2), os.kill, (self._pids[victim], number)).start()


@pytest.mark.slow
def test_workers_killed_and_frozen_end_with_the_weights_of_an_undisturbed_run(
    inputs: dict[str, Path], undisturbed: Path, tmp_path: Path
) -> None:
    """The chief is killed and its newest checkpoint damaged; then the other worker is killed; then it is frozen."""
    faults = Faults([(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)], tmp_path)
    config = TrainConfig.model_validate(SETTINGS)
    launch.run_local(**inputs, model=tmp_path / "model", config=config, show=faults)
    assert artifacts.read_manifest(tmp_path / "model").digest == artifacts.read_manifest(undisturbed).digest
    restarts = [line for line in faults.lines if "starting all again" in line]
    assert len(restarts) == 3, faults.lines
    assert restarts[0].startswith("worker 0 was killed by SIGKILL")
    assert any("cannot be read and is passed over" in line for line in faults.lines)
    assert sum("of a run that was stopped" in line for line in faults.lines) >= 4


@pytest.mark.slow
def test_a_terminated_launcher_leaves_its_checkpoint_and_no_worker(inputs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(TrainConfig.model_validate(SETTINGS).model_dump_json())
    options = [f"--{name}={path}" for name, path in inputs.items()]
    command = [sys.executable, "-m", "components.train.launch", "--workers=2", str(tmp_path / "train.json"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        lines = []
        for line in launcher.stdout:
            lines.append(line)
            if line.startswith("[worker 0] epoch 2/"):
                launcher.terminate()
    assert launcher.returncode == 143
    pids = [int(found[1]) for line in lines if (found := re.search(r"is process (\d+)", line))]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (tmp_path / "model").exists()
    assert list((tmp_path / ".model.scratch").rglob("ckpt-*.index"))


@pytest.mark.slow
def test_what_a_worker_cannot_train_is_told_once_and_not_tried_again(inputs: dict[str, Path], tmp_path: Path) -> None:
    config = TrainConfig.model_validate({**SETTINGS, "num_workers": 1, "model": {"name": "tabluar"}})
    lines: list[str] = []
    with pytest.raises(ConfigError, match="Did you mean 'tabular'"):
        launch.run_local(**inputs, model=tmp_path / "model", config=config, show=lambda _, line: lines.append(line))
    assert not any("starting all again" in line for line in lines)


def test_the_number_of_workers_must_be_known(inputs: dict[str, Path], tmp_path: Path) -> None:
    config = TrainConfig.model_validate({**SETTINGS, "num_workers": None})
    with pytest.raises(ConfigError, match=r"Set train\.num_workers"):
        train(**inputs, model=tmp_path / "model", config=config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_workers": None, "global_batch_size": 2}, "2 cannot be divided over 3 workers"),
        ({"num_workers": 2}, "num_workers is 2, but TF_CONFIG names 3"),
    ],
)
def test_settings_that_do_not_fit_the_cluster_are_refused(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", clusters.local_clusters(3)[0].tf_config())
    with pytest.raises(ConfigError, match=message):
        train(**inputs, model=tmp_path / "model", config=TrainConfig.model_validate({**SETTINGS, **changes}))


def test_each_worker_draws_dropout_masks_of_its_own() -> None:
    x = keras.Input((64,), name="x")
    model = keras.Model({"x": x}, keras.layers.Dense(1)(keras.layers.Dropout(0.5, seed=3)(x)))
    engine = Engine(
        model,
        keras.optimizers.SGD(),
        objective.make_loss(OutputSpec("binary", 2), 0.0),
        strategy=tf.distribute.get_strategy(),
        global_batch_size=4,
        xla=False,
        scale_loss=False,
        clip_norm=None,
    )
    masks = []
    for index in (0, 1, 2):
        (state,) = [v for v in model.variables if "seed" in v.path]
        state.assign([3, 0])
        engine.set_worker(index)
        masks.append(model.layers[1](np.ones((1, 64)), training=True).numpy().tolist())
    assert masks[0] != masks[1] != masks[2] != masks[0]


# Workers that only beat, in place of training ones: `beat()` as often as told, then what the test wants.
FAKE = """
import json, os, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
status = int(os.environ["HEADRACE_STATUS_FD"])
def tell(message={}): os.write(status, json.dumps(message).encode() + b"\\n")
tell()
"""


def start(script: str, **limits: Any) -> list[tuple[int | None, str]]:
    lines: list[tuple[int | None, str]] = []
    notes = launch._Notes(open(os.devnull, "w"), lambda worker, line: lines.append((worker, line)))  # noqa: SIM115
    try:
        launch._start_until_done([sys.executable, "-c", FAKE + script], 2, Limits(**limits), notes, Path("the.log"))
    finally:
        notes._file.close()
        pids = [int(found[1]) for _, line in lines if (found := re.search(r"is process (\d+)", line))]
        assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    return lines


def test_lines_come_with_their_worker() -> None:
    assert {(0, "hello 0"), (1, "hello 1")} <= set(start("print('hello', index)"))


def test_a_set_is_given_up_after_its_restarts() -> None:
    message = r"started 2 times and failed each time, at last so: worker 1 ended with code 7.*the\.log"
    with pytest.raises(HeadraceError, match=message):
        start("if index: sys.exit(7)\ntime.sleep(60)", max_restarts=1)


def test_a_worker_without_a_sign_of_life_is_given_up() -> None:
    with pytest.raises(HeadraceError, match="worker 1 gave no sign of life for 4 s"):
        start(
            "while True:\n    if not index: tell()\n    time.sleep(0.1)",
            max_restarts=0,
            heartbeat_timeout_s=4.0,
        )


def test_an_error_that_no_restart_mends_is_raised_as_it_was() -> None:
    script = "if index: tell({'error': 'DataError', 'message': 'too small'})\nsys.exit(138 - 137 * index)"
    with pytest.raises(errors.DataError, match="too small"):
        start(script)


def test_workers_leave_when_their_launcher_is_gone() -> None:
    reading, writing = os.pipe()
    script = """if True:
        import time
        from components.train.launch import _heart
        with _heart():
            print("on", flush=True)
            time.sleep(60)
    """
    environ = {**os.environ, supervisor.STATUS_FD: str(writing)}
    worker = subprocess.Popen(
        [sys.executable, "-c", script], env=environ, pass_fds=[writing], stdout=subprocess.PIPE, text=True
    )
    with worker, open(reading):
        os.close(writing)
        assert worker.stdout.readline() == "on\n"
    assert worker.wait(timeout=10) == 143


@pytest.mark.parametrize("nested", [True, False])
def test_the_launcher_reads_a_steps_and_a_runs_configuration(tmp_path: Path, nested: bool) -> None:
    text = "train: {epochs: 3}\nseed: 4\nmodel: {name: resnet}\ndata: {}" if nested else '{"epochs": 3, "seed": 4}'
    (tmp_path / "config.yaml").write_text(text)
    config = launch.read_config(tmp_path / "config.yaml")
    assert (config.epochs, config.seed, config.model.name) == (3, 4, "resnet" if nested else "tabular")


def test_the_launcher_refuses_another_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("epoch: 3")
    with pytest.raises(ConfigError, match="no configuration of the train step"):
        launch.read_config(tmp_path / "config.yaml")
