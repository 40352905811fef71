"""The one error type of the server and its clients, and the one table from its code to HTTP and gRPC."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Canonical status codes; the numbers are gRPC's (https://grpc.github.io/grpc/core/md_doc_statuscodes.html)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


# tensorflow_serving/model_servers/http_server.cc, ToHTTPStatusCode.
HTTP_STATUS: dict[Code, int] = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.UNKNOWN: 500,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.DATA_LOSS: 500,
    Code.UNAUTHENTICATED: 401,
}

# What a client makes of an HTTP status; several codes share 400, 409 and 500, the commonest one stands for them.
_CODE_OF_HTTP: dict[int, Code] = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    500: Code.INTERNAL,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}


class ServingError(Exception):
    """A request that failed, on the server or at the client.

    Args:
        code: the canonical status.
        message: what a client gets to read.
        retry_after_seconds: when it may be worth to try again, if that is known.
    """

    def __init__(self, code: Code, message: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retry_after_seconds = retry_after_seconds


def invalid_argument(message: str) -> ServingError:
    """The commonest error, in short."""
    return ServingError(Code.INVALID_ARGUMENT, message)


def code_from_http(status: int) -> Code:
    """The code a client reports for an HTTP status; UNKNOWN for one that TF Serving does not send."""
    return _CODE_OF_HTTP.get(status, Code.UNKNOWN)
