"""The wire format of a chunk of KV, and moving it between paged layers and one packed buffer.

A chunk is tokens [start, end) of one sequence for a run of layers: for each layer K then V, token-major, each
[n, num_kv_heads, head_dim] in the layer's own dtype, as raw bytes without padding. Block size and block ids do not
appear in it, so the two ends may page as they like.

A layer is a pair (K, V), each [num_blocks, block_size, num_kv_heads, head_dim], on one device: contiguous, or a run of
the heads of such a cache (`cache[:, :, a:b]`).
Token position p lives in slot `block_ids[p // block_size] * block_size + p % block_size`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import torch
import xxhash
from torch import Tensor

from baton.core.errors import HandoffError
from baton.core.kv_layout import KVLayout

Layers = Sequence[tuple[Tensor, Tensor]]
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_MOST_RUNS = 2
"""Runs of neighbouring blocks that are scattered as they lie: 0.57 (one run) and 0.62 (two) of the time of tokens one
by one; with four nothing is gained (135M shape, decision 0032). Gathering gains nothing by it."""


def chunk_bytes(layout: KVLayout, n: int) -> int:
    """Bytes of a chunk of `n` tokens of all layers of `layout`."""
    return layout.bytes_per_token * n


def part_bytes(layers: Layers, n: int) -> int:
    """Bytes of `n` tokens of these layers."""
    return n * sum(_row_bytes(cache) for layer in layers for cache in layer)


def pack(
    layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int, out: Tensor | None = None
) -> Tensor:
    """Tokens [start, end) as one uint8 tensor [bytes] on the layers' device: a new one, or `out` if given.

    Raises HandoffError when the range or a block id lies outside, or `out` has another size.
    """
    slots, total = _slots(layers, block_ids, block_size, start, end), part_bytes(layers, end - start)
    buf = torch.empty(total, dtype=torch.uint8, device=layers[0][0].device) if out is None else out
    for rows, part in _parts(layers, buf, end - start):
        torch.index_select(rows, 0, slots, out=part)
    return buf


def unpack(buf: Tensor, layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> None:
    """Scatters what `pack` made into tokens [start, end) of the layers; touches no other slot.

    Raises HandoffError, before anything is written, as `pack` does.
    """
    slots = _slots(layers, block_ids, block_size, start, end)
    runs = _runs(block_ids, block_size, start, end)
    for rows, part in _parts(layers, buf, end - start):
        if len(runs) > _MOST_RUNS:
            rows.index_copy_(0, slots, part)
            continue
        for slot, first, count in runs:
            rows[slot : slot + count].copy_(part[first : first + count])


def checksum(identity: bytes, buf: Tensor) -> int:
    """xxh3_64 over the identity and the bytes of `buf` (uint8, 1-D, contiguous). A CUDA buffer is copied first."""
    digest = xxhash.xxh3_64(struct.pack("<I", len(identity)) + identity)
    digest.update(buf.cpu().numpy().data)
    return digest.intdigest()


def _slots(layers: Layers, block_ids: Sequence[int], block_size: int, start: int, end: int) -> Tensor:
    """int64 [end - start]: the slot of each token, on the layers' device."""
    if not layers or not 0 <= start < end <= len(block_ids) * block_size:
        where = f"{len(layers)} layers, {len(block_ids)} blocks of {block_size}"
        raise HandoffError(f"chunk: tokens [{start}, {end}) do not lie in {where}")
    first = start // block_size
    used = block_ids[first : -(-end // block_size)]
    num_blocks = min(cache.size(0) for layer in layers for cache in layer)
    if min(used) < 0 or max(used) >= num_blocks:  # on a GPU an index outside would end the process
        raise HandoffError(f"chunk: block ids {min(used)} to {max(used)} do not lie in a pool of {num_blocks}")
    blocks = torch.tensor(used, dtype=torch.int64)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : end - first * block_size].to(layers[0][0].device)


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


def _parts(layers: Layers, buf: Tensor, n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each K and V: its slots [num_slots, words] and its part of `buf` [n, words].

    Both are seen as the widest integer word that divides every row: indexing copies words, and 16-bit ones cost twice
    the time of 64-bit ones (measured).
    """
    total = part_bytes(layers, n)
    if buf.numel() != total or buf.dtype != torch.uint8 or not buf.is_contiguous():
        raise HandoffError(f"chunk: a buffer of {buf.numel()} {buf.dtype}, expected {total} contiguous bytes")
    width = _word_bytes(layers)
    words, offset = buf.view(_WORDS[width]), 0
    for cache in (cache for layer in layers for cache in layer):
        per_row = _row_bytes(cache) // width
        rows = cache.view(cache.size(0) * cache.size(1), -1).view(_WORDS[width])
        yield rows, words[offset : offset + n * per_row].view(n, per_row)
        offset += n * per_row
