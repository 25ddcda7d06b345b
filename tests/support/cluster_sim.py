"""A whole cluster in virtual time: the policies of all three tiers, without sockets, threads, clocks or torch.

The coordinator's requests and worker table, and each worker's scheduler, are the real ones. Played are the engine (the
token at an output index follows from the request, the index and the token before), the links (a hand-over takes a
while, and now and then loses its last acknowledgement), and the network (messages arrive in order, a moment later).
Workers are killed without warning and come back as a new incarnation.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from baton.core.commands import Abort, Command, Target
from baton.core.errors import BatonError, InvariantError, Unavailable
from baton.core.events import HandedOver, Load, Parked, SequenceEnded, StepEvents, TokenEvent
from baton.core.request import GenerateRequest, SequenceId, finish_reason
from baton.core.step import Row, StepOutcome, StepPlan
from coordinator.policy.requests import Action, AssignTargets, Request, Requests, Send, StartPrefill
from coordinator.policy.workers import WorkerTable
from decode.scheduler import DecodeScheduler
from prefill.scheduler import PrefillScheduler
from tests.support.builders import make_decode, make_join, make_prefill

LEASE_S, TICK_S, HEARTBEAT_S = 3.0, 0.1, 0.75
NETWORK_S, OFFER_S, TRANSFER_S, STEP_S = 0.012, 0.002, 0.02, 0.01
VOCABULARY = 40
BLOCKS = 64


def next_token(request_id: str, choice: int, index: int, before: int) -> int:
    """What the model says: EOS (0) now and then."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}/{before}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def undisturbed(request: GenerateRequest) -> list[int]:
    """The output of a request in a cluster where nobody dies."""
    tokens: list[int] = []
    before = request.prompt[-1]
    while True:
        before = next_token(request.request_id, request.choice, len(tokens), before)
        tokens.append(before)
        if finish_reason(request, len(tokens), before) is not None:
            return tokens


def _sampled(row: Row) -> tuple[int, ...]:
    inputs = row.tokens[len(row.tokens) - row.num_sampled :] if row.num_sampled else ()
    name = row.sequence_id
    return tuple(
        next_token(name.request_id, name.choice, row.output_index + i, before) for i, before in enumerate(inputs)
    )


@dataclass
class Transfer:
    """A hand-over as its prefill worker sees it: under which attempt, to whom, and the token that goes with it."""

    origin: SequenceId
    request: GenerateRequest
    targets: list[Target]
    first_token: int = -1
    taker: Worker | None = None


@dataclass
class Worker:
    name: str
    incarnation: int
    alive: bool = True
    busy: bool = False
    prefill: PrefillScheduler | None = None
    decode: DecodeScheduler | None = None
    transfers: dict[SequenceId, Transfer] = field(default_factory=dict)
    tombstones: set[SequenceId] = field(default_factory=set)

    def sequences(self) -> tuple[SequenceId, ...]:
        scheduler = self.prefill or self.decode
        assert scheduler is not None
        return scheduler.sequence_ids()

    def check(self) -> None:
        scheduler = self.prefill or self.decode
        assert scheduler is not None
        scheduler.check()


