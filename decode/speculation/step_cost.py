"""How long a step will take: a curve over its number of tokens, measured at startup, and its current scale. Pure.

The curve gives the shape (a few more tokens are nearly free while reading the weights dominates), the scale follows the
load of the machine and the length of contexts. One StepCost covers one kind of step.

A token that is verified costs less than one of another sequence, whose context has to be read. So steps without long
rows have a price by rows and a price per draft token in them. The second is also corrected separately, because it was
measured while other processes started.

All prices that are compared with each other are followed in the same way, so that noise shifts all of them alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial

from baton.core.step import StepOutcome, StepPlan

LEAST_LONG_TOKENS = 16
FILL_SHARE = 0.2

_WEIGHT = 0.1  # of a new observation in the scale
_MORE_WEIGHT = 3.0  # multiple of that weight for the price of a draft token, times the draft tokens' share of a step
_FAR_LESS, _FAR_LESS_WEIGHT = 0.65, 0.5  # below this ratio, this weight: rarely noise, usually the end of a load
_OUTLIER = 2.0  # an observation counts as at most this many times what was expected: one stall is not a trend
_LEAST_PER_DRAFT_TOKEN = 0.03  # of a step: least initial cost of one more token in each row
_LEAST_AROUND = 0.5  # of the overhead of a step with draft tokens, that a step without them has at least
_FIRST_STEPS = 4  # the least overhead of these is the initial `fixed_s`


def followed(expected: float, seconds: float) -> float:
    """Returns the new expectation after `seconds` were observed instead of `expected`."""
    ratio = min(seconds / expected, _OUTLIER)
    return expected * (1.0 + (_FAR_LESS_WEIGHT if ratio < _FAR_LESS else _WEIGHT) * (ratio - 1.0))


class StepCost:
    """Seconds of a step by its tokens: a curve of at least one point, both rising, times a learned `scale`."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._tokens = [tokens for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # noise may make a longer step look faster
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 0.0, 1e-6))
        self._cached = cache(self._curve)  # steps request the same points again and again
        self.scale = 1.0

    def __repr__(self) -> str:
        curve = ", ".join(f"{n}: {s * 1e3:.2f}" for n, s in zip(self._tokens, self._seconds, strict=True))
        return f"<StepCost {curve} ms | scale {self.scale:.2f}>"

    def seconds(self, tokens: int) -> float:
        """Returns the seconds that a step of `tokens` tokens is expected to take; 0 for an empty one."""
        if tokens <= 0:
            return 0.0
        return self._cached(tokens) * self.scale

    def observe(self, tokens: int, seconds: float) -> None:
        """Records that a step of `tokens` tokens took `seconds`."""
        if tokens > 0:
            self.correct(seconds, self.seconds(tokens))

    def correct(self, seconds: float, expected: float) -> None:
        """Corrects the scale: work that was expected to take `expected` seconds took `seconds`."""
        if seconds > 0.0 and expected > 0.0:
            self.scale = followed(self.scale, self.scale * seconds / expected)

    def tokens_within(self, seconds: float, limit: int) -> int:
        """Returns the most tokens, up to `limit`, that a step computes within `seconds`; 0 if not even one."""
        return bisect_right(range(1, limit + 1), seconds, key=self.seconds)

    def _curve(self, tokens: int) -> float:
        index = bisect_left(self._tokens, tokens)
        if index == 0:
            return self._seconds[0]
        if index == len(self._tokens):
            if index == 1:
                return self._seconds[0] * tokens / self._tokens[0]
            index -= 1  # beyond the last point, extrapolates the last segment
        x0, x1 = self._tokens[index - 1], self._tokens[index]
        y0, y1 = self._seconds[index - 1], self._seconds[index]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class StepModel:
    """The cost of this worker's steps, and how much of a step long rows may take. There are curves for steps with and
    without long rows, and for the draft model's long rows, its first pass of draft tokens by its tokens (`draft_first`)
    and its later passes (`draft_next`), both by default like its long rows."""

    def __init__(
        self,
        target: Sequence[tuple[int, float]] = ((1, 1e-3),),
        draft: Sequence[tuple[int, float]] = ((1, 1e-4),),
        draft_next: Sequence[tuple[int, float]] = (),
        draft_first: Sequence[tuple[int, float]] = (),
        *,
        rows: Sequence[tuple[int, float]] = (),
        per_draft_token: Sequence[tuple[int, float]] = (),
        planning_s: float = 0.0,
        switching_s: float = 0.0,
        budget_s: float = 0.05,
        step_tokens: int = 512,
    ) -> None:
        """Points of curves: `target` by tokens of long rows, `rows` by one-token rows (by default the same),
        `per_draft_token` the cost of one more token in each of so many rows (by default from the curve of rows).
        `planning_s` is what planning and verifying draft tokens adds to the overhead of a step, `switching_s` what a
        short pass takes longer after a draft pass, which evicts its data from the caches."""
        self.short, self.long = StepCost(rows or target), StepCost(target)
        # On a busy machine the measured difference of two steps may be zero, which `more` could not correct.
        least = [(n, max(seconds, _LEAST_PER_DRAFT_TOKEN * self.short.seconds(n))) for n, seconds in per_draft_token]
        self._per_draft_token = StepCost(least) if per_draft_token else None
        self.more = 1.0  # cost of verifying a draft token relative to the measured one
        self.draft = StepCost(draft)
        self.draft_next = StepCost(draft_next or draft)
        self.draft_first = StepCost(draft_first) if draft_first else self.draft
        self.budget_s, self.step_tokens = budget_s, step_tokens
        self.fixed_s = 0.0  # overhead around both models' passes
        self._planning_s, self._switching_s = planning_s, switching_s
        self._steps = 0

    def __repr__(self) -> str:
        return (
            f"<StepModel {self.short!r}, long x {self.long.scale:.2f}, draft {self.draft!r}, draft tokens"
            f" {self.draft_first!r}, then {self.draft_next!r}>"
        )

    def short_s(self, rows: int, tokens: int) -> float:
        """Returns the expected seconds of a target pass over `rows` rows; `tokens` beyond that are draft tokens."""
        return self.short.seconds(rows) + self._draft_tokens_s(rows, tokens)

    def short_by_tokens(self, rows: int) -> Callable[[int], float]:
        """Returns `short_s` of these rows as a function of the number of tokens."""
        if self._per_draft_token is None:
            return partial(self.short_s, rows)
        first, each = self.short.seconds(rows), self._draft_tokens_s(rows, rows + 1)
        return lambda tokens: first + each * (tokens - rows)

    def of_one_row(self) -> tuple[float, float, float] | None:
        """Returns the seconds of a one-row step without draft tokens, those that the first draft token adds, and
        those that each later one adds. None if draft tokens have no curve of their own."""
        if self._per_draft_token is None:
            return None
        each_s = self._draft_tokens_s(1, 2)
        plain_s = max(self.short.seconds(1) + self.fixed_s, 1e-9)
        return plain_s, each_s + self.draft_first.seconds(1) + self.any_draft_s, each_s + self.draft_next.seconds(1)

    def _draft_tokens_s(self, rows: int, tokens: int) -> float:
        if self._per_draft_token is None:
            return self.more * (self.short.seconds(tokens) - self.short.seconds(rows))
        return self.more * self.short.scale * self._per_draft_token.seconds(rows) * (tokens - rows) / max(rows, 1)

    def long_tokens(self, running: int) -> int:
        """Returns how many tokens of long rows fit beside `running` short rows: LEAST_LONG_TOKENS at least."""
        fits = self.long.tokens_within(self.budget_s, self.step_tokens)
        return max(min(fits, self.step_tokens) - running, LEAST_LONG_TOKENS)

    @property
    def planning_s(self) -> float:
        """Seconds that planning and accounting for draft tokens takes now. It is scaled with short steps, not by its
        own observations: compared with the overhead of a step it is less than noise."""
        return self._planning_s * self.short.scale

    @property
    def any_draft_s(self) -> float:
        """Seconds that a step takes longer now because it has draft tokens, however many."""
        return (self._planning_s + self._switching_s) * self.short.scale

    def recompute_token_s(self) -> float:
        """Returns the seconds that a token of a long row adds to a step with as many as its time budget allows."""
        tokens = max(self.long.tokens_within(self.budget_s, self.step_tokens), LEAST_LONG_TOKENS)
        return (self.long.seconds(tokens) - self.long.seconds(1)) / (tokens - 1)

    def fill_tokens(self, idle: bool) -> int:
        """Returns how many tokens of draft KV to fill in the next step: in FILL_SHARE of its time, or all if `idle`."""
        share = 1.0 if idle else FILL_SHARE
        return max(self.draft.tokens_within(self.budget_s * share, self.step_tokens), LEAST_LONG_TOKENS)

    def draft_s(self, plan: StepPlan) -> float:
        """Returns the expected seconds of the draft passes of a plan whose draft rows all draft."""
        if len(plan.drafts) == 1:
            (row,) = plan.drafts
            first_s = self.draft_first.seconds(len(row.tokens))
            return first_s + self.draft_next.seconds(1) * max(row.num_draft_tokens - 1, 0)
        expected = self.draft_first.seconds(sum(len(row.tokens) for row in plan.drafts))
        for depth in range(1, max((row.num_draft_tokens for row in plan.drafts), default=0)):
            expected += self.draft_next.seconds(sum(row.num_draft_tokens > depth for row in plan.drafts))
        return expected

    def observe(self, plan: StepPlan, outcome: StepOutcome, wall_s: float) -> None:
        """Records a computed step; `wall_s` from its plan, or the end of an older step, to its outcome's arrival."""
        target_s = outcome.elapsed_s - outcome.draft_s
        long = any(len(row.tokens) > max(row.num_sampled, 1) for row in plan.rows)
        if long:
            self.long.observe(plan.num_tokens, target_s)
        elif plan.rows and target_s > 0.0:  # both are corrected alike, or noise would drive them apart
            rows, tokens = len(plan.rows), plan.num_tokens
            draft_tokens_s = self._draft_tokens_s(rows, tokens)
            expected = self.short.seconds(rows) + draft_tokens_s
            if plan.drafts:
                expected += self._switching_s * self.short.scale
            if draft_tokens_s > 0.0:
                self.more *= followed(1.0, target_s / expected) ** (_MORE_WEIGHT * draft_tokens_s / expected)
            self.short.correct(target_s, expected)
        if plan.drafts and all(row.num_draft_tokens for row in plan.drafts):  # long rows have another price
            expected = self.draft_s(plan)
            for curve in (self.draft_first, self.draft_next):
                curve.correct(outcome.draft_s, expected)
        elif plan.drafts and not any(row.num_draft_tokens for row in plan.drafts):
            self.draft.observe(sum(len(row.tokens) for row in plan.drafts), outcome.draft_s)
        around_s = max(wall_s - outcome.elapsed_s, 1e-6)
        if any(row.num_draft_tokens for row in plan.drafts):  # has a price of its own, which may be mismeasured
            around_s = max(around_s - self.planning_s, around_s * _LEAST_AROUND)
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            self.fixed_s = min(around_s, self.fixed_s or around_s)
        else:
            self.fixed_s = followed(self.fixed_s, around_s)
