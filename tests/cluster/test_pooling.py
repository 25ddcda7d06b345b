"""A cluster without a decode pool: embeddings of an embedding model, by the official client, against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, cluster
from tests.support.engine_driver import random_tokens

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "embedder", "qwen3", head="none")


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[Cluster]:
    with cluster(model_dir, decode=0, prefill_tp=2, dtype="float32", step_tokens=64, pooling="mean") as started:
        yield started


@torch.no_grad()
def means(model_dir: Path, prompts: list[list[int]]) -> list[list[float]]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_dir, dtype=torch.float32).eval()
    states = [model(torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in prompts]
    return [torch.nn.functional.normalize(state, dim=0).tolist() for state in states]


def test_embeddings_equal_transformers_without_a_decode_worker(running: Cluster, model_dir: Path) -> None:
    """The prompts are computed in chunks, in steps of several prompts, on two ranks."""
    assert {row["role"] for row in running.workers().values()} == {"prefill"}
    assert httpx.get(running.url + "/ready").status_code == 200
    prompts = [random_tokens(length, seed=length) for length in (1, 30, 100, 150)]
    client = openai.OpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)
    answer = client.embeddings.create(model="embedder", input=prompts)
    for each, expected in zip(answer.data, means(model_dir, prompts), strict=True):
        assert each.embedding == pytest.approx(expected, abs=1e-5)
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    (row,) = running.workers().values()
    assert row["prompt_tokens_computed"] >= sum(map(len, prompts)) and row["tokens_generated"] == 0


def test_generation_is_refused_by_name(running: Cluster) -> None:
    client = openai.OpenAI(api_key="none", base_url=running.url + "/v1", max_retries=0)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="embedder", prompt="a")
    assert refused.value.code == "model_not_generative"


async def test_a_client_that_disconnects_leaves_nothing(running: Cluster) -> None:
    """Checked at the end of the block: an idle worker that still has a sequence ends with an error."""
    body = {"model": "embedder", "input": [random_tokens(4000, seed=seed) for seed in range(4)]}
    async with httpx.AsyncClient(base_url=running.url) as client:
        call = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    running.wait_until(lambda r: all(row["sequences"] == 0 for row in r.workers().values()), "idle worker")
    answer = httpx.post(running.url + "/v1/embeddings", json={"input": "Hello"}, timeout=60.0)
    assert answer.status_code == 200
