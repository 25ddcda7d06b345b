"""Limits on messages of the public gRPC API: entries are counted before they are read, refused messages are freed."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.core.errors import InvalidRequest
from baton.runtime import first_message
from baton.runtime.first_message import FirstMessage
from baton.v1 import serving_pb2 as pb
from coordinator.api_keys import ApiKeys
from coordinator.grpc import service
from coordinator.grpc.service import MAX_CONCURRENT_STREAMS, MAX_MESSAGE_BYTES, SERVICE, Serving, message_limit
from coordinator.policy.quotas import Client
from coordinator.text.model import TextModel
from coordinator.translate import Translator
from tests.support.fake_generator import FakeGenerator
from tests.support.grpc_kit import logged, served


class UnreadableField:
    """A repeated field that has a length, and whose entries must not be read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Any:
        raise AssertionError("entries were looked at")

    def __getitem__(self, index: object) -> Any:
        raise AssertionError("entries were looked at")


class OverriddenMessage:
    """A message with the values of some fields replaced."""

    def __init__(self, message: Any, **values: Any) -> None:
        self._message = message
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


MANY = UnreadableField(4_000_000)
IDS = SimpleNamespace(ids=MANY)
ENTRIES = "{} has at most {} entries, not 4000000"
TOO_MANY: list[tuple[str, dict[str, Any], str]] = [
    ("stop", {"stop": MANY}, ENTRIES.format("stop", 64)),
    ("messages", {"messages": SimpleNamespace(messages=MANY)}, ENTRIES.format("messages", 4096)),
    ("prompt", {"token_ids": IDS}, "this model's context is 128 tokens; the prompt has 4000000 and needs room"),
    ("logit_bias", {"sampling": {"logit_bias": MANY}}, ENTRIES.format("logit_bias", 300)),
    ("stop_token_ids", {"sampling": {"stop_token_ids": MANY}}, ENTRIES.format("stop_token_ids", 64)),
    ("bad_words", {"sampling": {"bad_words": MANY}}, ENTRIES.format("bad_words", 128)),
    ("bad_words", {"sampling": {"bad_words": [IDS]}}, "an entry of bad_words must be 1 to 64 tokens, not 4000000"),
    ("allowed_token_ids", {"sampling": {"allowed_token_ids": MANY}}, ENTRIES.format("allowed_token_ids", 512)),
]


@pytest.mark.parametrize(("param", "values", "message"), TOO_MANY, ids=lambda v: v if isinstance(v, str) else "")
async def test_entries_are_counted_before_they_are_read(
    generator: FakeGenerator, text_model: TextModel, param: str, values: dict[str, Any], message: str
) -> None:
    serving = Serving(generator, Translator(text_model), "tiny", ApiKeys())
    request = pb.GenerateRequest(text="a")
    match values:
        case {"messages": _}:
            request.messages.SetInParent()
        case {"token_ids": _}:
            request.token_ids.SetInParent()
        case {"sampling": sampling}:
            values = {"sampling": OverriddenMessage(request.sampling, **sampling)}
    with pytest.raises(InvalidRequest) as refused:
        await serving._submission("r", OverriddenMessage(request, **values), None)  # type: ignore[arg-type]
    assert message in refused.value.message and refused.value.param == param


class FakeCallContext:
    """The context of a call. Like grpc, it keeps the exception that `abort` raises."""

    raised: grpc.aio.AbortError | None = None

    def time_remaining(self) -> None:
        return None

    def __init__(self, content: bytes) -> None:
        self._messages = [content]

    async def read(self) -> bytes:
        return self._messages.pop()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.raised = grpc.aio.AbortError(details)
        raise self.raised


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def large(**fields: Any) -> bytes:
    fields = fields or {"messages": pb.ChatMessages(messages=[pb.ChatMessage()] * 5000)}
    return pb.GenerateRequest(**fields).SerializeToString()


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize(
    ("method", "content", "keys", "expected"),
    [
        ("Generate", large(), {}, "messages has at most 4096 entries"),
        ("Generate", large(text="a" * 5000), {}, "this model's context is 128 tokens"),
        ("Generate", b"\xff" * 5000, {}, "invalid request message"),
        ("GetModelInfo", b"\xff" * 5000, {}, "invalid request message"),
        ("Generate", large(), {b"digest": Client("k", "t")}, "missing API key"),
    ],
)
async def test_a_refused_message_is_freed(
    generator: FakeGenerator,
    text_model: TextModel,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    content: bytes,
    keys: dict[bytes, Client],
    expected: str,
) -> None:
    seen: list[Any] = []

    def parsed(kind: Any, content: bytes) -> Any:
        seen.append(parse(kind, content))
        return seen[-1]

    parse = service.parsed
    monkeypatch.setattr(service, "parsed", parsed)
    serving, context = Serving(generator, Translator(text_model), "tiny", ApiKeys(keys)), FakeCallContext(content)

    async def found(details: Any) -> Any:
        return serving.service(details)

    details = SimpleNamespace(method=f"/{SERVICE}/{method}", invocation_metadata=())
    handler = await FirstMessage().intercept_service(found, details)
    assert handler is not None
    references = sys.getrefcount(content) - (0 if keys else 1)  # without a key, the message is not read
    try:
        await (handler.stream_stream or handler.stream_unary)(None, context)
    except grpc.aio.AbortError as raised:
        assert expected in str(raised)
    assert context.raised is not None and context.raised.__traceback__ is not None
    assert sys.getrefcount(content) == references
    assert [sys.getrefcount(message) for message in seen] == [3] * len(seen)  # two of the three are this line's


