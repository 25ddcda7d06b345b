"""The server under the app: uvicorn with httptools, without its signal handlers.

    await server.serve()     accepts until shutdown, returns when running answers or the grace period have ended
    server.stop()            stop accepting, close idle connections, let running answers end
    server.hand_over()       stop accepting, go on answering on the connections that there are, until stop()

`GuardedProtocol` handles what uvicorn does not: an endless or slow head, a body that continues after its answer or
never arrives, endless trailers, answers that are not read, any other way to keep a connection open without a request,
more connections than the limit, refusals that are not JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from asyncio import sslproto
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, cast

import httptools
import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.core.codes import ErrorCode
from baton.core.errors import Unavailable
from baton.runtime.ports import BACKLOG
from baton.runtime.status import error_body
from coordinator.connections import ConnectionLimit
from coordinator.http.errors import error_response

log = logging.getLogger("baton.http")
SEND = "baton.send"
"""The server's own `send`. Middleware between it and an answer only inspects the start of the answer."""
WRITER = "baton.writer"
"""The server's ChunkWriter for this answer, if it has one."""
RECEIVED = "baton.received"
"""When the head of the request was complete, in seconds of `time.monotonic`."""
MAX_HEAD_BYTES = 25 * 1024  # of an incomplete head, or of trailers; above the limit of `guard` for a complete head
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
MAX_PIPELINED = 16
READ_BYTES = 32 * 1024
"""Bytes read at once from a connection: they may hold 5,000 chunks of one byte, each of which is a callback."""
CLOSE_S = 5.0
HEAD_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 30
SEND_TIMEOUT_S = 30.0
"""How long a client may read nothing, or less than MIN_READ_BYTES, of the buffered output."""
MIN_READ_BYTES = 32 * 1024
COUNT_FILES_S = 1.0
ACCEPTS_PER_TURN = 16  # so that a burst is refused before it uses up the reserved files
SEND_BUFFER_BYTES = 64 * 1024

_Refusal = tuple[int, str, str]
_NOT_HTTP: _Refusal = (400, "invalid_http", "this is not an HTTP/1.1 request")
_HEAD_TOO_LARGE: _Refusal = (431, "headers_too_large", "the head of the request is too large")
_HEAD_TOO_SLOW: _Refusal = (408, "request_timeout", "the head of the request took too long")
_FULL: _Refusal = (503, Unavailable.code, "too many connections")


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its own state: whether a head is expected or incomplete, whether the last head offers to upgrade
    to another protocol, the bytes received since the last complete head or part of a body, the timer that closes the
    connection while no request is being answered, the timer that closes it while the client reads nothing, the requests
    that are not answered yet, with their tasks, and how many bytes of bodies were dropped after their answer.

    The first timer runs from the connection to the first head, while a head is incomplete, and from each answer to the
    end of the next head, whatever else is sent meanwhile; any byte cancels uvicorn's own timer. The second runs while
    writing is paused because of unread output. Reading a body has its own limit.
    """

    def __init__(self, limit: ConnectionLimit, **settings: Any) -> None:
        super().__init__(**settings)
        self._connection_limit = limit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head, self._offered = True, False
        self._other_bytes = self._dropped = 0
        self._cycles: list[RequestResponseCycle] = []
        self._answering: dict[RequestResponseCycle, asyncio.Task[None]] = {}
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)
        self._unread_timer: asyncio.TimerHandle | None = None
        if hasattr(transport, "max_size"):  # TLS transports have their own, see `HttpServer`
            transport.max_size = READ_BYTES
        sock = transport.get_extra_info("socket")
        if sock is not None:  # by default, the kernel would buffer megabytes for a client that reads nothing
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._connection_limit.opened(self._address):
            self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._cancel_unread_timer()
        self._connection_limit.closed(self._address)
        for cycle in self._cycles:  # uvicorn marks only the last one as disconnected
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        for cycle, task in self._answering.items():
            if not cycle.response_started:
                task.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Does the same as uvicorn, and the task is cancelled with the connection while its answer has not begun: a
        request that still waits to be parsed, rendered or encoded would delay others."""
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        self._answering[cycle] = task
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: self._answering.pop(cycle, None))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._other_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._other_bytes > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. A client may offer another protocol (`Upgrade: h2c`), to which the parser then leaves all
        that follows the head. The offer is ignored: the head is parsed again without it."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self._offered:  # CONNECT
                    self._refuse(_NOT_HTTP)
                    return
                self._offered, remainder = False, data[offer.args[0] :]
            except httptools.HttpParserError:
                self._refuse(_NOT_HTTP)
                return
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
            head += [b"%b: %b" % each for each in _without_upgrade(self.headers)]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            data = b"\r\n".join([*head, b"", remainder])

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are not used
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._other_bytes = True, self._other_bytes or 1
        self._limit(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers):
            self._offered = True
            return
        super().on_headers_complete()
        self._in_head, self._other_bytes = False, 0
        self._timer.cancel()
        if self._connection_limit.closing:
            self.announce_close()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        if len(self._cycles) > MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many pipelined requests")  # stops the parser, which would process its buffered data
        if len(self._cycles) > 1:
            self.flow.resume_reading()  # otherwise a disconnect would not be detected
        scope = cast(dict[str, Any], self.scope)
        scope[WRITER], scope[RECEIVED] = ChunkWriter(self.cycle), time.monotonic()
        if self.scope["http_version"] == "1.0":  # it has no chunks: the end of the connection ends a stream
            self.cycle.chunked_encoding, self.cycle.keep_alive = False, False
            self.cycle.expected_content_length = _AnyLength()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # no pipelined request is being answered
            self._limit(KEEP_ALIVE_S)

    def announce_close(self) -> None:
        """Makes the next answer on this connection its last one, and names that in its head. One that has begun is not:
        if the connection closed without notice after it, a request that the client has just sent would be lost."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if not self._offered:
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._other_bytes = 0
        if self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > MAX_DISCARDED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_unread_timer()

    def _start_unread_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(SEND_TIMEOUT_S, self._check_unread, unread)

    def _check_unread(self, before: int) -> None:
        taken = before - self.transport.get_write_buffer_size()
        if taken >= MIN_READ_BYTES:
            self._start_unread_timer()
        else:
            message = "client %s read %d bytes of its response in %g s: closing its connection"
            log.warning(message, self._address, taken, SEND_TIMEOUT_S)
            self.transport.abort()

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_NOT_HTTP)

    def _limit(self, seconds: float) -> None:
        self._timer.cancel()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        if self._in_head and self._other_bytes:
            self._refuse(_HEAD_TOO_SLOW)
        else:
            self._close()  # uvicorn may have begun to close it already

    def _close(self) -> None:
        """Closes gracefully; aborts if the client does not read the rest of its answer within CLOSE_S."""
        self.transport.close()
        self._timer.cancel()
        self._timer = self.loop.call_later(CLOSE_S, self.transport.abort)

    def _refuse(self, refusal: _Refusal) -> None:
        """Sends an error without the app, unless an answer has already begun, and closes."""
        http, code, message = refusal
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            kind = "server_error" if http >= 500 else "invalid_request_error"
            body = orjson.dumps(error_body(message, type=kind, code=code))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[http] + head.encode() + body)
        self._close()


class _AnyLength(int):
    """A remaining length of the body that any body fits."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self


