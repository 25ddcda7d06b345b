"""LoRA adapters in a running cluster, whose prefill worker has two ranks: chosen by `model`, loaded and unloaded while
streams run, never sharing KV, and loaded again by a worker that restarts; vectors, scores and labels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from torch.nn import functional

from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine.runner import Runner
from baton.v1 import serving_pb2, serving_pb2_grpc, types_pb2
from tests.support.adapters import load_adapter, make_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.engine_driver import GREEDY, Job, random_tokens, run, tiny_runner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT, COUNT = random_tokens(70, seed=3), 40
ADAPTERS = "a", "b", "c"
CACHED = 64  # of the prompt: its full blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora") / "m"
    make_checkpoint(directory, "llama")
    for seed, name in enumerate(ADAPTERS):
        make_adapter(directory.parent / name, directory, seed=seed, r=4 + seed)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[int, ...]]:
    """The output of the model itself, `m`, and with each adapter, each computed alone on one rank."""
    runner = tiny_runner(model, exact=True)
    outputs = {}
    for name in ("m", *ADAPTERS):
        job = Job(PROMPT, COUNT, adapter="" if name == "m" else load_adapter(runner, model.parent / name))
        run(runner, [job])
        outputs[name] = tuple(job.output)
    assert len(set(outputs.values())) == 4
    return outputs


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Cluster]:
    lora = " ".join(f"{name}={model.parent / name}" for name in "ab")
    options: dict[str, Any] = {"lora": lora, "allow_runtime_lora_updating": True}
    with cluster(model, exact=True, prefill_tp=2, **options) as started:
        yield started


async def ask(client: Client, name: str, **fields: Any) -> tuple[tuple[int, ...], int]:
    """Returns the output of the model of that name, and how many tokens of the prompt were cached at prefill."""
    answer = await client.complete(PROMPT, COUNT, model=name, **fields)
    assert answer["model"] == name
    return tuple(answer["choices"][0]["token_ids"]), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_adapters_and_the_model_share_batches_but_no_prefix(
    running: Cluster, expected: dict[str, tuple[int, ...]]
) -> None:
    async with Client(running, timeout_s=120.0) as client:
        listed = (await client.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [("m", None), ("a", "m"), ("b", "m")]
        for name in "ma":
            assert await ask(client, name) == (expected[name], 0)
        again = await asyncio.gather(*(ask(client, name) for name in "mamab"))
        assert again == [(expected[name], 0 if name == "b" else CACHED) for name in "mamab"]
        assert (await client.http.post("/v1/completions", json={"model": "d", "prompt": "x"})).status_code == 404


async def test_an_adapter_is_replaced_while_a_stream_of_the_former_one_runs(
    running: Cluster, model: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    def held() -> list[int]:
        return [len(row["adapters"]) for row in running.workers().values() if row["state"] == "ready"]

    async def operate(path: str, **body: str) -> tuple[int, str]:
        answer = await client.http.post(path, json=body)
        return answer.status_code, answer.text

    async with Client(running, timeout_s=120.0) as client:
        misfit = make_adapter(model.parent / "misfit", model, target_modules=["q_proj"])
        (misfit / "adapter_config.json").write_text((model.parent / "a" / "adapter_config.json").read_text())
        status, text = await operate("/v1/load_lora_adapter", lora_name="d", lora_path=str(misfit))
        assert status == 400 and "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight is missing" in text
        stream = client.events(PROMPT, 1500, model="a", cache_salt="stream")
        output: list[int] = []
        async for event in stream:
            output += event["choices"][0]["token_ids"]
            break
        assert await operate("/v1/unload_lora_adapter", lora_name="a") == (
            200,
            "Success: LoRA adapter 'a' removed successfully.",
        )
        assert (await client.http.post("/v1/completions", json={"model": "a", "prompt": "x"})).status_code == 404
        status, text = await operate("/v1/load_lora_adapter", lora_name="a", lora_path=str(model.parent / "c"))
        assert (status, text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert held() == [3, 3], "the stream ended before its adapter was replaced: make it longer"
        assert await ask(client, "a") == (expected["c"], 0)
        async for event in stream:
            output += [] if event == "[DONE]" else event["choices"][0]["token_ids"]
        assert len(output) == 1500 and tuple(output[:COUNT]) == expected["a"]
        running.wait_until(lambda _: held() == [2, 2], "workers without the former adapter")


async def test_a_restarted_worker_loads_the_adapters_before_it_gets_their_requests(
    running: Cluster, expected: dict[str, tuple[int, ...]]
) -> None:
    async with Client(running, timeout_s=120.0) as client:
        for worker in ("decode-0", "prefill-0"):
            before = running.workers()[worker]["incarnation"]
            running.kill(running.pids(worker)[0])
            running.wait_until(
                lambda r, name=worker, old=before: (
                    r.workers()[name]["incarnation"] != old  # type: ignore[misc]
                    and r.workers()[name]["state"] == "ready"
                ),
                f"another {worker}",
                120.0,
            )
            assert (await ask(client, "b"))[0] == expected["b"]
            assert (await ask(client, "m"))[0] == expected["m"]


async def test_vectors_and_scores_are_those_of_the_adapter(running: Cluster, model: Path) -> None:
    """By HTTP and gRPC; a prompt's KV of the model itself, which is cached, does not serve the adapter."""
    runner = tiny_runner(model, exact=True)
    digests = {"m": "", "b": load_adapter(runner, model.parent / "b")}
    texts, vectors = ["one text", "another", "one text"], {}
    async with Client(running, timeout_s=120.0) as client, grpc.aio.insecure_channel(running.grpc) as channel:
        stub = serving_pb2_grpc.ServingStub(channel)
        ids = serving_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=PROMPT))

        async def post(path: str, **fields: Any) -> Any:
            answer = await client.http.post(path, json=fields)
            assert answer.status_code == 200, answer.text
            return answer.json()

        for name, digest in digests.items():
            expected = functional.normalize(pooled(runner, PROMPT, digest), dim=0)
            answer = await post("/v1/embeddings", model=name, input=[PROMPT])
            embedded = await stub.Embed(serving_pb2.EmbedRequest(model=name, inputs=[ids]), timeout=60)
            for vector in (answer["data"][0]["embedding"], list(embedded.embeddings[0].values)):
                assert vector == pytest.approx(expected.tolist(), abs=1e-5)
            assert answer["model"] == name
            data = (await post("/v1/embeddings", model=name, input=texts))["data"]
            first, second, _ = vectors[name] = [torch.tensor(each["embedding"]) for each in data]
            cosine = pytest.approx(float(first @ second), abs=1e-5)
            scores = await post("/v1/score", model=name, text_1=texts[0], text_2=texts[1:])
            assert [each["score"] for each in scores["data"]] == [cosine, pytest.approx(1.0)]
            ranked = await post("/v1/rerank", model=name, query=texts[0], documents=texts[1:])
            assert [each["index"] for each in ranked["results"]] == [1, 0]
            assert ranked["results"][1]["relevance_score"] == cosine
            request = serving_pb2.ScoreRequest(model=name, firsts=texts[:1], seconds=texts[1:2])
            assert list((await stub.Score(request, timeout=60)).scores) == [cosine]
    assert (vectors["m"][0] - vectors["b"][0]).abs().max() > 0.01


