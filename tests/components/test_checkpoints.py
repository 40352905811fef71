"""Checkpoints: the newest that can be read is taken, two are kept, and a save that is cut short harms neither."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from components import progress
from components.errors import ArtifactError
from components.train.checkpoints import Checkpoints
from components.train.engine import Engine

# Checkpoints of the model below have a few thousand bytes.
LITTLE = 1000


class Place:
    """A small engine and its checkpoints in a folder."""

    def __init__(self, folder: Path | None) -> None:
        keras.utils.set_random_seed(1)
        x = keras.Input((4,))
        model = keras.Sequential([x, keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.Adam(), loss="mse", auto_scale_loss=False)
        self.engine = Engine(model, strategy=tf.distribute.get_strategy(), xla=False, scale_loss=True)
        self.best = [tf.Variable(v.numpy(), trainable=False) for v in model.variables]
        self.variables = [*self.engine.variables(), *self.best]
        self.checkpoints = Checkpoints(self.engine, self.best, folder)

    def fill(self, value: int) -> None:
        """Give every variable this value."""
        for variable in self.variables:
            variable.assign(np.full(variable.shape, value, variable.numpy().dtype))

    def save(self, step: int) -> None:
        """A checkpoint in which every variable has the step's number."""
        self.fill(step)
        self.checkpoints.save(step, {"step": step, "rate": 0.1, "best": None})

    def restore(self) -> int | None:
        """The step of what is restored, once everything is compared with it."""
        self.fill(0)
        state = self.checkpoints.restore()
        step = 0 if state is None else state["step"]
        assert state in (None, {"step": step, "rate": 0.1, "best": None})
        for variable in self.variables:
            np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, step))
        return step or None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def names_in(folder: Path) -> list[str]:
    """Of everything that lies there, without the kinds of file."""
    return sorted({entry.name.partition(".")[0] for entry in folder.iterdir()})


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """As it seems to this process: no file grows beyond a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_newest_is_restored_into_another_process_and_two_are_kept(folder: Path) -> None:
    place = Place(folder)
    assert place.restore() is None
    for step in (9, 10, 11):
        place.save(step)
    assert names_in(folder) == ["ckpt-10", "ckpt-11"]
    assert Place(folder).restore() == 11


def test_after_a_damaged_one_the_one_before_is_kept_until_there_are_two_others(folder: Path) -> None:
    place = Place(folder)
    place.save(10)
    place.save(20)
    (data,) = folder.glob("ckpt-20.data*")
    data.write_bytes(data.read_bytes()[:-1])
    messages: list[str] = []
    place = Place(folder)
    with progress.shown_by(messages.append):
        assert place.restore() == 10
    assert [m.partition(": ")[0] for m in messages] == ["checkpoint ckpt-20 cannot be read and is passed over"]
    place.save(13)
    assert names_in(folder) == ["ckpt-10", "ckpt-13"]
    place.save(16)
    assert names_in(folder) == ["ckpt-13", "ckpt-16"]


def test_one_of_another_model_is_passed_over_and_changes_nothing(folder: Path) -> None:
    Place(folder).save(5)
    place = Place(folder)
    other = Checkpoints(place.engine, place.best[:-1], folder)
    place.fill(3)
    with progress.shown_by(lambda _: None):
        assert other.restore() is None
    for variable in place.variables:
        np.testing.assert_array_equal(variable.numpy(), np.full(variable.shape, 3))


def test_a_full_disk_is_named_and_leaves_the_ones_before(folder: Path) -> None:
    place = Place(folder)
    place.save(1)
    place.save(2)
    message = rf"No space left on the disk while writing {folder} \(File too large\).*make room and run again"
    with full_disk(), pytest.raises(ArtifactError, match=message):
        place.save(3)
    assert names_in(folder) == ["ckpt-1", "ckpt-2"]
    place = Place(folder)
    assert place.restore() == 2
    with full_disk(), pytest.raises(ArtifactError, match="No space left"):
        place.save(3)
    assert names_in(folder) == ["ckpt-1", "ckpt-2"]
    place.save(3)
    assert names_in(folder) == ["ckpt-2", "ckpt-3"]
    assert Place(folder).restore() == 3


def test_a_process_killed_while_it_saves_leaves_the_one_before(folder: Path) -> None:
    """The system kills it in the middle of a file, by the signal that Python otherwise ignores."""
    script = f"""
        import resource, signal
        from pathlib import Path
        from tests.components.test_checkpoints import LITTLE, Place
        place = Place(Path({str(folder)!r}))
        place.save(1)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, LITTLE))
        place.save(2)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGXFSZ, done.stderr[-2000:]
    assert names_in(folder) == ["ckpt-1", "ckpt-2_temp"]
    place = Place(folder)
    assert place.restore() == 1
    place.save(2)
    assert names_in(folder) == ["ckpt-1", "ckpt-2"]


def test_a_worker_that_is_not_the_chief_saves_and_finds_nothing(tmp_path: Path) -> None:
    place = Place(None)
    place.save(1)
    assert place.restore() is None
    assert not list(tmp_path.iterdir())
