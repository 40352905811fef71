"""One HTTP/1.1 connection: httptools parses, requests are answered in order (keep-alive and pipelining)."""

from __future__ import annotations

import asyncio
import http
import logging
import time
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from serving.calls import CallContext
from serving.errors import Code, ServingError
from serving.rest_api import Request, Response, error_response

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 65_536
_LINGER_SECONDS = 1.0
_MAX_WAITING = 16  # pipelined requests of one connection before we stop reading from it
_REASONS = {status.value: status.phrase for status in http.HTTPStatus} | {499: "Client Closed Request"}
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class _Exchange:
    """A request and how its answer is to be sent."""

    request: Request
    keep_alive: bool
    http_1_0: bool


class Server(Protocol):
    """What a connection needs of its server."""

    connections: set[Connection]
    is_draining: bool
    loop: asyncio.AbstractEventLoop
    timeout_seconds: float | None
    workers: Executor

    def is_quick(self, request: Request) -> bool:
        """Whether to answer a request on the event loop."""

    def answer(self, request: Request) -> Response:
        """Answer a request."""


class Connection(asyncio.Protocol):
    """One client connection. All methods run on the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: deque[_Exchange] = deque()
        self._current: _Exchange | None = None
        self._is_receiving = False
        self._is_in_head = False
        self._head_bytes = 0  # received of a head that is not complete yet
        self._is_broken = False
        self._is_refused = False
        self._is_ended = False
        self._is_writable = True

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self._is_receiving or self._current is not None or bool(self._waiting)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._server.connections.add(self)
        if self._server.is_draining:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._waiting.clear()
        if self._current is not None:
            self._current.request.context.cancel()
        self._current = None
        self._is_receiving = False

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            logger.debug("malformed HTTP: %s", error)
            self._is_broken = True
        if self._is_in_head and self._head_bytes > _MAX_HEAD_BYTES:
            logger.debug("the head of a request is longer than %d bytes", _MAX_HEAD_BYTES)
            self._is_broken = True
        if self._is_broken:
            self._is_receiving = False
        if self._is_broken or len(self._waiting) >= _MAX_WAITING:
            self._transport.pause_reading()
        self._work()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request that offers another protocol (as Java's HttpClient does with h2c) as if it did not.

        llhttp stops after the head of such a request; we give it that head again without the offer.
        """
        method = self._parser.get_method()
        kept = {name: value for name, value in self._headers.items() if name not in ("upgrade", "connection")}
        head = b"%b %b HTTP/1.1\r\n" % (b"GET" if method == b"CONNECT" else method, b"".join(self._url))
        head += "".join(f"{name}: {value}\r\n" for name, value in kept.items()).encode("latin-1")
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + b"\r\n" + rest)

    def eof_received(self) -> bool:
        self._is_ended = True
        self._is_receiving = False
        return self.is_busy  # True keeps the writing side open until the answers are out

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self._work()

    def close(self) -> None:
        """Close once what is written has been sent."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # httptools

    def on_message_begin(self) -> None:
        self._is_receiving = self._is_in_head = True
        self._url: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def on_url(self, part: bytes) -> None:
        self._url.append(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        if self._headers.get("expect", "").lower() == "100-continue" and self._current is None and not self._waiting:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # see _ignore_upgrade
        self._is_receiving = False
        timeout = self._server.timeout_seconds
        request = Request(
            method=self._parser.get_method().decode("latin-1"),
            target=b"".join(self._url).decode("utf-8", "surrogateescape"),
            headers=self._headers,
            body=b"".join(self._body),
            context=CallContext(None if timeout is None else time.monotonic() + timeout, self._headers.get),
        )
        self._waiting.append(
            _Exchange(request, self._parser.should_keep_alive(), self._parser.get_http_version() == "1.0")
        )

    # answering

    def _work(self) -> None:
        """Answer waiting requests, one after another, until one needs a worker."""
        while self._waiting and self._current is None and self._is_writable and not self._transport.is_closing():
            exchange = self._current = self._waiting.popleft()
            if len(self._waiting) < _MAX_WAITING and not self._is_broken:
                self._transport.resume_reading()
            if self._server.is_quick(exchange.request):
                self._respond(exchange, self._server.answer(exchange.request))
            else:
                self._delegate(exchange)
        if self.is_busy or self._transport.is_closing():
            return
        if self._is_broken:
            self._refuse()
        elif self._is_ended:
            self.close()

    def _refuse(self) -> None:
        """Answer what is no HTTP, and read on for a while: closing with unread data would reset the connection, and the
        client would never see the answer."""
        if self._is_refused:
            return
        self._is_refused = True
        self._transport.write(_BAD_REQUEST)
        if self._is_ended or not self._transport.can_write_eof():
            self.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._server.loop.call_later(_LINGER_SECONDS, self.close)

    def _delegate(self, exchange: _Exchange) -> None:
        loop, timeout = self._server.loop, self._server.timeout_seconds
        future = loop.run_in_executor(self._server.workers, self._server.answer, exchange.request)
        timer = loop.call_later(timeout, self._time_out, exchange) if timeout else None

        def done(future: asyncio.Future[Response]) -> None:
            if timer is not None:
                timer.cancel()
            if not future.cancelled():
                self._finish(exchange, future.result())

        future.add_done_callback(done)

    def _time_out(self, exchange: _Exchange) -> None:
        self._finish(exchange, error_response(ServingError(Code.DEADLINE_EXCEEDED, "Timed out waiting for the model")))

    def _finish(self, exchange: _Exchange, response: Response) -> None:
        if self._current is exchange:  # else it was answered (it timed out) or the client has gone
            self._respond(exchange, response)
            self._work()

    def _respond(self, exchange: _Exchange, response: Response) -> None:
        self._current = None
        keep_alive = exchange.keep_alive and not self._server.is_draining
        self._transport.write(_encode(exchange, response, keep_alive))
        if not keep_alive:
            self._waiting.clear()
            self.close()


def _encode(exchange: _Exchange, response: Response, keep_alive: bool) -> bytes:
    head = f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\nContent-Length: {len(response.body)}\r\n"
    if response.content_type:
        head += f"Content-Type: {response.content_type}\r\n"
    if not keep_alive:
        head += "Connection: close\r\n"
    elif exchange.http_1_0:
        head += "Connection: keep-alive\r\n"
    return f"{head}\r\n".encode("latin-1") + (b"" if exchange.request.method == "HEAD" else response.body)
