"""The clients count what they sent, look at every answer, and the CPU time is that of the whole server."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from benchmarks.serving.load import Exchange, GrpcClients, HttpClients, LoadError, WrongAnswerError
from benchmarks.serving.processes import Process, ServerError, cpu_s, rss_mib

METHOD = "/echo.Echo/Echo"


def request(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def answer(body: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n") -> bytes:
    return head + b"content-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def http_server(parts_of: Callable[[bytes], list[bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """Answers each request, of one packet, with the parts that are made of its body; None closes the connection."""
    seen: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(65536):
                body = data.partition(b"\r\n\r\n")[2]
                seen.append(body)
                parts = parts_of(body)
                for part in parts:
                    connection.sendall(part)
                if not parts:
                    return

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1], seen
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


def expecting(expected: bytes) -> Callable[[bytes], None]:
    def check(body: bytes) -> None:
        if body != expected:
            raise WrongAnswerError(f"not {expected!r}")

    return check


EXCHANGES = [Exchange(request(b"r%d" % number), expecting(b"R%d" % number)) for number in range(3)]


@pytest.mark.parametrize(
    "split",
    [
        lambda whole: [whole],
        lambda whole: [whole[index : index + 1] for index in range(len(whole))],
        lambda whole: [whole[:20], whole[20:]],
        lambda whole: [whole[:-1], whole[-1:]],
    ],
    ids=["whole", "bytes", "head in two", "body in two"],
)
def test_every_request_is_answered_and_clients_begin_with_different_ones(
    split: Callable[[bytes], list[bytes]],
) -> None:
    with (
        http_server(lambda body: split(answer(body.upper()))) as (port, seen),
        HttpClients(port, EXCHANGES, 2) as clients,
    ):
        load = clients.run(0, 7)
        assert len(load.latencies_s) == len(seen) == 7
        assert set(seen[:2]) == {b"r0", b"r1"} and set(seen) == {b"r0", b"r1", b"r2"}
        assert len(clients.run(0).latencies_s) == 2, "each client asks once at least"
    assert 0 < min(load.latencies_s) <= max(load.latencies_s) <= load.wall_s


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([answer(b"R9")], "not b'R0'"),
        ([answer(b"", b"HTTP/1.1 503 Service Unavailable\r\n")], "503 Service Unavailable"),
        ([b"HTTP/1.1 200 OK\r\n\r\nR0"], "without Content-Length"),
        ([answer(b"R0") + answer(b"R0")], "more than one answer"),
        ([], "closed the connection"),
    ],
)
def test_a_wrong_answer_ends_the_load(parts: list[bytes], message: str) -> None:
    with (
        http_server(lambda body: parts) as (port, _),
        HttpClients(port, EXCHANGES[:1], 1) as clients,
        pytest.raises(LoadError, match=message),
    ):
        clients.run(0)


def test_an_answer_is_parsed_once() -> None:
    parsed = []
    exchange = Exchange(b"", lambda body: parsed.append(body))
    for body in (b"a", b"b", b"a"):
        exchange.check(body)
    assert parsed == [b"a", b"b"]
    refusing = Exchange(b"", expecting(b"a"))
    for _ in range(2):
        with pytest.raises(WrongAnswerError):
            refusing.check(b"b")


@contextmanager
def grpc_server(call: Callable[[bytes, grpc.ServicerContext], bytes]) -> Iterator[int]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.method_handlers_generic_handler("echo.Echo", {"Echo": grpc.unary_unary_rpc_method_handler(call)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


def test_grpc_clients_have_a_connection_each_and_see_every_answer() -> None:
    seen = []

    def call(body: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append((context.peer(), body))
        return body.upper()

    exchanges = [Exchange(b"r%d" % number, expecting(b"R%d" % number)) for number in range(3)]
    with grpc_server(call) as port, GrpcClients(port, exchanges, 2, METHOD) as clients:
        load = clients.run(0, 7)
    assert len(load.latencies_s) == len(seen) == 8, "seven are four for each of two"
    assert len({peer for peer, _ in seen}) == 2
    assert {body for _, body in seen} == {b"r0", b"r1", b"r2"}


def test_grpc_errors_and_wrong_answers_end_the_load() -> None:
    def call(body: bytes, context: grpc.ServicerContext) -> bytes:
        if body == b"refuse":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")
        return body

    with grpc_server(call) as port:
        for body, message in ((b"refuse", "RESOURCE_EXHAUSTED: too much"), (b"wrong", "not b'right'")):
            exchanges = [Exchange(body, expecting(b"right"))]
            with GrpcClients(port, exchanges, 2, METHOD) as clients, pytest.raises(LoadError, match=message):
                clients.run(0)


BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
PARENT = """
import subprocess, sys
burn = {burn!r}
subprocess.run([sys.executable, "-S", "-c", burn], check=True)
child = subprocess.Popen([sys.executable, "-S", "-c", burn + "print(1, flush=True); input()"], stdin=subprocess.PIPE)
print(2, flush=True)
input()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_cpu_time_is_that_of_all_descendants(tmp_path: Path) -> None:
    process = Process(python(PARENT.format(burn=BURN.format(seconds=0.3))), tmp_path / "log", piped=True)
    try:
        assert {process.answer(60), process.answer(60)} == {1, 2}, "both children have burned"
        assert 0.6 < cpu_s(process.pid) < 5
        assert rss_mib(process.pid) > 5
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.end()
    assert process.popen.returncode == -9
    # It may be a zombie until init takes its leave.
    assert not Path(f"/proc/{child}/exe").exists()


def test_a_process_that_ends_tells_why(tmp_path: Path) -> None:
    process = Process(
        python("import sys; print('ValueError: no such model\\nbye', file=sys.stderr); sys.exit(3)"), tmp_path / "log"
    )
    process.popen.wait()
    with pytest.raises(ServerError, match="ended with code 3: ValueError: no such model"):
        process.check()
    silent = Process(python("input()"), tmp_path / "silent", piped=True)
    with pytest.raises(ServerError, match="no answer in 0 s"):
        silent.answer(0)
    silent.end()
    with pytest.raises(ServerError, match="not installed"):
        Process(["/no/such/python"], tmp_path / "log")
    assert cpu_s(os.getpid()) > 0
