"""Attention over the paged KV cache, the fast path: rows of mixed lengths in few kernel calls.

Short rows (decode, verification) of one length are computed together, their contexts padded to the longest; long rows
(prefill chunks) one by one. The blocks of a context are gathered into one tensor, then torch's fused attention runs.
Positions that hold no KV of the sequence are set to zero in that copy, so that the content of an unused slot (even NaN)
cannot leak into a result.

Shapes: T tokens, R rows of n tokens, L context positions, H query heads, K KV heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.batch import Span

_SHORT_ROW = 8
_PADDING_BLOCKS = 8  # contexts share a group if the longest is at most twice the shortest, or this many blocks longer


class Attention(Protocol):
    """Attention of queries to the cache. `prepare` is called once per step and window, `attend` once per layer."""

    def prepare(self, spans: Sequence[Span], window: int) -> Any: ...

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: Any) -> Tensor:
        """queries [T, H, D] (T may include padding), keys and values [blocks + 1, block_size, K, D] -> [T, H * D]."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """R rows of n tokens each, computed in one call.

    `queries` are their packed indexes [R * n]; `blocks` [R * L / block_size] their tables, padded with the zero block;
    `unwritten` indexes of the gathered [R * L] positions to clear, or None; `mask` is added to the scores.
    """

    queries: Tensor
    rows: int
    length: int
    context: int
    blocks: Tensor
    unwritten: Tensor | None
    mask: Tensor | None


class FastAttention:
    """`zero_block` is the id of the block of zeros that pads block tables."""

    def __init__(
        self, config: ModelConfig, block_size: int, zero_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._head_dim = config.head_dim
        self._block_size, self._zero_block = block_size, zero_block
        self._groups_per_kv_head = config.num_heads // config.num_kv_heads
        self._dtype, self._device = dtype, device

    def prepare(self, spans: Sequence[Span], window: int) -> list[Group]:
        return [self._group(members, window) for members in self._divide(spans, window)]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: list[Group]) -> Tensor:
        output = torch.zeros_like(queries)
        for group in prepared:
            q = queries.index_select(0, group.queries)
            k, v = self._gather(keys, group), self._gather(values, group)
            output.index_copy_(0, group.queries, self._attend_group(q, k, v, group))
        return output.flatten(1)

    def _divide(self, spans: Sequence[Span], window: int) -> list[list[Span]]:
        groups: list[list[Span]] = []
        for span in sorted(spans, key=lambda s: (s.length, self._context_blocks(s, window), s.first)):
            if groups and span.length <= _SHORT_ROW and span.length == groups[-1][0].length:
                shortest = self._context_blocks(groups[-1][0], window)
                if self._context_blocks(span, window) <= max(2 * shortest, shortest + _PADDING_BLOCKS):
                    groups[-1].append(span)
                    continue
            groups.append([span])
        return groups

    def _first_block(self, span: Span, window: int) -> int:
        """The first block that the row's first query can see."""
        return max(0, span.start - window + 1) // self._block_size if window else 0

    def _context_blocks(self, span: Span, window: int) -> int:
        return -(-span.end // self._block_size) - self._first_block(span, window)

    def _group(self, spans: list[Span], window: int) -> Group:
        size, length, device = self._block_size, spans[0].length, self._device
        width = max(self._context_blocks(span, window) for span in spans)
        blocks: list[int] = []
        firsts: list[int] = []
        for span in spans:
            first = self._first_block(span, window)
            own = span.block_ids[first : -(-span.end // size)]
            blocks += [*own, *[self._zero_block] * (width - len(own))]
            firsts.append(first * size)
        one = len(spans) == 1
        context = spans[0].end - firsts[0] if one else width * size
        positions = torch.tensor(firsts)[:, None] + torch.arange(context)
        starts = torch.tensor([span.start for span in spans])[:, None] + torch.arange(length)
        return Group(
            queries=torch.cat([torch.arange(span.first, span.first + length) for span in spans]).to(device),
            rows=len(spans),
            length=length,
            context=context,
            blocks=torch.tensor(blocks).to(device),
            unwritten=None if one else self._unwritten(spans, positions),
            mask=self._mask(starts, positions, window),
        )

    def _unwritten(self, spans: list[Span], positions: Tensor) -> Tensor:
        ends = torch.tensor([span.end for span in spans])[:, None]
        partial = torch.tensor([-(-span.end // self._block_size) * self._block_size for span in spans])[:, None]
        return ((positions >= ends) & (positions < partial)).flatten().nonzero().flatten().to(self._device)

    def _mask(self, queries: Tensor, positions: Tensor, window: int) -> Tensor | None:
        """The mask to add to the scores of queries at positions [R, n] against keys at positions [R, L]: -inf where a
        query must not attend. None if every query attends to every key."""
        seen = positions[:, None, :] <= queries[:, :, None]
        if window:
            seen &= positions[:, None, :] > queries[:, :, None] - window
        if bool(seen.all()):
            return None
        mask = torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, -torch.inf)
        if queries.shape[1] <= _SHORT_ROW:
            mask = mask.repeat(1, self._groups_per_kv_head, 1)
        return mask.unsqueeze(1).to(self._device)

    def _gather(self, cache: Tensor, group: Group) -> Tensor:
        """The contexts of a group in one tensor: [R, K, L, D]."""
        kv_heads = cache.shape[2]
        gathered = cache.index_select(0, group.blocks).view(-1, kv_heads, self._head_dim)
        if group.unwritten is None:
            gathered = gathered[: group.context]
        else:
            gathered.index_fill_(0, group.unwritten, 0.0)
        return gathered.view(group.rows, group.context, kv_heads, self._head_dim).transpose(1, 2)

    def _attend_group(self, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
        heads = q.shape[1]
        if group.length > _SHORT_ROW:
            q = q.unsqueeze(0).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, enable_gqa=True)
            return out[0].transpose(0, 1)
        # The query heads that share a KV head become rows of one small matrix: each key is read once, not G times.
        per_kv = (group.rows, group.length, k.shape[1], heads // k.shape[1], self._head_dim)
        q = q.view(per_kv).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        out = out.view(group.rows, per_kv[2], per_kv[3], group.length, self._head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, self._head_dim)
