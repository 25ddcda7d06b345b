"""Structured output through a running cluster: every answer fits its schema, streamed or whole, with and without draft
tokens, and what is refused costs the workers nothing."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import grpc
import grpc.aio
import httpx
import jsonschema
import openai
import pytest

from baton.v1 import serving_pb2, serving_pb2_grpc, types_pb2
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHAPE = {
    "$defs": {"point": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 2}},
    "type": "object",
    "properties": {
        "kind": {"const": "line"},
        "from": {"$ref": "#/$defs/point", "maxItems": 2},
        "closed": {"type": "boolean"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{2,6}$"}]},
    },
    "required": ["kind", "closed", "note"],
    "additionalProperties": False,
}
SCHEMAS = (PERSON, SHAPE)


def asked(number: int) -> dict[str, Any]:
    schema = SCHEMAS[number % 2]
    return {
        "model": "builtin",
        "messages": [{"role": "user", "content": f"Number {number}: write one, please."}],
        "max_tokens": 300,
        "temperature": (0.0, 0.7, 1.0)[number % 3],
        "seed": number,
        "stream": number % 4 == 1,
        "extra_body": {"structured_outputs": {"json": schema, "disable_any_whitespace": True}},
    }


async def one(official: openai.AsyncOpenAI, number: int) -> str:
    answer: Any = await official.chat.completions.create(**asked(number))
    if number % 4 == 1:
        pieces = [event.choices[0].delta.content or "" async for event in answer]
        return "".join(pieces)
    assert answer.choices[0].finish_reason == "stop", answer
    return str(answer.choices[0].message.content)


async def all_of(running: Cluster, count: int) -> list[str]:
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0, timeout=300)
    async with official:
        return list(await asyncio.gather(*(one(official, number) for number in range(count))))


def counted(running: Cluster) -> int:
    return int(sum(row["prompt_tokens_computed"] for row in running.workers().values()))


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.long)])
async def test_every_answer_fits_its_schema_and_drafts_change_none(count: int) -> None:
    found: dict[str, list[str]] = {}
    for draft in ("none", "auto"):
        with cluster("builtin", exact=True, draft=draft, tool_parser="hermes") as running:
            found[draft] = await all_of(running, count)
            if draft == "auto":
                await refusals_cost_nothing(running)
                await over_grpc(running)
                await forced_calls(running)
    for number, text in enumerate(found["none"]):
        jsonschema.validate(json.loads(text), SCHEMAS[number % 2])
    assert found["auto"] == found["none"]
    assert len(set(found["none"])) > count // 4, "answers differ"


@pytest.mark.long
async def test_two_hundred_answers_are_the_same_though_a_worker_dies() -> None:
    """Its automata are made again from the tokens that clients already have."""
    with cluster("builtin", exact=True) as running:
        alone = await all_of(running, 200)
    with cluster("builtin", exact=True, prefill=1, decode=2) as running:
        asked = asyncio.create_task(all_of(running, 200))

        def busy(_: Cluster) -> bool:
            return all(running.workers()[name]["running"] > 4 for name in ("decode-0", "decode-1"))

        await asyncio.to_thread(running.wait_until, busy, "streams on both decode workers")
        await asyncio.to_thread(lambda: running.kill(running.pids("decode-1")[0]))
        assert await asked == alone
        counts = httpx.get(running.url + "/workers").json()["coordinator"]
        assert counts["rescheduled"] > 0, counts


async def refusals_cost_nothing(running: Cluster) -> None:
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)
    before = counted(running)
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
    async with official:
        for wanted in ({"json": {"type": "banana"}}, {"regex": "a("}, {"grammar": chain}, {"grammar": "start: b"}):
            with pytest.raises(openai.BadRequestError) as refused:
                await official.chat.completions.create(**asked(0) | {"extra_body": {"structured_outputs": wanted}})
            body: Any = refused.value.body
            assert body["code"] == "invalid_grammar" and body["param"].startswith("structured_outputs.")
    assert counted(running) == before


async def forced_calls(running: Cluster) -> None:
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0, timeout=300)
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in (("person", PERSON), ("shape", SHAPE))
    ]
    by_name = {"type": "function", "function": {"name": "shape"}}
    async with official:
        for seed, choice in ((1, "required"), (2, by_name), (3, by_name)):
            options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400}
            messages: Any = [{"role": "user", "content": "Call one."}]
            answer = await official.chat.completions.create(model="builtin", messages=messages, seed=seed, **options)
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function" and call.function.name in ("person", "shape")
            assert choice == "required" or call.function.name == "shape"
            jsonschema.validate(
                json.loads(call.function.arguments), PERSON if call.function.name == "person" else SHAPE
            )
            async with official.chat.completions.stream(
                model="builtin", messages=messages, seed=seed, **options
            ) as stream:
                (same,) = (await stream.get_final_completion()).choices[0].message.tool_calls or []
            assert same.function.arguments == call.function.arguments


async def over_grpc(running: Cluster) -> None:
    choice = random.Random(1).choice(["yes", "no"])
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        stub = serving_pb2_grpc.ServingStub(channel)
        request = serving_pb2.GenerateRequest(
            text="Well?", max_tokens=8, sampling=types_pb2.SamplingParams(grammar=f'start: "{choice}"')
        )
        text = "".join([m.delta.text async for m in stub.Generate(request) if m.HasField("delta")])
    assert text == choice
