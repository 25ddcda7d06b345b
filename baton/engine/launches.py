"""Steps launched before the tokens of the one before them are known, and one wait of the host for each.

`launched` queues, behind a step's logits: which tokens its draws choose, a copy of them into pinned memory, and with
them the raw logits of rows that report log-probabilities. The tokens stay on the device, too, and `feed` gathers the
next step's from there. `collect` waits for the copies of the oldest step, while a newer one computes.

A draw that is too close for the device to tell (sampler_device.py) goes on with the likeliest token. When the step is
collected the plain sampler decides it, and where it says another token, the outcome tells that the row behind was fed a
wrong one (`StepOutcome.corrected`). On CPU a step is computed when it is launched, and all of this is plain lookup.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.step import StepOutcome, StepPlan
from baton.engine.batch import Batch
from baton.engine.device import to_device, to_host
from baton.engine.logprobs import asked, sampled_rows
from baton.engine.parallel import TPGroup
from baton.engine.processors import Draw, SeenTables, process
from baton.engine.sampler import Choose, choose_tokens

Decide = Callable[[Tensor, Sequence[Draw]], Tensor]
"""Processed logits [S, vocab] and their draws -> int64 [S] on the same device, -1 where undecided. Nothing waits."""


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """`said` [S] and `lines` [those asked for, vocab] are in host memory once `ready`; `tokens` [S], what the next
    step is fed, and `logits` [S, vocab], processed, on the device."""

    plan: StepPlan
    draws: tuple[Draw, ...]
    logits: Tensor
    tokens: Tensor
    said: Tensor
    lines: Tensor
    ready: Any
    began_at: float


class Launches:
    """Complete state: the steps that are not collected yet, oldest first, the newest of all, and when the last was
    collected. It belongs to the compute thread. `decide` chooses tokens on the device, and there they are fed; without
    it, on CPU, `choose` does, and they are known at once."""

    def __init__(
        self, device: torch.device, group: TPGroup, decide: Decide | None = None, choose: Choose | None = None
    ) -> None:
        self._device, self._group, self._choose = device, group, choose
        self._decide = decide
        self._steps: deque[_Launched] = deque()
        self._newest: _Launched | None = None
        self._collected_at = 0.0
        self.rows_fed = self.rows_corrected = 0

    def feed(self, batch: Batch, plan: StepPlan) -> Batch:
        """The batch with the tokens of the step before in their places. Every rank calls it, for the same plans: the
        leader's tokens go to all.

        Raises:
            InvariantError: the plan names rows of a step that is not the last one launched.
        """
        firsts = batch.firsts.tolist()
        places = [first for first, source in zip(firsts, plan.fed, strict=True) if source >= 0]
        if self._group.leads:
            picked = self._pick(plan)
        else:
            picked = torch.empty(len(places), dtype=torch.int64, device=self._device)
        picked = self._group.broadcast(picked)
        self.rows_fed += len(places)
        if self._decide is None:
            for place, token in zip(places, picked.tolist(), strict=True):
                batch.token_ids[place] = token
            return batch
        if len(places) == len(batch.token_ids):
            return replace(batch, fed=picked)
        where = to_device(torch.tensor(places), self._device)
        return replace(batch, fed=batch.tokens.clone().index_copy_(0, where, picked))

    def launched(self, plan: StepPlan, batch: Batch, logits: Tensor, seen: SeenTables, began_at: float) -> None:
        """Takes the raw logits [S, vocab] of a step. Nothing waits for them."""
        wanted = asked(plan)
        if wanted and len(wanted) < len(logits):
            reported = logits.index_select(0, to_device(torch.tensor(wanted), self._device))
        else:
            reported = logits if wanted else logits[:0]
        processed = process(logits, batch.draws, seen)
        if self._decide is not None and batch.draws:
            said = self._decide(processed, batch.draws)
            tokens = torch.where(said < 0, processed.argmax(1), said)
        else:
            said = tokens = torch.tensor(self._known(processed, batch.draws), dtype=torch.int64)
        copies, ready = (to_host(said), to_host(reported)), None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._newest = _Launched(plan, batch.draws, processed, tokens, *copies, ready, began_at)
        self._steps.append(self._newest)

    def collect(self) -> StepOutcome:
        """The outcome of the oldest step: the one wait for it. Its time is that in which no older one computed.

        Raises:
            InvariantError: no step is out.
        """
        if not self._steps:
            raise InvariantError("no step has been launched that could be collected")
        step = self._steps.popleft()
        if step.ready is not None:
            step.ready.synchronize()  # a step that hangs is the step thread's to give up
        tokens = step.said.tolist()
        corrected = self._correct(step, tokens) if -1 in tokens else ()
        left = iter(tokens)
        sampled = tuple(tuple(islice(left, row.num_sampled)) for row in step.plan.rows)
        logprobs = sampled_rows(step.plan, step.lines, sampled)
        now = time.perf_counter()
        took_s = now - max(step.began_at, self._collected_at)
        self._collected_at = now
        return StepOutcome(step.plan.step_id, sampled, took_s, logprobs, corrected=corrected)

    def _known(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        return choose_tokens(logits, draws, self._choose) if draws else []

    def _pick(self, plan: StepPlan) -> Tensor:
        newest = self._newest
        if newest is None or newest.plan.step_id != plan.step_id - 1:
            had = newest and newest.plan.step_id
            raise InvariantError(f"step {plan.step_id} is fed by the step before it, and {had} was launched last")
        ends = [0]
        for row in newest.plan.rows:
            ends.append(ends[-1] + row.num_sampled)
        samples = [ends[source + 1] - 1 for source in plan.fed if source >= 0]
        if samples == list(range(len(newest.tokens))):
            return newest.tokens
        return newest.tokens.index_select(0, to_device(torch.tensor(samples), self._device))

    def _correct(self, step: _Launched, tokens: list[int]) -> tuple[int, ...]:
        """Decides what the device could not, in `tokens`. The rows that are to have another token than was fed."""
        left = [index for index, token in enumerate(tokens) if token < 0]
        where = to_device(torch.tensor(left), self._device)
        right = choose_tokens(step.logits.index_select(0, where), [step.draws[index] for index in left])
        taken = step.tokens.index_select(0, where).tolist()
        for index, token in zip(left, right, strict=True):
            tokens[index] = token
        wrong = {index for index, token, fed in zip(left, right, taken, strict=True) if token != fed}
        owners = [number for number, row in enumerate(step.plan.rows) for _ in range(row.num_sampled)]
        self.rows_corrected += len(wrong)
        return tuple(sorted({owners[index] for index in wrong}))
