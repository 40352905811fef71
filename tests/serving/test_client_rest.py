"""The REST client against a server that answers as the test says."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import trustme

from serving.client import RestClient, RetryPolicy, ServingError, TlsFiles
from serving.client.model_info import VersionStatus
from serving.errors import Code
from tests.serving.test_client_retry import Clock

NO_RETRY = RetryPolicy(max_retries=0)
Y = {"y": {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}]}}}


@dataclass
class Request:
    """What the server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    client_port: int

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeServer:
    """Answers each request with the next of `answers`, or by `answer`; an answer is (status, body, headers)."""

    answers: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    answer: Callable[[Request], Any] | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def next_answer(self, request: Request) -> tuple[int, bytes, dict[str, str]]:
        self.requests.append(request)
        answer = self.answer(request) if self.answer else (self.answers or [(500, {"error": "asked too often"})]).pop(0)
        status, body, *headers = answer if isinstance(answer, tuple) else (200, answer)
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        return status, body, headers[0] if headers else {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body, self.client_address[1])
        status, answer, answer_headers = self.fake.next_answer(request)
        if status == 0:  # hang up
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **answer_headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running(FakeServer()) as found:
        yield found


class running:  # noqa: N801  used as a function
    """Runs a fake server, with TLS if a context is given."""

    def __init__(self, fake: FakeServer, context: ssl.SSLContext | None = None) -> None:
        self.fake = fake
        handler = type("Own", (Handler,), {"fake": fake})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        fake.port = self.server.server_address[1]
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> FakeServer:
        self.thread.start()
        return self.fake

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def metadata(**outputs: Any) -> dict[str, Any]:
    x = {"x": {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": "-1"}]}}}
    signatures = {"serving_default": {"inputs": x, "outputs": outputs or Y}}
    return {"model_spec": {"version": "1"}, "metadata": {"signature_def": {"signature_def": signatures}}}


def test_overload_is_retried_when_the_server_says(fake: FakeServer) -> None:
    clock = Clock()
    fake.answers = [
        (503, {"error": "loading"}),
        (429, {"error": "full"}, {"Retry-After": "2"}),
        (502, b"<html>\n bad gateway</html>"),
        {"model_version_status": []},
    ]
    with RestClient(fake.url, retry=clock.policy()) as client:
        assert client.status("m") == []
    assert clock.waits == [0.1, 2.2, 0.4]
    assert len({request.client_port for request in fake.requests}) == 1, "one connection for all"


def test_a_server_that_hangs_up_is_asked_again(fake: FakeServer) -> None:
    clock = Clock()
    fake.answers = [(0, b""), {"name": "m", "ready": True}]
    with RestClient(fake.url, retry=clock.policy()) as client:
        assert client.status("m") == [VersionStatus(None, "AVAILABLE")]
    assert clock.waits == [0.1]


def test_nobody_listens() -> None:
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    with RestClient(url, retry=clock.policy(max_retries=2)) as client, pytest.raises(ServingError) as raised:
        client.status("m")
    assert raised.value.code is Code.UNAVAILABLE
    assert f"{url} cannot be reached" in raised.value.message
    assert "Connection refused" in raised.value.message
    assert clock.waits == [0.1, 0.2]


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        ((504, {"error": "slow"}), Code.DEADLINE_EXCEEDED, "slow"),
        ((400, {"error": "bad"}), Code.INVALID_ARGUMENT, "bad"),
        ((500, {"error": "ValueError : kaputt"}), Code.INTERNAL, "ValueError : kaputt"),
        ((404, {"detail": "Not Found"}), Code.NOT_FOUND, "has no such call: Not Found"),
        ((405, {"detail": "Method Not Allowed"}), Code.UNIMPLEMENTED, "has no such call: Method Not Allowed"),
        ((404, {"error": "Servable not found"}), Code.NOT_FOUND, "Servable not found"),
        ((302, b"<a\n>login</a>", {"Location": "/login"}), Code.UNKNOWN, "answered 302: <a >login</a>"),
        ((200, b"<html>"), Code.INTERNAL, "answered 200: <html>"),
        ((200, {"x": 1}), Code.INTERNAL, "answered with what does not fit (KeyError: 'ready'): {\"x\": 1}"),
    ],
)
def test_errors_that_are_not_retried(fake: FakeServer, answer: Any, code: Code, message: str) -> None:
    fake.answers = [answer]
    with RestClient(fake.url) as client, pytest.raises(ServingError) as raised:
        client.status("m")
    assert raised.value.code is code
    assert message in raised.value.message
    assert fake.answers == []


