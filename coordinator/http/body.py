"""The body of a JSON request: checks its type, limits its size and its duration while it is read, and parses it without
blocking the event loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from baton.core.errors import Cancelled, InvalidRequest, Unavailable
from baton.runtime.process import ChildExecutor, start_child
from baton.runtime.status import HttpProblem
from coordinator.openai.validation import count_values

INLINE_BYTES = 64 * 1024
SMALL_BYTES = 16 * 1024  # per connection, so 256 MiB in total
PARSE_S = 20.0
MAX_VALUES = 100_000
MAX_WAITING_BYTES = 32 * 1024 * 1024
MAX_READING_BYTES = 64 * 1024 * 1024
SCHEMAS = "coordinator.openai.schema"  # with what it imports, nearly all that parsing needs
_T = TypeVar("_T")
_JSON = re.compile(r'application/json\s*(;\s*charset\s*=\s*"?utf-8"?\s*)?', re.IGNORECASE)


class BodyReader:
    """Reads bodies. State: the bytes held of incomplete bodies, over all clients."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._reading = 0

    async def read(self, request: Request, *, undeclared: bool = False) -> bytes:
        """Returns the whole body, which must be declared as JSON; `undeclared` ones are for clients that declare no
        type, or bytes, and are no browser.

        Raises:
            HttpProblem: 415 not declared as JSON, 413 too large, 408 not complete in time.
            Unavailable: too many bytes of other bodies are held.
            Cancelled: the client disconnected before the body was complete.
        """
        check_declared(request, self._max_bytes, undeclared=undeclared)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in request.stream():
                    size += len(piece)
                    self._reading += len(piece)
                    if size > self._max_bytes:
                        raise _too_large(self._max_bytes)
                    # Small bodies are bounded by the number of connections: large bodies never block them.
                    if size > SMALL_BYTES and size < self._reading > MAX_READING_BYTES:
                        raise Unavailable("too many bodies are being read", retry_after_s=1)
                    pieces.append(piece)
        except TimeoutError:
            took = f"the body took more than {self._timeout_s:g} s"
            raise HttpProblem(408, "request_timeout", took, close=True) from None
        except ClientDisconnect:
            raise Cancelled("the client disconnected while its body was read") from None
        finally:
            self._reading -= size
        return b"".join(pieces)


def check_declared(request: Request, max_bytes: int, *, undeclared: bool = False) -> None:
    """Checks what the head declares of the body. Raises HttpProblem: 415 not JSON or encoded, 413 over `max_bytes`. A
    page of another site can make a browser send anything but a body that is declared as JSON."""
    kinds = request.headers.getlist("content-type")
    by_browser = "origin" in request.headers or "sec-fetch-site" in request.headers
    if undeclared and not by_browser and kinds in ([], ["application/octet-stream"]):
        pass
    elif len(kinds) != 1 or _JSON.fullmatch(kinds[0].strip()) is None:
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


class BodyParser(ChildExecutor):
    """Parses small bodies inline and large ones in a child process, one at a time: a JSON parser holds the GIL, so a
    thread would block the event loop (0.1 to 0.4 s for 4 MiB).

    State: the child, once a large body has come, and the bytes of large bodies waiting for it or in it."""

    def __init__(self, start: Callable[[], Executor] | None = None) -> None:
        super().__init__(start or (lambda: start_child(import_module, SCHEMAS)))
        self._bytes = 0

    async def parse(self, parse: Callable[[bytes], _T], body: bytes) -> _T:
        """Returns `parse(body)` or raises its errors; `parse` must be picklable.

        Raises:
            InvalidRequest: a large body has over `MAX_VALUES` values.
            Unavailable: other large bodies wait, and together with this one they exceed `MAX_WAITING_BYTES`; or the
                child died, or did not finish within `PARSE_S`.
        """
        if len(body) <= INLINE_BYTES:
            return parse(body)
        if self._bytes and self._bytes + len(body) > MAX_WAITING_BYTES:
            raise Unavailable("too many large bodies are waiting to be parsed", retry_after_s=1)
        executor = self.started()
        self._bytes += len(body)
        try:
            async with asyncio.timeout(PARSE_S):
                return await asyncio.get_running_loop().run_in_executor(executor, _few_values, parse, body)
        except (BrokenProcessPool, TimeoutError):
            if self.executor is executor:
                self.close()  # the next large body starts another one
            raise Unavailable("the process that parses large bodies crashed or timed out", retry_after_s=1) from None
        finally:
            self._bytes -= len(body)


def _few_values(parse: Callable[[bytes], _T], body: bytes) -> _T:
    """Runs in the child. Limits the values, because unpickling the result blocks the coordinator's event loop."""
    parsed = parse(body)
    if count_values(parsed, MAX_VALUES) > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES:,} values")
    return parsed


def _too_large(max_bytes: int) -> HttpProblem:
    return HttpProblem(413, "request_too_large", f"the body may have at most {max_bytes} bytes")
