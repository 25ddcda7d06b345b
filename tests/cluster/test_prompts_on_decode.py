"""Clusters whose decode workers compute prompts: every kind of answer equals, bit for bit, that of a cluster with a
prefill pool, and streams survive kill -9."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.adapters import make_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG, SHORT, COUNT = 150, 20, 24
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "choices": {"n": 3, "temperature": 1.0, "seed": 11},
    "regex": {"structured_outputs": {"regex": "([a-f]{3},){3,5}"}, "temperature": 1.0, "seed": 12, "ignore_eos": False},
    "one token": {"max_tokens": 1},
    "adapter": {"model": "a"},
}


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_checkpoint(tmp_path_factory.mktemp("split") / "m", arch="llama")
    make_adapter(directory.parent / "a", directory, seed=1, r=4)
    return directory


def started(model: Path, **flags: object) -> Any:
    return cluster(model, exact=True, step_tokens=32, lora=f"a={model.parent / 'a'}", **flags)


async def answers(running: Cluster) -> dict[str, object]:
    """Sends every kind of request, all at once, for a short and a long prompt; returns what is not an id or a time."""
    async with Client(running) as client:

        async def one(fields: dict[str, Any], length: int) -> object:
            sent = {"model": "m", "max_tokens": COUNT, **fields}
            answer = await client.complete(prompt(length, length), sent.pop("max_tokens"), **sent)
            return answer["choices"], answer["usage"]["completion_tokens"]

        asked = {f"{name} {length}": one(fields, length) for name, fields in KINDS.items() for length in (SHORT, LONG)}
        result = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        embedded = await client.http.post("/v1/embeddings", json={"model": "m", "input": [prompt(3, 70)]})
        result["embedding"] = embedded.json()["data"][0]["embedding"]
        await client.idle(running)
        return result


def computed(running: Cluster, role: str) -> int:
    return sum(int(row["prompt_tokens_computed"]) for row in running.workers().values() if row["role"] == role)


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_answers_equal_those_of_a_prefill_pool_and_streams_survive_kills(kills: int, model: Path) -> None:
    with started(model) as running:
        expected = await answers(running)
        assert computed(running, "prefill") > 0 and computed(running, "decode") == 0
    with started(model, prefill=0, decode=2) as running:
        assert {row["role"] for row in running.workers().values()} == {"decode"}
        assert httpx.get(running.url + "/ready").status_code == 200
        first = await answers(running)
        assert [name for name in expected if first[name] != expected[name]] == []
        assert computed(running, "decode") > LONG
        again = await answers(running)  # from cached blocks
        assert [name for name in expected if again[name] != expected[name]] == []
        assert sum(int(row["prompt_tokens_cached"]) for row in running.workers().values()) > LONG
        await _survives_kills(running, kills)
    with started(model, split="auto") as running:
        mixed = await answers(running)
        assert [name for name in expected if mixed[name] != expected[name]] == []
        body, asks = {"model": "m", "prompt": prompt(5, 40), "max_tokens": 4}, {"x-baton-split": "1"}
        answer = httpx.post(running.url + "/v1/completions", json=body, headers=asks, timeout=60.0)
        assert "tokens/s" in answer.headers["x-baton-split"], "decided by measured costs"


async def _survives_kills(running: Cluster, kills: int) -> None:
    length = 200
    async with Client(running, timeout_s=120.0) as client:
        undisturbed = await asyncio.gather(*(client.streamed(prompt(n, 60), length) for n in range(4)))
        for worker in ("decode-0", "decode-1")[:kills]:
            streams = [asyncio.create_task(client.streamed(prompt(n, 60), length)) for n in range(4)]
            await asyncio.sleep(0.3)
            running.kill(running.pids(worker)[0])
            assert [await stream for stream in streams] == undisturbed
            running.wait_until(
                lambda now: sorted(row["state"] for row in now.workers().values()) == ["ready", "ready"], "both workers"
            )
        before = {name: row["incarnation"] for name, row in running.workers().items()}
        cancelled = asyncio.create_task(client.streamed(prompt(9, 100), 300))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await client.idle(running)
        assert {name: row["incarnation"] for name, row in running.workers().items()} == before
