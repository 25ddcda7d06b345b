"""MXFP4 of the Open Compute Project (Microscaling Formats 1.0, 2023), as gpt-oss stores its experts."""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, b, 16] and scales [..., n, b], both in uint8 -> [..., n, 32 b] in bfloat16, exact.

    A byte holds two values of E2M1, the lower bits first; they are multiplied by 2^(scale - 127). Raises ValueError for
    other shapes or dtypes, and for the scale 255, which stands for NaN.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"MXFP4 blocks and scales must be uint8, not {blocks.dtype} and {scales.dtype}")
    if blocks.shape != (*scales.shape, 16):
        raise ValueError(f"MXFP4 blocks {list(blocks.shape)} do not fit scales {list(scales.shape)}")
    if (scales == 255).any():
        raise ValueError("a scale of MXFP4 blocks is NaN")
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = (scales.int() - _BIAS)[..., None]
    return torch.ldexp(values[codes.int()], exponents).flatten(-2)
