"""The one error table: how every `BatonError` is reported over HTTP and over gRPC.

A row is found by walking the error's class upwards, so a new subclass is reported like its parent until it gets its own
row. grpc is imported only when a gRPC response is built: the HTTP front end reads the same table without it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core import errors
from baton.core.errors import BatonError

if TYPE_CHECKING:
    import grpc
    from google.rpc.status_pb2 import Status

DOMAIN = "baton"
MAX_MESSAGE_CHARS = 500
_HIDDEN = "internal error; see the server's log"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """`retry` is True when a client may retry after a while, False when a retry is futile, None when that is unknown.
    `hide` keeps the message, which describes internals, out of responses."""

    http: int
    grpc: str
    type: str = "invalid_request_error"
    retry: bool | None = None
    hide: bool = False


TABLE: dict[type[BatonError], ErrorRow] = {
    errors.InvalidRequest: ErrorRow(400, "INVALID_ARGUMENT"),
    errors.Unauthenticated: ErrorRow(401, "UNAUTHENTICATED", retry=False),
    errors.NotFound: ErrorRow(404, "NOT_FOUND"),
    errors.DuplicateRequest: ErrorRow(409, "ALREADY_EXISTS", retry=False),
    errors.QuotaExceeded: ErrorRow(429, "RESOURCE_EXHAUSTED", "rate_limit_error", retry=True),
    errors.Unavailable: ErrorRow(503, "UNAVAILABLE", "server_error", retry=True),
    errors.HandoffError: ErrorRow(503, "UNAVAILABLE", "server_error", retry=True),
    errors.GrammarLimit: ErrorRow(500, "RESOURCE_EXHAUSTED", "server_error", retry=False),
    errors.KVCorrupt: ErrorRow(500, "DATA_LOSS", "server_error"),
    errors.DeadlineExceeded: ErrorRow(504, "DEADLINE_EXCEEDED", "server_error", retry=False),
    errors.Cancelled: ErrorRow(499, "CANCELLED"),
    errors.JoinRefused: ErrorRow(500, "FAILED_PRECONDITION", "server_error", retry=False, hide=True),
    errors.StartupError: ErrorRow(500, "INTERNAL", "server_error", retry=False, hide=True),
    BatonError: ErrorRow(500, "INTERNAL", "server_error", retry=False, hide=True),
}


def row(error: BaseException) -> ErrorRow:
    """Returns the row of the nearest class in the table, or BatonError's for other errors, which are bugs."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return TABLE[BatonError]


def printable(text: str, limit: int) -> str:
    """Returns `text` on one line, control and format characters escaped, with at most `limit` characters."""
    head = text[: limit + 1]
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in head)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def public_message(error: BaseException) -> str:
    if row(error).hide or not isinstance(error, BatonError):
        return _HIDDEN
    return printable(error.message, MAX_MESSAGE_CHARS)


def public_code(error: BaseException) -> str:
    return str(error.code if isinstance(error, BatonError) else BatonError.code)


def retry_after_s(error: BaseException) -> float | None:
    """Returns the seconds to wait before a retry; None when a retry is futile or the time is unknown."""
    named = error.retry_after_s if isinstance(error, BatonError) else None
    if named is not None:
        return max(named, 0.0)
    return 1.0 if row(error).retry else None


# ------------------------------------------------------------------------------------------------------------- HTTP


class HttpProblem(Exception):
    """A request refused before it reaches the model. `close` closes the connection after the answer."""

    def __init__(self, http: int, code: str, message: str, *, param: str | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.http, self.code, self.param = http, code, param
        self.message = printable(message, MAX_MESSAGE_CHARS)
        self.headers = {"connection": "close"} if close else {}


def http_status(error: BaseException) -> int:
    return row(error).http


def error_body(message: str, *, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's envelope, always with all four keys."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def http_body(error: BaseException) -> dict[str, Any]:
    param = error.param if isinstance(error, BatonError) else None
    return error_body(
        public_message(error),
        type=row(error).type,
        param=None if param is None else printable(param, 200),
        code=public_code(error),
    )


def http_headers(error: BaseException) -> dict[str, str]:
    """Returns `retry-after` in whole seconds, at least 1, and `x-should-retry` where the status alone would mislead."""
    headers: dict[str, str] = {}
    wait = retry_after_s(error)
    if wait is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait)))
    retry = row(error).retry
    if retry is not None:
        headers["x-should-retry"] = "true" if retry else "false"
    return headers


# ------------------------------------------------------------------------------------------------------------- gRPC


def grpc_code(error: BaseException) -> grpc.StatusCode:
    import grpc

    return grpc.StatusCode[row(error).grpc]


def grpc_status(error: BaseException) -> Status:
    """Returns a `google.rpc.Status`: ErrorInfo always, BadRequest for a bad field, RetryInfo if a retry may help."""
    from google.protobuf import any_pb2, duration_pb2
    from google.rpc import error_details_pb2, status_pb2

    details: list[Any] = [error_details_pb2.ErrorInfo(reason=_reason(public_code(error)), domain=DOMAIN)]
    param = error.param if isinstance(error, BatonError) else None
    message = public_message(error)
    if param is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=printable(param, 200), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    wait = retry_after_s(error)
    if wait is not None:
        delay = duration_pb2.Duration(seconds=int(wait), nanos=int(wait % 1 * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(code=grpc_code(error).value[0], message=message, details=packed)


def grpc_trailing_metadata(error: BaseException) -> tuple[tuple[str, bytes | str], ...]:
    """Returns the metadata beside the code: the details, and how long a client should wait before a retry."""
    metadata: list[tuple[str, bytes | str]] = [("grpc-status-details-bin", grpc_status(error).SerializeToString())]
    wait, retry = retry_after_s(error), row(error).retry
    if retry and wait is not None:
        metadata.append(("grpc-retry-pushback-ms", str(math.ceil(wait * 1000))))
    return tuple(metadata)


def _reason(code: str) -> str:
    return re.sub(r"[^A-Z0-9_]", "_", code.upper())
