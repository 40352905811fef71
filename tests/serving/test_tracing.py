"""Traces: what spans a request makes, whose trace they are in, and how they get to a collector."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tensorflow_serving.apis import prediction_service_pb2_grpc

from serving import protos
from serving.__main__ import _make_server, main
from serving.batching.parameters import BatchingParameters
from serving.calls import Call, CallContext
from serving.errors import Code, ServingError
from serving.monitoring.tracing import Tracing, otlp_processor
from serving.rest.http_server import Handler
from serving.rest.rest_api import Request, Response
from serving.served_model import Version
from serving.server import ModelServer
from serving.tensors import encode_values
from tests.serving import models

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half_plus_two")
    models.copy_half_plus_two(path / "3")
    return path


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced_server(base_path: Path, exporter: InMemorySpanExporter) -> Iterator[ModelServer]:
    with ModelServer("m", base_path, tracing=Tracing(SimpleSpanProcessor(exporter))) as server:
        yield server


@pytest.fixture
def server(traced_server: ModelServer, exporter: InMemorySpanExporter) -> ModelServer:
    exporter.clear()
    return traced_server


def post(server: ModelServer, path: str, body: bytes, headers: dict[str, str], method: str = "POST") -> int:
    connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=20)  # type: ignore[arg-type]
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def predict(server: ModelServer, metadata: dict[str, str], signature: str = "", model: str = "m") -> grpc.StatusCode:
    request = protos.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    encode_values(np.ones((2, 1), np.float32), request.inputs["x"])
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        try:
            stub.Predict(request, timeout=20, metadata=tuple(metadata.items()))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def hexadecimal(span: ReadableSpan) -> tuple[str, str]:
    """Trace and parent."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else ""


def check_call(found: ReadableSpan, request: ReadableSpan, rows: int) -> None:
    assert found.kind is SpanKind.INTERNAL
    assert found.parent is not None and request.context is not None
    assert found.parent.span_id == request.context.span_id
    assert found.context is not None and found.context.trace_id == request.context.trace_id
    assert found.attributes == {
        "headrace.model": "m",
        "headrace.version": 3,
        "headrace.signature": "serving_default",
        "headrace.rows": rows,
    }
    assert request.start_time is not None and request.end_time is not None
    assert found.start_time is not None and found.end_time is not None
    assert request.start_time <= found.start_time < found.end_time <= request.end_time


def test_rest_request(server: ModelServer, exporter: InMemorySpanExporter) -> None:
    assert post(server, "/v1/models/m/versions/3:predict", b'{"instances": [1, 2, 3]}', SAMPLED) == 200
    found = spans(exporter)
    request = found.pop("POST /v1/models/{model}/versions/{version}:predict")
    assert hexadecimal(request) == (TRACE, PARENT)
    assert request.kind is SpanKind.SERVER
    assert request.status.status_code is StatusCode.UNSET
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/models/{model}/versions/{version}:predict",
        "http.response.status_code": 200,
        "url.path": "/v1/models/m/versions/3:predict",
        "url.scheme": "http",
    }
    check_call(found.pop("call serving_default"), request, rows=3)
    assert not found


def test_grpc_request(server: ModelServer, exporter: InMemorySpanExporter) -> None:
    assert predict(server, SAMPLED) is grpc.StatusCode.OK
    found = spans(exporter)
    request = found.pop("tensorflow.serving.PredictionService/Predict")
    assert hexadecimal(request) == (TRACE, PARENT)
    assert request.kind is SpanKind.SERVER
    assert request.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": "tensorflow.serving.PredictionService/Predict",
        "rpc.response.status_code": "OK",
    }
    check_call(found.pop("call serving_default"), request, rows=2)
    assert not found


def test_the_clients_decision_holds(server: ModelServer, exporter: InMemorySpanExporter) -> None:
    post(server, "/v1/models/m:predict", b'{"instances": [1]}', NOT_SAMPLED)
    predict(server, NOT_SAMPLED)
    assert not exporter.get_finished_spans()


def test_a_request_without_a_trace_begins_one(server: ModelServer, exporter: InMemorySpanExporter) -> None:
    for headers in ({}, {"traceparent": "nonsense"}):
        exporter.clear()
        post(server, "/v1/models/m:predict", b'{"instances": [1]}', headers)
        request = spans(exporter)["POST /v1/models/{model}:predict"]
        assert request.parent is None and hexadecimal(request)[0] != TRACE


def test_errors(server: ModelServer, exporter: InMemorySpanExporter) -> None:
    """A client's fault is none of the server's, but the call that it made has failed."""
    body = b'{"instances": [{"x": 1, "z": 2}]}'
    assert post(server, "/v1/models/m:predict?a=b", body, {}) == 400
    assert post(server, "/v1/models/m", b"", {}, "BREW") == 400
    malformed = [span for span in exporter.get_finished_spans() if not dict(span.attributes or {}).get("http.route")]
    assert [span.name for span in malformed] == ["POST"]
    assert (malformed[0].attributes or {})["url.query"] == "a=b"
    exporter.clear()
    assert predict(server, {}, signature="none") is grpc.StatusCode.FAILED_PRECONDITION
    found = spans(exporter)
    request, call = found["tensorflow.serving.PredictionService/Predict"], found["call none"]
    assert request.status.status_code is StatusCode.UNSET
    assert (request.attributes or {})["rpc.response.status_code"] == "FAILED_PRECONDITION"
    assert call.status.status_code is StatusCode.ERROR
    assert call.status.description == 'Serving signature key "none" not found.'
    assert (call.attributes or {})["error.type"] == "FAILED_PRECONDITION"


def run(handler: Handler, request: Request) -> Response:
    with pytest.raises(StopIteration) as stopped:
        handler(request).send(None)
    response = stopped.value.value
    assert isinstance(response, Response)
    return response


