"""Draft tokens for sequences that are not worth one by what is known, so that it stays known: pure.

They cost time and seldom win any, so they have an allowance: a two-hundredth of the time of steps. A trial is a few
draft tokens in a row for one sequence, one in each step, since its draft may first have to compute what it has missed.
It begins when the allowance pays for all that it is expected to lose; so what trials can cost is bounded whatever a
draft token costs, and however many sequences run. The first trial needs none, and while the worker is new (FIRST draft
tokens, FIRST_STEPS) no trial of a sequence alone does: what is believed then is from nowhere, and a draft that is
better than that would go unused for thousands of steps. Beside others a trial costs all of them.
"""

from __future__ import annotations

from baton.core.request import SequenceId

SHARE = 0.005  # of the time of steps
DRAFT_TOKENS = 8  # of a trial, each alone in its step
FIRST, FIRST_STEPS = 48, 512  # draft tokens and steps of a worker
_SAVED_STEPS = 2000  # steps whose allowance is kept at most
_LONGEST = 64  # steps that a trial may take, filling its draft


class Trials:
    """Complete state: the allowance, and the running trial: its sequence, draft tokens to come and steps left; how
    many of the worker's first draft tokens and steps are still to come."""

    def __init__(self) -> None:
        self.allowance_s = 0.0
        self.sequence_id: SequenceId | None = None
        self._draft_tokens = self._steps = 0
        self._first, self._first_steps = FIRST, FIRST_STEPS
        self.begun = 0

    def stepped(self, step_s: float, steps: int = 1) -> None:
        """A step that takes `step_s` is planned; several at once only while nothing is tried."""
        self._first_steps -= steps
        self.allowance_s = min(self.allowance_s + SHARE * step_s * steps, SHARE * _SAVED_STEPS * step_s)
        if self.sequence_id is not None:
            self._steps -= 1
            if self._steps <= 0:
                self.sequence_id = None

    def begin(self, sequence_id: SequenceId, cost_s: float, *, alone: bool = False) -> bool:
        """Tries a sequence if none is tried and there is enough to pay for it."""
        free = not self.begun or (alone and min(self._first, self._first_steps) > 0)
        if self.sequence_id is not None or not (free or cost_s <= self.allowance_s):
            return False
        self.allowance_s = max(self.allowance_s - cost_s, 0.0)
        self.sequence_id, self._draft_tokens, self._steps = sequence_id, DRAFT_TOKENS, _LONGEST
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
        if sequence_id == self.sequence_id:
            self.sequence_id = None
