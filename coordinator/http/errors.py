"""Every answer that is not a success, in OpenAI's format, or in that of another API for its clients. An `HttpProblem`
is a fault of the request as HTTP; a `BatonError` is a fault of its content or of the cluster, and the one error table
maps it to a status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from baton.core.codes import ErrorCode
from baton.core.errors import BatonError
from baton.runtime import status
from baton.runtime.status import HttpProblem
from coordinator.anthropic import errors as anthropic_errors
from coordinator.inference.render import error_body

REQUEST_ID = "baton.request_id"
MESSAGES = "/v1/messages"

log = logging.getLogger("baton.http")

_SERVED = "OpenAI's completions, chat completions, responses and models APIs, Anthropic's messages API and the Open "
_SERVED += "Inference Protocol are served"
_REASONS = {
    404: ("not_found", f"no such path: {_SERVED}"),
    405: ("method_not_allowed", "this path does not support that method"),
}


def json_response(content: Any, *, http: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), http, headers, media_type="application/json")


def is_for_anthropic(scope: Scope) -> bool:
    """Returns whether a request is of a client of Anthropic's API: it has a path of that API, or its header."""
    if scope["path"] == MESSAGES or scope["path"].startswith(MESSAGES + "/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def is_for_inference(scope: Scope) -> bool:
    """Returns whether a request is of the Open Inference Protocol."""
    return bool(scope["path"] == "/v2" or scope["path"].startswith("/v2/"))


def error_response(error: BaseException, scope: Scope) -> Response:
    """Returns the answer to any exception, in the form of the API that the request is for. Internal errors are logged,
    and their details are not sent to the client."""
    if isinstance(error, HttpProblem):
        return _problem(error.http, error.code, error.message, error.param, error.headers, scope)
    if isinstance(error, HTTPException):
        code, message = _REASONS.get(error.status_code, (ErrorCode.INVALID_VALUE, "bad request"))
        return _problem(error.status_code, code, message, None, error.headers, scope)
    note(error)
    http, headers = status.http_status(error), status.http_headers(error)
    if is_for_anthropic(scope):
        body = anthropic_errors.body_of(error, scope.get(REQUEST_ID, ""))
        return json_response(body, http=anthropic_errors.http_status(http), headers=headers)
    body = error_body(error) if is_for_inference(scope) else status.http_body(error)
    return json_response(body, http=http, headers=headers)


def _problem(
    http: int, code: str, message: str, param: str | None, headers: Mapping[str, str] | None, scope: Scope
) -> Response:
    if is_for_anthropic(scope):
        http = anthropic_errors.http_status(http)
        body = anthropic_errors.error_body(http, message, code=code, param=param, request_id=scope.get(REQUEST_ID, ""))
    elif is_for_inference(scope):
        body = {"error": f"{code}: {message}"}
    else:
        body = status.error_body(message, type="invalid_request_error", param=param, code=code)
    return json_response(body, http=http, headers=headers)


def note(error: BaseException) -> None:
    """Logs internal errors, with their traceback."""
    if status.row(error).hide:
        expected = isinstance(error, BatonError) and error.__traceback__ is None
        log.error("internal error: %s", type(error).__name__, exc_info=None if expected else error)
