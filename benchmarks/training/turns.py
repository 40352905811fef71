"""A contender's side of the benchmark: it waits for its turn, and answers what the turn took."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks import machine
from benchmarks.training.workloads import Workload


@dataclass(frozen=True)
class Task:
    """What a process is to train.

    Attributes:
        workload: Model, data, optimizer.
        settings: The contender's own settings.
        threads: Threads that it may use.
        steps: Steps a turn.
        reference: File with the weights and logits that all must agree on.
    """

    workload: Workload
    settings: dict[str, Any]
    threads: int
    steps: int
    reference: Path


class Turns(Iterator[int]):
    """The turns of one process: `for num_steps in turns: ...; turns.finish(loss)`.

    Before the first turn it calls `started` and `ready`. An end of the input is the end of the turns.

    Args:
        commands: A line `{"steps": n}` for each turn.
        answers: Where one line goes for each.
        started_at: `time.monotonic()` of the driver when it started this process.
    """

    def __init__(self, commands: IO[str], answers: IO[str], started_at: float) -> None:
        self._commands, self._answers, self._started_at = commands, answers, started_at
        self._start_up: dict[str, Any] = {}
        self._from = (0.0, 0.0)

    def started(self, num_steps: int = 1) -> None:
        """The first call is over, which took this number of steps."""
        self._start_up = {
            "start_up_wall_s": time.monotonic() - self._started_at,
            "start_up_cpu_s": time.process_time() + _children_cpu_s(),
            "first_call_steps": num_steps,
        }

    def ready(self, **facts: Any) -> None:
        """Tell the driver what it needs to know of this contender."""
        self.say({"ready": {**self._start_up, **facts}})

    def __next__(self) -> int:
        line = self._commands.readline()
        if not line:
            raise StopIteration
        num_steps: int = json.loads(line)["steps"]
        self._from = (time.perf_counter(), time.process_time())
        return num_steps

    def finish(self, loss: float) -> None:
        """End the turn."""
        wall, cpu = time.perf_counter() - self._from[0], time.process_time() - self._from[1]
        self.say({"wall_s": wall, "cpu_s": cpu, "peak_rss_mib": machine.peak_rss_mib(), "loss": loss})

    def say(self, message: dict[str, Any]) -> None:
        """Send a line to the driver."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def _children_cpu_s() -> float:
    """Compilers that were started, and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
