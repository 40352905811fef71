"""Clients for TF Serving's APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.errors import Code, ServingError

if TYPE_CHECKING:
    from serving.client.base import Client, TlsFiles
    from serving.client.grpc_client import GrpcClient
    from serving.client.rest_client import RestClient
    from serving.client.retry import RetryPolicy

__all__ = [
    "Client",
    "Code",
    "GrpcClient",
    "RestClient",
    "RetryPolicy",
    "ServingError",
    "TlsFiles",
    "connect",
]

_PLACES = {
    "Client": "serving.client.base",
    "GrpcClient": "serving.client.grpc_client",
    "RestClient": "serving.client.rest_client",
    "RetryPolicy": "serving.client.retry",
    "TlsFiles": "serving.client.base",
}


def __getattr__(name: str) -> Any:
    """The classes, imported when first asked for: `--help` needs neither numpy nor grpc."""
    import importlib

    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(url: str, **options: Any) -> Client:
    """A client for a URL.

    Args:
        url: `http://` and `https://` for REST; `host:port`, `grpc://` and `grpcs://` (with TLS) for gRPC.
        **options: those of RestClient or GrpcClient.

    Raises:
        ValueError: no such URL.

    Example:
        >>> connect("grpcs://models.example:443", token=token).predict("taxi", {"miles": [[1.5]]})
    """
    if "://" in url and not url.startswith(("grpc://", "grpcs://")):
        from serving.client.rest_client import RestClient

        return RestClient(url, **options)
    from serving.client.grpc_client import GrpcClient

    return GrpcClient(url, **options)