@pytest.mark.long  # tests/engine/test_adapters.py computes the scores of such a head
async def test_labels_are_those_of_the_adapter(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "qwen2", tied=True, head="score", num_labels=3)
    adapter = make_adapter(tmp_path / "a", model)
    runner = tiny_runner(model, exact=True)
    digests = {"m": "", "a": load_adapter(runner, adapter)}
    with cluster(model, exact=True, decode=0, lora=f"a={adapter}") as running:
        async with Client(running, timeout_s=120.0) as client, grpc.aio.insecure_channel(running.grpc) as channel:
            shown = {}
            for name, digest in digests.items():
                expected = pytest.approx(torch.softmax(pooled(runner, PROMPT, digest), dim=0).tolist(), abs=1e-5)
                answer = await client.http.post("/classify", json={"model": name, "input": [PROMPT]})
                shown[name] = answer.json()["data"][0]["probs"]
                ids = serving_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=PROMPT))
                request = serving_pb2.ClassifyRequest(model=name, inputs=[ids])
                (made,) = (await serving_pb2_grpc.ServingStub(channel).Classify(request, timeout=60)).classifications
                assert shown[name] == expected
                assert list(made.probs) == expected
    assert max(abs(a - b) for a, b in zip(shown["m"], shown["a"], strict=True)) > 0.01


def pooled(runner: Runner, tokens: list[int], adapter: str) -> torch.Tensor:
    """The last token's final hidden state, or the scores of the classification head."""
    blocks = tuple(range(runner.layout.blocks_for(len(tokens))))
    row = Row(SequenceId("x"), 0, tuple(tokens), blocks, GREEDY, pooling="last", adapter=adapter)
    return torch.frombuffer(bytearray(runner.step(StepPlan(1, (row,))).pooled[0]), dtype=torch.float64).float()
