"""`/v1/responses` as Codex and the SDKs send it: tools of other kinds, stored answers, reasoning, log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response as OfficialResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json
from starlette.applications import Starlette

from baton.core.request import TokenLogprob
from baton.runtime.disk import StorageFailed
from coordinator.api_keys import read_api_keys
from coordinator.http.app import HttpSettings, create_app
from coordinator.openai import responses_render
from coordinator.openai.responses import ResponsesBody
from coordinator.openai.responses_items import decoded, encoded
from coordinator.openai.responses_tools import internal_name
from coordinator.openai.validation import parse
from coordinator.responses_store import DatabaseResponses, MemoryResponses, Stored
from coordinator.submission import Delta
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.model_dirs import shared_text_model
from tests.support.tool_templates import TEMPLATES

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
CODEX = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "x", "call_id": "c2", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Done."}]},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
    ],
    "tools": [
        SHELL,
        PATCH,
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__files__",
            "description": "Files.",
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
}


@pytest.fixture
def app(generator: FakeGenerator) -> Starlette:
    model = shared_text_model(TEMPLATES["hermes"] + "{# </think> #}")
    return create_app(generator, model, HttpSettings("tiny", created=1))


async def events_of(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json={"input": "Hi", "stream": True} | fields)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    for event in events:
        EVENT.validate_python(event)
    return events


def called(name: str, arguments: dict[str, Any]) -> list[str]:
    call = json.dumps({"name": name, "arguments": arguments})
    return ["<tool_call>", "\n", *(call[at : at + 7] for at in range(0, len(call), 7)), "\n", "</tool_call>"]


async def test_codex_s_request_is_served_and_what_cannot_run_is_named(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    answer = await client.post(PATH, json=CODEX)
    assert answer.status_code == 200, answer.text
    OfficialResponse.model_validate(answer.json())
    ignored = set(answer.headers["x-ignored-fields"].split(", "))
    assert {"tools.web_search", "input.web_search_call", "client_metadata", "reasoning"} <= ignored
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function", "custom", "namespace"]
    assert len(generator.submissions) == 1


async def test_calls_of_custom_and_namespaced_tools_have_their_own_form(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    text = 'line "1"\nline 2'
    generator.script = reply(*called("apply_patch", {"input": text}), *called("mcp__files__read", {}))
    tools = {"tools": CODEX["tools"]}
    events = await events_of(client, **tools)
    custom, function = events[-1]["response"]["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", text)
    assert (function["type"], function["name"], function["namespace"]) == ("function_call", "read", "mcp__files__")
    grown = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(grown) == text and len(grown) > 1
    assert [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"] == [text]
    generator.script = reply(*called("apply_patch", {"input": text}))
    whole = (await client.post(PATH, json={"input": "Hi"} | tools)).json()
    assert whole["output"][0]["input"] == text


async def test_a_long_custom_call_is_read_a_bounded_number_of_times(
    client: httpx.AsyncClient, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def counting(arguments: str, **how: Any) -> Any:
        read.append(len(arguments))
        return from_json(arguments, **how)

    monkeypatch.setattr(responses_render, "from_json", counting)
    text = "0123456789" * 2000
    generator.script = reply(*called("apply_patch", {"input": text}))
    events = await events_of(client, tools=[PATCH])
    grown = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(grown) == text and max(map(len, grown)) <= 2 * len(text) // responses_render.UNREAD_SHARE
    assert sum(read) < 2 * responses_render.UNREAD_SHARE * len(text)


async def test_a_custom_call_that_was_cut_is_incomplete(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("<tool_call>", '\n{"name": "apply_patch", "arguments": {"input": "ab', finish="length")
    answer = (await client.post(PATH, json={"input": "Hi", "tools": [PATCH]})).json()
    assert answer["status"] == "incomplete"


@pytest.mark.parametrize(
    ("choice", "shown", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, {"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
            ["shell"],
        ),
    ],
)
def test_a_choice_may_name_a_custom_tool_or_a_subset(choice: Any, shown: Any, names: list[str]) -> None:
    body = parse(ResponsesBody, json.dumps({"input": "a", "tools": [SHELL, PATCH], "tool_choice": choice}).encode())
    tools = body.tooling()
    assert [f.name for f in tools.forced] == (names if choice["type"] == "custom" else [])
    if choice["type"] == "allowed_tools":
        assert sorted(tools.functions) == names


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [SHELL], "tool_choice": {"type": "custom", "name": "shell"}}, "tool_choice"),
        ({"tools": [SHELL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [SHELL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tools": [SHELL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "custom", "name": "x"}]}},
            "tool_choice",
        ),
        ({"tools": [SHELL], "tool_choice": {"type": "function", "name": "shell", "namespace": 1}}, "tool_choice"),
        (
            {
                "tools": [SHELL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "shell", "namespace": [1]}],
                },
            },
            "tool_choice",
        ),
        ({"tools": [PATCH | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools.format"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools.tools[0].name",
        ),
        ({"background": True}, "background"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_k": -3}, "top_k"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name(
    client: httpx.AsyncClient, generator: FakeGenerator, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(PATH, json={"input": "Hi"} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not generator.submissions


async def test_sampling_fields_reach_the_sampler(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    fields = {"seed": 7, "top_k": 3, "stop": "a", "min_p": 0.1, "logit_bias": {"5": 1}, "presence_penalty": 0.5}
    assert (await client.post(PATH, json={"input": "Hi"} | fields)).status_code == 200
    (submission,) = generator.submissions
    sampling = submission.sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p, submission.stop) == (7, 3, 0.1, ("a",))


async def test_log_probabilities_come_with_the_text(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    entry = TokenLogprob(40, -0.5, 1, (40, 41), (-0.5, -1.0))
    generator.script = [Delta("a", (40,), logprobs=(entry,)), reply("b")[0]]
    fields = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    events = await events_of(client, **fields)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [score["logprob"] for score in part["logprobs"]] == [-0.5] and len(part["logprobs"][0]["top_logprobs"]) == 2
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [len(scores) for scores in deltas] == [1, 0]
    assert generator.submissions[0].sampling.logprobs == 2


async def test_reasoning_comes_back_as_what_the_client_kept(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply("<think>", "Hm.", "</think>", "\n", "Yes.")
    answer = (await client.post(PATH, json={"input": "Hi", "include": ["reasoning.encrypted_content"]})).json()
    item = answer["output"][0]
    assert decoded(item["encrypted_content"]).strip() == "Hm."
    for kept in (
        {"type": "reasoning", "summary": [], "encrypted_content": encoded("Hm.")},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    ):
        call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
        items = [{"role": "user", "content": "a"}, kept, {"role": "assistant", "content": "b"}, call]
        _, assistant = parse(ResponsesBody, json.dumps({"input": items}).encode()).chat()
        assert (assistant.reasoning, assistant.content, len(assistant.tool_calls)) == ("Hm.", "b", 1)


async def test_a_conversation_continues_from_a_stored_answer(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    first = (await client.post(PATH, json={"input": "One", "instructions": "Not carried over."})).json()
    assert first["store"] is True
    second = (await client.post(PATH, json={"input": "Two", "previous_response_id": first["id"]})).json()
    assert second["previous_response_id"] == first["id"]
    alone = {"input": [{"role": "user", "content": "One"}, *first["output"], {"role": "user", "content": "Two"}]}
    await client.post(PATH, json=alone | {"store": False})
    assert generator.submissions[1].prompt == generator.submissions[2].prompt
    again = (await client.get(f"{PATH}/{second['id']}")).json()
    assert again == second
    items = (await client.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    assert (await client.delete(f"{PATH}/{first['id']}")).json()["deleted"]
    for answer in (await client.get(f"{PATH}/{first['id']}"), await client.delete(f"{PATH}/{first['id']}")):
        assert answer.status_code == 404
    lost = await client.post(PATH, json={"input": "a", "previous_response_id": first["id"]})
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "previous_response_not_found")
    odd = await client.get(f"{PATH}/resp_%0Aa'%5C")
    assert odd.status_code == 404 and "'resp_\\na'\\':" in odd.json()["error"]["message"]
    assert (await client.post(PATH, json={"input": "a", "previous_response_id": second["id"]})).status_code == 200


async def test_a_conversation_continues_after_a_call_of_a_function(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    wei = '{"wei": 123456789012345678901234567890, "to": "ü"}'
    generator.script = reply("<tool_call>", f'\n{{"name": "shell", "arguments": {wei}}}\n', "</tool_call>")
    first = (await client.post(PATH, json={"input": "Pay.", "tools": [SHELL]})).json()
    call = first["output"][0]
    assert json.loads(call["arguments"]) == json.loads(wei)
    generator.script = reply("Paid.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
    sent = {"input": [{"role": "user", "content": "Pay."}, call, result]}
    for again in (sent, {"input": [result], "previous_response_id": first["id"]}):
        second = (await client.post(PATH, json=again)).json()
        asked = await client.post(PATH, json={"input": "Sure?", "previous_response_id": second["id"]})
        assert asked.status_code == 200, asked.text
        items = (await client.get(f"{PATH}/{asked.json()['id']}/input_items?order=asc")).json()["data"]
        (kept,) = (item for item in items if item["type"] == "function_call")
        assert json.loads(kept["arguments"]) == json.loads(wei)
    assert generator.submissions[-1].prompt == generator.submissions[-3].prompt


async def test_answers_to_requests_of_one_id_are_stored_apart(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    answers = []
    for text in ("One", "Two"):
        generator.script = reply(text)
        answers.append((await client.post(PATH, json={"input": "Hi"}, headers={"x-request-id": "mine"})).json())
    assert len({name for answer in answers for name in (answer["id"], answer["output"][0]["id"])}) == 4
    for answer in answers:
        assert (await client.get(f"{PATH}/{answer['id']}")).json() == answer


async def test_an_input_longer_than_the_context_is_refused_by_its_own_name(client: httpx.AsyncClient) -> None:
    for sent in ("a " * 9000, [{"role": "user", "content": "a " * 9000}]):
        refused = await client.post(PATH, json={"input": sent})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")


async def test_an_answer_that_is_not_to_be_stored_is_not(client: httpx.AsyncClient) -> None:
    answer = (await client.post(PATH, json={"input": "One", "store": False})).json()
    assert answer["store"] is False
    assert (await client.get(f"{PATH}/{answer['id']}")).status_code == 404


async def test_a_stream_is_stored_before_its_end_is_sent(client: httpx.AsyncClient) -> None:
    answer = (await events_of(client))[-1]["response"]
    assert (await client.get(f"{PATH}/{answer['id']}")).json() == answer


async def test_a_tenant_sees_only_its_own_answers(generator: FakeGenerator, tmp_path: Path) -> None:
    model = shared_text_model(TEMPLATES["hermes"] + "{# </think> #}")
    file = tmp_path / "keys"
    file.write_text("first-key-long-enough\nsecond-key-long-enough\n")
    file.chmod(0o600)
    app = create_app(generator, model, HttpSettings("tiny", api_keys=read_api_keys(str(file))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        own, other = ({"authorization": f"Bearer {name}-key-long-enough"} for name in ("first", "second"))
        name = (await client.post(PATH, json={"input": "a"}, headers=own)).json()["id"]
        assert (await client.get(f"{PATH}/{name}", headers=own)).status_code == 200
        assert (await client.get(f"{PATH}/{name}", headers=other)).status_code == 404
        assert (await client.delete(f"{PATH}/{name}", headers=other)).status_code == 404


@pytest.mark.parametrize("kind", ["memory", "database"])
async def test_the_store_is_bounded_and_drops_the_oldest(kind: str, tmp_path: Path) -> None:
    store = MemoryResponses(100) if kind == "memory" else DatabaseResponses(tmp_path / "r.sqlite", 100)
    for number in range(4):
        store.put("t", f"r{number}", Stored(b"a" * 20, b"b" * 10, b"c" * 10))
    assert [await store.get("t", f"r{n}") is not None for n in range(4)] == [False, False, True, True]
    store.put("t", "large", Stored(b"a" * 200, b"", b""))
    assert await store.get("t", "large") is None
    store.put("t", "r9", Stored(b"1", b"2", b"3"))
    assert not await store.delete("u", "r9") and await store.delete("t", "r9") and not await store.delete("t", "r9")
    store.close()


@pytest.mark.parametrize("kind", ["memory", "database"])
async def test_a_tenant_that_stores_much_drops_only_its_own_answers(kind: str, tmp_path: Path) -> None:
    store = MemoryResponses(100) if kind == "memory" else DatabaseResponses(tmp_path / "r.sqlite", 100)
    store.put("small", "kept", Stored(b"a" * 20, b"", b""))
    for number in range(4):
        store.put("large", f"r{number}", Stored(b"a" * 40, b"", b""))
    store.put("large", "beyond all room", Stored(b"a" * 200, b"", b""))
    assert await store.get("small", "kept") is not None
    assert [await store.get("large", f"r{n}") is not None for n in range(4)] == [False, False, True, True]
    store.close()


async def test_a_failing_database_is_reported_and_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "r.sqlite"
    store = DatabaseResponses(path, 100)
    assert path.stat().st_mode & 0o777 == 0o600
    store._database.execute("DROP TABLE responses")
    store.put("t", "r", Stored(b"1", b"2", b"3"))
    with pytest.raises(StorageFailed, match="stored responses cannot be read"):
        await store.get("t", "r")
    assert [record.message for record in caplog.records] == ["--store: no such table: responses"] * 2
    store.close()


async def test_a_database_keeps_answers_over_a_restart(tmp_path: Path) -> None:
    first = DatabaseResponses(tmp_path / "r.sqlite", 1000)
    first.put("t", "r", Stored(b'{"output": []}', b"[]", b"[]"))
    first.close()
    second = DatabaseResponses(tmp_path / "r.sqlite", 1000)
    stored = await second.get("t", "r")
    assert stored is not None and stored.conversation() == []
    second.close()


def test_names_in_namespaces_are_unique_and_short_enough() -> None:
    assert internal_name("read") == "read" and internal_name("read", "crm") == "crm__read"
    assert internal_name("read", "mcp__files__") == "mcp__files__read"
    long = {internal_name("x" * 60 + end, "namespace") for end in "ab"}
    assert len(long) == 2 and all(len(name) <= 64 for name in long)


async def test_openai_s_client_continues_retrieves_and_deletes(app: Starlette) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton/v1") as http:
        official = openai.AsyncOpenAI(base_url="http://baton/v1", api_key="k", http_client=http, max_retries=0)
        first = await official.responses.create(model="tiny", input="One")
        second = await official.responses.create(model="tiny", input="Two", previous_response_id=first.id)
        assert (await official.responses.retrieve(second.id)).output_text == second.output_text
        listed = [item async for item in official.responses.input_items.list(second.id)]
        assert len(listed) == 3
        await official.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await official.responses.retrieve(second.id)
