"""Unknown fields are accepted and named, at any depth; typos and fields at a wrong place are refused with a hint."""

from __future__ import annotations

import json
import logging
import random
import time
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from starlette.applications import Starlette

from baton.runtime.ignored_fields import MAX_UNKNOWN, typo_of
from coordinator.http.app import HttpSettings, create_app
from coordinator.metrics import MAX_LOGGED_FIELDS, Metrics
from coordinator.openai import schema
from coordinator.openai.responses import ResponsesBody
from coordinator.openai.validation import RequestObject, known_names, parse
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.fields_of_others import BY_SERVER, FIELDS, OTHER_NAMES
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

RESPONSES = "/v1/responses"
BODIES = GOOD | {RESPONSES: {"input": "Hello"}}
MODELS: dict[str, type[RequestObject]] = {
    COMPLETIONS: schema.CompletionBody,
    CHAT: schema.ChatBody,
    RESPONSES: ResponsesBody,
    "/tokenize": schema.TokenizeBody,
}
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
ALPHABET = "abcdefghijklmnopqrstuvwxyz_"


def names(answer: httpx.Response) -> set[str]:
    return set(filter(None, answer.headers.get("x-ignored-fields", "").split(", ")))


def hint(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unknown_parameter"), answer.text
    return error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("server", BY_SERVER)
async def test_each_field_of_another_server_is_accepted_and_named(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str, server: str
) -> None:
    assert len(FIELDS) == 85
    missing = {}
    for name, value in BY_SERVER[server].items():
        answer = await client.post(path, json=BODIES[path] | {name: value})
        if answer.status_code != 200 or names(answer) != {name}:
            missing[name] = answer.status_code, answer.text[:200], answer.headers.get("x-ignored-fields")
    assert missing == {}
    assert set(generator.ignored_fields) == {(path, name) for name in BY_SERVER[server]}


@pytest.mark.parametrize(("name", "known"), OTHER_NAMES.items())
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_servers_name_of_a_served_field_is_served(
    client: httpx.AsyncClient, path: str, name: str, known: tuple[str, Any]
) -> None:
    own, value = known
    bodies = [parse(MODELS[path], json.dumps(BODIES[path] | {key: value}).encode()) for key in (own, name)]
    options, again = [body.options() for body in bodies]  # type: ignore[attr-defined]
    assert options == again != parse(MODELS[path], json.dumps(BODIES[path]).encode()).options()  # type: ignore[attr-defined]
    assert not bodies[1].ignored
    wrong = await client.post(path, json=BODIES[path] | {name: [{}]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name
    twice = await client.post(path, json=BODIES[path] | {name: value, own: value})
    assert twice.status_code == 400 and "another name" in twice.json()["error"]["message"]


def edits(name: str, draw: random.Random) -> list[str]:
    """Returns one typo of each kind."""
    at, letter = draw.randrange(len(name)), draw.choice(ALPHABET)
    swapped = name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :] if at else name
    return [name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :], swapped]


def misspelt(draw: random.Random) -> list[tuple[str, str, str]]:
    """Returns every typo that is no name itself: the endpoint, the typo, the name that was meant."""
    found = []
    for path, model in MODELS.items():
        known = known_names(model)
        for name in sorted(known):
            found += [(path, typo, name) for typo in edits(name, draw) if typo not in known and typo not in FIELDS]
    return found


async def test_200_typos_are_refused_with_the_name_that_was_meant(client: httpx.AsyncClient) -> None:
    draw = random.Random(20_261_126)
    cases = misspelt(draw)
    assert len(cases) > 500 and {name for _, _, name in cases} >= {"n", "top_k", "max_completion_tokens", "input"}
    wrong = {}
    for path, typo, name in draw.sample(cases, 200):
        answer = await client.post(path, json=BODIES[path] | {typo: 1})
        error = answer.json().get("error", {})
        if (answer.status_code, error.get("param")) != (400, typo) or f"'{name}'" not in error["message"]:
            wrong[typo] = name, answer.status_code, error.get("message")
    assert wrong == {}


def test_every_typo_is_recognised_and_no_field_of_another_server_is_taken_for_one() -> None:
    known = {path: known_names(model) for path, model in MODELS.items()}
    for seed in range(5):
        for path, typo, name in misspelt(random.Random(seed)):
            assert name in typo_of(typo, known[path]), (path, typo, name)
    unknown = [(name, path) for name in FIELDS for path in known if name not in known[path]]
    taken = {name: near for name, path in unknown if (near := typo_of(name, known[path]))}
    assert taken.keys() == {"models", "top_a"}  # exceptions by name, see `OF_OTHER_SERVERS`


def test_short_names_two_edits_from_a_known_one_are_not_typos() -> None:
    known = known_names(schema.ChatBody)
    assert typo_of("rid", known) == typo_of("id", known) == typo_of("tps", known) == ()
    assert typo_of("nn", known) == typo_of("", known) == ("n",)
    assert typo_of("max_tokns", known) == ("max_tokens",) and typo_of("maxTokens", known) == ("max_tokens",)
    assert typo_of("Temperature", known) == ("temperature",)
    assert typo_of("tpo_k", known) == ("top_k",) and typo_of("top_j", known) == ("top_k", "top_p")


NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "chunk_size": 4}}, "stream_options.chunk_size"),
    (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (COMPLETIONS, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (CHAT, {"messages": [USER | {"cache_control": {}}]}, "messages.cache_control"),
    (CHAT, {"messages": [USER | {"context": {"citations": []}}]}, "messages.context"),
    (
        CHAT,
        {"messages": [USER | {"content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
        "messages.content.cache_control",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no", "id": 1}]}, USER]},
        "messages.content.id",
    ),
    (CHAT, {"tools": [TOOL | {"cache_control": {}}], "tool_choice": "none"}, "tools.cache_control"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "defer_loading": True}}], "tool_choice": "none"},
        "tools.function.defer_loading",
    ),
    (
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "a",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}", "thought_signature": "x"},
                        }
                    ],
                },
                USER,
            ]
        },
        "messages.tool_calls.function.thought_signature",
    ),
    (RESPONSES, {"input": [USER | {"phase": "x"}]}, "input.phase"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "cache_control": {"a": 1}}]}]},
        "input.content.cache_control",
    ),
    (RESPONSES, {"text": {"format": {"type": "text"}, "x": 1}}, "text.x"),
    (RESPONSES, {"stream_options": {"include_usage": True}}, "stream_options"),
    ("/tokenize", {"rid": 1}, "rid"),
    ("/detokenize", {"rid": 1}, "rid"),
]


