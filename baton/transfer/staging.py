"""The wire format of a chunk of KV, and copying it between paged layers and one packed buffer.

A chunk is tokens [start, end) of one sequence for a run of layers: for each layer K then V, token-major, each
[n, num_kv_heads, head size] in the layer's own dtype, as raw bytes without padding. It contains neither block size nor
block ids, so the two ends may use different paging.

A layer is a pair (K, V), each [num_blocks, block_size, num_kv_heads, its head size], on one device: contiguous, or a
run of the heads of such a cache (`cache[:, :, a:b]`). Token position p is in slot
`blocks[p // block_size] * block_size + p % block_size`, where `blocks` are those of the layer's group in the table.
Layers with a window may have fewer of a chunk's tokens than the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.core.errors import HandoffError

Layers = Sequence[tuple[Tensor, Tensor]]
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MOST_RUNS = 8
"""The most runs of neighbouring blocks, in CPU memory, that are copied run by run: for 512 tokens, 16 runs pack no
faster than single tokens, and 32 runs more slowly (135M shape, benchmarks/results/handover.md)."""


class Kind(NamedTuple):
    """The group of a layer (baton.core.kv_layout), and whether it has a window."""

    group: int = 0
    has_window: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayers:
    """Layers as rows of words, one row for each slot of each K and V. Built once and reused for every chunk: building
    it for 30 layers takes 0.6 ms, a third of the time needed to copy 512 tokens."""

    kinds: tuple[Kind, ...]  # by layer
    groups: int  # blocks of a column of a table
    rows: tuple[tuple[Tensor, ...], ...]  # by layer: K and V, each [num_slots, words]
    arrays: tuple[tuple[Any, ...], ...]  # the same memory as numpy arrays; empty unless on CPU
    num_blocks: int
    word: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layers: Layers, kinds: Sequence[Kind] = (), groups: int = 1) -> PagedLayers:
        """Without `kinds` all layers are of one group, without a window. Words are the widest integers that divide
        every row: indexing copies words, and 16-bit words take twice as long as 64-bit ones (measured)."""
        word = _WORDS[_word_bytes(layers)]
        rows = tuple(tuple(c.view(c.size(0) * c.size(1), -1).view(word) for c in layer) for layer in layers)
        num_blocks = min((cache.size(0) for layer in layers for cache in layer), default=0)
        device = layers[0][0].device if layers else torch.device("cpu")
        arrays = tuple(tuple(r.numpy() for r in layer) for layer in rows) if device.type == "cpu" else ()
        return cls(tuple(kinds) or (Kind(),) * len(rows), groups, rows, arrays, num_blocks, word, device)

    def __getitem__(self, some: slice) -> PagedLayers:
        return replace(self, kinds=self.kinds[some], rows=self.rows[some], arrays=self.arrays[some])

    def layer_bytes(self, start: int, end: int, window_start: int = 0) -> list[int]:
        """Returns the bytes of tokens [start, end), by layer; layers with a window have those from `window_start`
        on."""
        counts = {kind: max(0, end - _first(kind, start, window_start)) for kind in set(self.kinds)}
        return self._bytes(counts)

    def _bytes(self, counts: Mapping[Kind, int]) -> list[int]:
        sizes = [self.word.itemsize * sum(rows.size(1) for rows in layer) for layer in self.rows]
        return [counts[kind] * size for kind, size in zip(self.kinds, sizes, strict=True)]


def _first(kind: Kind, start: int, window_start: int) -> int:
    return max(start, window_start) if kind.has_window else start


@dataclass(frozen=True, slots=True, eq=False)
class TokenSlots:
    """The slots of `count` tokens: `each` of them, int64 [count] on the layers' device, or, on CPU with at most
    _MOST_RUNS `runs` of neighbouring slots, these: (first slot, index of its token in the range, number of tokens)."""

    count: int
    each: Tensor | None = None
    runs: Sequence[tuple[int, int, int]] = ()


Slots = Mapping[Kind, TokenSlots]


def pack(layers: PagedLayers, slots: Slots, out: Tensor | None = None) -> Tensor:
    """Returns tokens as one uint8 tensor [bytes] on the layers' device: a new one, or `out` if given. Raises
    HandoffError when `out` has another size."""
    if out is None:
        out = torch.empty(sum(_sizes(layers, slots)), dtype=torch.uint8, device=layers.device)
    for _ in pack_layers(layers, slots, out):
        pass
    return out


def pack_layers(layers: PagedLayers, slots: Slots, out: Tensor) -> Iterator[Tensor]:
    """Like `pack`, but yields each layer's part of `out` as soon as it is packed, while it is in the CPU cache."""
    for own, pairs, packed in _parts(layers, out, slots):
        for rows, part in pairs:
            if own.each is not None:
                torch.index_select(rows, 0, own.each, out=part)
                continue
            for slot, first, count in own.runs:
                part[first : first + count] = rows[slot : slot + count]
        yield packed


