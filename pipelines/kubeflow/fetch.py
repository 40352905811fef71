"""Artifacts of a Kubeflow run, brought home: through Kubeflow's own server, or from the object store."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from components import artifacts
from components.errors import ArtifactError, HeadraceError
from pipelines.kubeflow import kfp_api

# frontend/server/handlers/artifacts.ts
_SOURCES = {"minio": "minio", "s3": "s3", "gs": "gcs"}


def fetch(uri: str, path: Path, *, client: Any = None, namespace: str | None = None) -> None:
    """Copy an artifact to a folder of this machine, every file compared with its manifest; one that is there is kept.

    Args:
        uri: A folder, or minio://, s3:// or gs:// with bucket and key.
        path: The folder to write, whole or not at all.
        client: Whose Kubeflow UI is asked first, with its credentials; its server has those of the object store.
        namespace: Profile namespace of a multi-user Kubeflow.

    Raises:
        ArtifactError: there is no whole artifact.
        HeadraceError: neither Kubeflow nor the object store gives it.
    """
    if _is_whole(path):
        return
    with artifacts.replacing_directory(path) as temporary:
        _copy(uri, temporary, client, namespace)
        artifacts.check_files(temporary, artifacts.read_manifest(temporary))


def _is_whole(path: Path) -> bool:
    try:
        artifacts.check_files(path, artifacts.read_manifest(path))
    except ArtifactError:
        return False
    return True


def _copy(uri: str, folder: Path, client: Any, namespace: str | None) -> None:
    import kfp_server_api  # type: ignore[import-untyped]

    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        if not Path(parts.path).is_dir():
            raise ArtifactError(f"{uri} is no folder here. Mount the volume that it is on, or give another one.")
        shutil.copytree(parts.path, folder, dirs_exist_ok=True)
        return
    if parts.scheme not in _SOURCES:
        raise HeadraceError(f"{uri} cannot be fetched: only folders, minio://, s3:// and gs:// can.")
    key = parts.path.strip("/")
    refused = "no --host was given."
    if client is not None:
        host = kfp_api.host_of(client)
        try:
            with kfp_api.explained(host):
                _from_kubeflow(client, f"/artifacts/{_SOURCES[parts.scheme]}/{parts.netloc}/{key}", folder, namespace)
            return
        except HeadraceError as error:
            if not isinstance(error.__cause__, kfp_server_api.ApiException):
                raise
            refused = str(error)
    # MinIO and what took its place in Kubeflow, SeaweedFS, speak S3.
    _from_store(f"{'gs' if parts.scheme == 'gs' else 's3'}://{parts.netloc}/{key}", folder, refused)


def _from_kubeflow(client: Any, place: str, folder: Path, namespace: str | None) -> None:
    """Get the manifest, and then each file that it lists: Kubeflow's UI gives files, not folders."""
    query = {"namespace": namespace} if namespace else {}

    def get(name: str) -> None:
        file = folder / name
        blocks = kfp_api.read(client, f"{place}/{name}", **query)
        first = next(blocks, b"")  # what is refused leaves no file
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            stream.writelines(itertools.chain([first], blocks))

    get(artifacts.MANIFEST)
    for name in artifacts.read_manifest(folder).files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ArtifactError(f"The manifest of {place} names a file outside of it, {name}: it is not fetched.")
        get(name)


def _from_store(uri: str, folder: Path, refused: str) -> None:
    from serving.errors import ServingError
    from serving.object_store import Folder

    try:
        store = Folder(uri)
        names = store.files()
        store.download(names, folder)
        why = "" if names else f"there is nothing in {uri}"
    except ServingError as error:
        why = error.message
    if why:
        raise HeadraceError(
            f"{uri} cannot be fetched. Through Kubeflow: {refused} From the store: {why}. Give --host of Kubeflow's UI, "
            "which reads it for you, or credentials of your own in the environment, as AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or GOOGLE_APPLICATION_CREDENTIALS."
        )
