"""The small operations of a decoder layer on CUDA, fused in Triton: each is one pass over memory instead of several.

- residual add + RMSNorm: one program per row;
- head norms (Qwen3) + rotary embedding + KV write to the cache: one program for a few heads of a token;
- SiLU x up: elementwise.

They compute in float32 and round once; the reference implementations (layers.py) round after each operation: in float32
both agree up to the order of sums. As in layers.py, residual sums are rounded before the norm, and normalised heads
before the rotation.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.fp8 import as_bytes, narrow
from baton.engine.kernels.linear import FixedLinear
from baton.engine.layers import LayerOps, Norm, Rotary, make_linear
from baton.models.model_config import ModelConfig

_HEADS = 8  # of a token per program
_ELEMENTS = 1024  # per elementwise program


class FusedNorm:
    """RMSNorm alone, or with the residual add before it in one kernel; see layers.Norm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._launch(x, x, x, out, add=False)
        return out

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._launch(x, delta, total, out, add=True)
        return total, out

    def _launch(self, x: Tensor, delta: Tensor, total: Tensor, out: Tensor, *, add: bool) -> None:
        size = x.shape[-1]
        _add_norm[x.shape[0],](
            x, delta, self.weight, total, out, self.eps, ADD=add, SIZE=size, WIDTH=triton.next_power_of_2(size),
            num_warps=8 if size > 2048 else 4,
        )  # fmt: skip


class FusedHeads:
    """See layers.Heads; `rope` is the positions, int64 [T]. `rotary` has the cos and sin of all positions."""

    def __init__(self, config: ModelConfig, norms: tuple[FusedNorm, FusedNorm] | None, rotary: Rotary) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._norms, self._tables = norms, rotary.tables

    def __call__(self, qkv: Tensor, rope: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor) -> Tensor:
        tokens, heads, head_dim = qkv.shape
        queries = torch.empty((tokens, self._num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        cos, sin = self._tables
        (keys, fp8), (values, _) = map(as_bytes, cache)
        weights = (cos, cos) if self._norms is None else (self._norms[0].weight, self._norms[1].weight)
        _rotate_and_store[tokens, triton.cdiv(heads, _HEADS)](
            qkv, rope, slots, cos, sin, *weights, queries, keys, values,
            0.0 if self._norms is None else self._norms[0].eps,
            NORMS=self._norms is not None, QUERY_HEADS=self._num_heads, KV_HEADS=self._num_kv_heads, HEAD_DIM=head_dim,
            WIDTH=triton.next_power_of_2(head_dim), HEADS=_HEADS, FP8=fp8,
        )  # fmt: skip
        return queries


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate and up [T, n] side by side."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[tokens, triton.cdiv(size, _ELEMENTS)](gate_up, out, SIZE=size, ELEMENTS=_ELEMENTS)
    return out


def fused(rotary: Rotary, *, exact: bool = False) -> LayerOps:
    """These operations, each of which computes a token without regard to the others; `exact`: with linear layers that
    do so, too."""

    def make_heads(config: ModelConfig, norms: tuple[Norm, Norm] | None) -> FusedHeads:
        return FusedHeads(config, norms, rotary)  # type: ignore[arg-type]  # norms are what make_norm made

    chosen = FixedLinear if exact else make_linear
    return LayerOps(FusedNorm, make_heads, swiglu, lambda positions: positions, chosen)


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, eps, ADD: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < SIZE
    x = tl.load(x_ptr + row * SIZE + at, mask=inside, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + row * SIZE + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * SIZE + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (wide * scale * weight).to(x.dtype), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv_ptr, position_ptr, slot_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, query_ptr, key_ptr, value_ptr, eps,
    NORMS: tl.constexpr, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    half: tl.constexpr = HEAD_DIM // 2
    other = tl.where(d < half, d + half, d - half)
    is_query, is_rotated = head < QUERY_HEADS, head < QUERY_HEADS + KV_HEADS
    there = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    from_ = qkv_ptr + (token * (QUERY_HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM
    raw = tl.load(from_ + d[None, :], mask=there, other=0.0)
    swapped_there = there & is_rotated[:, None]
    x, swapped = raw.to(tl.float32), tl.load(from_ + other[None, :], mask=swapped_there, other=0.0).to(tl.float32)
    if NORMS:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps))[:, None]
        of_query, of_key = is_query[:, None] & there, (is_rotated & (head >= QUERY_HEADS))[:, None] & there
        weight = tl.load(query_norm_ptr + d[None, :] + head[:, None] * 0, mask=of_query, other=0.0).to(tl.float32)
        weight += tl.load(key_norm_ptr + d[None, :] + head[:, None] * 0, mask=of_key, other=0.0).to(tl.float32)
        swapped_weight = tl.load(query_norm_ptr + other[None, :] + head[:, None] * 0, mask=of_query, other=0.0).to(
            tl.float32
        )
        swapped_weight += tl.load(key_norm_ptr + other[None, :] + head[:, None] * 0, mask=of_key, other=0.0).to(
            tl.float32
        )
        # Rounded between the norm and the rotation, as in layers.py.
        x = (x * scale * weight).to(raw.dtype).to(tl.float32)
        swapped = (swapped * scale * swapped_weight).to(raw.dtype).to(tl.float32)
    position = tl.load(position_ptr + token)
    inside = d < HEAD_DIM
    cos = tl.load(cos_ptr + position * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    rotated = (x * cos[None, :] + swapped * sin[None, :]).to(raw.dtype)
    query_at = (token * QUERY_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(query_ptr + query_at, rotated, mask=there & is_query[:, None])
    slot = tl.load(slot_ptr + token)
    key_at = (slot * KV_HEADS + head - QUERY_HEADS)[:, None] * HEAD_DIM + d[None, :]
    if FP8:
        rotated, raw = narrow(rotated.to(tl.float32)), narrow(raw.to(tl.float32))
    tl.store(key_ptr + key_at, rotated, mask=there & (is_rotated & (head >= QUERY_HEADS))[:, None])
    value_at = (slot * KV_HEADS + head - QUERY_HEADS - KV_HEADS)[:, None] * HEAD_DIM + d[None, :]
    tl.store(value_ptr + value_at, raw, mask=there & (head >= QUERY_HEADS + KV_HEADS)[:, None])


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + at, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * SIZE + at, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=inside)
