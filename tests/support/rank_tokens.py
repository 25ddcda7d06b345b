"""Whether clusters of any number of ranks generate the tokens of one rank, and send all KV over their edges."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.one_gpu import one_gpu_settings
from tests.support.oracle import Greedy, greedy

COUNT = 24
REQUESTS = 16
LOST_WITHIN_S = 5.0
_expected: dict[Path, list[Greedy]] = {}


def prompts() -> list[list[int]]:
    return [[(11 * n + 17 * i * i + 3 * i) % 256 for i in range(n)] for n in range(3, 3 + 10 * REQUESTS, 10)]


def eight_heads(directory: Path, kv_heads: int) -> Path:
    return make_checkpoint(directory, "llama", num_heads=8, num_kv_heads=kv_heads, hidden_size=64, head_dim=8)


def one_rank(model: Path, answers: list[tuple[int, ...]]) -> list[Greedy]:
    """The expected tokens, once for each model. The first `answers` change only how long that takes."""
    if model not in _expected:
        pairs = zip(prompts(), answers, strict=True)
        _expected[model] = [greedy(model, prompt, COUNT, likely=answer) for prompt, answer in pairs]
    return _expected[model]


async def same_tokens_as_one_rank(model: Path, **flags: Any) -> dict[str, Any]:
    """Compares with `greedy`, computed by one rank, which adds in another order: tokens may differ from a near tie on.
    Returns the state of the workers at the end."""
    settings = {"served_model_name": "m", "dtype": "float32", "device": "cpu", "step_tokens": 32, "kv_memory_gib": 0.02}
    undecided = 0
    with cluster(model, **{**settings, **flags}) as running:
        async with Client(running) as client:
            answers = await asyncio.gather(*(client.complete(p, COUNT) for p in prompts()))
            await client.idle(running)
        outputs = [tuple(answer["choices"][0]["token_ids"]) for answer in answers]
        for expected, got in zip(one_rank(model, outputs), outputs, strict=True):
            assert got[: expected.decided] == expected.tokens[: expected.decided]
            undecided += expected.decided < COUNT
        check_bytes(running, model)
        workers: dict[str, Any] = running.workers()
    assert undecided <= 1, f"the oracle itself is undecided in {undecided} of {REQUESTS}"
    return workers


def check_bytes(running: Cluster, model: Path) -> None:
    """All KV went over the edges, and each decode rank that stores a replicated head received it once."""
    config = json.loads((model / "config.json").read_text())
    workers = running.workers()
    heads, copies = config["num_key_value_heads"], len(running.pids("decode-0"))
    replicas = max(copies // heads, 1)
    token = 2 * config["num_hidden_layers"] * heads * config["head_dim"] * 4
    expected = sum(map(len, prompts())) * token * replicas
    assert workers["prefill-0"]["kv_bytes_sent"] == workers["decode-0"]["kv_bytes_received"] == expected


async def silent_peer(how: signal.Signals, model: Path, settings: dict[str, Any] | None = None) -> float:
    """Returns the seconds until the coordinator no longer reports the worker as ready."""
    with cluster(model, **(settings or one_gpu_settings()), decode=2, step_tokens=32) as running:
        async with Client(running) as client:
            await client.complete(prompts()[3], 8)
            victim = running.pids("decode-0")[0]
            asked = [asyncio.create_task(client.complete(p, 64)) for p in prompts()]
            await asyncio.sleep(0.2)
            os.kill(victim, how)
            struck = time.monotonic()
            while running.workers().get("decode-0", {}).get("state") == "ready":
                assert time.monotonic() - struck < LOST_WITHIN_S, "the worker is still ready"
                await asyncio.sleep(0.05)
            took_s = time.monotonic() - struck
            if how is signal.SIGSTOP:
                await asyncio.sleep(3.0)
                os.kill(victim, signal.SIGCONT)
            await asyncio.gather(*asked, return_exceptions=True)
            for prompt in prompts()[:8]:
                answer = await client.complete(prompt, 16)
                expected = greedy(model, prompt, 16)
                got = tuple(answer["choices"][0]["token_ids"])
                assert got[: expected.decided] == expected.tokens[: expected.decided]
            await client.idle(running)
            return took_s
