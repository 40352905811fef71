"""Data on the web, https:// or http://, fetched by fsspec.

Headers, such as a token, come from fsspec's own configuration: FSSPEC_HTTPS='{"headers": {"Authorization": "Bearer ..."}}'.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from pathlib import Path

from components.errors import DataError

_PATIENCE_SECONDS = 60
_STATE = ("size", "ETag", "Last-Modified", "Content-MD5", "Digest")


def is_web(path: str | None) -> bool:
    """Whether a path is an address on the web."""
    return path is not None and path.startswith(("https://", "http://"))


def local_name(name: str) -> str:
    """The name of a file of this machine for one of an address, without its query."""
    return name.partition("?")[0].partition("#")[0]


class WebFolder:
    """What lies under an address, as `serving.object_store.Folder` has it of a store.

    Args:
        uri: https://host/path.
    """

    def __init__(self, uri: str) -> None:
        import aiohttp
        import fsspec

        self.uri = uri.rstrip("/")
        scheme = uri.partition("://")[0]
        # A large file may take hours, but not a minute in which nothing comes. Proxies are where the environment says.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_PATIENCE_SECONDS, sock_read=_PATIENCE_SECONDS)
        client = {"trust_env": True, "timeout": timeout}
        self._files = fsspec.filesystem(scheme, skip_instance_cache=True, client_kwargs=client)

    def files(self) -> dict[str, str]:
        """Name below the folder -> size and ETag, of what its page links to.

        Raises:
            DataError: the server does not answer, or there is no such page.
        """
        with self._explained(self.uri):
            found = [address for address in self._files.find(f"{self.uri}/") if address.startswith(f"{self.uri}/")]
        names = [address.removeprefix(f"{self.uri}/") for address in found]
        return {name: state for name in sorted(names) if (state := self.state(name)) is not None}

    def state(self, name: str) -> str | None:
        """Size and ETag or time of a file; None if there is none.

        Raises:
            DataError: the server does not answer.
        """
        address = f"{self.uri}/{name}"
        with self._explained(address):
            try:
                info = self._files.info(address)
            except FileNotFoundError as error:
                # fsspec says so of every failure; what it was is the cause.
                cause = error.__cause__
                if cause is not None and not _says_not_found(cause):
                    raise cause from None
                return None
        # The page of a folder is no data.
        return None if info["type"] != "file" else " ".join(f"{info.get(key)}" for key in _STATE)

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy files below a folder of this machine.

        Raises:
            DataError: the server does not answer, or stops before a file is whole.
        """
        for name in names:
            target = folder / local_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._explained(f"{self.uri}/{name}"):
                self._files.get_file(f"{self.uri}/{name}", str(target))

    @contextlib.contextmanager
    def _explained(self, address: str) -> Iterator[None]:
        import aiohttp

        try:
            yield
        except FileNotFoundError as error:
            raise DataError(f"data.path: there is no {address}. Correct the address.") from error
        # Of a timeout aiohttp makes an OSError in its newer releases, of asyncio in the older ones.
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"data.path: {address} cannot be fetched: {reason}. Run again, or copy it here.") from error


def _says_not_found(error: BaseException) -> bool:
    return isinstance(error, FileNotFoundError) or getattr(error, "status", None) == HTTPStatus.NOT_FOUND
