"""Batching in the whole server: many clients, few calls of the model; parameters by flag and by version."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.__main__ import _batching, main
from serving.batching.parameters import BatchingParameters
from serving.batching.scheduler import BatchRun
from serving.client import GrpcClient, RestClient
from serving.errors import Code, ServingError
from serving.server import ModelServer
from serving.settings import RestSettings
from serving.versions import all_versions
from tests.serving import models
from tests.serving.test_cli import run_python

NUM_CLIENTS = 24


@dataclass
class Batched:
    """A server whose batches wait until all clients have come, and what it ran."""

    server: ModelServer
    runs: list[BatchRun]

    def client(self, kind: str) -> Any:
        return connect(self.server, kind)


def connect(server: ModelServer, kind: str) -> Any:
    if kind == "rest":
        return RestClient(f"http://127.0.0.1:{server.rest_port}")
    return GrpcClient(f"127.0.0.1:{server.grpc_port}")


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batched]:
    base_path = tmp_path_factory.mktemp("half_plus_two")
    models.copy_half_plus_two(base_path / "1")
    runs: list[BatchRun] = []
    parameters = BatchingParameters(
        max_batch_size=NUM_CLIENTS, batch_timeout_micros=10**15, allowed_batch_sizes=(NUM_CLIENTS,)
    )
    with ModelServer(
        "m",
        base_path,
        batching=parameters,
        batch_listeners=[runs.append],
        rest_settings=RestSettings(num_threads=1),
        rest_timeout_seconds=30.0,
    ) as server:
        yield Batched(server, runs)


def at_once(call: Any, count: int = NUM_CLIENTS) -> list[Any]:
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(call, range(count)))


@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_one_call_answers_many_clients(batched: Batched, kind: str) -> None:
    """With the timeout of years each client would wait for ever if the others did not join it; one REST thread does."""
    batched.runs.clear()
    client = batched.client(kind)
    for offset in (0, 100):
        answers = at_once(
            lambda number, offset=offset: client.predict("m", {"x": np.float32([[offset + number]])})["y"]
        )
        assert [y.tolist() for y in answers] == [[[(offset + number) / 2 + 2]] for number in range(NUM_CLIENTS)]
    client.close()
    assert [run.input_batch_size for run in batched.runs] == [(1,) * NUM_CLIENTS] * 2


def test_rest_and_grpc_share_a_batch(batched: Batched) -> None:
    batched.runs.clear()
    clients = [batched.client("rest"), batched.client("grpc")]
    answers = at_once(lambda number: clients[number % 2].predict("m", {"x": np.float32([[number]])})["y"].item())
    assert answers == [number / 2 + 2 for number in range(NUM_CLIENTS)]
    assert [len(run.input_batch_size) for run in batched.runs] == [NUM_CLIENTS]
    for client in clients:
        client.close()


@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_a_bad_request_harms_no_neighbour(batched: Batched, kind: str) -> None:
    client = batched.client(kind)

    def call(number: int) -> Any:
        x = np.array([[b"text"]], object) if number == NUM_CLIENTS else np.float32([[number]])
        try:
            return client.predict("m", {"x": x})["y"].item()
        except ServingError as error:
            return error.code

    answers = at_once(call, NUM_CLIENTS + 1)
    client.close()
    assert answers == [number / 2 + 2 for number in range(NUM_CLIENTS)] + [Code.INVALID_ARGUMENT]


def test_classify_and_regress_are_batched(batched: Batched) -> None:
    batched.runs.clear()
    client = batched.client("rest")
    answers = at_once(lambda number: client.regress("m", [{"x": float(number)}], signature_name="regress_x_to_y"))
    client.close()
    assert [[item.value for item in answer] for answer in answers] == [
        [number / 2 + 2] for number in range(NUM_CLIENTS)
    ]
    assert [run.signature_name for run in batched.runs] == ["regress_x_to_y"]


@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_deadlines_end_the_wait(batched: Batched, kind: str) -> None:
    client = batched.client(kind)
    with pytest.raises(ServingError) as raised:
        client.predict("m", {"x": np.float32([[1]])}, timeout_seconds=0.1)
    assert raised.value.code is Code.DEADLINE_EXCEEDED
    batched.runs.clear()
    at_once(lambda number: client.predict("m", {"x": np.float32([[number]])}), NUM_CLIENTS - 1)
    client.close()
    # The late one held a place; over HTTP it still counts, for it looks like a client that will send no more, but waits.
    assert [len(run.input_batch_size) for run in batched.runs] == [NUM_CLIENTS - (kind == "grpc")]


@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_a_full_queue_refuses_and_stop_runs_what_waits(tmp_path: Path, kind: str) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    parameters = BatchingParameters(
        max_batch_size=2, max_enqueued_batches=1, batch_timeout_micros=10**15, thread_pool_name="of-this-test"
    )
    server = ModelServer("m", tmp_path, batching=parameters)
    server.start()
    client = connect(server, kind)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(client.predict, "m", {"x": np.float32([[1]])})
        while not server._batch_scheduler.num_enqueued_tasks:  # type: ignore[union-attr]
            assert not waiting.done()
            time.sleep(0.001)
        with pytest.raises(
            ServingError, match=r"UNAVAILABLE.*: The batch scheduling queue to which this task was submitted is full"
        ):
            client.predict("m", {"x": np.float32([[1], [2]])})
        assert b"headrace_batch_queue_tasks{} 1\n" in server.metrics.page()
        server.stop()
        assert waiting.result(timeout=20)["y"].tolist() == [[2.5]]
    client.close()
    for thread in threading.enumerate():
        if thread.name.startswith("of-this-test"):
            thread.join(20)
            assert not thread.is_alive()


def test_parameters_of_each_version(tmp_path: Path) -> None:
    """With them the server's own are for the threads only; a version without a file is not batched."""
    for number in (1, 2):
        models.copy_half_plus_two(tmp_path / str(number))
    (tmp_path / "2" / "batching_params.pbtxt").write_text("allowed_batch_sizes: 4 max_batch_size { value: 4 }")
    runs: list[BatchRun] = []
    with ModelServer(
        "m",
        tmp_path,
        version_policy=all_versions,
        batching=BatchingParameters(max_batch_size=2),
        per_model_batching=True,
        batch_listeners=[runs.append],
    ) as server:
        client = connect(server, "rest")
        for number, num_runs in ((1, 0), (2, 1)):
            y = client.predict("m", {"x": np.float32([[1], [2], [3]])}, version=number)["y"]
            assert y.tolist() == [[2.5], [3.0], [3.5]]
            assert len(runs) == num_runs
        assert (runs[0].processed_batch_size, runs[0].padding_size) == (4, 1)
        with pytest.raises(ServingError, match="Task size 5 is larger than maximum input batch size 4"):
            client.predict("m", {"x": np.zeros((5, 1), np.float32)}, version=2)
        client.close()


