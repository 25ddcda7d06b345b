"""Whose turn it is to compute tokens that are known, and how many of them, in rows of more than one token. Pure.

The sequence with the fewest uncomputed tokens comes first, and waiting counts as if AGEING_TOKENS_PER_S had been
computed meanwhile. So the turn of a sequence is fixed by its arrival and its remainder, and only sequences that arrive
within remainder / AGEING_TOKENS_PER_S after it can overtake it: short prompts do not wait behind long ones, and no
prompt starves.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.core.sequence import Sequence

AGEING_TOKENS_PER_S = 2048.0
MAX_SCORED_TOKENS = 256
"""Limit of prompt tokens per step that need log-probabilities: each needs the logits of the whole vocabulary."""


def turn(sequence: Sequence, remainder: int) -> tuple[float, int]:
    """Sort key: the sequence with the lowest one is computed first; `remainder` of its tokens are uncomputed."""
    return sequence.arrived_at + remainder / AGEING_TOKENS_PER_S, sequence.number


class TokenBudget:
    """The tokens of a step that long rows may still use."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.scored = tokens, MAX_SCORED_TOKENS

    def take(self, sequence: Sequence, remainder: int) -> int:
        """Returns how many of a sequence's uncomputed tokens the step computes, which are then used up."""
        scores = sequence.computes_prompt and sequence.request.sampling.prompt_logprobs is not None
        count = min(self.tokens, self.scored if scores else self.tokens, remainder)
        self.tokens -= count
        self.scored -= count if scores else 0
        return count


def share(remainders: Mapping[Sequence, int], tokens: int) -> dict[Sequence, int]:
    """Returns how many tokens each sequence computes in a step of which `tokens` are for long rows: by priority, then
    boosted ones, then by turn. A sequence that has generated, and is computed again, has the turn of its arrival."""

    def order(sequence: Sequence) -> tuple[int, bool, tuple[float, int]]:
        remainder = remainders[sequence] if sequence.computes_prompt else 0
        return sequence.request.priority, not sequence.boosted, turn(sequence, remainder)

    budget = TokenBudget(tokens)
    return {sequence: budget.take(sequence, remainders[sequence]) for sequence in sorted(remainders, key=order)}
