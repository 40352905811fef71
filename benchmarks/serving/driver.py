"""Starts each contender in a process of its own and gives them turns, so that the machine's noise falls on all alike."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving import environments
from benchmarks.serving.contenders import (
    BATCHING_PARAMETERS,
    CALL,
    CONTENDERS,
    GRPC,
    GRPC_METHOD,
    REST,
    Contender,
    compare,
)
from benchmarks.serving.load import Exchange, GrpcClients, HttpClients, Load, LoadError, WrongAnswerError
from benchmarks.serving.processes import Process, ServerError, cpu_s, free_ports, rss_mib
from benchmarks.serving.workloads import NUM_ROWS, WORKLOADS, Served, save

_WARM_UP_SHARE = 0.2
_PAUSE_S = 0.1
_RETRY_S = 0.5

Show = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        peers: Folder of the peers' environments.
        clients: Numbers of clients.
        rounds: In each, every contender has a turn for each number of clients.
        seconds: Of a turn, without its warm-up.
        timeout_s: Longest that a contender may take to start.
    """

    peers: Path
    clients: tuple[int, ...]
    rounds: int
    seconds: float
    timeout_s: float = 300.0


@dataclass
class Runner:
    """A contender that serves.

    Attributes:
        turns: Protocol and number of clients -> what each turn gave.
    """

    contender: Contender
    process: Process
    ports: list[int]
    served: Served
    turns: dict[tuple[str, int], list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._exchanges: dict[str, list[Exchange]] = {
            protocol: self.contender.exchanges(protocol, self.served.rows, self.served.answers)
            for protocol in self.contender.protocols
            if protocol != CALL
        }

    def wait(self, timeout_s: float) -> None:
        """Wait until it has answered a request for each row over each protocol, all of them rightly.

        Raises:
            ServerError: it ended, or did not become ready in time; with what was wrong at last.
            WrongAnswerError: its answer is not the model's.
        """
        deadline = time.monotonic() + timeout_s
        for protocol in self.contender.protocols:
            while True:
                self.process.check()
                try:
                    self._greet(protocol, deadline)
                    break
                except WrongAnswerError:
                    raise
                except (OSError, LoadError) as error:
                    if time.monotonic() > deadline:
                        why = f"{error}; {self.process.complaint()}"
                        raise ServerError(f"not ready after {timeout_s:g} s: {why}") from error
                time.sleep(_RETRY_S)

    def _greet(self, protocol: str, deadline: float) -> None:
        if protocol == CALL:
            compare(self.process.answer(deadline - time.monotonic())["answers"], self.served.answers)
            return
        with self.clients(protocol, 1) as clients:
            clients.run(0, NUM_ROWS)

    def clients(self, protocol: str, count: int) -> HttpClients | GrpcClients:
        """New clients of it."""
        if protocol == GRPC:
            port = self.ports[1] if self.contender.rest else self.ports[0]
            return GrpcClients(port, self._exchanges[protocol], count, GRPC_METHOD)
        return HttpClients(self.ports[0], self._exchanges[protocol], count)

    def play(self, protocol: str, clients: int, seconds: float) -> dict[str, Any]:
        """Let clients ask it for some seconds while the others wait.

        Raises:
            LoadError: an answer was wrong, or none came.
            ServerError: it has ended.
        """
        time.sleep(_PAUSE_S)
        self.process.check()
        if protocol == CALL:
            for duration in (_WARM_UP_SHARE * seconds, seconds):
                self.process.tell(str(duration))
                answer = self.process.answer(60 + duration)
            return _turn(Load(answer["latencies_s"], answer["wall_s"], 0.0), answer["cpu_s"])
        with self.clients(protocol, clients) as asking:
            asking.run(_WARM_UP_SHARE * seconds, clients)
            before = cpu_s(self.process.pid)
            load = asking.run(seconds, clients)
            return _turn(load, cpu_s(self.process.pid) - before)


def _turn(load: Load, server_cpu_s: float) -> dict[str, Any]:
    count = len(load.latencies_s)
    p50, p99 = np.percentile(load.latencies_s, [50, 99])
    return {
        "requests": count,
        "cpu_us": 1e6 * server_cpu_s / count,
        "requests_per_s": count / load.wall_s,
        "p50_ms": 1000 * float(p50),
        "p99_ms": 1000 * float(p99),
        "client_cpu_us": 1e6 * load.cpu_s / count,
    }


def measure(workloads: Iterable[str], contenders: Iterable[str], settings: Settings, show: Show) -> dict[str, Any]:
    """Measure contenders.

    Args:
        workloads: Names in WORKLOADS.
        contenders: Names in CONTENDERS.
        settings: How to measure.
        show: Takes a line on what goes on.

    Returns:
        Workload -> `contenders: {name: {status, versions, rss_mib, turns: {protocol: {clients: [turn]}}}}` and
        `load_average` before and after; a turn is what `_turn` gives.
    """
    names = list(contenders)
    return {name: _measure_workload(name, names, settings, show) for name in workloads}


def _measure_workload(name: str, contenders: list[str], settings: Settings, show: Show) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        served = save(WORKLOADS[name], Path(folder))
        np.save(Path(folder) / "rows.npy", served.rows)
        (Path(folder) / "batching.config").write_text(BATCHING_PARAMETERS)
        entries, runners = _start_all(name, contenders, served, settings, stack, show)
        for number in range(settings.rounds):
            for clients in settings.clients:
                _play_round(entries, runners, (REST, GRPC), clients, settings.seconds, number)
            _play_round(entries, runners, (CALL,), 1, settings.seconds, number)
            show(f"{name}: round {number + 1} of {settings.rounds}")
        for contender, runner in runners.items():
            turns: dict[str, dict[str, Any]] = {}
            for (protocol, clients), played in runner.turns.items():
                turns.setdefault(protocol, {})[str(clients)] = played
            entries[contender] |= {"rss_mib": rss_mib(runner.process.pid), "turns": turns}
    return {"contenders": entries, "load_average": [load_before, os.getloadavg()[0]]}


def _start_all(
    workload: str, names: list[str], served: Served, settings: Settings, stack: contextlib.ExitStack, show: Show
) -> tuple[dict[str, dict[str, Any]], dict[str, Runner]]:
    """All at once, since most of a start is waiting for the disk; who cannot start is out."""
    entries: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for name in names:
        contender = CONTENDERS[name]
        interpreter = environments.python(settings.peers, contender.environment)
        try:
            versions = environments.versions(interpreter, contender.environment)
            runners[name] = start(name, contender, interpreter, served, stack)
            entries[name] = {"status": "ok", "versions": versions}
        except (OSError, subprocess.CalledProcessError, ServerError):
            entries[name] = {"status": f"not installed: no {interpreter}; see --prepare"}
            show(f"{workload}: {name}: {entries[name]['status']}")
    for name, runner in list(runners.items()):
        try:
            runner.wait(settings.timeout_s)
            show(f"{workload}: {name} answers")
        except (LoadError, ServerError) as error:
            _drop(name, f"cannot start: {error}", entries, runners)
            show(f"{workload}: {name}: {entries[name]['status']}")
    return entries, runners


def start(name: str, contender: Contender, interpreter: str, served: Served, stack: contextlib.ExitStack) -> Runner:
    """Start a contender in a process that ends with the stack; see Runner.wait.

    Raises:
        ServerError: there is no such interpreter.
    """
    folder = served.keras_file.parent
    ports = free_ports(3)
    command = contender.command(interpreter, served, ports)
    process = Process(command, folder / f"{name}.log", piped=contender.protocols == (CALL,))
    stack.callback(process.end)
    return Runner(contender, process, ports, served)


def _play_round(
    entries: dict[str, dict[str, Any]],
    runners: dict[str, Runner],
    protocols: Iterable[str],
    clients: int,
    seconds: float,
    number: int,
) -> None:
    """One turn each, in an order that differs from round to round; who fails is out."""
    turns = [
        (name, protocol) for name in runners for protocol in protocols if protocol in runners[name].contender.protocols
    ]
    random.Random(f"{number} {clients}").shuffle(turns)
    for name, protocol in turns:
        if name not in runners:
            continue
        try:
            turn = runners[name].play(protocol, clients, seconds)
        except (LoadError, ServerError, OSError) as error:
            _drop(
                name, f"failed over {protocol} with {clients} clients in round {number + 1}: {error}", entries, runners
            )
            continue
        runners[name].turns.setdefault((protocol, clients), []).append(turn)


def _drop(name: str, why: str, entries: dict[str, dict[str, Any]], runners: dict[str, Runner]) -> None:
    runners.pop(name).process.end()
    entries[name] |= {"status": why}
