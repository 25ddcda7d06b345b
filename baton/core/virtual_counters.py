"""Whose turn it is among tenants that share one queue: the one that has received the least service. Pure.

The counters are those of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each
tenant's is the service that it has received, and the waiting tenant with the smallest one goes next. There a tenant
that had nothing waiting is lifted to the smallest counter of those that wait, and time without requests earns nothing.
Here it is lifted to `IDLE_CREDIT` less: a tenant that uses less than its share, and whose requests follow each other
closely now and then, has no turns of a busy one between them. So two tenants that wait during a whole interval differ
by up to `IDLE_CREDIT` more in what they receive in it. A tenant that still waits when it has received `BURST` sends
more than a few requests now and then: it loses what is left of its credit, and nobody waits until that is used.
"""

from __future__ import annotations

from collections.abc import Iterable

IDLE_CREDIT, BURST = 16_384, 4096
"""In tokens of prompts, for a weight of 1. Tenants with credit that have received at most BURST since they entered the
queue go before the others (measured in decision 0033)."""


class VirtualCounters:
    """Counters of tenants that share one queue."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # the counters
        self._turns: dict[str, int] = {}  # the number of each tenant's last turn
        self._since: dict[str, float] = {}  # the service that each received in its turns since it entered the queue
        self._last_turn = 0
        self._last = ""  # see `leave`
        self._floor = 0.0  # where credit ends: the highest of the smallest counters of those that waited

    def copy(self) -> VirtualCounters:
        other = VirtualCounters()
        other._served, other._turns, other._since = self._served.copy(), self._turns.copy(), self._since.copy()
        other._last_turn, other._last, other._floor = self._last_turn, self._last, self._floor
        return other

    def of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def turn(self, tenant: str, *, by_age: bool = False) -> tuple[float, bool, int]:
        """Returns the sort key of a tenant that waits: the lowest goes next. Those with credit have equal counters:
        those that have received little since they entered go first, of these the one served longest ago, or with
        `by_age` all alike, before those without credit: the age of their requests decides."""
        served, busy = self.of(tenant), self._since.get(tenant, 0.0) > BURST
        alike = by_age and served < self._floor
        return max(served, self._floor), busy, 0 if alike else self._turns.get(tenant, 0)

    def after_idle(self, tenant: str, waiting: Iterable[str]) -> float:
        """Returns the counter with which a tenant that has nothing in the queue would enter it; `waiting` are those
        in it."""
        return self._with_credit(tenant, self._floor_with(waiting))

    def enter(self, tenant: str, waiting: Iterable[str]) -> None:
        """Lifts the counter of a tenant that had nothing in the queue, less its credit."""
        self._since[tenant], self._floor = 0.0, self._floor_with(waiting)
        self._served[tenant] = self._with_credit(tenant, self._floor)

    def _with_credit(self, tenant: str, floor: float) -> float:
        return max(self.of(tenant), floor - IDLE_CREDIT)

    def _floor_with(self, waiting: Iterable[str]) -> float:
        return max(self._floor, min(map(self.of, waiting), default=self.of(self._last)))

    def leave(self, tenant: str) -> None:
        """Names the tenant whose counter is the floor while nobody waits: the last one that was in the queue,
        or, where all leave at the end of a step, the last one that was served in it."""
        self._last = tenant

    def charge(self, tenant: str, service: float, *, takes_turn: bool) -> None:
        """Counts service that a tenant received, with `takes_turn` in its turn."""
        self._served[tenant] = self._served.get(tenant, 0.0) + service
        if takes_turn:
            self._last_turn += 1
            self._turns[tenant] = self._last_turn
            self._since[tenant] = self._since.get(tenant, 0.0) + service
            if self._since[tenant] > BURST:
                self._served[tenant] = max(self._served[tenant], self._floor)
