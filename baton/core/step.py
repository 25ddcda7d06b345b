"""One step of the engine as a value: rows of tokens to compute, and what came out.

A prefill chunk is a long row, a decode step a row of 1, verification a row of 1+k, recomputation a long row again: one
runner serves both pools (docs/architecture.md).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.core.errors import InvariantError
from baton.core.request import SamplingParams, SequenceId, TokenLogprob


@dataclass(frozen=True, slots=True)
class History:
    """What a row's first sample depends on besides its logits: the tokens before it. `output` holds the first
    `output_index` output tokens, or none if they do not matter; `prompt` is the request's own tuple, never a copy.
    `end_token_ids` are masked until min_tokens tokens are generated, and may end an output that matches its grammar.
    Tenants share the processes that compute masks of grammars fairly."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    end_token_ids: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` at positions [start, start + len(tokens)) of a sequence.

    `block_ids` is the sequence's block table and covers at least start + len(tokens) positions; KV of positions before
    `start` is already present, except in blocks behind the window that were given back (baton.core.window). One token
    is sampled at each of the last `num_sampled` positions; the first of these samples is output index `output_index` of
    (sampling.seed, choice), and each later one is sampled as if the row's tokens before it (drafts) were output.
    `num_sampled` 0 computes KV only. `history` is set when sampling depends on earlier tokens (Sequence.row decides
    that). `scored[i]` is the known token after position start + i, whose log-probability is requested. `pooling`
    requests the final hidden state of the row's last token, or the sum of those of all its tokens. `adapter` is the
    digest of the LoRA adapter that computes it; empty for none.
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
    pooling: str = ""
    adapter: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def with_draft_tokens(self, draft_tokens: tuple[int, ...]) -> Row:
        """Returns the row with draft tokens appended and a token sampled at each. (`replace` takes several times as
        long, and every step calls this for every row.)"""
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
            adapter=self.adapter,
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """What determines one token that is drawn, besides its logits. `history` is the row's; `drafts` are the draft
    tokens between it and this draw, which count as output here. `sequence_id` only selects the table of seen tokens to
    reuse."""

    sampling: SamplingParams
    choice: int
    output_index: int
    history: History | None = None
    drafts: tuple[int, ...] = ()
    sequence_id: SequenceId | None = None


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Let the draft model compute `tokens` at [start, ...) of a sequence into its own blocks, then draft the next
    `num_draft_tokens` tokens, which are appended to `rows[row]` of the plan. With 0 it only computes KV, and `row` is
    unused."""

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_draft_tokens: int = 0
    row: int = -1


_COMPUTES_ONLY = SamplingParams()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`drafts` are computed first; the rows are complete when their draft tokens have been added (`with_draft_tokens`).

    A plan made while the previous step computes does not contain that step's tokens. `token_sources[i]` is then the row
    of the previous step whose sample becomes the only token of row i, given as 0 here; -1 if row i's tokens are known.
    Empty if all rows' tokens are known. Such a plan has no drafts.

    The last `drafted[i]` tokens of row i, given as 0, are draft tokens whose values only the leader's device has
    (`to_verify`). Empty if there are none.
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
        """Returns the plan with `draft_tokens[i]` appended to row i, to be verified. Raises InvariantError if their
        numbers are not those that its draft rows request."""
        counts = {draft.row: draft.num_draft_tokens for draft in self.drafts if draft.num_draft_tokens}
        if not counts and not draft_tokens:
            return self
        if len(draft_tokens) != len(self.rows) or any(len(g) != counts.get(i, 0) for i, g in enumerate(draft_tokens)):
            raise InvariantError(f"step {self.step_id}: {[len(g) for g in draft_tokens]} draft tokens, not {counts}")
        rows = tuple(
            row.with_draft_tokens(more) if more else row for row, more in zip(self.rows, draft_tokens, strict=True)
        )
        return StepPlan(self.step_id, rows, self.drafts)

    def to_verify(self) -> StepPlan:
        """Returns the rows with placeholders for the draft tokens of its draft rows, whose values are on the device."""
        counts = {draft.row: draft.num_draft_tokens for draft in self.drafts if draft.num_draft_tokens}
        if not counts:
            return StepPlan(self.step_id, self.rows)
        drafted = tuple(counts.get(index, 0) for index in range(len(self.rows)))
        rows = tuple(row.with_draft_tokens((0,) * n) if n else row for row, n in zip(self.rows, drafted, strict=True))
        return StepPlan(self.step_id, rows, drafted=drafted)

    def to_compute(self) -> StepPlan:
        """Returns the plan without what only sampling and pooling need, for ranks that compute but do neither."""
        rows = tuple(
            row
            if row.history is None and row.sampling is _COMPUTES_ONLY and not row.pooling
            else replace(row, history=None, sampling=_COMPUTES_ONLY, pooling="")
            for row in self.rows
        )
        return replace(self, drafts=(), rows=rows)


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """Why a grammar allows no next token; `exceeds_limit` if it exceeds a limit of ours."""

    reason: str
    exceeds_limit: bool = False


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`sampled[i]` holds the `num_sampled` tokens sampled for `plan.rows[i]`, and `logprobs[i]` as many
    log-probabilities, or none if the row's sampling requests none; `scored[i]` has one per token of the row's `scored`.
    Both are empty when no row requests any. `draft_tokens[i]` is what a draft model appended to the row; empty if
    nothing was drafted. `unsampled` maps each row that should have been sampled and was not to why its grammar cannot
    continue: None if its mask was only not ready, so that the row's last token must be computed again. `elapsed_s` is
    wall time, `draft_s` the draft model's part of it. `corrected` are rows whose token differs from the one that an
    already launched next step used as input: that step's results for these rows are invalid. `pooled` has what each row
    with `pooling` requests, float64."""

    step_id: int
    sampled: tuple[tuple[int, ...], ...]
    elapsed_s: float = 0.0
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    scored: tuple[tuple[TokenLogprob, ...], ...] = ()
    draft_tokens: tuple[tuple[int, ...], ...] = ()
    draft_s: float = 0.0
    corrected: tuple[int, ...] = ()
    unsampled: Mapping[int, GrammarFailure | None] = field(default_factory=dict)
    pooled: Mapping[int, array[float]] = field(default_factory=dict)

    def logprobs_of(self, row: int) -> tuple[TokenLogprob, ...]:
        return self.logprobs[row] if self.logprobs else ()

    def scored_of(self, row: int) -> tuple[TokenLogprob, ...]:
        return self.scored[row] if self.scored else ()


