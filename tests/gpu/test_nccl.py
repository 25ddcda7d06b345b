"""Hand-overs over NCCL with several ranks on one GPU: tokens, a peer killed, a peer stopped, the edge rebuilt."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.test_any_to_any import checkpoint, prompts, same_tokens_as_one_rank
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.oracle import greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cluster,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FREED_S = 5.0
SETTINGS: dict[str, Any] = {
    "program": (sys.executable, "-m", "tests.support.one_gpu_up"),
    "served_model_name": "m",
    "dtype": "float32",
    "device": "cuda",
    "edge_kind": "nccl",
    "kv_memory_gib": 0.1,
}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
async def test_tokens_are_those_of_one_rank(prefill_tp: int, decode_tp: int, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", 4)
    await same_tokens_as_one_rank(model, **{**SETTINGS, "prefill_tp": prefill_tp, "decode_tp": decode_tp})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_silent_peer_costs_one_edge_and_it_is_built_again(how: signal.Signals, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "m", 4)
    with cluster(model, **SETTINGS, decode=2, step_tokens=32) as running:
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
