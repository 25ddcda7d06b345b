"""Weights quantised as they are loaded. Activations are not.

int8: the weights of each output of a linear layer are -127 to 127 steps of the output's own scale. A step is exact in
bf16, so the products are computed with steps, and the scale multiplies the float32 sum at the end.

int4: 16 steps for each 32 inputs of an output, with a scale and a minimum of their own (blocks.py); the head, which
decides between tokens, in blocks of 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.errors import StartupError
from baton.engine.blocks import BLOCK, Blocks

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


def in_blocks(weight: Tensor, bits: int) -> Blocks:
    """weight [n, k] -> blocks with scales and minima in float16: the nearest of 16 steps from the least to the greatest
    weight of a block, or of 255 steps around zero. Ties go to the even step. Raises ValueError if k is not a multiple
    of 32, or a weight is beyond float16."""
    n, k = weight.shape
    if k % BLOCK:
        raise ValueError(f"its {k} inputs are not a multiple of {BLOCK}")
    values = weight.float().view(n, k // BLOCK, BLOCK)
    if bits == 8:
        scale = _steps_of(values.abs().amax(2) / STEPS)
        steps = (values / scale[:, :, None]).round_().clamp_(-STEPS, STEPS)
        return Blocks(steps.to(torch.int8).view(n, k), scale)
    least, greatest = torch.aminmax(values, dim=2)
    minimum, scale = least.half().float(), _steps_of((greatest - least) / 15)
    steps = values.sub(minimum[:, :, None]).div_(scale[:, :, None]).round_().clamp_(0, 15)
    return Blocks(steps.to(torch.uint8).view(n, k), scale, minimum)


def _steps_of(scale: Tensor) -> Tensor:
    """Rounds scales to float16; blocks of equal weights need none."""
    rounded = scale.half().float()
    return torch.where(rounded > 0, rounded, 1.0)


def check_quantize(option: str, device: torch.device) -> None:
    """Raises StartupError for a value that is unknown or that this device does not support."""
    if option not in ("none", "int8", "int4"):
        raise StartupError(f"quantize must be none, int8 or int4, not {option!r:.60}")
    if option != "none" and device.type != "cpu":
        raise StartupError(
            f"quantize {option} runs on CPU only, not on {device.type}: set it to none, or use --device cpu"
        )
