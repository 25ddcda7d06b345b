"""The best possible gain of drafting, from measured values: pure. `speculation.py` compares the actual gain with it."""

from __future__ import annotations

from collections.abc import Mapping


def acceptance_rate(accepted: int, wrong: int) -> float:
    """p: the probability that a draft token after only accepted ones is right, when `accepted` such tokens were right
    and `wrong` were not. Draft tokens after a wrong one do not count. 0.0 without any."""
    seen = accepted + wrong
    return accepted / seen if seen else 0.0


def ideal_gain(rate: float, plain_s: float, step_s: Mapping[int, float]) -> tuple[float, int]:
    """The gain of the best fixed number of draft tokens k, and that k: a step with k draft tokens for each row
    generates 1 + p + ... + p^k tokens of each in `step_s[k]` seconds, a step without any generates one in `plain_s`.

    k = 0 is a choice as well, so the gain is never below 1. The best k is known from the first step on, and the draft's
    prompt costs nothing: a policy that uses only p and prices cannot gain more.

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
