"""What a step of prompts costs, measured, and whether another prompt should join it. Pure.

A step takes a fixed time and a time for each token: a line through the recent steps by least squares, in which an older
step weighs less. Attention to long contexts would bend it, so the caller leaves out steps of long prompts.
"""

from __future__ import annotations

_KEPT = 0.98
"""Weight of the earlier steps when another is observed."""


class StepFit:
    def __init__(self) -> None:
        self._steps = self._tokens = self._seconds = self._tokens_squared = self._products = 0.0  # weighted sums

    def observe(self, tokens: int, seconds: float) -> None:
        """Records that a step of `tokens` tokens took `seconds`, with what passed until the next one could begin."""
        self._steps = _KEPT * self._steps + 1.0
        self._tokens = _KEPT * self._tokens + tokens
        self._seconds = _KEPT * self._seconds + seconds
        self._tokens_squared = _KEPT * self._tokens_squared + tokens * tokens
        self._products = _KEPT * self._products + tokens * seconds

    def costs(self) -> tuple[float, float] | None:
        """Returns the seconds of a step and those of each token in it; None before steps of two lengths are known."""
        spread = self._steps * self._tokens_squared - self._tokens**2
        if spread <= 1e-9 * self._tokens**2:
            return None
        token_s = max((self._steps * self._products - self._tokens * self._seconds) / spread, 0.0)
        return max((self._seconds - token_s * self._tokens) / self._steps, 0.0), token_s

    def pays(self, tokens: int, rows: int, waiting: int) -> bool:
        """Whether a prompt with `tokens` tokens to compute should join a step of `rows` rows: `waiting` prompts, this
        one among them, are then spared a step, and the rows wait for the tokens. True before costs are known."""
        costs = self.costs()
        return costs is None or waiting * costs[0] >= rows * tokens * costs[1]
