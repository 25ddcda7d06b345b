"""What a step of prompts costs, measured, and whether another prompt should join it. Pure.

A step takes a fixed time and a time for each token. Attention to long contexts would bend that line, so the caller
leaves out steps of long prompts.
"""

from __future__ import annotations

from baton.core.line_fit import LineFit

_KEPT = 0.98


class StepFit:
    def __init__(self) -> None:
        self._fit = LineFit(_KEPT)

    def observe(self, tokens: int, seconds: float) -> None:
        """Records that a step of `tokens` tokens took `seconds`, with what passed until the next one could begin."""
        self._fit.observe(tokens, seconds)

    def costs(self) -> tuple[float, float] | None:
        """Returns the seconds of a step and those of each token in it; None before steps of two lengths are known."""
        return self._fit.line()

    def pays(self, tokens: int, rows: int, waiting: int) -> bool:
        """Whether a prompt with `tokens` tokens to compute should join a step of `rows` rows: `waiting` prompts, this
        one among them, are then spared a step, and the rows wait for the tokens. True before costs are known."""
        costs = self.costs()
        return costs is None or waiting * costs[0] >= rows * tokens * costs[1]