class ClusterSim:
    """Complete state: the clock, the events to come, the policies, the workers, the requests that clients sent."""

    def __init__(self, *names: str, seed: int = 1, kill_every: int = 0, lost_acks: float = 0.0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.table = WorkerTable(LEASE_S)
        self.requests = Requests(self.table, 1 << 20, 1 << 30, hold_s=60.0)
        self.workers: dict[str, Worker] = {}
        self.sent: list[Request] = []
        self.steps = self.kills = self.lost_acks = self.transfers = 0
        self._kill_every, self._lost_acks = kill_every, lost_acks
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        for name in names:
            self._start(name)
        self._later(TICK_S, self._tick)

    def submit(self, request: GenerateRequest, at: float) -> None:
        """A client sends a request, again while there is nobody to take it."""

        def send() -> None:
            try:
                r, actions = self.requests.admit(request, self.now)
            except Unavailable:
                self._later(0.5, send)
                return
            self.sent.append(r)
            self._execute(actions)

        self._later(at - self.now, send)

    def run(self, expected: int, limit_s: float = 10_000.0) -> None:
        """Until so many requests have ended and nothing of them is left anywhere."""
        while len(self.sent) < expected or not all(r.ended for r in self.sent):
            self._next(limit_s)
        self._kill_every = 0
        settled = self.now + 2 * LEASE_S
        while self.now < settled:
            self._next(limit_s + 2 * LEASE_S)
        self.check()
        for worker in self.workers.values():
            scheduler = worker.prefill or worker.decode
            assert scheduler is not None
            assert not worker.sequences(), (worker.name, worker.sequences())
            assert scheduler.blocks.num_free == BLOCKS, worker.name

    def check(self) -> None:
        self.requests.check()
        for worker in self.workers.values():
            if worker.alive:
                worker.check()

    def _next(self, limit_s: float) -> None:
        at, _, act = heapq.heappop(self._heap)
        assert at < limit_s, f"no end: {self.requests!r}"
        self.now = at
        act()

    def _later(self, after_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(after_s, 0.0), self._number, act))

    # Workers come and go.

    def _start(self, name: str) -> None:
        incarnation = self.workers[name].incarnation + 1 if name in self.workers else 1
        worker = self.workers[name] = Worker(name, incarnation)
        if name[0] == "p":
            worker.prefill = make_prefill(BLOCKS)
        else:
            worker.decode = make_decode(BLOCKS)
        joined = self.table.join(make_join(name, incarnation, blocks=BLOCKS), self.now)
        if joined.replaced is not None:
            self._execute(self.requests.worker_gone(name, "it was replaced", self.now, drained=False))
        self._execute(self.requests.worker_joined(self.now))
        self._heartbeat(worker)

    def _heartbeat(self, worker: Worker) -> None:
        if worker.alive:
            self.table.renew_lease(worker.name, worker.incarnation, self._load(worker), self.now)
            self._later(HEARTBEAT_S, lambda: self._heartbeat(worker))

    def _load(self, worker: Worker) -> Load:
        scheduler = worker.prefill or worker.decode
        assert scheduler is not None
        preempted = worker.decode.num_preempted if worker.decode is not None else 0
        return Load(blocks_total=BLOCKS, blocks_free=scheduler.blocks.num_free, preempted=preempted)

    def kill(self, name: str) -> None:
        """As kill -9: the coordinator sees the broken session, the peers their broken links."""
        worker = self.workers[name]
        if not worker.alive:
            return
        worker.alive = False
        self.kills += 1
        self.table.disconnected(name, worker.incarnation, self.now)
        for other in self.workers.values():
            for transfer in list(other.transfers.values()):
                if transfer.taker is worker:
                    self._later(NETWORK_S, lambda o=other, t=transfer: self._park(o, t, f"{name} broke"))
        for transfer in worker.transfers.values():
            sequence, taker = transfer.request.sequence_id, transfer.taker
            if taker is not None and taker.alive and taker.decode is not None and taker.decode.receiving(sequence):
                taker.decode.abort(sequence)
        # Back before the lease has ended, or after.
        self._later(self.random.choice((1.0, 2.0, 4.0)), lambda: self._start(name))

    def _tick(self) -> None:
        for worker in self.table.expire(self.now):
            self._execute(self.requests.worker_gone(worker.worker_id, "silent", self.now, drained=False))
        self._execute(self.requests.tick(self.now))
        self._later(TICK_S, self._tick)

    # Messages.

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._command(action.worker, action.command)
            elif isinstance(action, StartPrefill):
                self._to(action.prefill, lambda w, a=action: self._prefill(w, a.request, self._targets(a.targets)))
            elif isinstance(action, AssignTargets):
                self._to(action.prefill, lambda w, a=action: self._assign(w, a, self._targets(a.targets)))

    def _targets(self, names: tuple[str, ...]) -> list[Target]:
        found = (self.table.get(name) for name in names)
        return [Target(w.worker_id, w.incarnation, "", None) for w in found if w is not None]  # type: ignore[arg-type]

    def _to(self, name: str, act: Callable[[Worker], None]) -> None:
        worker = self.workers[name]

        def arrive() -> None:
            if worker.alive:
                act(worker)
                self._wake(worker)

        if worker.alive:
            self._later(NETWORK_S, arrive)

    def _command(self, name: str, command: Command) -> None:
        if isinstance(command, Abort):
            self._to(name, lambda w: self._abort(w, command.sequence))

    def _post(self, worker: Worker, events: StepEvents) -> None:
        """To the coordinator; a dead worker's last messages may still arrive."""

        def arrive() -> None:
            if self.table.renew_lease(worker.name, worker.incarnation, events.load, self.now):
                self._execute(self.requests.on_events(worker.name, events, self.now))

        self._later(NETWORK_S, arrive)

    # What workers do.

    def _abort(self, worker: Worker, sequence: SequenceId) -> None:
        if worker.prefill is not None:
            found = next((t for t in worker.transfers.values() if t.request.sequence_id == sequence), None)
            origin = sequence if found is None else found.origin
            worker.prefill.abort(origin)
            self._drop(worker, origin)
        elif worker.decode is not None and not worker.decode.abort(sequence):
            worker.tombstones.add(sequence)

    def _drop(self, worker: Worker, origin: SequenceId) -> None:
        assert worker.prefill is not None
        transfer = worker.transfers.pop(origin, None)
        if transfer is not None:
            if (taker := transfer.taker) is not None and taker.alive and taker.decode is not None:
                taker.decode.abort(transfer.request.sequence_id)
            worker.prefill.release_send(origin)

    def _prefill(self, worker: Worker, request: GenerateRequest, targets: list[Target]) -> None:
        assert worker.prefill is not None
        worker.prefill.submit(request, self.now, hand_over=bool(targets))
        if targets:
            worker.transfers[request.sequence_id] = Transfer(request.sequence_id, request, targets)

    def _assign(self, worker: Worker, action: AssignTargets, targets: list[Target]) -> None:
        found = next((t for t in worker.transfers.values() if t.request.sequence_id == action.sequence), None)
        if found is None:
            lost = action.sequence._replace(attempt=action.attempt)
            self._post(worker, StepEvents(ended=(SequenceEnded(lost, "error", "handoff_failed", "not here"),)))
            return
        found.request, found.targets = replace(found.request, attempt=action.attempt), targets
        self._offer(worker, found)

    def _wake(self, worker: Worker) -> None:
        if worker.busy or not worker.alive:
            return
        scheduler = worker.prefill or worker.decode
        assert scheduler is not None
        plan = scheduler.begin_step(self.now)
        if plan is not None:
            worker.busy = True
            self._later(STEP_S, lambda: self._stepped(worker, plan))

    def _stepped(self, worker: Worker, plan: StepPlan) -> None:
        if not worker.alive:
            return
        worker.busy = False
        outcome = StepOutcome(plan.step_id, tuple(_sampled(row) for row in plan.rows), STEP_S)
        if worker.prefill is not None:
            self._prefilled(worker, worker.prefill, outcome)
        elif worker.decode is not None:
            result = worker.decode.finish_step(outcome, self.now)
            self._post(worker, StepEvents(plan.step_id, result.tokens, result.ended, load=self._load(worker)))
        self._wake(worker)
        self.steps += 1
        if self._kill_every and self.steps % self._kill_every == 0:
            self.check()
            self.kill(self.random.choice(sorted(self.workers)))

    def _prefilled(self, worker: Worker, scheduler: PrefillScheduler, outcome: StepOutcome) -> None:
        result = scheduler.finish_step(outcome, self.now)
        tokens = []
        for p in result.progress:
            if p.first_token is not None:
                name = (
                    worker.transfers[p.sequence_id].request.sequence_id if p.sequence_id in worker.transfers else None
                )
                tokens.append(TokenEvent(name or p.sequence_id, p.output_index, (p.first_token,)))
        self._post(worker, StepEvents(tokens=tuple(tokens), ended=result.ended))
        for ended in result.ended:
            self._drop(worker, ended.sequence)
        for p in result.progress:
            transfer = worker.transfers.get(p.sequence_id)
            if p.first_token is not None and transfer is not None:
                transfer.first_token = p.first_token
                self._offer(worker, transfer)

    # Hand-overs.

    def _offer(self, worker: Worker, transfer: Transfer) -> None:
        self._later(OFFER_S, lambda: self._answer(worker, transfer))

    def _answer(self, worker: Worker, transfer: Transfer) -> None:
        """The targets accept or refuse, one after the other."""
        if not worker.alive or worker.transfers.get(transfer.origin) is not transfer:
            return
        sequence = transfer.request.sequence_id
        for target in transfer.targets:
            taker = self.workers[target.worker_id]
            if not taker.alive or taker.incarnation != target.incarnation or sequence in taker.tombstones:
                continue
            assert taker.decode is not None
            try:
                taker.decode.reserve(transfer.request, self.now)
            except BatonError as e:
                if isinstance(e, InvariantError):
                    raise
                continue
            transfer.taker = taker
            self._later(TRANSFER_S, lambda: self._arrived(worker, transfer, sequence))
            return
        self._park(worker, transfer, "all refused")

    def _arrived(self, worker: Worker, transfer: Transfer, sequence: SequenceId) -> None:
        taker = transfer.taker
        if taker is None or not taker.alive or transfer.request.sequence_id != sequence:
            return
        assert taker.decode is not None
        if not worker.alive or not taker.decode.receiving(sequence):
            return
        ended = taker.decode.received(sequence, transfer.first_token, self.now)
        if ended is not None:
            self._post(taker, StepEvents(ended=(ended,)))
        self._wake(taker)
        self.transfers += 1
        if self.random.random() < self._lost_acks:
            self.lost_acks += 1
            self._park(worker, transfer, "the link broke")
            return
        self._later(NETWORK_S, lambda: self._acknowledged(worker, transfer, taker, sequence))

    def _acknowledged(self, worker: Worker, transfer: Transfer, taker: Worker, sequence: SequenceId) -> None:
        if not worker.alive or worker.transfers.get(transfer.origin) is not transfer or transfer.taker is not taker:
            return
        assert worker.prefill is not None
        del worker.transfers[transfer.origin]
        worker.prefill.release_send(transfer.origin)
        self._post(worker, StepEvents(handed_over=(HandedOver(sequence, taker.name, 1),)))

    def _park(self, worker: Worker, transfer: Transfer, reason: str) -> None:
        if worker.alive and worker.transfers.get(transfer.origin) is transfer:
            transfer.taker = None
            self._post(worker, StepEvents(parked=(Parked(transfer.request.sequence_id, reason),)))
