"""Attention on CUDA: a Triton kernel over the paged cache (kernels/paged_attention), and torch's FlashAttention (Dao
2023) for long rows where available.

`prepare` divides rows into tiles: long rows into tiles of several queries, so that a key tile in fast memory serves
many; short rows (decode, verification) into one tile each, with their keys split among programs until the GPU is busy.
The integers of each of these two kinds of tiles go to the device in one copy.

FlashAttention's kernels support block tables only with pages of 256 tokens, and in torch 2.11 not at all, so the
contexts of all long rows are first gathered into one tensor, without what lies before a window, and one call computes
them. This copies a context once, while attention reads it for every 128 queries: 64 MB compared with 0.5 TFLOP for
8,192 tokens of an 8 B shape. FlashInfer, where it is used (attention_flashinfer.py), reads the pages themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import triton
from torch import Tensor

from baton.engine.attention_flashinfer import FlashInferRows, PagedRows
from baton.engine.batch import RowSpan, packed_tokens
from baton.engine.device import LEAST_CAPABILITY
from baton.engine.device_stream import to_device
from baton.engine.kernels.paged_attention import MAX_SPLITS, MIN_ROWS, Tiles, paged_attention, rows_of
from baton.engine.kv_pool import load
from baton.models.model_config import ModelConfig

_FLASH_TOKENS = 64
"""Tokens of a row from which FlashAttention gains more than gathering the context costs."""
_FLASH_KEYS = 32_768
"""The most tokens of several contexts that are gathered at once; a longer context is gathered alone."""
_PROGRAMS = 512
"""The least number of programs that keeps a GPU busy: about four for each of an H100's 132 multiprocessors."""
_SPLIT_PROGRAMS = 16_384
"""The most programs of a split step, unless that leaves a row fewer than 16 splits: their results are stored."""
_LEAST_SPLIT, _MOST_SPLIT = 128, 4096
_STORED_BYTES = 256 << 20
"""In exact mode long rows are split, too: the most memory that the results of one launch's splits may take."""
UNSPLIT = 1 << 30
_MOST_HEAD_DIM = 256
_flash_forward = torch.ops.aten._flash_attention_forward
"""The operation below torch's public `varlen_attn`, whose arguments changed from 2.11 to 2.13; these did not."""