@pytest.mark.parametrize(("path", "fields", "named"), NESTED, ids=[f"{p} {n}" for p, _, n in NESTED])
async def test_unknown_fields_are_named_with_their_place(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = await client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    assert names(answer) == {named}


MISTAKEN: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [USER | {"tool_call": []}]}, "messages[0].tool_call", "'tool_calls'"),
    (CHAT, {"messages": [USER | {"max_tokens": 5}]}, "messages[0].max_tokens", "'max_tokens'"),
    (
        CHAT,
        {"messages": [USER | {"content": [{"type": "text", "text": "a", "txt": 1}]}]},
        "messages[0].content.txt",
        "'text'",
    ),
    (CHAT, {"include_usage": True}, "include_usage", "'stream_options.include_usage'"),
    (CHAT, {"json_schema": {}}, "json_schema", "'response_format.json_schema'"),
    (CHAT, {"grammar": "x"}, "grammar", "'structured_outputs.grammar'"),
    (CHAT, {"stream": True, "stream_options": {"max_tokens": 1}}, "stream_options.max_tokens", "'max_tokens'"),
    (CHAT, {"tools": [TOOL | {"tool_choice": "auto"}]}, "tools[0].tool_choice", "'tool_choice'"),
    (CHAT, {"prompt": "a"}, "prompt", "'messages'"),
    (COMPLETIONS, {"max_completion_tokens": 5}, "max_completion_tokens", "'max_tokens'"),
    (COMPLETIONS, {"tools": [TOOL]}, "tools", "/v1/chat/completions"),
    (RESPONSES, {"input": [USER | {"staus": "x"}]}, "input[0].staus", "'status'"),
    ("/tokenize", {"add_special_token": True}, "add_special_token", "'add_special_tokens'"),
]


