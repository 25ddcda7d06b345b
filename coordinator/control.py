"""The service that workers dial. In a session the worker sends Join and receives a Welcome or a refusal; then it
receives commands and sends events until the stream breaks. A worker that redials within its lease keeps its
sequences."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc.aio
from google.protobuf.message import Message

from baton.core.commands import Join, Role
from baton.core.errors import BatonError, InvalidRequest, JoinRefused, ProtocolError
from baton.core.names import host_port
from baton.runtime.codec import role_of
from baton.runtime.first_message import FirstMessage, parsed
from baton.runtime.ports import SHARED_PORTS, open_port
from baton.runtime.status import grpc_code
from baton.runtime.streams import SERVER_OPTIONS, LinkLost, MessageStream, deserializer, serve_stream
from baton.runtime.tls import ClusterTls, check_role, peer_role
from baton.v1 import worker_pb2, worker_pb2_grpc
from coordinator.cluster import ToWorker

log = logging.getLogger("baton.coordinator")
OPERATOR_BYTES = 64 << 10
"""Of an operator's request, at most: its token is checked only once it has been parsed. Some 2,000 shares fit."""
_Request = TypeVar("_Request", bound=Message)


class Sessions(Protocol):
    """Who owns the sessions: `coordinator.cluster.Cluster`, or a check of workers."""

    # Where workers dial, as host:port.
    address: str

    def join(self, join: Join, peer: str) -> asyncio.Queue[ToWorker]: ...

    def refused(self, error: JoinRefused, peer: str) -> None: ...

    def is_current(self, worker: str, queue: asyncio.Queue[ToWorker]) -> bool: ...

    def on_message(self, worker: str, incarnation: int, message: object) -> bool: ...

    def session_ended(self, worker: str, incarnation: int, queue: asyncio.Queue[ToWorker], why: str) -> None: ...

    def check_token(self, presented: str, who: str) -> None: ...

    def drain_worker(self, worker: str, timeout_s: float, next_role: Role | None = None) -> None: ...

    def set_traffic(self, shares: Mapping[str, float], *, clear: bool) -> Mapping[str, float]: ...


class _ControlServicer(worker_pb2_grpc.WorkerControlServicer):  # type: ignore[misc]
    def __init__(self, cluster: Sessions, tls: ClusterTls | None) -> None:
        self._cluster = cluster
        self._tls = tls

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await serve_stream(context, worker_pb2.SessionResponse, self._session)

    async def DrainWorker(self, content: bytes, context: grpc.aio.ServicerContext) -> worker_pb2.DrainWorkerResponse:
        async with self._for_operators(context):
            request = _parsed(worker_pb2.DrainWorkerRequest, content)
            self._check(request.token, context, "flip" if request.next_role else "drain")
            next_role = role_of(request.next_role) if request.next_role else None
            self._cluster.drain_worker(request.worker_id, max(request.timeout_ms, 0) / 1000, next_role)
        return worker_pb2.DrainWorkerResponse()

    async def SetTraffic(self, content: bytes, context: grpc.aio.ServicerContext) -> worker_pb2.SetTrafficResponse:
        async with self._for_operators(context):
            request = _parsed(worker_pb2.SetTrafficRequest, content)
            self._check(request.token, context, "traffic")
            shares = self._cluster.set_traffic(dict(request.percent), clear=request.clear)
        return worker_pb2.SetTrafficResponse(percent=shares)

    def _check(self, token: str, context: grpc.aio.ServicerContext, command: str) -> None:
        """Raises JoinRefused if an operator's request is not permitted."""
        check_role(self._tls, peer_role(context), ("operator",), command)
        self._cluster.check_token(token, command)

    @asynccontextmanager
    async def _for_operators(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Replies to a BatonError with its status."""
        try:
            yield
        except BatonError as e:
            if isinstance(e, JoinRefused):
                self._cluster.refused(e, context.peer())
            await context.abort(grpc_code(e), e.message)

    async def _session(self, stream: MessageStream, first: object) -> None:
        """Runs the session of one worker to its end. Raises as Cluster.join does."""
        if not isinstance(first, Join):
            raise ProtocolError(f"a session must begin with a join, not {type(first).__name__}")
        cluster, worker, incarnation = self._cluster, first.worker_id, first.incarnation
        try:
            check_role(self._tls, stream.peer_role, (first.role,), f"{first.role} worker {worker[:128]!r}")
        except JoinRefused as e:
            cluster.refused(e, stream.peer)
            raise
        queue = cluster.join(first, stream.peer)

        def ended() -> None:
            cluster.session_ended(worker, incarnation, queue, stream.ended or "closed by the coordinator")

        async def pump() -> None:
            try:
                while True:
                    await stream.send_unshielded(await queue.get())  # cancelled only when the session has ended
            except Exception as e:
                if not isinstance(e, LinkLost):
                    log.exception("sending commands to %s failed", worker)
            ended()  # no command reaches it, so it has to redial: its next message, if any, ends the session unread

        sender: asyncio.Task[None] = asyncio.create_task(pump(), name=f"commands to {worker}")
        try:
            while (message := await stream.receive()) is not None and cluster.is_current(worker, queue):
                if not cluster.on_message(worker, incarnation, message):
                    break
                del message  # kept until the next one, 64 tokens of each worker would be objects for the collector
        finally:
            sender.cancel()
            ended()


def _parsed(kind: type[_Request], content: bytes) -> _Request:
    """As `parsed`; also raises InvalidRequest for more than OPERATOR_BYTES."""
    if len(content) > OPERATOR_BYTES:
        raise InvalidRequest(f"the request has {len(content)} bytes, above {OPERATOR_BYTES}", param="request")
    return parsed(kind, content)


def _handlers(servicer: _ControlServicer) -> grpc.GenericRpcHandler:
    """Returns the handlers as `add_WorkerControlServicer_to_server` makes them, except for how requests are parsed."""
    session = grpc.stream_stream_rpc_method_handler(
        servicer.Session,
        request_deserializer=deserializer(worker_pb2.SessionRequest),
        response_serializer=worker_pb2.SessionResponse.SerializeToString,
    )
    drain = grpc.unary_unary_rpc_method_handler(
        servicer.DrainWorker, response_serializer=worker_pb2.DrainWorkerResponse.SerializeToString
    )
    traffic = grpc.unary_unary_rpc_method_handler(
        servicer.SetTraffic, response_serializer=worker_pb2.SetTrafficResponse.SerializeToString
    )
    name = worker_pb2.DESCRIPTOR.services_by_name["WorkerControl"].full_name
    methods = {"Session": session, "DrainWorker": drain, "SetTraffic": traffic}
    return grpc.method_handlers_generic_handler(name, methods)


async def serve_control(
    cluster: Sessions, host: str, port: int, tls: ClusterTls | None = None, *, take_over: bool = False
) -> tuple[grpc.aio.Server, int]:
    """Starts the service, sets the cluster's address, and returns the server with its port. With `take_over` another
    coordinator of this user may still listen on it.

    Raises:
        StartupError: the address is not available.
    """
    options = list({**dict(SERVER_OPTIONS), **dict([SHARED_PORTS])}.items())
    server = grpc.aio.server(interceptors=(FirstMessage(),), options=options)
    server.add_generic_rpc_handlers((_handlers(_ControlServicer(cluster, tls)),))
    bound = open_port(server, host, port, "control", "--control-port", tls and tls.server(), check=not take_over)
    await server.start()
    cluster.address = host_port(host, bound)
    return server, bound
