"""A small HTTP/1.1 server for a synchronous handler: asyncio.Protocol and httptools on a thread of its own.

A request is answered on the event loop as long as requests have lately been quick, else on a thread pool, so that a
slow model never stops the loop for long.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from serving.http_connection import Connection
from serving.rest_api import Request, Response

Handler = Callable[[Request], Response]

_INLINE_SECONDS = 0.001
_INLINE_BODY_BYTES = 16_384
_DECAY = 0.9


class HttpServer:
    """Serves a handler over HTTP.

    Args:
        handler: answers a request; runs on the event loop or in a worker thread, and never raises.
        host: the address to listen on; "" means every one, IPv6 and IPv4.
        port: 0 lets the system choose.
        timeout_seconds: after this a request is answered with 504; None waits for ever.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(self, handler: Handler, host: str, port: int, timeout_seconds: float | None) -> None:
        self.timeout_seconds = timeout_seconds
        self.is_draining = False
        self.connections: set[Connection] = set()
        self._handler = handler
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.workers: Executor = ThreadPoolExecutor(4 * (os.cpu_count() or 1), thread_name_prefix="rest")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rest-loop", daemon=True)
        # The longest of the recent requests, forgotten slowly; starts high, so that the first ones go to the workers.
        self._slowest_seconds = 1.0

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._accept(), self.loop).result()

    def abandon(self) -> None:
        """Give the port back without ever having started."""
        self._socket.close()
        self.workers.shutdown()
        self.loop.close()

    async def _accept(self) -> None:
        self._server = await self.loop.create_server(lambda: Connection(self), sock=self._socket)

    def stop(self, grace_seconds: float) -> None:
        """Take no new connections, finish the requests under way, then close.

        Args:
            grace_seconds: requests that take longer than this are cut off.
        """
        asyncio.run_coroutine_threadsafe(self._drain(grace_seconds), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.loop.close()

    async def _drain(self, grace_seconds: float) -> None:
        self.is_draining = True
        # asyncio loses a connection whose acceptance is under way when the server closes; so stop accepting first.
        self.loop.remove_reader(self._socket.fileno())
        await asyncio.sleep(0.01)
        self._server.close()
        deadline = time.monotonic() + grace_seconds
        while any(connection.is_busy for connection in self.connections) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in self.connections:
            connection.close()
        while self.connections and time.monotonic() < deadline:  # what is written must still be sent
            await asyncio.sleep(0.01)
        for connection in self.connections:
            connection.abort()
        await asyncio.sleep(0)

    def is_quick(self, request: Request) -> bool:
        """Whether to answer a request on the event loop; health and status must not queue behind slow models."""
        if request.method != "POST":
            return True
        return self._slowest_seconds < _INLINE_SECONDS and len(request.body) < _INLINE_BODY_BYTES

    def answer(self, request: Request) -> Response:
        """Run the handler, and remember how long it took."""
        started = time.perf_counter()
        response = self._handler(request)
        self._slowest_seconds = max(time.perf_counter() - started, self._slowest_seconds * _DECAY)
        return response


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(f"REST cannot listen on {host or '*'}:{port}: {error.strerror}") from error
