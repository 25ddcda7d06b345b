"""Steps that are out, and what may be planned while one still computes: pure.

Step n + 1 is planned on the assumption that each row of step n which samples yields its one token and does not end its
sequence by it. So where its sequence goes on is known, and how far it has come; not the token. The row of n + 1 names
the row of n whose sample it is to compute (`StepPlan.token_sources`), and the engine puts it there.

- An end by length is known beforehand: such a sequence has no row in n + 1. One that ends by its token, or is aborted,
  has one: its result is thrown away, and the sequence keeps its blocks until n + 1 is done, so that nobody else's KV
  can come into blocks that a launched step still writes. Its end is reported at once.
- Nothing is preempted for a step that is planned ahead, since whoever has a row out keeps its blocks: where blocks are
  short, steps are planned one after the other.
- What depends on which token came, not on how many, is not known either. `waits_for` says all of it in one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.step import StepOutcome, StepPlan, check_outcome
from decode.entry import Entry


class StepsOut:
    """Complete state: the plans that are out with their beginnings, oldest first, and when the last one came back."""

    def __init__(self) -> None:
        self._out: deque[tuple[StepPlan, float]] = deque()
        self._ended_at = float("-inf")

    def __len__(self) -> int:
        return len(self._out)

    @property
    def newest(self) -> StepPlan:
        return self._out[-1][0]

    def begin(self, plan: StepPlan, now: float) -> None:
        self._out.append((plan, now))

    def end(self, outcome: StepOutcome, now: float) -> tuple[StepPlan, float]:
        """The oldest plan, with its draft tokens, and the seconds in which nothing older was out.

        Raises:
            InvariantError: the outcome is not that of the oldest step.
        """
        plan, began_at = self._out[0] if self._out else (None, 0.0)
        plan = check_outcome(plan and plan.with_draft_tokens(outcome.draft_tokens), outcome)
        self._out.popleft()
        wall_s = now - max(began_at, self._ended_at)
        self._ended_at = now
        return plan, wall_s


@dataclass(frozen=True, slots=True)
class Next:
    """Positions [start, end) of a sequence. `token_source` is the row of the step that is out whose token is the only
    one of them; -1 where all are known."""

    entry: Entry
    start: int
    end: int
    token_source: int = -1


def waits_for(out: StepPlan, running: Iterable[Entry]) -> str:
    """Why no step can be planned before the tokens of `out` are known; empty where one can."""
    if out.drafts or any(row.num_sampled > 1 for row in out.rows):
        return "how many draft tokens are right"
    sampled = {row.sequence_id for row in out.rows if row.num_sampled}
    if any(e.sequence.id in sampled and e.sequence.request.sampling.depends_on_history for e in running):
        return "the token that penalties, bad words or a grammar look back at"
    return ""


def next_rows(out: StepPlan, running: Sequence[Entry], long_tokens: int) -> list[Next]:
    """What the running sequences compute behind `out`; up to `long_tokens` of long rows."""
    rows = {row.sequence_id: (index, row) for index, row in enumerate(out.rows)}
    found: list[Next] = []
    for entry in running:
        sequence = entry.sequence
        if sequence.ending is not None or entry.discard_result:
            continue  # what it has out says nothing; it goes on, if at all, when that is in
        index, row = rows.get(sequence.id, (-1, None))
        if row is not None and row.num_sampled:
            if row.output_index + 1 < sequence.request.max_tokens:
                found.append(Next(entry, row.end, row.end + 1, index))
            continue
        start = sequence.num_computed if row is None else row.end
        count = sequence.num_tokens - start
        if count > 1:
            count = min(count, long_tokens)
            long_tokens -= count
        if count:
            found.append(Next(entry, start, start + count))
    return found


def ahead_plan(step_id: int, out: StepPlan, found: Sequence[Next]) -> StepPlan:
    """The plan of these rows, whose sequences have the blocks for them. Raises InvariantError where `waits_for` would
    have said why not."""
    rows = []
    for n in found:
        sequence = n.entry.sequence
        if n.token_source < 0:
            rows.append(sequence.row(n.start, n.end, num_sampled=int(n.end == sequence.num_tokens)))
        else:
            rows.append(sequence.row_behind(out.rows[n.token_source]))
    token_sources = tuple(n.token_source for n in found)
    return StepPlan(step_id, tuple(rows), token_sources=token_sources if max(token_sources, default=-1) >= 0 else ())
