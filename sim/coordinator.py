"""A simulated coordinator: the product's policy, and a thin model of what executes it.

Stands for coordinator/cluster.py (joins, leases, the execution of actions, handles) and coordinator/control.py (one
stream per worker). With sim/client.py this is the only file that knows how the policy is driven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.core.codes import ErrorCode
from baton.core.commands import (
    Assign,
    Drain,
    Drained,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Prefill,
    Role,
    Target,
    Welcome,
)
from baton.core.errors import InvalidRequest, InvariantError, JoinRefused, NotFound, Unavailable
from baton.core.events import StepEvents
from baton.core.liveness import MAX_LEASE_GAP_S, ListeningClock
from baton.core.request import ChoiceId, SequenceId
from coordinator.policy.choice import (
    Action,
    AssignTargets,
    Choice,
    KVParked,
    Notify,
    Rescheduled,
    Send,
    Stage,
    StartPrefill,
)
from coordinator.policy.handles import signed_targets
from coordinator.policy.losses import MAX_TOKENS
from coordinator.policy.pool import Worker as Member
from coordinator.policy.requests import TICK_S, Requests
from coordinator.policy.split import Split
from coordinator.policy.workers import WorkerTable
from sim.loop import Loop
from sim.network import End, Network, NetworkProcess
from sim.process import Clock
from sim.worker import COORDINATOR


@dataclass(frozen=True, slots=True)
class SimCoordinatorOptions:
    """As in CoordinatorConfig."""

    lease_s: float = 3.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    hold_s: float = 30.0
    max_deaths: int = 5
    split: Split = "always"
    retry_tokens: float = MAX_TOKENS
    """What its retry budget begins with."""


class SimCoordinator(NetworkProcess):
    """What coordinator/cluster.py does. `readers` are called when their choice has something to read."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        incarnation: int,
        clock: Clock,
        options: SimCoordinatorOptions,
        *,
        verify: bool = True,
    ) -> None:
        super().__init__(loop, COORDINATOR, incarnation, clock)
        self._verify = verify
        self.workers = WorkerTable(options.lease_s)
        self.requests = Requests(
            self.workers,
            options.max_queued_requests,
            options.max_queued_tokens,
            options.hold_s,
            options.max_deaths,
            options.split,
        )
        self.requests.losses.budget.tokens = options.retry_tokens
        self.run_id = f"run-{incarnation}"
        self.readers: dict[ChoiceId, Callable[[], object]] = {}
        self.joins_refused = 0
        self._key = loop.random.randbytes(32)
        self._outgoing: dict[str, End] = {}
        self._lease_clock = ListeningClock(self.now, MAX_LEASE_GAP_S)
        self._idle = True
        network.listen(self)
        self.later(TICK_S, self._tick)

    @property
    def connected(self) -> int:
        """How many workers have an open session."""
        return len(self._outgoing)

    # Sessions with workers.

    def accept(self, end: End, first: Any) -> None:
        if not isinstance(first, Join):
            raise InvariantError(f"the coordinator was dialled with {first!r}")
        try:
            self._join(first, end)
        except (JoinRefused, Unavailable) as e:
            self.joins_refused += 1
            end.send(e)
            end.close("refused")

    def _join(self, join: Join, end: End) -> None:
        worker = join.worker_id
        if self.requests.draining and self.workers.incarnation(worker) != join.incarnation:
            raise Unavailable(f"{worker} cannot join: the cluster is draining", code=ErrorCode.DRAINING)
        joined = self.workers.join(join, self.lease_now())
        tracked = () if joined.replaced else self.requests.tracked(worker)
        lease_s, now_ms = self.workers.lease_s, round(self.now * 1000)
        end.send(Welcome(self.run_id, lease_s, lease_s / 4, self._key, tracked, now_ms))
        if joined.worker.drain_by is not None:
            end.send(Drain(max(joined.worker.drain_by - self.now, 0.0), joined.worker.next_role))
        self._outgoing[worker] = end
        end.on_message = lambda message: self._on_message(worker, join.incarnation, end, message)
        end.on_end = lambda reason: self._session_ended(worker, join.incarnation, end)
        if joined.replaced is not None:
            self._lost(joined.replaced, "it was replaced by a new incarnation")
        self.execute(self.requests.worker_joined(self.now))

    def _on_message(self, worker: str, incarnation: int, end: End, message: Any) -> None:
        if self._outgoing.get(worker) is not end or not self._handle(worker, incarnation, message):
            end.close("closed by the coordinator")
            self._session_ended(worker, incarnation, end)

    def _handle(self, worker: str, incarnation: int, message: Any) -> bool:
        load = message.load if isinstance(message, Heartbeat | StepEvents) else None
        if not self.workers.renew_lease(worker, incarnation, load, self.lease_now()):
            self.loop.note(worker, "is fenced")
            return False
        match message:
            case StepEvents():
                stale = self._stale(message)
                actions = self.requests.on_events(worker, message, self.now)
                for choice, before in stale:
                    if before != (choice.attempt, choice.stage, choice.next_index):
                        raise InvariantError(f"an event of an earlier attempt changed {choice!r}")
                self.execute(actions)
            case Heartbeat(number):
                self._send(worker, HeartbeatAck(number))
            case Leave(timeout_s):
                self.workers.drain(worker, self.now + timeout_s, self.lease_now())
            case Drained():
                self.workers.left(worker, incarnation, self.lease_now())
                self._outgoing.pop(worker, None)
                self.execute(self.requests.on_worker_lost(worker, "it drained", self.now, drained=True))
                return False
            case _:
                raise InvariantError(f"{worker} sent {message!r}")
        return True

    def _stale(self, events: StepEvents) -> list[tuple[Choice, tuple[int, Stage, int]]]:
        """Returns the choices of which there are only events of earlier attempts, with what these must not change. A
        model that computes the same tokens in each attempt does not show it."""
        if not self._verify:
            return []  # only the times matter
        current: dict[ChoiceId, bool] = {}
        sequences = [event.sequence for event in events.tokens]
        sequences += [event.sequence for event in events.ended]
        sequences += [event.sequence for event in events.parked]
        sequences += [event.sequence for event in events.handed_over]
        for sequence in sequences:
            name = sequence.choice_id
            choice = self.requests.get(name)
            if choice is not None and choice.stage is not Stage.QUEUED:
                current[name] = current.get(name, False) or choice.attempt == sequence.attempt
        if all(current.values()):
            return []
        stale = (self.requests.get(name) for name, is_current in current.items() if not is_current)
        choices = [choice for choice in stale if choice is not None]
        return [(choice, (choice.attempt, choice.stage, choice.next_index)) for choice in choices]

    def _session_ended(self, worker: str, incarnation: int, end: End) -> None:
        if self._outgoing.get(worker) is end:
            del self._outgoing[worker]
            self.workers.disconnected(worker, incarnation, self.lease_now())

    def _send(self, worker: str, message: object) -> None:
        end = self._outgoing.get(worker)
        if end is not None:
            end.send(message)

    # Time.

    def lease_now(self) -> float:
        return self._lease_clock.at(self.now)

    def _tick(self) -> None:
        self.later(TICK_S, self._tick)
        for member, why in self.workers.expire(self._lease_clock.advance(self.now)):
            self._outgoing.pop(member.worker_id, None)
            self._lost(member, why)
        self.execute(self.requests.tick(self.now))
        if not self._idle and not len(self.requests):
            self.requests.check()
        self._idle = not len(self.requests)

    def drain_worker(self, worker: str, timeout_s: float, next_role: Role | None = None) -> bool:
        """Drains a worker at an operator's request, so that it ends or joins again in `next_role`; returns False if it
        is not present or cannot take that role."""
        try:
            self.workers.drain(worker, self.now + timeout_s, self.lease_now(), next_role)
        except (NotFound, InvalidRequest):
            return False
        self._send(worker, Drain(timeout_s, next_role))
        return True

    def _lost(self, member: Member, why: str) -> None:
        self.loop.note("lost", member.worker_id, member.incarnation, why)
        self.execute(self.requests.on_worker_lost(member.worker_id, why, self.now, drained=False))

    # Actions.

    def execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Notify(name):
                    if (read := self.readers.get(name)) is not None:
                        read()
                case Send(worker, command):
                    self._send(worker, command)
                case StartPrefill(prefill, request, targets, deadline_at):
                    signed = self._sign(request.sequence_id, prefill, targets, deadline_at)
                    self._send(prefill, Prefill(request, signed))
                case AssignTargets(prefill, sequence, targets, attempt, deadline_at):
                    signed = self._sign(sequence._replace(attempt=attempt), prefill, targets, deadline_at)
                    self._send(prefill, Assign(sequence, signed, attempt))
                case Rescheduled() | KVParked():
                    self.loop.note("log", action)

    def _sign(
        self, sequence: SequenceId, prefill: str, targets: Iterable[str], deadline_at: float
    ) -> tuple[Target, ...]:
        placed = sequence, prefill, targets, deadline_at
        return signed_targets(self.workers, self._key, *placed, self.loop.random.randbytes)
