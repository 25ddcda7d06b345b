"""In lockstep, programs compute what Triton's interpreter computes one program after another, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
import triton.language as tl

from tests.support import exact_kernels
from tests.support.interpreter import lockstep, ordered_products

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU kernels are compiled"),
    pytest.mark.timeout(600),  # Triton's own way takes seconds, and starves on a busy machine
]
CPU = torch.device("cpu")
NAMES = ("linear", "add_norm", "sum_ranks", "silu_mul", "rotate_and_store", "attend", "attend, window of 20")
IN_FLOAT32 = ("linear", "sum_ranks", "rotate_and_store", "attend")
"""What `make test` computes in float32, and the others in bfloat16."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (dtype == torch.float32) == (name in IN_FLOAT32) else pytest.mark.long)
        for name in NAMES
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_kernels_have_the_bits_of_tritons_interpreter(name: str, dtype: torch.dtype) -> None:
    kernel = exact_kernels.kernels(dtype, CPU)[name]
    with ordered_products():
        expected = kernel(105, 131)
    with lockstep():
        assert torch.equal(kernel(105, 131), expected)


@triton.jit
def _sum_rows(x_ptr, length_ptr, out_ptr, count_ptr, total_ptr, WIDTH: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two programs for each row, whose number of elements is its own; the last of the two adds their results."""
    row, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + row)
    total = tl.zeros([STEP], tl.float32)
    for at in range(0, length, STEP):
        index = at + tl.arange(0, STEP)
        total += tl.load(x_ptr + row * WIDTH + index, mask=index < length, other=0.0) * (part + 1)
    whole = tl.sum(total, 0)
    if length % 2 == 1:
        whole = -whole
    tl.store(out_ptr + row * 2 + part, whole)
    arrived = tl.atomic_add(count_ptr + row, 1)
    if arrived == 1:
        tl.store(total_ptr + row, tl.load(out_ptr + row * 2) + tl.load(out_ptr + row * 2 + 1))


def test_programs_that_branch_and_loop_differently_are_divided() -> None:
    x = exact_kernels.fractions(9, 40)
    lengths = torch.tensor([0, 1, 4, 5, 8, 39, 40, 5, 0], dtype=torch.int32)

    def launch(interpreting: Callable[[], AbstractContextManager[None]]) -> tuple[Tensor, Tensor, Tensor]:
        out, totals, counts = torch.full((9, 2), 7.0), torch.full((9,), 7.0), torch.zeros(9, dtype=torch.int32)
        with interpreting():
            _sum_rows[9, 2](x, lengths, out, counts, totals, WIDTH=40, STEP=4)
        return out, totals, counts

    for computed, expected in zip(launch(lockstep), launch(ordered_products), strict=True):
        assert torch.equal(computed, expected)
    assert launch(lockstep)[2].tolist() == [2] * 9


def test_an_operation_whose_axes_would_be_off_by_one_is_refused() -> None:
    with lockstep():
        for _ in range(2):  # what was recorded before it is not repeated as if it were the whole kernel
            with pytest.raises(Exception, match="an operation that lockstep does not interpret"):
                _concatenate[(1,)](torch.zeros(8))


@triton.jit
def _concatenate(x_ptr):  # type: ignore[no-untyped-def]
    x = tl.load(x_ptr + tl.arange(0, 4))
    tl.store(x_ptr + tl.arange(0, 8), tl.cat(x, x, can_reorder=True))
