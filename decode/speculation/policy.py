"""Speculation as the scheduler sees it: pure. Which rows get draft tokens and how many, and which were accepted.

A draft model that is to draft must have computed the text so far, which on a CPU costs as much as many draft tokens: a
sequence's draft KV is brought up to date only if that is expected to pay off, or for a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.core.errors import InvariantError
from baton.core.events import SpeculationCounters
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import DraftRow, Row, StepPlan
from decode.speculation.acceptance import TRIAL_DRAFT_TOKENS, AcceptanceEstimates, Trials
from decode.speculation.draft_length import (
    MAX_DRAFT_TOKENS,
    StepPrice,
    choose_length,
    choose_lengths,
    saved_per_token,
)
from decode.speculation.drafts import CATCH_UP, Drafts
from decode.speculation.step_cost import StepModel

_MARGIN = 1.5  # filling draft KV must be expected to save this many times its cost
_CHECK_INTERVAL = 8  # steps between two checks of a lone sequence for which nothing is drafted
_USUAL_TOKENS = 128.0  # estimated length of an answer, until some have ended
_USUAL_WEIGHT = 0.1  # weight of one answer in the moving average
_MODULUS = 1 << 16  # of `forced_length`

# Allocates blocks for up to this many positions after the last token of a sequence; returns how many have blocks.
Allocate = Callable[[Sequence, int], int]


class Speculation:
    """Without `drafts` nothing is drafted.

    `fixed_length` draft tokens per step (0: chosen adaptively). `forced_rate` is for benchmarks only: draft tokens
    count as accepted with that probability, and the output is not real.
    """

    def __init__(
        self,
        drafts: Drafts | None = None,
        model: StepModel | None = None,
        *,
        fixed_length: int = 0,
        forced_rate: float | None = None,
    ) -> None:
        self.drafts = drafts
        self.model = model or StepModel()
        self.fixed_length = fixed_length
        self.forced_rate = forced_rate
        self.acceptance = AcceptanceEstimates()
        self.trials = Trials()
        self.counters = SpeculationCounters(forced=forced_rate is not None)
        # Sequences that are here, with or without KV.
        self._num_sequences = 0
        # Those whose draft KV is to be filled.
        self._to_fill: dict[SequenceId, Sequence] = {}
        # The average length of an answer.
        self._usual_tokens = _USUAL_TOKENS
        # The index of the sequence that was checked last, the steps so far, how many of the last ones chose nothing.
        self._last_checked = self._steps = self._skipped = 0

    def open(self, sequence: Sequence) -> None:
        """Registers a sequence whose KV is about to arrive."""
        if self.drafts is not None:
            self.drafts.open(sequence)
            self._num_sequences += 1
            self._to_fill[sequence.id] = sequence

    def close(self, sequence: Sequence) -> None:
        if self.drafts is not None:
            self.drafts.close(sequence)
            self._num_sequences -= 1
            if sequence.output:  # a sequence that never arrived does not count
                self._usual_tokens += _USUAL_WEIGHT * (len(sequence.output) - self._usual_tokens)
            self._to_fill.pop(sequence.id, None)
            self.trials.close(sequence.id)

    def extend(self, plan: StepPlan, sequences: list[Sequence], allocate: Allocate) -> StepPlan:
        """Returns the plan with draft tokens, or draft rows that will make them. `sequences[i]` is that of row i."""
        if self.drafts is None:
            return plan
        rows, drafts = list(plan.rows), list[DraftRow]()
        ready = [index for index, row in enumerate(rows) if row.num_sampled]
        lengths = self._lengths(plan, [sequences[index] for index in ready])
        for index, length in zip(ready, lengths, strict=True):
            if not length:
                continue
            sequence = sequences[index]
            possible = self.drafts.room(sequence, length)
            count = allocate(sequence, possible) if possible else 0
            if count <= 0:
                continue
            self.trials.drafted(sequence.id)
            row, known = rows[index], self.drafts.propose(sequence, index, count)
            if isinstance(known, DraftRow):
                drafts.append(known)
                known = ()
            if known or row.block_ids is not sequence.block_ids:
                score, sampled = sequence.computes_prompt, 1 + len(known)
                rows[index] = sequence.row(row.start, row.end, num_sampled=sampled, drafts=known, score=score)
        drafts += self._fills(idle=not rows)
        return StepPlan(plan.step_id, tuple(rows), tuple(drafts))

    def verify(self, sequence: Sequence, row: Row, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens that a row's samples add to its sequence, which the caller appends."""
        drafted = row.num_sampled - 1
        if self.drafts is None or drafted < 0:
            return sampled
        draft_tokens = row.tokens[len(row.tokens) - drafted :]
        accepted = accepted_length(draft_tokens, sampled)
        taken = sampled[: accepted + 1]
        if self.forced_rate is not None:
            accepted = forced_length(drafted, row.output_index, row.sampling.seed, self.forced_rate)
            taken = draft_tokens[:accepted] + sampled[accepted : accepted + 1]
        self.acceptance.observe(sequence, drafted, accepted)
        self.drafts.on_verified(sequence, drafted, accepted)
        if drafted:
            self.counters = self.counters.plus(drafted, accepted)
            sequence.speculation = sequence.speculation.plus(drafted, accepted, forced=self.forced_rate is not None)
        return taken

    def check_idle(self) -> None:
        """Raises InvariantError, in constant time, if state of any sequence is left."""
        if self.drafts is not None:
            self.drafts.check_idle()
            self._check_sequences(set())

    def check(self, sequences: Mapping[SequenceId, Sequence]) -> None:
        """Raises InvariantError unless there is state of exactly these sequences."""
        if self.drafts is not None:
            self.drafts.check(sequences.values())
            self._check_sequences(set(sequences))

    def _check_sequences(self, sequence_ids: set[SequenceId]) -> None:
        ended = set(self._to_fill) - sequence_ids
        if self._num_sequences != len(sequence_ids) or ended:
            raise InvariantError(
                f"speculation has {self._num_sequences} of {len(sequence_ids)} sequences, and fills drafts of {ended}"
            )

    def _lengths(self, plan: StepPlan, sequences: list[Sequence]) -> list[int]:
        """Returns the draft length of each sequence of the plan that samples; may add sequences to `_to_fill`."""
        longest = [min(MAX_DRAFT_TOKENS, s.request.max_tokens - len(s.output) - 1) for s in sequences]
        behind = [self.drafts.behind(s) if self.drafts is not None else 0 for s in sequences]
        if self.fixed_length:
            self._to_fill |= {s.id: s for s, n in zip(sequences, behind, strict=True) if n > CATCH_UP}
            return [max(0, min(self.fixed_length, limit)) for limit in longest]
        if not sequences:
            return []
        self._steps += 1
        # A lone sequence that cannot be drafted for, and no trial runs: there is nothing to choose.
        far_off = self._num_sequences == 1 and behind[0] > CATCH_UP and self.trials.sequence_id is None
        if far_off and self._steps % _CHECK_INTERVAL:
            self._skipped += 1
            return [0]
        limits = [limit if n <= CATCH_UP else 0 for limit, n in zip(longest, behind, strict=True)]
        lone = self.model.of_one_row() if plan.num_tokens == 1 else None
        if lone is not None:
            plain_s = lone[0]
            lengths = [choose_length(self.acceptance.rate(sequences[0]), limits[0], *lone)]
        else:
            price = self._price(len(plan.rows), plan.num_tokens)
            plain_s = price.plain_s
            lengths = choose_lengths([self.acceptance.rate(s) for s in sequences], limits, price)
        self.trials.stepped(plain_s, 1 + self._skipped)
        self._skipped = 0
        if self._num_sequences > 1 or self._steps % _CHECK_INTERVAL == 0:
            index = self._last_checked = (self._last_checked + 1) % len(sequences)  # one at a time is enough
            if not lengths[index] and longest[index] >= TRIAL_DRAFT_TOKENS:
                self._look(plan, sequences[index], behind[index], len(sequences))
        for index, sequence in enumerate(sequences):
            if sequence.id == self.trials.sequence_id and limits[index] > 0:
                lengths[index] = max(lengths[index], 1)
        return lengths

    def _look(self, plan: StepPlan, sequence: Sequence, behind: int, rows: int) -> None:
        """Adds `sequence`, one of `rows` and not drafted for, to `_to_fill` if filling its draft KV pays off, or for a
        trial."""
        price = self._price(len(plan.rows), plan.num_tokens)
        each_s = price.draft_token_s(1)
        if behind <= CATCH_UP:  # it can draft immediately: if that almost pays off, it is nearly free
            each_s = max(each_s - self.acceptance.rate(sequence) * price.plain_s / rows, 0.0)
        cost_s = self._fill_s(behind) + TRIAL_DRAFT_TOKENS * each_s
        if self._pays_back(sequence) or self.trials.begin(sequence.id, cost_s, alone=self._num_sequences == 1):
            self._to_fill[sequence.id] = sequence

    def _price(self, rows: int, tokens: int) -> StepPrice:
        model = self.model
        target = model.long.seconds if tokens > rows else model.short_by_tokens(rows)
        draft, draft_next = model.draft_first.seconds, model.draft_next.seconds
        return StepPrice(target, draft, draft_next, tokens, model.fixed_s, model.any_draft_s)

    def _fill_s(self, behind: int) -> float:
        """Returns the seconds needed to fill draft KV up to where the draft model can draft."""
        return self.model.draft.seconds(behind) if behind > CATCH_UP else 0.0

    def _pays_back(self, sequence: Sequence) -> bool:
        """Whether draft tokens are expected to save more over the rest of an answer than filling its draft KV costs, if
        all sequences that are here decode."""
        if self.drafts is None:
            return False
        rows, done = self._num_sequences, len(sequence.output)
        left = min(sequence.request.max_tokens - done, max(self._usual_tokens - done, self._usual_tokens / 4))
        saved_s = left * saved_per_token(self.acceptance.rate(sequence), rows, self._price(rows, rows))
        return saved_s > _MARGIN * self._fill_s(self.drafts.behind(sequence))

    def _fills(self, idle: bool) -> list[DraftRow]:
        """Returns the draft rows that fill the draft KV of `_to_fill` sequences, where that pays off."""
        rows: list[DraftRow] = []
        tokens = self.model.fill_tokens(idle) if self._to_fill else 0
        for sequence_id, sequence in list(self._to_fill.items()):
            if tokens <= 0 or self.drafts is None:
                break
            paid = self.fixed_length or sequence_id == self.trials.sequence_id or self._pays_back(sequence)
            near = self.drafts.behind(sequence) <= CATCH_UP and self.drafts.room(sequence, 1) > 0
            row = self.drafts.fill(sequence, tokens) if paid and not near else None
            if row is None:  # near enough to draft, not worth it, or its draft has no blocks
                del self._to_fill[sequence_id]
            else:
                rows.append(row)
                tokens -= len(row.tokens)
        return rows


def accepted_length(draft_tokens: tuple[int, ...], own: tuple[int, ...]) -> int:
    """Returns how many draft tokens equal the target's own tokens, from the first on. `own` has one token more.

    The own token at each position was sampled as if the draft tokens before it were output, with the same noise as
    without drafting (docs/numerics.md). So while draft and own tokens are equal, the own token is exactly what plain
    decoding would have sampled; so is the first own token that differs, but none after it.
    """
    for index, draft_token in enumerate(draft_tokens):
        if draft_token != own[index]:
            return index
    return len(draft_tokens)


def forced_length(count: int, output_index: int, seed: int, rate: float) -> int:
    """For benchmarks only: returns how many of `count` draft tokens count as accepted if each does with probability
    `rate`, regardless of the target. A pure function of its arguments, so that runs can be repeated."""
    for index in range(count):
        word = ((output_index + index + 1) * 0x9E3779B97F4A7C15 ^ (seed + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        word = (word ^ word >> 30) * 0x94D049BB133111EB & (2**64 - 1)
        if (word >> 40) % _MODULUS >= rate * _MODULUS:
            return index
    return count
