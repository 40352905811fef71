"""Malformed requests by the hundred: each is answered with a client's error, and the server goes on.

A longer campaign: HEADRACE_FUZZ_EXAMPLES=100000 python -m pytest tests/serving/test_fuzz.py
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving import protos
from serving.server import ModelServer
from tests.serving.models import copy_half_plus_two, save_rich, write_model_config

MANY = settings(
    max_examples=int(os.environ.get("HEADRACE_FUZZ_EXAMPLES", 200)),
    deadline=None,
    derandomize="HEADRACE_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# What a client's mistake may be called; anything else would blame the server.
CLIENT_ERRORS = {400, 404, 405, 408, 411, 413, 414, 415, 431, 501}
CLIENT_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.OUT_OF_RANGE,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("models")
    save_rich(folder / "rich" / "1")
    copy_half_plus_two(folder / "half" / "1")
    config = write_model_config(folder, {"rich": "rich", "half": "half"})
    with ModelServer(model_config_file=config) as server:
        yield server


class Rest:
    """A client that sends whatever it is told to, over one connection."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        self._connection.request(method, path, body, headers or {})
        response = self._connection.getresponse()
        return response.status, response.read()


@pytest.fixture(scope="module")
def rest(server: ModelServer) -> Iterator[Rest]:
    assert server.rest_port
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=60)) as connection:
        yield Rest(connection)


