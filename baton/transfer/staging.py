"""The wire format of a chunk of KV, and moving it between paged layers and one packed buffer.

A chunk is tokens [start, end) of one sequence for a run of layers: for each layer K then V, token-major, each
[n, num_kv_heads, head_dim] in the layer's own dtype, as raw bytes without padding. Block size and block ids do not
appear in it, so the two ends may page as they like.

A layer is a pair (K, V), each [num_blocks, block_size, num_kv_heads, head_dim], on one device: contiguous, or a run of
the heads of such a cache (`cache[:, :, a:b]`). Token position p is in slot
`block_ids[p // block_size] * block_size + p % block_size`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import HandoffError

Layers = Sequence[tuple[Tensor, Tensor]]
Where = Tensor | list[tuple[int, int, int]]
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MOST_RUNS = 8
"""Runs of neighbouring blocks that are copied as they lie, in CPU memory: with 16 of them for 512 tokens nothing is
gained in packing any more, with 32 it takes longer than tokens one by one (135M shape, decision 0033)."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayers:
    """Layers as rows of words, one row for each slot of each K and V. Made once for many chunks: to look at 30 layers
    so takes 0.6 ms, a third of the time of copying 512 tokens of them."""

    rows: tuple[tuple[Tensor, ...], ...]  # by layer: K and V, each [num_slots, words]
    arrays: tuple[tuple[Any, ...], ...]  # the same memory for numpy; empty where it is not the CPU's
    num_blocks: int
    word: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layers: Layers | PagedLayers) -> PagedLayers:
        """Words are the widest integers that divide every row: indexing copies words, and 16-bit ones cost twice the
        time of 64-bit ones (measured)."""
        if isinstance(layers, PagedLayers):
            return layers
        word = _WORDS[_word_bytes(layers)]
        rows = tuple(tuple(c.view(c.size(0) * c.size(1), -1).view(word) for c in layer) for layer in layers)
        num_blocks = min((cache.size(0) for layer in layers for cache in layer), default=0)
        device = layers[0][0].device if layers else torch.device("cpu")
        arrays = tuple(tuple(r.numpy() for r in layer) for layer in rows) if device.type == "cpu" else ()
        return cls(rows, arrays, num_blocks, word, device)

    def __getitem__(self, some: slice) -> PagedLayers:
        return replace(self, rows=self.rows[some], arrays=self.arrays[some])

    def layer_bytes(self, n: int) -> list[int]:
        """Bytes of `n` tokens, by layer."""
        return [n * self.word.itemsize * sum(rows.size(1) for rows in layer) for layer in self.rows]


def pack(
    layers: Layers | PagedLayers,
    block_ids: Sequence[int],
    block_size: int,
    start: int,
    end: int,
    out: Tensor | None = None,
) -> Tensor:
    """Tokens [start, end) as one uint8 tensor [bytes] on the layers' device: a new one, or `out` if given.

    Raises HandoffError when the range or a block id lies outside, or `out` has another size.
    """
    paged = PagedLayers.of(layers)
    where, size = locate(paged, block_ids, block_size, start, end), sum(paged.layer_bytes(end - start))
    buf = torch.empty(size, dtype=torch.uint8, device=paged.device) if out is None else out
    pack_at(paged, where, end - start, buf)
    return buf


def pack_at(paged: PagedLayers, where: Where, n: int, out: Tensor) -> None:
    """The same for `n` tokens whose slots are known already."""
    for _ in _packed(paged, where, n, out):
        pass


def pack_layers(
    layers: Layers | PagedLayers, block_ids: Sequence[int], block_size: int, start: int, end: int, out: Tensor
) -> Iterator[Tensor]:
    """As `pack`, and yields each layer's part of `out` when it is there: who reads it at once finds it in the cache."""
    paged = PagedLayers.of(layers)
    return _packed(paged, locate(paged, block_ids, block_size, start, end), end - start, out)


def unpack(
    buf: Tensor, layers: Layers | PagedLayers, block_ids: Sequence[int], block_size: int, start: int, end: int
) -> None:
    """Scatters what `pack` made into tokens [start, end) of the layers; touches no other slot.

    Raises HandoffError, before anything is written, as `pack` does.
    """
    paged = PagedLayers.of(layers)
    unpack_at(paged, locate(paged, block_ids, block_size, start, end), end - start, buf)


