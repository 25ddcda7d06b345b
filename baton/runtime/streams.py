"""A bidirectional gRPC stream of core values, the same at both ends.

Reading returns None when the stream has ended, for whatever reason; the reason is in `ended`. Writing to a stream that
has ended raises LinkLost. Every wait is bounded: keepalive pings detect a peer whose host has vanished.

A link between a prefill and a decode worker (core.handover) is such a stream: `dial_link` and `serve_links`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.codes import ErrorCode
from baton.core.errors import BatonError, HandoffError, InvalidRequest, JoinRefused, Unavailable
from baton.core.handover import LinkHello, LinkWelcome
from baton.core.liveness import PING_LIMIT_S
from baton.runtime import codec
from baton.runtime.ports import open_port
from baton.runtime.tls import ClusterTls, check_role, explained, peer_role
from baton.v1 import kv_pb2, kv_pb2_grpc

log = logging.getLogger("baton.runtime")
MAX_MESSAGE_BYTES = 16 << 20
LARGE_BYTES = 256 << 10
"""A longer message is parsed on a thread: one with the log-probabilities of a long prompt takes 0.2 s."""
FIRST_BYTES = 128 << 10
"""Of a stream's first message, at most: its token is checked only once its values are made. A Join with 200 layers has
6 KB."""
MAX_CONNECTIONS = 4_096
"""Of one server; further connections are closed on arrival."""
_large_messages = ThreadPoolExecutor(2, thread_name_prefix="large messages")  # a stream's heartbeats wait behind one
_BOTH_ENDS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
NO_PROXY = ("grpc.enable_http_proxy", 0)
"""gRPC would dial through `grpc_proxy`, `https_proxy` or `http_proxy`, which are for clients of other networks."""
CHANNEL_OPTIONS = [
    *_BOTH_ENDS,
    NO_PROXY,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", 5_000),  # a connection that sends nothing holds a file descriptor
]


class LinkLost(Unavailable):
    code = ErrorCode.LINK_LOST


@dataclass(frozen=True, slots=True)
class _Large:
    """A message that has not been parsed yet."""

    envelope: Any
    content: bytes

    def value(self) -> Any:
        return codec.unwrap(self.envelope.FromString(self.content))


def deserializer(envelope: Any) -> Callable[[bytes], Any]:
    """Returns the parser of a server's stream, which leaves large messages to `MessageStream.receive`."""
    parse = envelope.FromString
    return lambda content: parse(content) if len(content) <= LARGE_BYTES else _Large(envelope, content)


class MessageStream:
    """One end of a stream. `call` is a grpc.aio call (client) or servicer context (server): both read and write. With
    TLS, a server has `peer_role` from its client's certificate.

    One task reads; any task may send.
    """

    def __init__(self, call: Any, envelope: type, peer: str, peer_role: str = "") -> None:
        self._call = call
        self._envelope = envelope
        self._writing = asyncio.Lock()
        self.peer = peer
        self.peer_role = peer_role
        self.ended: str | None = None  # the reason
        self.closed_by_peer = False

    async def send(self, value: object, timeout_s: float = 5.0) -> None:
        """Writes one value.

        Raises:
            LinkLost: the stream has ended, or the message was not written in time.
        """
        message = self._wrapped(value)
        # Shielded: cancelling a write cancels the whole call, which other tasks send on, too.
        writing = asyncio.create_task(self._write(message, timeout_s))
        writing.add_done_callback(seen)
        await asyncio.shield(writing)

    async def send_unshielded(self, value: object, timeout_s: float = 5.0) -> None:
        """Like `send`, for a task that is cancelled only together with the stream: a cancellation during a write ends
        the stream. Saves creating a task per message, a large part of a message's cost."""
        try:
            await self._write(self._wrapped(value), timeout_s)
        except asyncio.CancelledError:
            self.end("its sender was cancelled")
            raise

    def _wrapped(self, value: object) -> Any:
        if self.ended is not None:
            raise LinkLost(f"the stream to {self.peer} has ended: {self.ended}")
        return codec.wrap(self._envelope, value)

    async def _write(self, message: Any, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._writing:
                await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.BaseError, TimeoutError) as e:
            self._break(e)
            raise LinkLost(f"the stream to {self.peer} has ended: {self.ended}") from e

    async def receive(self, limit: int = MAX_MESSAGE_BYTES) -> Any | None:
        """Returns the next value, or None when the stream has ended.

        Raises:
            InvalidRequest: the peer sent an invalid message, or one of more than `limit` bytes; the caller closes the
                stream.
        """
        task = asyncio.current_task()
        # Compared with the count at entry, not with 0: a task keeps counting a cancellation that it has survived.
        cancels = task.cancelling() if task is not None else 0
        try:
            message = await self._call.read()
            if limit < MAX_MESSAGE_BYTES and message is not grpc.aio.EOF:
                size = len(message.content) if isinstance(message, _Large) else message.ByteSize()
                if size > limit:
                    raise InvalidRequest(f"{self.peer} sent {size} bytes; here a message has at most {limit}")
            if isinstance(message, _Large):
                return await asyncio.get_running_loop().run_in_executor(_large_messages, message.value)
        except asyncio.CancelledError:
            if self.ended is None or task is None or task.cancelling() > cancels:
                raise
            return None  # `end` cancelled the call: grpc raises this in a reader that was not cancelled
        except DecodeError as e:
            raise InvalidRequest(f"{self.peer} sent an invalid message") from e
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.BaseError) as e:
            self._break(e)
            return None
        if message is grpc.aio.EOF:
            self._closed()
            return None
        return codec.unwrap(message)

    def _break(self, error: BaseException) -> None:
        """Ends the stream by an error of gRPC."""
        if isinstance(error, grpc.aio.InternalError):  # of a server's write: it names the operation, not the cause
            self._closed()
        elif isinstance(error, grpc.RpcError) and hasattr(error, "code"):
            self.end(f"{error.code().name}: {error.details()}")
        else:
            self.end(str(error) or type(error).__name__)

    def _closed(self) -> None:
        if self.ended is None:
            self.closed_by_peer = True
            self.end("closed by the peer")

    def end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            cancel = getattr(self._call, "cancel", None)
            if cancel is not None:
                cancel()


