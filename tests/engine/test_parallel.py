"""Tensor parallelism in real processes: the numbers of one rank, whatever the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driver import Job, all_logits, random_tokens, run, tiny_runner
from tests.support.rank_pool import RankPool

WIDE = {"num_heads": 8, "head_dim": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama2": {"arch": "llama2", "num_kv_heads": 4, "old_config": True, "tied": True, "vocab_size": 333},
    "llama-bias": {"arch": "llama", "bias": True, "shards": 3},
    "mistral": {"arch": "mistral", **WIDE, "num_kv_heads": 8},
    "qwen2": {"arch": "qwen2", "tied": True},
    "qwen3": {"arch": "qwen3", "head_dim": 32, "num_kv_heads": 4},
    "one-kv-head": {"arch": "qwen2", "num_kv_heads": 1},
}
AT_TWO = [(name, 2) for name in VARIANTS]
AT_FOUR = [("llama", 4), ("llama-bias", 4), ("mistral", 4), ("llama2", 4)]
TIE = 1e-4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize(("variant", "tp"), AT_TWO + AT_FOUR)
def test_logits_and_greedy_tokens_equal_those_of_one_rank(
    checkpoint: Callable[..., Path], pool: RankPool, variant: str, tp: int
) -> None:
    model_dir = checkpoint(**VARIANTS[variant])
    alone = tiny_runner(model_dir)
    tokens = random_tokens(120)
    expected = all_logits(alone, tokens, [120])
    jobs = [Job(random_tokens(n, seed=n), max_tokens=32, chunk=5 + 6 * i) for i, n in enumerate([1, 17, 40, 90])]
    with pool.load(model_dir, tp) as runner:
        for chunks in ([120], [7, 1, 40, 3, 16, 9]):
            assert torch.allclose(all_logits(runner, tokens, chunks), expected, rtol=0, atol=1e-4)
        run(runner, jobs)
    stops = 0
    for job in jobs:
        logits = all_logits(alone, job.tokens[:-1], [64])[len(job.prompt) - 1 :]
        best = logits.topk(2).values
        near_tie = (best[:, 0] - best[:, 1] < TIE).nonzero().flatten().tolist()
        until = near_tie[0] if near_tie else 32
        stops += bool(near_tie)
        assert job.output[:until] == logits.argmax(-1).tolist()[:until]
    assert stops <= 1
