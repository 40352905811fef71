"""What must hold besides speed: large answers, slow clients, new versions under load, memory. Each is a function that
gives facts, or raises LoadError or ServerError for a request that is lost or wrong."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import peak_rss_mib
from benchmarks.serving.contenders import CONTENDERS, GRPC, GRPC_METHOD, OURS, REST
from benchmarks.serving.driver import Runner, Show, start
from benchmarks.serving.load import Exchange, GrpcClients, HttpClients, Load, LoadError, WrongAnswerError
from benchmarks.serving.processes import Process, ServerError, cpu_s, rss_mib
from benchmarks.serving.workloads import INPUT, WORKLOADS, Served, save

PROJECT = Path(__file__).resolve().parents[2]
_METRICS_PATH = "/metrics"
_CLIENTS = 8
_START_S = 300.0
_NUM_VERSIONS = 5
_LARGE_BYTES = 100_000_000
_SAMPLES = 40


@dataclass(frozen=True)
class Limits:
    """How much to do.

    Attributes:
        requests: Of `memory`, over each protocol.
        slow_clients: Of `slow_clients`.
    """

    requests: int
    slow_clients: int


@contextlib.contextmanager
def _serving(served: Served, **flags: Any) -> Iterator[Runner]:
    """The embedded server, ready, with its metrics on."""
    config = served.base_path.parent / "monitoring.config"
    config.write_text(f'prometheus_config {{ enable: true, path: "{_METRICS_PATH}" }}')
    contender = replace(CONTENDERS[OURS], settings={"monitoring_config_file": config, **flags})
    with contextlib.ExitStack() as stack:
        runner = start(OURS, contender, sys.executable, served, stack)
        runner.wait(_START_S)
        yield runner


@contextlib.contextmanager
def _half_plus_two(**flags: Any) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory() as folder:
        served = save(WORKLOADS["half_plus_two"], Path(folder))
        with _serving(served, **flags) as runner:
            yield runner


def _counted(runner: Runner) -> int:
    """Calls of the model that the server says it has answered.

    Raises:
        LoadError: it counts calls that failed.
    """
    with urllib.request.urlopen(f"http://127.0.0.1:{runner.ports[0]}{_METRICS_PATH}", timeout=60) as page:
        lines = re.findall(r'^headrace_signature_calls_total{.*code="(\w+)".*} (\S+)$', page.read().decode(), re.M)
    if failed := [code for code, count in lines if code != "OK" and float(count)]:
        raise LoadError(f"the server counts calls that failed: {', '.join(failed)}")
    return int(sum(float(count) for _, count in lines))


def _check_count(runner: Runner, before: int, answered: int) -> None:
    counted = _counted(runner) - before
    if counted != answered:
        raise LoadError(f"clients got {answered} answers, but the server counts {counted}")


def memory(limits: Limits, show: Show) -> dict[str, Any]:
    """Memory after ever more requests; nothing may be lost, and it should not grow."""
    found: dict[str, Any] = {}
    with _half_plus_two() as runner:
        for protocol in (REST, GRPC):
            before = _counted(runner)
            samples = []
            answered = 0
            with runner.clients(protocol, _CLIENTS) as clients:
                for _ in range(_SAMPLES):
                    answered += len(clients.run(0, limits.requests // _SAMPLES).latencies_s)
                    samples.append((answered, rss_mib(runner.process.pid)))
            _check_count(runner, before, answered)
            show(f"memory: {answered} requests over {protocol}")
            # The first half is for caches and pools to fill.
            requests, sizes = np.array(samples[_SAMPLES // 2 :]).T
            found[protocol] = {
                "requests": answered,
                "rss_mib": [size for _, size in samples],
                "mib_per_million_requests": float(np.polyfit(requests / 1e6, sizes, 1)[0]),
            }
    return found


def slow_clients(limits: Limits, show: Show) -> dict[str, Any]:
    """Clients that take many seconds to send their request, while others are served."""
    _allow_open_files(limits.slow_clients + 1000)
    found: dict[str, Any] = {"slow_clients": limits.slow_clients}
    with _half_plus_two(rest_io_timeout_seconds=600) as runner:  # else it gives up those that are slowest
        before = _counted(runner)
        answered = 0

        def ask(when: str) -> None:
            nonlocal answered
            for protocol in (REST, GRPC):
                with runner.clients(protocol, _CLIENTS) as clients:
                    cpu_before = cpu_s(runner.process.pid)
                    load = clients.run(5.0)
                answered += len(load.latencies_s)
                spent_s = cpu_s(runner.process.pid) - cpu_before
                found[f"{protocol}, {when}"] = {**_seen(load), "server_cpu_us": 1e6 * spent_s / len(load.latencies_s)}

        ask("without them")
        arguments = {"port": runner.ports[0], "clients": limits.slow_clients, "sweeps": 20, "sweep_s": 2.0}
        process = Process(
            [sys.executable, "-m", "benchmarks.serving.slow_clients", json.dumps(arguments)],
            runner.served.base_path.parent / "slow_clients.log",
            {"PYTHONPATH": str(PROJECT)},
            piped=True,
        )
        with contextlib.ExitStack() as stack:
            stack.callback(process.end)
            found |= process.answer(_START_S)
            show(f"slow_clients: connections were opened in {found['opened_in_s']:.1f} s")
            ask("beside them")
            slowly_answered = process.answer(_START_S)["answered"]
        if slowly_answered != limits.slow_clients:
            raise LoadError(f"{slowly_answered} of {limits.slow_clients} slow clients got an answer")
        _check_count(runner, before, answered + slowly_answered)
        found["rss_mib"] = rss_mib(runner.process.pid)
    return found


def _seen(load: Load) -> dict[str, float]:
    p50, p99 = np.percentile(load.latencies_s, [50, 99])
    return {
        "requests_per_s": len(load.latencies_s) / load.wall_s,
        "p50_ms": 1000 * float(p50),
        "p99_ms": 1000 * float(p99),
        "longest_ms": 1000 * max(load.latencies_s),
    }


def _allow_open_files(count: int) -> None:
    """For this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ServerError(
            f"{count} open files are needed, ulimit -n allows {hard}: raise it, or take fewer --slow-clients"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def reload(limits: Limits, show: Show) -> dict[str, Any]:
    """New versions while clients ask; every answer must be that of a version that is or was served."""
    versions: set[int] = set()

    def exchanges(protocol: str, rows: np.ndarray, allowed: range) -> list[Exchange]:
        found = []
        for index, row in enumerate(rows):
            each = {
                version: CONTENDERS[OURS].exchanges(protocol, rows[index : index + 1], _answers(row[None], version))[0]
                for version in allowed
            }

            def check(answer: bytes, each: dict[int, Exchange] = each) -> None:
                for version, exchange in each.items():
                    with contextlib.suppress(WrongAnswerError):
                        exchange.check(answer)
                        versions.add(version)
                        return
                raise WrongAnswerError(f"of no version in {list(each)}: {answer[:200]!r}")

            found.append(Exchange(each[allowed[0]].request, check))
        return found

    with tempfile.TemporaryDirectory() as folder:
        staged, served = _save_versions(Path(folder))
        with _serving(served, file_system_poll_wait_seconds=0.2) as runner:
            before = _counted(runner)
            stopping = threading.Event()

            def ask(protocol: str, allowed: range) -> int:
                clients: HttpClients | GrpcClients
                if protocol == REST:
                    clients = HttpClients(runner.ports[0], exchanges(protocol, served.rows, allowed), _CLIENTS)
                else:
                    clients = GrpcClients(
                        runner.ports[1], exchanges(protocol, served.rows, allowed), _CLIENTS, GRPC_METHOD
                    )
                answered = 0
                with clients:
                    while True:
                        answered += len(clients.run(0.2, 1).latencies_s)
                        if stopping.is_set():
                            return answered

            with ThreadPoolExecutor(2) as pool:
                asking = [pool.submit(ask, protocol, range(1, _NUM_VERSIONS + 1)) for protocol in (REST, GRPC)]
                try:
                    for version in range(2, _NUM_VERSIONS + 1):
                        _publish(staged, served.base_path, version)
                        _wait_for(partial(versions.__contains__, version), f"no answer of version {version}", asking)
                        show(f"reload: version {version} answers")
                finally:
                    stopping.set()
                answered = sum(each.result() for each in asking)
            _wait_for(lambda: _states(runner)[:2] == ["AVAILABLE", "END"], "the version before is not unloaded", [])
            last = range(_NUM_VERSIONS, _NUM_VERSIONS + 1)
            answered += sum(ask(protocol, last) for protocol in (REST, GRPC))
            _check_count(runner, before, answered)
    return {"requests": answered, "versions_seen": sorted(versions)}


def _answers(rows: Any, version: int) -> Any:
    return rows / 2 + 2 * version


def _save_versions(folder: Path) -> tuple[Path, Served]:
    """Version 1 is served, the others lie beside it."""
    staged = folder / "staged"
    for version in range(1, _NUM_VERSIONS + 1):
        _save_function(staged / str(version), partial(_answers, version=version))
    rows = WORKLOADS["half_plus_two"].rows()
    served = Served(folder / "served", folder / "none.keras", rows, _answers(rows, 1))
    _publish(staged, served.base_path, 1)
    return staged, served


def _save_function(path: Path, function: Callable[[Any], Any]) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.call = tf.function(
        lambda x: {"output_0": function(x)}, input_signature=[tf.TensorSpec([None, 1], tf.float32, name=INPUT)]
    )
    tf.saved_model.save(module, str(path), signatures=module.call)


def _publish(staged: Path, base_path: Path, version: int) -> None:
    base_path.mkdir(exist_ok=True)
    (staged / str(version)).rename(base_path / str(version))


def _states(runner: Runner) -> list[str]:
    """Of the versions, newest first."""
    with urllib.request.urlopen(f"http://127.0.0.1:{runner.ports[0]}/v1/models/model", timeout=60) as answer:
        return [status["state"] for status in json.load(answer)["model_version_status"]]


def _wait_for(is_true: Callable[[], bool], complaint: str, asking: list[Any]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        for each in asking:
            if each.done():
                each.result()  # raises what went wrong
        if time.monotonic() > deadline:
            raise LoadError(f"{complaint} within 60 s")
        time.sleep(0.05)


def large_reply(limits: Limits, show: Show) -> dict[str, Any]:
    """An answer of 100 MB, while another client asks for small ones."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, _serving(_save_sequence(Path(folder))) as runner:
        # In a TensorProto a number takes 4 bytes, in JSON 8.06 on average.
        for protocol, count in ((GRPC, _LARGE_BYTES // 4), (REST, round(_LARGE_BYTES / 8.06))):
            answers: list[bytes] = []  # looked at later: that would hold up the other client
            exchange = Exchange(_sequence_request(protocol, count), answers.append)
            clients: HttpClients | GrpcClients
            if protocol == REST:
                clients = HttpClients(runner.ports[0], [exchange], 1)
            else:
                clients = GrpcClients(runner.ports[1], [exchange], 1, GRPC_METHOD)
            cpu_before = cpu_s(runner.process.pid)
            with clients, runner.clients(REST, 1) as other, ThreadPoolExecutor(1) as pool:
                asking = pool.submit(clients.run, 0, 1)
                others = [1000 * latency for latency in other.run(0.5).latencies_s]
                while not asking.done():
                    others += [1000 * latency for latency in other.run(0.1).latencies_s]
                load = asking.result()
            (answer,) = answers
            if not np.array_equal(_numbers(protocol, answer), _sequence(count)):
                raise WrongAnswerError(
                    f"the large answer over {protocol}, of {len(answer)} bytes, is not the one expected"
                )
            found[protocol] = {
                "bytes": len(answer),
                "seconds": load.latencies_s[0],
                "server_cpu_s": cpu_s(runner.process.pid) - cpu_before,
                "peak_rss_mib": peak_rss_mib(runner.process.pid),
                "longest_wait_of_others_ms": max(others),
            }
            show(f"large_reply: {len(answer)} bytes over {protocol} in {load.latencies_s[0]:.1f} s")
    return found


def _sequence(count: int) -> np.ndarray:
    """Numbers that float32 and few decimals hold exactly."""
    return (np.arange(count) % 8000 / np.float32(8)).astype(np.float32)


def _save_sequence(folder: Path) -> Served:
    """A model that gives as many numbers as it is asked for."""
    import tensorflow as tf

    _save_function(
        folder / "served" / "1",
        lambda x: (tf.cast(tf.range(tf.cast(x[0, 0], tf.int32)) % 8000, tf.float32) / 8)[None],
    )
    return Served(folder / "served", folder / "none.keras", np.full((1, 1), 3, np.float32), _sequence(3)[None])


def _sequence_request(protocol: str, count: int) -> bytes:
    row = np.full((1, 1), count, np.float32)  # exact up to 2**24, and above it in even numbers
    return CONTENDERS[OURS].exchanges(protocol, row, row)[0].request


def _numbers(protocol: str, answer: bytes) -> np.ndarray:
    if protocol == REST:
        import orjson

        return np.array(orjson.loads(answer)["predictions"][0], np.float32)
    from serving.protos import PredictResponse
    from serving.tensors import decode

    return decode(PredictResponse.FromString(answer).outputs["output_0"])[0]


SCENARIOS: dict[str, Callable[[Limits, Show], dict[str, Any]]] = {
    scenario.__name__: scenario for scenario in (large_reply, slow_clients, reload, memory)
}
