"""Waiting in tests for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds; fail when it never does, so late that a busy machine does not matter."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
