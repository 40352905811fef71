"""What many tests share: small runs of the real steps on real data, made once a session."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# By default only where the processor has int8 instructions; the tests' numbers and kernels are to be the same everywhere.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

from pipelines.config import PipelineConfig, load_config
from pipelines.steps import STEPS, step_named

if TYPE_CHECKING:
    from tests.seaweedfs import ObjectStore

PROJECT = Path(__file__).resolve().parent.parent


def pytest_sessionfinish() -> None:
    """Undo what a server does to the collector: Hypothesis, imported for the summary, asks it who refers to an object."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def running_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 object store, started once."""
    from tests import seaweedfs

    with seaweedfs.object_store(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def store(
    running_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectStore]:
    """The object store with an empty `bucket`, and the environment that leads to it."""
    for name, value in running_store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield running_store
    running_store.filesystem().delete_dir_contents("bucket")


class StepRun:
    """Artifacts of a run, each made when it is first asked for."""

    def __init__(self, root: Path, config: PipelineConfig) -> None:
        self.root, self.config = root, config
        self.results: dict[str, Any] = {}

    def path(self, output: str) -> Path:
        """The artifact of that name, with everything before it."""
        step = next(step for step in STEPS if step.output == output)
        if step.name not in self.results:
            inputs = {name: self.path(name) for name in step.inputs}
            self.results[step.name] = self.call(step.name, self.root / output, **inputs)
        return self.root / output

    def result(self, step_name: str) -> Any:
        """What a step returned."""
        self.path(step_named(step_name).output)
        return self.results[step_name]

    def call(self, step_name: str, output: Path, config: Any = None, **inputs: Path) -> Any:
        """Call a step with inputs and an output of one's own; by default with this run's."""
        step = step_named(step_name)
        given = inputs or {name: self.path(name) for name in step.inputs}
        config = config if config is not None else self.config.step_config(step.section)
        return step.load()(**given, **{step.output: output}, config=config)


@pytest.fixture(scope="session")
def taxi(tmp_path_factory: pytest.TempPathFactory) -> StepRun:
    """The default config on some thousand taxi trips, for four epochs."""
    root = tmp_path_factory.mktemp("taxi")
    overrides = [
        f"data.path={PROJECT / 'configs/data/chicago_taxi.csv.gz'}",
        "data.limit=2400",
        "train.epochs=4",
        "train.global_batch_size=64",
        "train.optimizer.learning_rate=0.005",
        "train.early_stopping=null",
        f"push.destination={root / 'serving_models'}",
        "compress.calibration.num_examples=50",
    ]
    return StepRun(root, load_config(PROJECT / "configs/chicago_taxi.yaml", overrides))
