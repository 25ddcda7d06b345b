"""Attention on CUDA: one Triton kernel over the paged cache for all rows of a step (see kernels/paged_attention).

`prepare` turns rows into tiles: long rows in tiles of several queries, so that a key tile in fast memory serves many;
rows of one query each in tiles of one. All integers of a step go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.model_config import ModelConfig
from baton.engine.batch import Span
from baton.engine.device import to_device
from baton.engine.kernels.paged_attention import SPLIT_TOKENS, Tiles, paged_attention

_TILE_ROWS = 64  # queries x heads of a group in a tile of a long row


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a step in tiles, longest kind and shortest kind apart, and the layer's window."""

    tiles: tuple[Tiles, ...]
    window: int


class TritonAttention:
    """`config` is this rank's own (`shard_config`); the KV pool has blocks of `block_size` tokens."""

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        group = config.num_heads // config.num_kv_heads
        self._long_tile = max(1, _TILE_ROWS // group)
        self._short_tile = max(1, 16 // group)  # a tile has 16 rows at least: fewer queries would leave them idle

    def prepare(self, spans: Sequence[Span], window: int) -> Prepared:
        short = [span for span in spans if span.length <= self._short_tile]
        long = [span for span in spans if span.length > self._short_tile]
        kinds = ((short, self._short_tile), (long, self._long_tile))
        return Prepared(tuple(self._tiles(rows, queries) for rows, queries in kinds if rows), window)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: Prepared) -> Tensor:
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
        for tiles in prepared.tiles:
            paged_attention(queries, keys, values, tiles, prepared.window, out)
        return out.flatten(1)

    def _tiles(self, spans: list[Span], queries: int) -> Tiles:
        rows: list[int] = []
        offsets: list[int] = []
        for number, span in enumerate(spans):
            starts = range(0, span.length, queries)
            rows.extend([number] * len(starts))
            offsets.extend(starts)
        width = max(-(-span.end // self._block_size) for span in spans)
        table: list[int] = []
        for span in spans:
            used = span.block_ids[: -(-span.end // self._block_size)]
            table += [*used, *[0] * (width - len(used))]
        columns = [[span.first for span in spans], [span.start for span in spans], [span.length for span in spans]]
        parts = [rows, offsets, *columns, table]
        packed = to_device(torch.tensor([value for part in parts for value in part], dtype=torch.int32), self._device)
        row, offset, first, start, length, blocks = torch.split(packed, [len(part) for part in parts])
        splits = -(-max(span.end for span in spans) // SPLIT_TOKENS)
        return Tiles(row, offset, first, start, length, blocks.view(len(spans), width), splits, queries)