def _without_upgrade(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = []
    for name, value in headers:
        if name == b"connection":
            value = b", ".join(option for option in map(bytes.strip, value.split(b",")) if option.lower() != b"upgrade")
        if name != b"upgrade":
            kept.append((name, value))
    return kept


class ChunkWriter:
    """Writes parts of a chunked body that has begun, as the cycle's own `send` does, bypassing all middleware."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the client has read enough of the previous output."""
        cycle = self._cycle
        ended = cycle.disconnected or cycle.response_complete or cycle.transport.is_closing()
        return bool(cycle.chunked_encoding) and not ended and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        if body:  # an empty chunk would end the body
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class HttpServer(uvicorn.Server):
    """A bound server; `address` is where it listens. It handles no signals, which belong to the process. It creates its
    own listener: asyncio uses one number for the kernel's backlog and for the connections accepted per turn of the
    loop, but here they differ. And uvicorn sets no limit on a TLS handshake; asyncio's default is a minute."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, grace_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._sock, self._tls = sock, tls
        self._connection_limit = ConnectionLimit()
        self._accepting: list[asyncio.Task[None]] = []  # by `hand_over`
        host, port = sock.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        super().__init__(
            uvicorn.Config(
                _ShutdownMiddleware(app),
                http=partial(GuardedProtocol, self._connection_limit),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(grace_s)),
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns after `stop`. Cancelling it closes the listening socket too."""
        counting = asyncio.create_task(self._count_files())
        try:
            await super().serve([])
        finally:
            counting.cancel()
            self._sock.close()
            await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    async def _count_files(self) -> None:
        while True:
            await asyncio.to_thread(self._connection_limit.count_files)
            await asyncio.sleep(COUNT_FILES_S)

    def stop(self) -> None:
        """Begins the shutdown; `serve` returns when it is complete."""
        self.should_exit = True

    def hand_over(self) -> None:
        """Stops listening, since a successor listens on the port. Connections that the kernel has not handed out yet
        are still accepted; each connection closes after its next response."""
        loop, self._connection_limit.closing = asyncio.get_running_loop(), True
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._sock.accept()
                connection.setblocking(False)
                self._accepting.append(loop.create_task(self._accepted(connection), name="last connection"))
        for server in self.servers:
            server.close()
        for protocol in self.server_state.connections:
            cast(GuardedProtocol, protocol).announce_close()

    async def _accepted(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its client has left, or its TLS handshake failed
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HEAD_TIMEOUT_S if self._tls else None,
                ssl_shutdown_timeout=CLOSE_S if self._tls else None,
            )

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        secure = self._tls is not None
        if secure:  # asyncio would read 256 KiB at once from each connection
            sslproto.SSLProtocol.max_size = READ_BYTES
        server = await asyncio.get_running_loop().create_server(
            self._protocol,
            sock=self._sock,
            backlog=ACCEPTS_PER_TURN,
            ssl=self._tls,
            ssl_handshake_timeout=HEAD_TIMEOUT_S if secure else None,
            ssl_shutdown_timeout=CLOSE_S if secure else None,
        )
        self.servers.append(server)
        self._sock.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def _log_started_message(self, listeners: Any) -> None:
        pass


class _ShutdownMiddleware:
    """Ends answers that outlast the grace period: with 503 if they have not begun; otherwise the connection closes,
    which no client mistakes for a finished stream. A closed connection needs neither."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            cast(dict[str, Any], scope)[SEND] = send
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not started:
                await error_response(Unavailable("the server is stopping", code=ErrorCode.DRAINING), scope)(
                    scope, receive, send
                )
