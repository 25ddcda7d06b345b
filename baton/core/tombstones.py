"""Sequences whose abort overtook their offer or command: they are refused until their deadline has passed."""

from __future__ import annotations

from baton.core.request import SequenceId

SWEEP_S = 1.0  # a full table is looked through this often: all of it, 27 ms for 65,536


class Tombstones:
    """Complete state: `_until`, sequence -> instant of the caller's monotonic clock, bounded by expiry and `limit`, and
    when ended ones were looked for last."""

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._swept_at = float("-inf")
        self._until: dict[SequenceId, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, sequence: SequenceId, now: float, duration_s: float) -> None:
        until = max(now + duration_s, self._until.pop(sequence, now))
        if len(self._until) >= self._limit and now >= self._swept_at + SWEEP_S:
            self.expire(now)
        if len(self._until) >= self._limit:
            del self._until[next(iter(self._until))]
        self._until[sequence] = until

    def clear(self) -> None:
        self._until.clear()

    def covers(self, sequence: SequenceId, now: float) -> bool:
        until = self._until.get(sequence)
        return until is not None and until > now

    def expire(self, now: float) -> None:
        self._swept_at = now
        self._until = {s: until for s, until in self._until.items() if until > now}
