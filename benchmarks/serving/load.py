"""Load from clients that wait for each answer before they send the next request, and look at every answer.

Cheap, so that the server is what limits: blocking sockets under one epoll for HTTP, raw bytes through grpcio for gRPC.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_TIMEOUT_S = 120.0
_RECEIVE_BYTES = 2**20
# Answers that were found right are known by their bytes from then on; a server that never says the same twice is parsed.
_MAX_KNOWN = 256


class LoadError(Exception):
    """A request failed or its answer was wrong; the text says how."""


class WrongAnswerError(LoadError):
    """The server answered, but not what the model computes."""


class Exchange:
    """A request and the answer that it must get.

    Args:
        request: The bytes to send.
        check: Raises LoadError for the body of a wrong answer.
    """

    def __init__(self, request: bytes, check: Callable[[bytes], None]) -> None:
        self.request = request
        self._check = check
        self._known: set[bytes] = set()

    def check(self, answer: bytes) -> None:
        """See that an answer is right.

        Raises:
            LoadError: it is not.
        """
        if answer not in self._known:
            self._check(answer)
            if len(self._known) < _MAX_KNOWN:
                self._known.add(answer)


@dataclass(frozen=True)
class Load:
    """What clients saw.

    Attributes:
        latencies_s: Of each request, all of which were answered rightly.
        wall_s: From the first request to the last answer.
        cpu_s: Of this process.
    """

    latencies_s: list[float]
    wall_s: float
    cpu_s: float


class HttpClients:
    """Keep-alive connections over which the same exchanges go round, each client beginning with another one.

    Args:
        port: Of 127.0.0.1.
        exchanges: What to send; whole HTTP requests.
        count: Clients.
    """

    def __init__(self, port: int, exchanges: Sequence[Exchange], count: int) -> None:
        self._exchanges = exchanges
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        for index in range(count):
            connection = Connection(port, index)
            self._connections[connection.socket.fileno()] = connection
            self._epoll.register(connection.socket, select.EPOLLIN)

    def __enter__(self) -> HttpClients:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._epoll.close()

    def run(self, seconds: float, min_requests: int = 0) -> Load:
        """Send until the time is over and enough was sent, once at least for each client, and wait for all answers.

        Raises:
            LoadError: an answer was wrong, or none came.
        """
        clock, exchanges, connections = time.perf_counter, self._exchanges, self._connections
        latencies: list[float] = []
        started, cpu_started = clock(), time.process_time()
        end = started + seconds
        for connection in connections.values():
            connection.send(exchanges[connection.turn % len(exchanges)], clock())
        waiting, sent = len(connections), len(connections)
        while waiting:
            events = self._epoll.poll(_TIMEOUT_S)
            if not events:
                raise LoadError(f"no answer in {_TIMEOUT_S:g} s")
            for number, _ in events:
                connection = connections[number]
                body = connection.receive()
                if body is None:
                    continue
                now = clock()
                latencies.append(now - connection.sent_at)
                exchanges[connection.turn % len(exchanges)].check(body)
                connection.turn += 1
                if now < end or sent < min_requests:
                    connection.send(exchanges[connection.turn % len(exchanges)], now)
                    sent += 1
                else:
                    waiting -= 1
        return Load(latencies, clock() - started, time.process_time() - cpu_started)


class Connection:
    """One client's connection: at most one request is under way.

    Args:
        port: Of 127.0.0.1.
        turn: Number of the first exchange.
    """

    def __init__(self, port: int, turn: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.turn = turn
        self.sent_at = 0.0
        self._parts: list[bytes] = []
        self._start = 0  # of the body, once the head is there
        self._missing = 0

    def send(self, exchange: Exchange, now: float) -> None:
        """Send a whole request."""
        self.sent_at = now
        self.socket.sendall(exchange.request)

    def receive(self) -> bytes | None:
        """The body of the answer once it is there as a whole.

        Raises:
            LoadError: it is an error, or no answer comes.
        """
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise LoadError(f"the server closed the connection after {b''.join(self._parts)[:200]!r}")
        self._missing -= len(data)
        if self._parts:
            self._parts.append(data)
            if self._missing > 0:
                return None
            data = b"".join(self._parts)
        if not self._start and (end_of_head := data.find(b"\r\n\r\n")) >= 0:
            self._start = end_of_head + 4
            self._missing = self._start + _content_length(data[: self._start]) - len(data)
        if not self._start or self._missing > 0:
            self._parts = [data]
            return None
        if self._missing < 0:
            raise LoadError(f"more than one answer to a request: {data[self._missing :][:200]!r}")
        body = data[self._start :]
        self._parts, self._start, self._missing = [], 0, 0
        return body


def _content_length(head: bytes) -> int:
    lines = head.lower()
    if not lines.startswith(b"http/1.1 200 "):
        raise LoadError(f"the server answered {head[:300]!r}")
    start = lines.find(b"\r\ncontent-length:")
    if start < 0:
        raise LoadError(f"an answer without Content-Length: {head!r}")
    return int(lines[start + 17 : lines.find(b"\r\n", start + 2)])


class GrpcClients:
    """Channels, each with a connection and a thread of its own; see HttpClients.

    Args:
        port: Of 127.0.0.1.
        exchanges: What to send; serialized messages.
        count: Clients.
        method: The path of the method.
    """

    def __init__(self, port: int, exchanges: Sequence[Exchange], count: int, method: str) -> None:
        import grpc

        options = [
            ("grpc.use_local_subchannel_pool", 1),  # else all share one connection
            ("grpc.max_receive_message_length", -1),
        ]
        self._exchanges = exchanges
        self._error = grpc.RpcError
        self._channels = [grpc.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(count)]
        self._calls = [channel.unary_unary(method) for channel in self._channels]

    def __enter__(self) -> GrpcClients:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()

    def run(self, seconds: float, min_requests: int = 0) -> Load:
        """See HttpClients.run."""
        each = max(1, -(-min_requests // len(self._calls)))
        started, cpu_started = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(len(self._calls)) as pool:
            latencies = list(
                pool.map(lambda index: self._client(index, started + seconds, each), range(len(self._calls)))
            )
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        return Load([latency for client in latencies for latency in client], wall_s, cpu_s)

    def _client(self, index: int, end: float, min_requests: int) -> list[float]:
        clock, call, exchanges = time.perf_counter, self._calls[index], self._exchanges
        latencies: list[float] = []
        while clock() < end or len(latencies) < min_requests:
            exchange = exchanges[(index + len(latencies)) % len(exchanges)]
            sent_at = clock()
            try:
                answer = call(exchange.request, timeout=_TIMEOUT_S)
            except self._error as error:
                raise LoadError(f"the server answered {error.code()}: {error.details()}") from error
            latencies.append(clock() - sent_at)
            exchange.check(answer)
        return latencies
