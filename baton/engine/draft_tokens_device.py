"""Drafting on a GPU: each pass of the draft model reads the tokens of the previous pass on the device.

The rows, positions and blocks of each pass are known in advance; only the tokens are not, and they need not leave the
device: `queue` returns them as a tensor, from which the target's rows are filled and their draws processed. So the host
prepares a pass, and then the target's step, while the device computes. The reference implementation is
decode/speculation/engine.py `propose_pass_by_pass`, with one complete step for each draft token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from baton.core.step import Draw, Row, StepPlan
from baton.engine.batch import Batch, RowLimits, make_batch
from baton.engine.block_tables import BlockTables
from baton.engine.device_stream import Mark, NewMark, marks_of, to_device
from baton.engine.processors import Drafted, SeenTables, process
from baton.engine.sampler import Decide


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """Draft tokens that a device may still be computing: `tokens` int64 [G], row by row, and marks before and after
    their computation."""

    tokens: Tensor
    began: Mark
    ended: Mark

    @property
    def seconds(self) -> float:
        """The time of their computation; valid after a wait for `ended` or a later mark."""
        return self.began.elapsed_time(self.ended) / 1e3


class DeviceDraftTokens:
    """`compute` returns the logits [S, vocab] of a batch, even if its tokens are only on the device
    (`Batch.device_tokens`), and `decide` samples the tokens of draws from them. `tables` are those of the batches that
    `queue` is given."""

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        limits: RowLimits,
        device: torch.device,
        decide: Decide,
        tables: BlockTables,
        new_mark: NewMark | None = None,
    ) -> None:
        self._compute, self._limits, self._device, self._decide = compute, limits, device, decide
        self._tables = tables
        self._new_mark = new_mark or marks_of(device)
        self._seen = SeenTables()

    def __call__(self, batch: Batch, counts: Sequence[int]) -> list[list[int]]:
        """Returns the tokens of `queue`, row by row, after waiting for them."""
        tokens = iter(self.queue(batch, counts).tokens.tolist())
        return [list(islice(tokens, count)) for count in counts]

    @torch.no_grad()
    def queue(self, batch: Batch, counts: Sequence[int]) -> Queued:
        """Computes all rows and drafts `counts[i]` tokens (at least one) after sampled position i, autoregressively;
        the last of them is not computed itself. If a draw is too close to decide, the likeliest token is drafted. Does
        not wait."""
        began, ended = self._new_mark(), self._new_mark()
        began.record()
        logits = self._compute(batch)
        tokens = self._draft_tokens(batch, counts, logits) if counts else torch.empty(0, dtype=torch.int64)
        ended.record()
        return Queued(tokens, began, ended)

    def _draft_tokens(self, batch: Batch, counts: Sequence[int], logits: Tensor) -> Tensor:
        rows = [row for row in batch.rows if row.num_sampled]
        going = list(range(len(counts)))
        back = any(row.sampling.depends_on_history for row in rows)
        made, owners = [self._propose(logits, batch.draws, None)], list(going)
        so_far = [made[0]]  # by pass, the tokens of the rows that continue; only the last pass unless `back`
        for number in range(1, max(counts)):
            left = [index for index in going if counts[index] > number]
            if len(left) < len(going):
                places = {index: place for place, index in enumerate(going)}
                kept = to_device(torch.tensor([places[index] for index in left]), self._device)
                so_far = [tokens.index_select(0, kept) for tokens in so_far]
            plan = StepPlan(0, tuple(_behind(rows[index], number) for index in left))
            further = replace(make_batch(plan, self._limits, self._device, 1, self._tables), device_tokens=so_far[-1])
            drafted = Drafted(torch.stack(so_far, 1), [number] * len(left)) if back else None
            made.append(self._propose(self._compute(further), further.draws, drafted))
            so_far = [*so_far, made[-1]] if back else [made[-1]]
            owners += left
            going = left
        if len(made) == 1:
            return made[0]
        order = sorted(range(len(owners)), key=owners.__getitem__)  # stable: each row's tokens stay in pass order
        return torch.cat(made).index_select(0, to_device(torch.tensor(order), self._device))

    def _propose(self, logits: Tensor, draws: Sequence[Draw], drafted: Drafted | None) -> Tensor:
        logits = process(logits, draws, self._seen, drafted)
        tokens = self._decide(logits, draws)
        return torch.where(tokens < 0, logits.argmax(1), tokens)


def _behind(row: Row, number: int) -> Row:
    """The row of draft token `number` after `row`; the token itself is only on the device."""
    position = row.end + number - 1
    index = row.output_index + number
    return Row(row.sequence_id, position, (0,), row.block_ids, row.sampling, 1, index, row.history)
