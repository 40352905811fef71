"""TLS on both protocols: what is refused, who is let in, and that new certificates take effect at once."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving.access.tls import TlsFile
from serving.errors import Code, ServingError
from serving.rest.http_server import HttpServer
from serving.rest.rest_api import Request, Response
from serving.rpc.grpc_server import GrpcServer
from serving.settings import GrpcSettings, RestSettings

CA = trustme.CA()
OTHER_CA = trustme.CA()


def issue(folder: Path, ca: trustme.CA = CA, **settings: datetime.datetime) -> None:
    """Put a new key and certificate of localhost where the config looks for them."""
    certificate = ca.issue_cert("localhost", "127.0.0.1", **settings)
    for name, data in (
        ("tls.key", certificate.private_key_pem.bytes()),
        ("tls.crt", b"".join(blob.bytes() for blob in certificate.cert_chain_pems)),
    ):
        (folder / "new").write_bytes(data)
        (folder / "new").rename(folder / name)


def write_config(folder: Path, text: str = "") -> Path:
    text = text or 'server_key: "FOLDER/tls.key" server_cert: "FOLDER/tls.crt"'
    path = folder / "ssl.config"
    path.write_text(text.replace("FOLDER", str(folder)))
    return path


def inline(text: bytes) -> str:
    return text.decode().replace("\n", "\\n")


async def echo(request: Request) -> Response:
    return Response(200, request.target.encode(), "text/plain")


class Servers:
    """REST and gRPC with the same TLS."""

    def __init__(self, tls: TlsFile) -> None:
        self._rest = HttpServer(echo, "127.0.0.1", 0, 5, RestSettings(tls=tls))
        self._grpc = GrpcServer([], "127.0.0.1:0", GrpcSettings(health_service=True, tls=tls))
        self._rest.start()
        self._grpc.start()

    def stop(self) -> None:
        self._rest.stop(0)
        self._grpc.stop(None).wait(5)

    def ask_rest(self, context: ssl.SSLContext) -> tuple[bytes, bytes | None]:
        """The first line of the answer, and the certificate."""
        with (
            socket.create_connection(("127.0.0.1", self._rest.port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET /x HTTP/1.1\r\nConnection: close\r\n\r\n")
            answer = connection.recv(65_536)
            if not answer:
                raise ConnectionError("the server closed")
            return answer.splitlines()[0], connection.getpeercert(binary_form=True)

    def ask_grpc(self, credentials: grpc.ChannelCredentials) -> int:
        with grpc.secure_channel(f"localhost:{self._grpc.port}", credentials) as channel:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path)
    return tmp_path


@pytest.fixture
def servers(folder: Path) -> Iterator[Servers]:
    running = Servers(TlsFile(write_config(folder)))
    yield running
    running.stop()


def trusting(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


def grpc_trusting(ca: trustme.CA) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca.cert_pem.bytes())


def test_both_protocols_are_encrypted(servers: Servers) -> None:
    assert servers.ask_rest(trusting(CA))[0] == b"HTTP/1.1 200 OK"
    assert servers.ask_grpc(grpc_trusting(CA)) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(ssl.SSLCertVerificationError):
        servers.ask_rest(trusting(OTHER_CA))
    with pytest.raises(grpc.RpcError) as raised:
        servers.ask_grpc(grpc_trusting(OTHER_CA))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_older_than_tls_1_2_is_refused(folder: Path) -> None:
    tls = TlsFile(write_config(folder))
    for context in (tls.server_context(), tls.current().context):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_new_certificates_take_effect_and_broken_ones_do_not(
    servers: Servers, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = servers.ask_rest(trusting(CA))[1]
    issue(folder)
    second = servers.ask_rest(trusting(CA))[1]
    assert second != first
    (folder / "tls.crt").write_bytes(CA.cert_pem.bytes())
    assert servers.ask_rest(trusting(CA))[1] == second
    assert servers.ask_grpc(grpc_trusting(CA)) == health_pb2.HealthCheckResponse.SERVING
    assert caplog.text.count("the key and certificates before stay in use") == 1
    assert "server_key is not the key of server_cert" in caplog.text
    issue(folder, OTHER_CA)
    assert servers.ask_grpc(grpc_trusting(OTHER_CA)) == health_pb2.HealthCheckResponse.SERVING
    assert servers.ask_rest(trusting(OTHER_CA))[0] == b"HTTP/1.1 200 OK"


def test_only_clients_of_the_authority_are_let_in(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate = CA.issue_cert("localhost")
    text = (
        f'server_key: "{inline(certificate.private_key_pem.bytes())}" '
        f'server_cert: "{inline(certificate.cert_chain_pems[0].bytes())}" '
        f'custom_ca: "{inline(CA.cert_pem.bytes())}" client_verify: true'
    )
    running = Servers(TlsFile(write_config(folder, text)))
    try:
        for client_ca in (CA, OTHER_CA, None):
            context, pair = trusting(CA), (None, None)
            if client_ca is not None:
                client = client_ca.issue_cert("client")
                client.configure_cert(context)
                pair = (client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes())
            credentials = grpc.ssl_channel_credentials(CA.cert_pem.bytes(), *pair)
            if client_ca is CA:
                assert running.ask_rest(context)[0] == b"HTTP/1.1 200 OK"
                assert running.ask_grpc(credentials) == health_pb2.HealthCheckResponse.SERVING
                continue
            with pytest.raises((ssl.SSLError, ConnectionError)):
                running.ask_rest(context)
            with pytest.raises(grpc.RpcError) as raised:
                running.ask_grpc(credentials)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        write_config(folder, text.replace(inline(CA.cert_pem.bytes()), inline(OTHER_CA.cert_pem.bytes())))
        context, client = trusting(CA), OTHER_CA.issue_cert("client")
        client.configure_cert(context)
        assert running.ask_rest(context)[0] == b"HTTP/1.1 200 OK", "another authority has taken effect"
        write_config(folder, text.replace("client_verify: true", ""))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            running.ask_rest(trusting(CA))
        assert "client_verify is changed, which takes effect after a restart only" in caplog.text
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server_kex: ''", 'no field named "server_kex"'),
        ("", "server_key is no PEM text; give one, or the absolute path of a file with one"),
        ('server_key: "FOLDER/tls.key"', "server_cert is no PEM text"),
        ('server_key: "FOLDER/other.key" server_cert: "FOLDER/tls.crt"', "server_key is not the key of server_cert"),
        ('server_key: "FOLDER/tls.crt" server_cert: "FOLDER/tls.crt"', "cannot be used"),
        (
            'server_key: "FOLDER/tls.key" server_cert: "FOLDER/old.crt"',
            "server_cert cannot be used: certificate has ex",
        ),
        ('server_key: "FOLDER/tls.key" server_cert: "FOLDER/early.crt"', "certificate is not yet valid"),
        (
            'server_key: "FOLDER/tls.key" server_cert: "FOLDER/tls.crt" client_verify: true',
            "client_verify needs custom_ca",
        ),
    ],
)
def test_what_is_refused_at_the_start(folder: Path, text: str, message: str) -> None:
    key = CA.issue_cert("localhost").private_key_pem.bytes()
    (folder / "other.key").write_bytes(key)
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.timezone.utc)
    for name, start in (("old", now - 3 * day), ("early", now + day)):
        if name in text:
            issue(folder, not_before=start, not_after=start + day)
            os.replace(folder / "tls.crt", folder / f"{name}.crt")
    path = write_config(folder, text or "client_verify: false")
    with pytest.raises(ServingError) as raised:
        TlsFile(path)
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert str(path) in raised.value.message
    assert message in raised.value.message


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/nowhere/key"):
        TlsFile(write_config(folder, 'server_key: "/nowhere/key"'))
