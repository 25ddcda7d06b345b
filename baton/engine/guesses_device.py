"""A draft model's guesses on its own device, for a GPU: each pass takes the tokens of the one before from there.

Which rows go on, where, and into which blocks is known beforehand; only the tokens are not, and they never leave the
device until all are made. So the host prepares a pass while the device computes the one before. The plain twin is
decode/speculative_engine.py `guess_pass_by_pass`, a step and its answer for each guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.core.step import Row, StepPlan
from baton.engine.batch import Batch, Limits, make_batch
from baton.engine.device import to_device
from baton.engine.processors import Draw
from baton.engine.sampler_device import decide


class DeviceGuesses:
    """`compute` gives the logits [S, vocab] of a batch, one that has its tokens on the device alone (`Batch.fed`)
    too."""

    def __init__(self, compute: Callable[[Batch], Tensor], limits: Limits, device: torch.device) -> None:
        self._compute, self._limits, self._device = compute, limits, device

    @torch.no_grad()
    def __call__(self, batch: Batch, counts: Sequence[int]) -> list[list[int]]:
        """Computes all rows and the `counts[i]` tokens, at least one, that follow sampled position i, each from those
        before it, but the last of them. Draws that change no logits; of those too close to tell the likeliest token is
        guessed."""
        rows = [row for row in batch.rows if row.num_sampled]
        going = list(range(len(counts)))
        made, whose = [_guess(self._compute(batch), batch.draws)], [going]
        for number in range(1, max(counts)):
            left = [index for index in going if counts[index] > number]
            tokens = made[-1]
            if len(left) < len(going):
                places = {index: place for place, index in enumerate(going)}
                tokens = tokens[to_device(torch.tensor([places[index] for index in left]), self._device)]
            plan = StepPlan(0, tuple(_behind(rows[index], number) for index in left))
            further = replace(make_batch(plan, self._limits, self._device), fed=tokens)
            made.append(_guess(self._compute(further), further.draws))
            whose.append(left)
            going = left
        guesses: list[list[int]] = [[] for _ in counts]
        owners = [index for indexes in whose for index in indexes]
        for index, token in zip(owners, torch.cat(made).tolist(), strict=True):
            guesses[index].append(token)
        return guesses


def _guess(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    tokens = decide(logits, draws)
    return torch.where(tokens < 0, logits.argmax(1), tokens)


def _behind(row: Row, number: int) -> Row:
    """The row of the guess `number` behind it, whose token only the device knows."""
    position = row.end + number - 1
    return Row(row.sequence_id, position, (0,), row.block_ids, row.sampling, 1, row.output_index + number)
