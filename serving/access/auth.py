"""Bearer tokens (RFC 6750) from a file, for REST's `Authorization` header and gRPC's metadata of that name."""

from __future__ import annotations

import hashlib
import hmac
import logging
import threading
from pathlib import Path

from serving.errors import Code, ServingError, invalid_argument

logger = logging.getLogger(__name__)


class BearerTokens:
    """The tokens that let a request in: one a line; empty lines and those that begin with # do not count.

    Args:
        path: the file; it is read again when it changes, and the tokens before stay valid while it cannot be read.

    Raises:
        ServingError: INVALID_ARGUMENT when it holds no token.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = self._state()
        self._digests = _read(path)

    def _state(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def check(self, authorization: str | None) -> bytes:
        """See that a request may come in.

        Args:
            authorization: its header; None when it has none.

        Returns:
            The digest of its token, which tells one client from another.

        Raises:
            ServingError: UNAUTHENTICATED.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise ServingError(Code.UNAUTHENTICATED, "a token is needed: Authorization: Bearer TOKEN")
        digest = _digest(token.strip())
        # All are compared, so that the time tells nothing.
        if not sum(hmac.compare_digest(digest, known) for known in self._current()):
            raise ServingError(Code.UNAUTHENTICATED, "the token is not valid")
        return digest

    def _current(self) -> list[bytes]:
        with self._lock:
            state = self._state()
            if state != self._seen:
                self._seen = state
                try:
                    self._digests = _read(self._path)
                    logger.info("%s is read again: %d tokens", self._path, len(self._digests))
                except (ServingError, OSError) as error:
                    logger.error("the tokens before stay valid: %s", error)
            return self._digests


def _read(path: Path) -> list[bytes]:
    lines = (line.strip() for line in path.read_text("utf-8", "surrogateescape").splitlines())
    digests = [_digest(line) for line in lines if line and not line.startswith("#")]
    if not digests:
        raise invalid_argument(f"{path} holds no token; write one a line")
    return digests


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