@pytest.fixture(scope="module")
def channel(server: ModelServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield channel


# REST

ROW = {"x": [1.0, 2.0], "text": "a", "id": [1]}
DOCUMENTS: list[Any] = [
    {"signature_name": "serving_default", "instances": [ROW, ROW]},
    {"inputs": {"x": [[1, 2]], "text": [{"b64": "YQ=="}], "id": [[0]]}},
    {"signature_name": "explain", "instances": [[1, 2], [3, 4]]},
    {"signature_name": "regress_x_to_y", "context": {"c": 1}, "examples": [{"x": [1.5]}, {"x": 2.0}]},
]
ACTIONS = [
    f"/v1/models/{model}:{verb}" for model in ("rich", "half") for verb in ("predict", "classify", "regress", "explain")
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([{"b64": "!"}, {"b64": 1}, {"b64": "YQ==", "x": 1}, "NaN", "\ud800", "serving_default"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def documents(draw: st.DrawFn) -> Any:
    """A good document in which a part is replaced, left out or doubled."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if isinstance(place[key], dict | list) and place[key] and draw(st.integers(0, 3)):
                place = place[key]
                continue
            action = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
            if action == "replace":
                place[key] = copy.deepcopy(draw(JSON))
            elif action == "remove":
                del place[key]
            elif isinstance(place, dict):
                place[draw(st.text(max_size=4))] = copy.deepcopy(place[key])
            else:
                place.append(copy.deepcopy(place[key]))
            break
    return document


def check_answer(status: int, body: bytes) -> None:
    assert status == 200 or status in CLIENT_ERRORS, (status, body)
    if status != 200:
        # Messages quote the request cut off at some byte, as TF Serving's do.
        assert set(json.loads(body.decode(errors="replace"))) == {"error"}


@MANY
@given(path=st.sampled_from(ACTIONS), document=documents())
def test_documents_that_are_nearly_right(rest: Rest, path: str, document: Any) -> None:
    body = json.dumps(document).encode("utf-8", "surrogatepass")
    check_answer(*rest.send("POST", path, body))


@MANY
@given(
    path=st.sampled_from(ACTIONS),
    document=st.sampled_from(DOCUMENTS),
    edits=st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), min_size=1, max_size=4),
    encoding=st.sampled_from(["", "gzip"]),
)
def test_bodies_that_are_damaged(rest: Rest, path: str, document: Any, edits: Any, encoding: str) -> None:
    body = json.dumps(document).encode()
    for place, text in edits:
        body = body[:place] + text + body[place + 1 :]
    check_answer(*rest.send("POST", path, body, {"Content-Encoding": encoding}))


@MANY
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "OPTIONS", "HEAD", "DELETE"]),
    parts=st.lists(
        st.sampled_from(
            ["/v1/models", "/rich", "/versions/", "1", "/labels/", ":predict", "/metadata", "?", "%2F", "%"]
        )
        | st.text(max_size=3),
        max_size=6,
    ),
)
def test_paths(rest: Rest, method: str, parts: list[str]) -> None:
    path = quote("/" + "".join(parts), safe="/%?:=")
    status, body = rest.send(method, path)
    assert status == 200 or status in CLIENT_ERRORS, (status, body)


FRAGMENTS = [
    b"POST /v1/models/rich:predict HTTP/1.1\r\n", b"GET /healthz/live HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n", b"H 2\r\n",
    b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Connection: Upgrade, HTTP2-Settings\r\n",
    b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"A: b\r\n c\r\n", b"\r\n", b"\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffffff\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b'{"instances": []}', b"\x16\x03\x01\x02\x00\x01",
]  # fmt: skip


@settings(MANY, max_examples=max(MANY.max_examples // 4, 1))
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=8), min_size=1, max_size=8))
def test_what_is_no_http(server: ModelServer, parts: list[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", server.rest_port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while received := connection.recv(65536):
                answer += received
        except ConnectionResetError:
            pass
    heads = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    statuses = {int(line.split()[1]) for line in heads}
    assert not answer or statuses <= {100, 200, 503} | CLIENT_ERRORS, answer


# gRPC

X = np.float32([[1, 2]])


def good_requests() -> dict[str, Any]:
    """Method -> a request that is answered."""
    from serving.tensors import encode_content

    predict = protos.PredictRequest()
    predict.model_spec.name = "rich"
    for alias, array in {"x": X, "text": np.array([b"a"], object), "id": np.int64([[1]])}.items():
        encode_content(array, predict.inputs[alias])
    regress = protos.RegressionRequest()
    regress.model_spec.name, regress.model_spec.signature_name = "half", "regress_x_to_y"
    regress.input.example_list.examples.add().features.feature["x"].float_list.value.append(1.0)
    classify = protos.ClassificationRequest(model_spec=regress.model_spec, input=regress.input)
    classify.model_spec.signature_name = "classify_x_to_y"
    multi = protos.MultiInferenceRequest(input=regress.input)
    multi.tasks.add(model_spec=regress.model_spec, method_name="tensorflow/serving/regress")
    metadata = protos.GetModelMetadataRequest(metadata_field=["signature_def"])
    metadata.model_spec.name = "rich"
    status = protos.GetModelStatusRequest()
    status.model_spec.name = "rich"
    service = "/tensorflow.serving.PredictionService/"
    return {
        f"{service}Predict": predict,
        f"{service}Classify": classify,
        f"{service}Regress": regress,
        f"{service}MultiInference": multi,
        f"{service}GetModelMetadata": metadata,
        "/tensorflow.serving.ModelService/GetModelStatus": status,
    }


GOOD = {method: request.SerializeToString() for method, request in good_requests().items()}


def call(channel: grpc.Channel, method: str, body: bytes) -> grpc.StatusCode:
    try:
        channel.unary_unary(method)(body, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", sorted(GOOD))
def test_good_messages_are_answered(channel: grpc.Channel, method: str) -> None:
    assert call(channel, method, GOOD[method]) is grpc.StatusCode.OK


@MANY
@given(
    method=st.sampled_from(sorted(GOOD)),
    source=st.sampled_from(sorted(GOOD)),
    edits=st.lists(st.tuples(st.integers(0, 150), st.binary(max_size=3)), min_size=1, max_size=4),
)
def test_messages_that_are_damaged(channel: grpc.Channel, method: str, source: str, edits: Any) -> None:
    body = GOOD[source]
    for place, data in edits:
        body = body[:place] + data + body[place + 1 :]
    code = call(channel, method, body)
    assert code is grpc.StatusCode.OK or code in CLIENT_CODES


@MANY
@given(
    alias=st.sampled_from(["x", "text", "id", "more"]),
    dtype=st.sampled_from([*range(25), 101, 120]),
    sizes=st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**31, 2**62]), max_size=4),
    content=st.binary(max_size=24),
    values=st.lists(st.floats(width=32), max_size=4),
    strings=st.lists(st.binary(max_size=3), max_size=3),
)
def test_tensors(
    channel: grpc.Channel, alias: str, dtype: int, sizes: Any, content: Any, values: Any, strings: Any
) -> None:
    request = protos.PredictRequest.FromString(GOOD["/tensorflow.serving.PredictionService/Predict"])
    tensor = request.inputs[alias]
    tensor.Clear()
    tensor.dtype = dtype
    for size in sizes:
        tensor.tensor_shape.dim.add(size=size)
    tensor.tensor_content = content
    tensor.float_val.extend(values)
    tensor.string_val.extend(strings)
    code = call(channel, "/tensorflow.serving.PredictionService/Predict", request.SerializeToString())
    assert code is grpc.StatusCode.OK or code in CLIENT_CODES


def test_the_server_still_answers(server: ModelServer, channel: grpc.Channel, rest: Rest) -> None:
    """Last in the file: after all that came before."""
    response = protos.PredictResponse.FromString(
        channel.unary_unary("/tensorflow.serving.PredictionService/Predict")(
            GOOD["/tensorflow.serving.PredictionService/Predict"]
        )
    )
    assert response.outputs["sum"].float_val[:] == [3.0]
    status, body = rest.send("POST", ACTIONS[0], json.dumps(DOCUMENTS[0]).encode())
    assert (status, len(json.loads(body)["predictions"])) == (200, 2)
