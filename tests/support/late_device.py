"""A device that computes as late as possible: a step is computed only when it is collected, so that none of its results
is known when the next step is planned and launched. An error in a plan made ahead, or blocks that were freed too early,
result in wrong tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from baton.core.step import StepOutcome, StepPlan

Step = Callable[[StepPlan], StepOutcome]


class LateDevice:
    """Inserts the tokens of the previous step into a plan just before `step` computes it. `mistaken(plan)` are rows
    whose token was too close to decide: the next step gets another token for them, and the outcome marks them."""

    def __init__(self, step: Step, mistaken: Callable[[StepPlan], Collection[int]] = lambda plan: ()) -> None:
        self._step, self._mistaken = step, mistaken
        self._waiting: deque[StepPlan] = deque()
        self._handed_on: tuple[tuple[int, ...], ...] = ()
        self.rows_with_device_token = self.most_waiting = self.mistakes = 0

    def launch(self, plan: StepPlan) -> None:
        self._waiting.append(plan)
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def collect(self) -> StepOutcome:
        plan = self._waiting.popleft()
        rows = list(plan.rows)
        for index, source in enumerate(plan.token_sources):
            if source >= 0:
                assert rows[index].tokens == (0,)
                rows[index] = replace(rows[index], tokens=self._handed_on[source])
                self.rows_with_device_token += 1
        outcome = self._step(StepPlan(plan.step_id, tuple(rows)))
        wrong = {index for index in self._mistaken(plan) if plan.rows[index].num_sampled}
        self._handed_on = tuple(
            (tokens[0] + 1,) if index in wrong else tokens for index, tokens in enumerate(outcome.sampled)
        )
        self.mistakes += len(wrong)
        return replace(outcome, corrected=tuple(sorted(wrong)))