def split_buckets(programs: int, longest: int) -> list[int]:
    """The numbers of splits for which decode steps are captured, rising: the first keeps the GPU busy if all rows are
    about as long, the second divides single rows of up to `longest` keys. `programs` are tiles x KV heads."""
    max_splits = min(max(_SPLIT_PROGRAMS // programs, 16), MAX_SPLITS)
    first = min(max(_PROGRAMS // programs, 1), max_splits)
    return [first] if first == max_splits or first * _MOST_SPLIT >= longest else [first, max_splits]


def split_plan(programs: int, longest: int) -> tuple[int, int]:
    """(splits, least tokens of a split) for `programs` tiles x KV heads whose longest row has `longest` keys. Splits
    are short for few programs, to keep the GPU busy, and long for many, to combine fewer results. A captured step with
    the last of `split_buckets` for the same arguments divides every row in the same way."""
    least = min(max(triton.next_power_of_2(8 * programs), _LEAST_SPLIT), _MOST_SPLIT)
    return min(split_buckets(programs, longest)[-1], -(-longest // least)), least


def exact_split(longest: int) -> int:
    """Tokens of a split in exact mode. `longest` is the model's own limit, not the worker's: all workers of a cluster
    must divide keys in the same way."""
    return max(int(triton.next_power_of_2(-(-longest // MAX_SPLITS))), _LEAST_SPLIT)


@dataclass(frozen=True, slots=True)
class FlashRows:
    """Long rows in one call. `where` are their packed tokens: a slice, or int64 on the device if other rows lie between
    them. `slots` int64 (block * block_size + offset) are those of their keys, row by row. `query_ends` and `key_ends`
    int32 [rows + 1] are cumulative lengths, 0 first, and `longest` the most queries and the most keys of a row."""

    where: slice | Tensor
    slots: Tensor
    query_ends: Tensor
    key_ends: Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, spans: Sequence[RowSpan], block_size: int, window: int, device: torch.device) -> FlashRows:
        lengths = [span.length for span in spans]
        lows = [max(span.start - window + 1, 0) if window else 0 for span in spans]
        keys = [span.end - low for span, low in zip(spans, lows, strict=True)]
        query_ends, key_ends = ([0, *accumulate(numbers)] for numbers in (lengths, keys))
        ends = to_device(torch.tensor([query_ends, key_ends], dtype=torch.int32), device)
        blocks: list[int] = []
        offsets: list[int] = []  # of each row: the index of its first key in `blocks`, less that among all keys
        for span, low, first in zip(spans, lows, key_ends, strict=False):
            offsets.append(len(blocks) * block_size + low % block_size - first)
            blocks += span.block_ids[low // block_size : -(-span.end // block_size)]
        # The slots are computed on the device: a context may have 100,000 tokens.
        sizes, table = to_device(torch.tensor([keys, offsets]), device), to_device(torch.tensor(blocks), device)
        index = torch.arange(key_ends[-1], device=device)
        index += sizes[1].repeat_interleave(sizes[0], output_size=key_ends[-1])
        slots = table[index // block_size] * block_size + index % block_size
        where = packed_tokens(spans, device)
        return cls(where, slots, ends[0], ends[1], (max(lengths), max(keys)))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, window: int, out: Tensor) -> None:
        """Computes causal attention of these rows of queries [T, H, D] to their contexts in keys and values [blocks,
        block_size, K, D], perhaps in FP8, into their parts of out [T, H, D]."""
        k, v = (load(cache.flatten(0, 1), self.slots, queries.dtype) for cache in (keys, values))
        out[self.where] = _flash_forward(
            queries[self.where],
            k,
            v,
            self.query_ends,
            self.key_ends,
            *self.longest,
            0.0,
            True,
            False,
            scale=queries.shape[-1] ** -0.5,
            window_size_left=window - 1 if window else None,
            window_size_right=0 if window else None,
        )[0]


def _in_calls(spans: Sequence[RowSpan]) -> Iterator[list[RowSpan]]:
    """Divides long rows so that the contexts of a call are together not much longer than the longest."""
    call: list[RowSpan] = []
    for span in spans:
        if call and sum(other.end for other in call) + span.end > _FLASH_KEYS:
            yield call
            call = []
        call.append(span)
    if call:
        yield call


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a step, grouped by kernel, and the layer's window."""

    tiles: tuple[Tiles, ...]
    flash: tuple[FlashRows | PagedRows, ...]
    window: int


class TritonAttention:
    """`config` is this rank's own (`shard_config`); the KV pool has blocks of `block_size` tokens. Used on one stream
    only: `arrived` (paged_attention) serves one call at a time. `long_tile` is the most queries of a tile. With `paged`
    FlashInfer computes the rows that FlashAttention would.

    With `exact` the bits of a row do not depend on the batch: every tile has `tile_rows` rows, keys are split every
    `exact_split` tokens, and FlashAttention, which chooses by shape, is not used. Without, both are 0."""

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
        paged: FlashInferRows | None = None,
    ) -> None:
        self._block_size, self._device = block_size, device
        self._group = config.num_heads // config.num_kv_heads
        self.kv_heads = config.num_kv_heads
        # Queries x heads of a group in a tile of a long row. In exact mode decode steps have such tiles, too: with 128
        # rows they would be bound by arithmetic.
        long_rows = 32 if dtype == torch.float32 else 64 if exact else 128
        self.long_tile = max(1, long_rows // self._group)
        self._short_tile = max(1, MIN_ROWS // self._group)  # fewer queries would leave rows of a tile idle
        self._paged = paged
        self._flash = paged is not None or (not exact and flash_supports(config.head_dim, dtype, device))
        self.tile_rows = self.exact_split = 0
        if exact:
            self.tile_rows = rows_of(self.long_tile, self._group)
            self.exact_split = exact_split(config.max_position_embeddings)
        self._most_splits = -(-config.max_position_embeddings // (self.exact_split or UNSPLIT))
        self._stored_bytes = 4 * self.kv_heads * self._group * config.head_dim  # of one query, for one split
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, tiles: int) -> None:
        """Makes `arrived` large enough for steps of that many tiles. Graphs captured with a smaller one keep it."""
        if len(self.arrived) < tiles * self.kv_heads:
            self.arrived = torch.zeros(tiles * self.kv_heads, dtype=torch.int32, device=self._device)

    def split_buckets(self, rows: int, longest: int) -> list[int]:
        """`split_buckets` of a step of that many rows. In exact mode one number serves all: it changes no result."""
        return [self._most_splits] if self.exact_split else split_buckets(rows * self.kv_heads, longest)

    def split_plan(self, tiles: int, longest: int) -> tuple[int, int]:
        """(splits, least tokens of a split) of a step of that many tiles; in exact mode all splits are as long."""
        if self.exact_split:
            return -(-longest // self.exact_split), self.exact_split
        return split_plan(tiles * self.kv_heads, longest)

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """A length of each kind of rows that `prepare` distinguishes."""
        lengths = (1, self._short_tile + 1, max(_FLASH_TOKENS, self._short_tile + 1))
        return lengths if self._flash and lengths[1] < lengths[2] else tuple(sorted({lengths[0], lengths[-1]}))

    def prepare(self, spans: Sequence[RowSpan], window: int) -> Prepared:
        short = [span for span in spans if span.length <= self._short_tile]
        flash_from = _FLASH_TOKENS if self._flash else UNSPLIT  # longer rows use FlashAttention
        long = [span for span in spans if self._short_tile < span.length < flash_from]
        flash = [span for span in spans if span.length >= flash_from]
        # In short tiles the program has the same size, but fewer results of splits are stored.
        kinds = ((short, max((span.length for span in short), default=1)), (long, self.long_tile))
        tiles = [part for rows, queries in kinds if rows for part in self._in_launches(self._tiles(rows, queries))]
        if self._paged is not None:
            return Prepared(tuple(tiles), (self._paged.plan(flash, window),) if flash else (), window)
        calls = (FlashRows.of(rows, self._block_size, window, self._device) for rows in _in_calls(flash))
        return Prepared(tuple(tiles), tuple(calls), window)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, prepared: Prepared) -> Tensor:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for tiles in prepared.tiles:
            paged_attention(queries, keys, values, tiles, prepared.window, out, self.arrived)
        for rows in prepared.flash:
            rows.attend(queries, keys, values, prepared.window, out)
        return out.flatten(1)

    def _tiles(self, spans: list[RowSpan], queries: int) -> Tiles:
        offsets = [offset for span in spans for offset in range(0, span.length, queries)]
        rows = [number for number, span in enumerate(spans) for _ in range(0, span.length, queries)]
        width = max(-(-span.end // self._block_size) for span in spans)
        table: list[int] = []
        for span in spans:
            used = span.block_ids[: -(-span.end // self._block_size)]
            table += [*used, *[0] * (width - len(used))]
        columns = [[span.first for span in spans], [span.start for span in spans], [span.length for span in spans]]
        columns.append(list(range(len(spans))))
        parts = [rows, offsets, *columns, table]
        packed = to_device(torch.tensor([value for part in parts for value in part], dtype=torch.int32), self._device)
        row, offset, first, start, length, table_row, blocks = torch.split(packed, [len(part) for part in parts])
        self.reserve(len(rows))
        longest = max(span.end for span in spans)
        programs = len(rows) * self.kv_heads
        few = queries <= self._short_tile or programs < _PROGRAMS // 4  # else tiles of long rows keep the GPU busy
        plan = self.split_plan(len(rows), longest) if few or self.exact_split else (1, UNSPLIT)
        table_of = blocks.view(len(spans), width)
        return Tiles(row, offset, first, start, length, table_row, table_of, *plan, queries, self.tile_rows)

    def _in_launches(self, tiles: Tiles) -> Iterator[Tiles]:
        """Divides tiles so that the results of a launch's splits are not too large."""
        max_tiles = len(tiles.row)
        if self.exact_split and tiles.splits > 1:
            max_tiles = max(1, _STORED_BYTES // (tiles.splits * tiles.queries * self._stored_bytes))
        for at in range(0, len(tiles.row), max_tiles):
            yield replace(tiles, row=tiles.row[at : at + max_tiles], offset=tiles.offset[at : at + max_tiles])


def flash_supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch supports FlashAttention for such heads on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if head_dim % 8 or head_dim > _MOST_HEAD_DIM or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    return bool(torch.backends.cuda.is_flash_attention_available())