@pytest.mark.parametrize(("path", "fields", "param", "meant"), MISTAKEN, ids=[f"{p} {n}" for p, _, n, _ in MISTAKEN])
async def test_a_mistake_is_refused_with_the_place_or_name_that_was_meant(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str, fields: dict[str, Any], param: str, meant: str
) -> None:
    answer = await client.post(path, json=BODIES[path] | fields)
    assert f"did you mean {meant}?" in hint(answer)
    assert answer.json()["error"]["param"] == param
    assert generator.submissions == []


async def test_unknown_fields_do_not_change_the_submission(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    for more in ({}, FIELDS):
        assert (await client.post(CHAT, json=GOOD[CHAT] | {"seed": 1} | more)).status_code == 200
    plain, with_unknown = generator.submissions
    assert (plain.prompt, plain.sampling, plain.constraint) == (
        with_unknown.prompt,
        with_unknown.sampling,
        with_unknown.constraint,
    )


@pytest.fixture
async def strict(generator: FakeGenerator, text_model: TextModel) -> Any:
    app: Starlette = create_app(generator, text_model, HttpSettings("tiny", strict_fields=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        yield client


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, "/tokenize"])
async def test_strict_fields_refuses_unknown_fields_but_not_in_history(strict: httpx.AsyncClient, path: str) -> None:
    answer = await strict.post(path, json=BODIES[path] | {"rid": "a"})
    assert hint(answer) == "unknown field 'rid'"
    assert (await strict.post(path, json=BODIES[path] | {"rid": None})).status_code == 200
    if path == CHAT:
        assert hint(await strict.post(path, json=BODIES[path] | {"response_format": {"type": "text", "x": 1}}))
        answer = await strict.post(path, json={"messages": [USER | {"cache_control": {}}], "store": True})
        assert answer.status_code == 200 and names(answer) == {"messages.cache_control", "store"}


async def test_the_description_allows_unknown_fields(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("ChatBody", "CompletionBody", "ResponsesBody", "TokenizeBody", "MessageBody", "StreamOptions", "Tool"):
        assert described[name]["additionalProperties"] is True


async def test_the_number_of_unknown_fields_is_limited_and_cheap(client: httpx.AsyncClient) -> None:
    fields = {f"field{i}x": 1 for i in range(MAX_UNKNOWN)}
    answer = await client.post(CHAT, json=GOOD[CHAT] | fields)
    assert answer.status_code == 200 and len(answer.headers["x-ignored-fields"]) < 2_100
    assert answer.headers["x-ignored-fields"].endswith(", ...")
    assert str(MAX_UNKNOWN) in hint(await client.post(CHAT, json=GOOD[CHAT] | fields | {"onemore": 1}))
    many = {"messages": [USER | {"cache_control": {}, "ts": i} for i in range(1000)]}
    assert len(parse(schema.ChatBody, json.dumps(many).encode()).ignored) == 2
    body = json.dumps(GOOD[CHAT] | {f"{random.getrandbits(60):x}": 1 for _ in range(5000)}).encode()
    start = time.process_time()
    assert (await client.post(CHAT, content=body, headers={"content-type": "application/json"})).status_code == 400
    assert time.process_time() - start < 1.0  # CPU time; 5,000 comparisons with all names would take several seconds


def test_names_of_clients_are_logged_once_and_never_a_label(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.requests")
    metrics = Metrics()
    metrics.ignored(CHAT, {"rid", "a\nb 12:00 ERROR forged"})
    metrics.ignored(CHAT, {"rid"})
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        f"{CHAT} a?b?12:00?ERROR?forged",
        f"{CHAT} rid",
    ]
    for i in range(2 * MAX_LOGGED_FIELDS):
        metrics.ignored(COMPLETIONS, {f"name{i}"})
    assert len(caplog.records) == MAX_LOGGED_FIELDS + 1 and "further" in caplog.records[-1].getMessage()
    lines = [line for line in generate_latest(metrics._registry).decode().splitlines() if "ignored" in line]
    assert lines[2:] == [
        f'baton_ignored_fields_total{{endpoint="{CHAT}"}} 3.0',
        f'baton_ignored_fields_total{{endpoint="{COMPLETIONS}"}} {2.0 * MAX_LOGGED_FIELDS}',
    ]
