"""What one client can take from the others over HTTP: connections, memory, the event loop's time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from starlette.applications import Starlette

from baton.core.request import TokenLogprob
from coordinator.http import body as http_body
from coordinator.http import generation as http_generation
from coordinator.http import server as http_server
from coordinator.http.app import HttpSettings, create_app
from coordinator.openai.render import CompletionLogprobs
from coordinator.submission import Delta, Usage
from coordinator.text.chat import ChatMessage
from coordinator.text.model import TextModel
from coordinator.translate import MAX_SCORES, Options, Translator
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import RawClient, running

GET = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
FOREVER = 60.0


@pytest.mark.parametrize(
    "behind",
    [b"\r\n", b"\r\n\r\n", b"POST /health HTTP/1.1\r\nHost: t\r\ncontent-length: 10\r\n\r\nx", b"GE", b""],
    ids=["CRLF", "two CRLF", "a byte of a body", "part of a head", "nothing"],
)
async def test_connection_without_a_complete_request_is_closed(
    app: Starlette, monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    """Whatever its client sends after an answer, or before any request."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 1.0)
    async with running(app) as server:
        after, before = [await RawClient.connect(server) for _ in range(2)]
        await after.send(GET)
        assert (await after.answer())[0] == 200
        await after.send(behind)
        await before.send(behind)
        assert await after.closed(FOREVER) and await before.closed(FOREVER)
        await after.close()
        await before.close()


async def test_client_disconnect_is_detected_behind_pipelined_requests(
    app: Starlette, generator: FakeGenerator
) -> None:
    generator.script = [Delta("a", (1,)), FOREVER]
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", {"prompt": "Hello", "stream": True})
        await generator.until(submitted=1)
        await client.send(GET * 3)
        await asyncio.sleep(0.05)
        await client.close()
        await generator.until(finished=1)


async def test_too_many_pipelined_requests_close_the_connection(app: Starlette, generator: FakeGenerator) -> None:
    generator.script = [FOREVER]
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", {"prompt": "Hello"})
        await generator.until(submitted=1)
        await client.send(GET * (http_server.MAX_PIPELINED + 1))
        assert await client.closed()
        await generator.until(finished=1)
        await client.close()


def whole(text: str, **more: Any) -> Delta:
    return Delta(text, (1,), "stop", usage=Usage(3, 1), **more)


