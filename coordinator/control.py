"""The service that workers dial."""

from __future__ import annotations

import grpc.aio

from baton.core.errors import BatonError, JoinRefused
from baton.core.names import host_port
from baton.rpc.ports import open_port
from baton.rpc.status import grpc_code
from baton.rpc.streams import SERVER_OPTIONS, serve_stream
from baton.v1 import worker_pb2, worker_pb2_grpc
from coordinator.cluster import Cluster


class _Servicer(worker_pb2_grpc.WorkerControlServicer):  # type: ignore[misc]
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def Session(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await serve_stream(context, worker_pb2.SessionResponse, self._cluster.members.session)

    async def DrainWorker(
        self, request: worker_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainWorkerResponse:
        members = self._cluster.members
        try:
            members.check_token(request.token, "drain")
            members.drain(request.worker_id, max(request.timeout_ms, 0) / 1000)
        except BatonError as e:
            if isinstance(e, JoinRefused):
                members.joins_refused[e.param or ""] += 1
            await context.abort(grpc_code(e), e.message)
        return worker_pb2.DrainWorkerResponse()


async def serve_control(cluster: Cluster, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Starts the service, makes its address known to the cluster, and returns it with its port.

    Raises:
        StartupError: nobody can listen there.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerControlServicer_to_server(_Servicer(cluster), server)
    bound = open_port(server, host, port, "control", "--control-port")
    await server.start()
    cluster.members.address = host_port(host, bound)
    return server, bound
