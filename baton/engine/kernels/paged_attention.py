"""Attention over paged KV in Triton: rows of any length, causal or windowed, read through their block tables.

One program computes one tile of queries of one KV head over one split of the keys: flash attention with an online
softmax (Dao et al. 2022), the keys split over programs as in Flash-Decoding (Dao et al. 2023) and joined by a second
kernel. The query heads that share a KV head are rows of one tile, so each key is read once. Splits and key tiles lie
at fixed absolute positions: a row's result does not depend on what else is in the batch.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TOKENS = 1024
KEY_TILE = 64
_NO_SCORE = -1.0e30


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where queries and keys lie, int32 on the device.

    Of tile i: `row`, the row it belongs to, and `offset`, the row's query it begins with. Of row r: `first`, its first
    packed token; `start`, that token's position; `length`, its tokens; `table` [R, W], its blocks. Keys are computed in
    `splits` parts of SPLIT_TOKENS, enough for the longest row; a tile holds `queries` positions.
    """

    row: Tensor
    offset: Tensor
    first: Tensor
    start: Tensor
    length: Tensor
    table: Tensor
    splits: int
    queries: int


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, window: int, out: Tensor) -> None:
    """q [T, H, D] against keys and values [blocks, block_size, K, D] into out [T, H, D]. Tokens of no row keep what
    `out` held. `window` 0 sees everything before."""
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads, group = keys.shape[2], heads // keys.shape[2]
    rows = max(16, triton.next_power_of_2(tiles.queries * group))
    width = max(16, triton.next_power_of_2(head_dim))
    count = len(tiles.row)
    partial = torch.empty((count, kv_heads, tiles.splits, rows, width), dtype=torch.float32, device=q.device)
    sums = torch.empty((2, count, kv_heads, tiles.splits, rows), dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5
    shape = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "ROWS": rows,
        "WIDTH": width,
        "SPLITS": tiles.splits,
        "QUERIES": tiles.queries,
    }
    where = (tiles.row, tiles.offset, tiles.first, tiles.start, tiles.length)
    _attend[count, kv_heads, tiles.splits](
        q,
        keys,
        values,
        partial,
        sums[0],
        sums[1],
        *where,
        tiles.table,
        tiles.table.stride(0),
        q.stride(0),
        q.stride(1),
        *keys.stride()[:3],
        *values.stride()[:3],
        scale,
        WINDOW=window,
        BLOCK_SIZE=keys.shape[1],
        SPLIT=SPLIT_TOKENS,
        KEYS=KEY_TILE,
        EXACT_DOT=q.dtype == torch.float32,
        NO_SCORE=_NO_SCORE,
        **shape,
    )
    _join[count, kv_heads](
        partial,
        sums[0],
        sums[1],
        out,
        *where[:3],
        tiles.length,
        out.stride(0),
        out.stride(1),
        NO_SCORE=_NO_SCORE,
        **shape,
    )


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, partial_ptr, max_ptr, sum_ptr,
    tile_row_ptr, tile_offset_ptr, row_first_ptr, row_start_ptr, row_length_ptr,
    table_ptr, table_stride, q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, scale,
    WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, KEYS: tl.constexpr,
    EXACT_DOT: tl.constexpr, NO_SCORE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """One tile x one KV head x one split: its unnormalised output, its row maxima and row sums."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, offset = tl.load(tile_row_ptr + tile), tl.load(tile_offset_ptr + tile)
    first, start, length = tl.load(row_first_ptr + row), tl.load(row_start_ptr + row), tl.load(row_length_ptr + row)

    m = tl.arange(0, ROWS)
    query = offset + m // GROUP
    live = (query < length) & (m < QUERIES * GROUP)
    position = start + query
    d = tl.arange(0, WIDTH)
    inside = d < HEAD_DIM
    q_at = (first + query)[:, None] * q_token + (head * GROUP + m % GROUP)[:, None] * q_head + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None] & inside[None, :], other=0.0)

    end = start + tl.minimum(offset + QUERIES, length)  # past the last position that any query here may see
    begin = split * SPLIT
    if WINDOW > 0:
        lowest = tl.maximum(start + offset - WINDOW + 1, 0)
        begin = tl.maximum(begin, lowest // KEYS * KEYS)
    end = tl.minimum(end, (split + 1) * SPLIT)

    best = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        there = key < end
        block = tl.load(table_ptr + row * table_stride + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        k_at = block * k_block + (key % BLOCK_SIZE) * k_slot + head * k_head
        k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        scores = (tl.dot(q, k, input_precision="ieee") if EXACT_DOT else tl.dot(q, k)) * scale
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, NO_SCORE)
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(best - higher)
        v_at = block * v_block + (key % BLOCK_SIZE) * v_slot + head * v_head
        v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        part = tl.dot(weights, v, input_precision="ieee") if EXACT_DOT else tl.dot(weights.to(v.dtype), v)
        sums = sums * shrink[:, None] + part
        total = total * shrink + tl.sum(weights, 1)
        best = higher

    place = ((tile * tl.num_programs(1) + head) * SPLITS + split) * ROWS + m
    tl.store(max_ptr + place, best)
    tl.store(sum_ptr + place, total)
    tl.store(partial_ptr + place.to(tl.int64)[:, None] * WIDTH + d[None, :], sums)


@triton.jit
def _join(
    partial_ptr, max_ptr, sum_ptr, out_ptr, tile_row_ptr, tile_offset_ptr, row_first_ptr, row_length_ptr,
    out_token, out_head,
    NO_SCORE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one tile and KV head, in rising order of position."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row, offset = tl.load(tile_row_ptr + tile), tl.load(tile_offset_ptr + tile)
    first, length = tl.load(row_first_ptr + row), tl.load(row_length_ptr + row)
    m, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    best = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(SPLITS):
        place = ((tile * tl.num_programs(1) + head) * SPLITS + split) * ROWS + m
        here = tl.load(max_ptr + place)
        higher = tl.maximum(best, here)
        old, new = tl.exp(best - higher), tl.exp(here - higher)
        part = tl.load(partial_ptr + place.to(tl.int64)[:, None] * WIDTH + d[None, :])
        sums = sums * old[:, None] + part * new[:, None]
        total = total * old + tl.load(sum_ptr + place) * new
        best = higher
    query = offset + m // GROUP
    live = (query < length) & (m < QUERIES * GROUP)
    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (first + query)[:, None] * out_token + (head * GROUP + m % GROUP)[:, None] * out_head + d[None, :]
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=live[:, None] & (d < HEAD_DIM)[None, :])
