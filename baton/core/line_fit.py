"""A line through what was observed last, by least squares: a fixed cost and one for each token. Pure."""

from __future__ import annotations

_LEAST_SPREAD = 1e-6
"""Of the tokens' mean square: with less variance they count as one length."""


class LineFit:
    """Each observation weighs `kept` times the next one."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self.count = 0.0
        """The weights of all observations together: at most 1 / (1 - kept)."""
        self._x = self._y = self._xx = self._xy = 0.0  # weighted sums

    def observe(self, tokens: int, seconds: float) -> None:
        self.count = self._kept * self.count + 1.0
        self._x = self._kept * self._x + tokens
        self._y = self._kept * self._y + seconds
        self._xx = self._kept * self._xx + tokens * tokens
        self._xy = self._kept * self._xy + tokens * seconds

    def mean_s(self) -> float:
        """Returns the seconds of one observation. Requires an observation."""
        return self._y / self.count

    def line(self) -> tuple[float, float] | None:
        """Returns the fixed seconds and those of each token, neither below 0; None before two lengths are known."""
        spread = self.count * self._xx - self._x * self._x
        if spread <= _LEAST_SPREAD * self._xx * self.count:
            return None
        token_s = max((self.count * self._xy - self._x * self._y) / spread, 0.0)
        return max((self._y - token_s * self._x) / self.count, 0.0), token_s