def handler_with(status: int) -> Handler:
    async def handle(request: Request) -> Response:
        return Response(status)

    return handle


@pytest.mark.parametrize(("status", "deadline", "seen"), [(503, None, 503), (200, 0.0, 504)])
def test_a_server_error_is_marked(status: int, deadline: float | None, seen: int) -> None:
    exporter = InMemorySpanExporter()
    handler = Tracing(SimpleSpanProcessor(exporter)).rest(handler_with(status), "https")
    run(handler, Request("GET", "/v1/models/m/labels/stable/metadata", context=CallContext(deadline)))
    [span] = exporter.get_finished_spans()
    assert span.name == "GET /v1/models/{model}/labels/{label}/metadata"
    assert span.status.status_code is StatusCode.ERROR
    attributes = dict(span.attributes or {})
    assert (attributes["http.response.status_code"], attributes["error.type"]) == (seen, str(seen))
    assert attributes["url.scheme"] == "https"


def test_health_makes_no_spans() -> None:
    exporter = InMemorySpanExporter()
    handler = Tracing(SimpleSpanProcessor(exporter)).rest(handler_with(200), "http")
    assert run(handler, Request("GET", "/healthz/live")).status == 200
    assert not exporter.get_finished_spans()


def test_a_share_is_sampled() -> None:
    exporter = InMemorySpanExporter()
    for sampling_rate, least, most in ((0.0, 0, 0), (0.5, 50, 150)):
        handler = Tracing(SimpleSpanProcessor(exporter), sampling_rate).rest(handler_with(200), "http")
        for _ in range(200):
            run(handler, Request("GET", "/v1/models/m"))
        assert least <= len(exporter.get_finished_spans()) <= most


def test_the_wait_for_a_batch_is_told(base_path: Path) -> None:
    exporter = InMemorySpanExporter()
    batching = BatchingParameters(max_batch_size=4, batch_timeout_micros=0, max_enqueued_batches=4, num_batch_threads=1)
    with ModelServer("m", base_path, tracing=Tracing(SimpleSpanProcessor(exporter)), batching=batching) as server:
        post(server, "/v1/models/m:predict", b'{"instances": [1, 2]}', SAMPLED)
        predict(server, SAMPLED)
    calls = [span for span in exporter.get_finished_spans() if span.name == "call serving_default"]
    requests = {span.context.span_id for span in exporter.get_finished_spans() if span.context and span not in calls}
    assert len(calls) == len(requests) == 2
    for call in calls:
        assert call.parent is not None and call.parent.span_id in requests
        assert (call.attributes or {})["headrace.queue_seconds"] >= 0  # type: ignore[operator]


# To a collector


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.received: list[tuple[str, ExportTraceServiceRequest]] = []


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_a_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    tracing = Tracing(otlp_processor(f"http://127.0.0.1:{collector.server_port}/v1/traces"))
    run(tracing.rest(handler_with(200), "http"), Request("GET", "/v1/models/m", SAMPLED))
    tracing.close()
    [(path, message)] = collector.received
    assert path == "/v1/traces"
    [resource_spans] = message.resource_spans
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert resource["service.name"] == "headrace"
    assert resource["deployment.environment.name"] == "test"
    [span] = resource_spans.scope_spans[0].spans
    assert span.name == "GET /v1/models/{model}"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)


def test_texts_that_are_no_utf_8_lose_no_spans(collector: Collector) -> None:
    tracing = Tracing(otlp_processor(f"http://127.0.0.1:{collector.server_port}/v1/traces"))
    version = Version("m", 3, Path("/m/3"))
    error = ServingError(Code.FAILED_PRECONDITION, "no \ud800" + "x" * 5000)

    async def handle(request: Request) -> Response:
        tracing.called(Call(version, "\ud800", {"x": np.ones(2)}, {}, error, 0.1, request.context))
        return Response(200)

    run(tracing.rest(handle, "http"), Request("GET", "/v1/models/\udcff"))
    tracing.close()
    [(_, message)] = collector.received
    found = {span.name: span for span in message.resource_spans[0].scope_spans[0].spans}
    assert set(found) == {"GET /v1/models/{model}", "call ?"}
    assert found["call ?"].status.message == "no ?" + "x" * 996


def test_the_flags_send_traces(collector: Collector, base_path: Path) -> None:
    flags = [f"--model_base_path={base_path}", "--model_name=m", "--port=auto", "--rest_api_port=auto"]
    flags.append(f"--otlp_traces_endpoint=http://127.0.0.1:{collector.server_port}/v1/traces")
    for sampling_rate, names in (("0", []), ("1", ["POST /v1/models/{model}:predict", "call serving_default"])):
        context = main.make_context("serving", [*flags, f"--trace_sampling_rate={sampling_rate}"])
        with _make_server(context.params) as server:
            post(server, "/v1/models/m:predict", b'{"instances": [1]}', {})
        found = [
            span.name
            for _, message in collector.received
            for resource_spans in message.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]
        assert sorted(found) == names


def run_main(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {code}\nfrom serving.__main__ import main; main()", *flags],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_the_extra_the_error_says_what_to_install(base_path: Path) -> None:
    flags = f"--model_base_path={base_path}", "--otlp_traces_endpoint=http://127.0.0.1:1/v1/traces"
    done = run_main("sys.modules['opentelemetry.sdk'] = None", *flags)
    assert done.returncode == 2
    assert "pip install 'headrace[otel]'" in done.stderr


def test_an_endpoint_is_a_url(base_path: Path) -> None:
    done = run_main("", f"--model_base_path={base_path}", "--otlp_traces_endpoint=collector:4317")
    assert done.returncode == 2
    assert "is a URL such as" in done.stderr and "collector:4317" in done.stderr