def seen(task: asyncio.Task[Any]) -> None:
    """Retrieves the error of a write whose sender was cancelled, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def dial(
    address: str,
    method: Callable[[grpc.aio.Channel], Any],
    envelope: type,
    hello: object,
    timeout_s: float,
    tls: ClusterTls | None = None,
    peer_role: str = "",
) -> tuple[grpc.aio.Channel, MessageStream, Any]:
    """Opens a stream, sends `hello` and returns the channel, the stream and the first reply. With `tls` the peer must
    present a certificate of `peer_role`.

    Raises:
        LinkLost: no reply in time.
        JoinRefused: the peer refused; the text is the peer's.
    """
    # The limit of the TCP, TLS and HTTP/2 handshakes: with a peer that takes longer a link would be lost at once.
    handshake_s = min(timeout_s, PING_LIMIT_S)
    options = [*CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", round(handshake_s * 1000))]
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        credentials, named = tls.channel(peer_role)
        channel = grpc.aio.secure_channel(address, credentials, options=[*options, *named])
    try:
        call = method(channel)()
        stream = MessageStream(call, envelope, address)
        async with asyncio.timeout(timeout_s):
            try:
                await stream.send(hello, timeout_s)
            except LinkLost as e:
                raise LinkLost(f"dialled {address}: {explained(str(stream.ended))}") from e
            answer = await stream.receive()
            if answer is None:
                code = await call.code()
                if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                    raise JoinRefused(await call.details())
                raise LinkLost(f"dialled {address}: {explained(str(stream.ended))}")
    except TimeoutError as e:
        connected = channel.get_state() is grpc.ChannelConnectivity.READY
        await channel.close()
        outcome = "connected, but received no reply" if connected else "no connection"
        raise LinkLost(f"dialled {address}: {outcome} within {timeout_s:g} s") from e
    except BaseException:
        await channel.close()
        raise
    return channel, stream, answer


async def serve_stream(
    context: grpc.aio.ServicerContext, envelope: type, handle: Callable[[MessageStream, Any], Awaitable[None]]
) -> None:
    """Reads the first message and lets `handle(stream, first)` run the stream to its end.

    The peer receives a BatonError that `handle` raises before its first reply as a refusal; after an Unavailable it may
    retry.
    """
    stream = MessageStream(context, envelope, context.peer(), peer_role(context))
    try:
        async with asyncio.timeout(10.0):
            first = await stream.receive(FIRST_BYTES)
    except (TimeoutError, InvalidRequest) as e:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(e) or "no first message within 10 s")
    if first is None:
        return
    try:
        await handle(stream, first)
    except BatonError as e:
        later = isinstance(e, Unavailable)
        await context.abort(grpc.StatusCode.UNAVAILABLE if later else grpc.StatusCode.FAILED_PRECONDITION, e.message)
    finally:
        if stream.ended is None:
            stream.ended = "closed locally"


@dataclass(frozen=True, slots=True)
class DialledLink:
    stream: MessageStream
    welcome: LinkWelcome
    channel: grpc.aio.Channel

    async def close(self) -> None:
        self.stream.end("closed locally")
        await self.channel.close()


async def dial_link(address: str, hello: LinkHello, timeout_s: float, tls: ClusterTls | None = None) -> DialledLink:
    """Dials a decode worker's link service.

    Raises:
        LinkLost: no reply in time.
        BatonError: refused, with the field that does not fit.
    """
    channel, stream, welcome = await dial(
        address, lambda c: kv_pb2_grpc.KVLinkStub(c).Link, kv_pb2.LinkRequest, hello, timeout_s, tls, "decode"
    )
    if not isinstance(welcome, LinkWelcome):
        await channel.close()
        raise HandoffError(f"{address} replied to LinkHello with {type(welcome).__name__}")
    return DialledLink(stream, welcome, channel)


LinkHandler = Callable[[MessageStream, LinkHello], Awaitable[None]]


class _LinkServicer(kv_pb2_grpc.KVLinkServicer):  # type: ignore[misc]
    def __init__(self, handler: LinkHandler, tls: ClusterTls | None) -> None:
        self._handler = handler
        self._tls = tls

    async def Link(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        async def handle(stream: MessageStream, first: object) -> None:
            if not isinstance(first, LinkHello):
                raise HandoffError(f"a link must begin with LinkHello, not {type(first).__name__}")
            check_role(self._tls, stream.peer_role, ("prefill",), f"the link of {stream.peer}")
            await self._handler(stream, first)

        await serve_stream(context, kv_pb2.LinkResponse, handle)


async def serve_links(
    host: str, handler: LinkHandler, port: int = 0, tls: ClusterTls | None = None
) -> tuple[grpc.aio.Server, int]:
    """Starts a link service on `host` (port 0: a free one) and returns the server and the port.

    Raises:
        StartupError: the port cannot be opened.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    kv_pb2_grpc.add_KVLinkServicer_to_server(_LinkServicer(handler, tls), server)
    bound = open_port(server, host, port, "link", "--link-port", tls and tls.server())
    await server.start()
    return server, bound
