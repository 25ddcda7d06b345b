"""Every row of the table of bad requests: its status, its param, OpenAI's shape, and no work done for it."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
from starlette.applications import Starlette

from baton.runtime.process import start_child
from coordinator.http import body
from coordinator.http.app import HttpSettings, create_app
from coordinator.text.model import TextModel
from tests.support.bad_inputs import TABLE
from tests.support.fake_generator import FakeGenerator
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD, Bad

_INSIDE = re.compile(r"Traceback|site-packages|File .{0,2}\"|\.py\b|/(home|root|usr|tmp|opt|var|etc)/|\bat 0x[0-9a-f]+")
SLOW_ROW_S = 0.25  # CPU time: tests share their machine


GROUPS: dict[str, list[Bad]] = {}
for _row in TABLE:
    GROUPS.setdefault(_row.id.split()[0], []).append(_row)


def complaints(row: Bad, response: httpx.Response) -> list[str]:
    """Returns what is wrong with an answer; nothing if it is correct."""
    if response.status_code != row.status:
        return [f"status {response.status_code}: {response.text[:200]}"]
    error = response.json()["error"]
    checks = {
        "shape": set(response.json()) == {"error"} and set(error) == {"message", "type", "param", "code"},
        "type": error["type"] == "invalid_request_error",
        f"param {error['param']!r}": error["param"] == (row.param and row.param.replace("\n", "\\n")),
        f"code {error['code']!r}": row.code is None or error["code"] == row.code,
        "message": 0 < len(error["message"]) < 400 and error["message"].isprintable(),
        "request id": "x-request-id" in response.headers,
        "nothing of the inside": _INSIDE.search(response.text) is None,
        "numbers": error["code"] != "context_length_exceeded" or "128" in error["message"],
    }
    return [name for name, good in checks.items() if not good]


@pytest.fixture(scope="module")
def served(text_model: TextModel) -> Iterator[tuple[FakeGenerator, Starlette]]:
    """One app for all rows: its process that parses large bodies takes longer to start than all of them. Beside other
    tests it is not to wait for them."""
    generator = FakeGenerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "start_child", partial(start_child, nice=0))
        yield generator, create_app(generator, text_model, HttpSettings("tiny", max_body_bytes=1 << 20))


@pytest.fixture
def generator(served: tuple[FakeGenerator, Starlette]) -> FakeGenerator:
    served[0].submissions.clear()
    return served[0]


@pytest.fixture
def app(served: tuple[FakeGenerator, Starlette], generator: FakeGenerator) -> Starlette:
    return served[1]


@pytest.fixture
def gc_disabled() -> Iterator[None]:
    """A full collection of everything that the test session has imported takes longer than the limit for a row."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("gc_disabled")
@pytest.mark.parametrize("group", GROUPS)
async def test_bad_requests_are_refused_and_not_submitted(
    client: httpx.AsyncClient, generator: FakeGenerator, group: str
) -> None:
    found = {}
    for row in GROUPS[group]:
        headers = {"content-type": "application/json"} | row.headers
        content = row.raw()
        start = time.process_time()
        response = await client.request(row.method, row.path, content=content, headers=headers)
        spent = time.process_time() - start
        wrong = complaints(row, response)
        if spent > SLOW_ROW_S:
            wrong.append("slow")
        if wrong:
            found[row.id] = wrong
    assert found == {}
    assert generator.submissions == []


def test_the_table_has_at_least_300_rows_with_unique_ids() -> None:
    assert len(TABLE) >= 300
    ids = [row.id for row in TABLE]
    assert sorted({i for i in ids if ids.count(i) > 1}) == []


ACCEPTED = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"model": None}),
    (COMPLETIONS, {"prompt": "   "}),
    (COMPLETIONS, {"prompt": "\ufffe \U0001f600 \\u0000"}),
    (COMPLETIONS, {"prompt": [411, 511]}),  # beyond the tokenizer's vocabulary, within the model's
    (COMPLETIONS, {"prompt": [5] * 127}),
    (COMPLETIONS, {"prompt": [5] * 127, "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 28}),
    (COMPLETIONS, {"temperature": -0.0, "top_p": 1, "top_k": -1, "seed": -(2**63)}),
    (COMPLETIONS, {"temperature": 2, "top_p": 1e-9, "top_k": 10**6, "seed": 2**63 - 1}),
    (COMPLETIONS, {"top_p": 0}),
    (COMPLETIONS, {"stop": []}),
    (COMPLETIONS, {"stop": ["a", "b", "c", "d" * 256]}),
    (COMPLETIONS, {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "suffix": None, "logit_bias": {}}),
    (COMPLETIONS, {"presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "repetition_penalty": 1.0}),
    (COMPLETIONS, {"user": "u" * 512, "metadata": {"k" * 64: "v" * 512}, "store": False, "service_tier": "auto"}),
    (COMPLETIONS, {"stream": None, "stream_options": None, "max_tokens": None, "temperature": None}),
    (CHAT, {"n": 1, "tools": None, "tool_choice": "none", "logprobs": False, "top_logprobs": 0}),
    (CHAT, {"response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True}),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 7, "reasoning_effort": None, "prompt_cache_key": "k"}),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "audio": None}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "call_1"}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "functions.fa:0"}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_call_id": "c" * 100}]}),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "j.doe"}]}),
    (CHAT, {"messages": [{"role": r, "content": ""} for r in ("system", "developer", "user", "assistant", "tool")]}),
]


@pytest.mark.parametrize(("path", "fields"), ACCEPTED)
async def test_unusual_but_valid_requests_are_accepted(
    client: httpx.AsyncClient, path: str, fields: dict[str, object]
) -> None:
    response = await client.post(path, json=GOOD[path] | fields)
    assert response.status_code == 200, response.text


async def test_string_and_text_part_content_give_the_same_prompt(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    for content in (
        "Hello\nworld",
        [{"type": "text", "text": "Hello\nworld"}],
        [{"type": "text", "text": t} for t in ("Hello", "world")],
    ):
        await client.post(CHAT, json={"messages": [{"role": "user", "content": content}]})
    assert len({s.prompt for s in generator.submissions}) == 1 and len(generator.submissions) == 3


async def test_variants_of_the_json_content_type_are_accepted(client: httpx.AsyncClient) -> None:
    raw = b'{"prompt":"Hello"}'
    for kind in ("application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"'):
        response = await client.post(COMPLETIONS, content=raw, headers={"content-type": kind})
        assert response.status_code == 200
