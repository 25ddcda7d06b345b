"""Async scheduling: steps launched before the tokens of the previous step are known, with one host wait per step.

`queue` enqueues, after a step's logits, the sampling of its tokens and a copy of them into pinned memory, together with
the log-probabilities that rows report. The tokens also stay on the device, where `feed` gathers the input
of the next step. `collect` waits for the copies of the oldest step while a newer one computes.

A step that verifies a draft model's tokens also reads them on the device (draft_tokens_device.py `Queued`): they are
inserted into their rows there, counted as output there if draws depend on earlier tokens, and copied to the host with
the step's tokens. So such a step has only one wait, too (decision 0016).

A draw that is too close for the device to decide (kernels/sampling.py) provisionally uses the likeliest token. When the
step is collected, the plain sampler decides the draw; if it chooses another token, the outcome reports that the next
step was fed a wrong one (`StepOutcome.corrected`). On CPU a step is computed at launch, so all of this is plain lookup.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InvariantError
from baton.core.request import SequenceId, TokenLogprob
from baton.core.step import GrammarFailure, StepOutcome, StepPlan, without_unsampled
from baton.engine.batch import Batch
from baton.engine.device_stream import Mark, NewMark, marks_of, to_device, to_host
from baton.engine.draft_tokens_device import Queued
from baton.engine.outputs import (
    asked,
    most_listed,
    pooled_arrays,
    reported,
    reports,
    sampled_rows,
    scored_rows,
    token_logprob,
)
from baton.engine.parallel import TPGroup
from baton.engine.processors import Drafted, SeenTables, process
from baton.engine.sampler import Choose, Decide, choose_tokens


@dataclass(slots=True, eq=False)
class Launched:
    """`host_token_ids` [S + G] and `lines` [N, ...], if any, are in host memory once the device has reached `ready`:
    the tokens (-1 - likeliest if undecided) followed by the draft tokens, and what outputs.py reads log-probabilities
    of N scored and sampled tokens from: numbers of `reports`, or on CPU raw logits. `logits` [S, vocab], processed,
    `reported` [N, vocab], the raw ones, and `tokens` [S], which the next step may be fed, are on the device; the host
    has the tokens already if `tokens` is None. `pooled` are the vectors that rows pool, in host memory then, too."""

    plan: StepPlan
    batch: Batch
    logits: Tensor
    tokens: Tensor | None
    host_token_ids: Tensor | list[int]
    reported: Tensor | None
    lines: Tensor | None
    ready: Mark
    began_at: float
    draft_tokens: Queued | None
    unsampled: Mapping[SequenceId, GrammarFailure | None]
    pooled: Tensor | None


class Launches:
    """The launched steps that are not collected yet. Used only by the compute thread. `decide` chooses tokens on the
    device, where they are fed to the next step; without it, on CPU, `choose` chooses them, and they are known
    immediately. `waits` counts the waits of the host: one per collected step, and one more if a draw was undecided;
    `rows_with_device_token` the rows that were fed a token of the previous step, `rows_corrected` the draws whose final
    token differs from the provisional one."""

    def __init__(
        self,
        device: torch.device,
        group: TPGroup,
        decide: Decide | None = None,
        choose: Choose | None = None,
        new_mark: NewMark | None = None,
    ) -> None:
        self._device, self._group, self._choose = device, group, choose
        self._decide = decide
        self._new_mark = new_mark or marks_of(device)
        self._steps: deque[Launched] = deque()  # oldest first
        self._newest: tuple[StepPlan, Tensor] | None = None  # with the tokens [S] that the next step may be fed
        self._collected_at = 0.0
        self.rows_with_device_token = self.rows_corrected = self.waits = 0

    def check(self, plan: StepPlan, draft_tokens: Queued | None = None) -> None:
        """Checks, before a plan is announced, that the leader has the tokens that `feed` is to insert into it.

        Raises:
            InvariantError: the plan refers to rows of a step that is not the last one launched, or needs another number
            of draft tokens.
        """
        if not self._group.leads:
            return
        if plan.drafted:
            had = None if draft_tokens is None else len(draft_tokens.tokens)
            if had != sum(plan.drafted):
                raise InvariantError(f"step {plan.step_id} verifies {sum(plan.drafted)} draft tokens, but got {had}")
        elif plan.token_sources:
            self._before(plan)

    def feed(self, batch: Batch, plan: StepPlan, draft_tokens: Queued | None = None) -> Batch:
        """Returns the batch with the tokens of the previous step, or with draft tokens, inserted. Every rank calls it,
        for the same plans, which the leader has checked; the leader broadcasts the tokens."""
        places, verified = _places(batch, plan), draft_tokens if plan.drafted else None
        if not self._group.leads:
            picked = torch.empty(len(places), dtype=torch.int64, device=self._device)
        elif verified is not None:
            picked = verified.tokens
        else:
            picked = self._pick(plan)
            self.rows_with_device_token += len(places)
        picked = self._group.broadcast(picked)
        if self._decide is None:
            for place, token in zip(places, picked.tolist(), strict=True):
                batch.token_ids[place] = token
            return batch
        if len(places) == len(batch.token_ids):
            return replace(batch, device_tokens=picked)
        where = to_device(torch.tensor(places), self._device)
        return replace(batch, device_tokens=batch.tokens.clone().index_copy_(0, where, picked))

    def queue(
        self,
        plan: StepPlan,
        batch: Batch,
        logits: Tensor,
        seen: SeenTables,
        began_at: float,
        draft_tokens: Queued | None = None,
        pooled: Tensor | None = None,
    ) -> Launched:
        """Enqueues the sampling of a step from its raw logits [scored + S, vocab], which may be modified, the draft
        tokens that it verifies, and the vectors that its rows pool. Does not wait for the device."""
        scored, logprob_samples = batch.num_scored, asked(plan)
        reported = None
        if scored and not logprob_samples:
            reported = logits[:scored]
        elif logprob_samples and scored + len(logprob_samples) == len(logits):
            reported = logits
        elif logprob_samples:
            rows = torch.tensor([*range(scored), *(scored + index for index in logprob_samples)])
            reported = logits.index_select(0, to_device(rows, self._device))
        verified = draft_tokens if plan.drafted else None
        before = None if verified is None else _before_draws(plan, verified, self._device)
        to_sample = logits[scored:] if scored else logits
        processed = process(to_sample, batch.draws, seen, before, in_place=reported is not logits)
        tokens: Tensor | None = None
        host_token_ids: Tensor | list[int]
        if self._decide is not None and batch.draws:
            decided = self._decide(processed, batch.draws)
            decided = torch.where(decided < 0, -1 - processed.argmax(1), decided)
            tokens = torch.where(decided < 0, -1 - decided, decided)
            host_token_ids = to_host(decided if verified is None else torch.cat([decided, verified.tokens]))
        else:
            host_token_ids = choose_tokens(processed, batch.draws, self._choose) if batch.draws else []
            if verified is not None:
                host_token_ids += verified.tokens.tolist()
        lines, ready = reported, self._new_mark()
        if lines is not None and self._decide is not None:
            lines = to_host(self._report(plan, lines, logprob_samples, tokens))
        if pooled is not None and self._decide is not None:
            pooled = to_host(pooled)
        ready.record()
        unsampled = seen.grammars.take_unsampled()
        return Launched(
            plan=plan,
            batch=batch,
            logits=processed,
            tokens=tokens,
            host_token_ids=host_token_ids,
            reported=reported,
            lines=lines,
            ready=ready,
            began_at=began_at,
            draft_tokens=draft_tokens,
            unsampled=unsampled,
            pooled=pooled,
        )

    def _report(self, plan: StepPlan, logits: Tensor, logprob_samples: list[int], tokens: Tensor | None) -> Tensor:
        """The numbers of `reports` for the scored tokens and the samples `logprob_samples`."""
        known = to_device(torch.tensor([t for row in plan.rows for t in row.scored], dtype=torch.int64), self._device)
        if tokens is None or not logprob_samples:
            return reports(logits, known, most_listed(plan))
        if len(logprob_samples) < len(tokens):
            tokens = tokens.index_select(0, to_device(torch.tensor(logprob_samples), self._device))
        return reports(logits, torch.cat([known, tokens]) if len(known) else tokens, most_listed(plan))

    def add(self, step: Launched) -> None:
        """Registers a launched step: the next step may be fed its tokens, and `collect` will return its outcome."""
        known = step.host_token_ids[: len(step.batch.draws)]
        tokens = torch.tensor(known, dtype=torch.int64) if step.tokens is None else step.tokens
        self._newest = step.plan, tokens
        self._steps.append(step)

    def collect(self) -> StepOutcome:
        """Returns the outcome of the oldest uncollected step.

        Raises:
            InvariantError: there is none.
        """
        if not self._steps:
            raise InvariantError("no launched step to collect")
        return self.finish(self._steps.popleft())

    def finish(self, step: Launched) -> StepOutcome:
        """Waits for a step and returns its outcome. `elapsed_s` counts only time in which no earlier step computed."""
        step.ready.synchronize()  # no time limit here: StepThread has one
        self.waits += 1
        host_token_ids = step.host_token_ids
        if isinstance(host_token_ids, Tensor):
            host_token_ids = host_token_ids.tolist()
        draws, num_scored = len(step.batch.draws), step.batch.num_scored
        tokens, drafted = host_token_ids[:draws], iter(host_token_ids[draws:])
        corrected, raw = self._correct(step, tokens) if min(tokens, default=0) < 0 else ((), {})
        draft_tokens = tuple(tuple(islice(drafted, count)) for count in step.plan.drafted)
        left = iter(tokens)
        sampled = tuple(tuple(islice(left, row.num_sampled)) for row in step.plan.rows)
        scored: tuple[tuple[TokenLogprob, ...], ...] = ()
        logprobs = scored
        if step.lines is not None:
            lines, read = step.lines.numpy(), reported if self._decide is not None else token_logprob

            def of_line(number: int, token: int, top: int) -> TokenLogprob:
                if number in raw:
                    return token_logprob(raw[number], token, top)
                return read(lines[number], token, top)

            scored = scored_rows(step.plan, of_line)
            logprobs = sampled_rows(step.plan, lambda number, *values: of_line(num_scored + number, *values), sampled)
        now = time.perf_counter()
        took_s = now - max(step.began_at, self._collected_at)
        self._collected_at = now
        draft_s = 0.0 if step.draft_tokens is None else step.draft_tokens.seconds
        made = StepOutcome(
            step.plan.step_id,
            sampled,
            took_s,
            logprobs,
            scored,
            draft_tokens,
            draft_s,
            corrected,
            pooled=pooled_arrays(step.batch, step.pooled),
        )
        return without_unsampled(step.plan, made, step.unsampled)

    def _before(self, plan: StepPlan) -> tuple[StepPlan, Tensor]:
        newest = self._newest
        if newest is None or newest[0].step_id != plan.step_id - 1:
            had = newest and newest[0].step_id
            raise InvariantError(f"step {plan.step_id} needs the tokens of the previous step, but {had} was the last")
        return newest

    def _pick(self, plan: StepPlan) -> Tensor:
        before, tokens = self._before(plan)
        ends = list(accumulate(row.num_sampled for row in before.rows))
        samples = [ends[source] - 1 for source in plan.token_sources if source >= 0]
        if samples == list(range(len(tokens))):
            return tokens
        return tokens.index_select(0, to_device(torch.tensor(samples), self._device))

    def _correct(self, step: Launched, tokens: list[int]) -> tuple[tuple[int, ...], dict[int, NDArray[np.float32]]]:
        """Decides, in `tokens`, the draws that the device could not. Returns rows with a wrong provisional token, and
        by number the raw logits of their lines."""
        left = [index for index, token in enumerate(tokens) if token < 0]
        numbers = {index: step.batch.num_scored + number for number, index in enumerate(asked(step.plan))}
        again = [index for index in left if index in numbers]
        logits = step.logits.index_select(0, to_device(torch.tensor(left), self._device))
        if again and step.reported is not None:
            where = to_device(torch.tensor([numbers[index] for index in again]), self._device)
            logits = torch.cat([logits, step.reported.index_select(0, where)])
        lines = logits.cpu()
        self.waits += 1
        right = choose_tokens(lines[: len(left)], [step.batch.draws[index] for index in left])
        wrong = {index for index, token in zip(left, right, strict=True) if token != -1 - tokens[index]}
        for index, token in zip(left, right, strict=True):
            tokens[index] = token
        owners = [number for number, row in enumerate(step.plan.rows) for _ in range(row.num_sampled)]
        self.rows_corrected += len(wrong)
        raw = dict(zip((numbers[index] for index in again), lines[len(left) :].numpy(), strict=True))
        return tuple(sorted({owners[index] for index in wrong})), raw


def _places(batch: Batch, plan: StepPlan) -> list[int]:
    """The packed indexes of the tokens to insert (of the previous step, or draft tokens), in row order."""
    if not plan.drafted:
        return [first for first, source in zip(batch.firsts.tolist(), plan.token_sources, strict=True) if source >= 0]
    ends = (batch.firsts + batch.lengths).tolist()
    return [place for end, count in zip(ends, plan.drafted, strict=True) for place in range(end - count, end)]


def _before_draws(plan: StepPlan, draft_tokens: Queued, device: torch.device) -> Drafted | None:
    """The draft tokens before each draw, or None if no draw depends on them."""
    if not any(count and row.sampling.depends_on_history for row, count in zip(plan.rows, plan.drafted, strict=True)):
        return None
    widest = max(plan.drafted)
    counts: list[int] = []
    where: list[list[int]] = []
    first = 0
    for row, count in zip(plan.rows, plan.drafted, strict=True):
        for number in range(row.num_sampled):
            counts.append(number)
            where.append([*range(first, first + number), *[0] * (widest - number)])
        first += count
    return Drafted(draft_tokens.tokens[to_device(torch.tensor(where), device)], counts)
