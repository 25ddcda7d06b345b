"""The membership of a worker in the cluster. Pure.

    READY         its session is open and it takes new work
    DISCONNECTED  its session broke; it keeps its sequences and may redial for REDIAL_S, or until its lease ends
    DRAINING      it takes no new work, finishes or gives back what it has, and leaves; its session may have broken
    LOST          its lease ended, or a newer incarnation replaced it
    LEFT          it has drained, and no other worker knows it any more

TABLE lists which event leads from which state to which. The worker table (`policy.workers`) decides when one happens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from baton.core.commands import Role
from baton.core.liveness import REDIAL_S
from baton.core.machine import MachineState, Table, handle, to


class WorkerState(MachineState):
    READY = "ready"
    DISCONNECTED = "disconnected"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


READY, DISCONNECTED, DRAINING, LOST, LEFT = WorkerState


# Events.


class Redialled(NamedTuple):
    """The same incarnation joined again, with its sequences."""

    lease_until: float


class SessionBroke(NamedTuple):
    """The lease now ends within REDIAL_S."""


class DrainBegan(NamedTuple):
    """It gives back what it has at `by` at the latest, on the caller's monotonic clock. The last one decides whether it
    joins again, in `next_role`."""

    by: float
    next_role: Role | None = None


class LeaseEnded(NamedTuple): ...


class Replaced(NamedTuple):
    """A newer incarnation joined under its name."""


class Left(NamedTuple):
    """It has nothing left and says so."""


Event = Redialled | SessionBroke | DrainBegan | LeaseEnded | Replaced | Left


class Member:
    """Times are seconds on the caller's lease clock, except `drain_by`. Each message of the worker moves `lease_until`,
    which is no event."""

    __slots__ = ("connected", "drain_by", "lease_until", "next_role", "since", "state")

    def __init__(self, since: float, lease_until: float) -> None:
        self.state = READY
        self.since = since  # when it entered this state
        self.lease_until = lease_until
        self.connected = True  # its session is open
        self.drain_by: float | None = None
        self.next_role: Role | None = None  # in which it joins again after its drain

    @property
    def ready(self) -> bool:
        return self.state is READY

    @property
    def lost(self) -> bool:
        return self.state is LOST

    def live(self, now: float) -> bool:
        """Returns whether its session is open and its lease has not ended."""
        return self.connected and self.lease_until > now

    def on(self, event: Event, now: float) -> None:
        handle(TABLE, self, event, now)

    def _redialled(self, event: Redialled, now: float) -> list[Any]:
        self.connected, self.lease_until = True, event.lease_until
        return []

    def _ready_again(self, event: Redialled, now: float) -> list[Any]:
        self.state, self.since = READY, now
        return self._redialled(event, now)

    def _broke(self, event: SessionBroke, now: float) -> list[Any]:
        self.connected, self.lease_until = False, min(self.lease_until, now + REDIAL_S)
        return []

    def _disconnected(self, event: SessionBroke, now: float) -> list[Any]:
        self.state, self.since = DISCONNECTED, now
        return self._broke(event, now)

    def _drain_again(self, event: DrainBegan, now: float) -> list[Any]:
        self.drain_by = event.by if self.drain_by is None else min(event.by, self.drain_by)
        self.next_role = event.next_role
        return []

    def _drain(self, event: DrainBegan, now: float) -> list[Any]:
        self.state, self.since = DRAINING, now
        return self._drain_again(event, now)

    def _lost(self, event: LeaseEnded | Replaced, now: float) -> list[Any]:
        self.state, self.since, self.connected = LOST, now, False
        return []

    def _left(self, event: Left, now: float) -> list[Any]:
        self.state, self.since, self.connected = LEFT, now, False
        return []


TABLE: Table = {
    (READY, Redialled): to(Member._redialled),  # before the end of its session was seen
    (READY, SessionBroke): to(Member._disconnected, DISCONNECTED),
    (READY, DrainBegan): to(Member._drain, DRAINING),
    (DISCONNECTED, Redialled): to(Member._ready_again, READY),
    (DISCONNECTED, DrainBegan): to(Member._drain, DRAINING),
    # A redial does not end a drain: the worker receives the command again.
    (DRAINING, Redialled): to(Member._redialled),
    (DRAINING, SessionBroke): to(Member._broke),
    (DRAINING, DrainBegan): to(Member._drain_again),
    **{(state, LeaseEnded): to(Member._lost, LOST) for state in (READY, DISCONNECTED, DRAINING)},
    **{(state, Replaced): to(Member._lost, LOST) for state in (READY, DISCONNECTED, DRAINING)},
    # A worker may leave without a drain that the coordinator knows.
    **{(state, Left): to(Member._left, LEFT) for state in (READY, DISCONNECTED, DRAINING)},
}
