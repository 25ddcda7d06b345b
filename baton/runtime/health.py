"""gRPC's health service, for probes (Kubernetes' `grpc` probe, grpc_health_probe, load balancers), and a worker's
server for it:

    ""      SERVING while the worker is joined and not draining: it accepts work
    "live"  SERVING while its event loop responds

That server never uses TLS: probes present no certificates, and it reveals nothing else. `Watch` is not implemented: no
probe uses it, and calls that stay open would block others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.runtime.ports import open_port
from baton.runtime.streams import SERVER_OPTIONS

LIVE = "live"
SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_OPTIONS = (
    *SERVER_OPTIONS,
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_age_ms", 10_000),
    ("grpc.max_connection_age_grace_ms", 1_000),
)
"""A call that sends no message ends with its connection, and blocks no other connection's calls."""


@asynccontextmanager
async def serving_health(host: str, port: int, ready: Callable[[], bool]) -> AsyncIterator[None]:
    """Serves probes on `port` while the context is open; does nothing when `port` is 0.

    Raises:
        StartupError: the port cannot be opened.
    """
    if not port:
        yield
        return
    server = grpc.aio.server(options=_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(Health({"": ready, LIVE: lambda: True}), server)
    open_port(server, host, port, "health", "--health-port")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Reports SERVING for each of `services` while its function returns True. No call leaves state behind or waits for
    another; with grpc's own servicer calls wait for a `Watch` whose client does not read."""

    def __init__(self, services: Mapping[str, Callable[[], bool]]) -> None:
        self._services = services

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._services:
            known = ", ".join(map(repr, self._services))
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service; the known ones are {known}")
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._services[request.service]() else states.NOT_SERVING)

    async def Watch(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only Check is implemented")
