"""How likely the draft tokens of each sequence are to be accepted: pure.

The probability p of a sequence is estimated from its verified draft tokens, up to the first rejected one, whose numbers
decay (`Sequence.accepted_weight`, `Sequence.verified_weight`). The fewer recent ones it has, the more the estimate is
weighted towards the average of all sequences. So while a sequence is not drafted for, its p returns to the worker's
average: observations become outdated, and the text may become easier to predict.
"""

from __future__ import annotations

from baton.core.sequence import Sequence

_KEPT = 0.98  # decay of a sequence's observations per draft token
_KEPT_SHARED = 0.995  # decay of the worker's observations per draft token
_KEPT_IDLE = 0.985  # decay of a sequence's observations per step without a draft token for it
_PRIOR = 16.0  # weight of the worker's average in a sequence's estimate, in draft tokens
_START, _START_PRIOR = 0.6, 24.0  # the worker's initial average, and its weight in draft tokens


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
            sequence.accepted_weight *= _KEPT_IDLE
            sequence.verified_weight *= _KEPT_IDLE
        for index in range(min(accepted + 1, drafted)):
            right = index < accepted
            sequence.accepted_weight = sequence.accepted_weight * _KEPT + right
            sequence.verified_weight = sequence.verified_weight * _KEPT + 1.0
            self._accepted_weight = self._accepted_weight * _KEPT_SHARED + right
            self._verified_weight = self._verified_weight * _KEPT_SHARED + 1.0
