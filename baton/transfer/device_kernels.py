"""Triton kernels for hand-overs with buffers on a GPU. With TRITON_INTERPRET=1 they also run on CPU tensors."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_BLOCKS = 8  # per program: fewer atomic additions


def add_mixed_words(words: Tensor, out: Tensor, golden: int, mix_1: int, mix_2: int) -> None:
    """Adds the mixed words (int32 [n]) to `out`, int64 [1]; sections.py has the constants and a plain torch version."""
    count = words.numel()
    _mix[triton.cdiv(count, _BLOCK * _BLOCKS),](
        words, out, count, GOLDEN=golden, MIX_1=mix_1, MIX_2=mix_2, BLOCK=_BLOCK, BLOCKS=_BLOCKS
    )


@triton.jit(do_not_specialize=["words_ptr", "out_ptr", "count"])
def _mix(
    words_ptr, out_ptr, count,
    GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK], tl.int64)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    for block in range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        z = tl.load(words_ptr + at, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
        z += (at + 1) * GOLDEN
        z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
        z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
        z = z ^ ((z >> 31) & 0x1FFFFFFFF)
        total += tl.where(inside, z, 0)
    tl.atomic_add(out_ptr, tl.sum(total, 0), sem="relaxed")
