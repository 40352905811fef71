"""Files that are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from serving import atomic


def test_a_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("old", "new, with an ü"):
        atomic.write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["a.txt"]


def test_nothing_changes_when_the_block_or_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), atomic.replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError

    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]
