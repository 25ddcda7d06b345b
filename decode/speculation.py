"""Speculation as the scheduler sees it: pure. Which rows get guesses and how many, and what became of them."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.errors import InvariantError
from baton.core.events import SpeculationCounters
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import DraftRow, Row, StepPlan
from decode.acceptance import accepted_length, forced_length
from decode.draft_length import Acceptance, AcceptanceBook, StepPrice, choose_lengths
from decode.drafts import Drafts
from decode.step_cost import StepModel

MAX_GUESSES = 8
_SCOUT = 4  # times its patience that a sequence waits for a guess if its draft would first have to catch up

# Of so many positions after its last token, how many the sequence has blocks for.
Room = Callable[[Sequence, int], int]


class Speculation:
    """Complete state: `model`, the source of guesses, the book of how they fare, each sequence with its acceptance,
    those whose draft is wanted, whether guesses paid in the last step (`_pays`), and `counters`. Without `drafts`
    nothing is ever guessed.

    `fixed_length` guesses every time that many (0: as many as pay). `forced_rate` is for benchmarks alone: guesses
    count as right with that probability, and the output is not real.
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
        self.book = AcceptanceBook()
        self.counters = SpeculationCounters(forced=forced_rate is not None)
        self._open: dict[SequenceId, tuple[Sequence, Acceptance]] = {}
        self._wanted: dict[SequenceId, Sequence] = {}
        self._pays = True

    def open(self, sequence: Sequence) -> None:
        """A sequence whose KV is to come."""
        if self.drafts is not None:
            self.drafts.open(sequence)
            self._open[sequence.id] = sequence, self.book.opened()
            if self.fixed_length or self._pays:
                self._wanted[sequence.id] = sequence

    def close(self, sequence_id: SequenceId) -> None:
        if self.drafts is not None:
            self.drafts.close(sequence_id)
            self._open.pop(sequence_id, None)
            self._wanted.pop(sequence_id, None)

    def extend(self, plan: StepPlan, sequences: list[Sequence], room: Room) -> StepPlan:
        """The plan with guesses, or with the draft rows that will make them. `sequences[i]` is that of row i."""
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
            if not possible:
                self._wanted[sequence.id] = sequence
                continue
            count = room(sequence, possible)
            guess = self.drafts.guess(sequence, index, count) if count > 0 else None
            if guess is None:
                continue
            if guess.draft is not None:
                drafts.append(guess.draft)
            row = rows[index]
            rows[index] = sequence.row(row.start, row.end, num_sampled=1 + len(guess.tokens), drafts=guess.tokens)
        drafts += self._fills(idle=not rows)
        return StepPlan(plan.step_id, tuple(rows), tuple(drafts))

    def settle(
        self, sequence: Sequence, row: Row, sampled: tuple[int, ...], counters: SpeculationCounters
    ) -> tuple[tuple[int, ...], SpeculationCounters]:
        """What a row's samples add to its sequence, which has not got them yet, and its counters with them."""
        guessed = row.num_sampled - 1
        if self.drafts is None or guessed < 0:
            return sampled, counters
        guesses = row.tokens[len(row.tokens) - guessed :]
        accepted = accepted_length(guesses, sampled)
        taken = sampled[: accepted + 1]
        if self.forced_rate is not None:
            accepted = forced_length(guessed, row.output_index, row.sampling.seed, self.forced_rate)
            taken = guesses[:accepted] + sampled[accepted : accepted + 1]
        self.book.settle(self._open[sequence.id][1], guessed, accepted)
        self.drafts.settle(sequence, guessed, accepted)
        if not guessed:
            return taken, counters
        self.counters = self.counters.plus(guessed, accepted)
        return taken, counters.plus(guessed, accepted, forced=self.forced_rate is not None)

    def check(self, sequence_ids: set[SequenceId]) -> None:
        """Raises InvariantError when the books here are of other sequences."""
        if self.drafts is not None:
            self.drafts.check(sequence_ids)
            if set(self._open) != sequence_ids or not set(self._wanted) <= sequence_ids:
                raise InvariantError(f"speculation for {set(self._open) ^ sequence_ids}")

    def _lengths(self, plan: StepPlan, sequences: list[Sequence]) -> list[int]:
        most = [min(MAX_GUESSES, s.request.max_tokens - len(s.output) - 1) for s in sequences]
        if self.fixed_length:
            return [max(0, min(self.fixed_length, limit)) for limit in most]
        model, acceptances = self.model, [self._open[s.id][1] for s in sequences]
        long = plan.num_tokens > len(plan.rows)
        price = StepPrice(
            (model.long if long else model.short).seconds,
            model.draft.seconds,
            model.draft_next.seconds,
            plan.num_tokens,
            model.fixed_s,
        )
        lengths = choose_lengths([a.rate for a in acceptances], most, price)
        self._pays = any(lengths) or not sequences
        for index, (sequence, acceptance) in enumerate(zip(sequences, acceptances, strict=True)):
            if lengths[index] or most[index] <= 0 or not acceptance.probe_due:
                continue
            if self._ready(sequence):
                lengths[index] = 1
            elif not self._wanted and acceptance.idle >= _SCOUT * acceptance.patience:
                self._wanted[sequence.id] = sequence  # one at a time, to learn what guesses cost now
        return lengths

    def _ready(self, sequence: Sequence) -> bool:
        """Whether a guess costs no more than itself: a draft that is far behind would first have to catch up."""
        return self.drafts is not None and self.drafts.room(sequence, 1) > 0

    def _fills(self, idle: bool) -> list[DraftRow]:
        """Brings drafts up to date that are wanted: those of new sequences, and those that were too far behind."""
        rows: list[DraftRow] = []
        tokens = self.model.fill_tokens(idle)
        for sequence_id, sequence in list(self._wanted.items()):
            if tokens <= 0 or self.drafts is None:
                break
            row = None if self.drafts.room(sequence, 1) else self.drafts.fill(sequence, tokens)
            if row is None:  # near enough to guess, or its draft has no blocks
                del self._wanted[sequence_id]
            else:
                rows.append(row)
                tokens -= len(row.tokens)
        return rows
