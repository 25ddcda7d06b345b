"""What drafting could gain at best, from what was measured: pure. `speculation.py` compares what it gains with that."""

from __future__ import annotations

from collections.abc import Mapping


def acceptance_rate(accepted: int, wrong: int) -> float:
    """p: how likely a draft token is right whose turn comes, when `accepted` were right and one was wrong `wrong`
    times. Draft tokens behind a wrong one say nothing. 0.0 where nothing was seen."""
    seen = accepted + wrong
    return accepted / seen if seen else 0.0


def ideal_gain(rate: float, plain_s: float, step_s: Mapping[int, float]) -> tuple[float, int]:
    """The gain of the best fixed number of draft tokens k, and that k: a step with k draft tokens for each row makes
    1 + p + ... + p^k tokens of each in `step_s[k]` seconds, one without any makes one in `plain_s`.

    No draft tokens are a choice as well, so this is never under 1. The right number is known from the first step on,
    and the draft's prompt costs nothing: a policy that looks at no more than p and prices cannot gain more.

    Raises:
        ValueError: `rate` is no probability, or a time is not positive.
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{rate} is no probability")
    best, best_length = 1.0, 0
    for length, seconds in sorted(step_s.items()):
        if min(plain_s, seconds) <= 0.0:
            raise ValueError(f"a step with {length} draft tokens took {seconds} s, one without {plain_s} s")
        gain = sum(rate**depth for depth in range(length + 1)) * plain_s / seconds
        if gain > best:
            best, best_length = gain, length
    return best, best_length
