"""How many tokens to guess for each sequence in the next step: pure.

A draft pays while the tokens it is expected to win take longer to make without it. With probability p that a guess is
right when all before it were, the d-th guess of a sequence wins p^d tokens. What it costs is one token more in the
target's step and its part of a draft step. `choose_lengths` adds level after level (all first guesses that pay, all
second ones, ...) while tokens per second rise.

p is measured for each sequence, as a moving average that starts from the worker's. A sequence that is not worth a guess
gets one now and then all the same, at intervals that double while it goes wrong: the text may turn easy again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WEIGHT = 0.08  # of one guess in its sequence's average, in the long run
_SHARED_WEIGHT = 0.03  # and in the worker's
_PRIOR = 5  # guesses that the worker's average counts as in a new sequence's
_START = 0.6
_FIRST_PROBE, _LAST_PROBE = 16, 1024


@dataclass(slots=True)
class Acceptance:
    """How guesses for one sequence have fared. `rate` is p, from `seen` guesses; `idle` counts steps since the last
    guess, and at `patience` of them one is due whatever `rate` says."""

    rate: float = _START
    seen: int = 0
    idle: int = 0
    patience: int = _FIRST_PROBE

    @property
    def probe_due(self) -> bool:
        return self.idle >= self.patience

    def settle(self, guessed: int, accepted: int) -> None:
        """A step with `guessed` guesses is over; guesses behind the first wrong one say nothing."""
        if guessed == 0:
            self.idle += 1
            return
        if self.idle >= self.patience:
            self.patience = _FIRST_PROBE if accepted else min(2 * self.patience, _LAST_PROBE)
        self.idle = 0
        self.rate = _moved(self.rate, guessed, accepted, max(_WEIGHT, 1.0 / (self.seen + _PRIOR)))
        self.seen += guessed


class AcceptanceBook:
    """Complete state: `shared`, p over all sequences, and one Acceptance for each sequence that is here."""

    def __init__(self) -> None:
        self.shared = _START

    def opened(self) -> Acceptance:
        """The start of a new sequence."""
        return Acceptance(self.shared)

    def settle(self, acceptance: Acceptance, guessed: int, accepted: int) -> None:
        acceptance.settle(guessed, accepted)
        self.shared = _moved(self.shared, guessed, accepted, _SHARED_WEIGHT)


def _moved(rate: float, guessed: int, accepted: int, weight: float) -> float:
    for _ in range(accepted):
        rate += weight * (1.0 - rate)
    return rate - weight * rate if accepted < guessed else rate


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step costs. `target(tokens)`, `draft(rows)` and `draft_next(rows)` are seconds of one pass, the last of
    those behind a draft's first; `fixed_s` is what surrounds them; `tokens` is what the step computes without any
    guess."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    draft_next: Callable[[int], float]
    tokens: int
    fixed_s: float = 0.0


def choose_lengths(rates: Sequence[float], limits: Sequence[int], price: StepPrice) -> list[int]:
    """Guesses for each of n sequences, at most `limits[i]`: the level where n sequences together are fastest.

    `rates` are the probabilities p. O(n * longest limit).
    """
    lengths, chances = [0] * len(rates), [1.0] * len(rates)
    computed, gained, drafted_s = price.tokens, float(len(rates)), price.fixed_s
    target_s = price.target(computed)
    speed = gained / max(target_s + drafted_s, 1e-9)
    depth, level = 0, list(range(len(rates)))
    while True:
        depth += 1
        level = [i for i in level if limits[i] >= depth]
        if not level:
            return lengths
        for i in level:
            chances[i] *= rates[i]
        token_s = max(price.target(computed + len(level)) - target_s, 0.0) / len(level)
        level = [i for i in level if chances[i] > speed * token_s]
        if not level:
            return lengths
        gained += sum(chances[i] for i in level)
        computed += len(level)
        target_s = price.target(computed)
        drafted_s += (price.draft if depth == 1 else price.draft_next)(len(level))
        faster = gained / max(target_s + drafted_s, 1e-9)
        if faster <= speed:
            return lengths
        speed = faster
        for i in level:
            lengths[i] = depth
