"""Anthropic's official Python client over the app: streaming helpers, tool runner, structured output, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_async_tool
from pydantic import BaseModel
from starlette.applications import Starlette

from baton.core.errors import DeadlineExceeded, InvariantError, QuotaExceeded, Unavailable
from coordinator.api_keys import ApiKeys, read_api_keys
from coordinator.submission import Delta
from tests.coordinator.test_messages import TOOL
from tests.coordinator.test_tools import ONE, TWO
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.messages_kit import HI, messages_app, official

KEY = "sk-of-the-first-user"
ASKED: dict[str, Any] = {"model": "claude-sonnet-4", "max_tokens": 100, "messages": HI}


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    return read_api_keys(str(path))


@pytest.fixture
def app(generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch, keys: ApiKeys) -> Starlette:
    return messages_app(generator, monkeypatch, max_body_bytes=1 << 20, api_keys=keys)


@pytest.fixture
async def http(app: Starlette) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://baton") as http:
        yield http


@pytest.fixture
def client(http: httpx2.AsyncClient) -> anthropic.AsyncAnthropic:
    return official(http, api_key=KEY)


async def test_a_message_whole_and_as_raw_events(
    client: anthropic.AsyncAnthropic, generator: FakeGenerator, http: httpx2.AsyncClient
) -> None:
    generator.script = reply("Hello", " world", prompt_tokens=9, cached=4)
    message = await client.messages.create(**ASKED, metadata={"user_id": "u"}, extra_headers={"anthropic-beta": "x"})
    assert isinstance(message.content[0], anthropic.types.TextBlock) and message.content[0].text == "Hello world"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)
    assert message._request_id and message.id == f"msg_{message._request_id}"
    text = ""
    async for event in await official(http, api_key=None, auth_token=KEY).messages.create(**ASKED, stream=True):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            text += event.delta.text
    assert text == "Hello world"


async def test_the_stream_helper_builds_the_same_message(
    client: anthropic.AsyncAnthropic, generator: FakeGenerator
) -> None:
    generator.script = reply("<think>", "Hm.", "</think>", "\n", *TWO)
    asked = ASKED | {"tools": [TOOL, {"name": "now", "input_schema": {"type": "object"}}]}
    whole = await client.messages.create(**asked)
    kinds = []
    async with client.messages.stream(**asked) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_message()

    def content(message: Any) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]

    assert content(final) == content(whole) and final.usage == whole.usage
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert {"text", "thinking", "signature", "input_json"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]


async def test_an_answer_is_accepted_when_it_comes_back(
    client: anthropic.AsyncAnthropic, generator: FakeGenerator
) -> None:
    generator.script = reply("<think>", "Hm.", "</think>", ONE)
    tools: Any = [TOOL]
    first = await client.messages.create(**ASKED, tools=tools, thinking={"type": "enabled", "budget_tokens": 2000})
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*HI, first.to_param(), {"role": "user", "content": [result]}]
    generator.script = reply("Sunny.")
    again = await client.messages.create(**ASKED | {"messages": history}, tools=tools)
    assert again.content[0].type == "text" and again.content[0].text == "Sunny."


async def test_the_tool_runner_calls_and_answers(client: anthropic.AsyncAnthropic, generator: FakeGenerator) -> None:
    asked = []

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: where
        """
        asked.append(city)
        generator.script = reply("Sunny.")
        return "sunny"

    generator.script = reply(ONE)
    runner = client.beta.messages.tool_runner(**ASKED, tools=[get_weather])
    final = await runner.until_done()
    assert asked == ["Rome"] and len(generator.submissions) == 2
    assert final.content[0].type == "text" and final.content[0].text == "Sunny."


async def test_structured_output_is_parsed(client: anthropic.AsyncAnthropic, generator: FakeGenerator) -> None:
    class Person(BaseModel):
        name: str
        age: int

    generator.script = reply('{"name": "Ada"', ', "age": 36}')
    message = await client.messages.parse(**ASKED, output_format=Person)
    assert message.parsed_output == Person(name="Ada", age=36)
    assert '"age"' in generator.submissions[-1].sampling.grammar


async def test_tokens_and_models(client: anthropic.AsyncAnthropic, generator: FakeGenerator) -> None:
    tools: Any = [TOOL]
    counted = await client.messages.count_tokens(model="tiny", messages=HI, system="Be brief.", tools=tools)
    await client.messages.create(**ASKED, system="Be brief.", tools=tools)
    assert counted.input_tokens == len(generator.submissions[-1].prompt)
    models = [model async for model in client.models.list()]
    assert [(model.id, model.display_name, model.created_at.year) for model in models] == [("tiny", "tiny", 1970)]
    assert (await client.models.retrieve("tiny")).id == "tiny"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QuotaExceeded("too many"), anthropic.RateLimitError),
        (Unavailable("no worker"), anthropic.OverloadedError),
        (DeadlineExceeded("queue"), anthropic.GatewayTimeoutError),
        (InvariantError("a bug"), anthropic.InternalServerError),
    ],
)
async def test_errors_of_the_cluster_raise_the_clients_exceptions(
    client: anthropic.AsyncAnthropic, generator: FakeGenerator, error: Exception, kind: type[anthropic.APIStatusError]
) -> None:
    generator.script = [error]
    with pytest.raises(kind) as raised:
        await client.messages.create(**ASKED)
    assert raised.value.request_id and raised.value.type
    generator.script = [Delta("a", (1,)), error]
    with pytest.raises(anthropic.APIStatusError) as raised_late:
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()
    assert raised_late.value.type == raised.value.type


async def test_errors_of_the_request_raise_the_clients_exceptions(
    client: anthropic.AsyncAnthropic, http: httpx2.AsyncClient
) -> None:
    for kind, fields in (
        (anthropic.BadRequestError, {"extra_body": {"temperature": 3}}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "ab " * 4096}]}),
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.ContentTooLargeError, {"messages": [{"role": "user", "content": "a" * (1 << 20)}]}),
    ):
        with pytest.raises(kind) as raised:
            await client.messages.create(**ASKED | fields)
        assert raised.value.request_id and raised.value.api_message
    for settings in ({"api_key": "sk-of-nobody-at-all"}, {"api_key": None, "auth_token": "sk-of-nobody-at-all"}):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await official(http, **settings).messages.create(**ASKED)
        assert refused.value.type == "authentication_error" and refused.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.list()
