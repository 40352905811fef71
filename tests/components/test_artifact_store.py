"""Artifacts kept in an object store: another machine goes on from them, and never from half of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from components.artifact_store import ArtifactStore
from components.artifacts import MANIFEST
from components.errors import DataError
from pipelines.local import run
from serving.object_store import Folder
from tests.pipelines.fakes import config_of, quiet, table
from tests.seaweedfs import ObjectStore

URI = "s3://bucket/runs"


def states(runs: Path, **sections: object) -> list[str]:
    result = run(config_of(**sections), runs_dir=runs, artifact_store=URI, steps=table(), console=quiet())
    return [step.state for step in result.steps]


def test_a_run_on_another_machine_reuses_what_the_store_has(store: ObjectStore, tmp_path: Path) -> None:
    assert states(tmp_path / "here") == ["done"] * 4
    assert store.names("bucket/runs/tiny") == [
        f"{name}/{file}" for name in ("judged", "made", "shaped", "shipped") for file in (MANIFEST, "words")
    ]
    assert states(tmp_path / "there") == ["reused"] * 4
    words = [(tmp_path / place / "tiny/shipped/words").read_text() for place in ("here", "there")]
    assert words[0] == words[1]
    assert states(tmp_path / "there", verify={"latency_rounds": 5}) == ["reused", "reused", "done", "done"]
    assert states(tmp_path / "elsewhere", verify={"latency_rounds": 5}) == ["reused"] * 4


def test_what_was_here_before_is_brought_to_the_store_too(store: ObjectStore, tmp_path: Path) -> None:
    run(config_of(), runs_dir=tmp_path / "here", steps=table(), console=quiet())
    assert store.names("bucket/runs/tiny") == []
    assert states(tmp_path / "here") == ["reused"] * 4
    assert states(tmp_path / "there") == ["reused"] * 4


def artifact(path: Path, *names: str) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    for name in (*names, MANIFEST):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{name} of {names}")
    return path


def test_an_artifact_that_is_replaced_is_never_there_in_part(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ArtifactStore(URI)
    kept.keep(artifact(tmp_path / "made", "old", "both"))
    upload = Folder.upload

    def cut_off(self: Folder, names: set[str], folder: Path) -> None:
        upload(self, names, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "upload", cut_off)
        with pytest.raises(KeyboardInterrupt):
            kept.keep(artifact(tmp_path / "made", "both", "new"))
    (tmp_path / "there").mkdir()
    kept.bring(tmp_path / "there/made")
    assert not list((tmp_path / "there").iterdir())
    kept.keep(tmp_path / "made")
    kept.bring(tmp_path / "there/made")
    assert {file.name: file.read_text() for file in (tmp_path / "there/made").iterdir()} == {
        file.name: file.read_text() for file in (tmp_path / "made").iterdir()
    }


def test_a_store_that_does_not_take_it_ends_the_run(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--artifact-store: s3://nowhere/tiny/made: there is no bucket nowhere\."):
        run(config_of(), runs_dir=tmp_path, artifact_store="s3://nowhere", steps=table(), console=quiet())
