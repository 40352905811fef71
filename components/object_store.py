"""Data and pushed models in an object store, s3:// or gs://, and data on the web: steps read and write local copies."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import uuid
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from components import plugins
from components.config import DataConfig
from components.errors import DataError
from components.web import WebFolder, is_web, local_name
from serving.errors import ServingError
from serving.object_store import GRAPHS, Folder, copied, copy_folder, is_uri, versions_of, what_was_copied

__all__ = [
    "StoreListing",
    "absolute",
    "base_path",
    "data_digest",
    "data_uris",
    "explained",
    "has_file",
    "is_remote",
    "is_uri",
    "local_data",
    "publish",
]


def is_remote(path: str | None) -> bool:
    """Whether data lie in an object store or on the web."""
    return is_uri(path) or is_web(path)


def data_digest(config: DataConfig) -> str | None:
    """Digest of the names, sizes and times (on the web: ETags) of what `data.path` names; None without any.

    None, too, for a source of the user's, which gets the URI and may make anything of it.

    Raises:
        DataError: the store does not answer.
    """
    if not _is_fetched(config):
        return None
    with explained("data.path"):
        _, files, _ = _select(str(config.path))
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest() if files else None


def data_uris(config: DataConfig) -> list[str]:
    """The URI of each object that `data.path` names, in the order in which their copies would be read.

    Raises:
        DataError: the store does not answer.
    """
    with explained("data.path"):
        store, files, _ = _select(str(config.path))
    return [f"{store.uri}/{glob.escape(name)}" for name in sorted(files, key=Path)]


class StoreListing:
    """What lies where in a store or on the web, as `components.spans.Listing` has it; a DataError if it does not answer."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}  # folder -> all that lies below it

    def names(self, folder: str) -> list[str]:
        """Files and folders in a folder."""
        above = next((known for known in self._known if f"{folder}/".startswith(f"{known}/")), None)
        if above is None:
            above = folder
            with explained("data.path"):
                kind: type[Folder | WebFolder] = WebFolder if is_web(folder) else Folder
                self._known[folder] = list(kind(folder).files())
        start = f"{folder}/".removeprefix(f"{above}/")
        below = [name.removeprefix(start) for name in self._known[above] if name.startswith(start)]
        return sorted({name.partition("/")[0] for name in below})

    def files(self, path: str) -> list[str]:
        """The URIs that a path, folder or glob names."""
        with explained("data.path"):
            store, files, _ = _select(path)
            return [f"{store.uri}/{name}" for name in files]


@contextlib.contextmanager
def local_data(config: DataConfig, folder: Path) -> Iterator[DataConfig]:
    """The configuration with `data.path` on this machine: what lies in a store or on the web is copied to `folder` first.

    A source of the user's gets the URI as it is.

    Raises:
        DataError: the store does not answer or has no such object.
    """
    if not _is_fetched(config):
        yield config
        return
    with explained("data.path"):
        store, files, rest = _select(str(config.path))
        if not files:
            raise DataError(f"data.path: there is no object {config.path}. Correct the path, or put the data there.")
        store.download(files, folder)
    try:
        yield config.model_copy(update={"path": str(folder / rest)})
    except DataError as error:
        raise DataError(str(error).replace(str(folder), store.uri)) from error


def absolute(path: str) -> str:
    """A path that means the same everywhere on this machine; a URI does already."""
    return path if is_uri(path) else str(Path(path).absolute())


def has_file(folder: str, name: str) -> bool:
    """Whether a folder, here or in a store, has a file of that name.

    Raises:
        DataError: the store does not answer.
    """
    if not is_uri(folder):
        return Path(folder, name).is_file()
    with explained("push.destination"):
        return Folder(folder).state(name) is not None


@contextlib.contextmanager
def base_path(path: str) -> Iterator[Path]:
    """The folder of a model's versions: `path` itself, or this machine's copy of what lies there in a store, brought up to
    date and held for the length of the block.

    Raises:
        DataError: the store does not answer.
    """
    if not is_uri(path):
        yield Path(path).absolute()
        return
    folder = copy_folder(path)
    with contextlib.ExitStack() as held:
        with explained("push.destination"):
            held.enter_context(copied(path, folder))
        yield folder


