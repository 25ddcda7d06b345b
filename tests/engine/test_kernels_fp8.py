"""KV in FP8 in the compiled kernels: the same numbers as torch's, and attention with the bits that it has over a pool
of the rounded numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.single_kernels import fp8
from tests.engine.test_kernels_attention import SHAPES, Case, kinds
from tests.engine.tiles import load

FP8 = torch.float8_e4m3fn


def every_number(dtype: torch.dtype) -> Tensor:
    """Every number of bfloat16, and with float32 those beside them and between."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if dtype == torch.bfloat16:
        return numbers
    bits = numbers.float().view(torch.int32)
    return torch.cat([(bits + offset).view(torch.float32) for offset in (-1, 0, 1, 0x8000)])


@kinds
def test_numbers_are_rounded_and_widened_as_by_torch(level: str, dtype: torch.dtype) -> None:
    numbers = every_number(dtype)
    codes, widened = torch.empty(len(numbers), dtype=FP8), torch.empty_like(numbers)
    addresses = (numbers.data_ptr(), len(numbers), codes.data_ptr(), widened.data_ptr())
    fp8(load(level), dtype == torch.bfloat16, *addresses)
    expected = numbers.clamp(-448, 448).to(FP8)
    nan = numbers.isnan()
    assert torch.equal(codes.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])
    assert widened[nan].isnan().all() and torch.equal(widened[~nan], expected[~nan].to(dtype))
    assert widened[~nan].abs().max() == 448 and len(widened[~nan].unique()) == 253, "all that E4M3 has"


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_fp8_has_the_bits_of_the_widened_pool(
    level: str, dtype: torch.dtype, shape: dict[str, Any]
) -> None:
    case = Case(dtype, **shape)
    codes = tuple(pool.to(FP8) for pool in (case.keys, case.values))
    case.keys, case.values = (pool.to(dtype) for pool in codes)
    decode = [(s, length - 1, length) for s, length in enumerate(case.lengths)]
    verify = [(s, max(length - 5, 0), length) for s, length in enumerate(case.lengths)]
    for rows, threads in ((case.whole(), 1), (case.whole(), 3), (decode, 1), (decode, 2), (verify, 1)):
        case.codes = None
        expected = case.attend(level, rows, threads)
        case.codes = codes
        found = case.attend(level, rows, threads)
        assert all(map(torch.equal, found, expected)), (rows, threads)
        assert not any(part.isnan().any() for part in found)
