"""Which draft tokens of a draft stand: pure.

The target's own tokens at each position were sampled as if the draft tokens before it were output, with the same noise
as without any draft (docs/numerics.md). So while draft and own token are equal, the own token is exactly what plain
decoding would have sampled; the first own token that differs still is, and nothing behind it is.
"""

from __future__ import annotations

from collections.abc import Sequence

_MODULUS = 1 << 16


def accepted_length(draft_tokens: Sequence[int], own: Sequence[int]) -> int:
    """How many of the draft tokens are the target's own tokens, from the first on. `own` has one token more."""
    for index, draft_token in enumerate(draft_tokens):
        if draft_token != own[index]:
            return index
    return len(draft_tokens)


def forced_length(count: int, output_index: int, seed: int, rate: float) -> int:
    """For benchmarks alone: how many of `count` draft tokens count as right when each does with probability `rate`,
    whatever the target says. A pure function of the place, so that runs can be repeated."""
    for index in range(count):
        word = ((output_index + index + 1) * 0x9E3779B97F4A7C15 ^ (seed + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        word = (word ^ word >> 30) * 0x94D049BB133111EB & (2**64 - 1)
        if (word >> 40) % _MODULUS >= rate * _MODULUS:
            return index
    return count