def publish(path: str, base: Path, version: int) -> None:
    """Bring what a push has changed in the copy of a base path to the store: a new version, and those that it forgot.

    A store knows neither locks nor renaming. So saved_model.pb comes last, for without it nobody takes a version for one,
    and an object of its own claims the number first, so that two pushes never mix their files.

    Args:
        path: The base path; one on this machine is as it should be already.
        base: Its copy, held by `base_path`.
        version: The number of the version that was pushed.

    Raises:
        DataError: the store does not answer, or another push took the number. What was written of the version is taken
            away again, if the store still lets us.
    """
    if not is_uri(path):
        return
    with explained("push.destination"):
        store = Folder(path)
        before = store.files()
        if str(version) not in what_was_copied(base):
            _upload(store, base, version)
        kept = versions_of(_names(base))
        half = {_number(name) for name in before} - {0, *versions_of(before)}
        forgotten = {int(name) for name in what_was_copied(base) if name.isdigit()} - set(kept)
        for number in forgotten | {number for number in half if number < min(kept)}:
            _remove(store, number)


def _upload(store: Folder, base: Path, version: int) -> None:
    claim = f"{version}/.push-{uuid.uuid4().hex}"
    store.write(claim)
    # Stores are consistent: of two pushes, the one that looks second sees the other's claim, or its version.
    if [name for name in store.files() if _number(name) == version] != [claim]:
        store.remove([claim])
        raise DataError(f"push.destination: another push has taken version {version} of {store.uri}. Run again.")
    names = [name for name in _names(base) if _number(name) == version]
    graphs = [name for name in names if name.partition("/")[2] in GRAPHS]
    try:
        store.upload([name for name in names if name not in graphs], base)
        store.upload(graphs, base)
    except BaseException:
        with contextlib.suppress(ServingError):
            _remove(store, version)
        raise
    store.remove([claim])


def _remove(store: Folder, number: int) -> None:
    names = [name for name in store.files() if _number(name) == number]
    graphs = [name for name in names if name.partition("/")[2] in GRAPHS]
    store.remove(graphs)  # first, so that nobody takes the rest for a version
    store.remove([name for name in names if name not in graphs])


def _names(base: Path) -> dict[str, None]:
    """The files of a copy, by their names in the store."""
    return {file.relative_to(base).as_posix(): None for file in sorted(base.rglob("*")) if file.is_file()}


def _number(name: str) -> int:
    """The version that an object belongs to, 0 for none."""
    folder = name.partition("/")[0]
    return int(folder) if folder.isascii() and folder.isdigit() else 0


def _is_fetched(config: DataConfig) -> bool:
    return is_remote(config.path) and not plugins.is_own(config.source)


def _select(uri: str) -> tuple[Folder | WebFolder, dict[str, str], str]:
    """The folder that a URI of an object, a folder or a glob lies in, the objects it names, and the rest of the URI."""
    kind: type[Folder | WebFolder] = WebFolder if is_web(uri) else Folder
    parts = uri.split("/")
    # Of a web address only * makes a glob: a ? begins its query.
    has_magic = (lambda part: "*" in part) if is_web(uri) else glob.has_magic
    fixed = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    pattern = parts[fixed:]
    store = kind("/".join(parts[:fixed]))
    if pattern:
        found = {name: state for name, state in store.files().items() if _matches(name.split("/"), pattern)}
        return store, found, "/".join(pattern)
    if is_web(uri) and uri.endswith("/"):
        return store, store.files(), ""
    parent, _, name = store.uri.rpartition("/")
    if not parent.endswith("/") and (state := kind(parent).state(name)) is not None:
        return kind(parent), {name: state}, local_name(name) if is_web(uri) else name
    return store, store.files(), ""


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """As pathlib's glob: * stays within a part of the path, ** stands for any number of them."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


@contextlib.contextmanager
def explained(setting: str) -> Iterator[None]:
    """Turn what a store answers in the block into a DataError that names the setting."""
    try:
        yield
    except ServingError as error:
        raise DataError(f"{setting}: {error.message}.") from error
