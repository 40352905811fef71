"""The HTTP server with a handler that waits for batches: it holds no thread, and is answered, late or not at all."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from serving.batching.scheduler import BatchTask
from serving.errors import Code, ServingError
from serving.rest.http_server import HttpServer
from serving.rest.rest_api import Request, Response, error_response
from serving.settings import RestSettings
from tests.serving.test_http_server import bodies, connect, read_until_closed

SECONDS = 20.0
METHODS = pytest.mark.parametrize("method", ["GET", "POST"])  # on the loop; in a worker


class Waiting:
    """A handler whose requests wait until the test ends their tasks."""

    def __init__(self) -> None:
        self.tasks: queue.Queue[tuple[Request, BatchTask]] = queue.Queue()

    async def __call__(self, request: Request) -> Response:
        task = BatchTask({"x": np.zeros(1)}, request.context, 0.0)
        task.cut([1])
        self.tasks.put((request, task))
        try:
            outputs = await task
        except ServingError as error:
            return error_response(error)
        return Response(200, f"{request.target} {outputs['y']}".encode())

    def next(self) -> tuple[Request, BatchTask]:
        return self.tasks.get(timeout=SECONDS)


@contextmanager
def serve(handler: Waiting, timeout_seconds: float | None = SECONDS) -> Iterator[HttpServer]:
    server = HttpServer(handler, "127.0.0.1", 0, timeout_seconds, RestSettings(num_threads=1))
    server.start()
    try:
        yield server
    finally:
        server.stop(grace_seconds=1)


def request(method: str, target: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", "Content-Length: 0", *headers, "", ""]).encode()


@METHODS
def test_many_wait_and_none_holds_a_thread(method: str) -> None:
    handler = Waiting()
    with serve(handler) as server:
        connections = [connect(server.port) for _ in range(40)]
        for index, connection in enumerate(connections):
            connection.sendall(request(method, f"/{index}", "Connection: close"))
        for found, task in [handler.next() for _ in connections]:
            task.complete(0, {"y": found.target[1:]})
        for index, connection in enumerate(connections):
            assert bodies(read_until_closed(connection)) == [b"/%d %d" % (index, index)]
            connection.close()


@METHODS
def test_pipelined_requests_wait_for_each_other(method: str) -> None:
    handler = Waiting()
    with serve(handler) as server, connect(server.port) as connection:
        connection.sendall(request(method, "/1") + request(method, "/2", "Connection: close"))
        first, task = handler.next()
        assert first.target == "/1"
        assert handler.tasks.empty()
        task.complete(0, {"y": 1})
        second, task = handler.next()
        task.fail(ServingError(Code.UNAVAILABLE, "full"))
        answer = read_until_closed(connection)
    assert second.target == "/2"
    assert bodies(answer)[0] == b"/1 1"
    assert b"503 Service Unavailable" in answer


@METHODS
def test_a_request_is_answered_at_its_timeout_and_its_batch_comes_to_nothing(method: str) -> None:
    handler = Waiting()
    with serve(handler, timeout_seconds=0.05) as server, connect(server.port) as connection:
        connection.sendall(request(method, "/late"))
        _, task = handler.next()
        assert b"504 Gateway Timeout" in connection.recv(65_536)
        task.complete(0, {"y": 1})
        server.timeout_seconds = SECONDS
        connection.sendall(request(method, "/next", "Connection: close"))
        _, task = handler.next()
        task.complete(0, {"y": 2})
        assert bodies(read_until_closed(connection)) == [b"/next 2"]


def test_a_task_that_nobody_waits_for_is_not_wanted() -> None:
    handler = Waiting()
    with serve(handler) as server:
        connection = connect(server.port)
        connection.sendall(request("GET", "/gone"))
        found, task = handler.next()
        server.loop.call_soon_threadsafe(lambda: [each.abort() for each in list(server.connections)])
        assert connection.recv(1) == b""
        connection.close()
        assert not task.is_wanted()
        assert found.context.is_cancelled