@pytest.mark.parametrize("method", [f"/{SERVICE}/Generate", f"/{SERVICE}/GetModelInfo", "/grpc.health.v1.Health/Check"])
async def test_a_call_whose_message_does_not_arrive_in_time_ends(
    generator: FakeGenerator,
    text_model: TextModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
) -> None:
    monkeypatch.setattr(first_message, "RECEIVE_S", 0.3)
    async with served(generator, text_model) as client:
        silent = client.channel.stream_stream(method)()
        async with asyncio.timeout(30):
            assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.3 s" in (await silent.details())
        empty = client.channel.stream_stream(method)()
        await empty.done_writing()
        assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not logged(caplog)


async def test_the_oldest_call_ends_when_too_many_wait_for_their_message(
    generator: FakeGenerator, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_message, "MAX_ARRIVING", 2)
    async with served(generator, text_model) as client, grpc.aio.insecure_channel(f"127.0.0.1:{client.port}") as other:
        silent = []
        for channel in (client.channel, other, client.channel, other):
            silent.append(channel.stream_stream(f"/{SERVICE}/Generate")())
            await silent[-1].wait_for_connection()
            await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            for call in silent[:2]:
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "the oldest of 3" in await call.details()
            assert await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert [call.done() for call in silent[2:]] == [True, False]


async def test_malformed_health_messages_cause_no_traceback_in_the_log(
    generator: FakeGenerator, text_model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(generator, text_model) as client:
        for name in ("Check", "Watch"):
            call = client.channel.unary_stream(f"/grpc.health.v1.Health/{name}")(b"\xff" * 10)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not logged(caplog)


async def test_a_call_without_a_key_is_refused_before_its_message_is_read(
    generator: FakeGenerator, text_model: TextModel
) -> None:
    async with served(generator, text_model, ApiKeys({b"digest": Client("k", "t")})) as client:
        silent = client.channel.stream_stream(f"/{SERVICE}/Generate")()
        async with asyncio.timeout(30):
            assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED


def test_incomplete_messages_of_a_connection_use_at_most_256_mib() -> None:
    assert MAX_CONCURRENT_STREAMS * message_limit(4 << 20, 131_072) <= 256 << 20
    assert message_limit(1 << 16, 131_072) == 1 << 16
    assert message_limit(16 << 20, 1 << 20) == 8 << 20


async def test_a_message_larger_than_the_size_limit_is_refused(generator: FakeGenerator, text_model: TextModel) -> None:
    frame = len(pb.GenerateRequest(text="a" * MAX_MESSAGE_BYTES).SerializeToString()) - MAX_MESSAGE_BYTES
    async with served(generator, text_model, max_body_bytes=4 << 20) as client:
        for more, code in ((0, grpc.StatusCode.INVALID_ARGUMENT), (1, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.all(text="a" * (MAX_MESSAGE_BYTES - frame + more))
            assert refused.value.code() is code


async def test_concurrent_calls_of_a_connection_are_limited(
    generator: FakeGenerator, text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_CONCURRENT_STREAMS", 2)
    generator.script = [asyncio.Event()]
    async with served(generator, text_model) as client:
        await client.stub.GetModelInfo(pb.GetModelInfoRequest())  # so that the client knows the limit
        calls = [client.generate() for _ in range(3)]
        await generator.until(submitted=2)
        with pytest.raises(grpc.aio.AioRpcError) as waited:
            await client.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=0.2)
        assert waited.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(generator.submissions) == 2
        calls[0].cancel()
        await generator.until(submitted=3)
        for call in calls:
            call.cancel()
