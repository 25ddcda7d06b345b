"""Weights in blocks of 32 values of a row, each with a scale and perhaps a minimum, as GGUF stores them.

    weight = code * scale + minimum        4 bits: codes 0 to 15
    weight = code * scale                  8 bits: codes -128 to 127

All factors are exact in float32 and so are the products; the sum is rounded once, as the `gguf` package rounds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [n, k]: `codes` [n, k] in uint8 with `minima`, in int8 without; `scales` and `minima` [n, k / 32] in
    float32."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None = None

    def __post_init__(self) -> None:
        for values in (self.scales, self.minima):
            if values is not None and not torch.isfinite(values).all():
                raise ValueError("a scale or minimum of a block is NaN or infinite")

    @property
    def nbytes(self) -> int:
        """Of the packed weights, with scales and minima in float16, or if that is not exact in float32."""
        if self.minima is None:
            return self.codes.numel() + 2 * self.scales.numel()
        return self.codes.numel() // 2 + (4 if self.in_half else 8) * self.scales.numel()

    @property
    def in_half(self) -> bool:
        """Whether float16 holds all scales and minima exactly."""
        return is_half(self.scales) and (self.minima is None or is_half(self.minima))

    def each(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """Returns the blocks after a change of their rows, the same for all tensors."""
        minima = None if self.minima is None else change(self.minima)
        return Blocks(change(self.codes), change(self.scales), minima)

    def dequantized(self) -> Tensor:
        """[n, k] in float32."""
        n, k = self.codes.shape
        codes = self.codes.float().view(n, k // BLOCK, BLOCK)
        values = codes * self.scales[:, :, None]
        if self.minima is not None:
            values += self.minima[:, :, None]
        return values.view(n, k)


def stacked(parts: list[Blocks]) -> Blocks | None:
    """Returns the rows of all parts, None if some have 4 bits and some 8."""
    minima = [part.minima for part in parts if part.minima is not None]
    if minima and len(minima) < len(parts):
        return None
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return Blocks(codes, scales, torch.cat(minima) if minima else None)


def is_half(values: Tensor) -> bool:
    """Whether float16 holds all values exactly."""
    return torch.equal(values.half().float(), values)
