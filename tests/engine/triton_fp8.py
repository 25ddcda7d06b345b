"""A kernel that only does the conversions of baton.engine.kernels.fp8."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.engine.kernels.fp8 import narrow, widen

NUMBERS = 1024  # of a program


@triton.jit
def convert(number_ptr, code_ptr, widened_ptr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    code = narrow(tl.load(number_ptr + at))
    tl.store(code_ptr + at, code)
    tl.store(widened_ptr + at, widen(code))
