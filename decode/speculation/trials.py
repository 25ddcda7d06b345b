"""Trials: draft tokens for sequences whose estimate says that they do not pay off, to keep the estimate current. Pure.

They cost time and rarely gain any, so they have an allowance: a two-hundredth of the time of steps. A trial is a few
draft tokens in succession for one sequence, one per step, because its draft KV may have to catch up first. It begins
when the allowance covers its expected loss, so the cost of trials is bounded whatever a draft token costs, and however
many sequences run. The first trial needs no allowance, and while the worker is new (FIRST draft tokens, FIRST_STEPS) no
trial of a lone sequence does: the initial estimate is arbitrary, and a draft model better than it would go unused for
thousands of steps. Beside other sequences a trial slows all of them down.
"""

from __future__ import annotations

from baton.core.request import SequenceId

SHARE = 0.005  # of the time of steps
DRAFT_TOKENS = 8  # of a trial, one per step
FIRST, FIRST_STEPS = 48, 512  # draft tokens and steps during which a worker is new
_SAVED_STEPS = 2000  # steps whose allowance can accumulate
_LONGEST = 64  # steps that a trial may take, including filling its draft KV


class Trials:
    """Whether a sequence may try draft tokens at a loss, and which one does."""

    def __init__(self) -> None:
        self.allowance_s = 0.0
        self.sequence_id: SequenceId | None = None  # of the running trial
        self._draft_tokens = self._steps = 0  # that remain of it
        self._first, self._first_steps = FIRST, FIRST_STEPS  # that remain of the worker's first ones
        self.started = 0

    def stepped(self, step_s: float, steps: int = 1) -> None:
        """Records `steps` planned steps of `step_s` seconds each; more than one only while no trial runs."""
        self._first_steps -= steps
        self.allowance_s = min(self.allowance_s + SHARE * step_s * steps, SHARE * _SAVED_STEPS * step_s)
        if self.sequence_id is not None:
            self._steps -= 1
            if self._steps <= 0:
                self.sequence_id = None

    def begin(self, sequence_id: SequenceId, cost_s: float, *, alone: bool = False) -> bool:
        """Starts a trial of a sequence if none runs and the allowance covers it; returns whether it did."""
        free = not self.started or (alone and min(self._first, self._first_steps) > 0)
        if self.sequence_id is not None or not (free or cost_s <= self.allowance_s):
            return False
        self.allowance_s = max(self.allowance_s - cost_s, 0.0)
        self.sequence_id, self._draft_tokens, self._steps = sequence_id, DRAFT_TOKENS, _LONGEST
        self.started += 1
        return True

    def drafted(self, sequence_id: SequenceId) -> None:
        """Records that a step has draft tokens for a sequence."""
        self._first -= 1
        if sequence_id == self.sequence_id:
            self._draft_tokens -= 1
            if self._draft_tokens <= 0:
                self.sequence_id = None

    def close(self, sequence_id: SequenceId) -> None:
        if sequence_id == self.sequence_id:
            self.sequence_id = None
