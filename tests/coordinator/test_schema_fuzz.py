"""Any JSON in any field gets an answer or a refusal, never an internal error; refused requests cause no work."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from coordinator.anthropic import schema as anthropic_schema
from coordinator.openai import validation
from coordinator.openai.schema import ChatBody, CompletionBody
from tests.support import messages_kit
from tests.support.fake_generator import FakeGenerator
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, -1, 2, 0.0, -0.0, 1.0, 1e308, 127, 128]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["user", "text", "type", "role", "content", "<|im_end|>", "\ufdd0", "\0"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "x"]), inner, max_size=4),
    ),
    max_leaves=12,
)


def bodies(path: str, names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), JSON, max_size=4).map(lambda given: GOOD[path] | given)


COMPLETION_BODIES = bodies(COMPLETIONS, [*CompletionBody.model_fields, *validation.COMPLETION])
CHAT_BODIES = bodies(CHAT, [*ChatBody.model_fields, *validation.CHAT])

KINDS = ["text", "thinking", "tool_use", "tool_result", "document", "search_result", "tool_addition", "image", "x"]
BLOCK_FIELDS = [
    "text",
    "id",
    "name",
    "input",
    "tool_use_id",
    "content",
    "is_error",
    "source",
    "title",
    "tool",
    "thinking",
]
BLOCKS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.builds(
            lambda kind, given: {"type": kind} | given,
            st.one_of(st.sampled_from(KINDS), inner),
            st.dictionaries(st.sampled_from(BLOCK_FIELDS), inner, max_size=5),
        ),
    ),
    max_leaves=12,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["user", "assistant", "system"]), JSON), "content": BLOCKS}
    ),
    max_size=4,
)
MESSAGES_BODIES = st.builds(
    lambda given, turns: messages_kit.GOOD | given | ({"messages": turns} if turns else {}),
    st.dictionaries(
        st.sampled_from([*anthropic_schema.MessagesBody.model_fields]), st.one_of(JSON, BLOCKS), max_size=3
    ),
    TURNS,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.one_of(
        COMPLETION_BODIES.map(lambda b: (COMPLETIONS, b)),
        CHAT_BODIES.map(lambda b: (CHAT, b)),
        MESSAGES_BODIES.map(lambda b: (messages_kit.PATH, b)),
    )
)
def test_any_json_in_any_field_never_causes_an_internal_error(
    app: Starlette, generator: FakeGenerator, body: tuple[str, dict[str, Any]]
) -> None:
    path, value = body

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            raw = orjson.dumps(value)
            return await client.post(path, content=raw, headers={"content-type": "application/json"})

    before = len(generator.submissions)
    response = asyncio.run(post())
    assert response.status_code in (200, 400, 404), response.text
    assert len(generator.submissions) - before == (response.status_code == 200)
    if response.status_code != 200 and path == messages_kit.PATH:
        messages_kit.check_error(response.json())
    elif response.status_code != 200:
        error = response.json()["error"]
        assert len(error["message"]) < 500 and (error["param"] is not None or error["code"] == "invalid_json")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.one_of(st.binary(max_size=60), st.text('{}[]":,\\u0dae019 prompt', max_size=40).map(str.encode)))
def test_random_bytes_are_refused(app: Starlette, raw: bytes) -> None:
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            return await client.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})

    assert asyncio.run(post()).status_code == 400
