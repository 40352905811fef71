"""The gRPC client against a server that answers as the test says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from serving import protos
from serving.client import GrpcClient, RetryPolicy, ServingError, TlsFiles
from serving.client.model_info import VersionStatus
from serving.errors import Code
from tests.serving.test_client_retry import Clock

READY = [VersionStatus(3, "AVAILABLE")]
NO_RETRY = RetryPolicy(max_retries=0)


@dataclass
class FakeServer(grpc.GenericRpcHandler):
    """Answers a status call with the next of `errors` (code, message, pushback), then with one version."""

    errors: list[tuple[grpc.StatusCode, str, str]] = field(default_factory=list)
    calls: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    port: int = 0

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        def handle(body: bytes, context: grpc.ServicerContext) -> bytes:
            metadata = dict(context.invocation_metadata())
            authority = context._rpc_event.call_details.host.decode()
            self.calls.append((details.method, authority, metadata))
            if self.errors:
                code, message, pushback = self.errors.pop(0)
                if pushback:
                    context.set_trailing_metadata((("grpc-retry-pushback-ms", pushback),))
                context.abort(code, message)
            response = protos.GetModelStatusResponse()
            response.model_version_status.add(version=3, state=30).status.SetInParent()
            return response.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(handle)


def serve(fake: FakeServer, credentials: grpc.ServerCredentials | None = None) -> grpc.Server:
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[fake])
    if credentials is None:
        fake.port = server.add_insecure_port("127.0.0.1:0")
    else:
        fake.port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    found = FakeServer()
    server = serve(found)
    yield found
    server.stop(None).wait()


def test_overload_is_retried_when_the_server_says(fake: FakeServer) -> None:
    clock = Clock()
    fake.errors = [
        (grpc.StatusCode.UNAVAILABLE, "loading", ""),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "2000"),
    ]
    with GrpcClient(f"grpc://127.0.0.1:{fake.port}", retry=clock.policy()) as client:
        assert client.status("m") == READY
    assert clock.waits == [0.1, 2.2]


@pytest.mark.parametrize("pushback", ["-1", "soon"])
def test_the_server_forbids_a_retry(fake: FakeServer, pushback: str) -> None:
    fake.errors = [(grpc.StatusCode.UNAVAILABLE, "never again", pushback)]
    with GrpcClient(f"127.0.0.1:{fake.port}") as client, pytest.raises(ServingError, match="never again"):
        client.status("m")


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL])
def test_errors_that_are_not_retried(fake: FakeServer, code: grpc.StatusCode) -> None:
    fake.errors = [(code, "no", "")]
    with GrpcClient(f"127.0.0.1:{fake.port}") as client, pytest.raises(ServingError) as raised:
        client.status("m")
    assert raised.value.code is Code(code.value[0])
    assert len(fake.calls) == 1


def test_a_server_that_starts_late_is_reached() -> None:
    """The channel connects again for a retry."""
    fake = FakeServer()
    servers = [serve(fake)]
    servers.pop().stop(None).wait()

    def start(seconds: float) -> None:
        if not servers:
            server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[fake])
            server.add_insecure_port(f"127.0.0.1:{fake.port}")
            server.start()
            servers.append(server)
        time.sleep(0.02)

    with GrpcClient(f"127.0.0.1:{fake.port}", retry=RetryPolicy(max_retries=500, sleep=start)) as client:
        assert client.status("m") == READY
    servers.pop().stop(None).wait()


def test_headers(fake: FakeServer) -> None:
    headers = {"Host": "m.ns.example.com", "X-Trace": "7"}
    with GrpcClient(f"127.0.0.1:{fake.port}", token="s3cret", headers=headers) as client:
        client.status("m")
    [(method, authority, metadata)] = fake.calls
    assert method == "/tensorflow.serving.ModelService/GetModelStatus"
    assert authority == "m.ns.example.com"
    assert (metadata["authorization"], metadata["x-trace"]) == ("Bearer s3cret", "7")


def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, of_client = authority.issue_cert("127.0.0.1", "m.example"), authority.issue_cert("client@example.com")
    ca, chain, key = (tmp_path / name for name in ("ca.pem", "client.pem", "client.key"))
    authority.cert_pem.write_to_path(ca)
    of_client.cert_chain_pems[0].write_to_path(chain)
    of_client.private_key_pem.write_to_path(key)
    pair = (certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())
    fake = FakeServer()
    server = serve(fake, grpc.ssl_server_credentials([pair], ca.read_bytes(), require_client_auth=True))
    files = TlsFiles(ca, chain, key)
    for host in ({}, {"Host": "m.example"}):
        with GrpcClient(f"grpcs://127.0.0.1:{fake.port}", headers=host, tls=files) as client:
            assert client.status("m") == READY
    with (
        GrpcClient(
            f"grpcs://127.0.0.1:{fake.port}", headers={"Host": "other.example"}, tls=files, retry=NO_RETRY
        ) as client,
        pytest.raises(ServingError, match="UNAVAILABLE"),
    ):
        client.status("m")
    for tls in (None, TlsFiles(ca)):
        with (
            GrpcClient(f"grpcs://127.0.0.1:{fake.port}", tls=tls, retry=NO_RETRY) as client,
            pytest.raises(ServingError, match=f"UNAVAILABLE: 127.0.0.1:{fake.port}: "),
        ):
            client.status("m")
    server.stop(None).wait()
    with pytest.raises(ValueError, match="is not encrypted; use grpcs://"):
        GrpcClient("grpc://127.0.0.1:1", tls=TlsFiles(ca))
