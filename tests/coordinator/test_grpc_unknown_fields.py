"""Fields of gRPC requests whose numbers this version does not define: accepted, and named in the trailing metadata."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from baton.runtime.first_message import MAX_UNKNOWN_BYTES, unknown_fields
from baton.v1 import serving_pb2 as pb
from baton.v1 import types_pb2
from coordinator.grpc.service import SERVICE
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.grpc_kit import Client, served

NEWER = b"\xf8\x07\x01"  # field 127, the integer 1
SAMPLING = types_pb2.SamplingParams.FromString(types_pb2.SamplingParams(temperature=0.5).SerializeToString() + NEWER)
MESSAGE = pb.ChatMessage.FromString(pb.ChatMessage(role="user", content="a").SerializeToString() + NEWER)


def newer(**fields: Any) -> bytes:
    """Returns a request of a client whose version has a field 127."""
    return pb.GenerateRequest(**fields).SerializeToString() + NEWER


async def call(client: Client, method: str, content: bytes) -> tuple[dict[str, Any], Exception | None]:
    """Returns the trailing metadata of a call, and its error."""
    call = client.channel.unary_stream(f"/{SERVICE}/{method}")(content)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return dict(error.trailing_metadata() or ()), error
    return dict(await call.trailing_metadata()), None


async def test_unknown_numbers_are_named_in_the_trailing_metadata(
    grpc_client: Client, generator: FakeGenerator
) -> None:
    cases = [
        ("Generate", newer(text="a"), "127"),
        ("Generate", pb.GenerateRequest(text="a", sampling=SAMPLING).SerializeToString(), "sampling.127"),
        (
            "Generate",
            pb.GenerateRequest(messages=pb.ChatMessages(messages=[MESSAGE] * 3)).SerializeToString(),
            "messages.messages.127",
        ),
        ("GetModelInfo", NEWER, "127"),
    ]
    for method, content, named in cases:
        metadata, error = await call(grpc_client, method, content)
        assert error is None and metadata["x-ignored-fields"] == named
    assert generator.ignored_fields == [(f"/{SERVICE}/{method}", named) for method, _, named in cases]
    metadata, _ = await call(grpc_client, "Generate", pb.GenerateRequest(text="a").SerializeToString())
    assert "x-ignored-fields" not in metadata


async def test_they_are_named_beside_the_details_of_an_error(grpc_client: Client) -> None:
    metadata, error = await call(grpc_client, "Generate", newer(text="a", n=129))
    assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert metadata["x-ignored-fields"] == "127" and "grpc-status-details-bin" in metadata


async def test_strict_fields_refuses_them(generator: FakeGenerator, text_model: TextModel) -> None:
    async with served(generator, text_model, strict_fields=True) as client:
        for method, content in (("Generate", newer(text="a")), ("GetModelInfo", NEWER)):
            _, error = await call(client, method, content)
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "unknown field numbers: 127"
        assert await client.all(text="a")
    assert len(generator.submissions) == 1


@pytest.mark.parametrize(("count", "named"), [(1, {"127"}), (MAX_UNKNOWN_BYTES // 3, {"127"}), (300_000, {"..."})])
def test_unknown_fields_that_would_take_long_to_list_are_not_listed(count: int, named: set[str]) -> None:
    assert unknown_fields(pb.GenerateRequest.FromString(NEWER * count)) == named
