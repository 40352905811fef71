"""Version directories on disk: which are there, and which of them should be served."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

# Given the versions on disk, those to serve. TF Serving's FileSystemStoragePathSourceConfig.ServableVersionPolicy.
VersionPolicy = Callable[[Iterable[int]], set[int]]


def latest(count: int = 1) -> VersionPolicy:
    """Serve the `count` highest versions (TF Serving's default, with one)."""
    return lambda versions: set(sorted(versions)[-count:])


def specific(*wanted: int) -> VersionPolicy:
    """Serve exactly these versions, when they are there."""
    return lambda versions: set(versions) & set(wanted)


def all_versions(versions: Iterable[int]) -> set[int]:
    """Serve every version on disk."""
    return set(versions)


LITERT_FILE = "model.tflite"
ONNX_FILE = "model.onnx"
_LARGEST = 2**63 - 1  # int64 in TF Serving's messages


def find_versions(base_path: Path) -> dict[int, Path]:
    """The complete versions under a base path.

    A version is a directory with a numeric name that holds a saved_model.pb, a model.tflite or a model.onnx. Pushers copy
    saved_model.pb last, so a directory without it is still on its way, not broken; and so is one that has variables/, even
    if it holds one of the others. Of two names of one number, such as 001 and 1, the one that sorts last counts, as in TF
    Serving (file_system_storage_path_source.cc).

    Raises:
        OSError: the base path cannot be listed.
    """
    names = (name for name in sorted(os.listdir(base_path)) if name.isascii() and name.isdigit())
    return {int(name): base_path / name for name in names if int(name) <= _LARGEST and _is_complete(base_path / name)}


def has_saved_model(path: Path) -> bool:
    """Whether a directory is that of a SavedModel, and a whole one as far as names tell.

    Raises:
        OSError: the disk does not say.
    """
    return any(_is_file(path / name) for name in ("saved_model.pb", "saved_model.pbtxt"))


def _is_complete(path: Path) -> bool:
    if has_saved_model(path):
        return True
    return any(_is_file(path / name) for name in (LITERT_FILE, ONNX_FILE)) and not (path / "variables").is_dir()


def _is_file(path: Path) -> bool:
    """Whether there is such a file; what may not be read counts as one, so that loading it says why it cannot be served.

    Path.is_file would take a hiccup of a network disk for the absence of a version.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except PermissionError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...] | None:
    """Names, sizes and times of all files of a version: differs when anybody has mended it. None: it cannot be read."""
    try:
        files = sorted(file for file in path.resolve().rglob("*") if file.is_file())
        return tuple((str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])
    except OSError:
        return None
