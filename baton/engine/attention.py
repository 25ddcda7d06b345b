"""Attention over the paged KV cache, the fast path: rows of mixed lengths in few kernel calls.

Short rows (decode, verification) of one length are computed together, their contexts padded to the longest; long rows
(prefill chunks) one by one. The blocks of a context are gathered into one tensor, then torch's fused attention runs.
Positions that hold no KV of the sequence are set to zero in that copy, so that the content of an unused slot (even NaN)
cannot leak into a result.

Shapes: T tokens, R rows of n tokens, L context positions, H query heads, K KV heads, G = H / K, D head size, E that of
the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.batch import RowSpan
from baton.engine.kv_pool import load, store

_SHORT_ROW = 8
_PADDING_BLOCKS = 8  # contexts share a group if the longest is at most twice the shortest, or this many blocks longer
_TILE = 256  # queries of a long row whose scores are in memory at once, where torch's fused attention does not do


class Attention(Protocol):
    """Attention of queries to the cache. `prepare` is called once per step and window, `attend` once per layer."""

    def prepare(self, spans: Sequence[RowSpan], window: int) -> Any: ...

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: Any) -> Tensor:
        """queries [T, H, D] (T may include padding), keys and values [blocks + 1, block_size, K, D] -> [T, H * D]."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """What happens to the scores of a layer before their softmax: they are multiplied by `scale` (None: D ** -0.5),
    bounded to `softcap` * tanh(scores / `softcap`) (Gemma 2), and beside them stands one score of each head for no
    position at all, `sinks` [H] (gpt-oss)."""

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN_SCORES = Scores()


@dataclass(frozen=True, slots=True)
class Reach:
    """The positions that a query attends to: its latest `window` (0: all), or those of its own `chunk` (0: all)."""

    window: int = 0
    chunk: int = 0

    def first_position(self, query: int) -> int:
        """The first one that the query at this position attends to."""
        if self.chunk:
            return query // self.chunk * self.chunk
        return max(0, query - self.window + 1) if self.window else 0

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether the queries at these positions attend to keys at those; both are broadcast."""
        seen = keys <= queries
        if self.window:
            seen &= keys > queries - self.window
        if self.chunk:
            seen &= keys // self.chunk == queries // self.chunk
        return seen


@dataclass(frozen=True, slots=True)
class Group:
    """R rows of n tokens each, computed in one call.

    `queries` are their packed indexes [R * n]; `blocks` [R * L / block_size] their tables, padded with the zero block;
    `unwritten` indexes of the gathered [R * L] positions to clear, or None; `mask` [R, n, L] is added to the scores.
    """

    queries: Tensor
    rows: int
    length: int
    context: int
    blocks: Tensor
    unwritten: Tensor | None
    mask: Tensor | None


