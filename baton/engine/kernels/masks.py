"""Masks the tokens that grammars do not allow, for all rows of a step in one kernel, from packed bits that reach the
device in one copy; the reference implementation is processors.apply_masks.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.device_stream import to_device
from baton.engine.grammar_automaton import Bits

_TOKENS = 4096  # of a row per program


def mask_rows(logits: Tensor, masks: Sequence[tuple[int, Bits]]) -> None:
    """Implements processors.ApplyMasks, for logits float32 [S, vocab], contiguous."""
    vocab = logits.shape[1]
    # A line for each mask: the number of its row in 8 bytes, then its bits, to a multiple of 8 bytes.
    size = 8 + -(-vocab // 64) * 8
    packed = np.zeros((len(masks), size), dtype=np.uint8)
    packed[:, :8].view(np.int64)[:, 0] = [row for row, _ in masks]
    for line, (_, bits) in zip(packed, masks, strict=True):
        used = bits[: -(-vocab // 8)]
        line[8 : 8 + len(used)] = used
    lines = to_device(torch.from_numpy(packed), logits.device)
    _mask_rows[len(masks), triton.cdiv(vocab, _TOKENS)](
        logits, lines, lines.view(torch.int64), logits.stride(0), vocab, size, TOKENS=_TOKENS
    )


@triton.jit(do_not_specialize=["logits_ptr", "stride", "vocab", "size"])
def _mask_rows(logits_ptr, line_ptr, row_ptr, stride, vocab, size, TOKENS: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + line * (size // 8))
    at = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = at < vocab
    byte = tl.load(line_ptr + line * size + 8 + at // 8, mask=inside, other=255).to(tl.int32)
    banned = ((byte >> (at % 8)) & 1) == 0
    tl.store(logits_ptr + row * stride + at, float("-inf"), mask=inside & banned)
