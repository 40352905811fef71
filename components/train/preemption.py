"""SIGTERM while a model is trained: first save, then leave as the process would have left."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

TERMINATED = 128 + signal.SIGTERM
# Who stops a whole group of processes reaches a worker twice: itself, and through its launcher.
_ONE_REQUEST_S = 1.0


class Preemption:
    """As a context, holds SIGTERM back until `leave`; another one, a second or more later, acts at once.

    In a thread other than the main one, where Python takes no signals, it does nothing.

    Attributes:
        is_asked_for: Whether SIGTERM has come.
    """

    def __init__(self) -> None:
        self.is_asked_for = False
        self._since = 0.0
        self._before: Any = None
        self._is_watching = False

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_watching = True
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if self._is_watching and self.is_asked_for and error is None:
            self.leave()
        self._stop_watching()

    def leave(self) -> None:
        """Let SIGTERM do what it would have done without this context."""
        self._stop_watching()
        signal.raise_signal(signal.SIGTERM)

    def _stop_watching(self) -> None:
        if self._is_watching:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._is_watching = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.is_asked_for:
            self.is_asked_for, self._since = True, time.monotonic()
        elif time.monotonic() - self._since > _ONE_REQUEST_S:
            self.leave()


def leave_in_time(grace_s: float) -> None:
    """From now on end this process `grace_s` after SIGTERM at the latest, with exit code 143.

    While TensorFlow waits in C++, for a worker that is frozen say, Python runs no handler of the main thread; what it
    writes to this descriptor comes through all the same.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while signal.SIGTERM not in os.read(reading, 1):
            pass
        time.sleep(grace_s)
        os._exit(TERMINATED)

    threading.Thread(target=watch, daemon=True).start()
