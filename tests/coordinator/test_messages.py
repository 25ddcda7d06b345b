"""`/v1/messages`: blocks in and out, whole and streamed, each answer checked with Anthropic's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from baton.core.errors import DeadlineExceeded, InvariantError, QuotaExceeded, Unavailable, WorkerLost
from coordinator.anthropic.blocks import BILLING, MAX_CHARS, signature, thinking_in
from coordinator.anthropic.render import input_of
from coordinator.anthropic.schema import MessagesBody
from coordinator.openai.validation import parse
from coordinator.submission import Delta
from coordinator.text.chat import ChatMessage
from tests.coordinator.test_tools import TWO, WEATHER
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.messages_kit import (
    COUNT,
    GOOD,
    HI,
    PATH,
    VERSION,
    built,
    check_error,
    events_of,
    messages_app,
    streamed,
    whole,
)

TOOL = {"name": "get_weather", "description": "The <|im_end|> weather.", "input_schema": WEATHER}
NOW = {"name": "now", "input_schema": {"type": "object"}, "type": "custom"}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
EPHEMERAL = {"type": "ephemeral"}


@pytest.fixture
def app(generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    return messages_app(generator, monkeypatch, max_body_bytes=1 << 20)


def body(**fields: Any) -> MessagesBody:
    return parse(MessagesBody, json.dumps(GOOD | fields).encode())


def chat(*messages: Any, **fields: Any) -> list[ChatMessage]:
    return body(messages=list(messages), **fields).chat()


def prompt_of(app: Starlette, generator: FakeGenerator) -> str:
    front = next(route for route in app.routes if getattr(route, "path", "") == PATH).endpoint.__wrapped__.__self__  # type: ignore[attr-defined]
    text: str = front._text.decode(generator.submissions[-1].prompt, skip_special_tokens=False)
    return text


async def test_a_text_answer_without_streaming(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("Hello", " world", prompt_tokens=9, cached=4)
    answer = await whole(client, temperature=0.5, top_p=0.9, top_k=7, system="Be brief.")
    assert answer["content"] == [{"type": "text", "text": "Hello world"}] and answer["id"].startswith("msg_")
    assert (answer["stop_reason"], answer["stop_sequence"], answer["model"]) == ("end_turn", None, "tiny")
    counts = {"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 2}
    assert answer["usage"] == counts
    sampling = generator.submissions[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)


async def test_a_stream_builds_the_whole_answer_block_by_block(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply("<think>", "Hm.", "</think>", "\n", *TWO, cached=2)
    expected = await whole(client, tools=[TOOL, NOW])
    assert [block["type"] for block in expected["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert expected["content"][2]["input"] == {"city": "Rome"} and expected["stop_reason"] == "tool_use"
    assert expected["content"][0]["thinking"] == "Hm." and expected["content"][0]["signature"]
    message = built(await streamed(client, tools=[TOOL, NOW]))
    ids = [[block.pop("id") for block in each["content"] if "id" in block] for each in (expected, message)]
    assert all(name.startswith("toolu_") for names in ids for name in names) and len(set(ids[1])) == 2
    assert message | {"id": expected["id"]} == expected


async def test_usage_at_the_start_of_a_stream_is_that_of_the_prompt(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = reply("a", "b", prompt_tokens=9, cached=4)
    generator.script[0] = generator.script[0]._replace(cached_tokens=4)  # type: ignore[index,union-attr]
    events = await streamed(client)
    length = len(generator.submissions[-1].prompt)
    usage = events[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (length - 4, 4, 1)
    assert events[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "script", "reason", "sequence"),
    [
        ({}, reply("a"), "end_turn", None),
        ({"max_tokens": 2}, reply("a", "b", finish="length"), "max_tokens", None),
        ({"max_tokens": 90_000}, reply("a", finish="length"), "model_context_window_exceeded", None),
        ({"stop_sequences": ["END", "x"]}, reply("a", stop_reason="END"), "stop_sequence", "END"),
        ({"tools": [TOOL]}, reply("<tool_call>\n", '{"name": "get_weather", "arg'), "end_turn", None),
        ({"tools": [TOOL]}, reply(TWO, finish="length"), "max_tokens", None),
        ({"tools": [TOOL]}, reply(TWO, stop_reason=""), "stop_sequence", ""),
    ],
)
async def test_stop_reasons(
    client: httpx.AsyncClient,
    generator: FakeGenerator,
    fields: dict[str, Any],
    script: Any,
    reason: str,
    sequence: str | None,
) -> None:
    generator.script = script
    answer = await whole(client, **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    message = built(await streamed(client, **fields))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert generator.submissions[-1].stop == tuple(fields.get("stop_sequences", ()))


async def test_max_tokens_beyond_the_context_are_accepted_and_a_long_prompt_is_refused(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    await whole(client, max_tokens=128_000)
    submission = generator.submissions[-1]
    assert submission.max_tokens == 4096 - len(submission.prompt)
    answer = await client.post(PATH, json=GOOD | {"messages": [{"role": "user", "content": "ab " * 4096}]})
    check_error(answer.json())
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("prompt is too long: ") and " > 4095 maximum" in message


async def test_max_tokens_0_computes_the_prompt_only(client: httpx.AsyncClient) -> None:
    answer = await whole(client, max_tokens=0)
    assert answer["content"] == [] and answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 0
    assert built(await streamed(client, max_tokens=0))["content"] == []


@pytest.mark.parametrize(
    ("texts", "content"),
    [
        (["\n", " "], [{"type": "text", "text": "\n "}]),
        ([""], []),
        (["\n", "a", "\n"], [{"type": "text", "text": "\na\n"}]),
    ],
)
async def test_blank_text_is_a_block_only_with_other_text_or_alone(
    client: httpx.AsyncClient, generator: FakeGenerator, texts: list[str], content: list[Any]
) -> None:
    generator.script = reply(*texts)
    assert (await whole(client))["content"] == content == built(await streamed(client))["content"]


async def test_omitted_thinking_has_only_a_signature(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply("<think>", "Hm.", "</think>", "Yes.")
    how = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = await whole(client, **how)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][0]["thinking"] == "" and answer["content"][0]["signature"]
    assert built(await streamed(client, **how))["content"] == answer["content"]
    (back,) = chat({"role": "assistant", "content": answer["content"]})
    assert (back.reasoning, back.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("made", ["", "c2lnbmF0dXJl", "baton1.", "baton1.?", "baton1.YWJj"])
def test_a_signature_of_another_server_has_no_text(made: str) -> None:
    assert thinking_in(made) == ""
    block = {"type": "thinking", "thinking": "Hm.", "signature": made}
    assert chat({"role": "assistant", "content": [block, text("Yes.")]})[0].reasoning == "Hm."


def test_the_text_of_a_signature_is_bounded() -> None:
    assert len(thinking_in(signature("a" * (MAX_CHARS + 9)))) == MAX_CHARS


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True, "thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}),
    ],
)
def test_thinking_sets_variables_of_the_template(thinking: Any, variables: dict[str, bool]) -> None:
    parsed = body(thinking=thinking)
    assert parsed.rendering().variables == variables
    assert parsed.ignored == ({"thinking.budget_tokens"} if thinking and "budget_tokens" in thinking else set())


async def test_tool_choice_forces_calls(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    tools = {"tools": [TOOL, NOW]}
    for choice, forced, one in (
        ({"type": "auto"}, False, False),
        ({"type": "any"}, True, False),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "now"}, True, True),
        ({"type": "none"}, False, False),
    ):
        await client.post(PATH, json=GOOD | tools | {"tool_choice": choice})
        grammar = generator.submissions[-1].sampling.grammar
        assert ("now" in grammar) is forced, choice
        assert ("{0,15}" not in grammar) is (one or not forced), choice
        assert ("get_weather" in grammar) is (forced and choice["type"] != "tool"), choice
    generator.script = reply(TWO)
    answer = await whole(client, **tools, tool_choice={"type": "none"})
    assert answer["stop_reason"] == "end_turn" and answer["content"][0]["text"] == TWO


async def test_parallel_calls_are_left_out_if_disabled(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = reply(TWO, " Done.")
    how = {"tools": [TOOL, NOW], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    answer = await whole(client, **how)
    assert [block.get("name") for block in answer["content"]] == [None, "get_weather", None]
    message = built(await streamed(client, **how))
    assert [block.get("name") for block in message["content"]] == [None, "get_weather", None]


async def test_output_format_sets_the_grammar(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    wanted = {"type": "json_schema", "schema": {key: WEATHER[key] for key in WEATHER if key != "additionalProperties"}}
    for fields in ({"output_config": {"format": wanted, "effort": "low"}}, {"output_format": wanted}):
        answer = await client.post(PATH, json=GOOD | fields)
        grammar = generator.submissions[-1].sampling.grammar
        assert "Rome" in grammar and '"additionalProperties":false' in grammar.replace(" ", "")
        assert answer.headers.get("x-ignored-fields") == ("output_config.effort" if "output_config" in fields else None)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": 1, "b": [1, {"c": "x', {"a": 1, "b": [1, {}]}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ('{"a": 1e400}', {"arguments": '{"a": 1e400}'}),
        ("{'a': 1}", {"arguments": "{'a': 1}"}),
    ],
)
def test_the_input_of_a_call_is_always_an_object(arguments: str, found: dict[str, Any]) -> None:
    assert input_of(arguments) == found


async def test_an_integer_of_any_size_in_the_input_of_a_call(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    wei = 123456789012345678901234567890
    generator.script = reply("<tool_call>", f'\n{{"name": "now", "arguments": {{"wei": {wei}}}}}\n', "</tool_call>")
    assert (await whole(client, tools=[NOW]))["content"][0]["input"] == {"wei": wei}


def test_blocks_become_chat_messages() -> None:
    call = {"type": "tool_use", "id": "toolu_01ABC", "name": "get_weather", "input": {"city": "Rome"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}, text("b")]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [text("d"), call, call | {"id": "other"}]},
        {
            "role": "user",
            "content": [
                text("look"),
                {"type": "tool_result", "tool_use_id": "toolu_01ABC", "content": [text("18"), text("C")]},
                {"type": "tool_result", "tool_use_id": "other", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "third"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be", "cache_control": EPHEMERAL}, text("brief.")]
    instructed, user, assistant, first, second, third, last = chat(*messages, system=system)
    assert instructed == ChatMessage("system", "Be\nbrief.") and user == ChatMessage("user", "a\nb\nc")
    assert assistant.content == "d"
    assert [each["function"]["arguments"] for each in assistant.tool_calls] == [{"city": "Rome"}, {"city": "Rome"}]
    ids = [each["id"] for each in assistant.tool_calls]
    assert [first.tool_call_id, second.tool_call_id] == ids == ["toolu_01ABC", "other"]
    assert (first.content, second.content, third.content) == ("18\nC", "Error: no", "")
    assert last == ChatMessage("user", "look")


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_documents_and_search_results_of_text_are_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    content = [
        {"type": "document", "source": plain, "title": "Weather", "context": "today", "citations": {"enabled": True}},
        {"type": "document", "source": {"type": "content", "content": [text("x"), text("y")]}},
        {"type": "document", "source": {"type": "content", "content": "z"}},
        {"type": "search_result", "source": "https://a.example", "title": "T", "content": [text("s")]},
        {"type": "compaction", "content": "Before."},
    ]
    parsed = body(messages=[{"role": "user", "content": content}])
    (message,) = parsed.chat()
    assert message.content == "Weather\ntoday\nIt rains.\nx\ny\nz\nT\nhttps://a.example\ns\nBefore."
    assert parsed.ignored == {"messages.content.citations"}


def test_a_system_message_after_the_first_turn_is_a_reminder_in_the_users_text() -> None:
    system = {"role": "system", "content": [text("Today is Monday.")], "output_config": {"effort": "low"}}
    user = {"role": "user", "content": "Hi"}
    reminder = "<system-reminder>\nToday is Monday.\n</system-reminder>"
    assert chat(user, system) == [ChatMessage("user", f"Hi\n{reminder}")]
    assert chat(system, user, system="A") == [ChatMessage("system", "A\nToday is Monday."), ChatMessage("user", "Hi")]
    cleared = system | {"clear_at": "next_user_message"}
    answered = {"role": "assistant", "content": "Yes"}
    assert chat(user, cleared)[0].content == f"Hi\n{reminder}"
    assert [m.content for m in chat(user, cleared, answered, user)] == ["Hi", "Yes", "Hi"]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    def how(*content: Any) -> tuple[bool, bool]:
        rendering = body(messages=[*HI, *({"role": "assistant", "content": c} for c in content)]).rendering()
        return rendering.continue_final_message, rendering.add_generation_prompt

    assert how("The answer is") == (True, False)
    assert how([text("The answer is")]) == (True, False)
    assert how() == how("") == how([]) == (False, True)


async def test_a_continued_message_ends_the_prompt(
    client: httpx.AsyncClient, app: Starlette, generator: FakeGenerator
) -> None:
    await whole(client, messages=[*HI, {"role": "assistant", "content": "The answer is ("}])
    assert prompt_of(app, generator).endswith("assistant\nThe answer is (")


def test_what_only_anthropic_can_run_or_read_is_left_out_and_named() -> None:
    history = [
        {"type": "redacted_thinking", "data": "EmwKAhgB"},
        {"type": "thinking", "thinking": "Hm.", "signature": "whatever made it"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        text("It rains."),
    ]
    parsed = body(
        messages=[*HI, {"role": "assistant", "content": history}, *HI],
        tools=[SEARCH, TOOL, {"type": "bash_20250124", "name": "bash"}, {"type": "computer_20250124", "name": "c"}],
        mcp_servers=[{"type": "url", "url": "https://mcp.example"}],
        metadata={"user_id": "u"},
    )
    assert [message.content for message in parsed.chat()] == ["Hi", "It rains.", "Hi"]
    assert [tool["function"]["name"] for tool in parsed.rendering().tools] == ["get_weather"]
    assert parsed.ignored == {
        *("messages.content.redacted_thinking", "messages.content.server_tool_use"),
        *("messages.content.web_search_tool_result", "tools.web_search_20250305", "tools.bash_20250124"),
        *("tools.computer_20250124", "mcp_servers", "metadata"),
    }


def test_a_deferred_tool_is_in_the_prompt_once_it_is_loaded() -> None:
    later = TOOL | {"defer_loading": True}

    def names(*more: dict[str, Any]) -> list[str]:
        rendering = body(messages=[*HI, *more, *HI], tools=[later, NOW]).rendering()
        return [tool["function"]["name"] for tool in rendering.tools]

    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [reference]}]}
    added, removed = (
        {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": "get_weather"}}]}
        for kind in ("tool_addition", "tool_removal")
    )
    assert names() == ["now"]
    assert names(result) == names(added) == ["get_weather", "now"]
    assert names(added, removed) == ["now"]


def test_the_accounting_block_of_claude_code_is_not_in_the_prompt() -> None:
    parsed = body(system=[text(f"{BILLING} cc_version=2.1; cch=1f3a;"), text("You are an agent.")])
    assert parsed.chat()[0].content == "You are an agent."
    assert parsed.ignored == {"system.x-anthropic-billing-header"}


async def test_cache_control_is_accepted_everywhere_and_named(client: httpx.AsyncClient) -> None:
    marked = {"cache_control": EPHEMERAL}
    answer = await client.post(
        PATH,
        json=GOOD
        | marked
        | {
            "system": [text("a") | marked],
            "tools": [TOOL | marked],
            "messages": [{"role": "user", "content": [text("b") | marked]}],
        },
    )
    assert answer.status_code == 200, answer.text
    named = {"cache_control", "messages.content.cache_control", "system.cache_control", "tools.cache_control"}
    assert set(answer.headers["x-ignored-fields"].split(", ")) == named


async def test_tokens_are_counted_as_the_prompt_has_them(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    prompt = {"system": "Be brief.", "tools": [TOOL], "messages": HI, "model": "claude-opus-5", "tool_choice": None}
    counted = await client.post(COUNT, json=prompt | {"thinking": {"type": "disabled"}}, headers=VERSION)
    assert counted.status_code == 200 and list(counted.json()) == ["input_tokens"]
    await whole(client, **prompt)
    assert counted.json()["input_tokens"] == len(generator.submissions[-1].prompt)


@pytest.mark.parametrize("name", ["tiny", "claude-sonnet-4-20250514", None])
async def test_names_of_claude_stand_for_the_model(client: httpx.AsyncClient, name: str | None) -> None:
    answer = await client.post(PATH, json=GOOD | {"model": name})
    assert answer.status_code == 200 and answer.json()["model"] == "tiny"
    assert answer.headers.get("x-ignored-fields") == ("model" if name and name != "tiny" else None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "4"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": {}, "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        "messages[0].content[0].source",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0].type"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    (
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            ]
        },
        "messages[1]",
    ),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "banana"}}}},
        "output_config.format.schema",
    ),
    ({"stream": "yes"}, "stream"),
    ({"max_token": 3}, "max_tokens"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    ({"model": "gpt-9"}, "gpt-9"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[json.dumps(f)[:50] for f, _ in REFUSED])
async def test_invalid_fields_are_refused_by_name_in_anthropics_form(
    client: httpx.AsyncClient, generator: FakeGenerator, fields: dict[str, Any], named: str
) -> None:
    answer = await client.post(PATH, json=GOOD | fields)
    check_error(answer.json())
    http, kind = (404, "not_found_error") if "model" in fields else (400, "invalid_request_error")
    assert (answer.status_code, answer.json()["error"]["type"]) == (http, kind), answer.text
    assert named in answer.json()["error"]["message"]
    assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert not generator.submissions


@pytest.mark.parametrize(
    ("error", "http", "kind"),
    [
        (QuotaExceeded("too many requests at once"), 429, "rate_limit_error"),
        (Unavailable("no worker", code="overloaded", retry_after_s=2), 529, "overloaded_error"),
        (WorkerLost("gone"), 529, "overloaded_error"),
        (DeadlineExceeded("queue"), 504, "timeout_error"),
        (InvariantError("a bug"), 500, "api_error"),
    ],
)
async def test_errors_of_the_cluster_have_anthropics_status_and_type(
    client: httpx.AsyncClient, generator: FakeGenerator, error: Exception, http: int, kind: str
) -> None:
    for stream in (False, True):
        generator.script = [error]
        answer = await client.post(PATH, json=GOOD | {"stream": stream})
        check_error(answer.json())
        assert (answer.status_code, answer.json()["error"]["type"]) == (http, kind)
        assert ("retry-after" in answer.headers) is (http in (429, 529))
    generator.script = [Delta("a", (1,)), error]
    events = events_of((await client.post(PATH, json=GOOD | {"stream": True})).text)
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"]["type"] == kind


async def test_errors_of_http_have_anthropics_form(client: httpx.AsyncClient) -> None:
    good = json.dumps(GOOD)
    kind = {"content-type": "application/json"}
    for http, named, sent in (
        (404, "not_found_error", client.get(f"{PATH}/batches/1")),
        (404, "not_found_error", client.get("/v1/organizations", headers=VERSION)),
        (404, "not_found_error", client.get("/v1/models/other", headers=VERSION)),
        (405, "invalid_request_error", client.get(PATH)),
        (413, "request_too_large", client.post(PATH, content=good + " " * (1 << 20), headers=kind)),
        (415, "invalid_request_error", client.post(PATH, content=good)),
        (400, "invalid_request_error", client.post(PATH, content="{", headers=kind)),
        (400, "invalid_request_error", client.post(PATH, json=GOOD, headers={"x-request-id": "a b"})),
        (431, "invalid_request_error", client.post(PATH, json=GOOD, headers={"x-long": "a" * 9000})),
    ):
        answer = await sent
        assert answer.status_code == http, answer.text
        check_error(answer.json())
        assert answer.json()["error"]["type"] == named and answer.headers["request-id"] == answer.json()["request_id"]
    plain = await client.get("/v1/models/other")
    assert plain.json()["error"]["code"] == "model_not_found" and "request-id" not in plain.headers


async def test_models_in_anthropics_form(client: httpx.AsyncClient) -> None:
    page = (await client.get("/v1/models", headers=VERSION)).json()
    (model,) = page["data"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "tiny")
    assert (model["type"], model["id"], model["created_at"]) == ("model", "tiny", "1970-01-01T00:00:01Z")
    assert (await client.get("/v1/models/tiny", headers=VERSION)).json() == model
    assert (await client.get("/v1/models?after_id=tiny", headers=VERSION)).json()["data"] == []
    assert (await client.get("/v1/models")).json()["object"] == "list"


async def test_a_turn_of_claude_code(client: httpx.AsyncClient, app: Starlette, generator: FakeGenerator) -> None:
    """A request of the structure that Claude Code 2.1 sends after a call, shorter."""
    marked = {"cache_control": EPHEMERAL}
    draft = "https://json-schema.org/draft/2020-12/schema"
    names = ("Agent", "Bash", "Edit", "Read", "Skill", "ToolSearch", "Workflow", "Write")
    schema = {
        "$schema": draft,
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "additionalProperties": False,
    }
    tools = [{"name": name, "description": "Does it.\n\n- Once.", "input_schema": schema} for name in names]
    tools.append({"name": "Placeholder", "description": "-", "input_schema": {"type": "object"}, "defer_loading": True})
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"a": "ls"}}
    request = {
        "model": "claude-opus-5",
        "max_tokens": 128_000,
        "stream": True,
        "system": [
            text(f"{BILLING} cc_version=2.1.1; cc_entrypoint=cli;"),
            text("An agent.") | marked,
            text("Work.") | marked,
        ],
        "tools": tools,
        "messages": [
            {"role": "user", "content": [text("<system-reminder>\nA\n</system-reminder>"), text("List.")]},
            {"role": "system", "content": "# Environment", "output_config": {"effort": "medium"}},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "c2ln"}, call]},
            {
                "role": "user",
                "content": [
                    {"tool_use_id": "toolu_1", "type": "tool_result", "content": "x.py", "is_error": False} | marked
                ],
            },
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s"})},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }
    headers = VERSION | {"anthropic-beta": "claude-code-20250219,effort-2025-11-24", "authorization": "Bearer none"}
    generator.script = reply("<think>", "Hm.", "</think>", "One ", "file.")
    answer = await client.post(f"{PATH}?beta=true", json=request, headers=headers)
    assert answer.status_code == 200, answer.text
    assert [block["type"] for block in built(events_of(answer.text))["content"]] == ["thinking", "text"]
    assert set(answer.headers["x-ignored-fields"].split(", ")) == {
        *("model", "metadata", "context_management", "output_config.effort", "messages.output_config"),
        *("messages.content.cache_control", "system.cache_control", "system.x-anthropic-billing-header"),
    }
    prompt = prompt_of(app, generator)
    order = ("Agent", '"Edit"', "An agent.\nWork.", "List.", "# Environment", '{"a": "ls"}', "x.py", "assistant")
    places = [prompt.index(part) for part in order[:-1]] + [prompt.rindex(order[-1])]
    assert places == sorted(places) and "cc_version" not in prompt and "Placeholder" not in prompt
