"""Several workers train as one does, and go on where they were when any of them is killed, frozen or terminated."""

from __future__ import annotations

import io
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from components.train import launch, supervisor, train
from components.train.preemption import Preemption
from components.train.supervisor import Limits
from tests.components import test_preemption
from tests.conftest import StepRun

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "checkpoint_steps": 5,
    "steps_per_execution": 2,
    "global_batch_size": 64,
    "optimizer": {"name": "adamw", "learning_rate": 0.01, "clip_norm": 0.5, "schedule": "cosine"},
    "seed": 5,
    "model": {"name": "tests.components.test_multi_worker:build"},
    "xla": "off",
    # One that only the chief has, and one whose state every worker resumes.
    "callbacks": [
        {"name": "CSVLogger", "args": {"filename": "log.csv"}},
        {"name": "EarlyStopping", "args": {"monitor": "val_loss", "patience": 100}},
    ],
    "strategy": "multi_worker",
    "num_workers": 2,
}
WITHOUT_DROPOUT = {"name": "tests.components.test_preemption:build", "args": {"dropout": 0.0}}


def build(inputs: Any, output: Any) -> keras.Model:
    """A small network with dropout that tells each step."""
    network = test_preemption.build(inputs, output)
    return keras.Model(network.input, Telling(name="telling")(network.output))


@keras.saving.register_keras_serializable("tests")
class Telling(keras.layers.Layer):
    """Draws random numbers, as dropout does, and prints them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(3)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            drawn = keras.random.randint((3,), 0, 1000, seed=self.generator)
            tf.print("step draws", drawn, output_stream=sys.stdout)
        return x


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
    assert sum("epoch 4/4" in line for line in lines) == 1
    log = (path.parent / launch.LOG).read_text()
    assert "[worker 0] epoch 4/4" in log and "[worker 1] epoch 4/4" in log
    assert sorted(file.name for file in path.parent.iterdir()) == ["model", launch.LOG]
    return path


@pytest.mark.slow
def test_each_worker_draws_random_numbers_of_its_own(undisturbed: Path) -> None:
    log = (undisturbed.parent / launch.LOG).read_text()
    first, second = (re.findall(rf"\[worker {index}\] step draws (.*)", log) for index in range(2))
    assert len(first) == len(second) == len({*first, *second}) / 2 > 50


@pytest.mark.slow
def test_three_workers_give_the_numbers_of_one_process(inputs: dict[str, Path], tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "one": {"strategy": "one_device", "num_workers": None},
        "three": {"num_workers": 3, "xla": "auto"},
    }
    results, weights = {}, {}
    for name, change in changes.items():
        config = TrainConfig.model_validate({**SETTINGS, "epochs": 1, "model": WITHOUT_DROPOUT, **change})
        with progress.shown_by(lambda _: None):
            results[name] = train(**inputs, model=tmp_path / name / "model", config=config)
        model = keras.saving.load_model(tmp_path / name / "model" / model_files.FILE, compile=False)
        weights[name] = model.get_weights()
    assert results["three"].xla == "on"
    assert results["three"].validation == pytest.approx(results["one"].validation, rel=1e-4)
    for ours, expected in zip(weights["three"], weights["one"], strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-3, atol=2e-5)


Fault = Callable[[dict[int, int]], None]


class Faults:
    """Does something to the workers of each start, at a random step of it, once there are checkpoints to go on from.

    Args:
        faults: Each is given the processes of a start, by worker.
        on_restart: Called before the second start.
    """

    def __init__(self, *faults: Fault, on_restart: Callable[[], Any] = lambda: None) -> None:
        self._faults, self._on_restart = list(faults), on_restart
        self._random = random.Random(7)
        self._pids: dict[int, int] = {}
        self.lines: list[str] = []

    def __call__(self, worker: str, line: str) -> None:
        if line.startswith("step draws"):
            self._left -= worker == "worker 0"
            if worker == "worker 0" and self._left == 0 and self._faults:
                self._faults.pop(0)(self._pids)
            return
        self.lines.append(f"{worker}: {line}")
        if started := re.match(r"worker (\d+) is process (\d+)", line):
            self._pids[int(started[1])] = int(started[2])
            self._left = self._random.randint(12, 20)
        if "starting all again" in line:
            self._on_restart()
            self._on_restart = lambda: None

    def after(self, text: str) -> list[str]:
        """What follows that text in the lines that have it."""
        return [line.partition(text)[2] for line in self.lines if text in line]


def send(number: signal.Signals, worker: int) -> Fault:
    return lambda pids: os.kill(pids[worker], number)


def fill_the_disk(pids: dict[int, int]) -> None:
    """The chief's, as it seems to it: no file grows beyond a thousand bytes."""
    resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (1000, 1000))


