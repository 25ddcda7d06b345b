"""Compiled linear layers from weights in MXFP4: the bits of the same weights dequantised, for any number of rows."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.build import BLOCK_LEVELS, processor_levels
from baton.engine.kernels.native import Arena, load, pack_mxfp4, pack_weight
from baton.engine.mxfp4 import dequantize
from tests.engine.single_kernels import ADD, FLOAT, STORE, SWIGLU

LEVELS = [level for level in processor_levels() if level not in BLOCK_LEVELS]
ROWS = (1, 2, 5, 12, 13, 25, 97)


def run(level: str, packed: tuple[Any, list[Tensor]], x: Tensor, into: int, width: int, threads: int = 1) -> Tensor:
    y = torch.ones((len(x), width), dtype=torch.float32 if into == FLOAT else x.dtype)
    load(level).linear(
        x.dtype == torch.bfloat16, ctypes.byref(packed[0]), x.data_ptr(), x.shape[1], len(x), y.data_ptr(), width, into,
        threads,
    )  # fmt: skip
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(32, 32), (40, 96), (333, 160), (64, 1536)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_products_are_those_of_the_dequantised_weights(level: str, n: int, k: int, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(n * k)
    blocks = torch.randint(0, 256, (n, k // 32, 16), generator=made, dtype=torch.uint8)
    scales = torch.randint(100, 140, (n, k // 32), generator=made, dtype=torch.uint8)
    scales[0, 0], scales[1, 0] = 0, 1  # their weights are subnormal
    bias = torch.randn(n, generator=made)
    packed = pack_mxfp4(load(level), Arena(), blocks, scales, bias)
    twin = pack_weight(load(level), Arena(), dequantize(blocks, scales).to(dtype), bias, dtype=dtype)
    x = torch.randn(max(ROWS), k, generator=made).to(dtype)
    for into in (STORE, ADD, FLOAT, *([SWIGLU] if n % 32 == 0 else [])):
        width = n // 2 if into == SWIGLU else n
        expected = run(level, twin, x, into, width)
        for rows in ROWS:
            for threads in (1, 2):
                assert torch.equal(run(level, packed, x[:rows].contiguous(), into, width, threads), expected[:rows])
