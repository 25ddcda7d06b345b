"""A device's choice of tokens that cannot tell now and then, so that the plain sampler has to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from baton.engine.processors import Draw
from baton.engine.sampler_device import decide


class Undecided:
    """Says of every `every`-th draw that it is too close to tell, and makes the likeliest token look like another."""

    def __init__(self, every: int) -> None:
        self.every, self.draws = every, 0

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        tokens = decide(logits, draws)
        for row in range(len(draws)):
            self.draws += 1
            if self.draws % self.every == 0:
                tokens[row] = -1
        return tokens
