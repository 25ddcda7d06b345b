"""A request for which the queue has no room is refused before its body is read, over each API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest

from baton.core.errors import BatonError, QuotaExceeded, Unavailable
from baton.v1 import inference_pb2, inference_pb2_grpc, serving_pb2
from coordinator.http.app import HttpSettings, create_app
from coordinator.metrics import Metrics
from coordinator.text.model import TextModel
from tests.support.fake_generator import FakeGenerator
from tests.support.front_kit import RawClient, running
from tests.support.grpc_kit import served

QUEUING = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *(f"/v2/models/tiny/{name}" for name in ("infer", "generate", "generate_stream")),
)
OTHERS = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
SLOW_S = 0.05


@pytest.fixture
def generator() -> FakeGenerator:
    made = FakeGenerator()
    made.no_room = Unavailable("no room", retry_after_s=7)
    return made


@pytest.fixture
async def client(generator: FakeGenerator, text_model: TextModel) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as made:
        yield made


@pytest.mark.parametrize("path", QUEUING)
async def test_a_refusal_does_not_depend_on_the_body(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == (529 if path == "/v1/messages" else 503) and answer.headers["retry-after"] == "7"
    (statistics,) = (await client.get("/v2/models/stats")).json()["model_stats"]
    assert statistics["inference_stats"]["fail"]["count"] == ("/v2/models" in path)


@pytest.mark.parametrize("path", QUEUING)
async def test_a_deadline_in_the_head_is_judged_before_the_body(
    client: httpx.AsyncClient, generator: FakeGenerator, path: str
) -> None:
    head = {"content-type": "application/json", "x-request-timeout-ms": "1500"}
    assert (await client.post(path, content=b"{", headers=head)).headers["retry-after"] == "7"
    assert generator.time_limits == [1.5]
    answer = await client.post(path, content=b"{", headers=head | {"x-request-timeout-ms": "soon"})
    assert answer.status_code == 400 and "x-request-timeout-ms" in answer.text


@pytest.mark.parametrize("path", QUEUING[:4])
async def test_what_is_asked_for_most_is_refused_before_it_is_routed(
    generator: FakeGenerator, text_model: TextModel, path: str
) -> None:
    app = create_app(generator, text_model, HttpSettings("tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://baton") as client:
        assert (await client.get(path)).status_code == 405
        app.router.routes.clear()
        assert (await client.post(path)).status_code in (503, 529)


@pytest.mark.parametrize("path", OTHERS)
async def test_what_does_not_queue_is_not_refused(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path, content=b"{", headers={"content-type": "application/json"})).status_code == 400


async def test_a_refusal_does_not_wait_for_the_body_and_the_connection_serves_the_next_request(
    generator: FakeGenerator, text_model: TextModel
) -> None:
    async with running(create_app(generator, text_model, HttpSettings("tiny"))) as server:
        client = await RawClient.connect(server)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        await client.send(head + b"Content-Length: 40000\r\n\r\n")
        assert (await client.answer())[0] == 503
        await client.send(b" " * 40000)
        generator.no_room = None
        await client.post("/v1/completions", {"prompt": "Hello"})
        assert (await client.answer())[0] == 200 and len(generator.submissions) == 1


async def test_the_time_of_an_answer_begins_with_its_head(generator: FakeGenerator, text_model: TextModel) -> None:
    generator.no_room = None
    async with running(create_app(generator, text_model, HttpSettings("tiny"))) as server:
        client = await RawClient.connect(server)
        body = b'{"prompt": "Hello"}'
        head = "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        await client.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        await asyncio.sleep(SLOW_S)
        await client.send(body)
        assert (await client.answer())[0] == 200
    assert generator.answer_times[0] >= SLOW_S / 2


@pytest.mark.parametrize("error", [Unavailable("no room", retry_after_s=7), QuotaExceeded("no room", retry_after_s=7)])
async def test_grpc_calls_are_refused_before_their_message_is_parsed(
    text_model: TextModel, generator: FakeGenerator, error: BatonError
) -> None:
    generator.no_room = error
    full = isinstance(error, Unavailable)
    expected = grpc.StatusCode.UNAVAILABLE if full else grpc.StatusCode.RESOURCE_EXHAUSTED
    async with served(generator, text_model) as client:
        assert (await client.refused(token_ids=None))[0] is expected
        with pytest.raises(grpc.aio.AioRpcError):
            await client.stub.Embed(serving_pb2.EmbedRequest(), timeout=30)
        assert 0 < (generator.time_limits[-1] or 0) < 60  # about 30
        infer = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelInfer
        for call in (
            lambda: client.stub.Embed(serving_pb2.EmbedRequest()),
            lambda: client.stub.Classify(serving_pb2.ClassifyRequest()),
            lambda: client.stub.Score(serving_pb2.ScoreRequest()),
            lambda: infer(inference_pb2.ModelInferRequest(model_name="tiny")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is expected, caught.value.details()
        request = inference_pb2.ModelInferRequest(model_name="tiny")
        stream = inference_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelStreamInfer(iter([request]))
        assert [answer.error_message for answer in [answer async for answer in stream]] == [f"{error.code}: no room"]


def test_the_time_to_a_refusal_is_a_metric() -> None:
    metrics = Metrics()
    for status, seconds in ((429, 0.004), (503, 0.2), (529, 0.2), (200, 9.0), (400, 9.0)):
        metrics.answered(status, seconds)
    (family,) = metrics.refusal.collect()
    counts = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert (counts["0.005"], counts["0.05"], counts["0.2"], counts["+Inf"]) == (1, 1, 3, 3)
