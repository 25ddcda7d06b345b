"""Models whose layers all have a window, through a running cluster: KV stays bounded on prompts of 20 windows, and a
hand-over sends only what the next token attends to."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from baton.engine.checkpoint import read_model_config
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.oracle import greedy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WINDOW, BLOCK, CHUNK, BLOCKS, COUNT = 24, 8, 32, 24, 40
PROMPT = 20 * WINDOW
"""60 blocks, in pools of 24."""


async def test_prompts_of_20_windows_need_the_blocks_of_one(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", "mistral", sliding_window=WINDOW, max_position_embeddings=1024)
    layout = read_model_config(model).kv_layout(BLOCK, "float32")
    pools = {"block_size": BLOCK, "step_tokens": CHUNK, "kv_memory_gib": BLOCKS * layout.bytes_per_block / 2**30}
    prompts = [random.Random(seed).choices(range(256), k=PROMPT) for seed in range(3)]
    with cluster(model, run_dir=tmp_path / "run", dtype="float32", exact=True, **pools) as running:
        async with Client(running) as client:
            answers = await asyncio.gather(*(client.complete(prompt, COUNT, model=None) for prompt in prompts))
            await client.idle(running)
        workers = running.workers()
    decode, prefill = workers["decode-0"], workers["prefill-0"]
    assert {decode["blocks_total"], prefill["blocks_total"]} == {BLOCKS}
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = greedy(model, prompt, COUNT)
        tokens = tuple(answer["choices"][0]["token_ids"])
        assert len(tokens) == COUNT and expected.decided > 8
        assert tokens[: expected.decided] == expected.tokens[: expected.decided]
    assert prefill["prompt_tokens_computed"] == 3 * PROMPT
    assert decode["prompt_tokens_computed"] == decode["preemptions"] == 0
    sent = 3 * (WINDOW - 1) * layout.bytes_per_token
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"] == sent
