"""The clock of a process that receives only while it runs.

A lease ends a silence. While the process that counts it stood still (stopped, starved, its machine paused), it received
nothing, so nobody was silent: what came meanwhile lies unread in its sockets. On this clock such a gap counts as
`most_s` and no more. Pure; times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations


class ListeningClock:
    """Complete state: when it was last looked after, and what it showed then."""

    def __init__(self, now: float, most_s: float) -> None:
        self._most_s = most_s
        self._looked_at = self._shown = now

    def at(self, now: float) -> float:
        """What it shows: monotonic, and never more than `most_s` beyond the last `look`."""
        return self._shown + min(max(now - self._looked_at, 0.0), self._most_s)

    def look(self, now: float) -> float:
        """To be called again and again by whoever listens, each time after what had come was read; what it shows."""
        self._shown, self._looked_at = self.at(now), max(now, self._looked_at)
        return self._shown
