"""A server in a process of its own: its start, CPU time, memory and end. Needs Linux (/proc)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_CPUCLOCK_SCHED = 2


class ServerError(Exception):
    """A server cannot take part; the text says why."""


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, of a process and its descendants; of those that are gone, if they were waited for."""
    return sum(_cpu_s(each) for each in _tree(pid))


def _cpu_s(pid: int) -> float:
    # As clock_getcpuclockid(3) does it: nanoseconds, where /proc counts ticks of 10 ms.
    try:
        own = time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # gone meanwhile: its parent has its time
    return own + (int(stat[13]) + int(stat[14])) / os.sysconf("SC_CLK_TCK")  # cutime and cstime, see proc(5)


def rss_mib(pid: int) -> float:
    """Memory that a process and its descendants hold, in MiB."""
    pages = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from _tree(int(child))


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class Process:
    """A process with a log, which ends with everything that it has started.

    Args:
        command: What to run.
        log: Where its output goes.
        environ: Additions to the environment.
        piped: Whether it gets commands, and answers them on its standard output.

    Raises:
        ServerError: it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, *, piped: bool = False
    ) -> None:
        self._log = log
        with log.open("w") as output:
            try:
                self.popen = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else output,
                    stderr=output,
                    env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **(environ or {})},
                    cwd=log.parent,
                    start_new_session=True,
                    text=True,
                )
            except OSError as error:
                raise ServerError(f"not installed: {error}") from error
        self.pid = self.popen.pid

    def check(self) -> None:
        """See that it runs.

        Raises:
            ServerError: it has ended; with what it wrote.
        """
        if self.popen.poll() is not None:
            raise ServerError(f"ended with code {self.popen.returncode}: {self.complaint()}")

    def complaint(self) -> str:
        """The last line of its log that tells of an error, or the last line."""
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1])[:300]

    def tell(self, line: str) -> None:
        """Write a line to its input."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self.popen.stdin.write(line + "\n")
            self.popen.stdin.flush()

    def answer(self, timeout_s: float) -> Any:
        """The next line of its output, as JSON.

        Raises:
            ServerError: it has ended, or writes nothing in time.
        """
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], timeout_s)[0]:
            raise ServerError(f"no answer in {timeout_s:g} s")
        line = self.popen.stdout.readline()
        if not line:
            self.popen.wait()
            self.check()
        return json.loads(line)

    def end(self) -> None:
        """End it and its descendants."""
        family = list(_tree(self.pid))
        for each in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.popen.communicate()
