"""A client for TF Serving's REST API on the standard library's http.client; needs no TensorFlow."""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import orjson

from serving import dtypes, json_tensor
from serving.errors import Code, ServingError, code_from_http
from serving.model_info import ModelMetadata, SignatureInfo, VersionStatus, metadata_from_json


class RestClient:
    """Calls a model server over REST. May be shared by threads; each keeps a connection of its own.

    Args:
        url: where the server listens, such as `http://127.0.0.1:8501`.

    Raises:
        ValueError: the URL is not one of http or https.

    Example:
        >>> with RestClient("http://127.0.0.1:8501") as client:
        ...     client.predict("taxi", {"miles": np.array([[1.5]], np.float32)})
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"a REST URL looks like http://host:port, but got {url!r}")
        self._url = url
        self._parts = parts
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()
        self._signatures: dict[tuple[str, int | None, str], SignatureInfo] = {}

    def predict(
        self,
        model_name: str,
        inputs: Mapping[str, np.ndarray],
        *,
        signature_name: str = "serving_default",
        version: int | None = None,
        timeout_seconds: float = 10.0,
    ) -> dict[str, np.ndarray]:
        """Call a signature.

        The answer of a signature with one output does not name it, and JSON has no dtypes, so the model's metadata is
        read once for each signature.

        Args:
            model_name: the model.
            inputs: input alias -> array; strings as object arrays of bytes or str.
            signature_name: the signature to call.
            version: a version number; None means the newest.
            timeout_seconds: for the whole call.

        Returns:
            Output alias -> array; strings are object arrays of bytes.

        Raises:
            ServingError: what the server answered, UNAVAILABLE when it cannot be reached, DEADLINE_EXCEEDED.
        """
        signature = self._signature(model_name, version, signature_name, timeout_seconds)
        body = _encode_request(signature_name, inputs)
        answer = self._call("POST", f"{_path(model_name, version)}:predict", body, timeout_seconds)
        return _decode_outputs(answer["outputs"], signature)

    def status(self, model_name: str, *, timeout_seconds: float = 10.0) -> list[VersionStatus]:
        """The versions of a model that the server knows.

        Raises:
            ServingError: see predict; NOT_FOUND for an unknown model.
        """
        answer = self._call("GET", _path(model_name, None), None, timeout_seconds)
        return [
            VersionStatus(
                int(item["version"]), item["state"], item["status"]["error_code"], item["status"]["error_message"]
            )
            for item in answer["model_version_status"]
        ]

    def metadata(self, model_name: str, *, version: int | None = None, timeout_seconds: float = 10.0) -> ModelMetadata:
        """The signatures of a model.

        Raises:
            ServingError: see predict; NOT_FOUND when no such version is loaded.
        """
        answer = self._call("GET", f"{_path(model_name, version)}/metadata", None, timeout_seconds)
        signatures = answer["metadata"]["signature_def"]["signature_def"]
        return metadata_from_json(answer["model_spec"]["version"], signatures)

    def close(self) -> None:
        """Close the connections of all threads; a later call opens a new one."""
        for connection in list(self._connections):
            connection.close()

    def __enter__(self) -> RestClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _signature(self, model: str, version: int | None, name: str, timeout_seconds: float) -> SignatureInfo:
        key = (model, version, name)
        if key not in self._signatures:
            signatures = self.metadata(model, version=version, timeout_seconds=timeout_seconds).signatures
            if name not in signatures:
                raise ServingError(
                    Code.INVALID_ARGUMENT, f"model {model} has no signature {name!r}, only {sorted(signatures)}"
                )
            self._signatures[key] = signatures[name]
        return self._signatures[key]

    def _call(self, method: str, path: str, body: bytes | None, timeout_seconds: float) -> dict[str, Any]:
        try:
            status, content = self._exchange(method, path, body, timeout_seconds)
        except TimeoutError as error:
            self._drop_connection()
            message = f"{self._url} did not answer within {timeout_seconds} s"
            raise ServingError(Code.DEADLINE_EXCEEDED, message) from error
        except (OSError, http.client.HTTPException) as error:
            self._drop_connection()
            message = f"{self._url} cannot be reached: {error or type(error).__name__}"
            raise ServingError(Code.UNAVAILABLE, message) from error
        answer = _parse(content)
        if status != 200:
            message = answer.get("error") or content[:200].decode(errors="replace")
            raise ServingError(code_from_http(status), message)
        return answer

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_seconds: float) -> tuple[int, bytes]:
        is_reused = "connection" in self._local.__dict__
        try:
            return self._exchange_once(method, path, body, timeout_seconds)
        except (ConnectionError, http.client.BadStatusLine):
            if not is_reused:
                raise
            self._drop_connection()  # the server closed an idle connection; it has not seen this request
            return self._exchange_once(method, path, body, timeout_seconds)

    def _exchange_once(self, method: str, path: str, body: bytes | None, timeout_seconds: float) -> tuple[int, bytes]:
        connection = self._connection(timeout_seconds)
        connection.request(method, self._parts.path.rstrip("/") + path, body)
        response = connection.getresponse()
        return response.status, response.read()

    def _drop_connection(self) -> None:
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()
            self._connections.discard(connection)

    def _connection(self, timeout_seconds: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = self._local.__dict__.get("connection")
        if connection is None:
            is_tls = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
            connection = self._local.connection = kind(self._parts.netloc)
            self._connections.add(connection)
        connection.timeout = timeout_seconds
        if connection.sock is not None:
            connection.sock.settimeout(timeout_seconds)
        return connection


def _path(model_name: str, version: int | None) -> str:
    return f"/v1/models/{quote(model_name, safe='')}" + ("" if version is None else f"/versions/{version}")


def _parse(content: bytes) -> dict[str, Any]:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:  # NaN and Infinity come bare
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
    return answer if isinstance(answer, dict) else {}


def _encode_request(signature_name: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    document = {
        "signature_name": signature_name,
        "inputs": {alias: _to_json(np.asarray(array)) for alias, array in inputs.items()},
    }
    return json.dumps(document).encode()  # not orjson, which writes NaN as null


def _to_json(array: np.ndarray) -> Any:
    if dtypes.number_of(array) != dtypes.STRING:
        return array.tolist()
    values = array.astype(object)
    for index, value in np.ndenumerate(values):
        values[index] = {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
    return values.tolist()


def _decode_outputs(answer: Any, signature: SignatureInfo) -> dict[str, np.ndarray]:
    named = {next(iter(signature.outputs)): answer} if len(signature.outputs) == 1 else answer
    return {alias: json_tensor.to_array(named[alias], _number(signature, alias)) for alias in signature.outputs}


def _number(signature: SignatureInfo, alias: str) -> int:
    name = signature.outputs[alias].dtype.removeprefix("DT_").lower()
    return {known: number for number, known in dtypes.NAMES.items()}[name]
