"""The deadline of each sequence on this worker's monotonic clock."""

from __future__ import annotations

import heapq

from baton.core.request import SequenceId


class Deadlines:
    """Complete state: `_at` per sequence, and `_heap` over it (entries of forgotten sequences are skipped)."""

    def __init__(self) -> None:
        self._at: dict[SequenceId, float] = {}
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

    def expire(self, now: float) -> list[SequenceId]:
        """Removes and returns the sequences whose deadline is at or before `now`."""
        late: list[SequenceId] = []
        while self._heap and self._heap[0][0] <= now:
            at, sequence = heapq.heappop(self._heap)
            if self._at.get(sequence) == at:
                del self._at[sequence]
                late.append(sequence)
        return late
