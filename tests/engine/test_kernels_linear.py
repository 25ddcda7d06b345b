"""Compiled linear layers against float64, at every level and for every kind of output; a row alone has equal bits."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.native import Arena, pack_weight, padded
from baton.engine.quantize import quantize
from tests.engine.single_kernels import ADD, FLOAT, STORE, SWIGLU
from tests.engine.tiles import emulated_kind, load
from tests.support.engine_driver import bfloat16_levels, float32_levels

KINDS = [(level, torch.float32) for level in float32_levels()] + [
    (level, torch.bfloat16) for level in bfloat16_levels()
]
kinds = pytest.mark.parametrize(("level", "dtype"), [*KINDS, emulated_kind], ids=str)
sizes = pytest.mark.parametrize(("n", "k"), [(32, 32), (40, 24), (333, 100), (64, 1536), (40, 1300)], ids=str)
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 31, 32, 33, 50, 100)


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Layer:
    def __init__(self, level: str, weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> None:
        self.kernels, self.dtype = load(level), weight.dtype
        steps, scale = quantize(weight) if int8 else (weight, None)
        self.layer, self.tensors = pack_weight(self.kernels, Arena(), steps, bias, scale, dtype=weight.dtype)

    def __call__(self, x: Tensor, into: int = STORE, y: Tensor | None = None, threads: int = 1) -> Tensor:
        rows, k = x.shape
        n = self.layer.n
        x = F.pad(x, (0, padded(k, self.dtype) - k)).contiguous()
        if y is None:
            width = n // 2 if into == SWIGLU else n
            y = torch.full((rows, width), torch.nan, dtype=torch.float32 if into == FLOAT else self.dtype)
        layer = ctypes.byref(self.layer)
        is_bf16 = self.dtype == torch.bfloat16
        addresses = (x.data_ptr(), x.shape[1], rows, y.data_ptr(), y.shape[1])
        self.kernels.linear(is_bf16, layer, *addresses, into, threads)
        return y


def close(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-2
    return torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance * 10)


@kinds
@sizes
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layer_matches_the_float64_product(level: str, dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    weight, b = (randn(n, k) * k**-0.5).to(dtype), randn(n, seed=1).to(dtype) if bias else None
    layer = Layer(level, weight, b)
    for rows in ROWS:
        x = randn(rows, k, seed=rows).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert close(layer(x), expected)
        assert torch.allclose(layer(x, FLOAT).double(), expected, rtol=0, atol=1e-5)
        before = randn(rows, n, seed=7).to(dtype)
        assert close(layer(x, ADD, before.clone()), before.double() + expected)


@kinds
@pytest.mark.parametrize("bias", [False, True])
def test_swiglu_output_matches_float64(level: str, dtype: torch.dtype, bias: bool) -> None:
    weight, b = (randn(96, 100) * 0.3).to(dtype), randn(96, seed=1).to(dtype) if bias else None
    layer = Layer(level, weight, b)
    for rows in ROWS:
        x = randn(rows, 100, seed=rows).to(dtype)
        both = F.linear(x.double(), weight.double(), None if b is None else b.double()).view(rows, 3, 2, 16)
        expected = (F.silu(both[:, :, 0]) * both[:, :, 1]).flatten(1)
        assert close(layer(x, SWIGLU), expected)


@kinds
def test_swiglu_is_accurate_for_very_large_and_very_small_gates(level: str, dtype: torch.dtype) -> None:
    layer = Layer(level, torch.eye(32).to(dtype))
    gates = torch.tensor([-1e4, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4])
    x = torch.zeros(1, 32).to(dtype)
    x[0, :8], x[0, 16:24] = gates, 1.0
    found = layer(x, SWIGLU)[0]
    assert torch.allclose(found[:8].double(), F.silu(gates.to(dtype).double()), rtol=1e-2, atol=1e-30)
    assert torch.equal(found[8:], torch.zeros(8).to(dtype))


@kinds
@sizes
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_threads(
    level: str, dtype: torch.dtype, n: int, k: int, int8: bool
) -> None:
    layer = Layer(level, randn(n, k).to(dtype), int8=int8)
    x = randn(100, k).to(dtype)
    whole = layer(x, FLOAT)
    assert torch.equal(layer(x, FLOAT, threads=3), whole)
    for rows in ROWS:
        for first in (0, 7, 100 - rows):
            if first + rows <= 100:
                assert torch.equal(layer(x[first : first + rows], FLOAT), whole[first : first + rows])


@kinds
def test_int8_is_the_nearest_of_255_steps_per_output(level: str, dtype: torch.dtype) -> None:
    weight = randn(40, 100).to(dtype)
    weight[3] = 0.0
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / 127  # in float32, as ties are decided there
    rounded = (weight.float() / scale).round().double() * scale.double()
    layer = Layer(level, weight, int8=True)
    x = randn(33, 100).to(dtype)
    assert torch.allclose(layer(x, FLOAT).double(), F.linear(x.double(), rounded), rtol=0, atol=1e-4)
    assert torch.equal(layer(x, FLOAT)[:, 3], torch.zeros(33))


@pytest.mark.parametrize("level", bfloat16_levels())
def test_bfloat16_is_rounded_to_nearest_even_and_nan_is_kept(level: str) -> None:
    layer = Layer(level, torch.eye(32).bfloat16())
    x, before = (randn(50, 32, seed=seed).bfloat16() for seed in (1, 2))
    before[:, :8] = 1.0
    x[:, :8] = torch.tensor([1, 3, -1, 5, 1.01, 0.99, -3, 7]).bfloat16() / 256  # ties, and near ties
    before[3, 9], before[4, 10], before[5, 11] = torch.nan, torch.inf, 3.38e38
    x[5, 11] = 3.38e38
    before.view(torch.int16)[6, 12] = -1  # a NaN with all bits set: rounding would carry over to zero
    expected = (before.float() + x.float()).bfloat16()
    found = layer(x, ADD, before.clone())
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isnan().sum() == 2
