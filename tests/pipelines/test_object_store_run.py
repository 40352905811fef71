"""A whole run whose data come from an S3 object store and whose model goes there, where a server reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from components import artifacts, formats
from components.errors import DataError
from components.examples import read_arrays
from pipelines import local
from pipelines.config import PipelineConfig
from serving.client import RestClient
from tests import seaweedfs
from tests.conftest import PROJECT
from tests.pipelines.test_end_to_end import SMALL_TAXI, load, run, served
from tests.seaweedfs import ObjectStore

pytestmark = pytest.mark.slow

BASE = "s3://bucket/models/chicago_taxi"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder = tmp_path_factory.mktemp("store")
    with seaweedfs.object_store(folder) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        patch.setenv("HEADRACE_CACHE", str(folder / "cache"))
        store.put("bucket/data/trips.csv.gz", (PROJECT / "configs/data/chicago_taxi.csv.gz").read_bytes())
        yield store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


def config_of(folder: Path, *overrides: str) -> PipelineConfig:
    places = ["data.path=s3://bucket/data/*.csv.gz", "push.destination=s3://bucket/models", "export.formats=[]"]
    return load("chicago_taxi", folder, *SMALL_TAXI, *places, *overrides)


@pytest.fixture(scope="module")
def finished(store: ObjectStore, folder: Path) -> local.RunResult:
    return run(config_of(folder), folder)


def test_the_model_of_data_in_a_store_lies_in_the_store(finished: local.RunResult, store: ObjectStore) -> None:
    assert finished.exit_code == 0
    pushed = finished.result_of("push")
    assert pushed is not None
    assert pushed["version_path"] == f"{BASE}/1"
    names = store.names("bucket/models/chicago_taxi")
    exported = finished.run_dir / "exported/saved_model"
    graph_and_weights = [
        f"1/{file.relative_to(exported)}" for file in exported.rglob("*") if file.is_file() and "extra" not in str(file)
    ]
    assert set(graph_and_weights) < set(names)
    assert not [name for name in names if ".push" in name]
    assert [path.name for path in finished.run_dir.glob(".*scratch")] == []


def test_a_second_run_reuses_every_step_until_the_data_change(
    finished: local.RunResult, store: ObjectStore, folder: Path
) -> None:
    again = run(config_of(folder), folder)
    assert {step.state for step in again.steps} == {"reused"}
    before = artifacts.read_manifest(finished.run_dir / "examples").made_from["outside"]
    store.put("bucket/data/more.csv.gz", (PROJECT / "configs/data/chicago_taxi.csv.gz").read_bytes())
    try:
        changed = local.run(config_of(folder), runs_dir=folder / "runs", until="ingest")
        assert changed.steps[0].reasons == ("outside state: the data changed",)
        assert artifacts.read_manifest(finished.run_dir / "examples").made_from["outside"] != before
    finally:
        store.filesystem().delete_file("bucket/data/more.csv.gz")


def test_the_next_model_is_compared_with_the_one_in_the_store_and_becomes_version_2(
    finished: local.RunResult, store: ObjectStore, folder: Path
) -> None:
    champion = "evaluate.champion={metric: auc, min_improvement: -1}"
    result = run(config_of(folder, champion, "train.epochs=3"), folder)
    assert result.exit_code == 0
    evaluated, pushed = result.result_of("evaluate"), result.result_of("push")
    assert evaluated is not None and pushed is not None
    assert any("of champion version 1" in reason for reason in evaluated["reasons"])
    assert (pushed["version"], pushed["rollback_version"]) == (2, 1)


def test_the_server_serves_it_from_the_store(finished: local.RunResult, folder: Path) -> None:
    raw = read_arrays(finished.run_dir / "examples", "test")
    with served("chicago_taxi", BASE) as address, RestClient(address) as client:
        names = client.metadata("chicago_taxi").signatures["serving_default"].inputs
        answers = client.predict("chicago_taxi", {name: raw[name][:50] for name in names})["probabilities"]
    expected = formats.run_file(finished.run_dir / "exported/saved_model", "probabilities")(raw)[:50]
    np.testing.assert_allclose(np.asarray(answers), expected, atol=1e-5)


def test_a_store_that_refuses_us_ends_the_run_with_its_answer(
    store: ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DataError, match=r"data.path: s3://bucket/data: .*SIGNATURE_DOES_NOT_MATCH"):
        run(config_of(folder), folder)