async def test_input_beyond_the_pipelining_limit_is_not_parsed(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """14,000 requests in one piece blocked the event loop for seconds."""
    heads: list[int] = []
    complete = http_server.GuardedProtocol.on_headers_complete

    def counted(protocol: http_server.GuardedProtocol) -> None:
        heads.append(len(protocol._cycles))
        complete(protocol)

    monkeypatch.setattr(http_server.GuardedProtocol, "on_headers_complete", counted)
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.send(b"GET / HTTP/1.1\r\n\r\n" * 14_000)
        assert await client.closed(FOREVER)
        await client.close()
    assert len(heads) == http_server.MAX_PIPELINED + 1 and max(heads) <= http_server.MAX_PIPELINED


async def test_chunked_body_is_parsed_in_small_pieces(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one-byte chunk costs a callback, so input is read in small pieces, and other tasks run between them."""
    largest: list[int] = []
    received = http_server.GuardedProtocol.data_received

    def measured(protocol: http_server.GuardedProtocol, data: bytes) -> None:
        largest.append(len(data))
        received(protocol, data)

    monkeypatch.setattr(http_server.GuardedProtocol, "data_received", measured)
    async with running(app) as server:
        client = await RawClient.connect(server)
        head = HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked")
        await client.send(head + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n")
        assert (await client.answer())[0] == 400
        await client.close()
    assert sum(largest) > 120_000 and max(largest) <= http_server.READ_BYTES


async def test_connection_is_closed_if_the_client_does_not_read_the_response(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = FakeGenerator([whole("x" * 50_000_000)])
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.5)
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect_without_reading(server)
        await client.post("/v1/completions", {"prompt": "Hello"})
        protocols = server.server_state.connections
        async with asyncio.timeout(FOREVER):
            while not protocols:
                await asyncio.sleep(0.01)
            while protocols:
                await asyncio.sleep(0.01)
        await client.close()


async def test_connection_is_closed_if_pipelined_responses_are_not_read(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.5)
    app = create_app(FakeGenerator(), text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect_without_reading(server)
        protocols = server.server_state.connections
        await client.send(b"GET / HTTP/1.1\r\nhost: t\r\n\r\n" * http_server.MAX_PIPELINED)
        async with asyncio.timeout(FOREVER):
            while not protocols:
                await asyncio.sleep(0.01)
            (protocol,) = protocols
            assert not protocol.transport.is_closing()
            while protocols:
                await asyncio.sleep(0.01)
        assert not protocol.cycle.response_complete
        await client.close()


@pytest.mark.parametrize(
    "trailers",
    [b"a:b\r\n" * 60_000, b"a" * 300_000, b"a:" + b"b" * 300_000],
    ids=["many", "one name without an end", "one value without an end"],
)
@pytest.mark.parametrize("parts", [1, 7])
async def test_trailers_are_dropped_and_their_bytes_counted(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch, trailers: bytes, parts: int
) -> None:
    kept, sizes = list[int](), list[int]()
    complete = http_server.GuardedProtocol.data_received

    def noted(self: http_server.GuardedProtocol, data: bytes) -> None:
        complete(self, data)
        kept.append(len(self.headers))
        sizes.append(len(data))

    monkeypatch.setattr(http_server.GuardedProtocol, "data_received", noted)
    app = create_app(FakeGenerator(), text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.send(HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked"))
        await asyncio.sleep(0.05)
        await client.send(b"1\r\n{\r\n0\r\n")
        await asyncio.sleep(0.05)
        size = len(trailers) // parts
        with contextlib.suppress(ConnectionError):
            for number in range(parts):
                await client.send(trailers[number * size : (number + 1) * size])
                await asyncio.sleep(0.02)
        assert await client.closed(FOREVER)
        assert max(kept) < 10 and sum(sizes) < 60_000
        await client.close()


async def test_requests_with_a_few_trailers_succeed(text_model: TextModel) -> None:
    app = create_app(FakeGenerator([whole("hello")]), text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect(server)
        body = b'{"prompt": "Hello"}'
        head = HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked")
        for _ in range(2):
            await client.send(head + b"%x\r\n%b\r\n0\r\nchecksum: 1\r\n\r\n" % (len(body), body))
            assert (await client.answer())[0] == 200
        await client.close()


async def test_total_memory_of_large_responses_being_sent_is_bounded(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small answers are sent, however much memory the large ones take."""
    monkeypatch.setattr(http_generation, "MAX_LARGE_BYTES", 10_000_000)
    generator = FakeGenerator([whole("x" * 8_000_000)])
    app = create_app(generator, text_model, HttpSettings("tiny"))
    large = http_generation._LARGE
    async with running(app) as server:
        slow = await RawClient.connect_without_reading(server)
        other = await RawClient.connect(server)
        await slow.post("/v1/completions", {"prompt": "Hello"})
        async with asyncio.timeout(FOREVER):
            while not large._bytes:
                await asyncio.sleep(0.01)
            await other.post("/v1/completions", {"prompt": "Hello"})
            status, headers, body = await other.answer()
            assert (status, headers["retry-after"]) == (503, "5") and b"large responses" in body
            generator.script = [whole("y" * 100)]
            await other.post("/v1/completions", {"prompt": "Hello"})
            assert (await other.answer())[0] == 200
            await slow.close()
            while large._bytes:
                await asyncio.sleep(0.01)
            generator.script = [whole("x" * 8_000_000)]
            await other.post("/v1/completions", {"prompt": "Hello"})
            assert (await other.answer())[0] == 200
        await other.close()
    assert not large._bytes


async def test_slowly_read_response_is_delivered_completely(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = FakeGenerator([whole("x" * 4_000_000)])
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 2.0)
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", {"prompt": "Hello"})
        got = 0
        while got < 4_000_000:  # takes longer than the limit for a client that reads nothing
            data = await client.reader.read(65536)
            assert data
            got += len(data)
            await asyncio.sleep(0.04)
        await client.close()


async def test_total_memory_of_request_bodies_being_read_is_bounded(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "MAX_READING_BYTES", 150_000)
    generator = FakeGenerator()
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with running(app) as server:
        first, second, third = [await RawClient.connect(server) for _ in range(3)]
        await first.send(HEAD % 1_000_000 + b" " * 100_000)
        await asyncio.sleep(0.1)
        await second.send(HEAD % 1_000_000 + b" " * 100_000)
        status, _, body = await second.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        await first.close()
        await asyncio.sleep(0.1)
        await third.post("/v1/completions", {"prompt": "Hello" * 25_000})  # the first body's memory is free again
        assert (await third.answer())[0] in (200, 400)
        await second.close()
        await third.close()


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 128, "echo": True, "logprobs": 20, "max_tokens": 1}, "logprobs"),
        ({"n": 128, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        ({"n": 128, "logprobs": 20, "max_tokens": 500}, "logprobs"),
    ],
)
async def test_too_many_requested_log_probabilities_are_refused(
    text_model: TextModel, more: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = FakeGenerator()
    monkeypatch.setattr(text_model, "max_model_len", 8192)
    async with running(create_app(generator, text_model, HttpSettings("tiny"))) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", {"prompt": [3] * 4000, **more})
        status, _, body = await client.answer()
        error = json.loads(body)["error"]
        assert status == 400 and error["param"] == param and "log-probabilities" in error["message"]
        assert not generator.submissions
        await client.close()


async def test_prompt_logprobs_are_built_once_for_all_choices_off_the_event_loop(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, threads = 0, 0
    of_prompt, to_thread = CompletionLogprobs.of_prompt, asyncio.to_thread

    def counted(*what: Any) -> Any:
        nonlocal scored
        scored += 1
        return of_prompt(*what)

    async def threaded(*what: Any) -> Any:
        nonlocal threads
        threads += what[0].__name__ != "count_files"  # not counted: a call of the server itself
        return await to_thread(*what)

    monkeypatch.setattr(CompletionLogprobs, "of_prompt", counted)
    monkeypatch.setattr(asyncio, "to_thread", threaded)
    entry = TokenLogprob(3, -0.5, 1, tuple(range(5)), (-0.5,) * 5)
    prompt = (entry,) * 999
    ends = Delta("a", (3,), "stop", usage=Usage(1000, 1), logprobs=(entry,))
    script = [ends._replace(choice=c, prompt_logprobs=None if c else prompt) for c in range(4)]
    generator = FakeGenerator(script)
    monkeypatch.setattr(text_model, "max_model_len", 8192)
    asked = {"prompt": [3] * 1000, "n": 4, "echo": True, "logprobs": 5, "max_tokens": 1}
    async with running(create_app(generator, text_model, HttpSettings("tiny"))) as server:
        client = await RawClient.connect(server)
        await client.post("/v1/completions", asked)
        status, _, body = await client.answer()
        choices = json.loads(body)["choices"]
        assert status == 200 and scored == 1 and threads == 1
        assert all(choice["logprobs"] == choices[0]["logprobs"] for choice in choices)
        assert len(choices[3]["logprobs"]["text_offset"]) == 1001
        await client.close()


async def test_logit_bias_outside_the_float_range_is_refused_by_name(app: Starlette) -> None:
    async with running(app) as server:
        client = await RawClient.connect(server)
        body = b'{"prompt": "a", "logit_bias": {"3": 1' + b"0" * 400 + b"}}"
        await client.send(HEAD % len(body) + body)
        status, _, answer = await client.answer()
        assert status == 400 and "logit_bias" in json.loads(answer)["error"]["message"]
        await client.close()


async def test_default_max_tokens_is_reduced_to_the_log_probability_limit(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a chat may fill the context. Its client gave no length that could be refused, so it is reduced."""
    monkeypatch.setattr(text_model, "max_model_len", 131_072)
    message = [ChatMessage("user", "Hello")]
    translate = Translator(text_model).from_messages
    scored = await translate("r", message, Options(logprobs=20, n=2))
    assert scored.max_tokens == MAX_SCORES // 42
    assert (await translate("r", message, Options())).max_tokens > 131_000


async def test_incomplete_large_bodies_do_not_block_small_ones(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_body, "MAX_READING_BYTES", 150_000)
    async with running(create_app(FakeGenerator(), text_model, HttpSettings("tiny"))) as server:
        holder, other = [await RawClient.connect(server) for _ in range(2)]
        await holder.send(HEAD % 1_000_000 + b" " * 200_000)
        await asyncio.sleep(0.1)
        await other.post("/v1/completions", {"prompt": "Hello"})
        assert (await other.answer())[0] == 200
        await holder.close()
        await other.close()


async def test_connection_is_closed_if_a_fully_buffered_response_is_not_read(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app has written the whole answer, but its end is still in the send buffer: no answer is in progress."""
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 1)
    monkeypatch.setattr(http_server, "CLOSE_S", 0.5)
    app = create_app(FakeGenerator([whole("x" * 150_000)]), text_model, HttpSettings("tiny"))
    async with running(app) as server:
        client = await RawClient.connect_without_reading(server)
        await client.post("/v1/completions", {"prompt": "Hello"})
        protocols = server.server_state.connections
        async with asyncio.timeout(20.0):
            while not protocols:
                await asyncio.sleep(0.01)
            while protocols:
                await asyncio.sleep(0.01)
        await client.close()
