"""The Triton kernel against the plain attention, in Triton's interpreter, without a GPU.

The interpreter multiplies bfloat16 as if it were integers, so float16 replaces it here; tests/gpu covers the rest.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.attention import FastAttention
from baton.engine.batch import RowSpan
from baton.models.model_config import ModelConfig
from tests.support.attention import shape

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)
CPU = torch.device("cpu")
ROWS = [(0, 1), (5, 1), (37, 1), (100, 3), (0, 40), (33, 29), (1100, 2)]
"""(start, length): decode, verification and prefill rows, one of them in several splits."""


def triton_attention(config: ModelConfig, block_size: int, dtype: torch.dtype = torch.float32) -> Any:
    from baton.engine.attention_triton import TritonAttention

    return TritonAttention(config, block_size, dtype, CPU)


def paged(config: ModelConfig, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, list[RowSpan]]:
    """Queries, keys, values and rows whose blocks are scattered; positions after the end of a row are NaN."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = sum(-(-(start + length) // block_size) for start, length in ROWS)
    pool = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
    keys, values = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
    free = torch.randperm(num_blocks, generator=generator).tolist()
    spans: list[RowSpan] = []
    packed = 0
    for start, length in ROWS:
        end = start + length
        used = tuple(free.pop() for _ in range(-(-end // block_size)))
        for cache in (keys, values):
            if end % block_size:
                cache[used[-1], end % block_size :] = float("nan")
        spans.append(RowSpan(packed, start, end, used))
        packed += length
    keys[num_blocks] = values[num_blocks] = 0.0
    queries = torch.randn((packed, config.num_heads, config.head_dim), generator=generator).to(dtype)
    return queries, keys, values, spans


def few(spans: list[RowSpan]) -> tuple[list[RowSpan], list[int]]:
    """A decode row, a verification row and the one in several splits, and their tokens: the interpreter is slow."""
    rows = [spans[index] for index in (2, 3, 6)]
    return rows, [token for row in rows for token in range(row.first, row.first + row.length)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "dtype"),
    [
        pytest.param(4, 2, 16, 16, 0, torch.float32, marks=pytest.mark.long),
        (9, 3, 64, 16, 0, torch.float32),
        (8, 1, 80, 32, 20, torch.float32),
        (4, 4, 96, 16, 7, torch.float16),
    ],
)
def test_the_kernel_agrees_with_the_plain_attention(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int, dtype: torch.dtype
) -> None:
    config = shape(heads, kv_heads, head_dim)
    queries, keys, values, spans = paged(config, block_size, dtype)
    kernel = triton_attention(config, block_size, dtype)
    plain = FastAttention(block_size, len(keys) - 1, dtype, CPU)
    found = kernel.attend(queries, keys, values, kernel.prepare(spans, window))
    expected = plain.attend(queries, keys, values, plain.prepare(spans, window))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    assert torch.allclose(found.float(), expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.float16])
def test_fp8_is_widened_in_the_kernel(dtype: torch.dtype) -> None:
    config = shape(4, 2, 80)
    queries, keys, values, spans = paged(config, 16, dtype)
    keys, values = ((cache * 30).to(torch.float8_e4m3fn) for cache in (keys, values))
    kernel, (rows, tokens) = triton_attention(config, 16, dtype), few(spans)
    prepared = kernel.prepare(rows, 0)
    found = kernel.attend(queries, keys, values, prepared)
    assert torch.equal(found[tokens], kernel.attend(queries, keys.to(dtype), values.to(dtype), prepared)[tokens])


def test_every_code_of_fp8_is_widened_and_made_as_by_torch() -> None:
    from tests.engine.triton_fp8 import NUMBERS, convert

    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes, widened = torch.empty(1 << 16, dtype=torch.uint8), torch.empty(1 << 16)
    convert[len(numbers) // NUMBERS,](numbers, codes, widened, COUNT=NUMBERS)
    expected, nan = numbers.clamp(-448, 448).to(torch.float8_e4m3fn), numbers.isnan()
    assert torch.equal(codes[~nan], expected.view(torch.uint8)[~nan])
    assert torch.equal(widened[~nan], expected[~nan].float()) and widened[nan].isnan().all()


def test_last_program_merges_the_splits_and_resets_the_arrival_counter() -> None:
    config = shape(4, 2, 16)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    kernel, (rows, tokens) = triton_attention(config, 16), few(spans)
    prepared = kernel.prepare(rows, 0)
    assert prepared.tiles[0].splits == 9, "1,102 keys in splits of 128"
    found = [kernel.attend(queries, keys, values, prepared)[tokens] for _ in range(2)]
    assert torch.equal(*found)
    assert not kernel.arrived.any(), "the next call counts from zero"


def test_only_results_of_live_rows_and_used_splits_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 16 rows of a tile two are live here (one query, two heads of a group). The row of 6 keys has one split,
    the others have 3 and 9 of 128."""
    config, stored = shape(4, 2, 16), []
    _, keys, values, _ = paged(config, 16, torch.float32)
    keys, values, queries = keys.nan_to_num(), values.nan_to_num(), torch.randn(3, 4, 16)
    spans = [RowSpan(0, 5, 6, (0,)), RowSpan(1, 299, 300, tuple(range(19))), RowSpan(2, 1099, 1100, tuple(range(69)))]
    kernel = triton_attention(config, 16)
    prepared = kernel.prepare(spans, 0)

    def nan(size: tuple[int, ...], **named: Any) -> Tensor:
        stored.append(torch.full(size, float("nan"), **named))
        return stored[-1]

    plain = FastAttention(16, len(keys) - 1, torch.float32, CPU)
    expected = plain.attend(queries, keys, values, plain.prepare(spans, 0))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", nan)
        found = kernel.attend(queries, keys, values, prepared)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    partial, sums = stored
    assert partial.shape == (3, 2, 9, 2, 16) and sums.shape == (2, 3, 2, 9, 2)
    used = [[int((~tile[0, :, 0].isnan()).sum()) for tile in tiles] for tiles in (partial[..., 0], sums[0])]
    assert used == [[0, 3, 9]] * 2


@pytest.mark.parametrize(("splits", "windows"), [(1, (20,)), (3, (0, 20)), (64, (0,))])
def test_one_launch_serves_contexts_of_every_length(splits: int, windows: tuple[int, ...]) -> None:
    """As in a captured step: the number of splits is fixed, and each row divides its own keys among them."""
    from baton.engine.attention_triton import Prepared

    config = shape(4, 2, 16)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    kernel, plain = triton_attention(config, 16), FastAttention(16, len(keys) - 1, torch.float32, CPU)
    rows, tokens = few(spans)
    for window in windows:
        tiles, *others = kernel.prepare(rows, window).tiles
        found = kernel.attend(queries, keys, values, Prepared((replace(tiles, splits=splits), *others), (), window))
        expected = plain.attend(queries, keys, values, plain.prepare(rows, window))
        assert torch.allclose(found[tokens], expected[tokens], rtol=0, atol=1e-5)


def test_row_has_the_same_bits_alone_and_in_a_batch_with_the_same_split_size() -> None:
    from baton.engine.attention_triton import split_plan

    config = shape(4, 2, 16)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    kernel = triton_attention(config, 16)
    assert split_plan(2, 1102)[1] == split_plan(2 * len(spans), 1102)[1]
    together = kernel.attend(queries, keys, values, kernel.prepare(spans, 0))
    for span in spans[::2]:
        alone = RowSpan(0, span.start, span.end, span.block_ids)
        part = slice(span.first, span.first + span.length)
        assert torch.equal(kernel.attend(queries[part], keys, values, kernel.prepare([alone], 0)), together[part])


@pytest.mark.parametrize(
    ("programs", "longest", "splits", "tokens"),
    [
        (8, 512, 4, 128),  # one sequence of 8 KV heads
        (64, 4096, 8, 512),
        (512, 1024, 1, 4096),  # 64 sequences: one more key adds no split
        (512, 1025, 1, 4096),
        (512, 131072, 32, 4096),
        (8, 131072, 64, 128),  # a program combines all splits of a tile: more would take longer than they save
        (1, 1 << 20, 64, 128),
        (8192, 131072, 16, 4096),
    ],
)
def test_keys_are_split_more_finely_when_there_are_few_programs(
    programs: int, longest: int, splits: int, tokens: int
) -> None:
    from baton.engine.attention_triton import split_buckets, split_plan

    assert split_plan(programs, longest) == (splits, tokens)
    buckets = split_buckets(programs, 131072)
    assert buckets == sorted(buckets) and buckets[-1] == split_plan(programs, 131072)[0]
    assert any(bucket >= splits for bucket in buckets) and len(buckets) <= 3


def flash(q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, *rest: Any, **named: Any) -> Any:
    """torch's own kernel needs a GPU; this plain function has its arguments, and its result for each row."""
    max_q, max_k, *others = rest
    assert others == [0.0, True, False] and query_ends.dtype == key_ends.dtype == torch.int32
    ends = [ends.tolist() for ends in (query_ends, key_ends)]
    rows = [list(itertools.pairwise(each)) for each in ends]
    assert [max(end - first for first, end in each) for each in rows] == [max_q, max_k]
    assert [each[-1] for each in ends] == [len(q), len(k)] and len(k) == len(v)
    left, out = named["window_size_left"], torch.empty_like(q)
    for (first, end), (low, high) in zip(*rows, strict=True):
        key = torch.arange(high - low)[None]
        position = key[:, first - end :].T  # the last query sees the last key
        seen = key <= position
        if left is not None:
            assert named["window_size_right"] == 0
            seen &= key >= position - left
        wide = [t.transpose(0, 1).float() for t in (q[first:end], k[low:high], v[low:high])]
        part = torch.nn.functional.scaled_dot_product_attention(
            *wide, attn_mask=seen, scale=named["scale"], enable_gqa=True
        )
        out[first:end] = part.transpose(0, 1).to(q.dtype)
    return (out,)


@pytest.mark.parametrize("most_keys", [32_768, 60])
def test_one_call_of_flash_attention_computes_all_long_rows(monkeypatch: pytest.MonkeyPatch, most_keys: int) -> None:
    from baton.engine import attention_triton

    calls = []
    monkeypatch.setattr(attention_triton, "flash_supports", lambda *_: True)
    monkeypatch.setattr(attention_triton, "_FLASH_TOKENS", 3)
    monkeypatch.setattr(attention_triton, "_FLASH_KEYS", most_keys)
    monkeypatch.setattr(
        attention_triton, "_flash_forward", lambda *args, **named: calls.append(1) or flash(*args, **named)
    )
    config = shape(4, 2, 16)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    kernel, plain = triton_attention(config, 16), FastAttention(16, len(keys) - 1, torch.float32, CPU)
    kernel._short_tile = 2
    for window in (0, 7):
        for rows in (spans, spans[3:6], spans[4:5]):
            calls.clear()
            found = kernel.attend(queries, keys, values, kernel.prepare(rows, window))
            expected = plain.attend(queries, keys, values, plain.prepare(rows, window))
            tokens = [token for row in rows for token in range(row.first, row.first + row.length)]
            assert torch.allclose(found[tokens], expected[tokens], rtol=0, atol=1e-5)
            long = [row.end for row in rows if row.length >= 3]
            assert len(calls) == (1 if most_keys > sum(long) else len(long)), "103, 40 and 62 keys"


def test_rows_between_the_long_ones_are_left_to_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine import attention_triton

    monkeypatch.setattr(attention_triton, "flash_supports", lambda *_: True)
    monkeypatch.setattr(attention_triton, "_FLASH_TOKENS", 29)
    monkeypatch.setattr(attention_triton, "_flash_forward", flash)
    config = shape(4, 2, 16)
    queries, keys, values, spans = paged(config, 16, torch.float32)
    kernel, plain = triton_attention(config, 16), FastAttention(16, len(keys) - 1, torch.float32, CPU)
    moved = [spans[i] for i in (4, 0, 5)]
    for window in (0, 7):
        prepared = kernel.prepare(moved, window)
        assert len(prepared.tiles) == 1 and len(prepared.flash) == 1
        found = kernel.attend(queries, keys, values, prepared)
        everything = plain.attend(queries, keys, values, plain.prepare(spans, window))
        for row in moved:
            part = slice(row.first, row.first + row.length)
            assert torch.allclose(found[part], everything[part], rtol=0, atol=1e-5)


def test_keys_of_a_long_chunk_are_not_split_and_keys_of_a_short_last_chunk_are() -> None:
    """Split results of 8,192 tokens at 131,072 would take 17 GB; 20 tokens there, not split, would be 24 programs."""
    kernel, blocks = triton_attention(shape(32, 8, 128), 16), tuple([0] * 8192)
    (tiles,) = kernel.prepare([RowSpan(0, 131_072 - 8192, 131_072, blocks)], 0).tiles
    assert tiles.splits == 1 and tiles.least_split > 131_072
    (tail,) = kernel.prepare([RowSpan(0, 131_072 - 20, 131_072, blocks)], 0).tiles
    assert len(tail.row) == 3 and tail.splits == 64