def checkpoints_in(folder: Path) -> list[Path]:
    """The index files of the whole ones, oldest first."""
    return sorted(folder.rglob("ckpt-*.index"), key=lambda file: int(file.stem.removeprefix("ckpt-")))


def launch_with(folder: Path, inputs: dict[str, Path], make_faults: Callable[[subprocess.Popen[str]], Faults]) -> Any:
    """Run the launcher as a process: its exit code, and what befell it."""
    (folder / "train.json").write_text(TrainConfig.model_validate(SETTINGS).model_dump_json())
    options = [f"--{name}={path}" for name, path in inputs.items()] + ["--heartbeat-timeout-s=20"]
    command = [sys.executable, "-m", "components.train.launch", "--workers=2", str(folder / "train.json"), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        faults = make_faults(launcher)
        for line in launcher.stdout:
            worker, text = re.fullmatch(r"(?:\[(.+?)\] )?(.*)\n", line).groups()
            faults(worker, text)
    assert not any(Path(f"/proc/{pid.split()[-1]}").exists() for pid in faults.after("is process"))
    assert not list(folder.rglob("*_temp"))
    return launcher.returncode, faults


@pytest.mark.slow
def test_a_run_that_everything_befalls_ends_with_the_weights_of_an_undisturbed_one(
    inputs: dict[str, Path], undisturbed: Path, tmp_path: Path
) -> None:
    def damage_the_newest() -> None:
        (data,) = tmp_path.rglob(f"{checkpoints_in(tmp_path)[-1].stem}.data*")
        data.write_bytes(data.read_bytes()[:-100])

    # The chief is killed and its newest checkpoint damaged, the other one terminated, then the launcher.
    code, faults = launch_with(
        tmp_path,
        inputs,
        lambda launcher: Faults(
            send(signal.SIGKILL, 0),
            send(signal.SIGTERM, 1),
            lambda _: launcher.terminate(),
            on_restart=damage_the_newest,
        ),
    )
    assert code == 143, faults.lines
    assert faults.after("starting all again from the last checkpoint") == [" (1 of 3)", " (2 of 3)"], faults.lines
    assert faults.after("launcher: worker 0 was killed by SIGKILL")
    assert len(faults.after("cannot be read and is passed over")) == 1
    saved = faults.after("told to stop: saved after ")
    assert len(saved) == 4 and saved[0] == saved[1] != saved[2] == saved[3], faults.lines
    went_on = [line.removesuffix(" of a run that was stopped") for line in faults.after("going on after ")]
    assert len(went_on) == 4 and went_on[2:] == saved[:2], faults.lines
    assert not (tmp_path / "model").exists()

    # The other one is killed; then the disk is full.
    before = checkpoints_in(tmp_path)
    code, faults = launch_with(tmp_path, inputs, lambda _: Faults(send(signal.SIGKILL, 1), fill_the_disk))
    assert code == 1, faults.lines
    assert faults.after("going on after ")[0].startswith(saved[-1])
    assert faults.after("starting all again from the last checkpoint") == [" (1 of 3)"], faults.lines
    (place,) = faults.after("None: Error: No space left on the disk while writing ")
    assert place.startswith(str(tmp_path / ".model.scratch"))
    kept = checkpoints_in(tmp_path)
    assert len(kept) == 2 and not {*kept} & {*before}
    assert not (tmp_path / "model").exists()

    # There is room again; the other one is frozen.
    code, faults = launch_with(tmp_path, inputs, lambda _: Faults(send(signal.SIGSTOP, 1)))
    assert code == 0, faults.lines
    assert len(faults.after("starting all again")) == 1
    assert len(faults.after("going on after ")) == 4
    assert artifacts.read_manifest(tmp_path / "model").digest == artifacts.read_manifest(undisturbed).digest


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


# Workers that only beat, in place of training ones: `beat()` as often as told, then what the test wants.
FAKE = """
import json, os, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
status = int(os.environ["HEADRACE_STATUS_FD"])
def tell(message={}): os.write(status, json.dumps(message).encode() + b"\\n")
tell()
"""


def start(script: str, during: Callable[[str], None] = lambda _: None, **limits: Any) -> list[tuple[int | None, str]]:
    """Run two of them; `during` hears their lines."""
    lines: list[tuple[int | None, str]] = []

    def show(worker: int | None, line: str) -> None:
        lines.append((worker, line))
        during(line)

    log = io.BytesIO()
    log.name = "the.log"
    try:
        with Preemption() as preemption:
            command = [sys.executable, "-c", FAKE + script]
            launch._start_until_done(command, 2, Limits(**limits), launch._Notes(log, show), preemption)
    finally:
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


SAVES_AND_LEAVES = """
import signal
def leave(*_):
    time.sleep(0.3)
    print("saved", index, flush=True)
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
print("ready", index, flush=True)
while True: tell(); time.sleep(0.1)
"""
STAYS = SAVES_AND_LEAVES.replace("os._exit(143)", "pass")


class Terminated(BaseException):
    """What SIGTERM becomes here: KeyboardInterrupt, as in a local run, would end all tests if one failed to expect it."""


@pytest.fixture
def termination_interrupts() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


READY = {"ready 0", "ready 1"}  # a worker that is not would be ended by the signal itself


def terminate_at(*moments: set[str]) -> tuple[Callable[[str], None], list[str]]:
    """Something that hears lines and terminates this process when it has all of a moment, and the lines that it heard."""
    left, heard = list(moments), []

    def hear(line: str) -> None:
        heard.append(line)
        if left and left[0] <= set(heard):
            left.pop(0)
            os.kill(os.getpid(), signal.SIGTERM)

    return hear, heard


@pytest.mark.usefixtures("termination_interrupts")
def test_workers_are_told_to_stop_and_then_the_run_is() -> None:
    hear, heard = terminate_at(READY)
    with pytest.raises(Terminated):
        start(SAVES_AND_LEAVES, hear)
    assert {"saved 0", "saved 1"} <= set(heard)
    assert not [line for line in heard if "starting all again" in line or "killed" in line]


@pytest.mark.usefixtures("termination_interrupts")
def test_workers_that_do_not_stop_in_time_are_killed() -> None:
    hear, heard = terminate_at(READY)
    with pytest.raises(Terminated):
        start(STAYS, hear, grace_s=1.0)
    assert {"saved 0", "saved 1", "killed, since they did not leave in time: workers 0, 1"} <= set(heard)


@pytest.mark.usefixtures("termination_interrupts")
def test_a_second_termination_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.train.preemption._ONE_REQUEST_S", 0.2)
    hear, heard = terminate_at(READY, {"saved 1"})
    began = time.monotonic()
    with pytest.raises(Terminated):
        start(STAYS, hear, grace_s=60.0)
    assert time.monotonic() - began < 30
    assert "saved 1" in heard


@pytest.mark.usefixtures("termination_interrupts")
@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_what_fails_while_it_is_saved_is_said(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the thread that reads it may come after the one that sees the process gone."""
    read = supervisor._Worker._read_status

    def read_late(self: Any, lines: Any) -> None:
        self.process.wait()
        time.sleep(late_s)
        read(self, lines)

    if late_s:
        monkeypatch.setattr(supervisor._Worker, "_read_status", read_late)
    hear, _ = terminate_at(READY)
    fails = "index or tell({'error': 'ArtifactError', 'message': 'No space left'})\n    os._exit(143)"
    with pytest.raises(errors.ArtifactError, match="No space left"):
        start(SAVES_AND_LEAVES.replace("os._exit(143)", fails), hear)


@pytest.mark.parametrize(("code", "meaning"), [(138, "has lost the others"), (143, "was told to stop")])
def test_the_codes_of_a_set_that_starts_again_have_a_meaning(code: int, meaning: str) -> None:
    with pytest.raises(HeadraceError, match=f"worker 1 {meaning}.*last checkpoint is kept: run again"):
        start(f"if index: sys.exit({code})\ntime.sleep(60)", max_restarts=0)


def test_a_log_that_cannot_be_written_does_not_end_the_run() -> None:
    lines: list[str] = []
    with open("/dev/full", "wb", buffering=0) as full:
        notes = launch._Notes(full, lambda _, line: lines.append(line))
        for number in range(3):
            notes.show(0, f"line {number}")
    assert lines == ["lines are missing in /dev/full: No space left on device", "line 0", "line 1", "line 2"]


HANGS = """if True:
    import ctypes, threading, time
    from components.train.launch import _be_a_worker
    from components.train.preemption import Preemption
    def hang():
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        while True: libc.pthread_mutex_lock(lock)  # the second time without end, and no handler runs
    def wait():
        with Preemption():
            time.sleep(60)
    threading.Timer(0.3, print, ["on"], {{"flush": True}}).start()
    _be_a_worker({work}, grace_s={grace})
"""


@pytest.mark.parametrize("work", ["hang", "wait"])
def test_a_worker_whose_others_are_frozen_leaves_within_the_grace_time(work: str) -> None:
    script = HANGS.format(work=work, grace=1.0)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout.readline() == "on\n"
            began = time.monotonic()
            worker.terminate()
            assert worker.wait(timeout=20) == 143
            assert time.monotonic() - began > 0.9
        finally:
            worker.kill()


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
