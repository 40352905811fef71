"""One HTTP/1.1 connection: httptools parses, requests are answered in order (keep-alive and pipelining)."""

from __future__ import annotations

import asyncio
import functools
import http
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from serving.access.limits import ConcurrencyLimit
from serving.batching.scheduler import LongWork, Pause
from serving.calls import CallContext
from serving.errors import Code, ServingError
from serving.rest.json_response import error_body
from serving.rest.rest_api import Request, Response, error_response
from serving.settings import RestSettings

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 65_536
_LINGER_SECONDS = 1.0
# Of an answer, handed over at a time: the loop would stand still while the whole of a large one is copied.
_PIECE_BYTES = 262_144
_MAX_WAITING = 16  # pipelined requests of one connection before we stop reading from it
# The body of a refused request up to which it is read and dropped, so that the connection can go on.
_MAX_DROPPED_BYTES = 65_536
_REASONS = {status.value: status.phrase for status in http.HTTPStatus} | {499: "Client Closed Request"}
_BAD_REQUEST = Response(400, content_type="")
_REQUEST_TIMEOUT = Response(408, content_type="")
_HEAD_TOO_LARGE = Response(431, content_type="")
_TOO_MANY_CONNECTIONS = Response(503, error_body("too many connections"), headers={"Retry-After": "1"})


class _RefusedError(Exception):
    """Ends the parsing of a connection."""


# A handler at work on a request; what it gives before its end is a batch it waits for, or the word that its work is long.
Answering = Coroutine[Pause, None, Response]


@dataclass(eq=False)
class _Exchange:
    """A request, how its answer is to be sent, and the work on it; or the answer, when it was refused from its head.

    Quick work is done on the event loop; what has said that it is long tells nothing of how quick others are.
    """

    request: Request
    refusal: Response | None
    keep_alive: bool
    http_1_0: bool
    is_quick: bool = True
    is_long: bool = False
    answering: Answering | None = None
    timer: asyncio.TimerHandle | None = None
    limit: ConcurrencyLimit | None = None


