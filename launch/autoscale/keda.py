"""The law as an external scaler of KEDA: a ScaledObject for each role, with the trigger `external-push` and the
metadata `role: prefill` or `role: decode`. The metric is the number of workers and its target is 1, so KEDA's replicas
are the decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from baton.runtime.ports import open_port
from baton.runtime.streams import SERVER_OPTIONS
from baton.v1 import externalscaler_pb2, externalscaler_pb2_grpc
from launch.autoscale.observe import Autoscaler
from sim.scale.planner import Size

ROLES = ("prefill", "decode")
OPTIONS = (*SERVER_OPTIONS, ("grpc.max_concurrent_streams", 64))


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):  # type: ignore[misc]
    """Answers for the role that the request's metadata name."""

    def __init__(self) -> None:
        self._size: Size | None = None  # as decided last; None: the cluster has not been reached yet
        self._changed = asyncio.Condition()
        self.streams = 0  # of KEDA's operator, one for each ScaledObject: without any, nothing acts on the size

    async def decided(self, size: Size | None) -> None:
        async with self._changed:
            if size != self._size:
                self._size = size
                self._changed.notify_all()

    async def IsActive(self, request: Any, context: Any) -> Any:
        count = await self._count(await _role(request, context), context)
        return externalscaler_pb2.IsActiveResponse(result=count > 0)

    async def StreamIsActive(self, request: Any, context: Any) -> AsyncIterator[Any]:
        role, sent = await _role(request, context), None
        self.streams += 1
        try:
            while True:
                async with self._changed:
                    active = None if self._size is None else getattr(self._size, role) > 0
                    if active is None or active is sent:
                        await self._changed.wait()
                        continue
                sent = active
                yield externalscaler_pb2.IsActiveResponse(result=active)
        finally:
            self.streams -= 1

    async def GetMetricSpec(self, request: Any, context: Any) -> Any:
        name = metric_name(await _role(request, context))
        spec = externalscaler_pb2.MetricSpec(metricName=name, targetSize=1, targetSizeFloat=1.0)
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: Any, context: Any) -> Any:
        role = await _role(request.scaledObjectRef, context)
        if request.metricName != metric_name(role):
            reason = f"metricName: {request.metricName[:100]!r} is not {metric_name(role)!r}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
        count = await self._count(role, context)
        value = externalscaler_pb2.MetricValue(
            metricName=request.metricName, metricValue=count, metricValueFloat=float(count)
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    async def _count(self, role: str, context: Any) -> int:
        if self._size is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cluster has not been reached yet")
        return int(getattr(self._size, role))


async def _role(reference: Any, context: Any) -> str:
    role = reference.scalerMetadata.get("role", "")
    if role not in ROLES:
        reason = f"scalerMetadata.role: {role[:100]!r} is not {' or '.join(ROLES)}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)
    return str(role)


def metric_name(role: str) -> str:
    return f"baton-{role}-workers"


async def serve(autoscaler: Autoscaler, host: str, port: int, every_s: float, opened: Callable[[int], object]) -> None:
    """Decides every `every_s` seconds and answers KEDA until cancelled; calls `opened` with the port.

    Raises:
        StartupError: the port cannot be opened.
    """
    scaler, server = ExternalScaler(), grpc.aio.server(options=OPTIONS)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(scaler, server)
    opened(open_port(server, host, port, "external scaler", "--listen"))
    await server.start()
    try:
        while True:
            await scaler.decided(await asyncio.to_thread(autoscaler.look, acts=scaler.streams > 0))
            await asyncio.sleep(every_s)
    finally:
        await server.stop(0)
