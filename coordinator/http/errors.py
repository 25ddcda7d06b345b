"""Every answer that is not a success, in OpenAI's format. An `HttpProblem` is a fault of the request as HTTP; a
`BatonError` is a fault of its content or of the cluster, and the one error table maps it to a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from baton.core.errors import BatonError
from baton.rpc import status

log = logging.getLogger("baton.http")

_REASONS = {
    404: ("not_found", "no such path: OpenAI's completions, chat completions, responses and models APIs are served"),
    405: ("method_not_allowed", "this path does not support that method"),
}


class HttpProblem(Exception):
    """A request refused before it reaches the model. `close` closes the connection after the answer."""

    def __init__(self, http: int, code: str, message: str, *, param: str | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.http = http
        self.body = status.error_body(
            status.printable(message, status.MAX_MESSAGE_CHARS), type="invalid_request_error", param=param, code=code
        )
        self.headers = {"connection": "close"} if close else {}


def json_response(content: Any, *, http: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), http, headers, media_type="application/json")


def error_response(error: BaseException) -> Response:
    """Returns the answer to any exception. Internal errors are logged, and their details are not sent to the client."""
    if isinstance(error, HttpProblem):
        return json_response(error.body, http=error.http, headers=error.headers)
    if isinstance(error, HTTPException):
        code, message = _REASONS.get(error.status_code, ("invalid_value", "bad request"))
        body = status.error_body(message, type="invalid_request_error", code=code)
        return json_response(body, http=error.status_code, headers=error.headers)
    note(error)
    return json_response(status.http_body(error), http=status.http_status(error), headers=status.http_headers(error))


def note(error: BaseException) -> None:
    """Logs internal errors, with their traceback."""
    if status.row(error).hide:
        expected = isinstance(error, BatonError) and error.__traceback__ is None
        log.error("internal error: %s", type(error).__name__, exc_info=None if expected else error)
