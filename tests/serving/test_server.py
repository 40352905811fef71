"""The whole server in this process: both protocols, hot swap, concurrent clients, request log, malformed requests."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from serving.client import GrpcClient, RestClient, connect
from serving.client.model_info import TensorInfo, VersionStatus
from serving.errors import Code, ServingError
from serving.request_log import log as request_log
from serving.server import ModelServer
from tests.serving import models
from tests.serving.waiting import wait_for

Client = GrpcClient | RestClient
X = np.array([[1.0], [np.inf], [-2.5]], np.float32)


@pytest.fixture(scope="module")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("half_plus_two")
    models.copy_half_plus_two(path / "3")
    return path


@pytest.fixture(scope="module")
def server(base_path: Path) -> Iterator[ModelServer]:
    with ModelServer("m", base_path, version_labels={"stable": 3}) as running:
        yield running


def clients_of(server: ModelServer) -> dict[str, Client]:
    return {
        "rest": RestClient(f"http://127.0.0.1:{server.rest_port}"),
        "grpc": GrpcClient(f"127.0.0.1:{server.grpc_port}"),
    }


@pytest.fixture(scope="module", params=["rest", "grpc"])
def client(request: pytest.FixtureRequest, server: ModelServer) -> Iterator[Client]:
    found = clients_of(server)[request.param]
    yield found
    found.close()


def test_clients_predict(client: Client) -> None:
    for version in (None, 3):
        outputs = client.predict("m", {"x": X}, version=version)
        assert list(outputs) == ["y"]
        assert outputs["y"].dtype == np.float32
        np.testing.assert_array_equal(outputs["y"], X / 2 + 2)


def test_clients_call_a_signature_by_name(client: Client) -> None:
    outputs = client.predict("m", {"inputs": X}, signature_name="classify_x2_to_y3")
    np.testing.assert_array_equal(outputs["scores"], X / 2 + 3)


def test_clients_read_status_and_metadata(client: Client) -> None:
    assert client.status("m") == [VersionStatus(3, "AVAILABLE")]
    metadata = client.metadata("m")
    assert metadata.version == 3
    signature = metadata.signatures["serving_default"]
    assert signature.inputs == {"x": TensorInfo("DT_FLOAT", (-1, 1))}
    assert signature.outputs == {"y": TensorInfo("DT_FLOAT", (-1, 1))}


@pytest.mark.parametrize(
    ("call", "codes", "message"),
    [
        (lambda c: c.predict("nope", {"x": X}), {Code.NOT_FOUND}, "Servable not found for request: Latest(nope)"),
        (lambda c: c.predict("m", {"x": X}, version=9), {Code.NOT_FOUND}, "Specific(m, 9)"),
        (lambda c: c.predict("m", {"z": X}), {Code.INVALID_ARGUMENT}, "x"),
        (lambda c: c.predict("m", {"x": np.array([b"a"], object)}), {Code.INVALID_ARGUMENT}, "float"),
        (
            lambda c: c.predict("m", {"x": X}, signature_name="nope"),
            {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION},
            "nope",
        ),
        (lambda c: c.status("nope"), {Code.NOT_FOUND}, "Could not find any versions of model nope"),
        (lambda c: c.metadata("nope"), {Code.NOT_FOUND}, "Latest(nope)"),
    ],
)
def test_clients_report_the_servers_errors(
    client: Client, call: Callable[[Client], Any], codes: set[Code], message: str
) -> None:
    with pytest.raises(ServingError) as raised:
        call(client)
    assert raised.value.code in codes
    assert message in raised.value.message


def test_clients_without_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    for client in (RestClient(f"http://127.0.0.1:{port}"), GrpcClient(f"127.0.0.1:{port}")):
        with pytest.raises(ServingError) as raised:
            client.predict("m", {"x": X})
        assert raised.value.code is Code.UNAVAILABLE
        client.close()


def test_clients_give_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for client in (RestClient(f"http://{address}"), GrpcClient(address)):
            started = time.monotonic()
            with pytest.raises(ServingError) as raised:
                client.predict("m", {"x": X}, timeout_seconds=0.2)
            assert raised.value.code is Code.DEADLINE_EXCEEDED
            assert time.monotonic() - started < 2
            client.close()


def test_connect_chooses_the_protocol_by_the_url(server: ModelServer) -> None:
    rest, remote = connect(f"http://127.0.0.1:{server.rest_port}/"), connect(f"127.0.0.1:{server.grpc_port}")
    assert isinstance(rest, RestClient)
    assert isinstance(remote, GrpcClient)
    assert rest.status("m") == remote.status("m")
    rest.close()
    remote.close()
    with pytest.raises(ValueError, match="a REST URL looks like http://host:port, but got 'ftp://x'"):
        connect("ftp://x")


def test_rest_client_survives_a_server_that_restarts(base_path: Path) -> None:
    first = ModelServer("m", base_path)
    first.start()
    client = RestClient(f"http://127.0.0.1:{first.rest_port}")
    client.predict("m", {"x": X})
    first.stop()
    with ModelServer("m", base_path, rest_port=first.rest_port):
        np.testing.assert_array_equal(client.predict("m", {"x": X})["y"], X / 2 + 2)
    client.close()


def test_strings_scalars_and_several_outputs_travel_both_ways(tmp_path: Path) -> None:
    types = {"text": "string", "big": "int64", "flag": "bool", "real": "float64"}
    models.save_identity(tmp_path / "1", types)
    inputs = {
        "text": np.array([["é", b"bytes"]], dtype=object),
        "big": np.array(2**53 + 1, np.int64),
        "flag": np.array([True, False]),
        "real": np.array([[0.1, np.nan]]),
    }
    with ModelServer("m", tmp_path) as server:
        for client in clients_of(server).values():
            outputs = client.predict("m", inputs)
            assert set(outputs) == set(inputs)
            assert outputs["text"].tolist() == [["é".encode(), b"bytes"]]
            for alias in ("big", "flag", "real"):
                assert outputs[alias].dtype == inputs[alias].dtype
                np.testing.assert_array_equal(outputs[alias], inputs[alias])
            client.close()


def test_many_clients_at_once(server: ModelServer) -> None:
    failures: list[BaseException] = []

    def work(client: Client, seed: int) -> None:
        generator = np.random.default_rng(seed)
        try:
            for _ in range(40):
                x = generator.normal(size=(int(generator.integers(1, 50)), 1)).astype(np.float32)
                np.testing.assert_array_equal(client.predict("m", {"x": x})["y"], x / 2 + 2)
        except BaseException as error:
            failures.append(error)

    shared = clients_of(server)
    threads = [
        threading.Thread(target=work, args=(shared[kind], seed)) for kind in ("rest", "grpc") for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in shared.values():
        client.close()
    assert failures == []


def http(server: ModelServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_malformed_requests_leave_the_server_up(server: ModelServer) -> None:
    path = "/v1/models/m:predict"
    deep = b"[" * 100_000
    for body in (b"{", b"\xff\xfe", deep, b'{"inputs": ' + deep, b'{"instances": [[1], 2]}', b"null"):
        status, content = http(server, "POST", path, body)
        assert status == 400
        assert list(json.loads(content)) == ["error"]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for method in ("PredictionService/Predict", "ModelService/GetModelStatus"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/tensorflow.serving.{method}")(b"\xff\xff\xff", timeout=5)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status, content = http(server, "POST", path, b'{"instances": [1]}')
    assert (status, json.loads(content)) == (200, {"predictions": [2.5]})


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/healthz/live", 200, b"alive"),
        ("GET", "/healthz/ready", 200, b"ready"),
        ("POST", "/healthz/ready", 404, b"404 Not Found"),
        ("GET", "/", 404, b"404 Not Found"),
        ("PUT", "/v1/models/m:predict", 400, b"Malformed request: PUT /v1/models/m:predict"),
        ("GET", "/v1/models/m?x=1", 404, b"Could not find any versions of model m?x=1"),
        ("POST", "/v1/models/m:predict?x=1", 400, b"Malformed request"),
        ("POST", "/v1/models/m:PREDICT", 400, b"Malformed request"),
        ("GET", "/v1/models/metadata", 404, b"any versions of model metadata"),
        ("GET", "/v1/models/versions/1", 400, b"Missing model name in request."),
        ("GET", "/v1/models/m/versions/4", 404, b"Could not find version 4 of model m"),
        ("GET", "/v1/models/m/labels/none", 200, b"AVAILABLE"),
        ("GET", "/v1/models/m/labels/none/metadata", 400, b"Unrecognized servable version label: none"),
        ("GET", "/V1/MODELS/m/METADATA", 200, b"serving_default"),
        ("POST", "/v1/models/m/labels/stable:predict", 400, b"The document is empty"),
        ("POST", "/v1/models/m:classify", 400, b"The document is empty"),
    ],
)
def test_routes(server: ModelServer, method: str, path: str, status: int, text: bytes) -> None:
    found, content = http(server, method, path, b"" if method == "POST" else None)
    assert found == status
    assert text in content


def test_gzip_body(server: ModelServer) -> None:
    path, body = "/v1/models/m:predict", gzip.compress(b'{"instances": [2]}')
    headers = {"Content-Encoding": "gzip"}
    assert http(server, "POST", path, body, **headers) == (200, b'{\n    "predictions": [3.0\n    ]\n}')
    for broken in (body[:-4], b"not gzip", gzip.compress(b" " * 100_000_001)):
        status, content = http(server, "POST", path, broken, **headers)
        assert (status, json.loads(content)) == (400, {"error": "JSON Parse error: The document is empty"})


def test_request_log_holds_the_requests_of_both_protocols(tmp_path: Path, base_path: Path) -> None:
    file = tmp_path / "requests"
    with ModelServer("m", base_path, request_log_file=file) as server:
        for client in clients_of(server).values():
            client.predict("m", {"x": X})
            with pytest.raises(ServingError):
                client.predict("m", {"x": np.array([b"refused"], object)})
            client.close()
    assert "request-log" not in {thread.name for thread in threading.enumerate()}
    records = list(request_log.read_records(file))
    for record in records:
        np.testing.assert_array_equal(record.inputs["x"], X)
    assert [(record.model_name, record.version, record.signature_name) for record in records] == [
        ("m", 3, "serving_default")
    ] * 2
    np.testing.assert_array_equal(records[0].outputs["y"], X / 2 + 2)


def test_new_version_is_picked_up_while_a_slow_request_runs(tmp_path: Path) -> None:
    models.save_sleeper(tmp_path / "1", scale=10)
    with ModelServer("m", tmp_path, poll_wait_seconds=0.05) as server:
        for client in clients_of(server).values():
            client.predict("m", {"x": np.array([0], np.float32)})
            answers: dict[str, float] = {}

            def slow(client: Client = client, answers: dict[str, float] = answers) -> None:
                answers["slow"] = float(client.predict("m", {"x": np.array([3], np.float32)})["y"][0])

            old = client.status("m")[0].version
            staged = tmp_path.with_name(f"{tmp_path.name}-staged-{old}")
            models.save_sleeper(staged, scale=10 * (old + 1))
            thread = threading.Thread(target=slow)
            thread.start()
            wait_for(lambda server=server, old=old: server.manager.statuses("m", old)[0].leases == 1)
            staged.rename(tmp_path / str(old + 1))
            wait_for(lambda client=client, old=old: client.status("m")[0].version == old + 1)
            wait_for(lambda client=client: client.status("m")[0].state == "AVAILABLE")
            assert thread.is_alive(), "the slow request was to outlast the swap"
            assert [item.state for item in client.status("m")[:2]] == ["AVAILABLE", "UNLOADING"]
            new = client.predict("m", {"x": np.array([0.001], np.float32)})["y"][0]
            assert new == np.float32(0.001) * np.float32(10 * (old + 1))
            thread.join()
            assert answers["slow"] == 3 * 10 * old
            wait_for(lambda client=client: client.status("m")[1].state == "END")
            client.close()


def test_broken_version_is_reported_and_the_old_one_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models.copy_half_plus_two(tmp_path / "1")
    with ModelServer("m", tmp_path, poll_wait_seconds=0.05) as server:
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "saved_model.pb").write_bytes(b"\x00\x01")
        for client in clients_of(server).values():
            wait_for(lambda client=client: len(client.status("m")) == 2 and client.status("m")[0].state == "END")
            broken, good = client.status("m")
            assert (broken.version, broken.state, broken.error_code) == (2, "END", "INTERNAL")
            assert "cannot load the SavedModel in" in broken.error_message
            assert good == VersionStatus(1, "AVAILABLE")
            np.testing.assert_array_equal(client.predict("m", {"x": X})["y"], X / 2 + 2)
            client.close()
    assert "version 2 does not load" in caplog.text


@pytest.mark.parametrize("kind", ["rest", "grpc"])
def test_stop_waits_for_what_is_under_way(tmp_path: Path, kind: str) -> None:
    models.save_sleeper(tmp_path / "1", scale=1)
    server = ModelServer("m", tmp_path)
    server.start()
    client = clients_of(server)[kind]
    client.predict("m", {"x": np.array([0], np.float32)})
    answers: list[float] = []
    thread = threading.Thread(target=lambda: answers.extend(client.predict("m", {"x": np.array([1], np.float32)})["y"]))
    thread.start()
    wait_for(lambda: server.manager.statuses("m", 1)[0].leases == 1)
    server.stop(grace_seconds=10)
    thread.join()
    assert answers == [1.0]
    assert [version.state.name for version in server.manager.statuses("m", None)] == ["END"]
    client.close()


def test_rest_timeout_is_504(tmp_path: Path) -> None:
    models.save_sleeper(tmp_path / "1", scale=1)
    with ModelServer("m", tmp_path, rest_timeout_seconds=0.1) as server:
        status, content = http(server, "POST", "/v1/models/m:predict", b'{"inputs": [0.5]}')
    assert status == 504
    assert "Timed out" in json.loads(content)["error"]


def test_ports_in_use_say_so_and_leave_nothing_open(server: ModelServer, base_path: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"REST cannot listen on 127.0.0.1:{server.rest_port}"):
        ModelServer("m", base_path, rest_port=server.rest_port).start()
    with pytest.raises(OSError, match=rf"gRPC cannot listen on 127.0.0.1:{server.grpc_port}; is the port in use"):
        ModelServer("m", base_path, grpc_port=server.grpc_port, request_log_file=tmp_path / "log").start()
