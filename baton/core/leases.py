"""Leases: how long a silent peer still counts as alive.

A lease belongs to the session of a worker and the coordinator and is renewed by its heartbeat; per request there is
only the deadline (design, section 1.8).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Lease:
    holder: str
    incarnation: int
    expires_at: float


class LeaseTable:
    """Holders and when they expire. Complete state: `_leases`, and `_newest`, the highest incarnation seen of each
    holder, which outlives its lease: an older one stays fenced. Times are seconds of the caller's monotonic clock."""

    def __init__(self, duration_s: float) -> None:
        if not duration_s > 0:
            raise InvariantError(f"a lease of {duration_s} s can never be held")
        self.duration_s = duration_s
        self._leases: dict[str, Lease] = {}
        self._newest: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, holder: str, incarnation: int, now: float) -> bool:
        """Gives or replaces a lease; False when a newer incarnation has held it (the caller is fenced)."""
        if self._newest.setdefault(holder, incarnation) > incarnation:
            return False
        self._newest[holder] = incarnation
        self._leases[holder] = Lease(holder, incarnation, now + self.duration_s)
        return True

    def renew(self, holder: str, incarnation: int, now: float) -> bool:
        """Extends a lease; False when it has expired, is unknown, or belongs to another incarnation."""
        held = self._leases.get(holder)
        if held is None or held.incarnation != incarnation or held.expires_at <= now:
            return False
        self._leases[holder] = Lease(holder, incarnation, now + self.duration_s)
        return True

    def valid(self, holder: str, incarnation: int, now: float) -> bool:
        held = self._leases.get(holder)
        return held is not None and held.incarnation == incarnation and held.expires_at > now

    def drop(self, holder: str, incarnation: int) -> None:
        held = self._leases.get(holder)
        if held is not None and held.incarnation == incarnation:
            del self._leases[holder]

    def expire(self, now: float) -> list[Lease]:
        """Removes and returns what has expired by `now`."""
        gone = [lease for lease in self._leases.values() if lease.expires_at <= now]
        for lease in gone:
            del self._leases[lease.holder]
        return gone
