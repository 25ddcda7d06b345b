"""How many tokens to draft for each sequence in the next step: pure.

Drafting pays off while the tokens it is expected to gain would take longer to generate without it. With probability p
that a draft token is accepted if all before it were, the d-th draft token of a sequence gains p^d tokens. It costs one
more token in the target's step and its share of a draft pass. `choose_lengths` selects the sequences with the highest
p, 1, 2, 4, ... of them, lengthens their drafts while tokens per second rise, and keeps the fastest of these choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class StepPrice:
    """The cost of a step. `target(tokens)`, `draft(rows)` and `draft_next(rows)` are seconds of one pass: the target's,
    the first draft pass, and each later one. `fixed_s` is the overhead around them, `any_draft_s` the extra time of a
    step with draft tokens, however many; `tokens` is what the step computes without draft tokens."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    draft_next: Callable[[int], float]
    tokens: int
    fixed_s: float = 0.0
    any_draft_s: float = 0.0

    @property
    def plain_s(self) -> float:
        """Seconds of the step without draft tokens."""
        return max(self.target(self.tokens) + self.fixed_s, 1e-9)

    def draft_token_s(self, rows: int) -> float:
        """Returns the seconds that one draft token for one of `rows` sequences costs if all of them get one."""
        more = self.target(self.tokens + rows) - self.target(self.tokens)
        return max(more + self.draft(rows) + self.any_draft_s, 0.0) / max(rows, 1)


def saved_per_token(rate: float, rows: int, price: StepPrice) -> float:
    """Returns the seconds that drafting saves per token of a sequence if all `rows` draft as it does; 0 if none."""
    token_s = max(price.target(price.tokens + rows) - price.target(price.tokens), 0.0) / rows
    step_s, cost_s, gained, chance, best = price.plain_s / rows, price.any_draft_s / rows, 1.0, 1.0, 0.0
    for depth in range(1, MAX_DRAFT_TOKENS + 1):
        chance *= rate
        gained += chance
        cost_s += token_s + (price.draft if depth == 1 else price.draft_next)(rows) / rows
        best = max(best, step_s - (step_s + cost_s) / gained)
    return best


def choose_lengths(rates: Sequence[float], limits: Sequence[int], price: StepPrice) -> list[int]:
    """Returns the draft lengths of n sequences, at most `limits[i]`, that give the most tokens per second overall.

    `rates` are the probabilities p. O(n * longest limit).
    """
    speed = len(rates) / price.plain_s
    token_s = max(price.target(price.tokens + 1) - price.target(price.tokens), 0.0)
    # Drafting gains at most p + p^2 + ... tokens, and costs at least its own token in the target's step.
    able = [i for i, rate in enumerate(rates) if limits[i] > 0 and rate > speed * token_s * (1.0 - min(rate, 0.99))]
    able.sort(key=lambda i: -rates[i])
    best = [0] * len(rates)
    count = 1
    while able:
        speed, lengths = _deepen(able[:count], rates, limits, price, speed)
        best = lengths or best
        if count >= len(able):
            break
        count = min(2 * count, len(able))
    return best


def choose_length(rate: float, limit: int, plain_s: float, first_s: float, next_s: float) -> int:
    """`choose_lengths` for a single sequence, whose first draft token adds `first_s` to a step of `plain_s` and each
    further one `next_s`: the same result in a fifth of the time, which is part of the cost of draft tokens."""
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
    """Returns the highest speed of drafting for `chosen` and the lengths for it; `speed` and None if none is faster."""
    lengths, chances, best = [0] * len(rates), dict.fromkeys(chosen, 1.0), None
    computed, gained, drafted_s = price.tokens, float(len(rates)), price.fixed_s + price.any_draft_s
    target_s = price.target(computed)
    for depth in range(1, max(limits[i] for i in chosen) + 1):
        one_pass = price.draft if depth == 1 else price.draft_next
        for i in chosen:
            chances[i] *= rates[i]
        if depth > 1:  # at depth 1 the caller has chosen
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
