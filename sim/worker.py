"""A simulated worker process: session with the coordinator, step loop, deadlines, drain, around a tier.

Stands for baton/runtime/session.py (dial, redial, watch of the coordinator's silence, resending), worker_loop.py
(steps, housekeeping, drain) and step_thread.py (one thread that computes steps in order, two in flight with
`plan_ahead`). The objects inside are the product's: OutputLog, reconcile, Deadlines, Tombstones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import (
    Abort,
    Command,
    Drain,
    Drained,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    ReleaseRecords,
    Role,
    Welcome,
)
from baton.core.deadlines import Deadlines, Tombstones
from baton.core.errors import BatonError, InvariantError, JoinRefused
from baton.core.events import Load, SequenceEnded, StepEvents
from baton.core.liveness import KEEP_SEQUENCES_S, LEASE_CHECK_S, MAX_LEASE_GAP_S, ListeningClock
from baton.core.output_log import OutputLog, reconcile
from baton.core.prefix_cache import KeptBlocks
from baton.core.request import GenerateRequest, SequenceId
from baton.core.sampling_limits import check_sampling, check_tokens
from baton.core.step import StepOutcome, StepPlan
from sim.costs import Costs
from sim.engine import SimEngine
from sim.loop import Loop
from sim.network import End, Network, NetworkProcess
from sim.process import Clock

COORDINATOR = "coordinator"
DRAINED = "drained"  # why a worker exits that has drained
HOUSEKEEPING_S, SWEEP_S, DRAINED_ACK_S, DRAIN_CHECK_S, DIAL_S = 0.1, 30.0, 2.0, 0.05, 5.0


@dataclass(slots=True)
class ChunkFaults:
    """Probabilities per chunk and edge: damaged bytes, an edge that fails, no staging memory at the receiver."""

    damaged: float = 0.0
    edge_failed: float = 0.0
    no_staging: float = 0.0


@dataclass(slots=True)
class Timeouts:
    """Limits as in WorkerConfig; `watched`: peers check each other's silence (`baton.core.liveness`). Without faults
    nothing is ever silent, and the checks of a thousand workers cost most of the run."""

    edge_s: float = 5.0
    connect_s: float = 10.0
    watched: bool = True


class World(Protocol):
    """What a worker needs of the simulation around it."""

    loop: Loop
    network: Network
    costs: Costs
    timeouts: Timeouts
    chunk_faults: ChunkFaults
    poison: set[str]

    def worker_exited(self, worker: SimWorker, why: str) -> None:
        """The worker's process has ended by itself; a supervisor may start another."""
        ...

    def poisoned(self, worker: SimWorker) -> None:
        """A step runs that will kill the worker."""
        ...


class SimScheduler(Protocol):
    @property
    def kept(self) -> KeptBlocks: ...

    def sequence_ids(self) -> tuple[SequenceId, ...]: ...

    def runs_alone(self, plan: StepPlan) -> SequenceId | None: ...

    def check_idle(self) -> None: ...

    def check(self) -> None: ...


class SimTier(Protocol):
    """As in baton/runtime/worker_loop.py."""

    role: Role
    engine: SimEngine

    @property
    def scheduler(self) -> SimScheduler: ...

    def join(self, run_id: str) -> Join: ...

    def load(self) -> Load: ...

    def begin_step(self, now: float) -> StepPlan | None: ...

    def step_began(self, plan: StepPlan, step_s: float) -> None:
        """The thread begins to compute a step, which takes `step_s` seconds."""
        ...

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents: ...

    def command(self, command: Command) -> None: ...

    def end(self, sequence: SequenceId, reason: str) -> bool: ...

    def receiving(self, sequence: SequenceId) -> bool: ...

    def accept(self, end: End, first: Any) -> None: ...

    def check_settled(self) -> None:
        """Raises InvariantError if anything of a sequence is left."""
        ...


