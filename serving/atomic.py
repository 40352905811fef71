"""Files that are whole or absent: written under a hidden name beside their own, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a whole file its name, so that a crash of the machine leaves it whole or absent.

    Raises:
        OSError: it cannot be written; an old file is still there.
    """
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` at the end of the block; after an error nothing has changed.

    Example:
        >>> with replacing(Path("answers.csv")) as temporary:
        ...     temporary.write_bytes(answers)
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; an old file is still there.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
