"""How many tokens to draft for each sequence in the next step: pure.

A draft pays while the tokens it is expected to win take longer to make without it. With probability p that a draft
token is right when all before it were, the d-th draft of a sequence wins p^d tokens. What it costs is one token more in
the target's step and its part of a draft step. `choose_lengths` takes the surest sequences, 1, 2, 4, ... of them,
deepens their draft tokens while tokens per second rise, and keeps the fastest of all that.

p is measured for each sequence, and the less was seen of it lately the more it is taken to be like all others. So while
nothing is drafted for a sequence its p goes back to the worker's: what was seen grows old, and text turns easy again.
What each constant here is worth: decision 0023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.speculation.step_cost import StepPrice

MAX_DRAFT_TOKENS = 8

_KEPT = 0.985  # of what was seen, at each draft token of a sequence, and at each step without one for it
_KEPT_SHARED = 0.995  # and of the worker
_START, _PRIOR = 0.6, 16.0  # what a worker believes at first; draft tokens that a belief counts as beside what was seen


@dataclass(slots=True)
class Acceptance:
    """How draft tokens have fared whose turn came: `right` of `seen`. Both fade, so that neither need be whole."""

    right: float = 0.0
    seen: float = 0.0

    def observe(self, drafted: int, accepted: int, kept: float) -> None:
        """`accepted` of `drafted` were right; those behind the first wrong one say nothing."""
        for index in range(min(accepted + 1, drafted)):
            self.right = self.right * kept + (index < accepted)
            self.seen = self.seen * kept + 1.0


class AcceptanceBook:
    """Complete state: how draft tokens for all sequences have fared. Each one's own Acceptance is with its owner."""

    def __init__(self) -> None:
        self._all = Acceptance(_START * _PRIOR, _PRIOR)  # fades like what was seen

    @property
    def shared(self) -> float:
        """p over all sequences."""
        return self._all.right / self._all.seen

    def rate(self, own: Acceptance) -> float:
        """p of a sequence."""
        return (own.right + self.shared * _PRIOR) / (own.seen + _PRIOR)

    def observe(self, own: Acceptance, drafted: int, accepted: int) -> None:
        """A step with `drafted` draft tokens for a sequence is over, `accepted` of which were right."""
        if drafted:
            own.observe(drafted, accepted, _KEPT)
            self._all.observe(drafted, accepted, _KEPT_SHARED)
        else:
            own.right *= _KEPT
            own.seen *= _KEPT


def saved_per_token(rate: float, rows: int, price: StepPrice) -> float:
    """Seconds that drafting saves for each token of a sequence, when all `rows` draft as it does; 0 if none."""
    step_s, gained, chance, best = price.plain_s, 1.0, 1.0, 0.0
    for depth in range(1, MAX_DRAFT_TOKENS + 1):
        chance *= rate
        gained += chance
        step_s += price.token_s * rows + (price.first_s if depth == 1 else price.next_s)(rows)
        best = max(best, (price.plain_s - step_s / gained) / rows)
    return best


def choose_lengths(rates: Sequence[float], limits: Sequence[int], price: StepPrice) -> list[int]:
    """Draft tokens for each of n sequences, at most `limits[i]`: the choice where n sequences together are fastest.

    `rates` are the probabilities p. O(n * longest limit).
    """
    speed, best = len(rates) / price.plain_s, [0] * len(rates)
    # A draft wins at most p + p^2 + ... tokens, and pays at least its own place in the target's step.
    least = speed * price.token_s
    able = [i for i, rate in enumerate(rates) if limits[i] > 0 and rate > least * (1.0 - min(rate, 0.99))]
    able.sort(key=lambda i: -rates[i])
    count = 1
    while able:
        speed, found = _deepen(able[:count], rates, limits, price, speed)
        best = found or best
        if count >= len(able):
            break
        count = min(2 * count, len(able))
    return best


def _deepen(
    chosen: list[int], rates: Sequence[float], limits: Sequence[int], price: StepPrice, speed: float
) -> tuple[float, list[int] | None]:
    """The best that comes of drafting for the `chosen`, if it is faster than `speed`, and how fast it is."""
    lengths, best, chances = [0] * len(rates), None, [1.0] * len(rates)
    gained, step_s = float(len(rates)), price.plain_s
    for depth in range(1, max(limits[i] for i in chosen) + 1):
        pass_s = price.first_s if depth == 1 else price.next_s
        if depth > 1:  # the choice of the first level is the caller's
            least = speed * (price.token_s + pass_s(len(chosen)) / len(chosen))
            chosen = [i for i in chosen if limits[i] >= depth and chances[i] * rates[i] > least]
            if not chosen:
                break
        for i in chosen:
            chances[i] *= rates[i]
            gained += chances[i]
            lengths[i] = depth
        step_s += price.token_s * len(chosen) + pass_s(len(chosen))
        if gained > speed * step_s:
            speed, best = gained / step_s, list(lengths)
    return speed, best
