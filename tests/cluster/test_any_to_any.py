"""Any number of prefill ranks hands over to any number of decode ranks, in blocks of one or two sizes: same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.oracle import Greedy, greedy

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COUNT = 24
REQUESTS = 32
PAIRWISE = [(2, 1, 4), (1, 4, 2)]  # (prefill ranks, decode ranks, KV heads)
GRID = [(p, d, heads) for p in (1, 2, 4) for d in (1, 2, 4) for heads in (2, 4, 8)]


def prompts() -> list[list[int]]:
    return [[(11 * n + 17 * i * i + 3 * i) % 256 for i in range(n)] for n in range(3, 3 + 5 * REQUESTS, 5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns a function that creates the model with a number of KV heads, in one directory for all tests."""
    where = tmp_path_factory.mktemp("any-to-any")

    @cache
    def make(kv_heads: int) -> Path:
        return eight_heads(where / str(kv_heads), kv_heads)

    return make


def eight_heads(directory: Path, kv_heads: int) -> Path:
    return make_checkpoint(directory, "llama", num_heads=8, num_kv_heads=kv_heads, hidden_size=64, head_dim=8)


@cache
def one_rank(model: Path) -> list[Greedy]:
    return [greedy(model, prompt, COUNT) for prompt in prompts()]


async def same_tokens_as_one_rank(model: Path, **flags: Any) -> dict[str, Any]:
    """Compares with `greedy`, computed by one rank, which adds in another order: tokens may differ from a near tie on.
    Returns the state of the workers at the end."""
    settings = {"served_model_name": "m", "dtype": "float32", "device": "cpu", "step_tokens": 32, "kv_memory_gib": 0.02}
    undecided = 0
    with cluster(model, **{**settings, **flags}) as running:
        async with Client(running) as client:
            answers = await asyncio.gather(*(client.complete(p, COUNT) for p in prompts()))
            await client.idle(running)
        for expected, answer in zip(one_rank(model), answers, strict=True):
            got = tuple(answer["choices"][0]["token_ids"])
            assert got[: expected.decided] == expected.tokens[: expected.decided]
            undecided += expected.decided < COUNT
        check_bytes(running, model)
        workers: dict[str, Any] = running.workers()
    assert undecided <= 2, f"the oracle itself is undecided in {undecided} of {REQUESTS}"
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


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "kv_heads"), PAIRWISE)
async def test_tokens_equal_those_of_one_rank(
    prefill_tp: int, decode_tp: int, kv_heads: int, checkpoint: Callable[[int], Path]
) -> None:
    await same_tokens_as_one_rank(checkpoint(kv_heads), prefill_tp=prefill_tp, decode_tp=decode_tp)


@pytest.mark.long
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "kv_heads"), [g for g in GRID if g not in PAIRWISE])
async def test_tokens_equal_those_of_one_rank_for_every_rank_and_kv_head_count(
    prefill_tp: int, decode_tp: int, kv_heads: int, checkpoint: Callable[[int], Path]
) -> None:
    await same_tokens_as_one_rank(checkpoint(kv_heads), prefill_tp=prefill_tp, decode_tp=decode_tp)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"), [(1, 1), *(pytest.param(p, d, marks=pytest.mark.long) for p, d in ((2, 1), (1, 2)))]
)
async def test_kv_sent_over_ipc_edges_gives_the_tokens_of_one_rank(
    prefill_tp: int, decode_tp: int, checkpoint: Callable[[int], Path]
) -> None:
    await same_tokens_as_one_rank(checkpoint(4), edge_kind="ipc", prefill_tp=prefill_tp, decode_tp=decode_tp)


async def test_a_decode_worker_of_two_ranks_verifies_draft_tokens(checkpoint: Callable[[int], Path]) -> None:
    """The draft is the model itself, unsharded at the leader; its tokens differ from the target's only at near ties."""
    model = checkpoint(2)
    running = await same_tokens_as_one_rank(model, decode_tp=2, draft=str(model), draft_tokens=4)
    counts = running["decode-0"]["speculation"]
    assert counts["accepted_tokens"] > 0.9 * counts["drafted_tokens"] > 0
    assert counts["steps"] < REQUESTS * (COUNT - 1) / 3


@pytest.mark.parametrize(("prefill", "decode"), [(16, 32), pytest.param(32, 16, marks=pytest.mark.long)])
async def test_pools_with_different_block_sizes_give_the_tokens_of_one_rank(
    prefill: int, decode: int, checkpoint: Callable[[int], Path]
) -> None:
    sizes = {"prefill_block_size": prefill, "decode_block_size": decode}
    await same_tokens_as_one_rank(checkpoint(4), prefill_tp=2 if prefill < decode else 1, **sizes)
