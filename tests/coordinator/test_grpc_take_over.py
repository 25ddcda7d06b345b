"""Calls that reach a coordinator while it hands its port over to the next one, from clients with the documented policy
for retries: gRPC cancels those that its server has received and not begun."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import grpc.aio

from baton.v1 import serving_pb2 as pb
from baton.v1 import serving_pb2_grpc, types_pb2
from coordinator.grpc.service import PublicServer
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from tests.support.client import RETRIES
from tests.support.fake_generator import FakeGenerator

ROOT = Path(__file__).parents[2]
CALLS = 40


def public_server(generator: FakeGenerator, text: TextModel) -> PublicServer:
    return PublicServer(generator, Translator(text, pools_hold=generator.max_model_len), "tiny", 1 << 16)


async def call(channel: grpc.aio.Channel) -> int:
    request = pb.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[1, 2, 3]), max_tokens=2)
    return len([message async for message in serving_pb2_grpc.ServingStub(channel).Generate(request, timeout=30)])


async def test_no_call_fails_while_the_next_server_takes_over_the_port(text_model: TextModel) -> None:
    generator, successor = FakeGenerator(), FakeGenerator()
    old, new = public_server(generator, text_model), public_server(successor, text_model)
    port = await old.start("127.0.0.1", 0)
    try:
        options = [("grpc.service_config", json.dumps(RETRIES))]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            expected = await call(channel)
            await new.start("127.0.0.1", port, take_over=True)
            calls = [asyncio.create_task(call(channel)) for _ in range(CALLS)]
            await asyncio.sleep(0)  # they are sent, and not received
            await old.stop(10.0)
            assert await asyncio.gather(*calls) == [expected] * CALLS
        assert successor.submissions
        assert len(generator.submissions) + len(successor.submissions) == CALLS + 1, "none is computed twice"
    finally:
        await old.stop(0)
        await new.stop(0)


def test_the_policy_for_retries_is_the_documented_one() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("\n## gRPC\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert json.loads(block) == RETRIES
