"""The fused kernels of a CUDA layer against their plain twins, through Triton's interpreter."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan
from baton.engine import layers
from baton.engine.attention import FastAttention
from baton.engine.batch import RowLimits, make_batch
from baton.engine.checkpoint import Checkpoint, read_model_config
from baton.engine.kv_pool import KVPool
from baton.engine.layers import PlainHeads, RMSNorm, Rotary
from baton.engine.model import Model
from baton.engine.parallel import TPGroup, _sum_by_rank
from baton.engine.weights import WeightReader
from tests.support.attention import shape
from tests.support.checkpoints import Arch, make_checkpoint
from tests.support.engine_driver import GREEDY, random_tokens

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernels are compiled: see tests/gpu"
)
CPU = torch.device("cpu")
TOKENS = 5
HEADS = [(4, 2, 16), (9, 3, 64), (8, 1, 80), (32, 8, 128)]


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size", [64, 96, 4096])
def test_fused_add_and_norm_match_the_plain_norm(size: int) -> None:
    from baton.engine.kernels.fused import FusedNorm

    x, delta, weight = randn(TOKENS, size), randn(TOKENS, size, seed=1), randn(size, seed=2)
    fused, plain = FusedNorm(weight, 1e-5), RMSNorm(weight, 1e-5)
    assert torch.allclose(fused(x), plain(x), rtol=1e-6, atol=1e-6)
    (total, normed), (plain_total, plain_normed) = fused.add(x, delta), plain.add(x, delta)
    assert torch.equal(total, plain_total) and torch.allclose(normed, plain_normed, rtol=1e-6, atol=1e-6)
    assert fused(x[None].expand(1, TOKENS, size)[0][:0]).shape == (0, size), "no rows"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "stored"),
    [(*heads, torch.float32) for heads in HEADS]
    + [pytest.param(*h, torch.float8_e4m3fn, marks=pytest.mark.long if h in HEADS[2:] else ()) for h in HEADS],
    ids=str,
)
@pytest.mark.parametrize("norms", [False, True])
def test_heads_are_normed_rotated_and_stored(
    heads: int, kv_heads: int, head_dim: int, norms: bool, stored: torch.dtype
) -> None:
    from baton.engine.kernels.fused import FusedHeads, FusedNorm

    config = shape(heads, kv_heads, head_dim)
    rotary = Rotary(config, 200, torch.float32, CPU)
    weights = [randn(head_dim, seed=7), randn(head_dim, seed=8)]
    fused = FusedHeads(config, tuple(FusedNorm(w, 1e-6) for w in weights) if norms else None, rotary)  # type: ignore[arg-type]
    plain = PlainHeads(config, tuple(RMSNorm(w, 1e-6) for w in weights) if norms else None)  # type: ignore[arg-type]
    qkv, positions = randn(TOKENS, heads + 2 * kv_heads, head_dim), torch.tensor([0, 3, 199, 17, 17])
    slots = torch.tensor([5, 40, 0, 17, 63])
    caches = [tuple(torch.full((4, 16, kv_heads, head_dim), 9.0).to(stored) for _ in range(2)) for _ in range(2)]
    found = fused(qkv, positions, caches[0], slots)  # type: ignore[arg-type]
    expected = plain(qkv, rotary.at(positions), caches[1], slots)  # type: ignore[arg-type]
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(*caches, strict=True):
        mine, other = mine.float(), other.float()
        steps = 0.13 if stored == torch.float8_e4m3fn else 1e-5  # sums in another order may be rounded the other way
        assert torch.allclose(mine, other, rtol=steps, atol=1e-5)
        assert (mine != other).float().mean() < 0.01 or stored == torch.float32
        assert (mine == 9.0).all(dim=(-1, -2)).sum() == 64 - TOKENS, "nothing else is written"


@pytest.mark.parametrize("size", [24, 1024, 1500])
def test_fused_swiglu_matches_plain_swiglu(size: int) -> None:
    from baton.engine.kernels.fused import swiglu

    gate_up = randn(TOKENS, 2 * size)
    assert torch.allclose(swiglu(gate_up), layers.swiglu(gate_up), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_sum_over_ranks_has_the_bits_of_the_plain_sum(ranks: int, dtype: torch.dtype) -> None:
    from baton.engine.kernels.rank_sum import sum_by_rank

    partials = randn(ranks, 3, 700, dtype=dtype)
    assert torch.equal(sum_by_rank(partials), _sum_by_rank(partials))


@pytest.mark.parametrize("arch", [pytest.param("llama", marks=pytest.mark.long), "qwen2", "qwen3", "mistral"])
def test_model_of_fused_layers_matches_the_plain_model(arch: Arch, tmp_path: Path) -> None:
    from baton.engine.attention_triton import TritonAttention
    from baton.engine.kernels.fused import fused

    config, group = read_model_config(make_checkpoint(tmp_path, arch, num_layers=2)), TPGroup()
    weights = WeightReader(Checkpoint(tmp_path), config, group, torch.float32, CPU)
    rotary = Rotary(config, 64, torch.float32, CPU)
    plain, quick = (Model(config, weights, group, made(rotary)) for made in (partial(layers.plain, exact=False), fused))
    pools = [KVPool(config.kv_layout(16, "float32"), 4, CPU) for _ in range(2)]
    rows = (Row(SequenceId("a"), 0, tuple(random_tokens(20)), (0, 3), GREEDY, 1),)
    rows += (Row(SequenceId("b"), 0, tuple(random_tokens(7, seed=1)), (2,), GREEDY, 7),)
    batch = make_batch(StepPlan(1, rows), RowLimits(16, 4, config.vocab_size, 64), CPU)
    with torch.no_grad():
        expected = plain.forward(batch, pools[0], FastAttention(16, 4, torch.float32, CPU))
        found = quick.forward(batch, pools[1], TritonAttention(config, 16, torch.float32, CPU))
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)
