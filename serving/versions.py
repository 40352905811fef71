"""Version directories on disk: which are there, and which of them should be served."""

from __future__ import annotations

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


def find_versions(base_path: Path) -> dict[int, Path]:
    """The complete versions under a base path.

    A version is a directory with a numeric name that holds a saved_model.pb. Pushers copy that file last, so a
    directory without it is still on its way, not broken.

    Raises:
        OSError: the base path cannot be listed.
    """
    found = {}
    for entry in base_path.iterdir():
        if entry.name.isascii() and entry.name.isdigit() and (entry / "saved_model.pb").is_file():
            found[int(entry.name)] = entry
    return found


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of all files of a version: differs when anybody has mended it.

    Raises:
        OSError: a file vanished meanwhile.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()])
