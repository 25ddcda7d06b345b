"""Packs and unpacks KV by blocks and tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from baton.transfer.staging import Layers, PagedLayers, locate, pack, unpack


def pack_tokens(layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> Tensor:
    paged = PagedLayers.of(layers)
    return pack(paged, locate(paged, block_ids, block_size, start, end))


def unpack_tokens(buf: Tensor, layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> None:
    paged = PagedLayers.of(layers)
    unpack(buf, paged, locate(paged, block_ids, block_size, start, end))
