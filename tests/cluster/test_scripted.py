"""Exact outputs of a scripted model through a whole cluster: calls, reasoning and stop strings, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster import Cluster, cluster
from tests.support.scripted import make_scripted
from tests.support.tool_templates import HERMES

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP 日本"}}\n</tool_call>'
SCRIPTS = {
    "call": f"<think>\nHm, STOP.\n</think>\n\nLet me see. {CALL}\n{CALL.replace('STOP', 'two')}",
    "cut": '<tool_call>\n{"name": "f", "arguments": {"b": 1}\n</tool_call>\n' + CALL,
    "answer": "<think>\nEasy to say.\n</think>\n\nIt is 4 STOP not 5.",
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = make_scripted(
        tmp_path_factory.mktemp("m") / "scripted", SCRIPTS, template=HERMES + "{# </think> #}"
    )
    with cluster(directory, dtype="float32", kv_memory_gib=0.25) as made:
        yield made


def asked(client: openai.OpenAI, messages: list[Any], **more: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Returns reasoning, content, calls and finish reason; a stream has the same."""
    options: Any = {"messages": messages, "tools": TOOLS, "max_tokens": 300, **more}
    whole = client.chat.completions.create(**options)
    message: Any = whole.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    with client.chat.completions.stream(**options) as stream:
        streamed: Any = stream.get_final_completion().choices[0]
    again = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
    assert (again, streamed.message.content or "") == (calls, message.content or "")
    assert streamed.finish_reason == whole.choices[0].finish_reason
    if message.model_extra.get("reasoning"):
        assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"]
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens
    return message.model_extra.get("reasoning", ""), message.content or "", calls, whole.choices[0].finish_reason


def test_scripted_outputs_come_out_as_written(running: Cluster) -> None:
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    history: list[Any] = [{"role": "user", "content": "[[call]] please"}]
    reasoning, content, calls, finish = asked(client, history, model=model, stop="STOP")
    assert (reasoning.strip(), content.strip(), finish) == ("Hm, STOP.", "Let me see.", "tool_calls")
    assert [json.loads(arguments)["a"] for _, arguments in calls] == ["STOP 日本", "two 日本"]
    called = [
        {"id": f"id{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate([*calls, ("f", "{")])
    ]
    history += [{"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": called}]
    history += [{"role": "tool", "tool_call_id": "id0", "content": "[[answer]]"}]
    reasoning, content, calls, finish = asked(client, history, model=model, stop="STOP")
    assert (reasoning.strip(), content, calls, finish) == ("Easy to say.", "It is 4 ", [], "stop")
    calls = asked(client, [{"role": "user", "content": "[[cut]]"}], model=model)[2]
    assert [json.loads(arguments) for _, arguments in calls] == [{"b": 1}, {"a": "STOP 日本"}]
    forced = asked(client, [{"role": "user", "content": "[[cut]]"}], model=model, tool_choice="required", seed=1)
    assert forced[2] and all(isinstance(json.loads(arguments), dict) for _, arguments in forced[2])
