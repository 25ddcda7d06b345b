"""The body of a JSON request: its type checked, its size capped while it is read, its slowness bounded."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import ClientDisconnect, Request

from baton.core.errors import Cancelled
from coordinator.http_errors import HttpProblem

_JSON = re.compile(r'application/json\s*(;\s*charset\s*=\s*"?utf-8"?\s*)?', re.IGNORECASE)


async def read_json_bytes(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        HttpProblem: 415 not declared as JSON, 413 over `max_bytes`, 408 not complete after `timeout_s`.
        Cancelled: the client left before it was complete.
    """
    kinds = request.headers.getlist("content-type")
    if len(kinds) != 1 or _JSON.fullmatch(kinds[0].strip()) is None:
        raise HttpProblem(
            415, "unsupported_media_type", "the content-type must be application/json", param="content-type"
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpProblem(
            415, "unsupported_media_type", "a content-encoding is not supported", param="content-encoding"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                pieces.append(piece)
    except TimeoutError:
        raise HttpProblem(408, "request_timeout", f"the body took over {timeout_s:g} s", close=True) from None
    except ClientDisconnect:
        raise Cancelled("the client left while its body was read") from None
    return b"".join(pieces)


def _too_large(max_bytes: int) -> HttpProblem:
    return HttpProblem(413, "request_too_large", f"the body may have {max_bytes} bytes")
