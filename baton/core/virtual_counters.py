"""Whose turn it is among tenants that share one queue: the one that has received the least service. Pure.

The counters are those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each
tenant's is the service that it has received, and the waiting tenant with the smallest one goes next. A tenant that had
nothing waiting is lifted to the smallest counter of those that wait, so that time without requests earns no credit.
"""

from __future__ import annotations

from collections.abc import Iterable


class VirtualCounters:
    """Counters of tenants that share one queue."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # the counters
        self._turns: dict[str, int] = {}  # the number of each tenant's last turn
        self._last_turn = 0
        self._last = ""  # see `leave`

    def copy(self) -> VirtualCounters:
        other = VirtualCounters()
        other._served, other._turns = self._served.copy(), self._turns.copy()
        other._last_turn, other._last = self._last_turn, self._last
        return other

    def of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def turn(self, tenant: str) -> tuple[float, int]:
        """Returns the sort key of a tenant that waits: the lowest goes next. Of equal counters, the one served longest
        ago: a tenant that was idle has just been lifted to the counter of another."""
        return self.of(tenant), self._turns.get(tenant, 0)

    def after_idle(self, tenant: str, waiting: Iterable[str]) -> float:
        """Returns the counter with which a tenant that has nothing in the queue would enter it; `waiting` are those
        in it."""
        floor = min(map(self.of, waiting), default=self.of(self._last))
        return max(self.of(tenant), floor)

    def enter(self, tenant: str, waiting: Iterable[str]) -> None:
        """Lifts the counter of a tenant that had nothing in the queue."""
        self._served[tenant] = self.after_idle(tenant, waiting)

    def leave(self, tenant: str) -> None:
        """Names the tenant to whose counter others are lifted while nobody waits: the last one that was in the queue,
        or, where all leave at the end of a step, the last one that was served in it."""
        self._last = tenant

    def charge(self, tenant: str, service: float, *, takes_turn: bool) -> None:
        """Counts service that a tenant received, with `takes_turn` in its turn."""
        self._served[tenant] = self._served.get(tenant, 0.0) + service
        if takes_turn:
            self._last_turn += 1
            self._turns[tenant] = self._last_turn
