"""Models with layers that have a window, through a running cluster: their KV stays bounded on prompts of 20 windows,
and a hand-over sends of it only what the next token attends to."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from baton.core.kv_layout import KVLayout, LayerKV
from baton.core.window import STEPS_AHEAD, Window
from baton.engine.checkpoint import read_model_config
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster
from tests.support.oracle import greedy
from tests.support.transformers_models import generated, make_transformers_checkpoint

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
        tokens = tuple(answer["choices"][0]["token_ids"])
        expected = greedy(model, prompt, COUNT, likely=tokens)
        assert len(tokens) == COUNT and expected.decided > 8
        assert tokens[: expected.decided] == expected.tokens[: expected.decided]
    assert prefill["prompt_tokens_computed"] == 3 * PROMPT
    assert decode["prompt_tokens_computed"] == decode["preemptions"] == 0
    sent = 3 * (WINDOW - 1) * layout.bytes_per_token
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"] == sent


_RANKS = [
    (1, 1),
    pytest.param(2, 1, marks=pytest.mark.long),
    pytest.param(1, 2, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), _RANKS)
@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        pytest.param("gemma3_text", (WINDOW,) * 5 + (0,), marks=pytest.mark.long),
        ("gpt_oss", (WINDOW, 0) * 2),
    ],
)
async def test_only_layers_without_a_window_keep_and_send_all(
    tmp_path: Path, kind: str, windows: tuple[int, ...], prefill_ranks: int, decode_ranks: int
) -> None:
    sizes = {"sliding_window": WINDOW, "max_position_embeddings": 1024, "num_hidden_layers": len(windows)}
    model = make_transformers_checkpoint(tmp_path / "m", kind, **sizes)
    layout = KVLayout(BLOCK, tuple(LayerKV(2, 16, "float32", window=window) for window in windows))
    longest = PROMPT + 3 + 2 * COUNT
    num_blocks = Window.of(layout).max_blocks(longest, STEPS_AHEAD * CHUNK)
    assert num_blocks < 0.75 * layout.blocks_for(PROMPT)
    pools = {"block_size": BLOCK, "step_tokens": CHUNK, "kv_memory_gib": num_blocks * layout.bytes_per_block / 2**30}
    # Without 0, the padding, which transformers' generate hides.
    prompts = [random.Random(seed).choices(range(3, 256), k=PROMPT) for seed in range(3)]
    ranks = {"prefill_tp": prefill_ranks, "decode_tp": decode_ranks}
    with cluster(model, run_dir=tmp_path / "run", dtype="float32", **pools, **ranks) as running:
        async with Client(running) as client:

            async def complete(prompt: list[int]) -> list[int]:
                answer = await client.complete(prompt, COUNT, model=None)
                return list(answer["choices"][0]["token_ids"])

            first = await complete(prompts[0])
            turn = [*prompts[0], *first, 5, 6, 7]
            second = await complete(turn)
            before = running.workers()
            others = await asyncio.gather(*map(complete, prompts[1:]))
            await client.idle(running)
        workers = running.workers()
    assert [first, second, *others] == generated(model, [prompts[0], turn, *prompts[1:]], COUNT)
    decode, prefill = workers["decode-0"], workers["prefill-0"]
    assert {decode["blocks_total"], prefill["blocks_total"]} == {num_blocks}
    assert decode["prompt_tokens_computed"] == decode["preemptions"] == 0
    # The next turn: prefill has the blocks of the first prompt, decode those of its answer, too.
    assert before["prefill-0"]["prompt_tokens_computed"] == len(turn)
    cached = (PROMPT + COUNT - 1) // BLOCK * BLOCK
    full = sum(layer.bytes_per_token for layer in layout.layers if not layer.window)
    sent = 3 * (full * PROMPT + (layout.bytes_per_token - full) * (WINDOW - 1))
    sent += (len(turn) - cached) * layout.bytes_per_token
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"] == sent
