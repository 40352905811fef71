"""The gRPC server: where it listens, who may call, and the standard services beside TF Serving's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import grpc
from google.protobuf import descriptor_pool

from serving.access.limits import ConcurrencyLimit, Gate
from serving.errors import Code, ServingError
from serving.settings import GrpcSettings

STATUS_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
# The names that TF Serving's health service knows (model_servers/server.cc), and those of the services themselves.
HEALTH_NAMES = (
    "",
    "ModelService",
    "PredictionService",
    "tensorflow.serving.ModelService",
    "tensorflow.serving.PredictionService",
)
_HEALTH_PREFIX = "/grpc.health.v1.Health/"


class GrpcServer:
    """A gRPC server, bound and not started yet.

    Args:
        handlers: TF Serving's services.
        address: `host:port`, where port 0 lets the system choose; None opens no port.
        settings: how to serve.
        gate: what a call must pass before its message is read; health is open to all.
        concurrency_limit: sees to it that there are threads enough to refuse what is past it.
        interceptors: called for what has passed the gate.

    Attributes:
        port: the port it is bound to, or None.

    Raises:
        OSError: a port or socket cannot be had.
    """

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        address: str | None,
        settings: GrpcSettings = GrpcSettings(),  # noqa: B008  frozen
        gate: Gate | None = None,
        concurrency_limit: ConcurrencyLimit | None = None,
        interceptors: Sequence[grpc.ServerInterceptor] = (),
    ) -> None:
        num_threads = settings.max_threads or 4 * (os.cpu_count() or 1)
        if concurrency_limit is not None:
            num_threads = max(num_threads, concurrency_limit.max_requests) + 1
        options = {
            "grpc.max_receive_message_length": settings.max_message_bytes,
            "grpc.max_send_message_length": 2**31 - 1,
            "grpc.so_reuseport": 0,  # else a second server on a busy port would start, and get half of the requests
            **dict(settings.channel_arguments),
        }
        self._server = grpc.server(
            futures.ThreadPoolExecutor(num_threads, thread_name_prefix="grpc"),
            options=list(options.items()),
            interceptors=[*([_GateKeeper(gate)] if gate is not None else []), *interceptors],
        )
        self._server.add_generic_rpc_handlers(handlers)
        self._health = _add_health(self._server) if settings.health_service else None
        if settings.reflection_service:
            _add_reflection(self._server, health=settings.health_service)
        credentials = None if settings.tls is None else settings.tls.grpc_credentials()
        self.port = None if address is None else self._listen(address, credentials)
        if settings.socket_path:
            self._listen(f"unix:{settings.socket_path}", credentials)

    def _listen(self, address: str, credentials: Any) -> int:
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {address}; is the port in use by another process?") from error

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()
        self._set_health(is_serving=True)

    def stop(self, grace_seconds: float | None) -> Any:
        """Take no new calls, and cut off those that take longer than the grace period; returns at once.

        Returns:
            An event, set when all is over.
        """
        self._set_health(is_serving=False)
        return self._server.stop(grace_seconds)

    def _set_health(self, *, is_serving: bool) -> None:
        if self._health is None:
            return
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in HEALTH_NAMES:
            self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)


def _add_health(server: grpc.Server) -> Any:
    from grpc_health.v1 import health, health_pb2_grpc

    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def _add_reflection(server: grpc.Server, *, health: bool) -> None:
    from grpc_reflection.v1alpha import reflection

    from serving.protos import MODEL_SERVICE, PREDICTION_SERVICE

    names = [PREDICTION_SERVICE, MODEL_SERVICE, reflection.SERVICE_NAME]
    if health:
        names.append("grpc.health.v1.Health")
    reflection.enable_server_reflection(names, server, _Descriptors())


class _Descriptors:
    """Protobuf's descriptor pool, which finds a method, too (`grpcurl describe package.Service.Method`)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(descriptor_pool.Default(), name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802  protobuf's name
        try:
            return descriptor_pool.Default().FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return descriptor_pool.Default().FindServiceByName(service).methods_by_name[method].containing_service.file


class _GateKeeper(grpc.ServerInterceptor):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def intercept_service(
        self, continuation: Callable[[Any], grpc.RpcMethodHandler], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        if details.method.startswith(_HEALTH_PREFIX):
            return continuation(details)
        metadata = dict(details.invocation_metadata)
        try:
            self._gate.check(metadata.get("authorization"))
        except ServingError as error:
            return _refusal(error)
        return continuation(details)


def _refusal(error: ServingError) -> grpc.RpcMethodHandler:
    def refuse(requests: Any, context: grpc.ServicerContext) -> None:
        fail(context, error)

    return grpc.stream_unary_rpc_method_handler(refuse)  # a stream, for its messages need not be read


def fail(context: grpc.ServicerContext, error: ServingError) -> bytes:
    """Answer a call with an error."""
    context.set_code(STATUS_CODES[error.code])
    context.set_details(error.message)
    if error.code is Code.UNAUTHENTICATED:
        context.set_trailing_metadata((("www-authenticate", "Bearer"),))
    elif error.retry_after_seconds is not None:
        # https://github.com/grpc/proposal/blob/master/A6-client-retries.md
        milliseconds = max(1, round(error.retry_after_seconds * 1000))
        context.set_trailing_metadata((("grpc-retry-pushback-ms", str(milliseconds)),))
    return b""
