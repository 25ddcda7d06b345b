"""The clock of a process that receives only while it runs.

A lease ends after a silence. A process that was suspended (stopped, starved, its machine paused) received nothing
meanwhile, but its peers were not silent: their messages are unread in its sockets. This clock counts such a gap as at
most `most_s`. Pure; times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations


class ListeningClock:
    def __init__(self, now: float, most_s: float) -> None:
        self._most_s = most_s
        self._advanced_at = self._reading = now

    def at(self, now: float) -> float:
        """Returns the clock's reading: monotonic, and never more than `most_s` beyond that of the last `advance`."""
        return self._reading + min(max(now - self._advanced_at, 0.0), self._most_s)

    def advance(self, now: float) -> float:
        """Advances the clock to `now` and returns its reading. Call it regularly, after reading all messages."""
        self._reading, self._advanced_at = self.at(now), max(now, self._advanced_at)
        return self._reading
