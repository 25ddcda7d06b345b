"""A simulated cluster's model for runs of which only the times matter."""

from __future__ import annotations

import random

from baton.core.edge_orders import Part
from baton.core.reshard import EdgePlan
from baton.core.step import StepOutcome, StepPlan
from sim.engine import Payload


class ConstantModel:
    """A `sim.engine.Engine` without KV whose every token is the same. The share `draft_accuracy` of draft tokens is
    accepted, decided by a generator of its own."""

    TOKEN = 1

    def __init__(self, draft_accuracy: float = 0.7, seed: int = 0) -> None:
        self._draft_accuracy = draft_accuracy
        self._random = random.Random(seed)

    def step(self, plan: StepPlan) -> StepOutcome:
        token = self.TOKEN
        draft_tokens: tuple[tuple[int, ...], ...] = ()
        rows = plan.rows
        if plan.drafts:
            counts = {draft.row: draft.num_draft_tokens for draft in plan.drafts if draft.num_draft_tokens}
            draft_tokens = tuple(self._draft(counts.get(index, 0)) for index in range(len(rows))) if counts else ()
            rows = plan.with_draft_tokens(draft_tokens).rows if counts else rows
        sampled = tuple((token,) * row.num_sampled for row in rows)
        return StepOutcome(plan.step_id, sampled, draft_tokens=draft_tokens)

    def _draft(self, count: int) -> tuple[int, ...]:
        draw = self._random.random
        return tuple(self.TOKEN if draw() < self._draft_accuracy else self.TOKEN + 1 for _ in range(count))

    def first_layers(self, plan: StepPlan, layers: int) -> None:
        pass

    def pack(self, part: Part, plan: EdgePlan) -> Payload:
        return []

    def store(self, part: Part, plan: EdgePlan, payload: Payload) -> None:
        pass
