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
from typing import NamedTuple

from coordinator.policy.choice import Choice, QueuePosition
from coordinator.policy.pool import Pool


class Lack(NamedTuple):
    """The pools that had no room for a choice, and how many tokens it was expected to have at a decode worker, if that
    pool is one of them: with fewer it may fit."""

    pools: tuple[Pool, ...]
    tokens: int


@dataclass(slots=True)
class Closed:
    """One class, from its first choice without room in a `place` on."""

    changes: int
    """`WorkerClass.changes`."""
    lacks: dict[QueuePosition | None, Lack] = field(default_factory=dict)
    """What the choices lacked, by their place in the queue."""
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
        return any(pool.grown for lack in self.lacks.values() for pool in lack.pools)

    def add(self, choice: Choice, lack: Lack, below: float) -> None:
        """Records what a choice of the queue lacks, and that others with a lower counter may go past it."""
        self.lacks[choice.queue_position] = lack
        self.tenants.add(choice.request.tenant)
        self.priority, self.below = choice.request.priority, min(self.below, below)

    def lets(self, choice: Choice, counter: float) -> bool:
        """Whether the class is open to a choice, whose tenant has this counter."""
        mine = choice.request
        return mine.priority == self.priority and mine.tenant not in self.tenants and counter < self.below
