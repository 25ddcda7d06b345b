"""A whole cluster in virtual time: the policies of all three tiers, without sockets, threads, clocks or torch.

The coordinator's requests and worker table, each worker's scheduler and both sides of every hand-over
(`tests.support.link_sim`) are the real ones. The engine is simulated (the token at an output index is a function of the
request, the index and the token before), and so is the network (messages arrive in order, after a short delay). Workers
are killed without warning and restart as a new incarnation.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.core.codes import ErrorCode
from baton.core.commands import Abort, Command, Target
from baton.core.errors import BatonError, Unavailable
from baton.core.events import HandedOver, Load, SequenceEnded, StepEvents, TokenEvent
from baton.core.handles import Handle, sign
from baton.core.request import GenerateRequest, SequenceId, finish_reason
from baton.core.step import Row, StepOutcome, StepPlan
from coordinator.policy.actions import Action, AssignTargets, Send, StartPrefill
from coordinator.policy.choice import Choice
from coordinator.policy.requests import Requests
from coordinator.policy.workers import WorkerTable
from decode.scheduler import DecodeScheduler
from prefill.handover import FirstLayers
from prefill.scheduler import PrefillScheduler
from tests.support.builders import make_decode, make_join, make_prefill
from tests.support.link_sim import KEY, LAYOUT, Faults, Receiver, Sender

LEASE_S, TICK_S, HEARTBEAT_S = 3.0, 0.1, 0.75
NETWORK_S, STEP_S = 0.012, 0.01
VOCABULARY = 40
BLOCKS = 64


def next_token(request_id: str, choice: int, index: int, before: int) -> int:
    """The simulated model's next token: EOS (0) now and then."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}/{before}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def undisturbed(request: GenerateRequest) -> list[int]:
    """Returns the output of a request in a cluster where no worker is killed."""
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
class Worker:
    name: str
    incarnation: int
    alive: bool = True
    busy: bool = False
    prefill: PrefillScheduler | None = None
    decode: DecodeScheduler | None = None
    sender: Sender | None = None
    receiver: Receiver | None = None

    @property
    def scheduler(self) -> PrefillScheduler | DecodeScheduler:
        scheduler = self.prefill or self.decode
        assert scheduler is not None
        return scheduler


