"""MXFP4 of the Open Compute Project (Microscaling Formats 1.0, 2023), as gpt-oss stores its experts."""

from __future__ import annotations

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
INPUTS = 32  # of a block


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, b, 16] and scales [..., n, b], both in uint8 -> [..., n, 32 b] in bfloat16, exact.

    A byte holds two values of E2M1, the lower bits first; they are multiplied by 2^(scale - 127). Raises ValueError for
    other shapes or dtypes, and for the scale 255, which stands for NaN.
    """
    _check(blocks, scales)
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
    exponents = (scales.int() - _BIAS)[..., None]
    return torch.ldexp(values[_codes(blocks)], exponents).flatten(-2)


def in_steps(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The same weights as steps [..., n, 32 b] in int8 and scales [..., n, b] in float32: their products are exact."""
    _check(blocks, scales)
    steps = torch.tensor([int(2 * sign * value) for sign in (1, -1) for value in _E2M1], dtype=torch.int8)
    return steps[_codes(blocks)].flatten(-2), step_sizes(scales)


def step_sizes(scales: Tensor) -> Tensor:
    """The scales of `in_steps` from those of the blocks, of the same shape."""
    return torch.ldexp(torch.ones(scales.shape), scales.int() - _BIAS - 1)


def _codes(blocks: Tensor) -> Tensor:
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()


def _check(blocks: Tensor, scales: Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"MXFP4 blocks and scales must be uint8, not {blocks.dtype} and {scales.dtype}")
    if blocks.shape != (*scales.shape, 16):
        raise ValueError(f"MXFP4 blocks {list(blocks.shape)} do not fit scales {list(scales.shape)}")
    if (scales == 255).any():
        raise ValueError("a scale of MXFP4 blocks is NaN")
