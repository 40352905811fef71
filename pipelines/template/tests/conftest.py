"""What the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent


@pytest.fixture
def config_file(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config, in the folder from which its paths count."""
    monkeypatch.chdir(PROJECT)
    return PROJECT / "configs/project_name.yaml"
