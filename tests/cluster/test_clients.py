"""The built-in model through common clients: the official openai library, and gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import serving_pb2, serving_pb2_grpc, types_pb2
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("builtin", exact=True) as started:
        yield started


@pytest.fixture
def official(running: Cluster) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)


def test_models_are_listed_and_an_unknown_model_is_not_found(official: openai.OpenAI) -> None:
    assert [m.id for m in official.models.list()] == ["builtin"]
    assert official.models.retrieve("builtin").id == "builtin"
    with pytest.raises(openai.NotFoundError) as refused:
        official.models.retrieve("other")
    assert refused.value.code == "model_not_found"


def test_a_streamed_completion_equals_the_whole_completion(official: openai.OpenAI) -> None:
    asked = {"model": "builtin", "prompt": PROMPT, "max_tokens": 40, "temperature": 0.8, "seed": 7}
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
    free = official.completions.create(model="builtin", prompt=PROMPT, max_tokens=60, temperature=0)
    stop = free.choices[0].text[10:13]
    cut = official.completions.create(model="builtin", prompt=PROMPT, max_tokens=60, temperature=0, stop=[stop])
    assert cut.choices[0].text == free.choices[0].text[: free.choices[0].text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_errors_raise_the_exception_classes_of_the_openai_library(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        official.completions.create(model="builtin", prompt=PROMPT, max_tokens=4, temperature=3)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        official.completions.create(model="builtin", prompt=PROMPT, n=129)
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
    texts = [PROMPT, "def write_lines(path):", "class Tree:"]
    together = official.embeddings.create(model="builtin", input=texts)
    vectors = [each.embedding for each in together.data]
    for vector, text in zip(vectors, texts, strict=True):
        assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-5)
        alone = official.embeddings.create(model="builtin", input=text).data[0]
        assert alone.embedding == vector  # exact, from cached KV too
    body = {"model": "builtin", "query": PROMPT, "documents": texts}
    results = httpx.post(running.url + "/rerank", json=body, timeout=60.0).json()["results"]
    cosines = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors]
    assert results[0]["index"] == 0
    for result in results:
        assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-5)
    assert running.workers()["decode-0"]["kv_bytes_received"] == received
