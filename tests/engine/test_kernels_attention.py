"""Compiled attention against a plain reference in float64, and against itself bit for bit: a query's result has the
same bits whatever else is in its step, row or tile."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.native import AttentionShape
from tests.engine.single_kernels import Row
from tests.engine.tiles import emulated_kind, load
from tests.support.engine_driver import bfloat16_levels, float32_levels

KINDS = [(level, torch.float32) for level in float32_levels()] + [
    (level, torch.bfloat16) for level in bfloat16_levels()
]
WIDENED = [(level, torch.bfloat16) for level in ("avx2", "avx512")]
kinds = pytest.mark.parametrize(("level", "dtype"), [*KINDS, emulated_kind], ids=str)


@dataclass
class Case:
    """Sequences in a pool whose other positions are NaN. `rows` are (sequence, start, end). `codes` are the pool in
    FP8, if attention is to read that instead."""

    dtype: torch.dtype
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    window: int = 0
    scale: float = 0.0
    lengths: tuple[int, ...] = (1, 15, 64, 65, 130, 333)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        blocks = [-(-length // self.block_size) for length in self.lengths]
        order = random.Random(2).sample(range(sum(blocks) + 3), sum(blocks))
        self.tables = torch.tensor(order).split(blocks)
        shape = (sum(blocks) + 3, self.block_size, self.kv_heads, self.head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2))
        self.queries = []
        for length, table in zip(self.lengths, self.tables, strict=True):
            self.queries.append(torch.randn(length, self.heads, self.head_dim, generator=generator).to(self.dtype))
            positions = torch.arange(length)
            where = (table[positions // self.block_size], positions % self.block_size)
            for pool in (self.keys, self.values):
                new = torch.randn(length, self.kv_heads, self.head_dim, generator=generator)
                pool[where] = new.to(self.dtype)
        self.codes: tuple[Tensor, ...] | None = None

    def expected(self, sequence: int) -> Tensor:
        """Returns the reference, [length, heads, head_dim] in float64."""
        length, table = self.lengths[sequence], self.tables[sequence]
        k, v = (pool[table].flatten(0, 1)[:length].double() for pool in (self.keys, self.values))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", self.queries[sequence].double(), k) * (self.scale or self.head_dim**-0.5)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = distance < 0
        if self.window:
            hidden |= distance >= self.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def attend(self, level: str, rows: list[tuple[int, int, int]], threads: int = 1) -> list[Tensor]:
        """Returns the output of each row [length, heads, head_dim]. Queries beyond a row's end are not passed."""
        queries = torch.cat([self.queries[s][start:end] for s, start, end in rows])
        packed = (Row * len(rows))()
        first = 0
        for row, (sequence, start, end) in zip(packed, rows, strict=True):
            row.first, row.start, row.length = first, start, end - start
            row.blocks = self.tables[sequence].data_ptr()
            first += end - start
        shape = AttentionShape(self.heads, self.kv_heads, self.head_dim, self.block_size, self.window, self.scale)
        width = self.heads * self.head_dim
        output = torch.full((first, width), torch.nan, dtype=self.dtype)
        pools = self.codes or (self.keys, self.values)
        addresses: tuple[Any, ...] = (*(pool.data_ptr() for pool in pools), output.data_ptr())
        load(level).attend(
            self.dtype == torch.bfloat16, self.codes is not None, ctypes.byref(shape), packed, len(rows),
            queries.data_ptr(), width, *addresses, width, threads,
        )  # fmt: skip
        parts = output.view(-1, self.heads, self.head_dim).split([end - start for _, start, end in rows])
        return list(parts)

    def whole(self) -> list[tuple[int, int, int]]:
        return [(s, 0, length) for s, length in enumerate(self.lengths)]


@cache
def whole_case(dtype: torch.dtype, **shape: Any) -> tuple[Case, list[Tensor]]:
    """A case that no test changes, and the reference of each sequence: made once for all levels."""
    case = Case(dtype, **shape)
    return case, [case.expected(sequence) for sequence in range(len(case.lengths))]


