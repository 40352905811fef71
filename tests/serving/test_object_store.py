"""The copy of a base path in an object store: whole versions only, as the store has them now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from serving import object_store
from serving.errors import Code, ServingError
from serving.object_store import copied, versions_of
from serving.versions import find_versions
from tests.seaweedfs import ObjectStore

URI = "s3://bucket/models/m"


def put(store: ObjectStore, *names: str, content: str = "x") -> None:
    for name in names:
        store.put(f"bucket/models/m/{name}", content.encode())


def copy(folder: Path) -> dict[str, str]:
    """What is in the copy, by name, after it was brought up to date."""
    with copied(URI, folder):
        pass
    files = (file for file in folder.rglob("*") if file.is_file() and file.name[0] != ".")
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files}


def test_the_copy_is_what_the_store_has_whole_versions_and_the_traffic_alone(
    store: ObjectStore, tmp_path: Path
) -> None:
    put(store, "1/saved_model.pb", "1/variables/v", "traffic.json", "README", "3/variables/v", "3/assets/a")
    assert copy(tmp_path) == {"1/saved_model.pb": "x", "1/variables/v": "x", "traffic.json": "x"}
    assert set(find_versions(tmp_path)) == {1}
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name[0] != ".") == ["1", "3", "traffic.json"]
    put(store, "3/saved_model.pb", content="new")
    store.filesystem().delete_file("bucket/models/m/traffic.json")
    store.filesystem().delete_dir("bucket/models/m/1")
    assert copy(tmp_path) == {"3/saved_model.pb": "new", "3/variables/v": "x", "3/assets/a": "x"}


def test_only_what_changed_is_copied_again(store: ObjectStore, tmp_path: Path) -> None:
    put(store, "1/saved_model.pb", "1/variables/v", "2/saved_model.pb")
    copy(tmp_path)
    inodes = {name: (tmp_path / name / "saved_model.pb").stat().st_ino for name in "12"}
    put(store, "2/saved_model.pb", content="longer")
    assert copy(tmp_path)["2/saved_model.pb"] == "longer"
    assert (tmp_path / "1/saved_model.pb").stat().st_ino == inodes["1"]
    assert (tmp_path / "2/saved_model.pb").stat().st_ino != inodes["2"]
    shutil.rmtree(tmp_path / "1")
    assert copy(tmp_path)["1/variables/v"] == "x"


def test_a_download_that_is_cut_off_leaves_what_was_there(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "1/saved_model.pb", content="old")
    before = copy(tmp_path)
    put(store, "1/saved_model.pb", content="newer")
    download = object_store.Folder.download

    def cut_off(self: object_store.Folder, names: dict[str, str], folder: Path) -> None:
        download(self, names, folder)
        raise ServingError(Code.UNAVAILABLE, "gone")

    monkeypatch.setattr(object_store.Folder, "download", cut_off)
    with pytest.raises(ServingError, match="gone"):
        copy(tmp_path)
    assert (tmp_path / "1/saved_model.pb").read_text() == before["1/saved_model.pb"] == "old"


@pytest.mark.parametrize(
    ("names", "versions"),
    [
        (["2/saved_model.pb", "10/saved_model.pbtxt"], [2, 10]),
        (["1/model.tflite", "2/model.onnx"], [1, 2]),
        (["1/model.tflite", "1/variables/variables.index"], []),
        (["1/variables/saved_model.pb", "x/saved_model.pb", "saved_model.pb"], []),
    ],
)
def test_which_versions_are_whole_is_the_rule_of_folders(names: list[str], versions: list[int], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert versions_of(dict.fromkeys(names)) == versions == sorted(find_versions(tmp_path))


def test_what_is_wrong_with_the_store_is_said(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(ServingError, match="s3://nowhere/m: there is no bucket nowhere"),
        copied("s3://nowhere/m", tmp_path),
    ):
        pass
    for uri in ("s3://", "s3:///m", "s3://key:secret@bucket/m"):
        with pytest.raises(ServingError, match=r"is not s3://bucket/path or gs://bucket/path"), copied(uri, tmp_path):
            pass
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(ServingError, match=r"s3://bucket/models/m: .*SIGNATURE"):
            copy(tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(ServingError, match=r"s3://bucket/models/m: .*onnect"):
            copy(tmp_path)


@pytest.mark.parametrize(("path", "expected"), [("s3://b/x", True), ("gs://b", True), ("/s3:/x", False), (None, False)])
def test_what_a_uri_is(path: str | None, expected: bool) -> None:
    assert object_store.is_uri(path) is expected
