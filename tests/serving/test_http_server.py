"""The HTTP server over raw sockets, with handlers of our own and no model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from serving.batching.scheduler import LongWork
from serving.rest import http_connection
from serving.rest.http_server import HttpServer
from serving.rest.rest_api import Request, Response


@contextmanager
def serve(handler: Callable[[Request], Response], timeout_seconds: float | None = 5.0) -> Iterator[HttpServer]:
    async def answer(request: Request) -> Response:
        return handler(request)

    server = HttpServer(answer, "127.0.0.1", 0, timeout_seconds)
    server.start()
    try:
        yield server
    finally:
        server.stop(grace_seconds=1)


def echo(request: Request) -> Response:
    return Response(200, f"{request.method} {request.target} ".encode() + request.body, "text/plain")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve(echo) as server:
        yield server.port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def read_until_closed(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


def talk(port: int, data: bytes) -> bytes:
    """Send, half-close, and read what comes until the server closes."""
    with connect(port) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return read_until_closed(connection)


def post(path: str, body: bytes, *headers: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def bodies(answer: bytes) -> list[bytes]:
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        found.append(rest[:length])
        answer = rest[length:]
    return found


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    requests = [post(f"/{index}", b"x" * index) for index in range(100)]
    answer = talk(port, b"".join(requests))
    assert bodies(answer) == [b"POST /%d " % index + b"x" * index for index in range(100)]


def test_slow_request_holds_back_the_quick_one_behind_it() -> None:
    def handler(request: Request) -> Response:
        if request.method == "POST":
            time.sleep(0.2)
        return echo(request)

    with serve(handler) as server:
        answer = talk(server.port, post("/slow", b"") + b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n")
    assert bodies(answer) == [b"POST /slow ", b"GET /quick "]


def test_connection_is_kept_until_the_client_asks_to_close(port: int) -> None:
    with connect(port) as connection:
        for _ in range(3):
            connection.sendall(post("/a", b""))
            assert b"connection" not in connection.recv(65_536).lower()
        connection.sendall(post("/a", b"", "Connection: close"))
        assert b"Connection: close" in read_until_closed(connection)


def test_http_1_0_closes_unless_asked(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert b"Connection: keep-alive" in connection.recv(65_536)
        connection.sendall(b"GET /a HTTP/1.0\r\n\r\n")
        assert b"Connection: close" in read_until_closed(connection)


def test_chunked_body_in_dribbles(port: int) -> None:
    head = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    request = head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with connect(port) as connection:
        for start in range(len(request)):
            connection.sendall(request[start : start + 1])
        assert bodies(read_until_closed(connection)) == [b"POST /a abcde"]


def test_head_has_no_body(port: int) -> None:
    answer = talk(port, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"Content-Length: 8" in answer


def test_expect_100_continue(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"POST /a HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"ok")
        assert connection.recv(65_536).endswith(b"POST /a ok")


def test_upgrade_request_is_answered_in_http_1_1(port: int) -> None:
    request = post("/a", b"body", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with connect(port) as connection:
        for part in (request[:-2], request[-2:] + post("/b", b"")):
            connection.sendall(part)
            time.sleep(0.05)
        connection.shutdown(socket.SHUT_WR)
        assert bodies(read_until_closed(connection)) == [b"POST /a body", b"POST /b "]


@pytest.mark.parametrize(
    "garbage",
    [
        b"nonsense\r\n\r\n",
        b"GET /a HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /a HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"GET /a HTTP/1.1\r\nX: a\r\n Content-Length: 3\r\n\r\n",
        b"GET /a HTTP/1.1\r\n X: folded\r\n\r\n",
        b"GET /a HTTP/1.1\r\nX: a\rContent-Length: 3\r\n\r\n",
        b"GET /a HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
    ],
)
def test_malformed_http_gets_400_and_leaves_the_server_up(port: int, garbage: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(garbage)
        assert read_until_closed(connection).startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert bodies(talk(port, post("/still-here", b""))) == [b"POST /still-here "]


@pytest.mark.parametrize("head", [b"Cookie: " + b"x" * 200_000, b"X: y\r\n" * 20_000, b"X" * 200_000])
def test_head_that_is_too_large_gets_431(port: int, head: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /a HTTP/1.1\r\n" + head)
        assert read_until_closed(connection).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")


def test_good_request_before_garbage_is_answered(port: int) -> None:
    answer = talk(port, post("/a", b"1") + b"garbage\r\n\r\n")
    assert bodies(answer) == [b"POST /a 1", b""]
    assert b"400 Bad Request" in answer


def test_client_that_leaves_early_does_no_harm() -> None:
    started, release = threading.Event(), threading.Event()

    def handler(request: Request) -> Response:
        if request.target == "/wait":
            started.set()
            release.wait(5)
        return echo(request)

    with serve(handler) as server:
        connection = connect(server.port)
        connection.sendall(post("/wait", b""))
        assert started.wait(5)
        connection.close()
        release.set()
        assert bodies(talk(server.port, post("/a", b""))) == [b"POST /a "]


def test_timeout_is_504_and_the_connection_goes_on() -> None:
    release = threading.Event()

    def handler(request: Request) -> Response:
        if request.target == "/wait":
            release.wait(5)
        return echo(request)

    with serve(handler, timeout_seconds=0.1) as server, connect(server.port) as connection:
        connection.sendall(post("/wait", b""))
        answer = connection.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")
        assert b'"error": "Timed out' in answer
        release.set()
        connection.sendall(post("/next", b""))
        assert connection.recv(65_536).endswith(b"POST /next ")


def test_without_timeout_a_slow_request_is_waited_for() -> None:
    def handler(request: Request) -> Response:
        time.sleep(0.3)
        return echo(request)

    with serve(handler, timeout_seconds=None) as server:
        assert bodies(talk(server.port, post("/a", b""))) == [b"POST /a "]


def test_quick_requests_run_on_the_loop_and_slow_ones_on_workers() -> None:
    threads = []

    def handler(request: Request) -> Response:
        threads.append(threading.current_thread().name)
        time.sleep(0.02 if request.target == "/slow" else 0)
        return Response(200)

    with serve(handler) as server, connect(server.port) as connection:

        def ask(target: str) -> None:
            connection.sendall(post(target, b""))
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65_536)

        def wait_for_the_loop() -> None:
            for _ in range(300):
                ask("/quick")
                if threads[-1] == "rest-loop":
                    return
            raise AssertionError("quick requests stay on workers")

        ask("/quick")
        assert threads[-1].startswith("rest_")  # nothing is known yet
        wait_for_the_loop()
        ask("/slow")
        ask("/quick")
        assert threads[-1].startswith("rest_")


def test_long_work_goes_to_a_worker_and_the_loop_goes_on() -> None:
    threads: list[str] = []
    began, release = threading.Event(), threading.Event()

    async def handler(request: Request) -> Response:
        threads.append(threading.current_thread().name)
        if request.method == "POST":
            await LongWork()
            threads.append(threading.current_thread().name)
            began.set()
            assert release.wait(5)
        return echo(request)

    server = HttpServer(handler, "127.0.0.1", 0, 5.0)
    server.start()
    server._slowest_seconds = 0.0  # what is known of the requests so far
    try:
        with connect(server.port) as connection:
            connection.sendall(post("/long", b""))
            assert began.wait(5)
            assert bodies(talk(server.port, b"GET /health HTTP/1.1\r\n\r\n")) == [b"GET /health "]
            release.set()
            assert connection.recv(65_536).endswith(b"POST /long ")
            assert threads[0] == threads[2] == "rest-loop" and threads[1].startswith("rest_")
            connection.sendall(post("/long", b""))  # how long it took says nothing of how quick the next one begins
            assert connection.recv(65_536).endswith(b"POST /long ")
            assert threads[3] == "rest-loop"
            server._slowest_seconds = 1.0
            connection.sendall(post("/long", b""))
            assert connection.recv(65_536).endswith(b"POST /long ")
            assert threads[5] == threads[6]  # in a worker already
    finally:
        server.stop(grace_seconds=1)


@pytest.mark.parametrize("headers", [[], ["Connection: close"]], ids=["kept", "closed"])
def test_a_large_answer_waits_for_its_client(headers: list[str]) -> None:
    """No more of it is in the socket's buffer than the client takes up, however slowly that is."""
    answer = bytes(range(256)) * 65_536

    with serve(lambda request: Response(200, answer, "text/plain"), None) as server, connect(server.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.sendall(post("/large", b"", *headers))
        received = connection.recv(1000)
        (served,) = server.connections
        while len(received) < len(answer):
            assert served._transport.get_write_buffer_size() <= 2 * http_connection._PIECE_BYTES
            received += connection.recv(1 << 20)
        if headers:
            received += read_until_closed(connection)
        else:
            while not received.endswith(answer):
                received += connection.recv(65_536)
            connection.sendall(post("/small", b"", "Connection: close"))
            assert bodies(read_until_closed(connection)) == [answer]
        assert bodies(received) == [answer]


def test_health_is_answered_while_all_workers_are_busy() -> None:
    release = threading.Event()

    def handler(request: Request) -> Response:
        if request.method == "POST":
            release.wait(5)
        return echo(request)

    with serve(handler) as server:
        busy = [connect(server.port) for _ in range(64)]
        for connection in busy:
            connection.sendall(post("/wait", b""))
        assert bodies(talk(server.port, b"GET /health HTTP/1.1\r\n\r\n")) == [b"GET /health "]
        release.set()
        for connection in busy:
            connection.close()


def test_drain_finishes_requests_refuses_connections_and_closes_idle_ones() -> None:
    started, release = threading.Event(), threading.Event()

    def handler(request: Request) -> Response:
        if request.method == "POST":
            started.set()
            release.wait(5)
        return echo(request)

    with serve(handler) as server, connect(server.port) as idle, connect(server.port) as busy:
        idle.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        idle.recv(65_536)
        busy.sendall(post("/work", b""))
        assert started.wait(5)
        stopping = threading.Thread(target=server.stop, args=(5,))
        stopping.start()
        refused = False
        for _ in range(100):
            try:
                connect(server.port).close()
            except ConnectionRefusedError:
                refused = True
                break
            time.sleep(0.01)
        assert refused
        idle.sendall(b"GET /ready HTTP/1.1\r\n\r\n")  # a kept connection still learns that it is time to go
        assert b"Connection: close" in read_until_closed(idle)
        release.set()
        answer = read_until_closed(busy)
        assert bodies(answer) == [b"POST /work "]
        assert b"Connection: close" in answer
        stopping.join(5)
        assert not stopping.is_alive()
        server.stop = lambda grace_seconds: None  # type: ignore[method-assign]


def test_port_in_use_says_so(port: int) -> None:
    with pytest.raises(OSError, match=rf"REST cannot listen on 127.0.0.1:{port}: Address already in use"):
        HttpServer(echo, "127.0.0.1", port, None)
