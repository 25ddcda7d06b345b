"""The public gRPC API on a free loopback port, and a client for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.v1 import serving_pb2 as pb
from baton.v1 import serving_pb2_grpc, types_pb2
from coordinator.api_keys import ApiKeys
from coordinator.grpc.service import PublicServer
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from tests.support.fake_generator import FakeGenerator


class Client:
    def __init__(self, channel: grpc.aio.Channel, port: int = 0) -> None:
        self.channel, self.port = channel, port
        self.stub = serving_pb2_grpc.ServingStub(channel)

    def generate(self, timeout: float | None = None, **fields: Any) -> Any:
        if not {"text", "token_ids", "messages"} & set(fields):
            fields["token_ids"] = types_pb2.TokenIds(ids=[1, 2, 3])
        return self.stub.Generate(pb.GenerateRequest(**fields), timeout=timeout)

    async def all(self, **fields: Any) -> list[Any]:
        return [m async for m in self.generate(**fields)]

    async def refused(self, **fields: Any) -> tuple[grpc.StatusCode, str, dict[str, Any], dict[str, Any]]:
        """Returns code, message, details by type and trailing metadata of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.all(**fields)
        metadata = dict(caught.value.trailing_metadata() or ())
        details: dict[str, Any] = {}
        for packed in status_pb2.Status.FromString(metadata["grpc-status-details-bin"]).details:
            kind = packed.type_url.rsplit(".", 1)[1]
            details[kind] = getattr(error_details_pb2, kind)()
            packed.Unpack(details[kind])
        return caught.value.code(), caught.value.details() or "", details, metadata


@contextlib.asynccontextmanager
async def served(
    generator: FakeGenerator,
    text_model: TextModel,
    keys: ApiKeys | None = None,
    max_body_bytes: int = 1 << 16,
    **more: Any,
) -> AsyncIterator[Client]:
    translator = Translator(text_model, pools_hold=generator.max_model_len)
    server = PublicServer(generator, translator, "tiny", max_body_bytes, keys, **more)
    port = await server.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, port)
    finally:
        await server.stop(0)


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what a test's own calls logged. grpc.aio polls for all event loops of a process: a loop closed by an
    earlier test may still be woken, and asyncio logs that."""
    return [r for r in caplog.records if "Event loop is closed" not in str(r.exc_info)]
