"""torch's FlashAttention (Dao 2023) for long rows: a prompt's chunk against all of its context.

Its kernels read block tables in pages of 256 tokens only, and in torch 2.11 none at all; so the context of a row is
gathered into one piece first. That moves a context once, where attention reads it for every 128 queries: 64 MB beside
0.5 TFLOP for 8,192 tokens of an 8 B shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.batch import Span
from baton.engine.device_stream import to_device

_LEAST_CAPABILITY = (8, 0)
_MOST_HEAD_DIM = 256
_forward = torch.ops.aten._flash_attention_forward
"""Under torch's public `varlen_attn`, whose arguments changed from 2.11 to 2.13; this one's did not."""


@dataclass(frozen=True, slots=True)
class FlashRow:
    """One long row: packed tokens [first, first + length) at the end of a context of `end` tokens. `blocks` int64 are
    the context's; `query_ends` and `key_ends` int32 [2] are cumulative lengths, 0 first."""

    first: int
    length: int
    end: int
    blocks: Tensor
    query_ends: Tensor
    key_ends: Tensor

    @classmethod
    def of(cls, span: Span, block_size: int, device: torch.device) -> FlashRow:
        used = span.block_ids[: -(-span.end // block_size)]
        blocks = to_device(torch.tensor(used, dtype=torch.int64), device)
        ends = to_device(torch.tensor([0, span.length, 0, span.end], dtype=torch.int32), device)
        return cls(span.first, span.length, span.end, blocks, ends[:2], ends[2:])


def flash_supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch has FlashAttention for such heads on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim % 8 or head_dim > _MOST_HEAD_DIM or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    return bool(torch.backends.cuda.is_flash_attention_available())


def flash_attention(queries: Tensor, keys: Tensor, values: Tensor, row: FlashRow, window: int, out: Tensor) -> None:
    """One row of queries [T, H, D] against its context in keys and values [blocks, block_size, K, D], causal, into its
    part of out [T, H, D]."""
    mine = slice(row.first, row.first + row.length)
    k, v = (cache.index_select(0, row.blocks).flatten(0, 1)[: row.end] for cache in (keys, values))
    out[mine] = _forward(
        queries[mine],
        k,
        v,
        row.query_ends,
        row.key_ends,
        row.length,
        row.end,
        0.0,
        True,
        False,
        scale=queries.shape[-1] ** -0.5,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[0]