def test_the_deadline_holds_for_an_answer_that_drips(fake: FakeServer) -> None:
    """Half of an answer, and then time is over."""
    clock = Clock()

    def slow(request: Request) -> Any:
        clock.now += 11
        return {"name": "m", "ready": True}

    fake.answer = slow
    with RestClient(fake.url, retry=clock.policy()) as client, pytest.raises(ServingError) as raised:
        client.status("m", timeout_seconds=10)
    assert raised.value.code is Code.DEADLINE_EXCEEDED
    assert len(fake.requests) == 1


def test_metadata_retries_and_predict_share_the_deadline(fake: FakeServer) -> None:
    clock = Clock()
    fake.answers = [(503, {}, {"Retry-After": "6"}), metadata(), (503, {"error": "again"}, {"Retry-After": "6"})]
    with RestClient(fake.url, retry=clock.policy()) as client, pytest.raises(ServingError, match="UNAVAILABLE: again"):
        client.predict("m", {"x": [1.0]}, timeout_seconds=10)
    assert clock.waits == [6.1]


def test_what_is_sent(fake: FakeServer) -> None:
    fake.answers = [metadata(), {"outputs": [2.5]}, {"outputs": [2.5]}]
    headers = {"Host": "m.ns.example.com", "X-Trace": "7"}
    with RestClient(f"{fake.url}/below/", token="s3cret", headers=headers, gzip_above_bytes=100) as client:
        for num_rows in (1, 100):
            assert client.predict("m", {"x": [1.0] * num_rows}, version_label="a b")["y"].tolist() == [2.5]
    assert [request.path for request in fake.requests] == [
        "/below/v1/models/m/labels/a%20b/metadata",
        *["/below/v1/models/m/labels/a%20b:predict"] * 2,
    ]
    for request in fake.requests:
        sent = {name: request.headers.get(name) for name in ("host", "x-trace", "authorization")}
        assert sent == {"host": "m.ns.example.com", "x-trace": "7", "authorization": "Bearer s3cret"}
    small, large = fake.requests[1:]
    assert small.document == {"inputs": {"x": [1.0]}}
    assert small.headers["content-type"] == "application/json"
    assert "content-encoding" not in small.headers
    assert large.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(large.body)) == {"inputs": {"x": [1.0] * 100}}


def test_strings_are_sent_as_text_where_they_are_text(fake: FakeServer) -> None:
    fake.answers = [(404, {"detail": "Not Found"}), {"predictions": [{"b64": "/w=="}, "é"]}]
    with RestClient(fake.url) as client:
        outputs = client.predict("m", {"text": np.array(["é", b"a", b"\xff\0"], object)})
    assert fake.requests[1].document == {"instances": ["é", "a", {"b64": "/wA="}]}
    assert outputs["predictions"].tolist() == [b"\xff", "é".encode()]


def test_a_new_signature_is_noticed(fake: FakeServer) -> None:
    """The model has another output since its metadata was read."""
    z = {"z": {"dtype": "DT_INT32", "tensor_shape": {"dim": [{"size": "-1"}]}}}
    fake.answers = [metadata(), {"outputs": [0.5]}, {"outputs": {"y": [0.5], "z": [3]}}, metadata(**Y, **z)]
    fake.answers.append({"outputs": {"y": [0.5], "z": [3]}})
    with RestClient(fake.url) as client:
        assert list(client.predict("m", {"x": [1]})) == ["y"]
        outputs = client.predict("m", {"x": [1]})
    assert (outputs["y"].dtype, outputs["z"].dtype, outputs["z"].tolist()) == (np.float32, np.int32, [3])
    assert fake.answers == []


def test_an_error_of_the_request_is_the_servers_own(fake: FakeServer) -> None:
    """After it the metadata is read again, and is the same."""
    fake.answers = [metadata(), {"outputs": [0.5]}, (400, {"error": "bad row"}), metadata()]
    with RestClient(fake.url) as client:
        client.predict("m", {"x": [1]})
        with pytest.raises(ServingError, match="INVALID_ARGUMENT: bad row"):
            client.predict("m", {"x": [2]})
    assert fake.answers == []


def test_a_server_without_a_route_yet_is_asked_for_metadata_again(fake: FakeServer) -> None:
    fake.answers = [(404, b""), (404, b""), metadata(), {"outputs": [0.5]}]
    with RestClient(fake.url) as client:
        with pytest.raises(ServingError, match="NOT_FOUND"):
            client.predict("m", {"x": [1]})
        assert client.predict("m", {"x": [1]})["y"].dtype == np.float32


def test_the_first_error_ends_a_frame(fake: FakeServer) -> None:
    fake.answers = [metadata(), {"outputs": [0.5]}, (500, {"error": "kaputt"}), metadata()]
    frame = pd.DataFrame({"x": range(100)})
    with RestClient(fake.url) as client, pytest.raises(ServingError, match="INTERNAL: rows 1 to 1: kaputt"):
        client.predict_frame("m", frame, batch_size=1, max_in_flight=1)
    assert len(fake.requests) < 10, "and not a hundred"


