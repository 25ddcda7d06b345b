"""Attention over paged KV in Triton: rows of any length, causal or windowed, read through their block tables.

One program computes one tile of queries of one KV head over one split of the keys: flash attention with an online
softmax (Dao et al. 2022), the keys split over programs as in Flash-Decoding (Dao et al. 2023). The query heads that
share a KV head are rows of one tile, so each key is read once. Each tile divides its own keys: for given `splits` and
`least_split` a row's result does not depend on what else is in the batch. A row that fits into one split is written
directly. Otherwise the last of a tile's programs to finish combines the splits, all of them at once for one query and
head after another, so the result does not depend on which program that is. Programs without keys return immediately.

For exact mode all tiles have one size (`Tiles.tile_rows`), and splits have one length, from position 0 on: then a
query's result depends neither on the batch nor on the other queries of its tile. It goes through the same keys in the
same order; keys that only other queries of its tile see multiply by 1 and add 0, and so do splits without keys.

Values that change from step to step (splits, their length, queries in a tile, strides of tables) are arguments, not
constants: contexts of every length run the same compiled kernel, and one captured launch serves them all.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.fp8 import as_bytes, widen

MIN_ROWS = 16
"""Rows of the smallest tile: the minimum for tensor cores."""
MAX_SPLITS = 64
"""Splits of a tile's keys: as many are combined at once."""
_NO_SCORE = -1.0e30
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """The locations of queries and keys, int32 on the device.

    For tile i: its `row`, and `offset`, the index in the row of its first query. For row r: `first`, its first packed
    token; `start`, that token's position; `length`, its tokens; `table_row`, the row of `table` [at least 1, W] that
    holds its blocks. The keys of a tile are divided into at most `splits` parts (up to MAX_SPLITS) of `least_split`
    tokens (a multiple of 64) or more; a tile holds `queries` positions. `tile_rows` 0: a tile has as many rows as its
    queries and the heads of a group need. Otherwise every tile has that many, and split n is positions [n, n + 1) x
    `least_split`; `splits` of them must reach the end of every row.
    """

    row: Tensor
    offset: Tensor
    first: Tensor
    start: Tensor
    length: Tensor
    table_row: Tensor
    table: Tensor
    splits: int
    least_split: int
    queries: int
    tile_rows: int = 0


