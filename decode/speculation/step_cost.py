"""How long a step will take: curves that were measured at start, and what steps take now. Pure.

A curve gives the shape (a few tokens more are nearly free while reading the weights is what takes time), its scale
follows the load of the machine and the length of contexts. One object knows one kind of step.

A token that is verified costs less than one of another sequence, whose context has to be read. So steps without long
rows have a price by rows and one for each draft token in them, and the second follows what is seen on its own account,
too: it was measured while other processes started.

Everything that prices are compared of is followed in the same way, so that noise shifts all of it alike. What each
constant here is worth: decision 0023.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from baton.core.step import StepOutcome, StepPlan

LEAST_LONG_TOKENS = 16
FILL_SHARE = 0.2
PLANNING_S = 4e-5  # that planning and settling draft tokens adds to a step; timed alone 0.04 ms, beside load up to 0.2

_WEIGHT = 0.1  # of a new observation in the scale
_MORE_WEIGHT = 3.0  # times that in the price of a draft token, for the part that draft tokens have in the step
_FAR_LESS, _FAR_LESS_WEIGHT = 0.65, 0.5  # of one that took so much less: noise seldom does that, the end of a load does
_OUTLIER = 2.0  # an observation counts as at most this many times what was expected: one stall is not a trend
_LEAST_PER_DRAFT_TOKEN = 0.03  # of a step, that a token more in each of its rows costs at first, whatever was measured
_KNOWN = 4096  # points that a curve remembers: steps ask for the same again and again

Points = Sequence[tuple[int, float]]
"""Of a curve: (tokens, seconds), both rising."""


def followed(expected: float, seconds: float) -> float:
    """What to expect where `expected` was and `seconds` have been seen."""
    ratio = min(seconds / expected, _OUTLIER)
    return expected * (1.0 + (_FAR_LESS_WEIGHT if ratio < _FAR_LESS else _WEIGHT) * (ratio - 1.0))


class StepCost:
    """Complete state: the curve, with what it remembers, and `scale`."""

    def __init__(self, points: Points) -> None:
        self._tokens = [tokens for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # noise may make a longer step look faster
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0, 1e-6))
        self._known = lru_cache(_KNOWN)(self._curve)
        self.scale = 1.0

    def __repr__(self) -> str:
        curve = ", ".join(f"{n}: {s * 1e3:.2f}" for n, s in zip(self._tokens, self._seconds, strict=True))
        return f"<StepCost {curve} ms | scale {self.scale:.2f}>"

    def seconds(self, tokens: int) -> float:
        """What a step of that many tokens is expected to take; 0 for an empty one."""
        return self._known(tokens) * self.scale if tokens > 0 else 0.0

    def correct(self, seconds: float, expected: float) -> None:
        """What was expected to take `expected` seconds took `seconds`."""
        if seconds > 0.0 and expected > 0.0:
            self.scale = followed(self.scale, self.scale * seconds / expected)

    def tokens_within(self, seconds: float, limit: int) -> int:
        """The most tokens, up to `limit`, that a step of that length computes; 0 if not even one."""
        return bisect_right(range(1, limit + 1), seconds, key=self.seconds)

    def _curve(self, tokens: int) -> float:
        """Between points and beyond the last along a line; before the first as there."""
        if len(self._tokens) == 1:
            return self._seconds[0] * max(tokens / self._tokens[0], 1.0)
        tokens = max(tokens, self._tokens[0])
        index = min(max(bisect_left(self._tokens, tokens), 1), len(self._tokens) - 1)
        x0, x1 = self._tokens[index - 1], self._tokens[index]
        y0, y1 = self._seconds[index - 1], self._seconds[index]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class StepPrice(NamedTuple):
    """What the next step costs, in seconds: `plain_s` all of it without draft tokens, `token_s` to verify one draft
    token; `first_s(rows)` is a draft's first pass with what planning adds, `next_s(rows)` each further one."""

    plain_s: float
    token_s: float
    first_s: Callable[[int], float]
    next_s: Callable[[int], float]


