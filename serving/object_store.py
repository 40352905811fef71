"""Folders in an object store, s3://bucket/path or gs://bucket/path, and copies of them on the local disk.

pyarrow moves the objects. Where the store is and who asks follows from the environment, as it does for the AWS and Google
SDKs: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY ..., GOOGLE_APPLICATION_CREDENTIALS.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import atomic
from serving.errors import Code, ServingError, invalid_argument
from serving.traffic import TRAFFIC_FILE
from serving.versions import LITERT_FILE, ONNX_FILE

logger = logging.getLogger(__name__)

GRAPHS = ("saved_model.pb", "saved_model.pbtxt")
# Every look at a bucket costs time and money; TF Serving's second between two looks is meant for a disk.
LEAST_POLL_SECONDS = 30.0
_SCHEMES = ("s3", "gs")
_AT_A_TIME = 8
_COPIED = ".copied.json"


def is_uri(path: str | Path | None) -> bool:
    """Whether a path lies in an object store."""
    scheme, separator, _ = str(path).partition("://")
    return bool(separator) and scheme in _SCHEMES


class Folder:
    """What lies under a URI.

    Args:
        uri: s3://bucket/path or gs://bucket/path.

    Raises:
        ServingError: what is wrong with the store or the right to it; so does every method.
    """

    def __init__(self, uri: str) -> None:
        from pyarrow import fs

        self.uri = uri.rstrip("/")
        bucket = self.uri.partition("://")[2].partition("/")[0]
        if not bucket or "@" in bucket:
            raise invalid_argument(f"{uri} is not s3://bucket/path or gs://bucket/path; keys come from the environment")
        with self._explained():
            self._store, self._root = fs.FileSystem.from_uri(self.uri)

    def files(self) -> dict[str, str]:
        """Name below the folder -> size and time, which differ when the object does."""
        from pyarrow import fs

        bucket = self._root.partition("/")[0]
        with self._explained():
            found = self._store.get_file_info(fs.FileSelector(self._root, allow_not_found=True, recursive=True))
            if not found and self._store.get_file_info(bucket).type is fs.FileType.NotFound:
                raise FileNotFoundError(f"there is no bucket {bucket}")
        start = len(self._root) + 1
        return {info.path[start:]: f"{info.size} {info.mtime_ns}" for info in found if info.is_file}

    def state(self, name: str) -> str | None:
        """Size and time of one object; None if there is none."""
        with self._explained():
            info = self._store.get_file_info(f"{self._root}/{name}")
        return f"{info.size} {info.mtime_ns}" if info.is_file else None

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy objects below a folder of this machine; a file that is there already has been copied whole."""
        from pyarrow import fs

        def copy(name: str) -> None:
            target = folder / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic.replacing(target) as part:
                    fs.copy_files(f"{self._root}/{name}", str(part), self._store, fs.LocalFileSystem())

        self._each(copy, names)

    def upload(self, names: Iterable[str], folder: Path) -> None:
        """Copy files below a folder of this machine into the store."""
        from pyarrow import fs

        def copy(name: str) -> None:
            fs.copy_files(str(folder / name), f"{self._root}/{name}", fs.LocalFileSystem(), self._store)

        self._each(copy, names)

    def read(self, name: str) -> bytes:
        """The content of a small object."""
        with self._explained(), self._store.open_input_stream(f"{self._root}/{name}", compression=None) as stream:
            return bytes(stream.read())

    def write(self, name: str) -> None:
        """Make an empty object."""
        with self._explained():
            self._store.open_output_stream(f"{self._root}/{name}", compression=None).close()

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects."""
        self._each(lambda name: self._store.delete_file(f"{self._root}/{name}"), names)

    def _each(self, do: Callable[[str], None], names: Iterable[str]) -> None:
        with self._explained(), ThreadPoolExecutor(_AT_A_TIME) as pool:
            for done in [pool.submit(do, name) for name in names]:
                done.result()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise invalid_argument(f"{self.uri}: {error}") from error
        except FileNotFoundError as error:
            raise ServingError(Code.NOT_FOUND, f"{self.uri}: {error}") from error
        except OSError as error:
            raise ServingError(Code.UNAVAILABLE, f"{self.uri}: {error}") from error


def versions_of(files: Mapping[str, Any]) -> list[int]:
    """The numbers of the whole versions among the objects of a base path, oldest first; see `find_versions`."""
    names = {name.partition("/")[0] for name in files}

    def is_whole(name: str) -> bool:
        if any(f"{name}/{graph}" in files for graph in GRAPHS):
            return True
        has_variables = any(file.startswith(f"{name}/variables/") for file in files)
        return not has_variables and any(f"{name}/{model}" in files for model in (LITERT_FILE, ONNX_FILE))

    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and is_whole(name))


@contextlib.contextmanager
def copied(uri: str, folder: Path) -> Iterator[None]:
    """Make a folder of this machine what a base path in a store is: its whole versions, and traffic.json.

    A version appears under its number when all of it is here, and goes when it has gone from the store. No other process
    touches the folder during the block.

    Raises:
        ServingError: the store does not answer, or a version went away meanwhile.
        OSError: the disk is full, say.
    """
    store = Folder(uri)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = store.files()
        whole = {str(number) for number in versions_of(files)}
        wanted = whole | {TRAFFIC_FILE}
        known = what_was_copied(folder)
        for name in sorted(wanted | {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}):
            objects = {file: state for file, state in files.items() if file.partition("/")[0] == name}
            objects = objects if name in wanted else {}
            if known.get(name, {}) != objects or bool(objects) != (folder / name).exists():
                _replace(folder, name, store, objects)
            known[name] = objects
        text = json.dumps({name: objects for name, objects in known.items() if objects})
        atomic.write_text(folder / _COPIED, text)
        for name in {name.partition("/")[0] for name in files} - whole:
            if name.isdigit():  # on its way, or given up: its number is taken
                (folder / name).mkdir()
        yield


def what_was_copied(folder: Path) -> dict[str, dict[str, str]]:
    """Name in a copy -> the objects that it was made from, as `Folder.files` shows them."""
    try:
        return dict(json.loads((folder / _COPIED).read_text()))
    except FileNotFoundError:
        return {}


def _replace(folder: Path, name: str, store: Folder, objects: Mapping[str, str]) -> None:
    """Put what lies under a name in the store in the place of what lies there on the disk; nothing, if it is gone."""
    incoming, old = folder / ".incoming", folder / ".old"
    for left_over in (incoming, old):
        shutil.rmtree(left_over, ignore_errors=True)
    store.download(objects, incoming)
    if (folder / name).is_dir():
        (folder / name).rename(old)
    elif not objects:
        (folder / name).unlink(missing_ok=True)
    if objects:
        (incoming / name).replace(folder / name)
    shutil.rmtree(old, ignore_errors=True)


def copy_folder(uri: str) -> Path:
    """Where this machine keeps its copy of a base path: below $HEADRACE_CACHE, or else ~/.cache/headrace."""
    cache = Path(os.environ.get("HEADRACE_CACHE", Path.home() / ".cache/headrace"))
    where = f"{os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL')} {uri.rstrip('/')}"
    return cache / "object_store" / hashlib.sha256(where.encode()).hexdigest()[:16]


def follow(uri: str, poll_wait_seconds: float) -> Path:
    """Copy a base path, then keep the copy as the store is for the rest of the process.

    Args:
        uri: The base path.
        poll_wait_seconds: Time between two looks, LEAST_POLL_SECONDS at least; 0 looks only once.

    Returns:
        The copy.

    Raises:
        ServingError: the store does not answer.
    """
    folder = copy_folder(uri)
    with copied(uri, folder):
        pass
    if poll_wait_seconds > 0:
        wait_seconds = max(poll_wait_seconds, LEAST_POLL_SECONDS)
        threading.Thread(
            target=_keep_copied, args=(uri, folder, wait_seconds), name="store-poller", daemon=True
        ).start()
    return folder


def _keep_copied(uri: str, folder: Path, wait_seconds: float) -> None:
    complaint = ""
    while True:
        time.sleep(wait_seconds)
        said, complaint = complaint, ""
        try:
            with copied(uri, folder):
                pass
        except Exception as error:
            complaint = str(error)
        if complaint and complaint != said:
            logger.error("serving goes on as it was: %s", complaint)
