"""MXFP4 blocks have the values that transformers dequantises them to, for every code and every scale in range."""

from __future__ import annotations

import pytest
import torch

from baton.engine.blocks import Blocks
from baton.engine.mxfp4 import dequantize, in_steps


def test_values_are_those_of_transformers_bit_for_bit() -> None:
    made = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 5, 16), generator=made, dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 8, 5), generator=made, dtype=torch.uint8)
    weights = dequantize(blocks, scales)
    assert weights.shape == (3, 8, 160) and len(blocks.unique()) == 256
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    assert torch.equal(weights, convert_moe_packed_tensors(blocks, scales).transpose(1, 2))


def test_damaged_blocks_are_refused() -> None:
    blocks, scales = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.full((4, 2), 127, dtype=torch.uint8)
    for given, message in (
        ((blocks.int(), scales), "must be uint8, not torch.int32"),
        ((blocks, scales[:, :1]), r"\[4, 2, 16\] do not fit scales \[4, 1\]"),
        ((blocks, torch.full_like(scales, 255)), "is NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            dequantize(*given)


def test_steps_and_scales_are_the_same_weights() -> None:
    made = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (8, 5, 16), generator=made, dtype=torch.uint8)
    scales = torch.randint(100, 150, (8, 5), generator=made, dtype=torch.uint8)
    weight = Blocks(*in_steps(blocks, scales)).dequantized()
    assert torch.equal(weight, dequantize(blocks, scales).float())
