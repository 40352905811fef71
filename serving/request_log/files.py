"""The files of a request log: what they are called, in which order they are read, how many are kept.

A log `requests.tfrecord` is that file and, beside it, what was rotated out of it, by the time of the first record:
`requests-20260131T235959.123456Z.tfrecord`. Of a Parquet log only the latter exist, for a Parquet file cannot be read
before it is whole. Nothing here imports numpy, so that those who only look for changes stay quick.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

_TIME = r"\d{8}T\d{6}\.\d{6}Z"
_TIME_FORMAT = "%Y%m%dT%H%M%S.%fZ"
_Inode = tuple[int, int]  # with its device


def log_files(path: Path | str) -> list[Path]:
    """The files of a log, a folder of them or a glob, those of one log in the order in which they were written.

    Args:
        path: The server's --request_log_file, a folder (with its sub-folders) or a glob.

    Returns:
        The files that are there; none that is hidden, as locks and unfinished files are.
    """
    path = Path(path)
    found: Iterable[Path]
    if path.is_dir():
        found = path.rglob("*")
    elif path.is_file() or not glob.has_magic(str(path)):
        found = [*rotated_files(path), path]
    else:
        found = map(Path, glob.iglob(str(path), recursive=True))
    # "requests-2026..." sorts before "requests.tfrecord", which holds what is newer.
    return sorted(file for file in found if not file.name.startswith(".") and file.is_file())


def open_files(path: Path | str) -> Iterator[BinaryIO]:
    """The files of a log that are there now, opened one after the other in the order of `log_files`.

    One that the server renames meanwhile, since it is full, is found under its new name; one that it deletes is left out.

    Raises:
        FileNotFoundError: there is no such log.
        OSError: a file cannot be read.
    """
    wanted: dict[_Inode, Path] = {}
    # A file that is renamed in the middle of a listing may be missing from it; from two in a row it is not.
    while wanted != (found := _inodes(path)):
        wanted = found
    if not wanted:
        raise FileNotFoundError(f"there is no request log {path}")
    for inode, name in wanted.items():
        file: Path | None = name
        while file is not None:
            with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
                if _inode(os.fstat(opened.fileno())) == inode:
                    yield opened
                    break
            file = _inodes(path).get(inode)


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _inodes(path: Path | str) -> dict[_Inode, Path]:
    found = {}
    for file in log_files(path):
        with contextlib.suppress(FileNotFoundError):
            found[_inode(file.stat())] = file
    return found


def rotated_files(path: Path) -> list[Path]:
    """What has been rotated out of a log, oldest first."""
    name = re.compile(re.escape(path.stem) + "-" + _TIME + re.escape(path.suffix))
    return sorted(file for file in path.parent.glob("*") if name.fullmatch(file.name))


def rotated_name(path: Path, time_seconds: float) -> Path:
    """A name that is free for a file of a log whose first record is of that Unix time."""
    when = datetime.datetime.fromtimestamp(time_seconds, datetime.timezone.utc)
    while (file := path.with_name(f"{path.stem}-{when.strftime(_TIME_FORMAT)}{path.suffix}")).exists():
        when += datetime.timedelta(microseconds=1)
    return file


def forget_oldest(path: Path, keep: int) -> None:
    """Delete the oldest rotated files of a log, so that `keep` files in all stay; 0 keeps all."""
    if keep:
        for file in rotated_files(path)[: -keep + path.exists() or None]:
            file.unlink(missing_ok=True)


def lock(path: Path) -> BinaryIO:
    """Take a log for this process; it is given back when the result is closed, or the process ends in whatever way.

    Raises:
        OSError: another process writes it, or its folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise OSError(
            error.errno, "another server writes this request log; give each a --request_log_file of its own", str(path)
        ) from error
    return file