class StepModel:
    """What steps of this worker cost, and how much of a step long rows may take. Steps with and without long rows have
    curves of their own, and so have a draft's long rows, its first pass of draft tokens by their tokens (`draft_first`)
    and those behind it (`draft_next`), both by default like the long rows. Complete state: these, `more`, how much more
    a draft token to be verified costs than was measured, and `fixed_s`, what surrounds the two models' passes."""

    def __init__(
        self,
        target: Points = ((1, 1e-3),),
        draft: Points = ((1, 1e-4),),
        draft_next: Points = (),
        draft_first: Points = (),
        *,
        rows: Points = (),
        per_draft_token: Points = (),
        budget_s: float = 0.05,
        step_tokens: int = 512,
    ) -> None:
        """`target` is by tokens of long rows, `rows` by rows of one token (by default the same), `per_draft_token` what
        one token more in each of so many rows costs (by default the least that is believed)."""
        self.short, self.long = StepCost(rows or target), StepCost(target)
        # On a busy machine the difference of two steps may come out as nothing, and nothing times `more` stays so.
        costs = per_draft_token or ((1, 0.0),)
        self._per_draft_token = StepCost(
            [(n, max(seconds, _LEAST_PER_DRAFT_TOKEN * self.short.seconds(n))) for n, seconds in costs]
        )
        self.more = 1.0
        self.draft = StepCost(draft)
        self.draft_next = StepCost(draft_next or draft)
        self.draft_first = StepCost(draft_first or draft)
        self.budget_s, self.step_tokens = budget_s, step_tokens
        self.fixed_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<StepModel {self.short!r}, long x {self.long.scale:.2f}, draft {self.draft!r}, draft tokens"
            f" {self.draft_first!r}, then {self.draft_next!r}>"
        )

    def price(self, rows: int, tokens: int) -> StepPrice:
        """Of a step that computes `tokens` in `rows` rows without any draft."""
        if tokens > rows:
            target_s = self.long.seconds(tokens)
            token_s = self.long.seconds(tokens + 1) - target_s
        else:
            target_s, token_s = self.short.seconds(rows), self._draft_token_s(rows)
        plain_s, planning_s, first = max(target_s + self.fixed_s, 1e-9), self._planning_s, self.draft_first.seconds
        return StepPrice(plain_s, token_s, lambda n: first(n) + planning_s, self.draft_next.seconds)

    def short_s(self, rows: int, tokens: int) -> float:
        """What a target pass over `rows` rows is expected to take, whose tokens behind the first are draft tokens."""
        return self.short.seconds(rows) + (tokens - rows) * self._draft_token_s(rows)

    def _draft_token_s(self, rows: int) -> float:
        return self.more * self.short.scale * self._per_draft_token.seconds(rows) / max(rows, 1)

    @property
    def _planning_s(self) -> float:
        """It follows the load as short steps do, and nothing that is seen of itself: that is less than noise."""
        return PLANNING_S * self.short.scale

    def long_tokens(self, running: int) -> int:
        """Tokens of long rows for which the next step has time beside `running` short ones; never fewer than
        LEAST_LONG_TOKENS."""
        fits = self.long.tokens_within(self.budget_s, self.step_tokens)
        return max(fits - running, LEAST_LONG_TOKENS)

    def again_s(self) -> float:
        """What a token of a long row adds to a step, where that has as many as its time allows."""
        tokens = max(self.long.tokens_within(self.budget_s, self.step_tokens), LEAST_LONG_TOKENS)
        return (self.long.seconds(tokens) - self.long.seconds(1)) / (tokens - 1)

    def fill_tokens(self, idle: bool) -> int:
        """Tokens of prompts for which the draft has time in the next step, all of it when nothing else runs."""
        share = 1.0 if idle else FILL_SHARE
        return max(self.draft.tokens_within(self.budget_s * share, self.step_tokens), LEAST_LONG_TOKENS)

    def draft_s(self, plan: StepPlan) -> float:
        """What the draft's passes of a plan that drafts in each of its rows are expected to take."""
        expected = self.draft_first.seconds(sum(len(row.tokens) for row in plan.drafts))
        for depth in range(1, max((row.num_draft_tokens for row in plan.drafts), default=0)):
            expected += self.draft_next.seconds(sum(row.num_draft_tokens > depth for row in plan.drafts))
        return expected

    def observe(self, plan: StepPlan, outcome: StepOutcome, wall_s: float) -> None:
        """A step has been computed; `wall_s` from its plan to its outcome's arrival."""
        rows, tokens, target_s = len(plan.rows), plan.num_tokens, outcome.elapsed_s - outcome.draft_s
        if any(len(row.tokens) > max(row.num_sampled, 1) for row in plan.rows):
            self.long.correct(target_s, self.long.seconds(tokens))
        elif plan.rows and target_s > 0.0:  # both follow the same moves, or noise would part them
            expected = self.short_s(rows, tokens)
            share = (tokens - rows) * self._draft_token_s(rows) / expected
            self.more *= followed(1.0, target_s / expected) ** (_MORE_WEIGHT * share)
            self.short.correct(target_s, expected)
        drafting = [row.num_draft_tokens > 0 for row in plan.drafts]
        if drafting and all(drafting):  # long rows have another price
            expected = self.draft_s(plan)
            for curve in (self.draft_first, self.draft_next):
                curve.correct(outcome.draft_s, expected)
        elif drafting and not any(drafting):
            self.draft.correct(outcome.draft_s, self.draft.seconds(sum(len(row.tokens) for row in plan.drafts)))
        around_s = max(wall_s - outcome.elapsed_s - self._planning_s * any(drafting), 1e-6)
        self.fixed_s = followed(self.fixed_s or around_s, around_s)
