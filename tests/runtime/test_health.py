"""A worker's replies to health probes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import StartupError
from baton.runtime import health

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
    yield number


async def test_readiness_and_liveness_are_reported_separately(port: int) -> None:
    accepts_work = False
    async with (
        health.serving_health("127.0.0.1", port, lambda: accepts_work),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status)

        assert (await check(""), await check("live")) == (NOT_SERVING, SERVING)
        accepts_work = True
        assert (await check(""), await check("live")) == (SERVING, SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check("other")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_silent_calls_block_no_probe_and_end_with_their_connection(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [(name, value // 20 if "connection_age" in name else value) for name, value in health._OPTIONS]
    monkeypatch.setattr(health, "_OPTIONS", options)
    async with (
        health.serving_health("127.0.0.1", port, lambda: True),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        assert await stub.Watch(health_pb2.HealthCheckRequest(), timeout=10).code() is grpc.StatusCode.UNIMPLEMENTED
        silent = channel.stream_unary("/grpc.health.v1.Health/Check")  # calls that never send their message
        calls = [silent(timeout=60) for _ in range(100)]
        await asyncio.sleep(0.2)
        apart = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=apart) as other:
            probe = health_pb2_grpc.HealthStub(other)
            assert (await probe.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == SERVING
        first = await asyncio.wait_for(calls[0].code(), 30)
        assert first is grpc.StatusCode.UNAVAILABLE, "the server has ended it, and holds it no longer"
        for call in calls:
            call.cancel()


async def test_port_0_opens_no_listener_and_a_port_in_use_is_a_startup_error(port: int) -> None:
    async with health.serving_health("127.0.0.1", 0, lambda: True):
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)
    async with health.serving_health("127.0.0.1", port, lambda: True):
        with pytest.raises(StartupError, match=rf"health port {port} "):  # two workers of one host
            async with health.serving_health("127.0.0.1", port, lambda: True):
                pass
    taken = rf"health port {port} .* choose another with --health-port"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StartupError, match=taken):
        async with health.serving_health("127.0.0.1", port, lambda: True):
            pass
