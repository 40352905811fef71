"""A small HTTP/1.1 server: asyncio.Protocol and httptools on a thread of its own.

A request is answered on the event loop as long as requests have lately been quick, else on a thread pool, so that a
slow model never stops the loop for long. While it waits for a batch it holds no thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from serving.access.limits import ConcurrencyLimit
from serving.batching.scheduler import Pause
from serving.rest.http_connection import Answering, Connection
from serving.rest.rest_api import Request, Response
from serving.settings import RestSettings

Handler = Callable[[Request], Answering]

_BACKLOG = 1024
_INLINE_SECONDS = 0.001
_INLINE_BODY_BYTES = 16_384
_DECAY = 0.9
_CHECK_SECONDS = 1.0


class HttpServer:
    """Serves a handler over HTTP.

    Args:
        handler: answers a request; runs on the event loop or in a worker thread, awaits nothing but Pauses, and
            never raises.
        host: the address to listen on; "" means every one, IPv6 and IPv4.
        port: 0 lets the system choose.
        timeout_seconds: after this a request is answered with 504; None waits for ever.
        settings: threads, limits and TLS.
        admit: looks at the head of a request, and answers it when the body need not be read.
        concurrency_limit: refuses POST requests while too many are under way; None refuses none.

    Raises:
        OSError: the port cannot be had.
    """

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        timeout_seconds: float | None,
        settings: RestSettings = RestSettings(),  # noqa: B008  frozen
        *,
        admit: Callable[[Request], Response | None] | None = None,
        concurrency_limit: ConcurrencyLimit | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.settings = settings
        self.admit = admit
        self.concurrency_limit = concurrency_limit
        self.is_draining = False
        self.connections: set[Connection] = set()
        self.handler = handler
        self._callbacks: deque[Callable[[], object]] = deque()
        self._is_woken = False
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        num_threads = settings.num_threads or 4 * (os.cpu_count() or 1)
        self.workers: Executor = ThreadPoolExecutor(num_threads, thread_name_prefix="rest")
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
        tls = self.settings.tls
        self._server = await self.loop.create_server(
            lambda: Connection(self),
            sock=self._socket,
            backlog=_BACKLOG,  # asyncio listens again
            ssl=None if tls is None else tls.server_context(),
            ssl_handshake_timeout=None if tls is None else self.settings.io_seconds,
        )
        self._check_times()

    def _check_times(self) -> None:
        if not self.is_draining:
            self.check_times(self.loop.time())
            self.loop.call_later(_CHECK_SECONDS, self._check_times)

    def check_times(self, now: float) -> None:
        """Give up the clients that are too slow at this time of the loop's clock."""
        for connection in list(self.connections):
            connection.check_times(now)

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

    def step(self, answering: Answering, is_long: bool) -> Response | Pause:
        """Run the handler to its end or to its next pause, and remember how long it took unless it is known to be long."""
        started = time.perf_counter()
        try:
            return answering.send(None)
        except StopIteration as end:
            return end.value
        finally:
            if not is_long:
                self._slowest_seconds = max(time.perf_counter() - started, self._slowest_seconds * _DECAY)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call something on the event loop; from any thread. What comes before the loop wakes shares its wake-up."""
        self._callbacks.append(callback)
        if not self._is_woken:
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._call_back)

    def _call_back(self) -> None:
        self._is_woken = False  # first: what comes from now on wakes the loop again
        while self._callbacks:
            self._callbacks.popleft()()


def _listen(host: str, port: int) -> socket.socket:
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"REST cannot listen on {host or '*'}:{port}: {error.strerror}") from error