class KServe:
    """A KServe v1 server as kserve/protocol/rest/v1_endpoints.py of kserve 0.21 answers: no metadata, rows only."""

    def __call__(self, request: Request) -> Any:
        model, _, verb = request.path.removeprefix("/v1/models/").partition(":")
        if request.method == "GET" and "/" not in model:
            missing = (404, {"error": f"Model with name {model} does not exist."})
            return {"name": model, "ready": True} if model == "m" else missing
        if verb != "predict":
            return 404, {"detail": "Not Found"}
        rows = request.document["instances"]
        if isinstance(rows[0], dict):
            return {"predictions": [{"sum": row["a"] + row["b"], "label": str(row["a"])} for row in rows]}
        return {"predictions": [[2 * value for value in row] for row in rows]}


@pytest.fixture
def kserve(fake: FakeServer) -> FakeServer:
    fake.answer = KServe()
    return fake


def test_kserve_predicts_by_rows(kserve: FakeServer) -> None:
    with RestClient(kserve.url) as client:
        client.wait_until_ready("m")
        doubled = client.predict("m", {"anything": np.array([[1.5], [2]], np.float32)})["predictions"]
        assert (doubled.dtype, doubled.tolist()) == (np.float64, [[3.0], [4.0]])
        outputs = client.predict("m", {"a": [1, 2], "b": [3, 4]})
        assert (outputs["sum"].dtype, outputs["sum"].tolist()) == (np.int64, [4, 6])
        assert outputs["label"].tolist() == [b"1", b"2"]
        assert list(client.predict("m", {"a": [1], "b": [3]}, output_filter=["sum"])) == ["sum"]
        assert sum(request.path.endswith("/metadata") for request in kserve.requests) == 1
        for b in ([3], 3):
            with pytest.raises(ServingError, match="the inputs must have the same number of rows"):
                client.predict("m", {"a": [1, 2], "b": b})
        with pytest.raises(ServingError, match=r"NOT_FOUND: .* has no such call: Not Found"):
            client.metadata("m")


def test_kserve_frames(kserve: FakeServer) -> None:
    frame = pd.DataFrame({"a": [1, 2, 3], "b": [3, 4, 5]}, index=["x", "y", "z"])
    with RestClient(kserve.url) as client:
        found = client.predict_frame("m", frame, batch_size=2)
    assert found.to_dict("list") == {"sum": [4, 6, 8], "label": ["1", "2", "3"]}
    assert found.index.tolist() == ["x", "y", "z"]


@pytest.mark.parametrize("predictions", [[[1], [2, 3]], [1, "a"], [None], [{"a": 1}, {"b": 2}]])
def test_rows_that_are_no_arrays(fake: FakeServer, predictions: Any) -> None:
    fake.answers = [(404, {"detail": "Not Found"}), {"predictions": predictions}]
    with RestClient(fake.url) as client, pytest.raises(ServingError, match=r"INTERNAL: .* does not fit"):
        client.predict("m", {"x": [1]})


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, of_client = authority.issue_cert("127.0.0.1", "m.example"), authority.issue_cert("client@example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    ca, chain, key = (tmp_path / name for name in ("ca.pem", "client.pem", "client.key"))
    authority.cert_pem.write_to_path(ca)
    of_client.cert_chain_pems[0].write_to_path(chain)
    of_client.private_key_pem.write_to_path(key)
    with running(FakeServer(answer=KServe()), context) as fake:
        url = fake.url.replace("http", "https")
        files = TlsFiles(ca, chain, key)
        for host in ({}, {"Host": "m.example"}):
            with RestClient(url, headers=host, tls=files) as client:
                assert client.status("m") == [VersionStatus(None, "AVAILABLE")]
        with (
            RestClient(url, headers={"Host": "other.example"}, tls=files, retry=NO_RETRY) as client,
            pytest.raises(ServingError, match="UNAVAILABLE"),
        ):
            client.status("m")
        for tls, message in ((None, "self-signed certificate"), (TlsFiles(ca), "cannot be reached")):
            with (
                RestClient(url, tls=tls, retry=NO_RETRY) as client,
                pytest.raises(ServingError, match=message) as raised,
            ):
                client.status("m")
            assert raised.value.code is Code.UNAVAILABLE
    with pytest.raises(ValueError, match="needs both its certificate file and its key file"):
        TlsFiles(certificate_file=chain)
    with pytest.raises(ValueError, match="is not encrypted; use https://"):
        RestClient(fake.url, tls=TlsFiles(ca))
