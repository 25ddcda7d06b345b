"""A device that computes as late as it may: a step is computed when it is collected, so that nothing of it is known
when the next one is planned and launched. What is wrong with a plan made ahead, or with blocks that were given away too
early, shows in the tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from baton.core.step import StepOutcome, StepPlan

Step = Callable[[StepPlan], StepOutcome]


class LateDevice:
    """Puts the tokens of the step before into a plan just before `step` computes it. `mistaken(plan)` are rows whose
    token was too close to tell: the step behind is fed another one, and the outcome says so."""

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
