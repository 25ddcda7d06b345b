"""Errors in Anthropic's form. Its clients choose the exception by the status, and show the message; there is no field
for a parameter, so the message names it. `details.error_code` is the code that errors of the other APIs have."""

from __future__ import annotations

from typing import Any

from baton.core.errors import BatonError, ContextLengthExceeded
from baton.runtime import status

_STATUS = {503: 529}
"""Anthropic's API has a status of its own for an overloaded server, after which its clients wait longer."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def http_status(http: int) -> int:
    """Returns the status with which Anthropic's API reports a fault that has status `http` in the others."""
    return _STATUS.get(http, http)


def error_body(http: int, message: str, *, code: str, param: str | None, request_id: str) -> dict[str, Any]:
    """Returns the body of an error; `http` is a status of `http_status`."""
    kind = _TYPES.get(http, "api_error" if http >= 500 else "invalid_request_error")
    shown = message if param is None or param in message else f"{param}: {message}"
    error = {"type": kind, "message": shown, "details": {"error_code": code}}
    return {"type": "error", "error": error, "request_id": request_id}


def body_of(error: BaseException, request_id: str) -> dict[str, Any]:
    """Returns the body of an error of the request or the cluster. Agents shorten the conversation and try again when
    they recognize Anthropic's text for a prompt that is too long, so it is the same here."""
    message, param = status.public_message(error), None
    if isinstance(error, ContextLengthExceeded) and error.prompt_tokens:
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_prompt_tokens} maximum"
    elif isinstance(error, BatonError) and error.param is not None:
        param = status.printable(error.param, 200)
    http, code = http_status(status.http_status(error)), status.public_code(error)
    return error_body(http, message, code=code, param=param, request_id=request_id)
