"""A set of worker processes on this machine: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from components import errors
from components.train.cluster import RESTART_ME, Cluster
from components.train.preemption import TERMINATED

STATUS_FD = "HEADRACE_STATUS_FD"
START_TIMEOUT = "HEADRACE_START_TIMEOUT_S"
_POLL_S = 0.1
# For the others to say what they know, once one has failed; and to leave, once the chief has written everything.
_LAST_WORDS_S = 1.0
_LEAVING_S = 10.0

Show = Callable[[int | None, str], None]


@dataclass(frozen=True)
class Limits:
    """When to give a worker up, and the whole set.

    Attributes:
        max_restarts: Of the whole set.
        start_timeout_s: For all workers to be there.
        heartbeat_timeout_s: Without a sign of life a worker is frozen. The others notice it sooner, while they train.
        grace_s: To save and leave, after SIGTERM; Kubernetes gives 30 s.
    """

    max_restarts: int = 3
    start_timeout_s: float = 300.0
    heartbeat_timeout_s: float = 120.0
    grace_s: float = 25.0


class Set:
    """One start of all workers; as a context it leaves none of them behind.

    Args:
        command: What each of them runs.
        places: The cluster as each sees it.
        limits: See there.
        show: Called with each line that a worker prints.
        note: Called with each line that it writes to standard error, which is what libraries say.
    """

    def __init__(
        self, command: Sequence[str], places: Sequence[Cluster], limits: Limits, show: Show, note: Show
    ) -> None:
        self._command, self._places, self._limits, self._show, self._note = command, places, limits, show, note
        self._workers: list[_Worker] = []
        # Read in threads, shown in the caller's: what shows them need not bear more than one.
        self._lines: queue.SimpleQueue[tuple[Show, int, str]] = queue.SimpleQueue()

    def __enter__(self) -> Set:
        try:
            for place in self._places:
                worker = _Worker(self._command, place, self._limits, self._lines, self._show, self._note)
                self._workers.append(worker)
                self._show(None, f"worker {place.index} is process {worker.process.pid}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._workers:
            worker.end()
        self._show_lines(0)

    def wait(self, is_told_to_stop: Callable[[], bool] = lambda: False) -> str | None:
        """Wait until the chief is done (`None`), or until a worker has failed in a way that a restart may mend.

        Args:
            is_told_to_stop: From when it says so the workers have `grace_s` to save and leave.

        Returns:
            Why the set has ended before it was done.

        Raises:
            HeadraceError: what a worker failed with, if it would fail so again.
        """
        while True:
            if self._workers[0].process.poll() == 0:
                self._let_leave(_LEAVING_S)
                return None
            if is_told_to_stop():
                return self._stop()
            if failed := [worker for worker in self._workers if worker.why_failed()]:
                reason = failed[0].why_failed()
                self._show_lines(_LAST_WORDS_S)
                self._raise_errors()
                return reason
            self._show_lines(_POLL_S)

    def _stop(self) -> str:
        self._show(None, f"told to stop: the workers have {self._limits.grace_s:g} s to save and leave")
        for worker in self._workers:
            worker.process.terminate()
        self._let_leave(self._limits.grace_s)
        self._raise_errors()
        if late := [str(worker.index) for worker in self._workers if worker.process.poll() is None]:
            self._show(None, f"killed, since they did not leave in time: workers {', '.join(late)}")
        return "told to stop"

    def _let_leave(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(worker.process.poll() is None for worker in self._workers):
            self._show_lines(_POLL_S)

    def _raise_errors(self) -> None:
        for worker in self._workers:
            worker.raise_its_error()

    def _show_lines(self, seconds: float) -> None:
        """Show what has come, and what comes for so long."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while True:
                show, worker, line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
                show(worker, line)


class _Worker:
    """A process with threads that read what it prints and its signs of life."""

    def __init__(
        self,
        command: Sequence[str],
        place: Cluster,
        limits: Limits,
        lines: queue.SimpleQueue[tuple[Show, int, str]],
        show: Show,
        note: Show,
    ) -> None:
        self.index, self._limits, self._lines = place.index, limits, lines
        reading, writing = os.pipe()
        threads = max(1, (os.cpu_count() or 1) // len(place.addresses))
        environment = {
            "TF_NUM_INTRAOP_THREADS": str(threads),
            **os.environ,
            "TF_CONFIG": place.tf_config(),
            STATUS_FD: str(writing),
            START_TIMEOUT: str(limits.start_timeout_s),
        }
        self._last_beat = time.monotonic()
        self._error: dict[str, str] = {}
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Ctrl-C is for the launcher, which ends the set.
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._status_reader = threading.Thread(target=self._read_status, args=(os.fdopen(reading),), daemon=True)
        self._readers = [
            threading.Thread(target=self._read_lines, args=(self.process.stdout, show), daemon=True),
            threading.Thread(target=self._read_lines, args=(self.process.stderr, note), daemon=True),
            self._status_reader,
        ]
        for reader in self._readers:
            reader.start()

    def why_failed(self) -> str | None:
        """Why the set cannot go on with this worker, `None` if it can."""
        code = self.process.poll()
        if code:
            return f"worker {self.index} {_meaning(code)}"
        if code is None and (silence := time.monotonic() - self._last_beat) > self._limits.heartbeat_timeout_s:
            return f"worker {self.index} gave no sign of life for {silence:.0f} s"
        return None

    def raise_its_error(self) -> None:
        """Raise what the worker has reported, if a restart cannot mend it."""
        if self.process.poll() is not None:
            self._status_reader.join(timeout=_LAST_WORDS_S)  # a worker that has left may have said why a moment before
        kind = getattr(errors, self._error.get("error", ""), None)
        if kind is not None:
            raise kind(self._error["message"])

    def end(self) -> None:
        """Kill it if it is there, also when it is frozen, and read its last lines."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=_LAST_WORDS_S)

    def _read_lines(self, stream: IO[str], show: Show) -> None:
        with stream:
            for line in stream:
                self._lines.put((show, self.index, line.rstrip()))

    def _read_status(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._last_beat = time.monotonic()
                self._error = json.loads(line) or self._error


def _meaning(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == RESTART_ME:
        return "has lost the others"
    if code == TERMINATED:
        return "was told to stop"
    return f"ended with code {code}"
