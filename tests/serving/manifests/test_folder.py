"""A folder of manifests: all of a change or none of it, and read back only if it is what was written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.errors import Code, ServingError
from serving.manifests import folder as manifest_folder
from serving.manifests.documents import CONFIG_FILE, HEADER
from serving.manifests.render import render
from serving.traffic import ROLLOUT_FILE
from tests.serving.manifests.configs import make_config


def tree(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


OLD = {"a": f"{HEADER}a", "b/c": f"{HEADER}c", "b/d": f"{HEADER}d", "e/f": f"{HEADER}f"}
NEW = {"a": f"{HEADER}a", "b/c": f"{HEADER}new", "g/h": f"{HEADER}h"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "deploy"
    manifest_folder.write(OLD, path)
    return path


def test_files_change_in_their_places(folder: Path) -> None:
    """A container that has mounted a folder sees what is in it, and not what takes its place."""
    others = {ROLLOUT_FILE: "{}", f".{ROLLOUT_FILE}.7.tmp": "left by a crash", ".git/HEAD": "ref"}
    (folder / ".git").mkdir()
    for name, text in others.items():
        (folder / name).write_text(text)
    before = {name: (folder / name).stat().st_ino for name in ("", "a", "b", "b/c")}
    manifest_folder.write(NEW, folder)
    assert tree(folder) == NEW | others
    changed = {name for name, inode in before.items() if (folder / name).stat().st_ino != inode}
    assert changed == {"b/c"}
    assert sorted(os.listdir(folder)) == [".git", f".{ROLLOUT_FILE}.7.tmp", "a", "b", "g", ROLLOUT_FILE]


@pytest.mark.parametrize("num_writes", range(3))
def test_a_full_disk_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int) -> None:
    fsync, left = os.fsync, [num_writes]

    def fill_up(handle: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fill_up)
    with pytest.raises(OSError, match="No space left"):
        manifest_folder.write(NEW, folder)
    assert tree(folder) == OLD
    with pytest.raises(OSError, match="No space left"):
        manifest_folder.write(NEW, folder.with_name("other"))
    assert os.listdir(folder.parent) == ["deploy"]


@pytest.mark.parametrize("num_calls", range(10))
def test_killed_at_any_moment(folder: Path, monkeypatch: pytest.MonkeyPatch, num_calls: int) -> None:
    """What comes next finds the old files or the new ones, and never some of each."""

    class KilledError(BaseException):
        pass

    left = [num_calls]

    def until_killed(action: Any) -> Any:
        def act(*arguments: Any, **options: Any) -> Any:
            if not left[0]:
                raise KilledError
            left[0] -= 1
            return action(*arguments, **options)

        return act

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, until_killed(getattr(Path, name)))
        patch.setattr(manifest_folder.shutil, "rmtree", until_killed(manifest_folder.shutil.rmtree))
        try:
            manifest_folder.write(NEW, folder)
        except KilledError:
            pass
        else:
            raise AssertionError("it was not killed")
    manifest_folder._finish(folder)
    assert {name: text for name, text in tree(folder).items() if not name.startswith(".staged")} in (OLD, NEW)
    manifest_folder.write(NEW, folder)
    assert tree(folder) == NEW


TARGETS = {"kubernetes": "gateway", "kserve": "labels", "compose": "kind"}


@pytest.mark.parametrize("target", TARGETS)
def test_config_and_target_are_read_back(target: str, tmp_path: Path) -> None:
    config = make_config(TARGETS[target])
    manifest_folder.write(render(config, target), tmp_path)
    assert manifest_folder.read(tmp_path) == (config, target)


def test_what_was_changed_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    manifest_folder.write(render(make_config("pinned"), "kubernetes"), tmp_path)
    service = tmp_path / "base" / "service.yaml"
    service.write_text(service.read_text().replace("8500", "9500"))
    with pytest.raises(ServingError, match=r"base/service\.yaml is not what serving\.resolved\.yaml gives") as raised:
        manifest_folder.read(tmp_path)
    assert raised.value.code is Code.FAILED_PRECONDITION
    service.unlink()
    with pytest.raises(ServingError, match=r"base/service\.yaml is not what"):
        manifest_folder.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_name: m\nmodel_uri: pvc://a/b\nreplica: 3\n", "replica: Extra inputs are not permitted"),
        ("model_name: [\n", "serving.resolved.yaml is damaged: while parsing a flow node"),
        ("", "serving.resolved.yaml is damaged: Input should be a valid dictionary"),
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    manifest_folder.write(render(make_config(), "kubernetes") | {CONFIG_FILE: HEADER + text}, tmp_path)
    with pytest.raises(ServingError) as raised:
        manifest_folder.read(tmp_path)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert message in raised.value.message and "write the folder anew" in raised.value.message


@pytest.mark.parametrize(
    ("name", "changes", "commands"),
    [
        ("pinned", {}, ["kubectl apply -k m/overlays/dev"]),
        ("labels", {}, ["kubectl apply -k m/overlays/dev"]),
        ("gateway", {}, ["kubectl apply -k m/overlays/dev"]),
        (
            "gateway",
            {"canary": {"method": "gateway"}},
            [
                "kubectl apply -k m/overlays/dev",
                "kubectl delete deployment/chicago-taxi-canary horizontalpodautoscaler/chicago-taxi-canary "
                "service/chicago-taxi-canary --ignore-not-found --namespace serving-dev",
            ],
        ),
    ],
)
def test_commands_for_kubernetes(name: str, changes: dict[str, Any], commands: list[str]) -> None:
    found = manifest_folder.apply_commands(make_config(name, **changes), "kubernetes", Path("m"), "dev")
    assert [" ".join(command) for command in found] == commands


def test_what_is_deleted_is_what_the_canary_had() -> None:
    """And its ConfigMap, of which old ones always stay."""

    def names(**canary: Any) -> set[str]:
        config = make_config("gateway", canary={"method": "gateway", **canary})
        texts = [text for name, text in render(config, "kubernetes").items() if name.startswith("base/")]
        objects = [each for text in texts for each in yaml.safe_load_all(text)]
        return {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in objects if "metadata" in each}

    gone = names(version=4, percent=50) - names()
    (_, delete) = manifest_folder.apply_commands(
        make_config("gateway", canary={"method": "gateway"}), "kubernetes", Path("m"), "production"
    )
    assert gone - {"configmap/chicago-taxi-canary-models-4"} == {word for word in delete if "/" in word}
