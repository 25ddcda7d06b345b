"""The benchmark's own HTTP/1.1 client: it shares the cores with the server it measures, so it does as little as it can.

A general client takes 0.2 ms of processor time for each event of a stream; here bytes go from the socket through the
parser to the caller. One request runs on a connection at a time; connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0

Feed = Callable[[float, bytes], None]
"""Takes a piece of a body and when it came off the socket (time.perf_counter)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is empty where it was fed to the caller."""

    status: int
    body: bytes


class Session:
    """Connections to the server of `base` (http or https; its path comes before every request's), and those of them
    that are idle. Used as an asynchronous context; `headers` go with every request."""

    def __init__(self, base: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base!r} is not an http or https URL")
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._head = "".join(
            f"{name}: {value}\r\n" for name, value in {"Host": parts.netloc, **(headers or {})}.items()
        )
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.close()

    async def post(self, path: str, content: bytes, feed: Feed) -> Answer:
        """Sends JSON; the body of an answer with status 200 goes to `feed`, any other is returned.

        Raises:
            OSError: no connection, or it ended before the answer did, or what came is not HTTP.
            Exception: what `feed` raised.
        """
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        request = f"{head}Accept: text/event-stream\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        connection = await self._connection()
        try:
            answer = await connection.ask(request, feed)  # a caller's timeout ends it
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise OSError(f"no connection to {self._host}:{self._port} within {CONNECT_TIMEOUT_S:g} s") from None
        return connection


class _Connection(asyncio.Protocol):
    """State: the transport, whether it may be used (again), and of the request under way the parser of its answer, who
    takes the body, when bytes came last, the body of a refusal, whether its head has come and says where the body ends,
    and the future that it completes."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.usable = False
        self._done: asyncio.Future[Answer] | None = None

    def ask(self, request: bytes, feed: Feed) -> asyncio.Future[Answer]:
        self._parser = httptools.HttpResponseParser(self)
        self._feed, self._now, self._refusal = feed, 0.0, b""
        self._in_body = self._measured = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.usable = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():  # bytes behind an answer
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(OSError(f"what came is not HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._done is None or self._done.done():
            return
        if self._in_body and not self._measured:  # such a body ends with its connection
            self.on_message_complete()
        else:
            self._fail(error if isinstance(error, OSError) else OSError("the server closed the connection"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measured |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal += body
            return
        try:
            self._feed(self._now, body)
        except Exception as error:
            self._fail(error)

    def on_message_complete(self) -> None:
        self.usable = self.usable and self._measured and bool(self._parser.should_keep_alive())
        self._in_body = False
        if self._done is not None and not self._done.done():
            self._done.set_result(Answer(self._parser.get_status_code(), self._refusal))

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
