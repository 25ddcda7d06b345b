"""Deadlines of sequences, and tombstones, which refuse a sequence whose abort overtook its offer or command. All times
are instants of this worker's monotonic clock."""

from __future__ import annotations

import heapq

from baton.core.request import SequenceId


class Deadlines:
    def __init__(self) -> None:
        self._at: dict[SequenceId, float] = {}
        # Over `_at`; what was removed there is skipped.
        self._heap: list[tuple[float, SequenceId]] = []

    def __len__(self) -> int:
        return len(self._at)

    def add(self, sequence: SequenceId, at: float) -> None:
        self._at[sequence] = at
        heapq.heappush(self._heap, (at, sequence))

    def forget(self, sequence: SequenceId) -> None:
        self._at.pop(sequence, None)
        if not self._at:
            self._heap.clear()

    def rename(self, old: SequenceId, new: SequenceId) -> None:
        """Gives the deadline of `old`, if it has one, to `new`."""
        at = self._at.pop(old, None)
        if at is not None:
            self.add(new, at)

    def expire(self, now: float) -> list[SequenceId]:
        """Removes and returns the sequences whose deadline is at or before `now`."""
        late: list[SequenceId] = []
        while self._heap and self._heap[0][0] <= now:
            at, sequence = heapq.heappop(self._heap)
            if self._at.get(sequence) == at:
                del self._at[sequence]
                late.append(sequence)
        return late


class Tombstones:
    """Sequences that are refused until a given time. Beyond `limit` the oldest entry is dropped."""

    def __init__(self, limit: int = 65536) -> None:
        self._limit = limit
        self._until: dict[SequenceId, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, sequence: SequenceId, now: float, duration_s: float) -> None:
        self._until[sequence] = max(now + duration_s, self._until.pop(sequence, now))
        if len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def clear(self) -> None:
        self._until.clear()

    def covers(self, sequence: SequenceId, now: float) -> bool:
        until = self._until.get(sequence)
        return until is not None and until > now

    def expire(self, now: float) -> None:
        self._until = {s: until for s, until in self._until.items() if until > now}
