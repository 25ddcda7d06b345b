"""The engine against transformers, in float32: logits within 1e-4, the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engine_driver import Job, all_logits, random_tokens, run, tiny_runner

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama2": {"arch": "llama2", "num_kv_heads": 4, "old_config": True, "tied": True},
    "llama-bias": {"arch": "llama", "bias": True, "old_config": True, "shards": 3},
    "mistral": {"arch": "mistral"},
    "mistral-full": {"arch": "mistral", "sliding_window": 0, "num_kv_heads": 1},
    "qwen2": {"arch": "qwen2", "tied": True},
    "qwen2-window": {"arch": "qwen2", "sliding_window": 20},
    "qwen3": {"arch": "qwen3", "head_dim": 32},
    "qwen3-window": {"arch": "qwen3", "sliding_window": 20, "max_window_layers": 2, "bias": True},
}
IN_TORCH = ("llama", "llama2", "mistral-full", "qwen2-window", "qwen3")
"""What `make test` computes with torch's kernels outside exact mode, and the others in it."""
CHUNKS = {"whole": [400], "one": [1], "mixed": [7, 1, 40, 3, 16, 9]}


@cache
def oracle(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@torch.no_grad()
def oracle_logits(model_dir: Path, tokens: list[int]) -> Tensor:
    logits: Tensor = oracle(model_dir)(torch.tensor([tokens])).logits[0]
    return logits


def cases() -> list[object]:
    ways = {"compiled": (False, "auto"), "torch": (False, "torch"), "exact": (True, "torch")}
    often = lambda variant, way: way == "compiled" or (way == "torch") == (variant in IN_TORCH)  # noqa: E731
    return [
        pytest.param(v, *ways[w], marks=() if often(v, w) else pytest.mark.long, id=f"{v}-{w}")
        for v in VARIANTS
        for w in ways
    ]


@pytest.mark.parametrize(("variant", "exact", "kernels"), cases())
def test_logits_equal_transformers_in_any_chunking(
    checkpoint: Callable[..., Path], variant: str, exact: bool, kernels: str
) -> None:
    model_dir = checkpoint(**VARIANTS[variant])
    runner = tiny_runner(model_dir, exact=exact, kernels=kernels)
    tokens = random_tokens(90)
    expected = oracle_logits(model_dir, tokens)
    for name, chunks in CHUNKS.items():
        found = all_logits(runner, tokens, chunks)
        assert torch.allclose(found, expected, rtol=0, atol=1e-4), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_64_greedy_tokens_equal_transformers_in_a_mixed_batch(checkpoint: Callable[..., Path], variant: str) -> None:
    model_dir = checkpoint(**VARIANTS[variant])
    runner = tiny_runner(model_dir)
    lengths = [1, 3, 16, 17, 40, 64, 90]
    jobs = [Job(random_tokens(n, seed=n), max_tokens=64, chunk=5 + 6 * i) for i, n in enumerate(lengths)]
    run(runner, jobs)
    stops = 0
    for job in jobs:
        # The oracle's own choice after every prefix of our tokens: one pass instead of 64.
        logits = oracle_logits(model_dir, job.tokens[:-1])[len(job.prompt) - 1 :]
        best = logits.topk(2).values
        near_tie = (best[:, 0] - best[:, 1] < 1e-4).nonzero().flatten().tolist()
        until = near_tie[0] if near_tie else 64
        stops += bool(near_tie)
        assert job.output[:until] == logits.argmax(-1).tolist()[:until]
    assert stops <= 1