class Server(Protocol):
    """What a connection needs of its server."""

    admit: Callable[[Request], Response | None] | None
    concurrency_limit: ConcurrencyLimit | None
    connections: set[Connection]
    is_draining: bool
    loop: asyncio.AbstractEventLoop
    settings: RestSettings
    timeout_seconds: float | None
    workers: Executor

    def is_quick(self, request: Request) -> bool:
        """Whether to answer a request on the event loop."""

    def handler(self, request: Request) -> Answering:
        """Answer a request."""

    def step(self, answering: Answering, is_long: bool) -> Response | Pause:
        """Run the handler to its end or to its next pause."""

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call something on the event loop; from any thread."""


class Connection(asyncio.Protocol):
    """One client connection. All methods run on the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: deque[_Exchange] = deque()
        self._current: _Exchange | None = None
        self._is_receiving = False
        self._is_in_head = False
        self._head_bytes = 0  # received of a head that is not complete yet
        self._body_bytes = 0
        self._last_words: Response | None = None  # set once nothing more is parsed; sent after the answers
        self._is_refused = False
        self._is_ended = False
        self._is_writable = True
        self._unsent: memoryview | bytes = b""  # of an answer
        self._is_last_answer = False
        self._is_fresh = True  # no request has come yet
        # On the loop's clock: when the last bytes came, the head began, the client stopped to take up the answer.
        self._received_at = self._head_at = self._blocked_at = server.loop.time()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being received or answered."""
        return self._is_receiving or self._current is not None or bool(self._waiting) or bool(self._unsent)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._server.connections.add(self)
        most = self._server.settings.max_connections
        if self._server.is_draining:
            self.close()
        elif most is not None and len(self._server.connections) > most:
            self._end(_TOO_MANY_CONNECTIONS)
            self._work()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        self._waiting.clear()
        if self._current is not None:
            self._current.request.context.cancel()
        self._current = None
        self._unsent = b""
        self._is_receiving = False

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        self._received_at = self._server.loop.time()
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            logger.debug("malformed HTTP: %s", error)
            self._end(_BAD_REQUEST)
        if self._is_in_head and self._head_bytes > _MAX_HEAD_BYTES:
            self._end(_HEAD_TOO_LARGE)
        if self._last_words is None and len(self._waiting) >= _MAX_WAITING:
            self._transport.pause_reading()
        self._work()

    def _end(self, last_words: Response) -> None:
        """Parse no more, and close with this answer after those to the requests before."""
        if self._last_words is None:
            self._last_words = last_words
            self._is_receiving = self._is_in_head = False
            self._transport.pause_reading()

    def check_times(self, now: float) -> None:
        """Give up a client that is too slow; called now and then, with the loop's time."""
        settings = self._server.settings
        if self._is_refused or self._transport.is_closing():
            return
        if settings.io_seconds is not None:
            if not self._is_writable and now - self._blocked_at > settings.io_seconds:
                self.abort()
                return
            is_head_late = self._is_in_head and now - self._head_at > settings.io_seconds
            is_awaited = self._is_receiving and len(self._waiting) < _MAX_WAITING  # else it is we who do not read
            is_body_late = is_awaited and now - self._received_at > settings.io_seconds
            if is_head_late or is_body_late:
                self._end(_REQUEST_TIMEOUT)
                self._work()
                return
            if self._is_fresh and now - self._received_at > settings.io_seconds:
                self.close()
                return
        if settings.idle_seconds is not None and not self.is_busy and now - self._received_at > settings.idle_seconds:
            self.close()

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
        # True keeps the writing side open until the answers are out; TLS cannot do that.
        return self.is_busy and self._transport.can_write_eof()

    def pause_writing(self) -> None:
        self._is_writable = False
        self._blocked_at = self._server.loop.time()

    def resume_writing(self) -> None:
        self._is_writable = True
        self._send()
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
        self._is_fresh = False
        self._head_at = self._server.loop.time()
        self._url: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    def on_url(self, part: bytes) -> None:
        self._url.append(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes, self._body_bytes = False, 0, 0
        self._refusal: Response | None = None
        if self._parser.should_upgrade():
            return  # see _ignore_upgrade
        length = int(self._headers.get("content-length", 0))
        most = self._server.settings.max_body_bytes
        if most is not None and length > most:
            self._end(_too_large(most))
            raise _RefusedError
        if self._server.admit is not None:
            self._refusal = self._server.admit(self._request())
            if self._refusal is not None and (length > _MAX_DROPPED_BYTES or "transfer-encoding" in self._headers):
                self._end(self._refusal)
                raise _RefusedError
        if self._headers.get("expect", "").lower() == "100-continue" and self._current is None and not self._waiting:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        most = self._server.settings.max_body_bytes
        if most is not None and self._body_bytes > most:
            self._end(_too_large(most))
            raise _RefusedError
        if self._refusal is None:
            self._body.append(part)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # see _ignore_upgrade
        self._is_receiving = False
        is_1_0 = self._parser.get_http_version() == "1.0"
        self._waiting.append(_Exchange(self._request(), self._refusal, self._parser.should_keep_alive(), is_1_0))

    def _request(self) -> Request:
        timeout = self._server.timeout_seconds
        return Request(
            method=self._parser.get_method().decode("latin-1"),
            target=b"".join(self._url).decode("utf-8", "surrogateescape"),
            headers=self._headers,
            body=b"".join(self._body),
            context=CallContext(None if timeout is None else time.monotonic() + timeout, self._headers.get),
        )

    # answering

    def _work(self) -> None:
        """Answer waiting requests, one after another, until one needs a worker or a batch."""
        while self._waiting and self._current is None and self._is_writable and not self._transport.is_closing():
            exchange = self._current = self._waiting.popleft()
            if len(self._waiting) < _MAX_WAITING and self._last_words is None:
                self._transport.resume_reading()
            if response := exchange.refusal or self._enter(exchange) or self._begin(exchange):
                self._respond(exchange, response)
            if self._current is exchange and self._server.timeout_seconds:
                exchange.timer = self._server.loop.call_later(self._server.timeout_seconds, self._time_out, exchange)
        if self.is_busy or self._transport.is_closing():
            return
        if self._last_words is not None:
            self._refuse(self._last_words)
        elif self._is_ended:
            self.close()

    def _enter(self, exchange: _Exchange) -> Response | None:
        """Count a request, or refuse it when too many are under way."""
        limit = self._server.concurrency_limit
        if limit is not None and exchange.request.method == "POST":
            try:
                limit.enter()
            except ServingError as error:
                return error_response(error)
            exchange.limit = limit
        return None

    def _begin(self, exchange: _Exchange) -> Response | None:
        exchange.is_quick = self._server.is_quick(exchange.request)
        if exchange.is_quick:
            return self._advance(exchange)
        self._server.workers.submit(self._advance_in_worker, exchange)
        return None

    def _refuse(self, last_words: Response) -> None:
        """Say why the connection ends, and read on for a while: closing with unread data would reset the connection, and
        the client would never see it."""
        if self._is_refused:
            return
        self._is_refused = True
        self._transport.write(_head(last_words, keep_alive=False) + last_words.body)
        if self._is_ended or not self._transport.can_write_eof():
            self.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._server.loop.call_later(_LINGER_SECONDS, self.close)

    def _advance(self, exchange: _Exchange) -> Response | None:
        """Work on a request until it is answered or has to wait for a batch. On the loop, or in a worker if not quick."""
        if exchange.answering is None:
            exchange.answering = self._server.handler(exchange.request)
        found = self._server.step(exchange.answering, exchange.is_long)
        while isinstance(found, LongWork):
            exchange.is_long = True
            if exchange.is_quick:
                exchange.is_quick = False
                self._server.workers.submit(self._advance_in_worker, exchange)
                return None
            found = self._server.step(exchange.answering, exchange.is_long)
        if isinstance(found, Response):
            if exchange.limit is not None:
                exchange.limit.leave()
            return found
        found.add_done_callback(functools.partial(self._resume, exchange))
        return None

    def _resume(self, exchange: _Exchange) -> None:
        """Go on with a request whose batch has run. In the thread that ran it."""
        if exchange.is_quick:
            self._server.call_soon(functools.partial(self._advance_on_loop, exchange))
        else:
            self._server.workers.submit(self._advance_in_worker, exchange)

    def _advance_on_loop(self, exchange: _Exchange) -> None:
        if response := self._advance(exchange):
            self._finish(exchange, response)

    def _advance_in_worker(self, exchange: _Exchange) -> None:
        if response := self._advance(exchange):
            self._server.call_soon(functools.partial(self._finish, exchange, response))

    def _time_out(self, exchange: _Exchange) -> None:
        self._finish(exchange, error_response(ServingError(Code.DEADLINE_EXCEEDED, "Timed out waiting for the model")))

    def _finish(self, exchange: _Exchange, response: Response) -> None:
        if exchange.timer is not None:
            exchange.timer.cancel()
        if self._current is exchange:  # else it was answered (it timed out) or the client has gone
            self._respond(exchange, response)
            self._work()

    def _respond(self, exchange: _Exchange, response: Response) -> None:
        self._current = None
        keep_alive = exchange.keep_alive and not self._server.is_draining
        head = _head(response, keep_alive=keep_alive, http_1_0=exchange.http_1_0)
        body = b"" if exchange.request.method == "HEAD" else response.body
        if len(body) <= _PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
        self._is_last_answer = not keep_alive
        self._send()

    def _send(self) -> None:
        """Hand over what is left of the answer, as long as the client takes it up."""
        while self._unsent and self._is_writable and not self._transport.is_closing():
            piece, self._unsent = self._unsent[:_PIECE_BYTES], self._unsent[_PIECE_BYTES:]
            self._transport.write(piece)
        if self._is_last_answer and not self._unsent:
            self._waiting.clear()
            self.close()


def _too_large(max_bytes: int) -> Response:
    return Response(413, error_body(f"the body of the request is larger than {max_bytes} bytes"))


def _head(response: Response, *, keep_alive: bool, http_1_0: bool = False) -> bytes:
    head = f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\nContent-Length: {len(response.body)}\r\n"
    if response.content_type:
        head += f"Content-Type: {response.content_type}\r\n"
    for name, value in response.headers.items():
        head += f"{name}: {value}\r\n"
    if not keep_alive:
        head += "Connection: close\r\n"
    elif http_1_0:
        head += "Connection: keep-alive\r\n"
    return f"{head}\r\n".encode("latin-1")
