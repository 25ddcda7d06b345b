"""One step of the engine as a value: rows of tokens to compute, and what came out.

A prefill chunk is a long row, a decode step a row of 1, verification a row of 1+k, recompute again a long row: one
runner serves both pools (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams, SequenceId, TokenLogprob


@dataclass(frozen=True, slots=True)
class History:
    """What the choice of a row's first token depends on besides its logits: the tokens before it. `output` holds
    the first `output_index` tokens, or none where they do not matter; `prompt` is the request's own tuple, never a
    copy. `end_token_ids` are masked while fewer than min_tokens are out, and may end what matches a grammar."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` at positions [start, start + len(tokens)) of a sequence.

    `block_ids` is the sequence's block table and covers at least start + len(tokens) positions; KV of positions
    before `start` is already there. Of the last `num_sampled` positions a token is sampled each; the first of these
    samples is output index `output_index` of (sampling.seed, choice), and each later one is sampled as if the row's
    tokens before it (drafts) were output. `num_sampled` 0 computes KV only. `history` is there when sampling depends
    on earlier tokens (Sequence.row decides that). `scored[i]` is the token known to follow position start + i: its
    log-probability is wanted.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    num_sampled: int = 0
    output_index: int = 0
    history: History | None = None
    scored: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def with_draft_tokens(self, draft_tokens: tuple[int, ...]) -> Row:
        """The row with draft tokens behind its tokens, a token to be sampled at each. (`replace` takes several times as
        long, and every step does this for every row.)"""
        return Row(
            self.sequence_id,
            self.start,
            self.tokens + draft_tokens,
            self.block_ids,
            self.sampling,
            self.num_sampled + len(draft_tokens),
            self.output_index,
            self.history,
            self.scored,
        )


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Let the draft model compute `tokens` at [start, ...) of a sequence into its own blocks, then draft the
    `num_draft_tokens` tokens that follow: they go behind those of `rows[row]` of the plan. With none it only computes
    KV, and `row` says nothing."""

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_draft_tokens: int = 0
    row: int = -1


_COMPUTES_ONLY = SamplingParams()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`drafts` are computed first; the rows are complete when their draft tokens are in (`with_draft_tokens`).

    A plan made while the step before it computes does not know the tokens of that one. `token_sources[i]` then says
    whose sample is the only token of row i, given as 0: that of row `token_sources[i]` of the step before; -1 where the
    tokens are known. Empty where all are. Such a plan has no drafts.

    Of row i the last `drafted[i]` tokens, given as 0, are draft tokens that only the leader's device knows
    (`to_verify`). Empty where there are none.
    """

    step_id: int
    rows: tuple[Row, ...]
    drafts: tuple[DraftRow, ...] = ()
    token_sources: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    def with_draft_tokens(self, draft_tokens: tuple[tuple[int, ...], ...]) -> StepPlan:
        """The plan with `draft_tokens[i]` behind the tokens of row i, to be verified. Raises InvariantError if they
        are not those that its draft rows ask for."""
        wanted = {draft.row: draft.num_draft_tokens for draft in self.drafts if draft.num_draft_tokens}
        if not wanted and not draft_tokens:
            return self
        if len(draft_tokens) != len(self.rows) or any(len(g) != wanted.get(i, 0) for i, g in enumerate(draft_tokens)):
            raise InvariantError(f"step {self.step_id}: {[len(g) for g in draft_tokens]} draft tokens, {wanted} wanted")
        rows = tuple(
            row.with_draft_tokens(more) if more else row for row, more in zip(self.rows, draft_tokens, strict=True)
        )
        return StepPlan(self.step_id, rows, self.drafts)

    def to_verify(self) -> StepPlan:
        """The rows with places for the draft tokens of its draft rows, which are on the device."""
        wanted = {draft.row: draft.num_draft_tokens for draft in self.drafts if draft.num_draft_tokens}
        if not wanted:
            return StepPlan(self.step_id, self.rows)
        drafted = tuple(wanted.get(index, 0) for index in range(len(self.rows)))
        rows = tuple(row.with_draft_tokens((0,) * n) if n else row for row, n in zip(self.rows, drafted, strict=True))
        return StepPlan(self.step_id, rows, drafted=drafted)

    def to_compute(self) -> StepPlan:
        """The plan without what only choosing tokens needs: for ranks that compute and choose nothing."""
        rows = tuple(
            row
            if row.history is None and row.sampling is _COMPUTES_ONLY
            else replace(row, history=None, sampling=_COMPUTES_ONLY)
            for row in self.rows
        )
        return replace(self, drafts=(), rows=rows)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`sampled[i]` holds the tokens sampled for `plan.rows[i]`, `num_sampled` of them, and `logprobs[i]` as many
    log-probabilities, or none where the row's sampling asks for none; `scored[i]` has one per token of its `scored`.
    Both are empty when no row asks. `draft_tokens[i]` is what a draft model put behind the row, empty where nothing
    drafted. `unsampled` are rows of which nothing was sampled, though tokens were asked for: their grammar's mask was
    not ready, and the row's last token is to be computed again, or, where there is a message, the grammar cannot go on.
    `elapsed_s` is wall time, `draft_s` the draft model's part of it. `corrected` are rows whose token is another than
    the one that a step launched behind this one was fed: what that step computes of them says nothing."""

    step_id: int
    sampled: tuple[tuple[int, ...], ...]
    elapsed_s: float = 0.0
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    scored: tuple[tuple[TokenLogprob, ...], ...] = ()
    draft_tokens: tuple[tuple[int, ...], ...] = ()
    draft_s: float = 0.0
    corrected: tuple[int, ...] = ()
    unsampled: Mapping[int, str] = field(default_factory=dict)

    def logprobs_of(self, row: int) -> tuple[TokenLogprob, ...]:
        return self.logprobs[row] if self.logprobs else ()

    def scored_of(self, row: int) -> tuple[TokenLogprob, ...]:
        return self.scored[row] if self.scored else ()


def without_unsampled(plan: StepPlan, outcome: StepOutcome, unsampled: Mapping[SequenceId, str]) -> StepOutcome:
    """The outcome without what was sampled for these sequences, and with the reasons (`StepOutcome.unsampled`)."""
    if not unsampled:
        return outcome
    rows = {
        index: unsampled[row.sequence_id]
        for index, row in enumerate(plan.rows)
        if row.num_sampled and row.sequence_id in unsampled
    }
    sampled = tuple(() if index in rows else tokens for index, tokens in enumerate(outcome.sampled))
    logprobs = tuple(() if index in rows else found for index, found in enumerate(outcome.logprobs))
    return replace(outcome, sampled=sampled, logprobs=logprobs, unsampled=rows)


def check_outcome(plan: StepPlan | None, outcome: StepOutcome) -> StepPlan:
    """The plan that `outcome` answers.

    Raises:
        InvariantError: it is of another step, or does not have just what the plan's rows ask for.
    """
    if plan is None or plan.step_id != outcome.step_id:
        raise InvariantError(f"outcome of step {outcome.step_id} while {plan and plan.step_id} is out")
    wanted = [0 if index in outcome.unsampled else row.num_sampled for index, row in enumerate(plan.rows)]
    if [len(tokens) for tokens in outcome.sampled] != wanted:
        raise InvariantError(f"the outcome of step {plan.step_id} does not have the tokens that its rows sample")
    for index, row in enumerate(plan.rows):
        reported = wanted[index] if row.sampling.logprobs is not None else 0
        if len(outcome.logprobs_of(index)) != reported or len(outcome.scored_of(index)) != len(row.scored):
            raise InvariantError(f"step {plan.step_id} does not have the log-probabilities that {row.sequence_id} asks")
    return plan
