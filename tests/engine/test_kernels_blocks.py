"""Compiled linear layers from weights in blocks: the bits of the same weights in bf16, for any number of rows."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from baton.engine.blocks import Blocks, stacked
from baton.engine.kernels.native import Arena, pack_blocks, pack_weight
from tests.engine.single_kernels import ADD, FLOAT, STORE, SWIGLU
from tests.engine.tiles import EMULATED, load, needs_emulation
from tests.support.engine_driver import bfloat16_levels

LEVELS = [level for level in bfloat16_levels() if load(level).computes_blocks]
levels = pytest.mark.parametrize("level", [*LEVELS, pytest.param(EMULATED, marks=needs_emulation)])
sizes = pytest.mark.parametrize(("n", "k"), [(32, 32), (40, 96), (333, 64), (64, 1536)], ids=str)
ROWS = (1, 2, 3, 7, 11, 12, 13, 16, 24, 31, 32, 33, 50, 100)
KINDS = ("4 bits", "4 bits, wide", "8 bits")


def blocks(kind: str, n: int, k: int) -> Blocks:
    made = torch.Generator().manual_seed(n * k)
    scales = torch.rand(n, k // 32, generator=made) * 0.01 + 1e-4
    if kind == "8 bits":
        codes = torch.randint(-128, 128, (n, k), generator=made, dtype=torch.int8)
        return Blocks(codes, scales.half().float())
    codes = torch.randint(0, 16, (n, k), generator=made, dtype=torch.uint8)
    scales, minima = scales.half().float(), -(torch.rand(n, k // 32, generator=made) * 0.1).half().float()
    if kind == "4 bits, wide":  # as Q4_K: a scale of 6 bits times one in float16
        sixths = torch.randint(1, 64, (2, n, k // 32), generator=made)
        scales, minima = scales / 32 * sixths[0], minima / 32 * sixths[1]
    return Blocks(codes, scales, minima)


def run(level: str, made: tuple[object, list[Tensor]], x: Tensor, into: int, width: int, threads: int = 1) -> Tensor:
    y = torch.ones((len(x), width), dtype=torch.float32 if into == FLOAT else torch.bfloat16)
    load(level).linear(
        True, ctypes.byref(made[0]), x.data_ptr(), x.shape[1], len(x), y.data_ptr(), width, into, threads
    )  # type: ignore[arg-type]
    return y


@levels
@sizes
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_same_weights_in_bf16(level: str, n: int, k: int, kind: str) -> None:
    given = blocks(kind, n, k)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = given.dequantized().bfloat16()
    packed = pack_blocks(load(level), Arena(), given, bias)
    twin = pack_weight(load(level), Arena(), weight, bias, dtype=torch.bfloat16)
    assert packed[1][0].numel() < 0.6 * twin[1][0].numel()
    x = torch.randn(max(ROWS), k, generator=torch.Generator().manual_seed(2)).bfloat16()
    for into in (STORE, ADD, FLOAT, *([SWIGLU] if n % 32 == 0 else [])):
        width = n // 2 if into == SWIGLU else n
        expected = run(level, twin, x, into, width)
        for rows in ROWS:
            for threads in (1, 2):
                assert torch.equal(run(level, packed, x[:rows].contiguous(), into, width, threads), expected[:rows])


def test_dequantized_blocks_are_exact() -> None:
    for kind in KINDS:
        given = blocks(kind, 40, 96)
        weight = given.dequantized()
        row, column = 17, 70
        expected = given.codes[row, column].double() * given.scales[row, column // 32].double()
        if given.minima is not None:
            expected += given.minima[row, column // 32].double()
        assert weight[row, column] == expected.float()


def test_parts_of_one_kind_are_stacked() -> None:
    four, eight = blocks("4 bits", 32, 64), blocks("8 bits", 40, 64)
    assert stacked([four, eight]) is None
    both = stacked([four, blocks("4 bits, wide", 40, 64)])
    assert both is not None and both.codes.shape == (72, 64)
    assert torch.equal(both.each(lambda rows: rows[:32]).dequantized(), four.dequantized())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        Blocks(torch.zeros(1, 32, dtype=torch.int8), torch.full((1, 1), value))
