"""Token selection by a device (baton.engine.sampler.Decide), computed on the CPU by the plain sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.step import Draw
from baton.engine.sampler import choose_tokens


def decide(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Decides every draw. tests/support/marked_device.py treats it as work of the device: the host does not wait."""
    with torch._C.DisableTorchFunction():
        tokens = torch.tensor(choose_tokens(logits.as_subclass(Tensor), draws))
        return tokens.as_subclass(type(logits))


class Undecided:
    """Marks every `every`-th draw as too close to decide, by the token -1."""

    def __init__(self, every: int) -> None:
        self.every, self.draws = every, 0

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        tokens = decide(logits, draws)
        for row in range(len(draws)):
            self.draws += 1
            if self.draws % self.every == 0:
                tokens[row] = -1
        return tokens
