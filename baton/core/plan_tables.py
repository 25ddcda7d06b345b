"""What plans say of block tables on their way from a leader to its followers: only what has changed.

A plan states the whole table of each row, and most rows continue a row of the plan before. Both ends remember the
tables of the last plan; a follower's rows have the same tuple again where nothing has changed, so that its block tables
(baton.engine.block_tables) need not look at them either. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.errors import InvariantError
from baton.core.request import SequenceId
from baton.core.step import Row, StepPlan


@dataclass(frozen=True, slots=True)
class ShortPlan:
    """The table of row i of `plan` follows the first `kept[i]` blocks of its sequence's table in the plan before."""

    plan: StepPlan
    kept: tuple[int, ...]


class PlanTables:
    """One end of a channel that carries every plan in order."""

    def __init__(self) -> None:
        # Those of the last plan.
        self._tables: dict[SequenceId, tuple[int, ...]] = {}

    def shorten(self, plan: StepPlan) -> ShortPlan:
        kept = tuple(self._kept(row) for row in plan.rows)
        self._tables = {row.sequence_id: row.block_ids for row in plan.rows}
        counts = iter(kept)
        return ShortPlan(_with_tables(plan, lambda row: row.block_ids[next(counts) :]), kept)

    def lengthen(self, short: ShortPlan) -> StepPlan:
        """Raises InvariantError for a plan that keeps more than the last one had."""
        if len(short.kept) != len(short.plan.rows):
            raise InvariantError(f"step {short.plan.step_id}: tables of {len(short.kept)} rows")
        counts = iter(short.kept)
        plan = _with_tables(short.plan, lambda row: self._whole(row, next(counts)))
        self._tables = {row.sequence_id: row.block_ids for row in plan.rows}
        return plan

    def _kept(self, row: Row) -> int:
        known = self._tables.get(row.sequence_id, ())
        return len(known) if known is row.block_ids or known == row.block_ids[: len(known)] else 0

    def _whole(self, row: Row, kept: int) -> tuple[int, ...]:
        known = self._tables.get(row.sequence_id, ())
        if not 0 <= kept <= len(known):
            raise InvariantError(f"{row.sequence_id}: {kept} blocks of the last plan, which had {len(known)}")
        if not kept:
            return row.block_ids
        return (known if kept == len(known) else known[:kept]) + row.block_ids


def _with_tables(plan: StepPlan, table: Callable[[Row], tuple[int, ...]]) -> StepPlan:
    rows = tuple(
        Row(
            row.sequence_id,
            row.start,
            row.tokens,
            table(row),
            row.sampling,
            row.num_sampled,
            row.output_index,
            row.history,
            row.scored,
            row.pooling,
            row.adapter,
        )
        for row in plan.rows
    )
    return StepPlan(plan.step_id, rows, plan.drafts, plan.token_sources, plan.drafted)
