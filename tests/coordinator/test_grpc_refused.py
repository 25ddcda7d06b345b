"""What the public gRPC API refuses, with the field's name, and which errors a call may end with."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.core import errors
from baton.v1 import serving_pb2 as pb
from baton.v1 import types_pb2
from coordinator.grpc import service as grpc_service
from coordinator.grpc.service import SERVICE
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.grpc_kit import Client, logged, served


@pytest.mark.parametrize("method", [m.name for m in pb.DESCRIPTOR.services_by_name["Serving"].methods])
async def test_a_malformed_message_is_an_invalid_argument(
    grpc_client: Client, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await grpc_client.channel.unary_stream(f"/{SERVICE}/{method}")(b"\xff\xff\xff").read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "invalid request message: " in (caught.value.details() or "")
    assert not logged(caplog)


async def test_idle_connections_are_limited_so_that_other_clients_are_served(
    generator: FakeGenerator, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service, "connection_limit", lambda other_files: 20)  # five of them for gRPC
    async with served(generator, text_model) as client:
        await client.all(text="a")
        silent = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(12)]
        async with asyncio.timeout(30):
            greeted = [bool(await reader.read(1024)) for reader, _ in silent]  # a gRPC server sends its settings first
        assert greeted == [True] * 4 + [False] * 8
        await client.all(text="a")
        for _, writer in silent:
            writer.close()


BAD_SAMPLING: list[tuple[str, dict[str, Any]]] = [
    ("grammar", {"grammar": "x"}),
    *[(n, {n: v}) for n in ("frequency_penalty", "presence_penalty") for v in (2.5, math.nan, -math.inf)],
    *[("repetition_penalty", {"repetition_penalty": v}) for v in (0.0, -1.0, math.nan, math.inf)],
    *[("min_p", {"min_p": v}) for v in (-0.1, 1.5, math.nan)],
    *[("temperature", {"temperature": v}) for v in (-0.1, math.nan, math.inf)],
    *[("top_p", {"top_p": v}) for v in (-0.1, math.nan)],
    *[(n, {n: v}) for n in ("logprobs", "prompt_logprobs") for v in (-1, 21)],
    *[("min_tokens", {"min_tokens": v}) for v in (-1, 17)],
    *[("logit_bias", {"logit_bias": b}) for b in ({-1: 0.0}, {512: 0.0}, {1: math.nan}, {1: 100.5})],
    *[(n, {n: ids}) for n in ("stop_token_ids", "allowed_token_ids") for ids in ([-1], [512], [1, 2**31 - 1])],
    *[("bad_words", {"bad_words": [types_pb2.TokenIds(ids=ids)]}) for ids in ([], [512], [-1], [1] * 65)],
    ("bad_words", {"bad_words": [types_pb2.TokenIds(ids=[1])] * 129}),  # all entries count, equal ones too
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
]


@pytest.mark.parametrize(("name", "fields"), BAD_SAMPLING)
async def test_a_sampling_field_out_of_range_is_refused_by_name(
    grpc_client: Client, generator: FakeGenerator, name: str, fields: dict[str, Any]
) -> None:
    code, message, details, _ = await grpc_client.refused(sampling=types_pb2.SamplingParams(**fields))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and name in message
    assert [v.field for v in details["BadRequest"].field_violations] == [name]
    assert generator.submissions == []


OTHERS = {"n": 129, "priority": 101, "tenant": "t", "include_stop_str_in_output": True, "echo": True}


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
async def test_an_unsupported_field_or_value_is_refused_by_name(grpc_client: Client, name: str, value: Any) -> None:
    code, _, details, _ = await grpc_client.refused(**{name: value})
    assert (code, details["BadRequest"].field_violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, name)


@pytest.mark.parametrize("bad", ["é", "a\nb", "x" * 129])
async def test_a_long_or_unprintable_request_id_is_refused(grpc_client: Client, bad: str) -> None:
    code, _, details, _ = await grpc_client.refused(request_id=bad)
    assert (code, details["BadRequest"].field_violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")


async def test_a_missing_prompt_or_another_model_is_refused(grpc_client: Client) -> None:
    code, *_ = await grpc_client.refused(token_ids=types_pb2.TokenIds())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="one of text, token_ids and messages"):
        await grpc_client.stub.Generate(pb.GenerateRequest()).read()
    code, message, details, _ = await grpc_client.refused(model="other")
    assert code == grpc.StatusCode.NOT_FOUND and "other" in message
    assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"


async def test_a_prompt_over_the_context_length_is_refused_with_both_lengths(
    grpc_client: Client, text_model: TextModel
) -> None:
    context = text_model.max_model_len
    code, message, details, _ = await grpc_client.refused(token_ids=types_pb2.TokenIds(ids=[1] * (context + 1)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert str(context) in message and str(context + 1) in message
    assert details["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_request_that_is_too_large_is_refused(grpc_client: Client, generator: FakeGenerator) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await grpc_client.all(text="x" * (1 << 17))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert generator.submissions == []


ERRORS = [
    (errors.Unavailable("full", retry_after_s=1.5), grpc.StatusCode.UNAVAILABLE, "1500"),
    (errors.WorkerLost("gone", retry_after_s=1), grpc.StatusCode.UNAVAILABLE, "1000"),
    (errors.HandoffError("no"), grpc.StatusCode.UNAVAILABLE, "1000"),
    (errors.DuplicateRequest("twice", param="request_id"), grpc.StatusCode.ALREADY_EXISTS, None),
    (errors.DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED, None),
    (errors.KVCorrupt("bits"), grpc.StatusCode.DATA_LOSS, None),
    (errors.InvariantError("secret"), grpc.StatusCode.INTERNAL, None),
    (RuntimeError("secret"), grpc.StatusCode.INTERNAL, None),
]


@pytest.mark.parametrize("where", ["before the first token", "in the middle"])
@pytest.mark.parametrize(("error", "code", "pushback"), ERRORS, ids=lambda e: type(e).__name__)
async def test_each_error_has_its_status_and_retry_delay(
    grpc_client: Client,
    generator: FakeGenerator,
    error: errors.BatonError,
    code: grpc.StatusCode,
    pushback: str | None,
    where: str,
) -> None:
    generator.script = [*(reply("a", "b")[:1] if where == "in the middle" else []), error]
    got, message, details, metadata = await grpc_client.refused()
    assert got == code
    assert metadata.get("grpc-retry-pushback-ms") == pushback
    assert ("RetryInfo" in details) == (pushback is not None)
    assert details["ErrorInfo"].domain == "baton"
    assert "secret" not in message