class FastAttention:
    """For layers of any number of heads that compute in `dtype`. `zero_block` is the id of the block of zeros that pads
    block tables."""

    def __init__(self, block_size: int, zero_block: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size, self._zero_block = block_size, zero_block
        self._dtype, self._device = dtype, device

    def prepare(self, spans: Sequence[RowSpan], window: int, chunk: int = 0) -> list[Group]:
        """With `chunk` a query attends only to positions p of its own chunk, those of equal p // chunk (Llama 4)."""
        reach = Reach(window, chunk)
        return [self._group(members, reach) for members in self._divide(spans, reach)]

    def store(self, pool: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys [1, K, T, D] and values [1, K, T, E], of which tokens beyond the slots [n] are padding, into a
        layer's `pool`. See kv_pool.store."""
        for cache, new in zip(pool, (keys, values), strict=True):
            stored = new[0].transpose(0, 1)[: len(slots)]
            store(cache, slots, stored.reshape(-1, *cache.shape[2:]))

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, prepared: list[Group], scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        """queries [T, H, D], keys [blocks + 1, block_size, K, D], values likewise [..., K, E], perhaps in FP8
        -> [T, H * E]."""
        output = queries.new_zeros((*queries.shape[:2], values.shape[3]))
        for group in prepared:
            q = queries.index_select(0, group.queries)
            k, v = self._gather(keys, group, q.dtype), self._gather(values, group, q.dtype)
            output.index_copy_(0, group.queries, self._attend_group(q, k, v, group, scores))
        return output.flatten(1)

    def attend_latents(
        self, queries: Tensor, latents: Tensor, turned: Tensor, prepared: list[Group], scores: Scores
    ) -> Tensor:
        """Multi-head latent attention, absorbed: queries [T, H, E + D], in the space of the `latents` [blocks + 1,
        block_size, 1, E] and of the rotated keys `turned` [blocks + 1, block_size, 1, D] -> latents [T, H, E]."""
        output = queries.new_zeros((*queries.shape[:2], latents.shape[3]))
        for group in prepared:
            q = queries.index_select(0, group.queries)
            v = self._gather(latents, group, q.dtype)
            k = torch.cat((v, self._gather(turned, group, q.dtype)), dim=-1)
            output.index_copy_(0, group.queries, self._attend_group(q, k, v, group, scores))
        return output

    def _divide(self, spans: Sequence[RowSpan], reach: Reach) -> list[list[RowSpan]]:
        groups: list[list[RowSpan]] = []
        for span in sorted(spans, key=lambda s: (s.length, self._context_blocks(s, reach), s.first)):
            if groups and span.length <= _SHORT_ROW and span.length == groups[-1][0].length:
                shortest = self._context_blocks(groups[-1][0], reach)
                if self._context_blocks(span, reach) <= max(2 * shortest, shortest + _PADDING_BLOCKS):
                    groups[-1].append(span)
                    continue
            groups.append([span])
        return groups

    def _first_block(self, span: RowSpan, reach: Reach) -> int:
        """The first block that the row's first query can see."""
        return reach.first_position(span.start) // self._block_size

    def _context_blocks(self, span: RowSpan, reach: Reach) -> int:
        return -(-span.end // self._block_size) - self._first_block(span, reach)

    def _group(self, spans: list[RowSpan], reach: Reach) -> Group:
        size, length, device = self._block_size, spans[0].length, self._device
        width = max(self._context_blocks(span, reach) for span in spans)
        blocks: list[int] = []
        firsts: list[int] = []
        for span in spans:
            first = self._first_block(span, reach)
            own = span.blocks(first, -(-span.end // size))
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
            mask=self._mask(starts, positions, reach),
        )

    def _unwritten(self, spans: list[RowSpan], positions: Tensor) -> Tensor:
        ends = torch.tensor([span.end for span in spans])[:, None]
        partial = torch.tensor([-(-span.end // self._block_size) * self._block_size for span in spans])[:, None]
        return ((positions >= ends) & (positions < partial)).flatten().nonzero().flatten().to(self._device)

    def _mask(self, queries: Tensor, positions: Tensor, reach: Reach) -> Tensor | None:
        """The mask to add to the scores of queries at positions [R, n] against keys at positions [R, L]: -inf where a
        query must not attend. None if every query attends to every key."""
        seen = reach.visible(queries[:, :, None], positions[:, None, :])
        if bool(seen.all()):
            return None
        return torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, -torch.inf).to(self._device)

    def _gather(self, cache: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
        """The contexts of a group in one tensor of `dtype`: [R, K, L, D]."""
        heads = cache.shape[2:]
        gathered = load(cache, group.blocks, dtype).view(-1, *heads)
        if group.unwritten is None:
            gathered = gathered[: group.context]
        else:
            gathered.index_fill_(0, group.unwritten, 0.0)
        return gathered.view(group.rows, group.context, *heads).transpose(1, 2)

    def _attend_group(self, q: Tensor, k: Tensor, v: Tensor, group: Group, scores: Scores) -> Tensor:
        heads, size = q.shape[1:]
        fused = scores.softcap is None and scores.sinks is None
        if group.length > _SHORT_ROW and fused:
            q = q.unsqueeze(0).transpose(1, 2)
            mask = None if group.mask is None else group.mask.unsqueeze(1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=scores.scale)
            return out[0].transpose(0, 1)
        # The query heads that share a KV head become rows of one small matrix: each key is read once, not G times.
        shared = heads // k.shape[1]
        q = q.view(group.rows, group.length, k.shape[1], shared, size).permute(0, 2, 3, 1, 4)
        if fused:
            mask = group.mask
            if mask is not None:
                mask = (mask if group.length == 1 else mask.repeat(1, shared, 1)).unsqueeze(1)
            out = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=scores.scale)
            out = out.view(*q.shape[:4], -1)
        else:
            tiles = range(0, group.length, _TILE)
            out = torch.cat([_attend_tile(q, k, v, group.mask, scores, slice(at, at + _TILE)) for at in tiles], dim=3)
        return out.permute(0, 3, 1, 2, 4).reshape(-1, heads, v.shape[3])


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, some: slice) -> Tensor:
    """Attention of `some` of the n queries, with the scores in memory: q [R, K, G, n, D], k [R, K, L, D] and
    v [R, K, L, E] -> [R, K, G, some, E]."""
    q = q[:, :, :, some]
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    products = torch.matmul(q.flatten(2, 3), k.transpose(2, 3)).view(*q.shape[:4], -1).float() * scale
    if scores.softcap is not None:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    if mask is not None:
        products = products + mask[:, None, None, some]
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, q.shape[1], q.shape[2], 1, 1).expand(*products.shape[:4], 1)
        products = torch.cat((products, sinks), dim=-1)
    weights = products.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return torch.matmul(weights.flatten(2, 3), v).view(*q.shape[:4], -1)
