"""The body of a JSON request: its type checked, its size capped while it is read, its slowness bounded, and parsed
without holding up the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from baton.core.errors import Cancelled, Unavailable
from coordinator.http.errors import HttpProblem

INLINE_BYTES = 64 * 1024
MAX_WAITING_BYTES = 32 * 1024 * 1024
_T = TypeVar("_T")
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


class BodyParser:
    """Parses small bodies at once and large ones on a thread of its own, one after the other, so that streams go on.

    Its state: the bytes of large bodies that wait for that thread or are on it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="parse")
        self._bytes = 0

    async def parse(self, parse: Callable[[bytes], _T], body: bytes) -> _T:
        """`parse(body)`, with what it raises.

        Raises:
            Unavailable: other large bodies wait, and with this one they would have over `MAX_WAITING_BYTES`.
        """
        if len(body) <= INLINE_BYTES:
            return parse(body)
        if self._bytes and self._bytes + len(body) > MAX_WAITING_BYTES:
            raise Unavailable("too many large bodies wait to be parsed", retry_after_s=1)
        self._bytes += len(body)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, parse, body)
        finally:
            self._bytes -= len(body)


def _too_large(max_bytes: int) -> HttpProblem:
    return HttpProblem(413, "request_too_large", f"the body may have {max_bytes} bytes")
