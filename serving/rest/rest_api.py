"""The REST API as a function from request to response, without a transport.

Sources, in tensorflow_serving/model_servers: http_rest_api_util.cc (routes), http_rest_api_handler.cc (order of the
checks), http_server.cc (OPTIONS, statuses). The health paths are ours; they lie outside /v1, where TF Serving has
nothing.
"""

from __future__ import annotations

import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from serving import inference
from serving.access.limits import Gate, retry_after_header
from serving.batching.scheduler import LongWork
from serving.calls import CallContext, Models, OpenModel
from serving.errors import HTTP_STATUS, Code, ServingError, invalid_argument
from serving.monitoring.metrics import Metrics
from serving.rest import json_examples, json_request, json_response, openapi
from serving.served_model import DEFAULT_SIGNATURE, EXPLAIN_SIGNATURE, ServedModel, State, Version

logger = logging.getLogger(__name__)

_PREDICTION = re.compile(
    r"/v1/models/(?P<model>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r":(?P<verb>classify|regress|predict|explain)",
    re.IGNORECASE | re.ASCII,
)
_STATUS = re.compile(
    r"/v1/models(?:/(?P<model>[^/:]+))?(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?(?:/(?P<verb>metadata))?",
    re.IGNORECASE | re.ASCII,
)
_ROUTES = {"POST": _PREDICTION, "GET": _STATUS}
_MAX_UNCOMPRESSED_BYTES = 100_000_000  # util/net_http/compression/gzip_zlib.h
# Past it the text of an answer takes more than about a millisecond.
_MAX_QUICK_CHARACTERS = 32_768
_CHARACTERS_OF_A_NUMBER = 10
_DOCS_PAGE = Path(__file__).with_name("pages") / "docs.html"
_NOT_FOUND_PAGE = (
    b"<HTML><HEAD>\n<TITLE>404 Not Found</TITLE>\n</HEAD><BODY>\n<H1>Not Found</H1>\n</BODY></HTML>\n"  # libevent's
)


@dataclass(frozen=True)
class Request:
    """An HTTP request.

    Attributes:
        method: as sent, such as `GET`.
        target: path and query as sent, still percent-encoded.
        headers: lower-case name -> value.
        body: the whole body, as sent.
        context: its deadline, and whether the client is still there.
    """

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    context: CallContext = field(default_factory=CallContext)


