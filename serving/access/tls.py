"""TLS for both protocols: key and certificates from TF Serving's SSLConfig, read again when they change.

The message is that of tensorflow_serving/config/ssl_config.proto, which the wheel of tensorflow-serving-api lacks. Its
values are PEM texts. Ours: a value that is an absolute path names a file with the PEM text, as cert-manager writes them.

Example:
    server_key: "/certs/tls.key"
    server_cert: "/certs/tls.crt"
    custom_ca: "/certs/ca.crt"
    client_verify: true
"""

from __future__ import annotations

import contextlib
import logging
import ssl
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from serving.errors import ServingError, invalid_argument
from serving.message_class import message_class

logger = logging.getLogger(__name__)

_Message = message_class(
    "tensorflow.serving.SSLConfig",
    {"server_key": "string", "server_cert": "string", "custom_ca": "string", "client_verify": "bool"},
)


@dataclass(frozen=True)
class TlsConfig:
    """One reading of the file, checked.

    Attributes:
        key: the server's private key, PEM.
        certificate: its certificate, PEM, with those in between up to the authority's, if any.
        client_ca: the authorities whose clients are let in; empty when none is asked for a certificate.
        context: the same for Python's ssl.
    """

    key: bytes = field(repr=False)
    certificate: bytes
    client_ca: bytes
    context: ssl.SSLContext = field(compare=False)


class TlsFile:
    """An SSLConfig file and the files that it names.

    Args:
        path: the SSLConfig in protobuf's text format.

    Raises:
        ServingError: INVALID_ARGUMENT when it is no SSLConfig, or key and certificate cannot be used.
        OSError: a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._config, self._files = _read(path)
        self._seen: Any = None  # so the first connection reads again what may have changed since

    def current(self) -> TlsConfig:
        """The config, read again if a file has changed; the one before stays in use while the new one is wrong."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen = state  # from before the reading, lest a change in between be missed
                try:
                    self._take(*_read(self._path))
                except (ServingError, OSError) as error:
                    logger.error("TLS: the key and certificates before stay in use: %s", error)
            return self._config

    def _take(self, config: TlsConfig, files: list[Path]) -> None:
        if bool(config.client_ca) != bool(self._config.client_ca):
            raise invalid_argument(f"{self._path}: client_verify is changed, which takes effect after a restart only")
        if files != self._files:
            self._files, self._seen = files, None
        if config != self._config:
            self._config = config
            logger.info("TLS: new connections get the key and certificates that %s names now", self._path)

    def _state(self) -> Any:
        states = []
        for file in self._files:
            with contextlib.suppress(OSError):
                stat = file.stat()
                states.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return states

    def server_context(self) -> ssl.SSLContext:
        """A context for Python's ssl with which each new connection gets the current config."""
        config = self.current()
        context = _new_context(config.key, config.certificate, config.client_ca)

        def use_current(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self.current().context

        context.sni_callback = use_current
        return context

    def grpc_credentials(self) -> Any:
        """Credentials for a gRPC server with which each new connection gets the current config."""
        import grpc

        used = self.current()

        def certificates(config: TlsConfig) -> Any:
            pairs = [(config.key, config.certificate)]
            return grpc.ssl_server_certificate_configuration(pairs, config.client_ca or None)

        def fetch() -> Any:
            nonlocal used
            found = self.current()
            if found is used:
                return None
            used = found
            return certificates(found)

        return grpc.dynamic_ssl_server_credentials(certificates(used), fetch, bool(used.client_ca))


def _read(path: Path) -> tuple[TlsConfig, list[Path]]:
    try:
        message = text_format.Parse(path.read_bytes(), _Message())
    except text_format.ParseError as error:
        raise invalid_argument(f"{path}: Error parsing text-format tensorflow.serving.SSLConfig: {error}") from error
    files = [path]

    def pem(name: str) -> bytes:
        value = getattr(message, name)
        if value.startswith("/"):
            files.append(Path(value))
            return files[-1].read_bytes()
        return value.encode()

    key, certificate, authority = pem("server_key"), pem("server_cert"), pem("custom_ca")
    for name, value in (("server_key", key), ("server_cert", certificate)):
        if b"-----BEGIN" not in value:
            raise invalid_argument(f"{path}: {name} is no PEM text; give one, or the absolute path of a file with one")
    if message.client_verify and not authority:
        raise invalid_argument(f"{path}: client_verify needs custom_ca, the authority of the clients' certificates")
    try:
        context = _new_context(key, certificate, authority if message.client_verify else b"")
    except ssl.SSLError as error:
        raise invalid_argument(f"{path}: {_explain(error)}") from error
    return TlsConfig(key, certificate, authority if message.client_verify else b"", context), files


def _new_context(key: bytes, certificate: bytes, client_ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with tempfile.TemporaryDirectory() as folder:  # Python takes them from files only; nobody else may enter the folder
        pair = Path(folder) / "pair.pem"
        pair.write_bytes(key + b"\n" + certificate)
        context.load_cert_chain(
            pair, password=""
        )  # a key with a passphrase is an error, not a question at the terminal
    _shake_hands(context, certificate)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
    return context


def _shake_hands(server: ssl.SSLContext, certificate: bytes) -> None:
    """A handshake in memory with a client that trusts the certificate itself: fails when it is out of date.

    Raises:
        ssl.SSLError: the client refuses the certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=certificate.decode("ascii", "replace"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"server_cert cannot be used: {error.verify_message}"
    if error.reason == "KEY_VALUES_MISMATCH":
        return "server_key is not the key of server_cert"
    return f"server_key, server_cert or custom_ca cannot be used ({error.reason or error}); the key must have no passphrase"
