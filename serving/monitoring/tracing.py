"""Traces for an OpenTelemetry collector: a span for each request to a model, and within it one for each call of a signature.

Requests that bring a W3C `traceparent` go on in their client's trace, and follow its decision whether to sample. Names and
attributes: https://opentelemetry.io/docs/specs/semconv/http/http-spans/ and .../rpc/grpc/; those without a convention
begin with `headrace.`. Importing this module needs the extra `headrace[otel]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.calls import Call
from serving.errors import HTTP_STATUS, Code, ServingError
from serving.rest.http_server import Handler
from serving.rest.rest_api import Request, Response, parse_route

_METHODS = ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE")
_SERVER_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
_SERVICES = "/tensorflow.serving."
_MAX_TEXT_LENGTH = 1000  # of what clients send
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans and hands them to a processor.

    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES of the environment hold; the service is called headrace else.

    Args:
        processor: takes the finished spans.
        sampling_rate: the share of the traces that begin here that is sampled, 0 to 1.

    Example:
        >>> tracing = Tracing(otlp_processor("http://collector:4318/v1/traces"))
        >>> ModelServer("taxi", Path("pushed/taxi"), tracing=tracing)
    """

    def __init__(self, processor: SpanProcessor, sampling_rate: float = 1.0) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sampling_rate)),
            resource=Resource.create({"service.name": "headrace"}).merge(OTELResourceDetector().detect()),
            span_limits=SpanLimits(max_attribute_length=_MAX_TEXT_LENGTH),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headrace")

    def rest(self, handle: Handler, scheme: str) -> Handler:
        """RestApi.handle, with a span around each request under /v1; `scheme` is `http` or `https`."""

        async def traced(request: Request) -> Response:
            if request.target[:4].lower() != "/v1/":
                return await handle(request)
            method = request.method if request.method in _METHODS else "_OTHER"
            path, _, query = _sendable(request.target).partition("?")
            attributes = {"http.request.method": method, "url.path": path, "url.scheme": scheme}
            if query:
                attributes["url.query"] = query
            route = _route(request)
            if route:
                attributes["http.route"] = route
            span = self._tracer.start_span(
                f"{method} {route}".rstrip(),
                _PROPAGATOR.extract(request.headers, Context()),
                SpanKind.SERVER,
                attributes,
            )
            request.context.span = span
            try:
                response = await handle(request)
                status = HTTP_STATUS[Code.DEADLINE_EXCEEDED] if request.context.is_late() else response.status
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    _fail(span, str(status))
                return response
            finally:
                span.end()

        return traced

    def interceptor(self) -> grpc.ServerInterceptor:
        """Puts a span around each call of TF Serving's gRPC services."""
        return _Interceptor(self._tracer)

    def called(self, call: Call) -> None:
        """Note a call of a signature; a Listener."""
        request = call.context.span or get_current_span()  # that of gRPC
        if not request.is_recording() or not call.signature_name:
            return  # the second never called a signature
        end = time.time_ns()
        signature = _sendable(call.signature_name)
        attributes: dict[str, Any] = {
            "headrace.model": call.version.model_name,
            "headrace.version": call.version.number,
            "headrace.signature": signature,
        }
        shape = next((array.shape for array in call.inputs.values()), ())
        if shape:
            attributes["headrace.rows"] = shape[0]
        if call.context.queue_seconds is not None:
            attributes["headrace.queue_seconds"] = call.context.queue_seconds
        start = end - int(call.seconds * 1e9)
        span = self._tracer.start_span(
            f"call {signature}", set_span_in_context(request), attributes=attributes, start_time=start
        )
        if call.error is not None:
            _fail(span, call.error.code.name, call.error.message)
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class _Interceptor(grpc.ServerInterceptor):
    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def intercept_service(
        self, continuation: Callable[[Any], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(details)
        if handler is None or handler.unary_unary is None or not details.method.startswith(_SERVICES):
            return handler
        name = details.method[1:]
        parent = _PROPAGATOR.extract(dict(details.invocation_metadata), Context())
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}

        def traced(body: bytes, context: grpc.ServicerContext) -> bytes:
            with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER, attributes) as span:
                answer = handler.unary_unary(body, context)
                code = (context.code() or grpc.StatusCode.OK).name
                span.set_attribute("rpc.response.status_code", code)
                if code in _SERVER_ERRORS:
                    _fail(span, code, (context.details() or b"").decode())
                return answer

        return grpc.unary_unary_rpc_method_handler(traced)


def _route(request: Request) -> str:
    try:
        route = parse_route(request.method, request.target)
    except ServingError:
        return ""
    text = "/v1/models/{model}" if route.model else "/v1/models"
    if route.version is not None:
        text += "/versions/{version}"
    elif route.label is not None:
        text += "/labels/{label}"
    if route.verb.lower() == "metadata":
        return f"{text}/metadata"
    return f"{text}:{route.verb.lower()}" if route.verb else text


def _fail(span: Span, error_type: str, message: str = "") -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR, _sendable(message) or None)


def _sendable(text: str) -> str:
    """A client's text without lone surrogates, for which OTLP has no form: they would take all spans with them."""
    return text[:_MAX_TEXT_LENGTH].encode("utf-8", "replace").decode()


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans to a collector from a thread of its own, and drops them while there are too many or it is away.

    OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT and OTEL_BSP_* of the environment hold.

    Args:
        endpoint: where the collector takes OTLP over HTTP, such as `http://collector:4318/v1/traces`.
    """
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
