"""Data read from an object store and models pushed to one: nothing half-written is taken for a version, errors say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from components import external, object_store
from components.config import DataConfig
from components.errors import DataError
from serving.object_store import Folder
from tests.seaweedfs import ObjectStore

BASE = "s3://bucket/models/m"


@pytest.fixture
def data(store: ObjectStore) -> ObjectStore:
    for name in ("a/x.csv", "a/y.csv", "b/z.csv", "b/deep/z.csv"):
        store.put(f"bucket/data/{name}", name.encode())
    return store


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("data/a/x.csv", ["a/x.csv"]),
        ("data/a", ["a/x.csv", "a/y.csv"]),
        ("data/", ["a/x.csv", "a/y.csv", "b/deep/z.csv", "b/z.csv"]),
        ("data/*/?.csv", ["a/x.csv", "a/y.csv", "b/z.csv"]),
        ("data/b/**/z.csv", ["b/deep/z.csv", "b/z.csv"]),
    ],
)
def test_an_object_a_folder_and_a_glob_are_read_as_files_are(
    data: ObjectStore, tmp_path: Path, path: str, found: list[str]
) -> None:
    with object_store.local_data(DataConfig(path=f"s3://bucket/{path}"), tmp_path / "copy") as config:
        assert config.path is not None
        assert sorted(file.read_text() for file in external.data_files(config.path)) == found


def test_the_data_of_a_run_is_known_by_names_sizes_and_times(data: ObjectStore) -> None:
    def state(path: str = "s3://bucket/data/*/?.csv", source: str = "csv") -> object:
        return external.state("ingest", DataConfig(source=source, path=path), {})["data"]

    before = state()
    assert before is not None and state() == before
    data.put("bucket/data/b/deep/z.csv", b"not of this glob")
    assert state() == before
    data.put("bucket/data/b/z.csv", b"another size")
    assert len({before, state(), state("s3://bucket/data")}) == 3
    assert state("s3://bucket/nothing") is None


def test_a_source_of_the_users_gets_the_uri_and_is_asked_each_time(data: ObjectStore, tmp_path: Path) -> None:
    own = DataConfig(source="mine:source", path="s3://bucket/data/a")
    with object_store.local_data(own, tmp_path) as config:
        assert config is own
    assert "is asked again" in (external.why_unknown("ingest", own) or "")
    assert external.why_unknown("ingest", DataConfig(path="s3://bucket/data/a")) is None


def test_errors_about_the_data_name_the_object(data: ObjectStore, tmp_path: Path) -> None:
    for path, message in {
        "s3://bucket/data/c.csv": "data.path: there is no object s3://bucket/data/c.csv. Correct the path",
        "s3://nowhere/c.csv": "data.path: s3://nowhere/c.csv: there is no bucket nowhere.",
    }.items():
        with pytest.raises(DataError) as raised, object_store.local_data(DataConfig(path=path), tmp_path):
            pass
        assert message in str(raised.value)
    config = DataConfig(path="s3://bucket/data/a/x.csv")
    with (
        pytest.raises(DataError, match=r"^s3://bucket/data/a/x.csv is no CSV$"),
        object_store.local_data(config, tmp_path) as local,
    ):
        raise DataError(f"{local.path} is no CSV")


def push(number: int, *, forget: int | None = None, content: str = "x") -> None:
    """What `push` does to the copy, and then to the store."""
    with object_store.base_path(BASE) as base:
        for name in ("saved_model.pb", "variables/v", "assets/a"):
            (base / str(number) / name).parent.mkdir(parents=True, exist_ok=True)
            (base / str(number) / name).write_text(content)
        if forget is not None:
            (base / str(forget)).rename(base / ".gone")
        object_store.publish(BASE, base, number)


def version(number: int) -> list[str]:
    return [f"{number}/{name}" for name in ("assets/a", "saved_model.pb", "variables/v")]


def test_a_push_brings_its_version_and_takes_the_forgotten_ones_away(store: ObjectStore) -> None:
    push(1)
    push(2)
    assert store.names("bucket/models/m") == version(1) + version(2)
    push(3, forget=1)
    assert store.names("bucket/models/m") == version(2) + version(3)
    with object_store.base_path(BASE) as base:
        assert external.versions(base) == [2, 3]
        object_store.publish(BASE, base, 3)  # a push of what is there
    assert store.names("bucket/models/m") == version(2) + version(3)


def test_a_store_that_goes_away_during_a_push_is_left_without_a_version_that_anybody_takes(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(1)
    upload = Folder.upload

    def upload_until_the_graph(self: Folder, names: list[str], folder: Path) -> None:
        if any(name.endswith("saved_model.pb") for name in names):
            store.stop()
        upload(self, names, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "upload", upload_until_the_graph)
        with pytest.raises(DataError, match=rf"push.destination: {BASE}: .*onnect"):
            push(2)
    store.start()
    half = store.names("bucket/models/m")
    assert {"2/assets/a", "2/variables/v"} < set(half) and "2/saved_model.pb" not in half
    with object_store.base_path(BASE) as base:
        assert external.versions(base) == [1]
        assert (base / "2").is_dir()  # so that the next push takes 3, and never mixes with what is left of 2
    push(3)
    push(4, forget=1)
    assert store.names("bucket/models/m") == version(3) + version(4)


def test_a_push_that_fails_while_the_store_answers_takes_its_files_away(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Folder.upload

    def interrupted(self: Folder, names: list[str], folder: Path) -> None:
        upload(self, names, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "upload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            push(1)
    assert store.names("bucket/models/m") == []


def test_of_two_pushes_of_one_number_the_second_gives_way(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Folder.write

    def be_beaten(self: Folder, name: str) -> None:
        monkeypatch.undo()
        for key, value in store.environment.items():
            monkeypatch.setenv(key, value)
        push_of_another_machine()
        write(self, name)

    def push_of_another_machine() -> None:
        for name in version(1):
            store.put(f"bucket/models/m/{name}", b"theirs")

    monkeypatch.setattr(Folder, "write", be_beaten)
    with pytest.raises(DataError, match=f"another push has taken version 1 of {BASE}. Run again."):
        push(1, content="ours")
    assert store.names("bucket/models/m") == version(1)
    assert store.filesystem().open_input_stream("bucket/models/m/1/assets/a").read() == b"theirs"
    push(2)


def test_a_push_that_was_overtaken_since_it_looked_does_not_take_the_other_for_its_own(store: ObjectStore) -> None:
    with object_store.base_path(BASE) as base:
        for name in version(1):
            store.put(f"bucket/models/m/{name}", b"theirs")
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text("ours")
        with pytest.raises(DataError, match=f"another push has taken version 1 of {BASE}. Run again."):
            object_store.publish(BASE, base, 1)
    assert store.names("bucket/models/m") == version(1)


def test_a_champion_in_a_store_is_found_and_its_digest_read(store: ObjectStore) -> None:
    push(1)
    store.put(f"bucket/models/m/1/{external.PUSH_RECORD}", b'{"model_digest": "d1"}')
    push(2)
    store.put(f"bucket/models/m/2/{external.PUSH_RECORD}", b'{"model_digest": "d2"}')
    with object_store.base_path(BASE) as base:
        champion = external.find_champion(base, other_than="d2")
        assert champion is not None and external.champion_digest(champion) == "d1"


def test_a_pushed_version_that_is_gone_is_pushed_again(store: ObjectStore) -> None:
    push(1)
    assert external.why_gone("push", {"version_path": f"{BASE}/1"}) is None
    store.filesystem().delete_file("bucket/models/m/1/saved_model.pb")
    assert external.why_gone("push", {"version_path": f"{BASE}/1"}) == f"the pushed model {BASE}/1 is gone"
