"""How long a step will take: a curve over its number of tokens, measured at start, and what steps take now. Pure.

The curve gives the shape (a few tokens more are nearly free while reading the weights is what takes time), the scale
follows the load of the machine and the length of contexts. One object knows one kind of step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from baton.core.step import StepOutcome, StepPlan

LEAST_LONG_TOKENS = 16
FILL_SHARE = 0.2

_WEIGHT = 0.1  # of a new observation in the scale
_FASTER_WEIGHT = 0.5  # of one that took less: what disturbs a step only ever makes it longer
_OUTLIER = 4.0  # an observation counts as at most this many times what was expected: one stall is not a trend


class StepCost:
    """Complete state: the curve as `(tokens, seconds)` with both rising, and `scale`."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        if not points:
            raise ValueError("a cost curve needs a point")
        self._tokens = [tokens for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # noise may make a longer step look faster
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0, 1e-6))
        if self._tokens != sorted(set(self._tokens)):
            raise ValueError(f"points of a cost curve do not rise: {self._tokens}")
        self.scale = 1.0

    def __repr__(self) -> str:
        curve = ", ".join(f"{n}: {s * 1e3:.2f}" for n, s in zip(self._tokens, self._seconds, strict=True))
        return f"<StepCost {curve} ms | scale {self.scale:.2f}>"

    def seconds(self, tokens: int) -> float:
        """What a step of that many tokens is expected to take; 0 for an empty one."""
        return self._curve(tokens) * self.scale if tokens > 0 else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step has taken that long."""
        if tokens > 0:
            self.correct(seconds, self.seconds(tokens))

    def correct(self, seconds: float, expected: float) -> None:
        """What was expected to take `expected` seconds took `seconds`."""
        if seconds > 0.0 and expected > 0.0:
            ratio = min(seconds / expected, _OUTLIER)
            self.scale *= 1.0 + (_WEIGHT if ratio > 1.0 else _FASTER_WEIGHT) * (ratio - 1.0)

    def tokens_within(self, seconds: float, limit: int) -> int:
        """The most tokens, up to `limit`, that a step of that length computes; 0 if not even one."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle - 1)
        return low

    def _curve(self, tokens: int) -> float:
        index = bisect_left(self._tokens, tokens)
        if index == 0:
            return self._seconds[0]
        if index == len(self._tokens):
            if index == 1:
                return self._seconds[0] * tokens / self._tokens[0]
            index -= 1  # beyond the last point as along the last segment
        x0, x1 = self._tokens[index - 1], self._tokens[index]
        y0, y1 = self._seconds[index - 1], self._seconds[index]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class StepModel:
    """What steps of this worker cost, and how much of a step long rows may take. Steps with and without long rows have
    curves of their own, and so have the first pass of a draft and those behind it (`draft_next`, by default the same).
    Complete state: these, and `fixed_s`, what surrounds the two models' passes."""

    def __init__(
        self,
        target: Sequence[tuple[int, float]] = ((1, 1e-3),),
        draft: Sequence[tuple[int, float]] = ((1, 1e-4),),
        draft_next: Sequence[tuple[int, float]] = (),
        *,
        budget_s: float = 0.05,
        step_tokens: int = 512,
    ) -> None:
        self.short, self.long = StepCost(target), StepCost(target)
        self.draft, self.draft_next = StepCost(draft), StepCost(draft_next or draft)
        self.budget_s, self.step_tokens = budget_s, step_tokens
        self.fixed_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<StepModel {self.short!r}, long x {self.long.scale:.2f}, draft {self.draft!r}, then {self.draft_next!r}>"
        )

    def long_tokens(self, running: int) -> int:
        """Tokens of long rows for which the next step has time beside `running` short ones; never fewer than
        LEAST_LONG_TOKENS."""
        fits = self.long.tokens_within(self.budget_s, self.step_tokens)
        return max(min(fits, self.step_tokens) - running, LEAST_LONG_TOKENS)

    def fill_tokens(self, idle: bool) -> int:
        """Tokens of prompts for which the draft has time in the next step, all of it when nothing else runs."""
        share = 1.0 if idle else FILL_SHARE
        return max(self.draft.tokens_within(self.budget_s * share, self.step_tokens), LEAST_LONG_TOKENS)

    def draft_s(self, plan: StepPlan) -> float:
        """What the draft's passes of a plan are expected to take."""
        expected = self.draft.seconds(sum(len(row.tokens) for row in plan.drafts))
        for depth in range(1, max((row.num_guesses for row in plan.drafts), default=0)):
            expected += self.draft_next.seconds(sum(row.num_guesses > depth for row in plan.drafts))
        return expected

    def observe(self, plan: StepPlan, outcome: StepOutcome, wall_s: float) -> None:
        """A step has been computed; `wall_s` from its plan to its outcome's arrival."""
        target_s = outcome.elapsed_s - outcome.draft_s
        long = any(len(row.tokens) > max(row.num_sampled, 1) for row in plan.rows)
        (self.long if long else self.short).observe(plan.num_tokens, target_s)
        if plan.drafts and all(row.num_guesses for row in plan.drafts):  # long rows have another price
            expected = self.draft_s(plan)
            for curve in (self.draft, self.draft_next):
                curve.correct(outcome.draft_s, expected)
        self.fixed_s += _WEIGHT * (max(wall_s - outcome.elapsed_s, 0.0) - self.fixed_s)
