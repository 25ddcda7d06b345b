"""Which choices still go to the workers of a class in which another one had no room. Pure.

A choice without room closes its class to those behind it, so short requests cannot starve a long one. If a prompt of
more than BACKLOG_STEPS lacks a worker to compute it, though, other tenants of its priority go past it: it waits until
one has nothing else, or for another long prompt, and they have turns of their own beside what is there. They do until
they have received what its tenant will have with this prompt; then the class is closed to them as well, and what the
workers have left to do runs out. So it waits for no more than its fair turn, whatever arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from coordinator.policy.choice import Choice
from coordinator.policy.pool import Pool


@dataclass(slots=True)
class Closed:
    """One class, from its first choice without room in a `place` on."""

    without: dict[object, tuple[Pool, ...]] = field(default_factory=dict)
    """The pools that had no room, by what the choices needed."""
    tenants: set[str] = field(default_factory=set)
    """Those of these choices."""
    priority: int = 0
    below: float = inf
    """Other tenants go past them while their counters are lower."""

    @property
    def open(self) -> bool:
        """Whether it may be open to some tenant."""
        return self.below > -inf

    @property
    def grown(self) -> bool:
        """Whether one of the pools may have room by now."""
        return any(pool.grown for pools in self.without.values() for pool in pools)

    def add(self, choice: Choice, needs: object, pools: tuple[Pool, ...], below: float) -> None:
        """Records that `pools` have no room for a choice, and that others with a lower counter may go past it."""
        self.without[needs] = pools
        self.tenants.add(choice.request.tenant)
        self.priority, self.below = choice.request.priority, min(self.below, below)

    def lets(self, choice: Choice, counter: float) -> bool:
        """Whether the class is open to a choice, whose tenant has this counter."""
        mine = choice.request
        return mine.priority == self.priority and mine.tenant not in self.tenants and counter < self.below
