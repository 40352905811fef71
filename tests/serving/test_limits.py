"""Limits: of the rate, of requests at a time, of bodies, connections and patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving.access.limits import ConcurrencyLimit, Gate, RateLimit
from serving.errors import Code, ServingError
from serving.protos import PREDICTION_SERVICE, PredictRequest
from serving.rest.http_server import HttpServer
from serving.rest.rest_api import Request, Response, error_response
from serving.server import ModelServer
from serving.settings import GrpcSettings, RestSettings
from serving.tensors import encode_values
from tests.serving import models
from tests.serving.test_http_server import bodies, connect, post, read_until_closed, talk


def test_rate_limit() -> None:
    now = [0.0]
    limit = RateLimit(2.0, burst=3, clock=lambda: now[0])

    def take(client: bytes, count: int) -> None:
        for _ in range(count):
            limit.take(client)
        with pytest.raises(ServingError) as raised:
            limit.take(client)
        assert raised.value.code is Code.RESOURCE_EXHAUSTED
        assert raised.value.retry_after_seconds == pytest.approx(0.5)

    take(b"a", 3)
    take(b"b", 3)  # each client has a bucket of its own
    now[0] = 1.0
    take(b"a", 2)
    now[0] = 100.0
    take(b"a", 3)  # a bucket holds no more than the burst


def test_concurrency_limit() -> None:
    limit = ConcurrencyLimit(2)
    limit.enter()
    limit.enter()
    with pytest.raises(ServingError) as raised:
        limit.enter()
    assert raised.value.code is Code.UNAVAILABLE
    limit.leave()
    limit.enter()


def echo(request: Request) -> Response:
    return Response(200, request.target.encode() + request.body, "text/plain")


@contextmanager
def serve(handler: Callable[[Request], Response] = echo, **settings: Any) -> Iterator[HttpServer]:
    async def answer(request: Request) -> Response:
        return handler(request)

    limit, admit = settings.pop("concurrency_limit", None), settings.pop("admit", None)
    server = HttpServer(answer, "127.0.0.1", 0, 5, RestSettings(**settings), admit=admit, concurrency_limit=limit)
    server.start()
    try:
        yield server
    finally:
        server.stop(grace_seconds=1)


CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /a HTTP/1.1\r\nContent-Length: 11\r\n\r\n",  # refused before a byte of the body is there
        CHUNKED + b"6\r\n123456\r\n5\r\n",
    ],
)
def test_large_body_is_refused(request_: bytes) -> None:
    with serve(max_body_bytes=10) as server:
        with connect(server.port) as connection:
            connection.sendall(post("/before", b"1234567890") + request_ + b"12345")
            answer = read_until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 413 Request Entity Too Large" in answer or b"HTTP/1.1 413 Content Too Large" in answer
        assert b"the body of the request is larger than 10 bytes" in answer
        assert bodies(talk(server.port, CHUNKED + b"a\r\n1234567890\r\n0\r\n\r\n")) == [b"/a1234567890"]


def test_request_refused_from_its_head_leaves_the_connection_open() -> None:
    def admit(head: Request) -> Response | None:
        assert head.body == b""
        return error_response(ServingError(Code.UNAUTHENTICATED, "no")) if "x-bad" in head.headers else None

    with serve(admit=admit) as server, connect(server.port) as connection:
        connection.sendall(post("/a", b"secret", "X-Bad: 1"))
        answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        assert b"secret" not in answer
        connection.sendall(post("/b", b"1"))
        assert connection.recv(65_536).endswith(b"\r\n\r\n/b1")
        connection.sendall(b"POST /c HTTP/1.1\r\nX-Bad: 1\r\nContent-Length: 100000000\r\n\r\n")
        answer = read_until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n"), "a large body is not waited for"
        assert b"Connection: close" in answer


def test_requests_past_the_limit_are_refused_at_once() -> None:
    started, release = threading.Event(), threading.Event()

    def handler(request: Request) -> Response:
        if request.target == "/wait":
            started.set()
            release.wait(10)
        return echo(request)

    with serve(handler, concurrency_limit=ConcurrencyLimit(1)) as server, connect(server.port) as busy:
        busy.sendall(post("/wait", b""))
        assert started.wait(5)
        answer = talk(server.port, post("/a", b""))
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 1\r\n" in answer
        assert bodies(talk(server.port, b"GET /healthz/live HTTP/1.1\r\n\r\n")) == [b"/healthz/live"]
        release.set()
        assert busy.recv(65_536).endswith(b"/wait")
        assert bodies(talk(server.port, post("/a", b""))) == [b"/a"]


def test_connections_past_the_limit_are_refused() -> None:
    with serve(max_connections=1) as server, connect(server.port) as first:
        first.sendall(post("/a", b""))
        first.recv(65_536)
        with connect(server.port) as second:
            answer = read_until_closed(second)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 1\r\n" in answer
        first.sendall(post("/b", b""))
        assert first.recv(65_536).endswith(b"/b")


def let_time_pass(server: HttpServer, seconds: float) -> None:
    done = threading.Event()

    def check() -> None:
        server.check_times(server.loop.time() + seconds)
        done.set()

    server.loop.call_soon_threadsafe(check)
    assert done.wait(5)


@pytest.mark.parametrize(
    "part", [b"POST /a HT", b"POST /a HTTP/1.1\r\nX: y\r\n", b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\nab"]
)
def test_slow_request_is_given_up(part: bytes) -> None:
    with serve(io_seconds=20) as server, connect(server.port) as slow, connect(server.port) as idle:
        idle.sendall(post("/a", b""))
        idle.recv(65_536)
        slow.sendall(b"GET /first HTTP/1.1\r\n\r\n" + part)
        assert slow.recv(65_536).endswith(b"/first")
        let_time_pass(server, 19)
        let_time_pass(server, 21)
        assert read_until_closed(slow).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        idle.sendall(post("/b", b""))
        assert idle.recv(65_536).endswith(b"/b"), "a kept connection is not slow"


def test_head_in_dribbles_is_given_up() -> None:
    with serve(io_seconds=20) as server, connect(server.port) as slow:
        slow.sendall(b"GET /first HTTP/1.1\r\n\r\nPOST /a HT")
        assert slow.recv(65_536).endswith(b"/first")
        real_time = server.loop.time
        server.loop.time = lambda: real_time() + 15  # type: ignore[method-assign]
        slow.sendall(b"TP/1.1\r\nX: ")
        threading.Event().wait(0.1)
        let_time_pass(server, 6)
        assert read_until_closed(slow).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_connection_without_a_request_is_closed() -> None:
    with serve(io_seconds=20) as server, connect(server.port) as silent:
        while not server.connections:
            threading.Event().wait(0.001)
        let_time_pass(server, 21)
        assert read_until_closed(silent) == b""


def test_idle_connection_is_closed() -> None:
    with serve(idle_seconds=20) as server, connect(server.port) as idle:
        idle.sendall(post("/a", b""))
        idle.recv(65_536)
        let_time_pass(server, 19)
        idle.sendall(post("/b", b""))
        assert idle.recv(65_536).endswith(b"/b")
        let_time_pass(server, 21)
        assert read_until_closed(idle) == b""


def test_client_that_does_not_take_up_its_answer_is_cut_off() -> None:
    def handler(request: Request) -> Response:
        return Response(200, b"x" * 50_000_000)

    with serve(handler, io_seconds=20) as server, connect(server.port) as lazy:
        lazy.sendall(post("/a", b""))
        assert lazy.recv(100).startswith(b"HTTP/1.1 200 OK")
        let_time_pass(server, 21)
        assert len(read_until_closed(lazy)) < 50_000_000


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("limits")
    models.save_sleeper(path / "1", scale=1)
    return path


def predict(channel: grpc.Channel, seconds: float, size: int = 1) -> grpc.Future:
    message = PredictRequest()
    message.model_spec.name = "m"
    encode_values(np.full(size, seconds, np.float32), message.inputs["x"])
    call = channel.unary_unary(f"/{PREDICTION_SERVICE}/Predict", PredictRequest.SerializeToString)
    return call.future(message, timeout=20)


def test_limits_hold_over_both_protocols(base_path: Path) -> None:
    limit = ConcurrencyLimit(1)
    with (
        ModelServer(
            "m", base_path, concurrency_limit=limit, grpc_settings=GrpcSettings(max_threads=1, max_message_bytes=1000)
        ) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        slow = predict(channel, 1.5)
        while not limit.under_way:
            time.sleep(0.001)
        refused = predict(channel, 0).exception()
        assert not slow.done(), "the limit left no thread to refuse with"
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "1000") in refused.trailing_metadata()
        body = b'{"inputs": [0]}'
        assert talk(server.rest_port, post("/v1/models/m:predict", body)).startswith(b"HTTP/1.1 503 ")
        assert slow.exception() is None
        assert predict(channel, 0).exception() is None
        assert talk(server.rest_port, post("/v1/models/m:predict", body)).startswith(b"HTTP/1.1 200 ")
        assert predict(channel, 0, size=1000).exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_rate_limit_holds_over_both_protocols(base_path: Path) -> None:
    gate = Gate(rate_limit=RateLimit(0.5, burst=2, clock=lambda: 0.0))
    with (
        ModelServer("m", base_path, gate=gate) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        assert predict(channel, 0).exception() is None
        assert talk(server.rest_port, b"GET /v1/models/m HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        answer = talk(server.rest_port, b"GET /v1/models/m HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"Retry-After: 2\r\n" in answer
        assert predict(channel, 0).exception().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert talk(server.rest_port, b"GET /healthz/ready HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
