"""Artifacts of a run in an object store, so that a run on another machine goes on from them."""

from __future__ import annotations

from pathlib import Path

from components import artifacts
from components.artifacts import MANIFEST
from components.object_store import explained
from serving.object_store import Folder


class ArtifactStore:
    """The artifacts below a URI, each whole or absent: its manifest comes last and goes first.

    Args:
        uri: s3://bucket/path or gs://bucket/path.

    Raises:
        DataError: the store does not answer; so does every method.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")

    def bring(self, path: Path) -> None:
        """Copy an artifact to `path`, whose last part is its name, if there is none and the store has it."""
        if (path / MANIFEST).is_file():
            return
        with explained("--artifact-store"):
            folder = Folder(f"{self._uri}/{path.name}")
            files = folder.files()
            if MANIFEST in files:
                with artifacts.replacing_directory(path) as temporary:
                    folder.download(files, temporary)

    def keep(self, path: Path) -> None:
        """Copy the artifact at `path` to the store, if it is another one than that there."""
        with explained("--artifact-store"):
            folder = Folder(f"{self._uri}/{path.name}")
            before = folder.files()
            if MANIFEST in before and folder.read(MANIFEST) == (path / MANIFEST).read_bytes():
                return
            folder.remove({MANIFEST} & set(before))
            files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
            folder.upload(files - {MANIFEST}, path)
            folder.remove(set(before) - files)
            folder.upload({MANIFEST}, path)
