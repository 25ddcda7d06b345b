"""How fast what waits gets its turn, measured: prompt tokens placed per second while choices wait in the queue, or
choices that end per second while a key is at its limit. Pure."""

from __future__ import annotations

import math

WINDOW_S = 10.0
"""Older measurements count less: by 1/e after so many seconds in which choices waited."""
MAX_RETRY_S = 60.0


class DrainRate:
    def __init__(self) -> None:
        self._tokens = 0.0  # that were placed while choices waited, decayed, as the next
        self._seconds = 0.0  # in which choices waited
        self._at = 0.0  # when choices were last known to wait
        self._waited = False  # since the last update

    def update(self, now: float, placed_tokens: int, *, waits: bool) -> None:
        """Counts what was just placed; `waits`: whether choices are left for which workers have no room now. What is
        placed while nothing waits says nothing about the rate, and what was measured before a long pause neither."""
        elapsed_s = now - self._at
        if not self._waited and elapsed_s > WINDOW_S:
            self._tokens = self._seconds = 0.0
        elif self._waited:
            kept = math.exp(-elapsed_s / WINDOW_S)
            self._tokens = self._tokens * kept + placed_tokens
            self._seconds = self._seconds * kept + elapsed_s
        if waits or self._waited:
            self._at = now
        self._waited = waits

    def seconds(self, tokens: float) -> float | None:
        """Returns how long so many tokens take to leave the queue; None if nothing has been measured."""
        return tokens * self._seconds / self._tokens if self._tokens else None

    def retry_after_s(self, tokens: float) -> float:
        """Returns after how many seconds a refused client should try again, if so many tokens have to leave first."""
        return max(1.0, min(self.seconds(tokens) or 0.0, MAX_RETRY_S))
