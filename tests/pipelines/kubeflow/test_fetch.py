"""Artifacts fetched through Kubeflow's UI and from an object store that speaks S3."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from components import artifacts
from components.errors import ArtifactError, HeadraceError
from pipelines.kubeflow import kfp_api
from pipelines.kubeflow.fetch import fetch
from pipelines.kubeflow.kfp_api import Access
from tests import seaweedfs
from tests.pipelines import fakes
from tests.pipelines.fake_kfp import FakeApi
from tests.seaweedfs import ObjectStore

KEY = "v2/artifacts/tiny/r-1/make/made"
URI = f"minio://mlpipeline/{KEY}"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An object store's folder, with one artifact in a bucket."""
    made = tmp_path / "store" / "mlpipeline" / KEY
    made.parent.mkdir(parents=True)
    step = fakes.table(_write_two_files)[0]
    step.load()(made=made, config=fakes.config_of().step_config(step.section))
    return tmp_path / "store"


def _write_two_files(output: artifacts.Output, inputs: dict[str, Path], config: object) -> dict[str, int]:
    (output.path / "shards").mkdir()
    (output.path / "shards" / "a=1 b.txt").write_text("first")
    (output.path / "report.html").write_text("second")
    return {"num_files": 2}


def _client(server: FakeApi) -> object:
    return kfp_api.connect(Access(server.url))


def _paths(server: FakeApi) -> list[str]:
    return [unquote(path) for _, path, *_ in server.received if path.startswith("/artifacts/")]


def test_kubeflow_gives_every_file_of_the_manifest(kfp_server: FakeApi, store: Path, tmp_path: Path) -> None:
    kfp_server.store = store
    client = _client(kfp_server)
    fetch(URI, tmp_path / "home/made", client=client, namespace="team-a")
    assert artifacts.open_artifact(tmp_path / "home/made", step="make").result == {"num_files": 2}
    assert (tmp_path / "home/made/shards/a=1 b.txt").read_text() == "first"
    place = f"/artifacts/minio/mlpipeline/{KEY}"
    assert _paths(kfp_server) == [f"{place}/{name}" for name in ("manifest.json", "report.html", "shards/a=1 b.txt")]
    *_, query = [query for _, path, query, *_ in kfp_server.received if path.startswith("/artifacts/")]
    assert query == {"namespace": ["team-a"]}

    kfp_server.received.clear()
    fetch(URI, tmp_path / "home/made", client=client)
    assert kfp_server.received == []


def test_an_artifact_here_that_is_not_whole_is_fetched_again(kfp_server: FakeApi, store: Path, tmp_path: Path) -> None:
    kfp_server.store = store
    shutil.copytree(store / "mlpipeline" / KEY, tmp_path / "made")
    (tmp_path / "made" / "report.html").write_text("sec0nd")
    fetch(URI, tmp_path / "made", client=_client(kfp_server))
    assert (tmp_path / "made" / "report.html").read_text() == "second"


def test_a_damaged_file_leaves_nothing(kfp_server: FakeApi, store: Path, tmp_path: Path) -> None:
    kfp_server.store = store
    (store / "mlpipeline" / KEY / "report.html").write_text("sec0nd")
    with pytest.raises(ArtifactError, match=r"report\.html is not what was written"):
        fetch(URI, tmp_path / "home/made", client=_client(kfp_server))
    assert list((tmp_path / "home").iterdir()) == []


def test_a_manifest_cannot_write_elsewhere(kfp_server: FakeApi, store: Path, tmp_path: Path) -> None:
    kfp_server.store = store
    file = store / "mlpipeline" / KEY / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"files": {"../../out": {"size_bytes": 1, "sha256": ""}}}))
    with pytest.raises(ArtifactError, match=r"a file outside of it, \.\./\.\./out"):
        fetch(URI, tmp_path / "home/made", client=_client(kfp_server))
    assert not (tmp_path / "out").exists()


def test_a_mounted_folder_is_copied(store: Path, tmp_path: Path) -> None:
    fetch(f"file://{store / 'mlpipeline' / KEY}", tmp_path / "made")
    assert artifacts.open_artifact(tmp_path / "made", step="make").result == {"num_files": 2}


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("file:///nowhere", "is no folder here"),
        ("oci://registry/model:1", "only folders, minio://, s3:// and gs:// can"),
    ],
)
def test_what_cannot_be_fetched(tmp_path: Path, uri: str, text: str) -> None:
    with pytest.raises(HeadraceError, match=text):
        fetch(uri, tmp_path / "made")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with seaweedfs.object_store(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture
def bucket(s3: ObjectStore, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The artifact in a store that speaks S3, which is named in the environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    for file in (store / "mlpipeline").rglob("*"):
        if file.is_file():
            s3.put(f"bucket/{file.relative_to(store / 'mlpipeline')}", file.read_bytes())


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("scheme", ["s3", "minio"])
def test_where_kubeflow_gives_nothing_the_object_store_does(kfp_server: FakeApi, tmp_path: Path, scheme: str) -> None:
    fetch(f"{scheme}://bucket/{KEY}", tmp_path / "made", client=_client(kfp_server))
    assert _paths(kfp_server) == [f"/artifacts/{scheme}/bucket/{KEY}/manifest.json"]
    assert artifacts.open_artifact(tmp_path / "made", step="make").result == {"num_files": 2}
    assert (tmp_path / "made/shards/a=1 b.txt").read_text() == "first"


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("s3://bucket/nowhere", "From the store: there is nothing in s3://bucket/nowhere. Give"),
        ("s3://no-such-bucket/x", "From the store: s3://no-such-bucket/x: "),
    ],
)
def test_when_neither_gives_it_both_reasons_are_told(kfp_server: FakeApi, tmp_path: Path, uri: str, text: str) -> None:
    with pytest.raises(HeadraceError) as raised:
        fetch(uri, tmp_path / "made", client=_client(kfp_server))
    for part in (f"{uri} cannot be fetched", "answered 404 Not Found", text, "AWS_ENDPOINT_URL"):
        assert part in str(raised.value)
    assert not (tmp_path / "made").exists()