def unpack_at(paged: PagedLayers, where: Where, n: int, buf: Tensor) -> None:
    """The same for `n` tokens whose slots are known already."""
    for pairs, _ in _parts(paged, buf, where, n):
        for rows, part in pairs:
            if isinstance(where, Tensor):
                rows.index_copy_(0, where, part)
                continue
            for slot, first, count in where:
                rows[slot : slot + count] = part[first : first + count]


def locate(paged: PagedLayers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> Where:
    """The slots of tokens [start, end): as `_runs` where these are few (on CPU), else each, int64 [end - start]."""
    if not paged.rows or not 0 <= start < end <= len(block_ids) * block_size:
        where = f"{len(paged.rows)} layers, {len(block_ids)} blocks of {block_size}"
        raise HandoffError(f"chunk: tokens [{start}, {end}) do not lie in {where}")
    first = start // block_size
    used = block_ids[first : -(-end // block_size)]
    if min(used) < 0 or max(used) >= paged.num_blocks:  # on a GPU an index outside would end the process
        raise HandoffError(f"chunk: block ids {min(used)} to {max(used)} do not lie in a pool of {paged.num_blocks}")
    if paged.arrays and len(runs := _runs(block_ids, block_size, start, end)) <= _MOST_RUNS:
        return runs
    blocks = torch.tensor(used, dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)
    slots = slots[start - first * block_size : end - first * block_size]
    if paged.device.type != "cuda":
        return slots.to(paged.device)
    return slots.pin_memory().to(paged.device, non_blocking=True)  # from pageable memory it would be waited for


def _packed(paged: PagedLayers, where: Where, n: int, out: Tensor) -> Iterator[Tensor]:
    """Packs layer after layer, and yields each one's part of `out`."""
    for pairs, packed in _parts(paged, out, where, n):
        for rows, part in pairs:
            if isinstance(where, Tensor):
                torch.index_select(rows, 0, where, out=part)
                continue
            for slot, first, count in where:
                part[first : first + count] = rows[slot : slot + count]
        yield packed


def _runs(block_ids: Sequence[int], block_size: int, start: int, end: int) -> list[tuple[int, int, int]]:
    """The slots of tokens [start, end) as runs: (first slot, its token counted from `start`, number of tokens)."""
    runs: list[tuple[int, int, int]] = []
    position = start
    while position < end:
        stop = min((position // block_size + 1) * block_size, end)
        slot = block_ids[position // block_size] * block_size + position % block_size
        if runs and slot == runs[-1][0] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], stop - start - runs[-1][1])
        else:
            runs.append((slot, position - start, stop - position))
        position = stop
    return runs


def _row_bytes(cache: Tensor) -> int:
    return cache.size(2) * cache.size(3) * cache.element_size()


def _word_bytes(layers: Layers) -> int:
    """The widest word that divides every row, and in a run of heads also the distance and the start of its rows."""
    caches = [cache for layer in layers for cache in layer]
    places = (n * c.element_size() for c in caches for n in (c.stride(1), c.storage_offset()))
    return math.gcd(8, *map(_row_bytes, caches), *places)


def _parts(paged: PagedLayers, buf: Tensor, where: Where, n: int) -> Iterator[tuple[list[tuple[Any, Any]], Tensor]]:
    """For each layer: its K and V each with its part of `buf` as rows [n, words], and the layer's part of `buf`.

    Runs are copied with numpy, which takes a slice in a quarter of torch's time: with torch that was a quarter to a
    third of the time of packing 512 tokens (measured).
    """
    sizes = paged.layer_bytes(n)
    if buf.numel() != sum(sizes) or buf.dtype != torch.uint8 or not buf.is_contiguous():
        raise HandoffError(f"chunk: a buffer of {buf.numel()} {buf.dtype}, expected {sum(sizes)} contiguous bytes")
    words: Any
    layers: tuple[tuple[Any, ...], ...]
    words, layers, offset = buf.view(paged.word), paged.rows, 0
    if not isinstance(where, Tensor):
        words, layers = words.numpy(), paged.arrays
    for layer, mine in zip(layers, buf.split(sizes), strict=True):  # type: ignore[no-untyped-call]
        pairs = []
        for rows in layer:
            size = n * rows.shape[1]
            pairs.append((rows, words[offset : offset + size].reshape(n, -1)))
            offset += size
        yield pairs, mine
