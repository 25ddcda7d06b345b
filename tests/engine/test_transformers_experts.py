"""Mixtures of experts of a model of transformers by the compiled kernels: all experts of a layer in one call, and for
which gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.core.errors import StartupError
from baton.engine import transformers_experts
from baton.engine.kernels.native import Arena, choose_kernels, load
from baton.engine.transformers_experts import PackedExperts, pack_experts
from baton.engine.transformers_fused import GatedMlp
from baton.engine.transformers_packed import PackedWeight
from tests.support.engine_driver import bfloat16_levels, float32_levels, tiny_runner
from tests.support.transformers_models import make_transformers_checkpoint

KERNELS, _ = choose_kernels("auto", torch.device("cpu"))
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels on this machine")

KINDS = [(level, torch.float32) for level in float32_levels()] + [
    (level, torch.bfloat16) for level in bfloat16_levels()
]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-5}


def by_halves(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Experts(nn.Module):
    """What transformers' classes of experts have."""

    has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = True, False, False, False, False

    def __init__(
        self,
        count: int,
        size: int,
        inner: int,
        dtype: torch.dtype = torch.float32,
        gate: Callable[[Tensor], Tensor] = by_halves,
    ) -> None:
        super().__init__()
        self.num_experts, self._apply_gate = count, gate
        self.gate_up_proj = nn.Parameter((torch.randn(count, 2 * inner, size) / size**0.5).to(dtype))
        self.down_proj = nn.Parameter((torch.randn(count, size, inner) / inner**0.5).to(dtype))


def chosen(tokens: int, count: int, each: int) -> tuple[Tensor, Tensor]:
    """Different experts of each token, and their weights."""
    return torch.stack([torch.randperm(count)[:each] for _ in range(tokens)]), torch.rand(tokens, each)


@torch.no_grad()
@pytest.mark.parametrize(("level", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "size", "inner", "count", "each"),
    [(1, 64, 96, 4, 2), (5, 40, 33, 3, 3), (7, 17, 1, 2, 1), (2, 1, 5, 9, 4), (600, 24, 17, 2, 1)],
)
def test_experts_at_once_have_the_bits_of_gated_mlps_one_by_one(
    level: str, dtype: torch.dtype, tokens: int, size: int, inner: int, count: int, each: int
) -> None:
    kernels, arena = load(level), Arena()
    module = Experts(count, size, inner, dtype)
    packed = PackedExperts(module, kernels, arena, 1)
    assert packed.has_silu_gate
    x, (index, weights) = torch.randn(tokens, size).to(dtype), chosen(tokens, count, each)
    result = packed(module, x, index, weights)
    assert packed.calls == len(index.unique())
    expected = torch.zeros(tokens, size)
    for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj.data, module.down_proj.data, strict=True)):
        layers = [PackedWeight(kernels, arena, each, None, 1) for each in (*gate_up.split(inner), down)]
        rows = (index == expert).any(1)
        if rows.any():
            of_expert = GatedMlp(kernels, layers, lambda x: x, 1)(x[rows])
            expected[rows] += of_expert.float() * weights[index == expert][:, None]
    assert torch.equal(result, expected.to(dtype))
    assert torch.equal(packed(module, x[-1:], index[-1:], weights[-1:]), result[-1:])
    assert torch.equal(PackedExperts(module, kernels, arena, 3)(module, x, index, weights), result)


@torch.no_grad()
@pytest.mark.parametrize(("level", "dtype"), KINDS, ids=str)
def test_experts_match_float64(level: str, dtype: torch.dtype) -> None:
    module, (index, weights) = Experts(5, 48, 40, dtype), chosen(30, 5, 3)
    x = torch.randn(30, 48).to(dtype)
    gate_up, down = (each.data.double()[index] for each in (module.gate_up_proj, module.down_proj))
    inside = by_halves(torch.einsum("tkni,ti->tkn", gate_up, x.double()))
    expected = torch.einsum("tkin,tkn,tk->ti", down, inside, weights.double())
    result = PackedExperts(module, load(level), Arena(), 1)(module, x, index, weights)
    assert (result.double() - expected).abs().max() <= NEAR[dtype] * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_experts_of_another_rank_add_nothing(dtype: torch.dtype) -> None:
    assert KERNELS is not None
    module, (index, weights) = Experts(4, 32, 48, dtype), chosen(9, 8, 3)
    x, here = torch.randn(9, 32).to(dtype), index < 4
    packed = PackedExperts(module, KERNELS, Arena(), 1)
    masked = packed(module, x, index.masked_fill(~here, 4), weights.masked_fill(~here, 0.0))
    assert packed.calls == len(index[here].unique())
    for token in range(9):
        own = here[token]
        if own.any():
            alone = packed(module, x[token, None], index[token, own][None], weights[token, own][None])
            assert torch.equal(masked[token, None], alone)
        else:
            assert not masked[token].any()
    assert not packed(module, x, torch.full_like(index, 4), weights).any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("gate", "at_once"),
    [
        (by_halves, True),
        (lambda x: by_halves(x.roll(x.shape[1] // 2, 1)), False),
        (lambda x: F.silu(x[:, ::2]) * x[:, 1::2], False),
        (lambda x: F.gelu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :], False),
        (lambda x: by_halves(x.clamp(max=7.0)), False),
        (lambda x: by_halves(x) + 1e-3, False),
    ],
    ids=["silu", "up first", "by turns", "gelu", "limit", "+ 0.001"],
)
def test_a_gate_is_what_computes_one(gate: Callable[[Tensor], Tensor], at_once: bool) -> None:
    assert KERNELS is not None
    module, (index, weights) = Experts(3, 32, 48, gate=gate), chosen(6, 3, 2)
    x = torch.randn(6, 32)
    given = [each.data.clone() for each in (module.gate_up_proj, module.down_proj)]
    packed = pack_experts(module, KERNELS, Arena(), 1)
    assert packed is not None
    assert packed.has_silu_gate == at_once
    inside = gate(torch.einsum("tkni,ti->tkn", given[0][index], x).flatten(0, 1)).view(6, 2, -1)
    expected = torch.einsum("tkin,tkn,tk->ti", given[1][index], inside, weights)
    assert (packed(module, x, index, weights) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_experts_with_a_norm_are_not_computed_at_once() -> None:
    assert KERNELS is not None
    module = Experts(3, 32, 48)
    module.has_post_expert_norm = True
    assert not PackedExperts(module, KERNELS, Arena(), 1).has_silu_gate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_finds_experts_that_are_wrong(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_transformers_checkpoint(tmp_path / "m", "mixtral", getattr(torch, dtype))
    compute = PackedExperts.__call__
    monkeypatch.setattr(transformers_experts, "_TOLERANCE", dict.fromkeys(NEAR, float("inf")))
    monkeypatch.setattr(PackedExperts, "__call__", lambda packed, *call: compute(packed, *call) * 1.3)
    with pytest.raises(StartupError, match="self-check failed: a sequence computed"):
        tiny_runner(path, dtype=dtype)