def test_wrong_parameters_of_a_version_fail_its_load(tmp_path: Path) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    (tmp_path / "1" / "batching_params.pbtxt").write_text("allowed_batch_sizes: 2 max_batch_size { value: 4 }")
    message = "batching_params.pbtxt: Last entry in allowed_batch_sizes must match max_batch_size; last entry was 2"
    with pytest.raises(ServingError, match=message):
        ModelServer("m", tmp_path, batching=BatchingParameters(), per_model_batching=True).start()


@pytest.mark.parametrize(
    ("text", "flags", "exit_code", "message"),
    [
        (
            "allowed_batch_sizes: 2",
            ["--enable_batching"],
            1,
            "must match max_batch_size; last entry was 2; expected 1000",
        ),
        ("max_batch_size: 2", ["--enable_batching"], 1, "is no BatchingParameters in protobuf's text format: 1:17"),
        ("", [], 2, "--batching_parameters_file does nothing without --enable_batching; give both"),
    ],
)
def test_wrong_flags(tmp_path: Path, text: str, flags: list[str], exit_code: int, message: str) -> None:
    (tmp_path / "parameters").write_text(text)
    arguments = [f"--model_base_path={tmp_path}", f"--batching_parameters_file={tmp_path / 'parameters'}", *flags]
    result = run_python("-m", "serving", *arguments)
    assert (result.returncode, message in result.stderr) == (exit_code, True), result.stderr


def test_flags_reach_the_server(tmp_path: Path) -> None:
    (tmp_path / "parameters").write_text("max_batch_size { value: 7 }")
    flags = ["--enable_batching", f"--batching_parameters_file={tmp_path / 'parameters'}"]
    context = main.make_context("serving", ["--model_base_path=/nowhere", *flags])
    assert _batching(context.params) == BatchingParameters(max_batch_size=7)
    context = main.make_context("serving", ["--model_base_path=/nowhere", "--enable_batching=true"])
    assert _batching(context.params) == BatchingParameters(thread_pool_name="model_server_batch_threads")
    context = main.make_context("serving", ["--model_base_path=/nowhere", "--enable_batching=false"])
    assert _batching(context.params) is None
