"""Answers match OpenAI's own schemas and work with OpenAI's own client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from baton.core import errors
from baton.core.request import TokenLogprob
from coordinator.submission import Delta
from tests.support.bad_inputs import TABLE
from tests.support.fake_generator import FakeGenerator, reply
from tests.support.requests_kit import CHAT, COMPLETIONS, GOOD, events

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "support" / "openai_schemas.json").read_text())
HI: list[Any] = [{"role": "user", "content": "hi"}]


def fits(name: str, value: Any) -> None:
    jsonschema.Draft202012Validator(SCHEMAS | {"$ref": f"#/$defs/{name}"}).validate(value)


async def test_answers_fit_the_official_schemas(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    for finish in ("stop", "length"):
        generator.script = reply("Hel", "lo", finish=finish)  # type: ignore[arg-type]
        fits("CreateCompletionResponse", (await client.post(COMPLETIONS, json=GOOD[COMPLETIONS])).json())
        fits("CreateChatCompletionResponse", (await client.post(CHAT, json=GOOD[CHAT])).json())
        for options in ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
            response = await client.post(CHAT, json=GOOD[CHAT] | {"stream": True} | options)
            found = events(response)
            assert len(found) >= 3
            for event in found:
                fits("CreateChatCompletionStreamResponse", event)
    fits("ListModelsResponse", (await client.get("/v1/models")).json())
    fits("Model", (await client.get("/v1/models/tiny")).json())


def scored() -> list[Any]:
    """Two deltas with log-probabilities of three tokens, one of them special, and of the prompt."""
    entries = [TokenLogprob(i, -0.5 * i, i, (7, i), (-0.25, -0.5 * i)) for i in (40, 41, 1)]
    first = Delta("Hé", (40, 41), logprobs=tuple(entries[:2]), prompt_logprobs=(TokenLogprob(6, -1.5, 2),))
    last = reply("lo")[0]._replace(token_ids=(1,), logprobs=(entries[2],))  # type: ignore[union-attr]
    return [first, last]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_choices_are_separated_by_index_and_the_prompt_counts_once(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str
) -> None:
    mixed = zip(reply("a", "b"), reply("x", "y", finish="length"), strict=True)
    generator.script = [d._replace(choice=c) for pair in mixed for c, d in enumerate(pair)]  # type: ignore[union-attr]
    whole = (await client.post(path, json=GOOD[path] | {"n": 2})).json()
    fits("CreateChatCompletionResponse" if path == CHAT else "CreateCompletionResponse", whole)
    texts = [c["message"]["content"] if path == CHAT else c["text"] for c in whole["choices"]]
    assert texts == ["ab", "xy"]
    assert [(c["index"], c["finish_reason"]) for c in whole["choices"]] == [(0, "stop"), (1, "length")]
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    asked = GOOD[path] | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    found = events(await client.post(path, json=asked))
    assert found[-1]["choices"] == [] and found[-1]["usage"] == usage
    choices = [c for e in found for c in e["choices"]]
    for index, text in enumerate(texts):
        mine = [c for c in choices if c["index"] == index]
        assert "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [("stop", "length")[index]]
        assert path != CHAT or next(c["delta"].get("role") for c in mine) == "assistant"


async def test_log_probabilities_fit_the_official_schemas(client: httpx.AsyncClient, generator: FakeGenerator) -> None:
    generator.script = scored()
    whole = (await client.post(COMPLETIONS, json={"prompt": [5, 6], "logprobs": 2, "echo": True})).json()
    fits("CreateCompletionResponse", whole | {"choices": [whole["choices"][0] | {"logprobs": None}]})
    found = whole["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [None, -1.5, -20.0, -20.5, -0.5]
    assert [len(column) for column in found.values()] == [5] * 4
    assert found["text_offset"][-1] == sum(map(len, found["tokens"][:-1]))
    chat = GOOD[CHAT] | {"logprobs": True, "top_logprobs": 2}
    answer = (await client.post(CHAT, json=chat)).json()
    fits("CreateChatCompletionResponse", answer)
    streamed = events(await client.post(CHAT, json=chat | {"stream": True}))
    for event in streamed:
        fits("CreateChatCompletionStreamResponse", event)
    parts = [e["choices"][0]["logprobs"] for e in streamed]
    assert [c for part in parts if part for c in part["content"]] == answer["choices"][0]["logprobs"]["content"]
    assert generator.submissions[0].sampling.prompt_logprobs == 2
    assert generator.submissions[1].sampling.logprobs == 2 and generator.submissions[1].sampling.prompt_logprobs is None


async def test_prompt_log_probabilities_are_in_the_same_fields_as_in_vllm(
    client: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.script = scored()
    whole = (await client.post(COMPLETIONS, json={"prompt": [5, 6], "prompt_logprobs": 0})).json()
    found = whole["choices"][0]["prompt_logprobs"]
    assert found[0] is None and found[1]["6"]["logprob"] == -1.5 and found[1]["6"]["rank"] == 2
    assert whole["choices"][0]["logprobs"] is None
    chat = (await client.post(CHAT, json=GOOD[CHAT] | {"prompt_logprobs": 0})).json()
    assert chat["prompt_logprobs"] == found and "prompt_logprobs" not in chat["choices"][0]


async def test_errors_fit_the_official_schema(client: httpx.AsyncClient) -> None:
    for row in TABLE[::25]:
        headers = {"content-type": "application/json"} | row.headers
        fits("ErrorResponse", (await client.request(row.method, row.path, content=row.raw(), headers=headers)).json())


def test_schema_check_rejects_an_invalid_response() -> None:
    with pytest.raises(jsonschema.ValidationError):
        fits("CreateCompletionResponse", {"id": "x", "object": "text_completion", "created": 1, "model": "m"})


async def test_client_completion(official: openai.AsyncOpenAI) -> None:
    answer = await official.completions.create(
        model="tiny", prompt="Hello", max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello world", "stop")
    assert answer.usage is not None and answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer._request_id and answer.id == "cmpl-" + answer._request_id


async def test_client_completion_stream(official: openai.AsyncOpenAI) -> None:
    stream = await official.completions.create(
        model="tiny", prompt=[1, 2], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello world"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2


async def test_client_chat(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(
        model="tiny", messages=HI, max_completion_tokens=5, seed=7, temperature=0.0, top_p=0.5, stop=["x"], user="me"
    )
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content == "Hello world"


async def test_client_chat_stream(official: openai.AsyncOpenAI) -> None:
    stream = await official.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 5


async def test_client_stream_helper(official: openai.AsyncOpenAI) -> None:
    async with official.chat.completions.stream(model="tiny", messages=HI) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"


async def test_client_models(official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == ["tiny"]
    assert (await official.models.retrieve("tiny")).owned_by == "baton"


ERRORS: list[tuple[Exception, type[openai.APIStatusError], str]] = [
    (errors.InvalidRequest("bad", param="x"), openai.BadRequestError, "invalid_value"),
    (errors.ContextLengthExceeded("long"), openai.BadRequestError, "context_length_exceeded"),
    (errors.NotFound("none"), openai.NotFoundError, "not_found"),
    (errors.DuplicateRequest("twice"), openai.ConflictError, "duplicate_request"),
    (errors.QuotaExceeded("over"), openai.RateLimitError, "rate_limit_exceeded"),
    (errors.Unavailable("full"), openai.InternalServerError, "overloaded"),
    (errors.WorkerLost("gone"), openai.InternalServerError, "worker_lost"),
    (errors.KVCorrupt("sum"), openai.InternalServerError, "kv_corrupt"),
    (errors.DeadlineExceeded("late"), openai.InternalServerError, "deadline_exceeded"),
    (ValueError("bug"), openai.InternalServerError, "internal_error"),
]


@pytest.mark.parametrize(("raised", "expected", "code"), ERRORS, ids=[code for *_, code in ERRORS])
async def test_client_error_classes(
    official: openai.AsyncOpenAI,
    generator: FakeGenerator,
    raised: Exception,
    expected: type[openai.APIStatusError],
    code: str,
) -> None:
    generator.script = [raised]
    with pytest.raises(expected) as caught:
        await official.chat.completions.create(model="tiny", messages=HI)
    assert caught.value.code == code and caught.value.request_id


async def test_client_error_classes_for_bad_requests(official: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await official.completions.create(model="tiny", prompt="a", temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        await official.completions.create(model="tiny", prompt="a", extra_body={"guidd_json": 1})
    assert (bad.value.param, bad.value.code) == ("guidd_json", "unknown_parameter")
    with pytest.raises(openai.NotFoundError) as missing:
        await official.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


async def test_client_sees_an_error_in_the_middle_of_a_stream(
    official: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    generator.script = [Delta("Hel", (1,)), errors.WorkerLost("decode-0 died", code="decode_worker_lost")]
    stream = await official.chat.completions.create(model="tiny", messages=HI, stream=True)
    seen = []
    with pytest.raises(openai.APIError) as caught:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content)
    assert seen == ["", "Hel"]
    assert (caught.value.code, caught.value.type) == ("decode_worker_lost", "server_error")


@pytest.mark.parametrize(("error", "calls"), [(errors.Unavailable("full", retry_after_s=0.0), 2), (ValueError(), 1)])
async def test_client_retries_only_retryable_errors(
    official: openai.AsyncOpenAI, generator: FakeGenerator, error: Exception, calls: int
) -> None:
    generator.script = [error]
    with pytest.raises(openai.InternalServerError):
        await official.with_options(max_retries=1).completions.create(model="tiny", prompt="a")
    assert len(generator.submissions) == calls


@pytest.mark.parametrize(("given", "scored"), [({}, 2), ({"prompt_logprobs": 0}, 0), ({"prompt_logprobs": 5}, 5)])
async def test_echo_scores_the_prompt_like_the_output_unless_prompt_logprobs_is_set(
    client: httpx.AsyncClient, generator: FakeGenerator, given: dict[str, int], scored: int
) -> None:
    body = {"prompt": [5, 6], "logprobs": 2, "echo": True, "max_tokens": 1, **given}
    await client.post(COMPLETIONS, json=body)
    assert generator.submissions[-1].sampling.prompt_logprobs == scored