SHAPES: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"scale": 0.05},
    {"window": 50, "block_size": 32},
    {"window": 64},
    {"window": 200, "head_dim": 32},
    {"heads": 8, "kv_heads": 8, "head_dim": 80},
    {"heads": 8, "kv_heads": 1, "head_dim": 96},
    {"heads": 32, "kv_heads": 1, "head_dim": 128, "lengths": (70, 3)},
    {"heads": 6, "kv_heads": 3, "head_dim": 24, "block_size": 8},
    {"heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 1},
    {"heads": 2, "kv_heads": 1, "head_dim": 10, "block_size": 64, "window": 7},
    {"heads": 2, "kv_heads": 1, "head_dim": 256, "block_size": 128},
]
ODD: list[dict[str, Any]] = [
    {"heads": 3, "kv_heads": 1, "head_dim": 1},
    {"heads": 4, "kv_heads": 2, "head_dim": 3, "block_size": 1},
    {"heads": 2, "kv_heads": 2, "head_dim": 15, "window": 9},
    {"heads": 6, "kv_heads": 2, "head_dim": 33, "block_size": 8},
    {"heads": 5, "kv_heads": 1, "head_dim": 65},
]
"""Heads of odd size, which only factors of pairs of bf16 are padded for: not bf16 that is widened."""
CASES = [(*kind, shape) for kind in KINDS for shape in SHAPES]
CASES += [(*kind, shape) for kind in KINDS if kind not in WIDENED for shape in ODD]
cases = pytest.mark.parametrize(
    ("level", "dtype", "shape"),
    [*CASES, *(pytest.param(*emulated_kind.values, shape, marks=emulated_kind.marks) for shape in (*SHAPES, *ODD))],
    ids=str,
)


@cases
def test_attention_matches_the_float64_reference(level: str, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    case, references = whole_case(dtype, **shape)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for found, reference in zip(case.attend(level, case.whole()), references, strict=True):
        assert torch.allclose(found.double(), reference, rtol=tolerance, atol=tolerance)


@cases
def test_bits_do_not_depend_on_chunks_batch_or_threads(level: str, dtype: torch.dtype, shape: dict[str, Any]) -> None:
    case, _ = whole_case(dtype, **shape)
    whole = case.attend(level, case.whole())
    for chunk, threads in ((1, 1), (5, 1), (47, 1), (2, 3)):
        pieces: list[list[Tensor]] = [[] for _ in case.lengths]
        for start in range(0, max(case.lengths), chunk):
            rows = [(s, start, min(start + chunk, n)) for s, n in enumerate(case.lengths) if start < n]
            for (sequence, _, _), piece in zip(rows, case.attend(level, rows, threads), strict=True):
                pieces[sequence].append(piece)
        for sequence, expected in enumerate(whole):
            assert torch.equal(torch.cat(pieces[sequence]), expected), (chunk, sequence)
    last = len(case.lengths) - 1
    assert torch.equal(case.attend(level, [case.whole()[last]])[0], whole[last])
    assert all(map(torch.equal, case.attend(level, case.whole(), threads=3), whole))


@kinds
@pytest.mark.parametrize(("step", "tolerance"), [(0.1875, 2e-6), (0.2, 2e-4)])
def test_equal_and_widely_spread_scores_match_the_reference(
    level: str, dtype: torch.dtype, step: float, tolerance: float
) -> None:
    """The first 150 keys are equal; then the running maximum rises by much.

    With steps of 3/16 every score is exact in float32, so nothing may be lost. With steps of 0.2 a product has 64
    roundings of a sum that grows to 1,900, each by up to 2^-24 of it: up to 3.7e-3 in all, an eighth of that, 4.6e-4,
    in the score, and as much in the weight, its exponential. A plain loop in float32 errs by 2e-4 here.
    """
    case = Case(dtype, lengths=(300,))
    for position in range(300):
        where = (case.tables[0][position // 16], position % 16)
        case.keys[where] = 0.0 if position < 150 else step * (position - 150)
    case.queries[0][:] = 1.0
    found = case.attend(level, case.whole())[0]
    if dtype == torch.bfloat16:
        tolerance = 2e-2
    assert torch.allclose(found.double(), case.expected(0), rtol=tolerance, atol=tolerance)