@dataclass(frozen=True)
class Response:
    """An HTTP response; no Content-Type header is sent when `content_type` is empty."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


Page = Callable[[Request], Response]


@dataclass(frozen=True)
class Route:
    """What a URL names.

    Attributes:
        model: the decoded model name; may be empty in a status request.
        version: a version number, or None.
        label: a version label, or None.
        verb: predict, classify, regress, explain, metadata, or empty for status.
    """

    model: str
    version: int | None
    label: str | None
    verb: str


def parse_route(method: str, target: str) -> Route:
    """Read a URL under /v1.

    Raises:
        ServingError: INVALID_ARGUMENT, "Malformed request: METHOD TARGET".
    """
    pattern = _ROUTES.get(method)
    match = pattern.fullmatch(target) if pattern else None
    if match is None:
        raise invalid_argument(f"Malformed request: {method} {target}")
    version, label = match["version"], match["label"]
    if version and int(version) >= 2**63:
        raise invalid_argument(f"Failed to convert version: {version} to numeric.")
    return Route(
        model=_decode(match["model"] or ""),
        version=int(version) if version else None,
        label=_decode(label) if label else None,
        verb=match["verb"] or "",
    )


def _decode(text: str) -> str:
    return unquote(text, errors="surrogateescape")


class RestApi:
    """Answers REST requests from the served models.

    Args:
        models: the models.
        is_draining: whether the server is about to stop; the readiness path reports it.
        pages: what answers GET for other paths outside /v1, such as `/shadow`.
        metrics: counts the requests; default: those of this object alone.
        metrics_path: where Prometheus finds the metrics, if anywhere.
        gate: what requests must pass, except those for health; None lets all in.
        cors: whether pages of other origins may read the answers.
        strict_json: whether NaN and Infinity become null in answers.
        check_method_names: whether classify and regress refuse signatures that were saved for another method.
    """

    def __init__(
        self,
        models: Models,
        is_draining: Callable[[], bool],
        pages: Mapping[str, Page] | None = None,
        *,
        metrics: Metrics | None = None,
        metrics_path: str = "",
        gate: Gate | None = None,
        cors: bool = False,
        strict_json: bool = False,
        check_method_names: bool = False,
    ) -> None:
        self._models = models
        self._is_draining = is_draining
        self._gate = gate
        self._cors = _cors_headers(gate) if cors else {}
        self._strict_json = strict_json
        self._check_method_names = check_method_names
        self._metrics = metrics or Metrics(models.manager)
        self._metrics_path = metrics_path
        self._pages = {
            "/healthz/live": _live,
            "/healthz/ready": self._ready,
            "/models": self._model_list,
            "/openapi.json": self._openapi,
            "/docs": _docs,
            **(pages or {}),
        }

    def admit(self, head: Request) -> Response | None:
        """Look at a request whose body is not read yet.

        Returns:
            The answer to one that is refused, else None.
        """
        # Browsers ask by OPTIONS whether they may send a token at all.
        if self._gate is None or head.target.startswith("/healthz/") or head.method == "OPTIONS":
            return None
        try:
            self._gate.check(head.headers.get("authorization"))
        except ServingError as error:
            return self._with_cors(error_response(error))
        return None

    async def handle(self, request: Request) -> Response:
        """Answer a request; every failure becomes a response. All it ever awaits are Pauses."""
        return self._with_cors(await self._handle(request))

    def _with_cors(self, response: Response) -> Response:
        return replace(response, headers={**response.headers, **self._cors}) if self._cors else response

    async def _handle(self, request: Request) -> Response:
        is_api = request.target[:4].lower() == "/v1/"
        started = time.perf_counter()
        code = Code.OK
        try:
            response = (await self._handle_api(request)) if is_api else self._handle_page(request)
            code = Code.OK if response.status == 200 else Code.FAILED_PRECONDITION  # an OPTIONS request, refused
            return response
        except ServingError as error:
            code = error.code
            return error_response(error)
        except Exception as error:
            logger.exception("REST request %s %s failed", request.method, request.target)
            code = Code.INTERNAL
            return error_response(ServingError(code, f"{type(error).__name__}: {error}"))
        finally:
            if is_api:
                self._metrics.answered(request.context, code, time.perf_counter() - started)

    def _handle_page(self, request: Request) -> Response:
        if self._metrics_path and request.target.partition("?")[0] == self._metrics_path:
            return self._metrics_page(request)
        page = self._pages.get(request.target)
        if page is not None and request.method in ("GET", "HEAD"):
            return page(request)
        return Response(404, _NOT_FOUND_PAGE, "text/html")

    def _metrics_page(self, request: Request) -> Response:
        """For any method, as in TF Serving."""
        if request.target != self._metrics_path:
            message = f"Unexpected path: {request.target}. Should be {self._metrics_path}"
            return Response(400, message.encode("utf-8", "surrogateescape"), "text/plain")
        return Response(200, self._metrics.page(), "text/plain")

    def _ready(self, request: Request) -> Response:
        if self._is_draining():
            return Response(503, b'{"status": "draining"}')
        idle = [
            model.config.name
            for model in self._models.manager.configured()
            if not any(version.state is State.AVAILABLE for version in model.statuses())
        ]
        if idle:
            return _json_response({"status": "not ready", "models_without_available_version": idle}, 503)
        return Response(200, b'{"status": "ready"}')

    def _model_list(self, request: Request) -> Response:
        return _json_response({"models": [self._describe(model) for model in self._models.manager.configured()]})

    def _describe(self, model: ServedModel) -> dict[str, object]:
        return {
            "name": model.config.name,
            "base_path": str(model.config.base_path),
            "labels": dict(model.config.labels),
            "versions": [
                {
                    "version": version.number,
                    "state": version.state.name,
                    "error": version.error.message if version.error else None,
                    "signatures": sorted(version.model.signatures) if version.model else [],
                }
                for version in model.statuses()
            ],
        }

    def _openapi(self, request: Request) -> Response:
        return Response(200, json.dumps(openapi.describe(self._models.manager)).encode())

    async def _handle_api(self, request: Request) -> Response:
        if request.method == "OPTIONS":
            origin = request.headers.get("origin", "")
            return Response(200 if "http://" in origin or "https://" in origin else 400, content_type="")
        route = parse_route(request.method, request.target)
        request.context.model_name = route.model
        if request.method == "GET":
            body = self._metadata(route) if route.verb.lower() == "metadata" else self._status(route)
            return Response(200, body)
        request.context.method = route.verb
        body = await self._call(route, request)
        return Response(200, json_response.strict(body) if self._strict_json else body)

    async def _call(self, route: Route, request: Request) -> bytes:
        if route.verb == "predict":
            return await self._predict(route, request)
        if route.verb == "explain":
            return await self._explain(route, request)
        if route.verb == "classify":
            found = await self._infer(route, request, inference.CLASSIFY)
            labels, scores = found.labels, found.scores
            return await _written(lambda: json_response.classifications(labels, scores), (labels, scores))
        if route.verb == "regress":
            found = await self._infer(route, request, inference.REGRESS)
            values = found.values
            return await _written(lambda: json_response.regressions(values), (values,))
        raise invalid_argument(f"Malformed request: {request.method} {request.target}")

    def _open(self, route: Route, request: Request) -> OpenModel:
        return self._models.open(route.model, route.version, route.label, request.context)

    async def _predict(self, route: Route, request: Request) -> bytes:
        document = json_request.parse_object(_uncompressed(request))
        name = json_request.signature_name(document) or DEFAULT_SIGNATURE
        with self._open(route, request) as model:
            return await _answer(model, name, document, "predictions")

    async def _explain(self, route: Route, request: Request) -> bytes:
        """KServe's verb; a model without such a signature has none, as in TF Serving."""
        document = json_request.parse_object(_uncompressed(request))
        with self._open(route, request) as model:
            if EXPLAIN_SIGNATURE not in model.signatures:
                raise invalid_argument(f"Malformed request: {request.method} {request.target}")
            return await _answer(model, EXPLAIN_SIGNATURE, document, "explanations")

    async def _infer(self, route: Route, request: Request, method_name: str) -> inference.Inference:
        document = json_request.parse_object(_uncompressed(request))
        name = json_request.signature_name(document)
        examples = json_examples.parse_examples(document)
        with self._open(route, request) as model:
            name, inputs, outputs = inference.plan(
                model.signatures, method_name, name, examples, self._check_method_names
            )
            return inference.checked(method_name, name, inputs, await model.run_later(name, inputs, outputs))

    def _status(self, route: Route) -> bytes:
        if not route.model:
            raise invalid_argument("Missing model name in request.")
        # The label is ignored, as in TF Serving: GetModelStatus looks at the version only.
        versions = self._models.manager.statuses(route.model, route.version)
        return _protobuf_json({"model_version_status": [_status_of(version) for version in versions]})

    def _metadata(self, route: Route) -> bytes:
        from google.protobuf import json_format

        with self._models.manager.lease(route.model, route.version, route.label) as version:
            signatures = {
                name: json_format.MessageToDict(
                    signature.proto, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
                for name, signature in version.loaded.signatures.items()
            }
        spec = {"name": version.model_name, "signature_name": "", "version": str(version.number)}
        return _protobuf_json({"model_spec": spec, "metadata": {"signature_def": {"signature_def": signatures}}})


def _cors_headers(gate: Gate | None) -> dict[str, str]:
    """http_server.cc, AddCORSHeaders; a token comes in a header of its own."""
    return {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Methods": "POST, GET",
        "Access-Control-Allow-Headers": "Content-Type" if gate is None else "Content-Type, Authorization",
    }


def _json_response(value: object, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode())


def _live(request: Request) -> Response:
    return Response(200, b'{"status": "alive"}')


def _docs(request: Request) -> Response:
    return Response(200, _DOCS_PAGE.read_bytes(), "text/html; charset=utf-8")


async def _answer(model: OpenModel, name: str, document: Mapping[str, Any], key: str) -> bytes:
    """Call a signature on the inputs of a request's JSON; in row format the answer's rows are under `key`."""
    signature = model.signatures.get(name)
    if signature is None:
        raise invalid_argument(f'Serving signature name: "{name}" not found in signature def')
    if not signature.inputs:
        raise invalid_argument(f"Failed to get input map for signature: {name}")
    inputs, body_format = json_request.parse_inputs(document, signature.inputs)
    outputs = await model.run_later(name, inputs)
    if body_format == json_request.ROW:
        return await _written(lambda: json_response.predictions(outputs, key), outputs.values())
    return await _written(lambda: json_response.columns(outputs), outputs.values())


async def _written(write: Callable[[], bytes], arrays: Iterable[np.ndarray]) -> bytes:
    """The body that `write` makes of arrays; not on the event loop if that takes long."""
    if sum(map(_num_characters, arrays)) > _MAX_QUICK_CHARACTERS:
        await LongWork()
    return write()


def _num_characters(array: np.ndarray) -> int:
    """About how long the text of an array is."""
    return sum(map(len, array.flat)) if array.dtype.kind == "O" else _CHARACTERS_OF_A_NUMBER * array.size


def error_response(error: ServingError) -> Response:
    """The response that reports an error."""
    headers = retry_after_header(error)
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(HTTP_STATUS[error.code], json_response.error_body(error.message), headers=headers)


def _status_of(version: Version) -> dict[str, object]:
    code, message = (version.error.code, version.error.message) if version.error else (Code.OK, "")
    return {
        "version": str(version.number),
        "state": version.state.name,
        "status": {"error_code": code.name, "error_message": message},
    }


def _protobuf_json(value: object) -> bytes:
    """The layout of protobuf's JSON printer with whitespace."""
    return (json.dumps(value, indent=1) + "\n").encode()


def _uncompressed(request: Request) -> bytes:
    """The body, after gzip; a body that cannot be unpacked counts as empty, as in TF Serving."""
    if "gzip" not in request.headers.get("content-encoding", ""):
        return request.body
    unpacker = zlib.decompressobj(wbits=31)
    try:
        body = unpacker.decompress(request.body, _MAX_UNCOMPRESSED_BYTES)
    except zlib.error:
        return b""
    return body if unpacker.eof else b""
