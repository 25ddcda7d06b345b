"""When batches expire. Pure.

A batch expires when its window has passed on the wall clock, which alone continues across restarts. Within a run a jump
of the wall clock must not expire batches, so the remaining time is computed once, when the batch is first seen, and
then passes by the monotonic clock.
"""

from __future__ import annotations


class Expiry:
    """State: for each batch that has not ended, the monotonic time in seconds at which it expires."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._ends: dict[str, float] = {}

    def add(self, batch_id: str, expires_at: float, wall: float, monotonic: float) -> None:
        """Notes a batch, unless it is known. `expires_at` and `wall` are in seconds since the epoch; a batch never has
        more than its window left, even if the wall clock was set back."""
        self._ends.setdefault(batch_id, monotonic + min(expires_at - wall, self._window_s))

    def has_expired(self, batch_id: str, monotonic: float) -> bool:
        return monotonic > self._ends[batch_id]

    def forget(self, batch_id: str) -> None:
        self._ends.pop(batch_id, None)
