"""A client for TF Serving's REST API and KServe's v1 protocol, on urllib3; needs no TensorFlow.

A server of KServe's v1 protocol that is not TF Serving has no metadata; it is asked in the row format, and its answer is
taken as it comes (https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol).
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import orjson
import urllib3

from serving import dtypes
from serving.client.base import DEFAULT_SIGNATURE, NO_METADATA, Client, Method, ModelSpec, Results, TlsFiles
from serving.client.inputs import Features, num_rows
from serving.client.model_info import (
    Classification,
    ModelMetadata,
    Regression,
    SignatureInfo,
    VersionStatus,
    metadata_from_json,
)
from serving.client.retry import Call, RetryPolicy
from serving.errors import Code, ServingError, code_from_http, invalid_argument
from serving.rest import json_tensor
from serving.tensors import to_bytes

_MAX_CONNECTIONS = 64  # kept open; more are made when more threads call at once
_CHUNK_BYTES = 1 << 20


class RestClient(Client):
    """Calls a model server over REST; Client has the calls. May be shared by threads.

    Args:
        url: where the server listens, such as `http://127.0.0.1:8501`, or a path below which it does.
        token: see Client.
        headers: see Client.
        tls: files for https; without them the system's certificates count.
        retry: see Client.
        gzip_above_bytes: request bodies larger than this are compressed; None for never. TF Serving refuses those that
            are larger than 100 MB before compression.

    Raises:
        ValueError: the URL is not one of http or https, or http with `tls`.

    Example:
        >>> with RestClient("http://127.0.0.1:8501") as client:
        ...     client.predict("taxi", {"miles": np.array([[1.5]], np.float32)})
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        retry: RetryPolicy | None = None,
        gzip_above_bytes: int | None = None,
    ) -> None:
        super().__init__(token=token, headers=headers, retry=retry)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"a REST URL looks like http://host:port, but got {url!r}; one of gRPC is host:port or grpcs://host:port"
            )
        if tls is not None and parts.scheme == "http":
            raise ValueError(f"certificates are given, but {url!r} is not encrypted; use https://")
        self._url = url
        self._prefix = parts.path.rstrip("/")
        self._gzip_above_bytes = gzip_above_bytes
        options = _tls_options(tls)
        if parts.scheme == "https" and "host" in self._headers:
            options["server_hostname"] = self._headers["host"]
        self._pool = urllib3.connection_from_url(url, maxsize=_MAX_CONNECTIONS, **options)

    def close(self) -> None:
        """Close the connections; the client cannot be used after it."""
        self._pool.close()

    def _predict(
        self,
        spec: ModelSpec,
        signature_name: str,
        signature: SignatureInfo,
        inputs: Mapping[str, np.ndarray],
        output_filter: Sequence[str],
        call: Call,
    ) -> dict[str, np.ndarray]:
        if signature == NO_METADATA:
            num_rows(inputs)  # or they make no rows
        values = {alias: _to_json(array) for alias, array in inputs.items()}
        document: dict[str, Any] = {} if signature_name == DEFAULT_SIGNATURE else {"signature_name": signature_name}
        document |= {"instances": _rows(values)} if signature == NO_METADATA else {"inputs": values}
        answer = self._post(spec, "predict", document, call)
        with self._reading(answer):
            if signature == NO_METADATA:
                outputs = infer_arrays(answer["predictions"], "predictions")
                return {alias: outputs[alias] for alias in output_filter or outputs}
            aliases = list(signature.outputs)
            named = {aliases[0]: answer["outputs"]} if len(aliases) == 1 else answer["outputs"]
            return {
                alias: json_tensor.to_array(named[alias], signature.outputs[alias].number)
                for alias in aliases
                if not output_filter or alias in output_filter
            }

    def _classify(
        self, spec: ModelSpec, signature_name: str, examples: list[Features], context: Features | None, call: Call
    ) -> list[tuple[Classification, ...]]:
        answer = self._post(spec, "classify", _examples(signature_name, examples, context), call)
        with self._reading(answer):
            return [
                tuple(Classification(label, float(np.float32(score))) for label, score in classes)
                for classes in answer["results"]
            ]

    def _regress(
        self, spec: ModelSpec, signature_name: str, examples: list[Features], context: Features | None, call: Call
    ) -> list[Regression]:
        answer = self._post(spec, "regress", _examples(signature_name, examples, context), call)
        with self._reading(answer):
            return [Regression(float(np.float32(value))) for value in answer["results"]]

    def _multi_inference(
        self,
        spec: ModelSpec,
        tasks: Mapping[str, Method],
        examples: list[Features],
        context: Features | None,
        call: Call,
    ) -> dict[str, Results]:
        raise ServingError(
            Code.UNIMPLEMENTED, "REST has no multi-inference; connect to the server's gRPC port, host:port"
        )

    def _status(self, spec: ModelSpec, call: Call) -> list[VersionStatus]:
        answer = self._request("GET", _path(spec), None, call)
        with self._reading(answer):
            if "model_version_status" not in answer:  # KServe v1
                return [VersionStatus(None, "AVAILABLE" if answer["ready"] else "LOADING")]
            return [
                VersionStatus(
                    int(item["version"]), item["state"], item["status"]["error_code"], item["status"]["error_message"]
                )
                for item in answer["model_version_status"]
            ]

    def _metadata(self, spec: ModelSpec, call: Call) -> ModelMetadata:
        answer = self._request("GET", f"{_path(spec)}/metadata", None, call)
        with self._reading(answer):
            signatures = answer["metadata"]["signature_def"]["signature_def"]
            return metadata_from_json(answer["model_spec"]["version"], signatures)

    def _metadata_if_any(self, spec: ModelSpec, call: Call) -> ModelMetadata | None:
        try:
            return self._metadata(spec, call)
        except _NoSuchPathError:
            return None

    def _reload(self, model_config: str, call: Call) -> dict[str, int]:
        raise ServingError(Code.UNIMPLEMENTED, "REST cannot reload; connect to the server's gRPC port, host:port")

    def _post(self, spec: ModelSpec, verb: str, document: Mapping[str, Any], call: Call) -> dict[str, Any]:
        body = json.dumps(document).encode()  # not orjson, which writes NaN as null
        return self._request("POST", f"{_path(spec)}:{verb}", body, call)

    def _request(self, method: str, path: str, body: bytes | None, call: Call) -> dict[str, Any]:
        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        if body is not None and self._gzip_above_bytes is not None and len(body) > self._gzip_above_bytes:
            body = gzip.compress(body, compresslevel=1)
            headers["content-encoding"] = "gzip"
        return call.run(lambda seconds: self._attempt(method, path, body, headers, seconds, call))

    def _attempt(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds: float, call: Call
    ) -> dict[str, Any]:
        try:
            response = self._pool.urlopen(
                method,
                self._prefix + path,
                body,
                headers,
                retries=False,
                timeout=urllib3.Timeout(total=seconds),
                preload_content=False,
            )
            content = _read(response, call)
        except urllib3.exceptions.NewConnectionError as error:
            raise ServingError(Code.UNAVAILABLE, f"{self._url} cannot be reached: {error}") from error
        except urllib3.exceptions.TimeoutError as error:
            raise ServingError(Code.DEADLINE_EXCEEDED, f"{self._url}: {call.too_late().message}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ServingError(Code.UNAVAILABLE, f"{self._url} cannot be reached: {error}") from error
        answer = _parse(content)
        if response.status != 200 or not isinstance(answer, dict):
            raise self._error(response, content, answer)
        return answer

    def _error(self, response: urllib3.BaseHTTPResponse, content: bytes, answer: Any) -> ServingError:
        """The error of an answer; messages are {"error": ...} from TF Serving and KServe, {"detail": ...} from FastAPI."""
        found = answer if isinstance(answer, dict) else {}
        text = " ".join(content[:300].decode(errors="replace").split())
        message = str(found.get("error") or found.get("detail") or f"{self._url} answered {response.status}: {text}")
        if response.status == 200:
            return ServingError(Code.INTERNAL, message)
        if response.status in (404, 405) and "error" not in found:
            code = Code.NOT_FOUND if response.status == 404 else Code.UNIMPLEMENTED
            return _NoSuchPathError(code, f"{self._url} has no such call: {message}")
        # A proxy's 502 says that nobody behind it answered: http-grpc-status-mapping.md of grpc.
        code = Code.UNAVAILABLE if response.status == 502 else code_from_http(response.status)
        return ServingError(code, message, retry_after_seconds=_retry_after_seconds(response))

    @contextlib.contextmanager
    def _reading(self, answer: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ServingError) as error:
            text = json.dumps(answer)[:200]
            message = f"{self._url} answered with what does not fit ({type(error).__name__}: {error}): {text}"
            raise ServingError(Code.INTERNAL, message) from error


def infer_arrays(rows: Any, name: str) -> dict[str, np.ndarray]:
    """Arrays of JSON rows whose types nobody names: int64, float64, bool, or object arrays of bytes.

    Args:
        rows: bare values, objects with a value for each name, or one object of columns.
        name: what bare values are called.

    Raises:
        ServingError: INVALID_ARGUMENT when rows are ragged, or hold null or values of several types.
        KeyError: a row lacks a name that the first one has.
    """
    if isinstance(rows, dict) and not json_tensor.is_base64(rows):
        return {alias: _infer_array(values) for alias, values in rows.items()}
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and not json_tensor.is_base64(rows[0]):
        return {alias: _infer_array([row[alias] for row in rows]) for alias in rows[0]}
    return {name: _infer_array(rows)}


def _infer_array(value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise invalid_argument(str(error)) from error
    return json_tensor.to_array(value, dtypes.STRING) if array.dtype.kind in "SUO" else array


class _NoSuchPathError(ServingError):
    """A 404 or 405 that is not TF Serving's: the server does not have this call."""


def _tls_options(tls: TlsFiles | None) -> dict[str, str]:
    files = (
        {} if tls is None else {"ca_certs": tls.ca_file, "cert_file": tls.certificate_file, "key_file": tls.key_file}
    )
    return {name: str(file) for name, file in files.items() if file is not None}


def _read(response: urllib3.BaseHTTPResponse, call: Call) -> bytes:
    """The body; the deadline holds for a server that sends it drop by drop, too."""
    chunks = []
    try:
        while chunk := response.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            call.remaining_seconds()
    except BaseException:
        response.close()
        raise
    return b"".join(chunks)


def _retry_after_seconds(response: urllib3.BaseHTTPResponse) -> float | None:
    try:
        return urllib3.Retry().get_retry_after(response)
    except urllib3.exceptions.InvalidHeader:
        return None


def _path(spec: ModelSpec) -> str:
    path = f"/v1/models/{quote(spec.name, safe='')}"
    if spec.version_label is not None:
        return f"{path}/labels/{quote(spec.version_label, safe='')}"
    return path if spec.version is None else f"{path}/versions/{spec.version}"


def _parse(content: bytes) -> Any:
    """The JSON of an answer, in which NaN and Infinity may stand bare; None when it is none."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            return json.loads(content)
        except ValueError:
            return None


def _examples(signature_name: str, examples: list[Features], context: Features | None) -> dict[str, Any]:
    def to_json(features: Features) -> dict[str, list[Any]]:
        return {name: list(map(_string_to_json, values)) for name, values in features.items()}

    document: dict[str, Any] = {"signature_name": signature_name, "examples": list(map(to_json, examples))}
    return document if context is None else {**document, "context": to_json(context)}


def _rows(values: Mapping[str, list[Any]]) -> list[Any]:
    """Columns as rows; bare values for a single input, which servers without metadata expect."""
    if len(values) == 1:
        return next(iter(values.values()))
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _to_json(array: np.ndarray) -> Any:
    if array.dtype.kind == "c":
        raise ServingError(Code.UNIMPLEMENTED, "complex numbers have no JSON form; connect to the server's gRPC port")
    if dtypes.number_of(array) != dtypes.STRING:
        return array.tolist()
    values = array.astype(object)
    for index, value in np.ndenumerate(values):
        values[index] = _string_to_json(to_bytes(value))
    return values.tolist()


def _string_to_json(value: Any) -> Any:
    """Bytes as a JSON string where they are text, which is the same to TF Serving and all that others understand."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}
