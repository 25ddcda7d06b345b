"""Hand-overs over NCCL with several ranks on one GPU: tokens, a peer killed, a peer stopped, the edge rebuilt."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_any_to_any import eight_heads, prompts, same_tokens_as_one_rank
from tests.gpu.where import ON_GPU, one_gpu_settings
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.oracle import greedy

pytestmark = [ON_GPU, pytest.mark.cluster, pytest.mark.timeout(400)]
FREED_S = 5.0


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_tokens_equal_those_of_one_rank(prefill_tp: int, decode_tp: int, tmp_path: Path) -> None:
    model = eight_heads(tmp_path / "m", 4)
    flags = {**one_gpu_settings(), "prefill_tp": prefill_tp, "decode_tp": decode_tp}
    asyncio.run(same_tokens_as_one_rank(model, **flags))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_cluster_recovers_from_a_killed_or_stopped_decode_worker(how: signal.Signals, tmp_path: Path) -> None:
    asyncio.run(silent_peer(how, eight_heads(tmp_path / "m", 4)))


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
                assert time.monotonic() - struck < FREED_S, "nobody noticed"
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
