"""Draft tokens for sequences that are not worth one by what is known, so that it stays known: pure.

They cost time and seldom win any, so they have an allowance: a two-hundredth of the time of steps. A trial is a few
draft tokens in a row for one sequence, one in each step, since its draft may first have to compute what it has missed.
It begins when the allowance pays for all that it is expected to lose; so what trials can cost is bounded whatever a
draft token costs, and however many sequences run. The first trial needs none, and until a worker has drafted FIRST
tokens no trial of a sequence alone does: what is believed then is from nowhere, and a draft that is better than that
would go unused for thousands of steps (decision 0023). Beside others a trial costs all of them.
"""

from __future__ import annotations

from baton.core.request import SequenceId

SHARE = 0.005  # of the time of steps
DRAFT_TOKENS = 8  # of a trial, each alone in its step
FIRST = 48  # draft tokens of a worker
_SAVED_STEPS = 2000  # steps whose allowance is kept at most


class Trials:
    """Complete state: the allowance, the sequence of the running trial and its draft tokens to come, how many of the
    worker's first draft tokens are still to come, and how many trials were begun."""

    def __init__(self) -> None:
        self.allowance_s = 0.0
        self.sequence_id: SequenceId | None = None
        self._draft_tokens = 0
        self._first = FIRST
        self.begun = 0

    def stepped(self, step_s: float) -> None:
        """A step that takes `step_s` is planned."""
        self.allowance_s = min(self.allowance_s + SHARE * step_s, SHARE * _SAVED_STEPS * step_s)

    def begin(self, sequence_id: SequenceId, cost_s: float, *, alone: bool = False) -> bool:
        """Tries a sequence if none is tried and there is enough to pay for it."""
        free = not self.begun or (alone and self._first > 0)
        if self.sequence_id is not None or not (free or cost_s <= self.allowance_s):
            return False
        self.allowance_s = max(self.allowance_s - cost_s, 0.0)
        self.sequence_id, self._draft_tokens = sequence_id, DRAFT_TOKENS
        self.begun += 1
        return True

    def drafted(self, sequence_id: SequenceId) -> None:
        """There was a draft token for that sequence."""
        self._first -= 1
        if sequence_id == self.sequence_id:
            self._draft_tokens -= 1
            if self._draft_tokens <= 0:
                self.sequence_id = None

    def close(self, sequence_id: SequenceId) -> None:
        """No draft token for that sequence will come: it has ended, or its draft has no blocks."""
        if sequence_id == self.sequence_id:
            self.sequence_id = None
