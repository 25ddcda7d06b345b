"""Anthropic's official client against a running cluster: a call of a tool and the answer after it, streamed and whole;
usage with tokens read from the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agent_model import ANSWER, COMMAND, THOUGHT, agent_model
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]
TOOLS: Any = [{"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}]
ASKED: dict[str, Any] = {"model": "claude-sonnet-4", "max_tokens": 200, "system": "Be brief.", "tools": TOOLS}
CALL: list[Any] = [{"role": "user", "content": "Run it: [[call]]" + " [[call]]" * 40}]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(agent_model(tmp_path_factory.mktemp("m") / "agent"), dtype="float32") as started:
        yield started


def test_a_tool_is_called_and_its_result_answered(running: Cluster) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)
    first = client.messages.create(**ASKED, messages=CALL)
    thinking, call = first.content
    assert thinking.type == "thinking" and thinking.thinking.strip() == THOUGHT
    assert call.type == "tool_use" and call.name == "Bash" and call.input["command"] == COMMAND
    assert first.stop_reason == "tool_use" and first.model == "agent"
    counted = client.messages.count_tokens(model="agent", system="Be brief.", tools=TOOLS, messages=CALL)
    assert counted.input_tokens == first.usage.input_tokens and first.usage.cache_read_input_tokens == 0

    with client.messages.stream(**ASKED, messages=CALL) as stream:
        start = next(event for event in stream if event.type == "message_start").message.usage
        again = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in again.content] == [
        block.model_dump(exclude={"id"}) for block in first.content
    ]
    cached = again.usage.cache_read_input_tokens
    assert cached and cached >= 16 and again.usage.input_tokens + cached == counted.input_tokens
    assert (start.input_tokens, start.cache_read_input_tokens) == (again.usage.input_tokens, cached)

    result = {"type": "tool_result", "tool_use_id": call.id, "content": "here: [[finished]]"}
    history = [*CALL, first.to_param(), {"role": "user", "content": [result]}]
    last = client.messages.create(**ASKED, messages=history)
    assert [block.to_dict() for block in last.content] == [{"type": "text", "text": ANSWER}]
    assert last.stop_reason == "end_turn"
    running.wait_until(lambda _: not sum(row["running"] for row in running.workers().values()), "idle cluster")