def rows_of(queries: int, group: int) -> int:
    """Rows of a tile of that many queries, each for `group` heads."""
    return max(MIN_ROWS, int(triton.next_power_of_2(queries * group)))


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, window: int, out: Tensor, arrived: Tensor
) -> None:
    """Computes attention of q [T, H, D] to keys and values [blocks, block_size, K, D], which may be in FP8, into out
    [T, H, D], except for tokens that belong to no row. `window` 0 means no window. `arrived` int32 [tiles x KV heads at
    least] counts the computed splits of a tile and is 0 between calls: calls that share it must run one after the other
    on one stream."""
    heads, head_dim = q.shape[1], q.shape[2]
    (keys, fp8), (values, _) = as_bytes(keys), as_bytes(values)
    kv_heads, group = keys.shape[2], heads // keys.shape[2]
    rows = tiles.tile_rows or rows_of(tiles.queries, group)
    width = max(16, triton.next_power_of_2(head_dim))
    count = len(tiles.row)
    stored = (count, kv_heads, tiles.splits, tiles.queries * group) if tiles.splits > 1 else (1, 1, 1, 1)
    partial = torch.empty((*stored, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((2, *stored), dtype=torch.float32, device=q.device)
    # Float32 products are computed in registers; fewer keys per tile keep enough of them free.
    keys_of_tile = 32 if q.dtype == torch.float32 or rows > 64 else 64
    _attend[count, kv_heads, tiles.splits](
        q, keys, values, out, partial, sums[0], sums[1], arrived,
        tiles.row, tiles.offset, tiles.first, tiles.start, tiles.length, tiles.table_row, tiles.table,
        tiles.table.stride(0), tiles.splits, tiles.least_split, tiles.queries, window,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *keys.stride()[:3], *values.stride()[:3],
        head_dim**-0.5 * _LOG2_E,
        WINDOWED=window > 0, FIXED=tiles.tile_rows > 0, BLOCK_SIZE=keys.shape[1], KEYS=keys_of_tile,
        EXACT_DOT=q.dtype == torch.float32, NO_SCORE=_NO_SCORE, GROUP=group, HEAD_DIM=head_dim, ROWS=rows, WIDTH=width,
        SPLITS=MAX_SPLITS, FP8=fp8, num_warps=8 if rows > 64 or tiles.tile_rows else 4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "tile_row_ptr", "tile_offset_ptr", "row_first_ptr", "row_start_ptr", "row_length_ptr",
        "table_row_ptr", "table_ptr", "max_ptr", "sum_ptr",
        "table_stride", "splits", "least_split", "queries", "window",
    ]
)  # fmt: skip
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, max_ptr, sum_ptr, arrived_ptr,
    tile_row_ptr, tile_offset_ptr, row_first_ptr, row_start_ptr, row_length_ptr, table_row_ptr, table_ptr,
    table_stride, splits, least_split, queries, window,
    q_token, q_head, out_token, out_head, k_block, k_slot, k_head, v_block, v_slot, v_head, scale,
    WINDOWED: tl.constexpr, FIXED: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    EXACT_DOT: tl.constexpr, NO_SCORE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, offset = tl.load(tile_row_ptr + tile), tl.load(tile_offset_ptr + tile)
    first, start, length = tl.load(row_first_ptr + row), tl.load(row_start_ptr + row), tl.load(row_length_ptr + row)

    last = start + tl.minimum(offset + queries, length)  # one past the last position that a query of the tile may see
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(start + offset - window + 1, 0) // KEYS * KEYS
    if FIXED:
        before = lowest // least_split  # splits that end before the window
        used = tl.cdiv(last, least_split) - before
        begin = tl.maximum(lowest, split * least_split)
        end = tl.minimum(last, (split + 1) * least_split)
    else:
        before = 0
        each = tl.maximum(least_split, tl.cdiv(tl.cdiv(last - lowest, splits), KEYS) * KEYS)
        used = tl.cdiv(last - lowest, each)
        begin = lowest + split * each
        end = tl.minimum(last, begin + each)
    if begin < end:
        m = tl.arange(0, ROWS)
        query = offset + m // GROUP
        live = (query < length) & (m < queries * GROUP)
        position = start + query
        d = tl.arange(0, WIDTH)
        inside = d < HEAD_DIM
        blocks_ptr = table_ptr + tl.load(table_row_ptr + row).to(tl.int64) * table_stride
        token = (first + query).to(tl.int64)
        of_head = head * GROUP + m % GROUP
        q_at = token[:, None] * q_token + of_head[:, None] * q_head + d[None, :]
        q = tl.load(q_ptr + q_at, mask=live[:, None] & inside[None, :], other=0.0)

        best = tl.full([ROWS], NO_SCORE, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        for at in range(begin, end, KEYS):
            key = at + tl.arange(0, KEYS)
            there = key < end
            block = tl.load(blocks_ptr + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            k_at = block * k_block + (key % BLOCK_SIZE) * k_slot + head * k_head
            k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=there[None, :] & inside[:, None], other=0)
            if FP8:
                k = widen(k).to(q.dtype)
            scores = (tl.dot(q, k, input_precision="ieee") if EXACT_DOT else tl.dot(q, k)) * scale
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, NO_SCORE)
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(best - higher)
            v_at = block * v_block + (key % BLOCK_SIZE) * v_slot + head * v_head
            v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0)
            if FP8:
                v = widen(v).to(q.dtype)
            part = tl.dot(weights, v, input_precision="ieee") if EXACT_DOT else tl.dot(weights.to(v.dtype), v)
            sums = sums * shrink[:, None] + part
            total = total * shrink + tl.sum(weights, 1)
            best = higher

        out_at = token[:, None] * out_token + of_head[:, None] * out_head + d[None, :]
        mine = live[:, None] & inside[None, :]
        if used == 1:
            result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=mine)
        else:
            tile_at = tile * tl.num_programs(1) + head
            kept = queries * GROUP
            place = (tile_at * splits + split).to(tl.int64) * kept + m
            tl.store(max_ptr + place, best, mask=live)
            tl.store(sum_ptr + place, total, mask=live)
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + d[None, :], sums, mask=mine)
            tl.debug_barrier()  # all threads have stored before the count is raised
            arrived = tl.atomic_add(arrived_ptr + tile_at, 1, sem="acq_rel", scope="gpu")
            if arrived == used - 1:
                tl.debug_barrier()
                s = tl.arange(0, SPLITS)
                stored = (s >= before) & (s < before + used)
                for at in range(tl.minimum(queries, length - offset) * GROUP):
                    from_ = (tile_at * splits + s).to(tl.int64) * kept + at
                    peaks = tl.load(max_ptr + from_, mask=stored, other=NO_SCORE, cache_modifier=".cg")
                    weights = tl.exp2(peaks - tl.max(peaks, 0))
                    sums_of = tl.load(sum_ptr + from_, mask=stored, other=0.0, cache_modifier=".cg")
                    there = stored[:, None] & inside[None, :]
                    part_at = from_[:, None] * HEAD_DIM + d[None, :]
                    parts = tl.load(partial_ptr + part_at, mask=there, other=0.0, cache_modifier=".cg")
                    whole = tl.sum(weights * sums_of, 0)
                    result = tl.sum(parts * weights[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
                    at_out = (first + offset + at // GROUP).to(tl.int64) * out_token
                    at_out += (head * GROUP + at % GROUP) * out_head
                    tl.store(out_ptr + at_out + d, result.to(out_ptr.dtype.element_ty), mask=inside)
                tl.store(arrived_ptr + tile_at, 0)
