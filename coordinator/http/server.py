"""The listening socket and the server under the app: uvicorn with httptools, without its signal handlers.

    bind(host, port)         at once: a port in use is a StartupError of one line
    await server.serve()     accepts until shutdown, returns when running answers have ended or the grace is over
    server.stop()            stop accepting, close idle connections, let running answers end

What uvicorn leaves open is closed in `GuardedProtocol`: an endless or dripping head, a body that goes on after its
answer or never comes, endless trailers, answers that are not read, whatever else would keep a connection open without a
request, more connections than there is room for, refusals that are not JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from asyncio import sslproto
from collections.abc import Generator
from functools import partial
from typing import Any, cast

import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.core.errors import StartupError, Unavailable
from baton.rpc.status import error_body
from coordinator.connections import ConnectionLimit
from coordinator.http.errors import error_response

log = logging.getLogger("baton.http")
SEND = "baton.send"
"""The server's own `send`. What stands between it and an answer looks only at how the answer starts."""
WRITER = "baton.writer"
"""The server's ChunkWriter for this answer, where it has one."""
MAX_HEAD_BYTES = 25 * 1024  # of a head that is not complete, or of trailers; more than `guard` takes of a whole head
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
MAX_PIPELINED = 16
READ_BYTES = 32 * 1024
"""At once, of a connection: it has room for 5,000 chunks of one byte, each of them a callback."""
CLOSE_S = 5.0
HEAD_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 30
SEND_TIMEOUT_S = 30.0
"""How long a client may take nothing, or less than LEAST_TAKEN_BYTES, of what was written."""
LEAST_TAKEN_BYTES = 32 * 1024
COUNT_FILES_S = 1.0
BACKLOG = 1_024
ACCEPTS_PER_TURN = 16  # so that a burst is refused before it takes the files that are reserved
SEND_BUFFER_BYTES = 64 * 1024

_Refusal = tuple[int, str, str]
_NOT_HTTP: _Refusal = (400, "invalid_http", "this is not an HTTP/1.1 request")
_HEAD_TOO_LARGE: _Refusal = (431, "headers_too_large", "the head of the request is too large")
_HEAD_TOO_SLOW: _Refusal = (408, "request_timeout", "the head of the request took too long")
_FULL: _Refusal = (503, "overloaded", "too many connections")


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its own state: whether a head is expected or incomplete, the bytes that came since a head was
    complete or a part of a body came, the timer that ends it where no request is being answered, the one that ends it
    where nothing is read, the requests that are not answered yet, and how much of a body was dropped after its answer.

    The first timer runs from the connection to the first head, while a head is incomplete, and from each answer to the
    end of the next head, whatever else is sent meanwhile; uvicorn's own is cancelled by any byte. The second runs while
    so much waits to be read that nothing more is written. Reading a body has a limit of its own.
    """

    def __init__(self, limit: ConnectionLimit, **settings: Any) -> None:
        super().__init__(**settings)
        self._connection_limit = limit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head = True
        self._other_bytes = self._dropped = 0
        self._cycles: list[RequestResponseCycle] = []
        self._answering: dict[RequestResponseCycle, asyncio.Task[None]] = {}
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)
        self._unread_timer: asyncio.TimerHandle | None = None
        if hasattr(transport, "max_size"):  # TLS has its own, see `HttpServer`
            transport.max_size = READ_BYTES
        sock = transport.get_extra_info("socket")
        if sock is not None:  # left alone, the kernel would buffer megabytes for a client that reads nothing
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._connection_limit.opened(self._address):
            self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._cancel_unread_timer()
        self._connection_limit.closed(self._address)
        for cycle in self._cycles:  # uvicorn tells the last one only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        for cycle, task in self._answering.items():
            if not cycle.response_started:
                task.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """As uvicorn does; and it ends with its connection as long as its answer has not begun: what waits to be
        parsed, rendered or encoded would keep others waiting."""
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        self._answering[cycle] = task
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda _: self._answering.pop(cycle, None))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._other_bytes += len(data)
        super().data_received(data)
        if self._other_bytes > MAX_HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # nobody asks for trailers
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._other_bytes = True, self._other_bytes or 1
        self._limit(HEAD_TIMEOUT_S)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head, self._other_bytes = False, 0
        self._timer.cancel()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        if len(self._cycles) > MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many pipelined requests")  # or the parser would go on with what it has
        if len(self._cycles) > 1:
            self.flow.resume_reading()  # else nobody would see the client leave
        cast(dict[str, Any], self.scope)[WRITER] = ChunkWriter(self.cycle)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:  # no pipelined request is being answered
            self._limit(KEEP_ALIVE_S)

    def on_body(self, body: bytes) -> None:
        self._other_bytes = 0
        if self.cycle.response_complete:
            self._dropped += len(body)
            if self._dropped > MAX_DISCARDED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_unread_timer()

    def _await_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(SEND_TIMEOUT_S, self._look_at_reader, unread)

    def _look_at_reader(self, before: int) -> None:
        taken = before - self.transport.get_write_buffer_size()
        if taken >= LEAST_TAKEN_BYTES:
            self._await_reader()
        else:
            what = "client %s took %d bytes of its answer in %g s: its connection is closed"
            log.warning(what, self._address, taken, SEND_TIMEOUT_S)
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
            self._close()  # uvicorn may have begun to

    def _close(self) -> None:
        """In order, if the client takes what is left of its answer within CLOSE_S."""
        self.transport.close()
        self._timer.cancel()
        self._timer = self.loop.call_later(CLOSE_S, self.transport.abort)

    def _refuse(self, refusal: _Refusal) -> None:
        """Answers without the app, unless an answer is already under way, and closes."""
        http, code, message = refusal
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            kind = "server_error" if http >= 500 else "invalid_request_error"
            body = orjson.dumps(error_body(message, type=kind, code=code))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[http] + head.encode() + body)
        self._close()


class ChunkWriter:
    """Writes parts of a chunked body that has begun, as the cycle's own `send` does, past everything between the server
    and its answer."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the client has taken enough of what was written before."""
        cycle = self._cycle
        gone = cycle.disconnected or cycle.response_complete or cycle.transport.is_closing()
        return bool(cycle.chunked_encoding) and not gone and not cycle.flow.write_paused

    def write(self, body: bytes) -> None:
        if body:  # an empty chunk would end the whole
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class HttpServer(uvicorn.Server):
    """A bound server; `address` is where it listens. Signals belong to the process, not to one of its servers; and it
    listens itself. asyncio takes one number for the queue of the kernel and for how many connections it accepts in one
    turn of the loop: here they differ. And of a TLS handshake uvicorn sets no limit; asyncio's is a minute."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, grace_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._sock, self._tls = sock, tls
        self._connection_limit = ConnectionLimit()
        host, port = sock.getsockname()[:2]
        self.address: tuple[str, int] = (host, port)
        super().__init__(
            uvicorn.Config(
                _Ending(app),
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
        """Begins the end; `serve` returns when it is over."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        config, secure = self.config, self._tls is not None
        if secure:  # of each connection asyncio would take 256 KiB for it
            sslproto.SSLProtocol.max_size = READ_BYTES
        server = await asyncio.get_running_loop().create_server(
            lambda: config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            ),
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


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket, so that a second server on the port fails now and not later."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


class _Ending:
    """Answers whose grace is over: 503 where none was begun, else the connection just ends, which no client takes for
    a finished stream. A connection that is gone needs neither."""

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
                await error_response(Unavailable("the server is stopping", code="draining"))(scope, receive, send)
