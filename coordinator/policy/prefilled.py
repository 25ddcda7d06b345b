"""How many prompt tokens prefill computed, and how many of them in vain. Pure.

A prefill is counted when its first token arrives, with the tokens that it computed (those of the prompt and of the
output so far that no cache held). What workers computed beyond that belongs to prompts that were given up before their
first token, to sequences that a decode worker preempted, or to prompts that are being computed.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from coordinator.policy.choice import Choice

WASTED = ("cancelled", "failed", "rescheduled")


class PrefilledTokens:
    """Counters over all choices. `wasted` are by reason: the choice ended before its answer was complete, because its
    client left or by an error, or the prefill repeated an earlier one of the choice."""

    def __init__(self) -> None:
        self.tokens = 0
        self.wasted: Counter[str] = Counter(dict.fromkeys(WASTED, 0))

    def first_token(self, choice: Choice, cached_tokens: int) -> None:
        """Counts a prefill; `cached_tokens` were not computed."""
        computed = len(choice.request.prompt) + len(choice.request.output) - cached_tokens
        self.tokens += computed
        if choice.prefilled:
            self.wasted["rescheduled"] += computed
        else:
            choice.prefilled = computed

    def given_up(self, choice: Choice, why: Literal["cancelled", "failed"]) -> None:
        """Counts what was computed for a choice that ends before its answer is complete."""
        self.wasted[why] += choice.prefilled
