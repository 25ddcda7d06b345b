"""How likely the draft tokens of each sequence are to be accepted, and the trials that keep the estimate current: pure.

The probability p of a sequence is estimated from its verified draft tokens, up to the first rejected one, whose numbers
decay (`Sequence.accepted_weight`, `Sequence.verified_weight`). The fewer recent ones it has, the more the estimate is
weighted towards the average of all sequences. So while a sequence is not drafted for, its p returns to the worker's
average: observations become outdated, and the text may become easier to predict.

Trials are draft tokens for sequences whose estimate says that they do not pay off. They cost time and rarely gain any,
so they have an allowance: a two-hundredth of the time of steps. A trial is a few draft tokens in succession for one
sequence, one per step, because its draft KV may have to catch up first. It begins when the allowance covers its
expected loss, so the cost of trials is bounded whatever a draft token costs, and however many sequences run. The first
trial needs no allowance, and until a worker has drafted FIRST tokens no trial of a lone sequence does: the initial
estimate is arbitrary, and a draft model better than it would go unused for thousands of steps. Beside other sequences a
trial slows all of them down.
"""

from __future__ import annotations

from baton.core.request import SequenceId
from baton.core.sequence import Sequence

_KEPT = 0.985  # decay of a sequence's observations per draft token, or per step without any for it
_KEPT_SHARED = 0.995  # decay of the worker's observations per draft token
_PRIOR = 16.0  # weight of the worker's average in a sequence's estimate, in draft tokens
_START, _START_PRIOR = 0.6, 24.0  # the worker's initial average, and its weight in draft tokens
TRIAL_SHARE = 0.005  # of the time of steps
TRIAL_DRAFT_TOKENS = 8  # of a trial, one per step
FIRST = 48  # draft tokens of a worker until which trials of a lone sequence need no allowance
_SAVED_STEPS = 2000  # steps whose allowance can accumulate
_LONGEST = 64  # steps that a trial may take, including filling its draft KV


class AcceptanceEstimates:
    def __init__(self) -> None:
        # Over all sequences; they decay like those of a sequence.
        self._accepted_weight, self._verified_weight = _START * _START_PRIOR, _START_PRIOR

    @property
    def shared(self) -> float:
        """p over all sequences."""
        return self._accepted_weight / self._verified_weight

    def rate(self, sequence: Sequence) -> float:
        """Returns p of a sequence."""
        return (sequence.accepted_weight + self.shared * _PRIOR) / (sequence.verified_weight + _PRIOR)

    def observe(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records a step with `drafted` draft tokens for a sequence, `accepted` of which were accepted; those after the
        first rejected one do not count."""
        if not drafted:
            sequence.accepted_weight *= _KEPT
            sequence.verified_weight *= _KEPT
        for index in range(min(accepted + 1, drafted)):
            right = index < accepted
            sequence.accepted_weight = sequence.accepted_weight * _KEPT + right
            sequence.verified_weight = sequence.verified_weight * _KEPT + 1.0
            self._accepted_weight = self._accepted_weight * _KEPT_SHARED + right
            self._verified_weight = self._verified_weight * _KEPT_SHARED + 1.0


class Trials:
    """Whether a sequence may try draft tokens at a loss, and which one does."""

    def __init__(self) -> None:
        self.allowance_s = 0.0
        self.sequence_id: SequenceId | None = None  # of the running trial
        self._draft_tokens = self._steps = 0  # that remain of it
        self._first = FIRST  # that remain of the worker's first draft tokens
        self.started = 0

    def stepped(self, step_s: float, steps: int = 1) -> None:
        """Records `steps` planned steps of `step_s` seconds each; more than one only while no trial runs."""
        self.allowance_s = min(self.allowance_s + TRIAL_SHARE * step_s * steps, TRIAL_SHARE * _SAVED_STEPS * step_s)
        if self.sequence_id is not None:
            self._steps -= 1
            if self._steps <= 0:
                self.sequence_id = None

    def begin(self, sequence_id: SequenceId, cost_s: float, *, alone: bool = False) -> bool:
        """Starts a trial of a sequence if none runs and the allowance covers it; returns whether it did."""
        free = not self.started or (alone and self._first > 0)
        if self.sequence_id is not None or not (free or cost_s <= self.allowance_s):
            return False
        self.allowance_s = max(self.allowance_s - cost_s, 0.0)
        self.sequence_id, self._draft_tokens, self._steps = sequence_id, TRIAL_DRAFT_TOKENS, _LONGEST
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
