"""Tokens on both protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.access.auth import BearerTokens
from serving.access.limits import Gate
from serving.errors import Code, ServingError
from serving.protos import MODEL_SERVICE, GetModelStatusRequest, GetModelStatusResponse
from serving.server import ModelServer
from serving.settings import GrpcSettings, RestSettings
from tests.serving import models

TOKENS = "# of the teams\nalpha\n\n  beta  \n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path


def is_let_in(tokens: BearerTokens, authorization: str | None) -> bool:
    try:
        tokens.check(authorization)
    except ServingError as error:
        return error.code is not Code.UNAUTHENTICATED
    return True


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        ("Bearer alpha", True),
        ("bearer  beta ", True),
        ("Bearer alph", False),
        ("Bearer alphaa", False),
        ("Bearer # of the teams", False),
        ("Bearer ", False),
        ("Basic alpha", False),
        ("alpha", False),
        ("Bearer é\udcff", False),
        ("", False),
        (None, False),
    ],
)
def test_tokens(file: Path, authorization: str | None, expected: bool) -> None:
    assert is_let_in(BearerTokens(file), authorization) == expected


def test_the_file_is_read_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = BearerTokens(file)
    file.write_text("gamma and more")
    assert [is_let_in(tokens, f"Bearer {each}") for each in ("alpha", "gamma and more")] == [False, True]
    for broken in ("# nothing", None):
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        caplog.clear()
        for _ in range(3):
            assert is_let_in(tokens, "Bearer gamma and more"), "the tokens before stay valid"
        assert len(caplog.messages) == 1, "requests do not fill the log"
        assert ("holds no token; write one a line" if broken else "No such file") in caplog.text


def test_a_file_without_tokens_is_refused(file: Path) -> None:
    file.write_text("# only a comment\n")
    with pytest.raises(ServingError, match="holds no token; write one a line"):
        BearerTokens(file)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("auth")
    models.copy_half_plus_two(folder / "m" / "1")
    (folder / "tokens").write_text(TOKENS)
    with ModelServer(
        "m",
        folder / "m",
        gate=Gate(BearerTokens(folder / "tokens")),
        grpc_settings=GrpcSettings(health_service=True),
        rest_settings=RestSettings(cors=True),
    ) as running:
        yield running


def ask(server: ModelServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict]:
    connection = HTTPConnection("127.0.0.1", server.rest_port, timeout=10)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, dict(response.headers)


def test_rest_wants_a_token(server: ModelServer) -> None:
    path, body = "/v1/models/m:predict", json.dumps({"instances": [1]}).encode()
    status, headers = ask(server, "POST", path, body)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert headers["Access-Control-Allow-Headers"] == "Content-Type, Authorization"
    assert ask(server, "POST", path, body, Authorization="Bearer beta")[0] == 200
    for other in ("/v1/models/m", "/models", "/openapi.json", "/nowhere"):
        assert ask(server, "GET", other)[0] == 401


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/healthz/live"), ("GET", "/healthz/ready"), ("OPTIONS", "/v1/models/m:predict")]
)
def test_health_and_preflight_need_none(server: ModelServer, method: str, path: str) -> None:
    assert ask(server, method, path, Origin="http://page.example")[0] == 200


def test_grpc_wants_a_token(server: ModelServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        status = channel.unary_unary(
            f"/{MODEL_SERVICE}/GetModelStatus",
            GetModelStatusRequest.SerializeToString,
            GetModelStatusResponse.FromString,
        )
        request = GetModelStatusRequest()
        request.model_spec.name = "m"
        for metadata in ((), (("authorization", "Bearer nobody"),)):
            with pytest.raises(grpc.RpcError) as raised:
                status(request, timeout=10, metadata=metadata)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert ("www-authenticate", "Bearer") in raised.value.trailing_metadata()
        answer = status(request, timeout=10, metadata=(("authorization", "Bearer alpha"),))
        assert answer.model_version_status[0].version == 1
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
