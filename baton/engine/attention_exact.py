"""Attention over the paged KV cache, the exact path: a row has the same bits whatever other rows it is computed with.

Queries are divided into tiles of 16, aligned to absolute positions (position p is always row p % 16 of tile p // 16),
and keys are padded to a multiple of 64 that depends only on the tile. So every matrix product that involves a position
has one shape and one order of summation, in a chunk of any length, alone or in a batch. Positions of the tile that are
not in the row are zeros: the rows of a product do not affect each other.

Shapes: T tokens, H query heads, K KV heads, G = H / K, D head size, L keys of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.batch import RowSpan
from baton.engine.kv_pool import load
from baton.models.model_config import ModelConfig

TILE = 16
KEY_STEP = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Packed queries [first, last) are rows [offset, ...) of the tile; its keys are positions [begin, end) of the
    gathered context; `hidden` [16, L] is true where a query must not attend."""

    first: int
    last: int
    offset: int
    begin: int
    end: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """The blocks of one row from its first tile's first key on (`written` positions hold KV), and the row's tiles."""

    blocks: Tensor
    written: int
    tiles: tuple[Tile, ...]


class ExactAttention:
    """`zero_block` is the id of the block of zeros that pads block tables."""

    def __init__(self, config: ModelConfig, block_size: int, zero_block: int, device: torch.device) -> None:
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self._block_size, self._zero_block = block_size, zero_block
        self._device = device

    def prepare(self, spans: Sequence[RowSpan], window: int) -> list[Context]:
        return [self._context(span, window) for span in spans]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: list[Context]) -> Tensor:
        output = torch.zeros_like(queries)
        for context in prepared:
            k, v = (self._gather(cache, context, queries.dtype) for cache in (keys, values))
            for tile in context.tiles:
                out = self._attend_tile(queries[tile.first : tile.last], k, v, tile)
                output[tile.first : tile.last] = out
        return output.flatten(1)

    def _context(self, span: RowSpan, window: int) -> Context:
        numbers = range(span.start // TILE, (span.end - 1) // TILE + 1)
        base = _key_range(numbers[0], window)[0]
        last = _key_range(numbers[-1], window)[1]
        own = span.block_ids[base // self._block_size : -(-span.end // self._block_size)]
        padding = (last - base) // self._block_size - len(own)
        tiles = []
        for number in numbers:
            begin, end = _key_range(number, window)
            start, stop = max(span.start, number * TILE), min(span.end, (number + 1) * TILE)
            queries = torch.arange(number * TILE, (number + 1) * TILE)[:, None]
            positions = torch.arange(begin, end)
            hidden = positions > queries
            if window:
                hidden |= positions <= queries - window
            first = span.first + start - span.start
            offset = start - number * TILE
            tile = Tile(first, first + stop - start, offset, begin - base, end - base, hidden.to(self._device))
            tiles.append(tile)
        blocks = torch.tensor([*own, *[self._zero_block] * padding]).to(self._device)
        return Context(blocks, span.end - base, tuple(tiles))

    def _gather(self, cache: Tensor, context: Context, dtype: torch.dtype) -> Tensor:
        """[K, positions, D] in `dtype`, zeros from the first unwritten position on."""
        gathered = load(cache, context.blocks, dtype).flatten(0, 1)
        gathered[context.written :] = 0.0
        return gathered.transpose(0, 1).contiguous()

    def _attend_tile(self, queries: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
        """queries [m, H, D], m <= 16 -> [m, H, D]."""
        count, heads, size = queries.shape
        kv_heads = keys.shape[0]
        q = torch.zeros((TILE, heads, size), dtype=queries.dtype, device=queries.device)
        q[tile.offset : tile.offset + count] = queries * self._scale
        q = q.view(TILE, kv_heads, -1, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
        k, v = keys[:, tile.begin : tile.end], values[:, tile.begin : tile.end]
        scores = torch.bmm(q, k.transpose(1, 2)).view(kv_heads, -1, TILE, k.shape[1])
        scores.masked_fill_(tile.hidden, -torch.inf)
        out = torch.bmm(torch.softmax(scores, dim=-1).flatten(1, 2), v)
        out = out.view(kv_heads, -1, TILE, size).permute(2, 0, 1, 3).reshape(TILE, heads, size)
        return out[tile.offset : tile.offset + count]


def _key_range(tile: int, window: int) -> tuple[int, int]:
    """The keys a tile is computed against: from a multiple of 64 at or before the first visible position of its first
    query (position 0 without a window), to the first multiple of 64 after its last query."""
    begin = max(0, tile * TILE - window + 1) // KEY_STEP * KEY_STEP if window else 0
    return begin, -(-(tile + 1) * TILE // KEY_STEP) * KEY_STEP