class ClusterSim:
    """Complete state: the clock, the pending events, the policies, the workers, the requests that clients sent."""

    def __init__(
        self, *names: str, seed: int = 1, kill_every: int = 0, lost_acks: float = 0.0, damaged: float = 0.0
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.table = WorkerTable(LEASE_S)
        self.requests = Requests(self.table, 1 << 20, 1 << 30, hold_s=60.0)
        self.workers: dict[str, Worker] = {}
        self.sent: list[Choice] = []
        self.steps = self.kills = self.lost_acks = self.transfers = 0
        self.chunks_early = self.chunks_resent = 0
        self.killers: set[str] = set()  # requests that end any worker in whose step they run
        self._kill_every, self._faults = kill_every, Faults(lost_acks, damaged)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        for name in names:
            self._start(name)
        self.later(TICK_S, self._tick)

    def submit(self, request: GenerateRequest, at: float) -> None:
        """Sends a client's request, retrying while no worker is available."""

        def send() -> None:
            try:
                r, actions = self.requests.admit(request, self.now)
            except Unavailable:
                self.later(0.5, send)
                return
            self.sent.append(r)
            self._execute(actions)

        self.later(at - self.now, send)

    def run(self, expected: int, limit_s: float = 10_000.0) -> None:
        """Runs until `expected` requests have ended, and checks that no state of them remains anywhere."""
        while len(self.sent) < expected or not all(r.ended for r in self.sent):
            for _ in range(50):
                self._next(limit_s)
        self._kill_every = 0
        settled = self.now + 2 * LEASE_S
        while self.now < settled:
            self._next(limit_s + 2 * LEASE_S)
        self.check()
        for worker in self.workers.values():
            scheduler = worker.scheduler
            assert not scheduler.sequence_ids(), (worker.name, scheduler.sequence_ids())
            assert scheduler.blocks.num_free == BLOCKS, worker.name
            assert worker.sender is None or not worker.sender.runs, worker.sender.runs
            assert worker.receiver is None or not worker.receiver.machine.writing, worker.name
            self._count(worker)

    def check(self) -> None:
        self.requests.check()
        for worker in self.workers.values():
            if worker.alive:
                worker.scheduler.check()

    def _count(self, worker: Worker) -> None:
        if worker.sender is not None:
            self.chunks_early += worker.sender.counters.chunks_early
            self.chunks_resent += worker.sender.counters.chunks_resent
        if worker.receiver is not None:
            self.lost_acks += worker.receiver.lost_acks

    def _next(self, limit_s: float) -> None:
        at, _, act = heapq.heappop(self._heap)
        assert at < limit_s, f"no end: {self.requests!r}"
        self.now = at
        act()

    def later(self, after_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(after_s, 0.0), self._number, act))

    # Workers start and are killed.

    def _start(self, name: str) -> None:
        incarnation = 1
        if name in self.workers:
            incarnation += self.workers[name].incarnation
            self._count(self.workers[name])
        worker = self.workers[name] = Worker(name, incarnation)
        if name[0] == "p":
            worker.prefill = make_prefill(BLOCKS)
            worker.sender = Sender(
                self,
                name,
                incarnation,
                parked=lambda event: self._post(worker, StepEvents(parked=(event,))),
                finished=lambda event: self._handed_over(worker, event),
                failed=lambda sequence, error: self._failed(worker, sequence, error),
                ended=worker.prefill.release_send,
            )
        else:
            worker.decode = make_decode(BLOCKS)
            worker.receiver = Receiver(
                self,
                worker.decode,
                name,
                incarnation,
                VOCABULARY,
                self._faults,
                ready=lambda: self._wake(worker),
                ended=lambda event: self._post(worker, StepEvents(ended=(event,))),
            )
        joined = self.table.join(make_join(name, incarnation, blocks=BLOCKS), self.now)
        if joined.replaced is not None:
            self._execute(self.requests.on_worker_lost(name, "it was replaced", self.now, drained=False))
        self._execute(self.requests.worker_joined(self.now))
        self._heartbeat(worker)

    def _heartbeat(self, worker: Worker) -> None:
        if worker.alive:
            self.table.renew_lease(worker.name, worker.incarnation, self._load(worker), self.now)
            self.later(HEARTBEAT_S, lambda: self._heartbeat(worker))

    def _load(self, worker: Worker) -> Load:
        preempted = worker.decode.num_preempted if worker.decode is not None else 0
        return Load(blocks_total=BLOCKS, blocks_free=worker.scheduler.blocks.num_free, preempted=preempted)

    def kill(self, name: str) -> None:
        """As kill -9: the coordinator detects the broken session, the peers detect their broken links."""
        worker = self.workers[name]
        if not worker.alive:
            return
        worker.alive = False
        self.kills += 1
        self.table.disconnected(name, worker.incarnation, self.now)
        for end in (worker.sender, worker.receiver):
            if end is not None:
                end.die()
        # The restart comes before the lease has ended, or after.
        self.later(self.random.choice((1.0, 2.0, 4.0)), lambda: self._start(name))

    def _tick(self) -> None:
        for worker, why in self.table.expire(self.now):
            self._execute(self.requests.on_worker_lost(worker.worker_id, why, self.now, drained=False))
        self._execute(self.requests.tick(self.now))
        self.later(TICK_S, self._tick)

    # Messages.

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._command(action.worker, action.command)
            elif isinstance(action, StartPrefill):
                targets = self._targets(action.request.sequence_id, action.prefill, action.targets)
                self._to(action.prefill, lambda w, a=action, t=targets: self._prefill(w, a.request, t))
            elif isinstance(action, AssignTargets):
                sequence = action.sequence._replace(attempt=action.attempt)
                targets = self._targets(sequence, action.prefill, action.targets)
                self._to(action.prefill, lambda w, a=action, t=targets: self._assign(w, a, t))

    def _targets(self, sequence: SequenceId, prefill: str, names: tuple[str, ...]) -> list[Target]:
        source = self.workers[prefill]
        targets = []
        for worker in (w for w in map(self.table.get, names) if w is not None):
            to, nonce = (worker.worker_id, worker.incarnation), self.random.randbytes(8)
            handle = Handle(sequence, source.name, source.incarnation, *to, round(self.now * 1000) + 10**9, nonce)
            targets.append(Target(*to, "", sign(KEY, handle)))
        return targets

    def receiver(self, target: Target) -> Receiver | None:
        worker = self.workers[target.worker_id]
        return worker.receiver if worker.alive and worker.incarnation == target.incarnation else None

    def _to(self, name: str, act: Callable[[Worker], None]) -> None:
        worker = self.workers[name]

        def arrive() -> None:
            if worker.alive:
                act(worker)
                self._wake(worker)

        if worker.alive:
            self.later(NETWORK_S, arrive)

    def _command(self, name: str, command: Command) -> None:
        if isinstance(command, Abort):
            self._to(name, lambda w: self._abort(w, command.sequence))

    def _post(self, worker: Worker, events: StepEvents) -> None:
        """Posts events to the coordinator; the last messages of a killed worker may still arrive."""

        def arrive() -> None:
            if self.table.renew_lease(worker.name, worker.incarnation, events.load, self.now):
                self._execute(self.requests.on_events(worker.name, events, self.now))

        self.later(NETWORK_S, arrive)

    # Actions of workers.

    def _abort(self, worker: Worker, sequence: SequenceId) -> None:
        if worker.sender is not None and worker.prefill is not None:
            run = worker.sender.find(sequence)
            origin = sequence if run is None else run.origin
            worker.sender.abort(origin)
            worker.prefill.abort(origin)
        elif worker.receiver is not None:
            worker.receiver.end(sequence)

    def _prefill(self, worker: Worker, request: GenerateRequest, targets: list[Target]) -> None:
        assert worker.prefill is not None and worker.sender is not None
        worker.prefill.submit(request, self.now, hand_over=bool(targets))
        if targets:
            worker.sender.expect(request, targets)

    def _assign(self, worker: Worker, action: AssignTargets, targets: list[Target]) -> None:
        assert worker.sender is not None
        if not worker.sender.assign(action.sequence, targets, action.attempt):
            self._abort(worker, action.sequence)
            lost = action.sequence._replace(attempt=action.attempt)
            self._post(worker, StepEvents(ended=(SequenceEnded(lost, "error", ErrorCode.HANDOFF_FAILED, "not here"),)))

    def _wake(self, worker: Worker) -> None:
        if worker.busy or not worker.alive:
            return
        plan = worker.scheduler.begin_step(self.now)
        if plan is None:
            return
        worker.busy = True
        if (alone := worker.scheduler.runs_alone(plan)) is not None:
            self._post(worker, StepEvents(alone=alone))
        if self.killers.intersection(row.sequence_id.request_id for row in plan.rows):
            self.later(STEP_S / 2, lambda: self.kill(worker.name))
        self.later(STEP_S, lambda: self._stepped(worker, plan))
        if worker.sender is None or worker.prefill is None:
            return
        for row in (r for r in plan.rows if worker.prefill.hands_over(r.sequence_id)):
            worker.sender.start(row.sequence_id, row.block_ids)
            worker.sender.progress(row.sequence_id, lambda over, r=row: over.advance(r.start, None, plan.step_id - 1))
            if row.num_sampled:
                self.later(STEP_S / 2, lambda r=row: self._first_layers(worker, r))

    def _first_layers(self, worker: Worker, row: Row) -> None:
        """Reports the first layers, as the engine does while it computes the others."""
        assert worker.sender is not None
        if worker.alive:
            first = FirstLayers(row.end, len(LAYOUT.layers) - 1)
            worker.sender.progress(row.sequence_id, lambda over: setattr(over, "first_layers", first))

    def _stepped(self, worker: Worker, plan: StepPlan) -> None:
        if not worker.alive:
            return
        worker.busy = False
        outcome = StepOutcome(plan.step_id, tuple(_sampled(row) for row in plan.rows), STEP_S)
        if worker.prefill is not None:
            self._prefilled(worker, plan, outcome)
        elif worker.decode is not None:
            result = worker.decode.finish_step(outcome, self.now)
            self._post(worker, StepEvents(plan.step_id, result.tokens, result.ended, load=self._load(worker)))
        self._wake(worker)
        self.steps += 1
        if self._kill_every and self.steps % self._kill_every == 0:
            self.check()
            self.kill(self.random.choice(sorted(self.workers)))

    def _prefilled(self, worker: Worker, plan: StepPlan, outcome: StepOutcome) -> None:
        assert worker.prefill is not None and worker.sender is not None
        result = worker.prefill.finish_step(outcome, self.now)
        runs, tokens = worker.sender.runs, []
        for p in result.progress:
            if p.first_token is not None:
                name = runs[p.sequence_id].over.sequence if p.sequence_id in runs else p.sequence_id
                tokens.append(TokenEvent(name, p.output_index, (p.first_token,)))
        self._post(worker, StepEvents(plan.step_id, tuple(tokens), result.ended))
        for ended in result.ended:
            worker.sender.abort(ended.sequence)
        for p in result.progress:
            worker.sender.progress(
                p.sequence_id, lambda over, p=p: over.advance(p.computed, p.first_token, plan.step_id)
            )

    def _handed_over(self, worker: Worker, event: HandedOver) -> None:
        self.transfers += 1
        self._post(worker, StepEvents(handed_over=(event,)))

    def _failed(self, worker: Worker, sequence: SequenceId, error: BatonError) -> None:
        assert worker.prefill is not None and worker.sender is not None
        run = worker.sender.find(sequence)
        self._post(worker, StepEvents(ended=(SequenceEnded(sequence, "error", error.tier_code, error.message),)))
        worker.prefill.abort(sequence if run is None else run.origin)
