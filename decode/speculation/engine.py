"""One engine step with draft tokens: the draft model's passes, then the target's, on the same thread in one call.

The event loop does not run between the passes. The target's plan is an ordinary one, rows of 1 + k tokens, so
tensor-parallel followers replay it like any other; the draft model runs on the leader only.

On a GPU the draft tokens are not copied to the host before they are verified: all passes of both models are launched,
followed by one wait for draft tokens and tokens together (decision 0016), unless the host checks draft tokens against a
grammar or bad words. On CPU a pass is computed when it is launched, and its draft tokens are in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams
from baton.core.step import DraftRow, Row, StepOutcome, StepPlan
from baton.engine.processors import changes_logits, masks_by_draft_tokens
from baton.engine.runner import Runner


class SpeculativeEngine:
    """Runs on the compute thread and has no state. `draft` is None if no model drafts. With a runner that launches
    steps (`Runner.launches_ahead`) the host waits for the device once per step, and once more if a sample was undecided
    on the device."""

    def __init__(self, target: Runner, draft: Runner | None) -> None:
        self._target = target
        self._draft = draft

    def step(self, plan: StepPlan) -> StepOutcome:
        """Computes a plan and its draft rows. `draft_tokens` of the outcome are the draft tokens that were verified."""
        if not plan.drafts:
            return self._target.step(plan)
        draft = self._draft
        if self._target.launches_ahead and draft is not None and draft.can_queue_draft_tokens and not _host_masks(plan):
            return self._with_one_wait(draft, plan)
        started = time.perf_counter()
        draft_tokens = self._draft_tokens(plan)
        drafted = time.perf_counter() - started
        made = StepOutcome(plan.step_id, ())
        if plan.rows:
            made = self._target.step(StepPlan(plan.step_id, plan.with_draft_tokens(draft_tokens).rows))
        took = time.perf_counter() - started
        return replace(made, elapsed_s=took, draft_tokens=draft_tokens, draft_s=drafted)

    def _with_one_wait(self, draft: Runner, plan: StepPlan) -> StepOutcome:
        started = time.perf_counter()
        # Draft tokens are in the order of the rows that they are for; draft rows that only fill KV come last.
        drafts = sorted(plan.drafts, key=lambda d: d.row if d.num_draft_tokens else len(plan.rows))
        rows = tuple(_first_row(drafted, plan) for drafted in drafts)
        draft_tokens = draft.queue_draft_tokens(
            StepPlan(plan.step_id, rows), [drafted.num_draft_tokens for drafted in drafts]
        )
        if plan.rows:
            self._target.launch(plan.to_verify(), draft_tokens)
            made = self._target.collect()
        else:
            draft_tokens.ended.synchronize()
            made = StepOutcome(plan.step_id, (), draft_s=draft_tokens.seconds)
        return replace(made, elapsed_s=time.perf_counter() - started)

    def _draft_tokens(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """Returns the draft tokens for each row of the plan, made in one call if the draft model supports that."""
        if self._draft is None:
            raise InvariantError(f"step {plan.step_id} has draft rows, but this worker has no draft model")
        made: dict[int, tuple[int, ...]] = {}
        at_once: list[tuple[DraftRow, Row]] = []
        by_pass: list[tuple[DraftRow, Row]] = []
        for draft in plan.drafts:
            row = _first_row(draft, plan)
            possible = self._draft.can_propose and not (draft.num_draft_tokens and changes_logits(row))
            (at_once if possible else by_pass).append((draft, row))
        if not any(draft.num_draft_tokens for draft, _ in at_once):
            by_pass += at_once  # only KV is filled: a plain step
        else:
            rows, counts = tuple(row for _, row in at_once), [draft.num_draft_tokens for draft, _ in at_once]
            proposed = self._draft.propose(StepPlan(plan.step_id, rows), counts)
            made = {draft.row: tokens for (draft, _), tokens in zip(at_once, proposed, strict=True) if tokens}
        made |= propose_pass_by_pass(self._draft, plan.step_id, by_pass)
        return tuple(made.get(index, ()) for index in range(len(plan.rows))) if made else ()


def propose_pass_by_pass(
    model: Runner, step_id: int, first: Sequence[tuple[DraftRow, Row]]
) -> dict[int, tuple[int, ...]]:
    """Returns the draft tokens by the index of their row in the plan. The first pass computes every draft row, later
    ones those that draft further tokens."""
    made: dict[int, list[int]] = {draft.row: [] for draft, _ in first if draft.num_draft_tokens}
    left = list(first)
    while left:
        outcome = model.step(StepPlan(step_id, tuple(row for _, row in left)))
        going: list[tuple[DraftRow, Row]] = []
        for (draft, row), sampled in zip(left, outcome.sampled, strict=True):
            if draft.num_draft_tokens:
                draft_tokens = made[draft.row]
                # If a mask was late, nothing was sampled: fill up with token 0.
                draft_tokens += sampled or (0,) * (draft.num_draft_tokens - len(draft_tokens))
                if len(draft_tokens) < draft.num_draft_tokens:
                    going.append((draft, _next_row(row, sampled[0])))
        left = going
    return {row: tuple(draft_tokens) for row, draft_tokens in made.items()}


def _host_masks(plan: StepPlan) -> bool:
    """Whether the host checks draft tokens against a grammar or bad words."""
    return any(draft.num_draft_tokens and masks_by_draft_tokens(plan.rows[draft.row].sampling) for draft in plan.drafts)


def _first_row(draft: DraftRow, plan: StepPlan) -> Row:
    if not draft.num_draft_tokens:
        return Row(draft.sequence_id, draft.start, draft.tokens, draft.block_ids, SamplingParams())
    row = plan.rows[draft.row]
    sampling = row.sampling
    if sampling.logprobs is not None and not sampling.grammar:  # a grammar's automaton is found by its parameters
        sampling = replace(sampling, logprobs=None)
    return Row(
        draft.sequence_id, draft.start, draft.tokens, draft.block_ids, sampling, 1, row.output_index, row.history
    )


def _next_row(row: Row, draft_token: int) -> Row:
    """Returns the row after a draft token, which counts as output."""
    history = row.history
    if history is not None and row.sampling.depends_on_history:
        history = replace(history, output=(*history.output, draft_token))
    return replace(
        row, start=row.end, tokens=(draft_token,), num_sampled=1, output_index=row.output_index + 1, history=history
    )