def without_unsampled(
    plan: StepPlan, outcome: StepOutcome, unsampled: Mapping[SequenceId, GrammarFailure | None]
) -> StepOutcome:
    """Returns the outcome without the samples of these sequences, and with the reasons (`StepOutcome.unsampled`)."""
    if not unsampled:
        return outcome
    rows = {
        index: unsampled[row.sequence_id]
        for index, row in enumerate(plan.rows)
        if row.num_sampled and row.sequence_id in unsampled
    }
    sampled = tuple(() if index in rows else tokens for index, tokens in enumerate(outcome.sampled))
    logprobs = tuple(() if index in rows else row for index, row in enumerate(outcome.logprobs))
    return replace(outcome, sampled=sampled, logprobs=logprobs, unsampled=rows)


def check_outcome(plan: StepPlan | None, outcome: StepOutcome) -> StepPlan:
    """Returns the plan that `outcome` belongs to.

    Raises:
        InvariantError: the outcome is of another step, or does not have exactly what the plan's rows request.
    """
    if plan is None or plan.step_id != outcome.step_id:
        raise InvariantError(f"outcome of step {outcome.step_id} while step {plan and plan.step_id} is outstanding")
    num_sampled = [0 if index in outcome.unsampled else row.num_sampled for index, row in enumerate(plan.rows)]
    if [len(tokens) for tokens in outcome.sampled] != num_sampled:
        raise InvariantError(f"the outcome of step {plan.step_id} does not have the tokens that its rows sample")
    if outcome.pooled.keys() != {index for index, row in enumerate(plan.rows) if row.pooling}:
        raise InvariantError(f"the outcome of step {plan.step_id} does not have the vectors that its rows pool")
    logprobs, scored = outcome.logprobs, outcome.scored
    for index, row in enumerate(plan.rows):
        reported = num_sampled[index] if row.sampling.logprobs is not None else 0
        num_scored = len(scored[index]) if scored else 0
        if (len(logprobs[index]) if logprobs else 0) != reported or num_scored != len(row.scored):
            raise InvariantError(
                f"outcome of step {plan.step_id} does not have the log-probabilities that {row.sequence_id} requests"
            )
    return plan