def unpack(buf: Tensor, layers: PagedLayers, slots: Slots) -> None:
    """Scatters the output of `pack` into these slots of the layers and writes no others. Raises HandoffError, before
    anything is written, as `pack` does."""
    for own, pairs, _ in _parts(layers, buf, slots):
        for rows, part in pairs:
            if own.each is not None:
                rows.index_copy_(0, own.each, part)
                continue
            for slot, first, count in own.runs:
                rows[slot : slot + count] = part[first : first + count]


def locate(
    layers: PagedLayers, block_ids: Sequence[int], block_size: int, start: int, end: int, window_start: int = 0
) -> Slots:
    """Returns the slots of tokens [start, end) by kind of layer; those with a window have the tokens from
    `window_start` on. Raises HandoffError when the range or a block id is out of bounds."""
    if not layers.rows or not 0 <= start < end <= len(block_ids) // layers.groups * block_size:
        where = f"{len(layers.rows)} layers, {len(block_ids)} blocks of {block_size}"
        raise HandoffError(f"chunk: tokens [{start}, {end}) are not in {where}")
    return {
        kind: _locate(layers, block_ids[kind.group :: layers.groups], block_size, first, end)
        if (first := _first(kind, start, window_start)) < end
        else TokenSlots(0)
        for kind in set(layers.kinds)
    }


def _locate(layers: PagedLayers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> TokenSlots:
    first = start // block_size
    used = block_ids[first : -(-end // block_size)]
    if min(used) < 0 or max(used) >= layers.num_blocks:  # on a GPU an index out of range would end the process
        raise HandoffError(f"chunk: block ids {min(used)} to {max(used)} are not in a pool of {layers.num_blocks}")
    if layers.arrays and len(runs := _runs(block_ids, block_size, start, end)) <= _MOST_RUNS:
        return TokenSlots(end - start, runs=runs)
    blocks = torch.tensor(used, dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)
    slots = slots[start - first * block_size : end - first * block_size]
    if layers.device.type == "cuda":
        slots = slots.pin_memory()  # a copy from pageable memory would block
    return TokenSlots(end - start, slots.to(layers.device, non_blocking=True))


def _runs(block_ids: Sequence[int], block_size: int, start: int, end: int) -> list[tuple[int, int, int]]:
    """Returns the slots of tokens [start, end) as runs (see TokenSlots)."""
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
    """Returns the bytes of the widest word that divides every row and, in a run of heads, its stride and offset."""
    caches = [cache for layer in layers for cache in layer]
    places = (n * c.element_size() for c in caches for n in (c.stride(1), c.storage_offset()))
    return math.gcd(8, *map(_row_bytes, caches), *places)


def _sizes(layers: PagedLayers, slots: Slots) -> list[int]:
    return layers._bytes({kind: slots[kind].count for kind in set(layers.kinds)})


def _parts(
    layers: PagedLayers, buf: Tensor, slots: Slots
) -> Iterator[tuple[TokenSlots, list[tuple[Any, Any]], Tensor]]:
    """Yields for each layer that has tokens: their slots; K and V, each with its part of `buf` as rows [count, words];
    the layer's part of `buf`.

    Runs are copied with numpy, which slices in a quarter of torch's time: slicing with torch took a quarter to a third
    of the time of packing 512 tokens (measured).
    """
    sizes = _sizes(layers, slots)
    if buf.numel() != sum(sizes) or buf.dtype != torch.uint8 or not buf.is_contiguous():
        raise HandoffError(f"chunk: a buffer of {buf.numel()} {buf.dtype}, expected {sum(sizes)} contiguous bytes")
    words, offset = buf.view(layers.word), 0
    words_on_host: Any = words.numpy() if layers.arrays else None
    for index, mine in enumerate(buf.split(sizes)):  # type: ignore[no-untyped-call]
        own, pairs = slots[layers.kinds[index]], list[tuple[Any, Any]]()
        if not own.count:
            continue
        layer: tuple[Any, ...]
        layer, source = (layers.rows[index], words) if own.each is not None else (layers.arrays[index], words_on_host)
        for rows in layer:
            size = own.count * rows.shape[1]
            pairs.append((rows, source[offset : offset + size].reshape(own.count, -1)))
            offset += size
        yield own, pairs, mine
