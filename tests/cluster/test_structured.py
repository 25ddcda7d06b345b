"""Structured output through a running cluster: every output matches its schema, streamed or not, with and without draft
tokens, and refused grammars cause no work at the workers."""

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


def fields_of(number: int) -> dict[str, Any]:
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


async def request_one(official: openai.AsyncOpenAI, number: int) -> str:
    answer: Any = await official.chat.completions.create(**fields_of(number))
    if number % 4 == 1:
        pieces = [event.choices[0].delta.content or "" async for event in answer]
        return "".join(pieces)
    assert answer.choices[0].finish_reason == "stop", answer
    return str(answer.choices[0].message.content)


async def request_all(running: Cluster, count: int) -> list[str]:
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0, timeout=300)
    async with official:
        return list(await asyncio.gather(*(request_one(official, number) for number in range(count))))


def prompt_tokens_computed(running: Cluster) -> int:
    return int(sum(row["prompt_tokens_computed"] for row in running.workers().values()))


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.long)])
async def test_every_output_matches_its_schema_and_draft_tokens_change_no_output(count: int) -> None:
    found: dict[str, list[str]] = {}
    for draft in ("none", "auto"):
        with cluster("builtin", exact=True, dtype="float32", draft=draft, tool_parser="hermes") as running:
            found[draft] = await request_all(running, count)
            if draft == "none":
                await check_weak_models_end_their_json(running)
                await check_hostile_masks_end_their_own_requests(running)
            if draft == "auto":
                await check_refused_grammars_cause_no_work(running)
                await check_grammar_over_grpc(running)
                await check_forced_calls(running)
    for number, text in enumerate(found["none"]):
        jsonschema.validate(json.loads(text), SCHEMAS[number % 2])
    assert found["auto"] == found["none"]
    assert len(set(found["none"])) > count // 4, "answers differ"


@pytest.mark.long
async def test_constrained_outputs_are_the_same_when_a_decode_worker_is_killed() -> None:
    """The automata of the lost worker's sequences are rebuilt from the tokens that clients have already received."""
    with cluster("builtin", exact=True) as running:
        alone = await request_all(running, 200)
    with cluster("builtin", exact=True, prefill=1, decode=2) as running:
        asked = asyncio.create_task(request_all(running, 200))

        def busy(_: Cluster) -> bool:
            return all(running.workers()[name]["running"] > 4 for name in ("decode-0", "decode-1"))

        await asyncio.to_thread(running.wait_until, busy, "streams on both decode workers")
        await asyncio.to_thread(lambda: running.kill(running.pids("decode-1")[0]))
        assert await asked == alone
        counts = httpx.get(running.url + "/workers").json()["coordinator"]
        assert counts["rescheduled"] > 0, counts


async def check_refused_grammars_cause_no_work(running: Cluster) -> None:
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)
    before = prompt_tokens_computed(running)
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'
    async with official:
        for wanted in ({"json": {"type": "banana"}}, {"regex": "a("}, {"grammar": chain}, {"grammar": "start: b"}):
            with pytest.raises(openai.BadRequestError) as refused:
                await official.chat.completions.create(**fields_of(0) | {"extra_body": {"structured_outputs": wanted}})
            body: Any = refused.value.body
            assert body["code"] == "invalid_grammar" and body["param"].startswith("structured_outputs.")
    assert prompt_tokens_computed(running) == before


async def check_weak_models_end_their_json(running: Cluster) -> None:
    """They may go on with whitespace as long as it is allowed."""
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0, timeout=300)
    text = {"type": "string", "maxLength": 8}
    schema = {"type": "object", "properties": {"a": text, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": schema}}
    options: Any = {"temperature": 0, "max_tokens": 120, "response_format": wanted}
    async with official:
        for prompt in ("def f(x):\n", "A person, please.", "{"):
            messages: Any = [{"role": "user", "content": prompt}]
            answer = await official.chat.completions.create(model="builtin", messages=messages, **options)
            assert answer.choices[0].finish_reason == "stop" and answer.usage, answer
            assert answer.usage.completion_tokens < 30, answer
            jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


async def check_hostile_masks_end_their_own_requests(running: Cluster) -> None:
    """Such a grammar compiles at once, and its first tokens cost nothing."""
    lines = [f'r{i}: /[a-z ]/ s s | "q" r{(i + 1) % 300} s' for i in range(300)]
    grammar = "\n".join(['start: /x{40}/ "|" s', "s: " + " | ".join(f"r{i}" for i in range(300)) + ' | ""', *lines])
    hostile = {"stream": False, "extra_body": {"structured_outputs": {"grammar": grammar}}}
    official = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0, timeout=300)
    async with official:
        attacks = [asyncio.create_task(official.chat.completions.create(**fields_of(n) | hostile)) for n in range(2)]
        answers = await asyncio.gather(*(request_one(official, number) for number in range(4)))
        for number, text in enumerate(answers):
            jsonschema.validate(json.loads(text), SCHEMAS[number % 2])
        for attack in attacks:
            with pytest.raises(openai.InternalServerError) as failed:
                await attack
            assert failed.value.code == "grammar_limit", failed.value


async def check_forced_calls(running: Cluster) -> None:
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


async def check_grammar_over_grpc(running: Cluster) -> None:
    choice = random.Random(1).choice(["yes", "no"])
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        stub = serving_pb2_grpc.ServingStub(channel)
        request = serving_pb2.GenerateRequest(
            text="Well?", max_tokens=8, sampling=types_pb2.SamplingParams(grammar=f'start: "{choice}"')
        )
        text = "".join([m.delta.text async for m in stub.Generate(request) if m.HasField("delta")])
    assert text == choice
