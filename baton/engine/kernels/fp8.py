"""KV in FP8 (E4M3, scale 1) on CUDA, as bytes: the conversions of cpu/fp8.h, so that any GPU computes them.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_bytes(cache: Tensor) -> tuple[Tensor, bool]:
    """Returns a cache as kernels take it, and whether it is in FP8."""
    fp8 = cache.dtype == torch.float8_e4m3fn
    return (cache.view(torch.uint8) if fp8 else cache), fp8


@triton.jit
def narrow(x):
    """float32 to the code of the nearest number, ties to even; beyond 448 to 448. A NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    capped = tl.minimum(size, 0x43E00000)
    normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - 960
    # Beside 2^14 a float has steps of 2^-9, as subnormal numbers have.
    small = (capped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(capped < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def widen(code):
    """The number of a code, in float32; bfloat16 has all of them, too."""
    code = code.to(tl.int32)
    size = code & 0x7F
    normal = ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)
