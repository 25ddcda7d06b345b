"""gRPC's health service for a worker, for probes: Kubernetes' `grpc` probe, grpc_health_probe, a load balancer.

    ""      SERVING while the worker is joined and not draining: it takes work
    "live"  SERVING while its event loop answers

Never TLS: probes bring no certificates, and it says nothing else. No `Watch` either: no probe uses it, and calls that
stay open would keep the others out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.ports import open_port
from baton.rpc.streams import SERVER_OPTIONS

LIVE = "live"
_OPTIONS = (
    *SERVER_OPTIONS,
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_age_ms", 10_000),
    ("grpc.max_connection_age_grace_ms", 1_000),
)
"""A call that sends no message ends with its connection, and holds up no other's."""


@asynccontextmanager
async def serving_health(host: str, port: int, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Answers probes on `port` meanwhile; nothing at all where it is 0.

    Raises:
        StartupError: nobody can listen there.
    """
    if not port:
        yield
        return
    server = grpc.aio.server(options=_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(_Servicer(ready), server)
    open_port(server, host, port, "health", "--health-port")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", LIVE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service here but '' and {LIVE!r}")
        states = health_pb2.HealthCheckResponse
        serves = request.service == LIVE or self._ready()
        return states(status=states.SERVING if serves else states.NOT_SERVING)

    async def Watch(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Check alone is served")
