"""The sum over tensor-parallel ranks in fixed order, in Triton: one pass over memory, in float32, rounded once, like
the reference implementation in parallel.py. Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # of one program


def sum_by_rank(partials: Tensor) -> Tensor:
    """partials [ranks, ...], contiguous -> [...]: added up in float32 by rising rank, rounded once."""
    out = torch.empty_like(partials[0])
    count = out.numel()
    _sum_ranks[triton.cdiv(count, _ELEMENTS),](partials, out, count, RANKS=len(partials), ELEMENTS=_ELEMENTS)
    return out


@triton.jit(do_not_specialize=["count"])
def _sum_ranks(partials_ptr, out_ptr, count, RANKS: tl.constexpr, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    total = tl.load(partials_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(partials_ptr + rank * count + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
