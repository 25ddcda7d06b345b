"""`/v1/responses`: items in and out, whole and streamed, checked with OpenAI's own types and client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.applications import Starlette

from baton.core.errors import WorkerLost
from baton.engine.grammar_automaton import load_tokenizer
from baton.runtime.model_source import builtin_directory
from coordinator import structured_output
from coordinator.http.app import HttpSettings, create_app
from coordinator.openai.responses import ResponsesBody
from coordinator.openai.validation import parse
from coordinator.structured_output import GrammarCompiler
from coordinator.text.chat import ChatMessage
from tests.coordinator.test_tools import TWO, WEATHER
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.model_dirs import shared_text_model
from tests.support.tool_templates import TEMPLATES

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
THINKS = TEMPLATES["hermes"] + "{# </think> #}"


@pytest.fixture
def app(generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    monkeypatch.setattr(structured_output, "_tokenizer", load_tokenizer(builtin_directory("target"), 4096))
    generator.grammars = GrammarCompiler(Path(), 4096, lambda: ThreadPoolExecutor(1))
    return create_app(generator, shared_text_model(THINKS), HttpSettings("tiny", created=1))


async def events_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json={"input": "Hi", "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_text_response_without_streaming(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    answer = (await client.post(PATH, json={"input": "Hi", "instructions": "Be brief.", "temperature": 0})).json()
    OfficialResponse.model_validate(answer)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "Hello world" and item["role"] == "assistant"
    assert answer["status"] == "completed" and answer["usage"]["output_tokens"] == 2
    generator.script = reply("Hel", finish="length")
    answer = (await client.post(PATH, json={"input": "Hi", "max_output_tokens": 1})).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete" and generator.submissions[-1].max_tokens == 1


async def test_streamed_response_equals_the_whole_response(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("<think>", "Hm.", "</think>", "\n", *TWO)
    whole = (await client.post(PATH, json={"input": "Hi", "tools": [TOOL]})).json()
    OfficialResponse.model_validate(whole)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][2]["arguments"] == '{"city": "Rome"}'
    events = await events_of(client, tools=[TOOL])
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed" and events[0]["type"] == "response.created"

    def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]

    assert without_ids(final["output"]) == without_ids(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"] and final["usage"] == whole["usage"]
    for index, item in enumerate(final["output"]):
        parts = [e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(parts) == text and len(parts) > 1 - (item["type"] == "reasoning")


async def test_interrupted_stream_ends_with_an_error_event(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = [*reply("a", "b")[:1], WorkerLost("both died")]
    last = (await events_of(client))[-1]
    assert (last["type"], last["code"]) == ("error", "worker_lost") and "both died" in last["message"]


async def test_official_client_completes_requests_streams_and_tool_calls(
    official: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    answer = await official.responses.create(model="tiny", input="Hi")
    assert answer.output_text == "Hello world"
    async with official.responses.stream(model="tiny", input=[{"role": "user", "content": "Hi"}]) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output_text == "Hello world"
    assert kinds.count("response.output_text.delta") == 2
    generator.script = reply(*TWO)
    tools: Any = [TOOL]
    answer = await official.responses.create(model="tiny", input="Weather?", tools=tools)
    call = answer.output[1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Rome"}
    history: Any = [{"role": "user", "content": "Weather?"}, *[item.model_dump() for item in answer.output]]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    generator.script = reply("Sunny.")
    assert (await official.responses.create(model="tiny", input=history, tools=tools)).output_text == "Sunny."


def test_input_items_are_converted_to_chat_messages() -> None:
    call = {"type": "function_call", "id": "fc", "status": "completed", "name": "f"}
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs", "summary": []},
            {"type": "message", "id": "msg", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            call | {"call_id": "1", "arguments": '{"x": 1}'},
            call | {"call_id": "2", "arguments": ""},
            call | {"call_id": "3", "arguments": '{"x', "name": "no name: \ufffd"},
            {"type": "function_call_output", "call_id": "1", "output": "d"},
        ],
    }
    parsed = parse(ResponsesBody, json.dumps(body).encode())
    system, user, assistant, tool = parsed.chat()
    assert system == ChatMessage("system", "Be brief.") and user == ChatMessage("user", "a\nb")
    assert assistant.content == "c"
    assert [c["function"]["arguments"] for c in assistant.tool_calls] == [{"x": 1}, {}, '{"x']
    assert tool == ChatMessage("tool", "d", tool_call_id="1")


async def test_text_format_and_tool_choice_set_the_grammar(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    wanted = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}}
    answer = (await client.post(PATH, json={"input": "Hi", "text": wanted})).json()
    assert "city" in generator.submissions[-1].sampling.grammar
    assert answer["text"]["format"]["schema"] == WEATHER
    chosen = {"type": "function", "name": "get_weather"}
    answer = (await client.post(PATH, json={"input": "Hi", "tools": [TOOL], "tool_choice": chosen})).json()
    assert answer["tool_choice"] == chosen and "get_weather" in generator.submissions[-1].sampling.grammar
    forced = generator.submissions[-1].sampling.grammar
    fields = {"input": "Hi", "tools": [TOOL], "text": wanted}
    answer = (await client.post(PATH, json=fields | {"tool_choice": chosen})).json()
    assert generator.submissions[-1].sampling.grammar == forced, "a forced call goes before the format"
    await client.post(PATH, json=fields)
    assert "calls | content" in generator.submissions[-1].sampling.grammar


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "a", "id": 10**30}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": "a", "status": deep(300)}]}, "input[0].status"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"tools": [{"name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL | {"parameters": {"a": 10**30}}]}, "tools"),
    ({"tools": [TOOL | {"parameters": deep(300)}], "tool_choice": "none"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "banana"}}}}, "text.format.schema"),
    ({"inputs": "a"}, "inputs"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[json.dumps(f)[:50] for f, _ in REFUSED])
async def test_invalid_fields_are_refused_by_name(
    client: httpx.AsyncClient, generator: FakeGenerator, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(PATH, json={"input": "Hi"} | fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert not generator.submissions


async def test_ignored_fields_are_accepted_and_listed_in_a_header(client: httpx.AsyncClient) -> None:
    inert = {"store": True, "reasoning": {"effort": "low"}, "include": [], "truncation": "auto", "metadata": {"a": "b"}}
    answer = await client.post(PATH, json={"input": "Hi"} | inert)
    assert answer.status_code == 200 and answer.json()["metadata"] == {"a": "b"}
    assert answer.headers["x-ignored-fields"] == "metadata, reasoning, truncation"
