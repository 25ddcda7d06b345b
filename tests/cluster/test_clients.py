"""The built-in model through common clients, the official openai library with all sampling options, compared with
transformers, and gRPC; in exact mode, so that a request gets the same tokens alone, in a batch and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
import torch
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.runtime.model_source import builtin_directory
from baton.v1 import serving_pb2, serving_pb2_grpc, types_pb2
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SHORT = "def read_lines(path):"
PROMPT = f"{SHORT}\n    with open(path) as file:\n"
REQUESTS: dict[str, dict[str, Any]] = {
    "repetition": {"temperature": 0, "extra_body": {"repetition_penalty": 1.4}},
    "penalties": {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "bias": {"temperature": 0.7, "seed": 2, "logit_bias": {"300": 4, "10": -100}},
    "min_p": {"temperature": 1.5, "seed": 3, "extra_body": {"min_p": 0.05, "top_k": 50}},
    "bad words": {"temperature": 0, "extra_body": {"bad_words": ["return", "file"], "ignore_eos": True}},
    "allowed": {"temperature": 1.0, "seed": 4, "extra_body": {"allowed_token_ids": [*range(260, 330)]}},
    "all": {
        "temperature": 0.9,
        "seed": 5,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "stop": ["\n\n\n"],
        "extra_body": {"repetition_penalty": 1.1, "min_tokens": 20, "bad_words": ["for"], "stop_token_ids": [14]},
    },
}


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("builtin", exact=True, step_tokens=16) as started:
        yield started


@pytest.fixture
def official(running: Cluster) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)


def complete(official: openai.OpenAI, **asked: Any) -> Any:
    return official.completions.create(**{"model": "builtin", "prompt": PROMPT, "max_tokens": 40, **asked})


def ids_of(answer: Any) -> list[int]:
    return list(answer.choices[0].model_extra["token_ids"])


def with_ids(asked: dict[str, Any]) -> dict[str, Any]:
    return asked | {"extra_body": asked.get("extra_body", {}) | {"return_token_ids": True}}


async def test_each_kind_of_request_gets_the_same_output_alone_and_in_a_batch(running: Cluster) -> None:
    client = openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)
    async with client:

        async def ask(name: str) -> tuple[str, list[int], str | None]:
            asked = {"model": "builtin", "prompt": PROMPT, "max_tokens": 40} | with_ids(REQUESTS[name])
            answer = await client.completions.create(**asked)
            return answer.choices[0].text, ids_of(answer), answer.choices[0].finish_reason

        alone = {name: await ask(name) for name in REQUESTS}
        together = await asyncio.gather(*(ask(name) for name in REQUESTS))
    assert dict(zip(REQUESTS, together, strict=True)) == alone
    assert len({str(ids) for _, ids, _ in alone.values()}) == len(alone)


def test_penalties_masks_and_bias_change_the_tokens_as_specified(official: openai.OpenAI) -> None:
    plain = ids_of(complete(official, **with_ids({"temperature": 0, "extra_body": {"ignore_eos": True}})))
    assert len(set(plain)) < len(plain)  # otherwise the comparison below is meaningless
    punished = {"temperature": 0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    spread = ids_of(complete(official, **with_ids(punished | {"extra_body": {"ignore_eos": True}})))
    assert len(set(spread)) > len(set(plain))
    allowed = ids_of(complete(official, **with_ids(REQUESTS["allowed"])))
    assert set(allowed) <= set(range(260, 330)) | {allowed[-1]}
    forced = ids_of(complete(official, **with_ids({"temperature": 1, "seed": 1, "logit_bias": {"77": 100}})))
    assert set(forced) == {77}
    text = complete(official, **REQUESTS["bad words"]).choices[0].text
    assert "return" in complete(official, temperature=0).choices[0].text and "return" not in text


def test_stop_tokens_end_the_output_but_not_before_min_tokens(official: openai.OpenAI) -> None:
    plain = complete(official, **with_ids({"temperature": 0}))
    tokens = ids_of(plain)
    stop = tokens[6]
    first = tokens.index(stop)
    cut = complete(official, **with_ids({"temperature": 0, "extra_body": {"stop_token_ids": [stop]}}))
    assert ids_of(cut) == tokens[: first + 1] and cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra["stop_reason"] == stop
    assert plain.choices[0].text.startswith(cut.choices[0].text)
    later = {"temperature": 0, "extra_body": {"stop_token_ids": [stop], "min_tokens": first + 1}}
    held = ids_of(complete(official, **with_ids(later)))
    assert len(held) > first + 1 and stop not in held[: first + 1]
    text = plain.choices[0].text
    word = text.strip()[:3]
    early = complete(official, temperature=0, stop=[word])
    assert word not in early.choices[0].text
    kept = complete(official, temperature=0, stop=[word], extra_body={"min_tokens": 30}).choices[0].text
    assert kept.startswith(text[: len(kept)][:10]) and word in kept


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(builtin_directory("target"), dtype=torch.float32).eval()


@torch.no_grad()
def reference_logprobs(reference: Any, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(reference(torch.tensor([tokens])).logits[0].double(), dim=-1)


def test_logprobs_of_prompt_and_output_are_those_of_transformers(official: openai.OpenAI, reference: Any) -> None:
    prompt = list(range(40, 75))
    answer = complete(
        official, **with_ids({"prompt": prompt, "max_tokens": 12, "logprobs": 3, "echo": True, "seed": 3})
    )
    choice, output = answer.choices[0], ids_of(answer)
    found, tokens = choice.logprobs, prompt + output
    expected = reference_logprobs(reference, tokens)
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == len(tokens)
    for index, value in enumerate(found.token_logprobs[1:]):
        assert value == pytest.approx(expected[index, tokens[index + 1]].item(), abs=1e-4)
        best = sorted(found.top_logprobs[index + 1].values(), reverse=True)[:3]
        assert best == pytest.approx(expected[index].topk(3).values.tolist(), abs=1e-4)
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == len(output)


def test_prompt_logprobs_have_the_format_of_vllm(official: openai.OpenAI, reference: Any) -> None:
    prompt = list(range(40, 75))
    answer = complete(official, prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 2})
    found = answer.choices[0].model_extra["prompt_logprobs"]
    expected = reference_logprobs(reference, prompt)
    assert found[0] is None and len(found) == len(prompt)
    for index, entry in enumerate(found[1:]):
        token = prompt[index + 1]
        assert entry[str(token)]["logprob"] == pytest.approx(expected[index, token].item(), abs=1e-4)
        assert 2 <= len(entry) <= 3 and min(e["rank"] for e in entry.values()) == 1


def test_chat_logprobs_contain_the_text_and_are_the_same_when_streamed(official: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "builtin",
        "messages": [{"role": "user", "content": "Write a Python function `add` with arguments (a, b)."}],
        "max_completion_tokens": 24,
        "temperature": 0.8,
        "seed": 9,
        "logprobs": True,
        "top_logprobs": 4,
        "extra_body": {"ignore_eos": True},
    }
    whole = official.chat.completions.create(**asked)
    content = whole.choices[0].logprobs.content
    assert len(content) == 24 == whole.usage.completion_tokens
    raw = b"".join(bytes(entry.bytes) for entry in content)
    assert (whole.choices[0].message.content or "") in raw.decode(errors="replace")
    for entry in content:
        assert len(entry.top_logprobs) == 4 and entry.logprob <= entry.top_logprobs[0].logprob <= 0.0
    parts = list(official.chat.completions.create(**asked, stream=True))
    streamed = [e for p in parts for c in p.choices if c.logprobs and c.logprobs.content for e in c.logprobs.content]
    assert streamed == content


def test_an_echoed_prompt_is_streamed_before_the_output(official: openai.OpenAI) -> None:
    asked = {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 8}
    whole = complete(official, **asked).choices[0]
    parts = [c for p in complete(official, **asked, stream=True) for c in p.choices]
    assert "".join(c.text for c in parts) == whole.text
    assert whole.text.startswith(PROMPT)
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [x for c in parts if c.logprobs for x in getattr(c.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text[offset : offset + len(token)] == token or token.startswith("<")


async def test_choices_share_one_prefill_and_each_choice_is_reproducible(running: Cluster) -> None:
    async with openai.AsyncOpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "builtin", "prompt": PROMPT * 4, "max_tokens": 24, "temperature": 0.9}
        asked |= {"seed": 11, "extra_body": {"return_token_ids": True, "presence_penalty": 0.5}}

        def computed() -> int:
            return int(running.workers()["prefill-0"]["prompt_tokens_computed"])

        before = computed()
        answer = await client.completions.create(**asked, n=4)
        assert answer.usage is not None
        assert computed() - before <= answer.usage.prompt_tokens + 3 * 16  # one prompt, and under a block per choice
        assert answer.usage.completion_tokens == sum(len(c.model_extra["token_ids"]) for c in answer.choices)
        ids_by_choice = {c.index: c.model_extra["token_ids"] for c in answer.choices}
        assert sorted(ids_by_choice) == [0, 1, 2, 3] and len({str(ids) for ids in ids_by_choice.values()}) == 4
        alone = await client.completions.create(**asked)
        assert alone.choices[0].model_extra["token_ids"] == ids_by_choice[0]
        streamed: dict[int, list[int]] = {}
        async for part in await client.completions.create(**asked, n=4, stream=True):
            for choice in part.choices:
                streamed.setdefault(choice.index, []).extend(choice.model_extra["token_ids"])
        assert streamed == ids_by_choice


def test_models_are_listed_and_an_unknown_model_is_not_found(official: openai.OpenAI) -> None:
    assert [m.id for m in official.models.list()] == ["builtin"]
    assert official.models.retrieve("builtin").id == "builtin"
    with pytest.raises(openai.NotFoundError) as refused:
        official.models.retrieve("other")
    assert refused.value.code == "model_not_found"


def test_a_streamed_completion_equals_the_whole_completion(official: openai.OpenAI) -> None:
    asked = {"model": "builtin", "prompt": SHORT, "max_tokens": 40, "temperature": 0.8, "seed": 7}
    whole = official.completions.create(**asked)
    parts = list(official.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.text for p in parts for c in p.choices)
    assert text == whole.choices[0].text != ""
    assert parts[-1].choices == []
    assert parts[-1].usage is not None and whole.usage is not None
    varies = {"speculation", "completion_tokens_details"}  # the draft length depends on the other load
    assert parts[-1].usage.model_dump(exclude=varies) == whole.usage.model_dump(exclude=varies)
    assert whole.usage.completion_tokens <= 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    finishes = [c.finish_reason for p in parts for c in p.choices if c.finish_reason]
    assert finishes == [whole.choices[0].finish_reason]


def test_a_streamed_chat_completion_equals_the_whole_chat_completion(official: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Write a Python function `read_lines` with arguments (path)."}]
    asked = {"model": "builtin", "messages": messages, "max_completion_tokens": 48, "temperature": 0}
    whole = official.chat.completions.create(**asked)
    parts = list(official.chat.completions.create(**asked, stream=True))
    deltas = [p.choices[0].delta for p in parts]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None and 0 < whole.usage.completion_tokens <= 48


def test_stop_string_is_not_in_the_text(official: openai.OpenAI) -> None:
    free = official.completions.create(model="builtin", prompt=SHORT, max_tokens=60, temperature=0)
    stop = free.choices[0].text[10:13]
    cut = official.completions.create(model="builtin", prompt=SHORT, max_tokens=60, temperature=0, stop=[stop])
    assert cut.choices[0].text == free.choices[0].text[: free.choices[0].text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_errors_raise_the_exception_classes_of_the_openai_library(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        official.completions.create(model="builtin", prompt=SHORT, max_tokens=4, temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        official.completions.create(model="builtin", prompt=SHORT, n=129)
    assert refused.value.param == "n"


async def test_grpc_returns_the_same_tokens_as_http(running: Cluster) -> None:
    ids = list(range(40, 140))
    async with Client(running) as client:
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_k": 50}):
            over_http = await client.tokens(ids, 32, model=None, **sampling)
            assert await client.grpc_tokens(ids, 32, **sampling) == over_http
        await client.idle(running)


async def test_grpc_reports_health_and_refuses_invalid_arguments(running: Cluster) -> None:
    async with grpc.aio.insecure_channel(running.grpc) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        request = serving_pb2.GenerateRequest(text="x", sampling=types_pb2.SamplingParams(min_p=1.5))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(serving_pb2_grpc.ServingStub(channel).Generate(request, timeout=10)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "min_p" in (refused.value.details() or "")


def test_a_generative_model_embeds_and_compares_texts(official: openai.OpenAI, running: Cluster) -> None:
    """By the prefill pool alone: the decode worker gets nothing."""
    received = running.workers()["decode-0"]["kv_bytes_received"]
    texts = [SHORT, "def write_lines(path):", "class Tree:"]
    together = official.embeddings.create(model="builtin", input=texts)
    vectors = [each.embedding for each in together.data]
    for vector, text in zip(vectors, texts, strict=True):
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-5)
        alone = official.embeddings.create(model="builtin", input=text).data[0]
        assert alone.embedding == vector  # exact, from cached KV too
    body = {"model": "builtin", "query": SHORT, "documents": texts}
    results = httpx.post(running.url + "/rerank", json=body, timeout=60.0).json()["results"]
    cosines = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
    assert results[0]["index"] == 0
    for result in results:
        assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-5)
    assert running.workers()["decode-0"]["kv_bytes_received"] == received
