"""Attention of few queries in bf16 has the same bits as that of many, which is computed in tiles. Tested with products
of pairs, with emulated AMX tiles, and with the processor's own if it has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels import native
from baton.engine.kernels.build import can_compile, processor_levels
from baton.engine.kernels.native import choose_kernels
from tests.engine.test_kernels_attention import Case
from tests.engine.tiles import EMULATED, OTHER_ORDER, load, needs_emulation, products
from tests.support.engine_driver import bfloat16_levels

CPU = torch.device("cpu")
needs_amx = pytest.mark.skipif("amx" not in processor_levels(), reason="no AMX")
BY_AMX = [pytest.param(EMULATED, marks=needs_emulation), pytest.param("amx", marks=needs_amx)]
levels = pytest.mark.parametrize("level", BY_AMX)
needs_pairs = pytest.mark.skipif("avx512_bf16" not in processor_levels(), reason="no avx512_bf16")
pair_levels = pytest.mark.parametrize("level", [pytest.param("avx512_bf16", marks=needs_pairs), *BY_AMX])
SHAPES: list[dict[str, Any]] = [
    {},  # 3 columns a token
    {"heads": 6, "kv_heads": 1, "window": 70},
    {"heads": 7, "kv_heads": 1},
    {"heads": 4, "kv_heads": 4, "head_dim": 80, "window": 1},
    {"heads": 2, "kv_heads": 1, "head_dim": 33, "block_size": 8},
    {"heads": 3, "kv_heads": 3, "head_dim": 3, "block_size": 1},
    {"heads": 6, "kv_heads": 2, "head_dim": 15, "window": 9},
    {"heads": 4, "kv_heads": 1, "head_dim": 65},
    {"heads": 5, "kv_heads": 1, "head_dim": 128},
]


def in_pieces(case: Case, level: str, tokens: int) -> Tensor:
    """Returns the output of a case's only sequence, computed in rows of `tokens` tokens."""
    (length,) = case.lengths
    starts = range(0, length, tokens)
    return torch.cat([case.attend(level, [(0, start, min(start + tokens, length))])[0] for start in starts])


def ordinary(case: Case) -> None:
    """Leaves the numbers unchanged."""


def subnormal(case: Case) -> None:
    """Makes values and products small, some of them subnormal, which tiles treat as zero."""
    case.values *= 2.0**-121
    case.keys[..., ::3] *= 2.0**-60
    for queries in case.queries:
        queries[..., ::3] *= 2.0**-70


def scores_that_cancel(case: Case) -> None:
    """Makes scores cancel: only rounding errors remain, and another order of summation changes most of them."""
    half = case.head_dim // 2
    case.keys *= torch.where(torch.arange(case.head_dim) % 5 < 3, 1024.0, 1.0).bfloat16()
    case.keys[..., half:] = -case.keys[..., :-half].flip(-1)
    for queries in case.queries:
        queries *= 1024.0
        queries[..., half:] = queries[..., :-half].flip(-1)


def values_that_cancel(case: Case) -> None:
    """Makes sums over keys cancel, in groups of 8 keys of equal weight."""
    case.queries[0][:] = 0.0
    exponents = torch.randint(-11, 12, case.values.shape, generator=torch.Generator().manual_seed(3))
    case.values = torch.ldexp(case.values.float(), exponents).bfloat16()
    values = case.values.flatten(0, 1)
    positions = case.tables[0][:, None] * case.block_size + torch.arange(case.block_size)
    groups = positions.flatten()[: case.lengths[0] // 8 * 8].view(-1, 8)
    values[groups[:, 4:]] = -values[groups[:, :4].flip(1)]


NUMBERS = {numbers.__name__: numbers for numbers in (ordinary, subnormal, scores_that_cancel, values_that_cancel)}


@pair_levels
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_few_queries_have_the_same_bits_as_with_tiles(level: str, shape: dict[str, Any], numbers: str) -> None:
    case = Case(torch.bfloat16, lengths=(150,), **shape)
    NUMBERS[numbers](case)
    whole = in_pieces(case, level, 150)
    assert whole.isfinite().all() and whole.count_nonzero() > whole.numel() / 2
    for tokens in (1, 2, 3):
        assert torch.equal(in_pieces(case, level, tokens), whole), tokens


@needs_emulation
@pytest.mark.parametrize(("heads", "tokens", "in_tiles"), [(1, 6, False), (3, 2, False), (7, 1, True), (2, 4, True)])
def test_up_to_six_columns_are_computed_without_tiles(heads: int, tokens: int, in_tiles: bool) -> None:
    case = Case(torch.bfloat16, heads=heads, kv_heads=1, lengths=(100,))
    before = products(load(EMULATED))
    case.attend(EMULATED, [(0, 100 - tokens, 100)])
    assert (products(load(EMULATED)) > before) == in_tiles


@pytest.mark.parametrize("level", [*bfloat16_levels(), pytest.param(EMULATED, marks=needs_emulation)])
@pytest.mark.parametrize("tokens", [1, 2, 150])
@pytest.mark.parametrize("head_dim", [16, 66])
def test_of_numbers_near_the_smallest_only_subnormal_ones_are_lost(level: str, tokens: int, head_dim: int) -> None:
    """A value or a running sum that is subnormal counts as zero where pairs are multiplied."""
    case = Case(torch.bfloat16, lengths=(150,), head_dim=head_dim)
    subnormal(case)
    case.values *= 2.0**3
    expected, smallest = case.expected(0), 2.0**-126
    error = (in_pieces(case, level, tokens).double() - expected).abs()
    assert expected.abs().median() > 16 * smallest
    assert (error <= 2**-6 * expected.abs() + 6 * smallest).all()


@pair_levels
def test_attention_leaves_subnormal_numbers_enabled(level: str) -> None:
    smallest = float("5e-324")
    Case(torch.bfloat16, lengths=(10,)).attend(level, [(0, 9, 10)])
    assert smallest * float("1") > 0.0


@levels
def test_load_check_finds_that_tiles_sum_in_the_documented_order(level: str) -> None:
    """If this fails on a processor with AMX, attention of few queries is slow there: please report it."""
    assert load(level).few_rows_match
    assert load(level).name == "amx"


@needs_amx
@pytest.mark.skipif(not can_compile("amx"), reason="no compiler")
def test_emulated_tiles_have_the_bits_of_the_processor() -> None:
    for numbers in NUMBERS.values():
        case = Case(torch.bfloat16, lengths=(150,))
        numbers(case)
        assert torch.equal(in_pieces(case, "amx", 150), in_pieces(case, EMULATED, 150))


@needs_emulation
def test_few_queries_use_tiles_that_sum_in_another_order_and_the_name_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = load(OTHER_ORDER)
    assert not kernels.few_rows_match
    case = Case(torch.bfloat16, lengths=(150,))
    before = products(kernels)
    assert torch.equal(in_pieces(case, OTHER_ORDER, 1), in_pieces(case, OTHER_ORDER, 150))
    assert products(kernels) > before
    monkeypatch.setattr(native, "load", lambda level: kernels)
    name = "amx (tiles also for few queries: vectors sum in another order on this processor)"
    assert choose_kernels("amx", CPU) == (kernels, name)
