"""Known fields without effect are accepted and named; values that are not served yet are refused (bad_inputs.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from baton.runtime.ignored_fields import MAX_NAME_CHARS, MAX_NAMED, as_header
from coordinator.openai.schema import ChatBody
from coordinator.openai.validation import INERT, parse
from tests.support.bad_inputs import FABRIC_NAMES
from tests.support.fake_generator import FakeGenerator
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

USER = {"role": "user", "content": "Hello"}
ACCEPTED: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {}, None),
    (COMPLETIONS, {"a name that nobody knows": None, "kv_transfer_params": None, "temperature": None}, None),
    (COMPLETIONS, {"store": True, "service_tier": "flex", "user": "me"}, "service_tier, store, user"),
    (COMPLETIONS, {"metadata": {"a": "b"}, "user": None}, "metadata"),
    (CHAT, {"reasoning_effort": "low", "verbosity": "high", "store": False}, "reasoning_effort, store, verbosity"),
    (CHAT, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}, None),
    (CHAT, {"messages": [USER | {"cache_control": {"type": "ephemeral"}}]}, "messages.cache_control"),
    (CHAT, {"messages": [USER | {"name": None, "tool_calls": None, "x": None}]}, None),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]}, None),
    (CHAT, {"messages": [USER, {"role": "assistant"}, USER]}, None),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": "a", "audio_id": "b", "refusal": None}, USER]},
        "messages.audio_id",
    ),
    ("/tokenize", {"prompt": None, "messages": [USER | {"id": "m1"}]}, "messages.id"),
]


@pytest.mark.parametrize(("path", "fields", "named"), ACCEPTED, ids=[json.dumps(f)[:60] for _, f, _ in ACCEPTED])
@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_accepted_and_listed_in_a_header(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], named: str | None, stream: bool
) -> None:
    body = GOOD[path] | fields | ({"stream": True} if stream and path != "/tokenize" else {})
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-ignored-fields") == named


async def test_ignored_fields_do_not_change_the_submission(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    inert: dict[str, Any] = dict.fromkeys(INERT - {"metadata"}, "x") | {"metadata": {"a": "b"}}
    for more in ({}, inert):
        assert (await client.post(CHAT, json=GOOD[CHAT] | {"seed": 1} | more)).status_code == 200
    plain, with_inert = generator.submissions
    assert (plain.prompt, plain.sampling) == (with_inert.prompt, with_inert.sampling)


async def test_the_origin_of_kv_that_a_client_names_has_no_effect(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """Other servers take the location of KV from these fields."""
    named: dict[str, Any] = dict.fromkeys(FABRIC_NAMES, "x")
    for more in ({}, named):
        assert (await client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {"seed": 1} | more)).status_code == 200
    plain, with_names = (replace(submission, request_id="") for submission in generator.submissions)
    assert plain == with_names
    assert {name for _, name in generator.ignored_fields} == set(FABRIC_NAMES)


async def test_misspelt_message_key_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json={"messages": [{"role": "user", "contnt": "a"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].contnt")


def test_the_header_is_printable_and_short() -> None:
    assert as_header(["b", "a", "a"]) == "a, b"
    assert as_header(["x\r\nset-cookie: 1", "ü", "a,b"]) == "?, a?b, x??set-cookie:?1"
    assert as_header(f"name{i:03}" for i in range(300)).endswith("name063, ...")


async def test_number_of_ignored_message_keys_kept_is_bounded(client: httpx.AsyncClient) -> None:
    message = USER | {f"{i}{'k' * 70}": 1 for i in range(200)}
    found = parse(ChatBody, json.dumps({"messages": [message]}).encode()).ignored
    assert len(found) == MAX_NAMED + 1 and max(map(len, found)) <= MAX_NAME_CHARS + len("messages.")
    answer = await client.post(CHAT, json={"messages": [message]})
    assert answer.status_code == 200 and len(answer.headers["x-ignored-fields"]) < 2_100


@pytest.mark.parametrize("name", ["prefix", "partial"])
async def test_partial_assistant_message_is_refused(client: httpx.AsyncClient, name: str) -> None:
    """A server that supports the field would give another answer."""
    for value, status in ((True, 400), (False, 200), (None, 200)):
        body = {"messages": [USER, {"role": "assistant", "content": "a", name: value}]}
        assert (await client.post(CHAT, json=body)).status_code == status
