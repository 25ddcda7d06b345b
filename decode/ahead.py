"""Outstanding steps, and what may be planned while one still computes: pure.

Step n + 1 is planned on the assumption that each row of step n which samples yields one token, and that this token does
not end the sequence. So the plan knows the position at which each sequence continues, but not its token. Each row names
the row of step n whose sample it computes (`StepPlan.token_sources`), and the engine inserts the token.

- An end by length is known beforehand: such a sequence has no row in n + 1. A sequence that ends by its token, or is
  aborted, has one: its result is discarded, and the sequence keeps its blocks until n + 1 is done, so that no other
  sequence's KV is written into blocks that a launched step still writes. Its end is reported immediately.
- Nothing is preempted for a step that is planned ahead, because a sequence with an outstanding row keeps its blocks. If
  blocks are short, steps are planned one after the other.
- What depends on which token was sampled, not only on how many, is unknown as well; `waits_for` lists all cases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.core.sequence import Sequence
from baton.core.step import StepOutcome, StepPlan, check_outcome


class OutstandingSteps:
    def __init__(self) -> None:
        # The outstanding plans with their start times, oldest first.
        self._plans: deque[tuple[StepPlan, float]] = deque()
        self._ended_at = float("-inf")

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def newest(self) -> StepPlan:
        return self._plans[-1][0]

    def begin(self, plan: StepPlan, now: float) -> None:
        self._plans.append((plan, now))

    def end(self, outcome: StepOutcome, now: float) -> tuple[StepPlan, float]:
        """Removes the oldest plan; returns it with its draft tokens, and the seconds for which it was the oldest.

        Raises:
            InvariantError: the outcome is not that of the oldest step.
        """
        plan, began_at = self._plans[0] if self._plans else (None, 0.0)
        plan = check_outcome(plan and plan.with_draft_tokens(outcome.draft_tokens), outcome)
        self._plans.popleft()
        wall_s = now - max(began_at, self._ended_at)
        self._ended_at = now
        return plan, wall_s


@dataclass(frozen=True, slots=True)
class Next:
    """Positions [start, end) of a sequence. `token_source` is the row of the outstanding step that samples their only
    token; -1 if all their tokens are known."""

    sequence: Sequence
    start: int
    end: int
    token_source: int = -1


def waits_for(out: StepPlan, running: Iterable[Sequence]) -> str:
    """Returns why no step can be planned before the tokens of `out` are known; empty if one can."""
    if out.drafts or any(row.num_sampled > 1 for row in out.rows):
        return "the number of accepted draft tokens"
    sampled = {row.sequence_id for row in out.rows if row.num_sampled}
    if any(s.id in sampled and s.request.sampling.depends_on_history for s in running):
        return "a sampled token that penalties, bad words or a grammar depend on"
    return ""


Share = Callable[[Mapping[Sequence, int], int], dict[Sequence, int]]
"""Returns how many tokens each sequence with a long row computes in a step of so many sequences, given with how many it
has to compute."""


def next_rows(out: StepPlan, running: Iterable[Sequence], share: Share) -> list[Next]:
    """Returns what the running sequences compute after `out`; `share` divides the long rows."""
    rows = {row.sequence_id: (index, row) for index, row in enumerate(out.rows)}
    nexts: list[Next] = []
    long: dict[Sequence, int] = {}
    for sequence in running:
        if sequence.ending is not None or sequence.discard_result:
            continue  # its outstanding result is discarded; it continues after that, if at all
        index, row = rows.get(sequence.id, (-1, None))
        if row is not None and row.num_sampled:
            if row.output_index + 1 < sequence.request.max_tokens:
                nexts.append(Next(sequence, row.end, row.end + 1, index))
            continue
        start = sequence.num_computed if row is None else row.end
        count = sequence.num_tokens - start
        if count > 1:
            long[sequence] = count
        if count:
            nexts.append(Next(sequence, start, start + count))
    if not long:
        return nexts
    long = share(long, len(nexts))
    counted = [replace(n, end=n.start + long.get(n.sequence, n.end - n.start)) for n in nexts]
    return [n for n in counted if n.end > n.start]


def ahead_plan(step_id: int, out: StepPlan, nexts: list[Next]) -> StepPlan:
    """Returns the plan of these rows, whose sequences have the blocks for them. Raises InvariantError in cases for
    which `waits_for` gives a reason."""
    rows = []
    for n in nexts:
        if n.token_source < 0:
            rows.append(n.sequence.next_row(n.start, n.end))
        else:
            rows.append(n.sequence.row_behind(out.rows[n.token_source]))
    token_sources = tuple(n.token_source for n in nexts)
    return StepPlan(step_id, tuple(rows), token_sources=token_sources if max(token_sources, default=-1) >= 0 else ())
