"""SIGTERM: held back until everything is saved; and a run that is stopped, whatever its state, ends like any other."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from components import artifacts, progress
from components.config import TrainConfig
from components.train import engine, preemption, train
from components.train.engine import Engine
from components.train.preemption import Preemption
from tests.conftest import StepRun

# Everything that a run can have to remember: half-precision training, whose loss scale changes, moving averages, dropout,
# the best weights so far, a callback that counts, and a place within an epoch.
SETTINGS: dict[str, Any] = {
    "epochs": 6,
    "global_batch_size": 256,
    "steps_per_execution": 2,
    "optimizer": {"name": "nadam", "learning_rate": 0.05, "clip_norm": 0.5},
    "precision": "mixed_float16",
    "ema_decay": 0.9,
    "early_stopping": {"metric": "precision", "patience": 5},
    "callbacks": [
        {"name": "ReduceLROnPlateau", "args": {"patience": 2, "factor": 0.1, "min_delta": 10.0}},
        {"name": "CSVLogger", "args": {"filename": "log.csv"}},
    ],
    "seed": 5,
    "model": {"name": "tests.components.test_preemption:build"},
    "xla": "off",
}
# So that the loss scale grows, and is halved after an overflow, in a short run.
GROWTH_STEPS = 3


def build(inputs: Any, output: Any, *, dropout: float = 0.3) -> keras.Model:
    """A network on two features, which is traced in a moment."""
    features = {name: keras.Input(spec.shape, name=name, dtype=spec.dtype) for name, spec in inputs.items()}
    payment = keras.layers.Embedding(inputs["payment_type"].num_categories, 4, name="payment")(features["payment_type"])
    x = keras.layers.Concatenate(name="both")([features["fare"], keras.layers.Flatten(name="flat")(payment)])
    x = keras.layers.Dropout(dropout, name="dropout")(keras.layers.Dense(8, activation="relu", name="hidden")(x))
    return keras.Model(features, keras.layers.Dense(output.num_logits, name="logits", dtype="float32")(x))


class Terminated(BaseException):
    """What SIGTERM does to the process of these tests."""


@pytest.fixture(autouse=True)
def _termination_is_raised() -> Iterator[None]:
    def leave(*_: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_held_back_until_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(Terminated), Preemption() as held:
        assert not held.is_asked_for
        terminate()
        assert held.is_asked_for
        done.append("saved")
    assert done == ["saved"]
    with pytest.raises(Terminated):
        terminate()


def test_without_sigterm_nothing_happens() -> None:
    with Preemption() as held:
        pass
    assert not held.is_asked_for


def test_an_error_goes_before_sigterm() -> None:
    with pytest.raises(ZeroDivisionError), Preemption():
        terminate()
        _ = 1 / 0


def test_a_second_sigterm_acts_at_once_and_one_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    with pytest.raises(Terminated), Preemption():
        terminate()
        terminate()
        reached.append("twice at once")
        monkeypatch.setattr(preemption, "_ONE_REQUEST_S", 0.0)
        terminate()
        reached.append("again")
    assert reached == ["twice at once"]


def test_outside_the_main_thread_it_does_nothing() -> None:
    handlers = []

    def hold() -> None:
        with Preemption() as held:
            handlers.append(signal.getsignal(signal.SIGTERM))
            held.leave  # noqa: B018

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert handlers == [before]


def terminating_in(step: int) -> Callable[[Engine, Any, int], None]:
    """In place of `Engine.run`: after the call that holds this step, counted from 1, SIGTERM comes."""
    run = Engine.run

    def run_and_terminate(self: Engine, batches: Any, num_steps: int) -> None:
        run(self, batches, num_steps)
        done = int(self.optimizer.iterations.numpy()) + int(self.skipped_steps.numpy())
        if done - num_steps < step <= done:
            terminate()

    return run_and_terminate


# CSVLogger leaves its file open in a run that does not come to its end.
@pytest.mark.filterwarnings("ignore:.*unclosed file.*")
def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_bytes(
    taxi: StepRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"examples": taxi.path("examples"), "transform": taxi.path("transform")}
    steps = taxi.result("ingest").num_examples["train"] // SETTINGS["global_batch_size"]
    monkeypatch.setattr(engine, "LOSS_SCALE_GROWTH_STEPS", GROWTH_STEPS)

    def run(name: str) -> tuple[Any, list[str]]:
        messages: list[str] = []
        with progress.shown_by(messages.append), contextlib.suppress(Terminated):
            return train(**paths, model=tmp_path / name, config=TrainConfig.model_validate(SETTINGS)), messages
        return None, messages

    undisturbed, _ = run("whole")
    log = (tmp_path / "whole" / "callbacks" / "log.csv").read_text()
    rates = [float(row["learning_rate"]) for row in csv.DictReader(io.StringIO(log))]
    assert undisturbed.skipped_steps > 0 and undisturbed.epochs == 6
    assert rates == pytest.approx([0.05, 0.05, 0.05, 0.005, 0.005, 0.0005])

    # A process of its own, which SIGTERM ends as it ends any; in the middle of the second epoch.
    script = f"""
        from pathlib import Path
        from components.config import TrainConfig
        from components.train import engine, train
        from tests.components.test_preemption import GROWTH_STEPS, SETTINGS, terminating_in

        engine.LOSS_SCALE_GROWTH_STEPS = GROWTH_STEPS
        engine.Engine.run = terminating_in({steps + 3})
        paths = {{name: Path(path) for name, path in {[(name, str(path)) for name, path in paths.items()]}}}
        train(**paths, model=Path({str(tmp_path / "model")!r}), config=TrainConfig.model_validate(SETTINGS))
    """
    stopped = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert stopped.returncode == -signal.SIGTERM, stopped.stderr[-3000:]
    assert stopped.stdout.splitlines()[-1] == "told to stop: saved after step 4 of epoch 2"

    # At the end of the third, then in the middle of the last one.
    places = ["step 4 of epoch 2"]
    for step, place in ((3 * steps, "epoch 3"), (5 * steps + 5, "step 6 of epoch 6")):
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "run", terminating_in(step))
            result, messages = run("model")
        assert result is None and not (tmp_path / "model").exists()
        assert messages[0] == f"going on after {places[-1]} of a run that was stopped"
        assert messages[-1] == f"told to stop: saved after {place}"
        places.append(place)

    result, messages = run("model")
    assert messages[0] == "going on after step 6 of epoch 6 of a run that was stopped"
    assert result == undisturbed
    digests = [artifacts.read_manifest(tmp_path / name).digest for name in ("whole", "model")]
    assert digests[0] == digests[1]
    assert (tmp_path / "model" / "callbacks" / "log.csv").read_text() == log
