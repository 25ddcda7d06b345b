"""Linear layers of exact mode on CUDA, in Triton: a row of the result has the same bits whatever other rows there are.

cuBLAS chooses tiles, the order of the sum, and how many programs share it by the number of rows. Here all three are
fixed: every program computes a tile of one size and adds up all inputs front to back, in float32; the bias is added
last, and the result is rounded once. The reference implementation, up to the order of the sum, is layers.PlainLinear.

Runs on CUDA; under TRITON_INTERPRET=1 also on CPU tensors, which is how it is tested without a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.weights import Projection

_TILE = (64, 64, 64)
"""Rows, outputs and inputs of a tile: the fewest rows that tensor cores of an H100 multiply at full rate."""
_TILE_FLOAT32 = (32, 32, 32)
"""Float32 products are computed in registers, which hold no more."""


class FixedLinear:
    """See layers.Linear: x @ weight.T + bias, for weight [outputs, inputs]."""

    def __init__(self, projection: Projection) -> None:
        self._weight, self._bias = projection.weight.contiguous(), projection.bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, outputs], in the dtype of x, which must be that of the weight."""
        outputs, inputs = self._weight.shape
        x = x.contiguous()
        out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
        rows, columns, depth = _TILE_FLOAT32 if x.dtype == torch.float32 else _TILE
        # Programs with the same weights follow each other, so that all but the first find them in the L2 cache.
        _linear[triton.cdiv(x.shape[0], rows), triton.cdiv(outputs, columns)](
            x, self._weight, self._bias, out, x.shape[0], outputs, inputs,
            WHOLE=inputs % depth == 0, ROWS=rows, COLUMNS=columns, DEPTH=depth,
        )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, tokens, outputs, inputs,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    is_row, is_column = row < tokens, column < outputs
    x_at = x_ptr + row.to(tl.int64)[:, None] * inputs + k[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[None, :] * inputs + k[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, inputs, DEPTH):
        x_there, weight_there = is_row[:, None], is_column[None, :]
        if not WHOLE:
            inside = at + k < inputs
            x_there, weight_there = x_there & inside[None, :], weight_there & inside[:, None]
        x = tl.load(x_at + at, mask=x_there, other=0.0)
        weight = tl.load(weight_at + at, mask=weight_there, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
