"""The link between a prefill and a decode worker as a stream of hand-over messages (core.handover)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.core.errors import HandoffError
from baton.core.handover import LinkHello, LinkWelcome
from baton.runtime.ports import open_port
from baton.runtime.streams import SERVER_OPTIONS, MessageStream, dial, serve_stream
from baton.runtime.tls import ClusterTls, check_role
from baton.v1 import kv_pb2, kv_pb2_grpc


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
