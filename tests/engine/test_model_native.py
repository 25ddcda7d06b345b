"""Whole steps on compiled kernels: every level against the torch twin, which test_parity compares with transformers,
the bits in bf16, and NaN in unwritten memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.kernels.build import processor_levels
from baton.engine.selftest import prove_row_invariance
from tests.support.engine_driver import (
    Job,
    all_logits,
    bfloat16_levels,
    float32_levels,
    random_tokens,
    run,
    tiny_runner,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama"},
    "llama-bias": {"arch": "llama", "bias": True},
    "mistral": {"arch": "mistral", "num_kv_heads": 1},
    "qwen2": {"arch": "qwen2", "tied": True, "intermediate_size": 168},
    "qwen3": {"arch": "qwen3", "head_dim": 24, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 333},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", float32_levels())
def test_float32_logits_match_those_of_torch_kernels(checkpoint: Callable[..., Path], variant: str, level: str) -> None:
    model_dir, tokens = checkpoint(**VARIANTS[variant]), random_tokens(150)
    twin = all_logits(tiny_runner(model_dir, kernels="torch"), tokens, [150])
    found = all_logits(tiny_runner(model_dir, kernels=level), tokens, [7, 1, 40, 3])
    assert torch.allclose(found, twin, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", bfloat16_levels())
def test_bfloat16_is_row_invariant_and_as_close_to_float32_as_torch_kernels(
    checkpoint: Callable[..., Path], variant: str, level: str
) -> None:
    model_dir, tokens = checkpoint(**VARIANTS[variant], dtype="bfloat16"), random_tokens(150)
    runner = tiny_runner(model_dir, dtype="bfloat16", kernels=level)
    vocab = runner.model_config.vocab_size
    prove_row_invariance(runner.step_logits, runner.kv, vocab, runner.max_model_len, 8192)
    full = all_logits(tiny_runner(model_dir), tokens, [150])
    error = (all_logits(runner, tokens, [64]) - full).abs().mean()
    twin = (all_logits(tiny_runner(model_dir, dtype="bfloat16", kernels="torch"), tokens, [64]) - full).abs().mean()
    assert error < 1.1 * twin


@pytest.mark.parametrize("level", bfloat16_levels())
def test_a_batch_in_bfloat16_has_the_bits_of_each_sequence_alone(checkpoint: Callable[..., Path], level: str) -> None:
    runner = tiny_runner(checkpoint("mistral", dtype="bfloat16"), dtype="bfloat16", kernels=level, threads=2)
    lengths = {5: 100, 33: 7, 100: 16, 130: 64, 17: 1, 64: 33}
    together = [Job(random_tokens(n, seed=n), 24, chunk=chunk) for n, chunk in lengths.items()]
    run(runner, together)
    for job in together:
        alone = Job(job.prompt, 24, chunk=40)
        run(runner, [alone], seed=3)
        assert torch.equal(torch.cat(alone.logits), torch.cat(job.logits))


@pytest.mark.skipif(not processor_levels(), reason="torch's kernels promise no equal bits to chunks of other lengths")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_nan_in_unwritten_slots_does_not_change_logits(checkpoint: Callable[..., Path], arch: str, dtype: str) -> None:
    model_dir, tokens = checkpoint(arch, dtype=dtype), random_tokens(100)
    clean, poisoned = tiny_runner(model_dir, dtype=dtype), tiny_runner(model_dir, dtype=dtype)
    for pair in poisoned.kv.layers:
        for tensor in pair:
            tensor.fill_(torch.nan)
    assert torch.equal(all_logits(poisoned, tokens, [9, 1, 30]), all_logits(clean, tokens, [100]))
