"""How many tokens to draft for each sequence in the next step: pure.

A draft pays while the tokens it is expected to win take longer to make without it. With probability p that a draft
token is right when all before it were, the d-th draft of a sequence wins p^d tokens. What it costs is one token more in
the target's step and its part of a draft step. `choose_lengths` takes the surest sequences, 1, 2, 4, ... of them,
deepens their draft tokens while tokens per second rise, and keeps the fastest of all that.

p is measured for each sequence, and the less was seen of it lately the more it is taken to be like all others. So while
nothing is drafted for a sequence its p goes back to the worker's: what was seen grows old, and text turns easy again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 8

_KEPT = 0.98  # of what was seen, at each draft token of a sequence
_KEPT_SHARED = 0.995  # and of the worker
_KEPT_IDLE = 0.985  # and at each step without a draft token for a sequence
_PRIOR = 16.0  # draft tokens that the worker's average counts as in a sequence's
_START, _START_PRIOR = 0.6, 24.0  # what is believed before there is any, and what it counts as


@dataclass(slots=True)
class Acceptance:
    """How draft tokens have fared whose turn came: `right` of `seen`. Both fade, so that neither need be whole."""

    right: float = 0.0
    seen: float = 0.0

    def observe(self, drafted: int, accepted: int, kept: float) -> None:
        """`accepted` of `drafted` were right; those behind the first wrong one say nothing."""
        for index in range(min(accepted + 1, drafted)):
            self.right = self.right * kept + (index < accepted)
            self.seen = self.seen * kept + 1.0

    def fade(self, kept: float) -> None:
        self.right *= kept
        self.seen *= kept

    def rate(self, prior: float, weight: float) -> float:
        """p, if `prior` is what was believed before, as firmly as after `weight` draft tokens."""
        return (self.right + prior * weight) / (self.seen + weight)


class AcceptanceEstimates:
    """Complete state: how draft tokens for all sequences have fared. Each one's own Acceptance is with its owner."""

    def __init__(self) -> None:
        self._all = Acceptance(_START * _START_PRIOR, _START_PRIOR)  # fades like what was seen

    @property
    def shared(self) -> float:
        """p over all sequences."""
        return self._all.right / self._all.seen

    def rate(self, acceptance: Acceptance) -> float:
        """p of a sequence."""
        return acceptance.rate(self.shared, _PRIOR)

    def observe(self, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """A step with `drafted` draft tokens for a sequence is over, `accepted` of which were right."""
        if drafted:
            acceptance.observe(drafted, accepted, _KEPT)
            self._all.observe(drafted, accepted, _KEPT_SHARED)
        else:
            acceptance.fade(_KEPT_IDLE)


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step costs. `target(tokens)`, `draft(rows)` and `draft_next(rows)` are seconds of one pass, the last of
    those behind a draft's first; `fixed_s` is what surrounds them, `any_draft_s` what a step takes more because there
    are draft tokens in it, however many; `tokens` is what the step computes without any draft."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    draft_next: Callable[[int], float]
    tokens: int
    fixed_s: float = 0.0
    any_draft_s: float = 0.0

    @property
    def plain_s(self) -> float:
        """Seconds of the step without any draft."""
        return max(self.target(self.tokens) + self.fixed_s, 1e-9)

    def draft_token_s(self, rows: int) -> float:
        """Seconds that one draft token for one of `rows` sequences costs when all of them get one."""
        more = self.target(self.tokens + rows) - self.target(self.tokens)
        return max(more + self.draft(rows) + self.any_draft_s, 0.0) / max(rows, 1)


def saved_per_token(rate: float, rows: int, price: StepPrice) -> float:
    """Seconds that drafting saves for each token of a sequence, when all `rows` draft as it does; 0 if none."""
    token_s = max(price.target(price.tokens + rows) - price.target(price.tokens), 0.0) / rows
    step_s, cost_s, gained, chance, best = price.plain_s / rows, price.any_draft_s / rows, 1.0, 1.0, 0.0
    for depth in range(1, MAX_DRAFT_TOKENS + 1):
        chance *= rate
        gained += chance
        cost_s += token_s + (price.draft if depth == 1 else price.draft_next)(rows) / rows
        best = max(best, step_s - (step_s + cost_s) / gained)
    return best


def choose_lengths(rates: Sequence[float], limits: Sequence[int], price: StepPrice) -> list[int]:
    """Draft tokens for each of n sequences, at most `limits[i]`: the choice where n sequences together are fastest.

    `rates` are the probabilities p. O(n * longest limit).
    """
    speed = len(rates) / price.plain_s
    token_s = max(price.target(price.tokens + 1) - price.target(price.tokens), 0.0)
    # A draft wins at most p + p^2 + ... tokens, and pays at least its own place in the target's step.
    able = [i for i, rate in enumerate(rates) if limits[i] > 0 and rate > speed * token_s * (1.0 - min(rate, 0.99))]
    able.sort(key=lambda i: -rates[i])
    best = [0] * len(rates)
    count = 1
    while able:
        speed, found = _deepen(able[:count], rates, limits, price, speed)
        best = found or best
        if count >= len(able):
            break
        count = min(2 * count, len(able))
    return best


def choose_length(rate: float, limit: int, plain_s: float, first_s: float, next_s: float) -> int:
    """`choose_lengths` of a sequence alone, whose first draft token adds `first_s` to a step of `plain_s` and each
    further one `next_s`: the same in a fifth of the time, which is part of what draft tokens cost."""
    speed, best, gained, chance, step_s = 1.0 / plain_s, 0, 1.0, 1.0, plain_s + first_s
    for depth in range(1, limit + 1):
        chance *= rate
        if depth > 1:
            if chance <= speed * next_s:
                break
            step_s += next_s
        gained += chance
        if gained > speed * step_s:
            speed, best = gained / step_s, depth
    return best


def _deepen(
    chosen: list[int], rates: Sequence[float], limits: Sequence[int], price: StepPrice, speed: float
) -> tuple[float, list[int] | None]:
    """The best that comes of drafting for the `chosen`, if it is faster than `speed`, and how fast it is."""
    lengths, chances, best = [0] * len(rates), dict.fromkeys(chosen, 1.0), None
    computed, gained, drafted_s = price.tokens, float(len(rates)), price.fixed_s + price.any_draft_s
    target_s = price.target(computed)
    for depth in range(1, max(limits[i] for i in chosen) + 1):
        one_pass = price.draft if depth == 1 else price.draft_next
        for i in chosen:
            chances[i] *= rates[i]
        if depth > 1:  # the choice of the first level is the caller's
            more_s = max(price.target(computed + len(chosen)) - target_s, 0.0) + one_pass(len(chosen))
            least = speed * more_s / len(chosen)
            chosen = [i for i in chosen if limits[i] >= depth and chances[i] > least]
        if not chosen:
            break
        gained += sum(chances[i] for i in chosen)
        computed += len(chosen)
        target_s = price.target(computed)
        drafted_s += one_pass(len(chosen))
        for i in chosen:
            lengths[i] = depth
        faster = gained / max(target_s + drafted_s, 1e-9)
        if faster > speed:
            speed, best = faster, list(lengths)
    return speed, best
