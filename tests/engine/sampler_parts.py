"""Parts of the GPU sampler as kernels of their own, for tests; run as a program, it prints the PTX of the search."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.engine.kernels.sampling import _noise32, _search

BLOCK = 2048


def noise32(words: Tensor) -> Tensor:
    """words int64 [n], n a multiple of BLOCK."""
    found = torch.empty(len(words), dtype=torch.float32)
    _noise[len(words) // BLOCK,](words, found, SIZE=BLOCK)
    return found


@triton.jit
def _noise(word_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, _noise32(tl.load(word_ptr + at)))


@triton.jit
def _only_search(row_ptr, out_ptr, vocab, low, high, bound, peak, temperature, WEIGHTS: tl.constexpr):
    tl.store(out_ptr, _search(row_ptr, vocab, low, high, bound, peak, temperature, WEIGHTS, 2048))


def search_ptx(weights: bool) -> str:
    signature = {"row_ptr": "*fp32", "out_ptr": "*i64", "vocab": "i32", "low": "i64", "high": "i64"}
    signature |= {"bound": "fp32", "peak": "fp32", "temperature": "fp32", "WEIGHTS": "constexpr"}
    source = ASTSource(_only_search, signature, constexprs={(8,): weights})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    return str(compiled.asm["ptx"])


if __name__ == "__main__":
    print(search_ptx(weights=True), search_ptx(weights=False))
