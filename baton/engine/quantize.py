"""Weights in int8: the weights of each output of a linear layer are -127 to 127 steps of the output's own scale.

Activations are not quantised. A step is exact in bf16, so the products are computed with steps, and the scale
multiplies the float32 sum at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.errors import StartupError

QUANTIZE_HEAD = True
"""Whether the head is quantised with the layers; measured in benchmarks/results/quantize.md."""
STEPS = 127


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [n, k] -> steps [n, k] in int8 and scales [n] in float32, so that steps * scale is the nearest to weight.
    A scale is that of a whole row: quantise before slicing columns. Ties go to the even step."""
    full = weight.float()
    scale = full.abs().amax(1) / STEPS
    scale = torch.where(scale > 0, scale, 1.0)
    return (full / scale[:, None]).round_().clamp_(-STEPS, STEPS).to(torch.int8), scale


def check_quantize(option: str, device: torch.device) -> None:
    """Raises StartupError for a value that is unknown or that this device does not support."""
    if option not in ("none", "int8"):
        raise StartupError(f"quantize must be none or int8, not {option!r:.60}")
    if option == "int8" and device.type != "cpu":
        raise StartupError(f"quantize int8 runs on CPU only, not on {device.type}: set it to none, or use --device cpu")