class SimWorker(NetworkProcess):
    """What WorkerLoop, WorkerSession and StepThread do; a tier has the rest."""

    def __init__(self, world: World, name: str, incarnation: int, clock: Clock, *, plan_ahead: bool = False) -> None:
        super().__init__(world.loop, name, incarnation, clock)
        self.world = world
        self.deadlines, self.tombstones = Deadlines(), Tombstones()
        self.refused_until: dict[SequenceId, float] = {}
        """What the tombstones have to contain: nothing of these sequences may be accepted before."""
        self.handle_key = b""
        self.draining = False
        self.next_role: Role | None = None
        self.steps = 0
        self.tier: SimTier
        self._run_clock_ahead_ms = 0.0
        self._drain_until = math.inf
        # The session.
        self.connected = False
        self.run_id = ""
        self.log = OutputLog()
        self._end: End | None = None
        self._lease_s, self._heartbeat_s = 3.0, 0.75
        self._listening = ListeningClock(self.now, MAX_LEASE_GAP_S)
        self._last_received_at = self.now
        self._redial_s, self._dialled_at = 0.1, self.now
        self._silence_ended = self._silence_abandoned = -1.0
        self._leaves_by: float | None = None
        self.drained = False
        self._ends = False  # drained without a next role
        # The step thread.
        self._depth = 2 if plan_ahead else 1
        self._out: deque[StepPlan] = deque()
        self._waking = self._keeping_house = False
        self._sweep_at = self.now + SWEEP_S

    def start(self, tier: SimTier) -> None:
        self.tier = tier
        self.world.network.listen(self)
        self._dial()
        if self.world.timeouts.watched:
            self.later(LEASE_CHECK_S, self._watch_lease)

    def accept(self, end: End, first: Any) -> None:
        self.tier.accept(end, first)

    # For the tier.

    def run_clock_ms(self) -> float:
        return self.now * 1000 + self._run_clock_ahead_ms

    def refuses(self, request: GenerateRequest, vocab_size: int) -> bool:
        """Whether a request of the coordinator cannot start here, which is reported unless it was aborted meanwhile."""
        sequence = request.sequence_id
        if self.tombstones.covers(sequence, self.now):
            return True
        if self.draining:
            self.report_ended(sequence, ErrorCode.DRAINING, f"{self.name} is draining")
            return True
        try:
            check_tokens(request, vocab_size)
            check_sampling(request.sampling, request.max_tokens, vocab_size)
        except BatonError as e:
            self.report_ended(sequence, e.tier_code, e.message)
            return True
        return False

    def track_deadline(self, request: GenerateRequest) -> None:
        self.deadlines.add(request.sequence_id, self.now + request.deadline_s)
        self._keep_house()

    def report_ended(self, sequence: SequenceId, code: ErrorCode, message: str) -> None:
        self.deadlines.forget(sequence)
        self.post(StepEvents(ended=(SequenceEnded(sequence, "error", code, message),)))

    def post(self, events: StepEvents) -> None:
        self.log.record(events)
        if self.connected and self._end is not None:
            self._end.send(events)

    def wake(self) -> None:
        """A step may be possible now."""
        if not self._waking and not self._out:
            self._waking = True
            self.soon(self._begin_steps)
        self._keep_house()

    # Steps.

    def _begin_steps(self) -> None:
        self._waking = False
        while len(self._out) < self._depth:
            plan = self.tier.begin_step(self.now)
            if plan is None:
                return
            if (alone := self.tier.scheduler.runs_alone(plan)) is not None:
                self.post(StepEvents(alone=alone))
            self._out.append(plan)
            if len(self._out) == 1:
                self._compute(plan)

    def _compute(self, plan: StepPlan) -> None:
        world = self.world
        took_s = world.costs.step_s(self.name, self.tier.role, plan)
        self.later(took_s, self._computed, plan, took_s)
        self.tier.step_began(plan, took_s)
        if world.poison and not world.poison.isdisjoint(row.sequence_id.request_id for row in plan.rows):
            world.poisoned(self)

    def _computed(self, plan: StepPlan, took_s: float) -> None:
        outcome = self.tier.engine.step(plan)
        if took_s:
            outcome = replace(outcome, elapsed_s=took_s, draft_s=took_s / 8 if plan.drafts else 0.0)
        self._out.popleft()
        if self._out:
            self._compute(self._out[0])
        self.steps += 1
        events = self.tier.finish_step(outcome, self.now)
        for ended in events.ended:
            self.deadlines.forget(ended.sequence)
        self.post(events)
        self._begin_steps()

    def _keep_house(self) -> None:
        if not self._keeping_house:
            self._keeping_house = True
            self.later(HOUSEKEEPING_S, self._housekeeping)

    def _housekeeping(self) -> None:
        """Runs every 0.1 s while there are sequences; the product's never stops."""
        now, self._keeping_house = self.now, False
        for sequence in self.deadlines.expire(now):
            if self.tier.end(sequence, "deadline"):
                self.report_ended(sequence, ErrorCode.DEADLINE_EXCEEDED, f"deadline passed at {self.name}")
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self.tombstones.expire(now)
        if self.tier.scheduler.sequence_ids():
            self.wake()
        else:
            self.tier.scheduler.check_idle()
            if len(self.deadlines):
                self._keep_house()

    # Commands.

    def _command(self, command: Command) -> None:
        match command:
            case Abort(sequence, reason, tombstone_s):
                self.deadlines.forget(sequence)
                if not self.tier.end(sequence, reason) and tombstone_s > 0:
                    self.tombstones.add(sequence, self.now, tombstone_s)
                    self.refused_until[sequence] = self.now + tombstone_s
            case Drain(timeout_s, next_role):
                self.next_role = None if self._ends else next_role
                self._begin_drain(timeout_s)
            case _:
                self.tier.command(command)
        self.wake()

    def leave(self, timeout_s: float) -> None:
        """As SIGTERM: the worker drains and exits."""
        self.next_role, self._leaves_by = None, self.now + timeout_s
        if self._end is not None:
            self._end.send(Leave(timeout_s))
        self._begin_drain(timeout_s)

    def _begin_drain(self, timeout_s: float) -> None:
        self._drain_until = min(self._drain_until, self.now + timeout_s)
        if not self.draining:
            self.draining = True
            self._drain_step()

    def _drain_step(self) -> None:
        if self.tier.scheduler.sequence_ids() and self.now < self._drain_until:
            self.later(DRAIN_CHECK_S, self._drain_step)
            return
        self._abandon("the drain timeout has passed", frozenset(), ErrorCode.DRAINING)
        self._idle_step()

    def _idle_step(self) -> None:
        if self.next_role is not None and self.tier.load().sequences:
            self.later(DRAIN_CHECK_S, self._idle_step)
            return
        self.drained, self._ends = True, self.next_role is None
        if self.connected and self._end is not None:
            self._end.send(Drained())
        self.later(DRAINED_ACK_S, self._exit, DRAINED)

    def _exit(self, why: str) -> None:
        for end in list(self.ends):
            end.close(f"{self} exits")
        self.world.worker_exited(self, why)

    def _abandon(self, reason: str, keep: Collection[SequenceId], code: ErrorCode = ErrorCode.ABANDONED) -> None:
        for sequence in self.tier.scheduler.sequence_ids():
            if sequence not in keep:
                lost = self.tier.receiving(sequence)
                self.tier.end(sequence, reason)
                self.report_ended(sequence, ErrorCode.WORKER_LOST if lost else code, f"ended by the worker: {reason}")
        self.wake()

    # The session.

    def _dial(self) -> None:
        known = frozenset({*self.tier.scheduler.sequence_ids(), *self.log.sequences()})
        self._dialled_at = self.now
        self.world.network.dial(
            self,
            COORDINATOR,
            self.tier.join(self.run_id),
            DIAL_S,
            lambda end, reply: self._welcomed(end, reply, known),
            lambda reason: self._redial(),
        )

    def _welcomed(self, end: End, welcome: Any, known: Collection[SequenceId]) -> None:
        if isinstance(welcome, BatonError):
            end.close("refused")
            if isinstance(welcome, JoinRefused):
                self._exit(DRAINED if self.drained else f"join refused: {welcome.message}")
            else:
                self._redial()
            return
        if not isinstance(welcome, Welcome):
            raise InvariantError(f"{self}: the reply to a join is {welcome!r}")
        self._end, end.on_message, end.on_end = end, self._receive, self._session_ended
        self._last_received_at = self._listening.at(self.now)
        self._lease_s, self._heartbeat_s = welcome.lease_s, welcome.heartbeat_s
        if self.run_id and self.run_id != welcome.run_id:
            self._abandon("a different coordinator run replied", frozenset())
            self.log.clear()
        self.run_id = welcome.run_id
        reconciled = reconcile(welcome.tracked, known, self.tier.scheduler.sequence_ids(), self.log)
        if welcome.handle_key != self.handle_key:
            self.tombstones.clear()
            self.refused_until.clear()
        self.handle_key = welcome.handle_key
        self._run_clock_ahead_ms = welcome.now_ms - self.now * 1000
        self._abandon("the coordinator no longer tracks them", reconciled.keep)
        self.connected = True
        if self._leaves_by is not None:
            end.send(Leave(max(self._leaves_by - self.now, 0.0)))
        end.send(reconciled.resend)
        if reconciled.unknown:
            end.send(StepEvents(ended=reconciled.unknown))
        if self.drained:
            end.send(Drained())
        self._beat(end, 1)

    def _beat(self, end: End, number: int) -> None:
        if end is self._end and end.send(Heartbeat(number, self.tier.load())):
            self.later(self._heartbeat_s * (0.5 + 0.5 * self.loop.random.random()), self._beat, end, number + 1)

    def _receive(self, message: Any) -> None:
        self._last_received_at = self._listening.at(self.now)
        if isinstance(message, HeartbeatAck):
            return
        if isinstance(message, ReleaseRecords):
            self.log.release(message.sequences)
        else:
            self._command(message)

    def _session_ended(self, reason: str) -> None:
        self.connected, self._end = False, None
        if self.drained:
            self._exit(DRAINED)
        else:
            self._redial()

    def _redial(self) -> None:
        if self.now - self._dialled_at > 2.0:
            self._redial_s = 0.1
        self.later(self._redial_s * (0.5 + 0.5 * self.loop.random.random()), self._dial)
        self._redial_s = min(self._redial_s * 2, 1.0)

    def _watch_lease(self) -> None:
        self.later(LEASE_CHECK_S, self._watch_lease)
        since = self._last_received_at
        silent_s = self._listening.advance(self.now) - since
        if silent_s <= self._lease_s:
            return
        if self._silence_ended != since:
            self._silence_ended = since
            if self._end is not None:
                self._end.close("the coordinator was silent")
                self._session_ended("the coordinator was silent")
        if silent_s > max(KEEP_SEQUENCES_S, self._lease_s) and self._silence_abandoned != since:
            self._silence_abandoned = since
            self._abandon(f"the coordinator was silent for {silent_s:.0f} s", frozenset())
