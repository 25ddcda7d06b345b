"""A stream that has nothing to send gets comments, so that nothing between server and client closes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from baton.core.errors import Unavailable
from coordinator.http import generation
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.front_kit import running

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "QUIET_S", 0.05)


async def _blocks(answer: httpx.Response, after_comment: asyncio.Event) -> AsyncIterator[str]:
    """Yields the blocks of a stream, and sets the event at each comment."""
    text = ""
    async for part in answer.aiter_text():
        *whole, text = (text + part).split("\n\n")
        for block in whole:
            if block == ": keep-alive":
                after_comment.set()
            yield block


async def test_a_stream_that_waits_for_its_first_token_is_kept_alive(app: Starlette, generator: FakeGenerator) -> None:
    ready = asyncio.Event()
    generator.script = [ready, *reply("Hello", " world")]
    async with running(app) as server, httpx.AsyncClient(timeout=30.0) as client:
        url = "http://{}:{}/v1/chat/completions".format(*server.address)
        async with client.stream("POST", url, json=CHAT) as answer:
            blocks = [block async for block in _blocks(answer, ready)]
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert blocks[0] == ": keep-alive" and blocks[-1] == "data: [DONE]"
    texts = [json.loads(b[6:])["choices"][0]["delta"].get("content") for b in blocks if b.startswith('data: {"')]
    assert texts == ["", "Hello", " world"]


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2], [3]]], ids=["one prompt", "two"])
async def test_a_pause_between_two_tokens_is_kept_alive_and_a_token_is_not(
    prompt: list[Any], app: Starlette, generator: FakeGenerator
) -> None:
    again = asyncio.Event()
    generator.script = [*reply("Hello", " world")[:1], again, *reply("x")]
    async with running(app) as server, httpx.AsyncClient(timeout=30.0) as client:
        url = "http://{}:{}/v1/completions".format(*server.address)
        async with client.stream("POST", url, json={"prompt": prompt, "stream": True}) as answer:
            blocks = [block async for block in _blocks(answer, again)]
    at = blocks.index(": keep-alive")
    assert at > 0 and blocks[0].startswith("data: {") and blocks[-1] == "data: [DONE]"


async def test_an_error_after_the_first_comment_is_an_event(app: Starlette, generator: FakeGenerator) -> None:
    ready = asyncio.Event()
    generator.script = [ready, Unavailable("no decode worker is left", code="no_decode_worker")]
    async with running(app) as server, httpx.AsyncClient(timeout=30.0) as client:
        url = "http://{}:{}/v1/chat/completions".format(*server.address)
        async with client.stream("POST", url, json=CHAT) as answer:
            blocks = [block async for block in _blocks(answer, ready)]
    errors = [json.loads(b[6:])["error"]["code"] for b in blocks if b.startswith('data: {"error')]
    assert errors == ["no_decode_worker"] and blocks[-1] == "data: [DONE]"


async def test_a_client_that_leaves_while_it_waits_ends_its_request(app: Starlette, generator: FakeGenerator) -> None:
    never = asyncio.Event()
    generator.script = [never]
    async with running(app) as server, httpx.AsyncClient(timeout=30.0) as client:
        url = "http://{}:{}/v1/chat/completions".format(*server.address)
        async with client.stream("POST", url, json=CHAT) as answer:
            async for _ in answer.aiter_text():
                break
        await generator.until(finished=1)


async def test_the_official_client_ignores_comments(app: Starlette, generator: FakeGenerator) -> None:
    generator.script = [0.3, *reply("Hello", " world")]
    async with running(app) as server:
        base = "http://{}:{}/v1".format(*server.address)
        async with openai.AsyncOpenAI(api_key="k", base_url=base, max_retries=0) as official:
            stream = await official.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello world"
