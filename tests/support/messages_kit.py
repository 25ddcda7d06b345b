"""Requests of Anthropic's Messages API over a fake generator, each answer checked with Anthropic's own types."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter
from starlette.applications import Starlette

from baton.engine.grammar_automaton import load_tokenizer
from baton.runtime.model_source import builtin_directory
from coordinator import structured_output
from coordinator.http.app import HttpSettings, create_app
from coordinator.structured_output import GrammarCompiler
from tests.support.fake_generator import FakeGenerator
from tests.support.model_dirs import shared_text_model
from tests.support.tool_templates import TEMPLATES

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, Any] = {"model": "tiny", "max_tokens": 64, "messages": HI}
VERSION = {"anthropic-version": "2023-06-01"}
_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def messages_app(generator: FakeGenerator, patch: pytest.MonkeyPatch, **settings: Any) -> Starlette:
    """Returns an app whose model calls tools in the form of Qwen, and thinks."""
    model = shared_text_model(TEMPLATES["hermes"] + "{# </think> #}")
    patch.setattr(structured_output, "_tokenizer", load_tokenizer(builtin_directory("target"), 4096))
    generator.grammars = GrammarCompiler(Path(), 4096, lambda: ThreadPoolExecutor(1))
    return create_app(generator, model, HttpSettings("tiny", created=1, **settings))


async def whole(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """Returns an answer that is not streamed."""
    answer = await client.post(PATH, json=GOOD | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    Message.model_validate(found, strict=True)
    return found


async def streamed(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """Returns the events of an answer."""
    answer = await client.post(PATH, json=GOOD | {"stream": True} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def events_of(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream that has ended, each checked."""
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            check_error(event)
        elif event["type"] != "ping":  # the client does not have a type for it: it reads past it
            _EVENT.validate_python(event, strict=True)
        found.append(event)
    return found


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that events build, and checks their order."""
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    message, is_open = dict(events[0]["message"]), False
    assert message["content"] == [] and message["stop_reason"] is None
    content: list[dict[str, Any]] = []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append(dict(event["content_block"]))
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                kind, delta = event["delta"]["type"], event["delta"]
                if kind == "input_json_delta":
                    arguments += delta["partial_json"]
                    assert content[-1]["type"] == "tool_use"
                else:
                    name = kind.removesuffix("_delta")
                    content[-1][name] += delta[name]
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(arguments)
                is_open = False
            case other:
                assert other == "ping"
    assert not is_open and kinds.count("ping") == (1 if content else 0)
    return message | events[-2]["delta"] | {"content": content, "usage": events[-2]["usage"]}


def check_error(body: dict[str, Any]) -> None:
    """Checks the form of an error; the client's types do not have `request_too_large`, which its documentation has."""
    assert set(body) == {"type", "error", "request_id"} and body["request_id"]
    assert set(body["error"]) == {"type", "message", "details"} and body["error"]["details"]["error_code"]
    if body["error"]["type"] != "request_too_large":
        ErrorResponse.model_validate(body, strict=True)


def official(http: Any, **settings: Any) -> anthropic.AsyncAnthropic:
    """Returns Anthropic's own client."""
    made = {"api_key": "k", "base_url": "http://baton", "max_retries": 0} | settings
    return anthropic.AsyncAnthropic(http_client=http, **made)
