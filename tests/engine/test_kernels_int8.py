"""Products of 8-bit blocks and activations in 8 bits: the bits of a plain twin, for any number of rows, on any core."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.blocks import BLOCK, Blocks
from baton.engine.kernels.native import Arena, Linear, pack_blocks
from tests.engine.single_kernels import ADD, FLOAT, STORE, SWIGLU
from tests.engine.test_borrowed_cores import borrowing, until
from tests.engine.tiles import EMULATED, load, needs_emulation
from tests.support.engine_driver import bfloat16_levels

LEVELS = [level for level in bfloat16_levels() if load(level).computes_int8_activations]
pytestmark = pytest.mark.skipif(not LEVELS, reason="no processor with avx512_vnni and bf16 products")
levels = pytest.mark.parametrize("level", LEVELS)
sizes = pytest.mark.parametrize(("n", "k"), [(32, 32), (40, 96), (333, 64), (96, 1536)], ids=str)
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 31, 49, 100)


def blocks(n: int, k: int) -> Blocks:
    made = torch.Generator().manual_seed(n * k)
    scales = torch.rand(n, k // BLOCK, generator=made) * 0.01 + 1e-4
    return Blocks(torch.randint(-128, 128, (n, k), generator=made, dtype=torch.int8), scales.half().float())


def activations(rows: int, k: int) -> Tensor:
    """Blocks of different sizes, one of zeros, one with a tie, and one whose largest values are its ends."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k))
    x *= torch.logspace(-3, 3, rows)[:, None]
    x[0, :BLOCK] = 0
    x[1, :BLOCK] = torch.arange(BLOCK) - 15.5
    x[2, :BLOCK] = -127.0
    x[2, 1], x[2, 2] = 0.5, 1.5
    return x.bfloat16()


def twin(weights: Blocks, x: Tensor) -> Tensor:
    """The sums [rows, n] as gemm_int8.h defines them. Products of codes are integers below 2^20, exact in float32."""
    n, k = weights.codes.shape
    values = x.float().view(len(x), k // BLOCK, BLOCK)
    largest = values.abs().amax(2)
    # torch multiplies a scalar by the reciprocal, which rounds twice.
    steps = torch.where(largest >= 2.0**-100, torch.full_like(largest, 127.0) / largest, 0.0)
    codes, scales = (values * steps[:, :, None]).round(), largest / 127
    sums = torch.zeros(len(x), n)
    for block in range(k // BLOCK):
        integers = codes[:, block] @ weights.codes.float().view(n, -1, BLOCK)[:, block].T
        sums += integers * (weights.scales[:, block] * scales[:, block, None])
    return sums


def run(level: str, layer: Linear, x: Tensor, into: int, width: int, threads: int = 1) -> Tensor:
    y = torch.ones((len(x), width), dtype=torch.float32 if into == FLOAT else torch.bfloat16)
    addresses = (x.data_ptr(), x.shape[1], len(x), y.data_ptr(), width)
    load(level).linear(True, ctypes.byref(layer), *addresses, into, threads)
    return y


@levels
@sizes
def test_products_have_the_bits_of_the_twin_for_any_number_of_rows(level: str, n: int, k: int) -> None:
    kernels, weights = load(level), blocks(n, k)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer, _kept = pack_blocks(kernels, Arena(), weights, bias, int8_activations=True)
    x, before = activations(max(ROWS), k), kernels.int8_linears()
    sums = twin(weights, x) + bias.float()
    expected = {FLOAT: sums, STORE: sums.bfloat16(), ADD: (sums + 1).bfloat16()}
    if n % 32 == 0:  # compared with itself: the twin does not compute SiLU
        expected[SWIGLU] = run(level, layer, x, SWIGLU, n // 2)
        both = sums.view(len(x), -1, 2, 16)
        near = (F.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)
        assert ((expected[SWIGLU].float() - near).norm(dim=1) <= 0.01 * near.norm(dim=1)).all()
    for into, of_all in expected.items():
        for rows in ROWS:
            for first in {0, 1, max(ROWS) - rows} & set(range(max(ROWS) - rows + 1)):
                part = x[first : first + rows].contiguous()
                for threads in (1, 2):
                    found = run(level, layer, part, into, of_all.shape[1], threads)
                    assert torch.equal(found, of_all[first : first + rows]), (into, rows, first, threads)
    assert kernels.int8_linears() - before >= len(ROWS) * len(expected)


@levels
def test_helpers_on_borrowed_cores_compute_the_same_bits(level: str) -> None:
    kernels, weights = load(level), blocks(1344, 96)
    layer, _kept = pack_blocks(kernels, Arena(), weights, None, int8_activations=True)
    rows = {count: activations(max(count, 3), 96)[:count].contiguous() for count in (1, 7, 33, 100)}
    alone = {count: twin(weights, x) for count, x in rows.items()}

    def same() -> None:
        for count, x in rows.items():
            assert torch.equal(run(level, layer, x, FLOAT, 1344), alone[count])

    with borrowing(kernels):
        until(lambda: kernels.borrowed()[0] >= 20, same)


@levels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_gives_no_number_and_changes_no_other_row(level: str, value: float) -> None:
    weights, x = blocks(32, 64), activations(9, 64)
    layer, _kept = pack_blocks(load(level), Arena(), weights, None, int8_activations=True)
    expected = twin(weights, x)
    x[4, 40] = value
    found = run(level, layer, x, FLOAT, 32)
    assert not found[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], expected[others])


@levels
def test_the_error_is_that_of_rounding_to_127_steps(level: str) -> None:
    """Of random values the error of a step of largest / 127 is largest / 440 (1 / sqrt(12) of a step)."""
    weights = blocks(64, 1536)
    x = torch.randn(50, 1536, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer, _kept = pack_blocks(load(level), Arena(), weights, None, int8_activations=True)
    found = run(level, layer, x, FLOAT, 64).double()
    exact = x.double() @ weights.dequantized().double().T
    error = (found - exact).norm() / exact.norm()
    assert 0.003 < error < 0.008


@pytest.mark.parametrize("level", ["avx2", "avx512", pytest.param(EMULATED, marks=needs_emulation)])
def test_other_levels_say_that_they_have_no_such_products(level: str) -> None:
    if level != EMULATED and level not in bfloat16_levels():
        pytest.skip(f"no {level}")
    assert not load(level).computes_int8_activations
