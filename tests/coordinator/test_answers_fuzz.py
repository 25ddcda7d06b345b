"""2,000 random valid requests over every text API: each reply and each event fits the official schemas and types.

The output is random, too: text, reasoning, tool calls, whole or cut, in random pieces. A streamed answer must build up
the same as the whole one.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.applications import Starlette

from baton.core.errors import WorkerLost
from baton.core.request import TokenLogprob
from coordinator.anthropic.render import input_of
from coordinator.submission import Delta
from tests.coordinator.test_schema_openai import fits
from tests.support import messages_kit
from tests.support.fake_generator import FakeGenerator, reply

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANTHROPIC_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é\\"1"}}\n</tool_call>'
TEXTS = ["", "Hello", " wörld 🙂", "\n\n", "<b>", "}", "a" * 40, "<tool", "\u2028"]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}


def output(chance: random.Random) -> str:
    text = "".join(chance.choices(TEXTS, k=chance.randrange(1, 4)))
    if chance.random() < 0.3:
        text = f"<think>{chance.choice(TEXTS)}</think>\n" + text
    if chance.random() < 0.4:
        text += CALL * chance.randrange(1, 3)
    return text[: chance.randrange(1, len(text) + 1)] if text and chance.random() < 0.3 else text


def script(chance: random.Random, *, logprobs: bool) -> list[Any]:
    """Returns the deltas of a random output, all with log-probabilities if they were asked for."""
    text, pieces = output(chance), list[str]()
    while text:
        size = chance.randrange(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    deltas = reply(*(pieces or [""]), finish=chance.choice(["stop", "length"]))
    if not logprobs:
        return list(deltas)
    return [d._replace(logprobs=(TokenLogprob(40, -0.5, 1, (40, 41), (-0.5, -1.0)),)) for d in deltas]  # type: ignore[union-attr]


def request(chance: random.Random) -> tuple[str, dict[str, Any], bool]:
    """Returns the path and body of a request, and whether it asks for log-probabilities."""
    path = chance.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
    some = lambda names: {n: v for n, v in names.items() if chance.random() < 0.3}  # noqa: E731
    shared = some({"temperature": 0.5, "top_p": 0.9, "metadata": {"user_id": "u"}})
    function = {"name": "f", "description": "F", "parameters": PARAMETERS}
    stream, tools, scored = chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.3
    body: dict[str, Any]
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50} | shared
        body |= some({"seed": 1, "stop": ["zzz"], "presence_penalty": 0.5, "n": 1, "return_token_ids": True})
        body |= {"tools": [{"type": "function", "function": function}]} if tools else {}
        body |= {"logprobs": True, "top_logprobs": 2} if scored else {}
        body |= {"stream_options": {"include_usage": True}} if stream and chance.random() < 0.5 else {}
    elif path == COMPLETIONS:
        body = {"prompt": "Hi", "max_tokens": 50} | shared | some({"echo": True, "suffix": None, "seed": 3})
        body |= {"logprobs": 2} if scored and not body.get("echo") else {}
        scored = "logprobs" in body
    elif path == RESPONSES:
        body = {"input": "Hi", "max_output_tokens": 50} | shared
        body |= some({"store": False, "instructions": "Be brief.", "include": ["reasoning.encrypted_content"]})
        kinds = [{"type": "function", **function}, {"type": "custom", "name": "g"}, {"type": "web_search"}]
        body |= {"tools": chance.sample(kinds, chance.randrange(1, 4))} if tools else {}
        body |= {"top_logprobs": 2} if scored else {}
    else:
        body = messages_kit.GOOD | shared | some({"system": "Be brief.", "stop_sequences": ["zzz"], "top_k": 5})
        schema = {"name": "f", "description": "F", "input_schema": PARAMETERS}
        body |= {"tools": [schema, {"type": "web_search_20250305", "name": "web_search"}]} if tools else {}
        scored = False
    return path, body | ({"stream": True} if stream else {}), scored


def without_stream(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")}


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def check_stream(path: str, text: str) -> None:
    for event in events_of(text):
        if path == CHAT:
            fits("CreateChatCompletionStreamResponse", event)
        elif path == COMPLETIONS:
            choices = [c | {"finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]
            fits("CreateCompletionResponse", event | {"choices": choices})  # OpenAI's streams have null there, too
        elif path == RESPONSES:
            EVENT.validate_python(event)
        elif event["type"] != "ping":
            ANTHROPIC_EVENT.validate_python(event, strict=True)


def check_whole(path: str, answer: dict[str, Any]) -> None:
    if path == CHAT:
        fits("CreateChatCompletionResponse", answer)
    elif path == COMPLETIONS:
        fits("CreateCompletionResponse", answer)
    elif path == RESPONSES:
        OfficialResponse.model_validate(answer, strict=True)
    else:
        Message.model_validate(answer, strict=True)


def of_whole(path: str, answer: dict[str, Any]) -> tuple[str, str, list[Any]]:
    """Returns the text, the reasoning and the calls (name and arguments) of a whole answer."""
    if path == COMPLETIONS:
        return answer["choices"][0]["text"], "", []
    if path == CHAT:
        message = answer["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        return message["content"] or "", message.get("reasoning") or "", calls
    items = answer["output" if path == RESPONSES else "content"]
    texts, reasons, calls = [], [], []
    for item in items:
        match item["type"]:
            case "message":
                texts += [part["text"] for part in item["content"]]
            case "reasoning":
                reasons += [part["text"] for part in item["content"]]
            case "function_call":
                calls.append((item["name"], item["arguments"]))
            case "text":
                texts.append(item["text"])
            case "thinking":
                reasons.append(item["thinking"])
            case "custom_tool_call" | "tool_use":
                calls.append((item["name"], item["input"]))
    return "".join(texts), "".join(reasons), calls


def of_stream(path: str, text: str) -> tuple[str, str, list[Any]]:
    """Returns the same of a stream, built up from its deltas only."""
    content, reasoning, calls = "", "", list[list[str]]()
    for event in events_of(text):
        if path in (CHAT, COMPLETIONS):
            for choice in event["choices"]:
                delta = choice.get("delta", {"content": choice.get("text")})
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning") or ""
                for call in delta.get("tool_calls", ()):
                    if call["index"] == len(calls):
                        calls.append([call["function"]["name"], ""])
                    calls[call["index"]][1] += call["function"].get("arguments") or ""
            continue
        delta = event.get("delta")
        match event["type"]:
            case "response.output_text.delta":
                content += delta
            case "response.reasoning_text.delta":
                reasoning += delta
            case "response.output_item.added" if "name" in event["item"]:
                calls.append([event["item"]["name"], ""])
            case "response.function_call_arguments.delta" | "response.custom_tool_call_input.delta":
                calls[-1][1] += delta
            case "content_block_start" if "name" in event["content_block"]:
                calls.append([event["content_block"]["name"], ""])
            case "content_block_delta":
                content += delta.get("text", "")
                reasoning += delta.get("thinking", "")
                if "partial_json" in delta:
                    calls[-1][1] += delta["partial_json"]
    if path == CHAT and calls and not content.strip():
        content = ""  # a whole chat with calls has no blank content
    as_input = input_of if path == MESSAGES else str
    return content, reasoning, [(name, as_input(arguments)) for name, arguments in calls]


async def fuzz(app: Starlette, generator: FakeGenerator, seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        for seed in seeds:
            chance = random.Random(seed)
            path, body, scored = request(chance)
            generator.script = script(chance, logprobs=scored)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (seed, body, answer.text)
            try:
                if body.get("stream"):
                    check_stream(path, answer.text)
                    again = (await client.post(path, json=without_stream(body))).json()
                    assert of_stream(path, answer.text) == of_whole(path, again), again
                else:
                    check_whole(path, answer.json())
            except Exception as error:
                raise AssertionError(f"seed {seed}: {path} {body}\n{answer.text[:2000]}\n{error}") from error
            seen[path + (" stream" if body.get("stream") else "")] += 1
    return seen


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 2000), marks=pytest.mark.long)], ids=str)
async def test_every_reply_and_event_fits_the_official_schemas(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    app = messages_kit.messages_app(generator, monkeypatch)
    seen = await fuzz(app, generator, seeds)
    assert len(seen) == 8 and min(seen.values()) > 10


async def test_a_reply_that_does_not_fit_is_detected() -> None:
    for path, answer in ((CHAT, {"id": 1}), (COMPLETIONS, {}), (RESPONSES, {"id": "a"}), (MESSAGES, {"id": "a"})):
        with pytest.raises((jsonschema.ValidationError, ValueError)):
            check_whole(path, answer)
    with pytest.raises(ValueError):
        check_stream(MESSAGES, 'data: {"type": "message_start", "message": {}}\n\n')


async def test_an_error_in_a_stream_fits_too(generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    app = messages_kit.messages_app(generator, monkeypatch)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        for path, body in ((RESPONSES, {"input": "Hi"}), (MESSAGES, messages_kit.GOOD)):
            generator.script = [Delta("a", (1,)), WorkerLost("both died")]
            answer = await client.post(path, json=body | {"stream": True})
            last = list(events_of(answer.text))[-1]
            assert last["type"] == "error"
            if path == MESSAGES:
                messages_kit.check_error(last)
            else:
                EVENT.validate_python(last)
