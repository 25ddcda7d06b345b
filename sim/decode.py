"""A simulated decode worker: the product's scheduler and hand-over machine, and a thin model of what executes them.

`DecodeTier` stands for decode/worker.py, `SimReceiver` and `SimReceivingLink` for decode/receiver.py. Only this file
and its counterparts, sim/prefill.py and sim/sender.py, know how those machines are driven.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.core.commands import Command, Join, Prefill, Role
from baton.core.compatibility import Compatibility
from baton.core.edge_orders import Part
from baton.core.errors import BatonError, InvariantError, JoinRefused
from baton.core.events import Load, StepEvents
from baton.core.handover import (
    AbortTransfer,
    Accept,
    Chunk,
    EdgeOpen,
    EdgeReady,
    FromDecode,
    LinkHello,
    LinkWelcome,
    Offer,
    Ping,
)
from baton.core.liveness import LEASE_CHECK_S, LINK_SILENCE_S, MAX_READ_GAP_S, ListeningClock
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, reshard_layout
from baton.core.step import StepOutcome, StepPlan
from decode.admission import Admission, HandOvers
from decode.handover import (
    AbortedByPeer,
    Action,
    ChunkAnnounced,
    ChunkReceived,
    ChunkRejected,
    Destination,
    Dropped,
    Ended,
    EndedByCoordinator,
    Peer,
    Ready,
    Receive,
    ReceiveFailed,
    Reply,
)
from decode.scheduler import DecodeScheduler
from sim.engine import Payload, SimEngine
from sim.loop import Timer, cancel
from sim.network import End
from sim.worker import SimWorker

STAGING_BYTES = 1 << 20
STEP_TOKENS = 16


class DecodeTier:
    """What decode/worker.py does."""

    role: Role = "decode"

    def __init__(
        self,
        worker: SimWorker,
        scheduler: DecodeScheduler,
        engine: SimEngine,
        facts: Compatibility,
        tensor_parallel: int = 1,
    ) -> None:
        self.worker, self.scheduler, self.engine, self.facts = worker, scheduler, engine, facts
        self.tensor_parallel = tensor_parallel
        self.hand_overs = HandOvers(
            scheduler,
            worker.deadlines,
            worker.tombstones,
            Destination(worker.name, worker.incarnation, facts.layout, facts.vocab_size),
        )
        self.receiver = SimReceiver(self)
        self._reported_gauges: tuple[int, ...] = ()

    # Called by the worker (decode/worker.py).

    def join(self, run_id: str) -> Join:
        self.scheduler.cache.restart_events()
        return Join(
            self.worker.name,
            "decode",
            self.worker.incarnation,
            self.facts,
            link_address=f"{self.worker.name}:1",
            blocks_total=self.scheduler.blocks.num_blocks,
            max_running=self.scheduler.max_running,
            run_id=run_id,
            step_tokens=STEP_TOKENS,
            replace=True,
            tensor_parallel=self.tensor_parallel,
            both_roles=True,
            computes_prompts=True,
        )

    def load(self) -> Load:
        self._reported_gauges = ()
        scheduler = self.scheduler
        return Load(
            blocks_total=scheduler.blocks.num_blocks,
            blocks_free=scheduler.blocks.num_free,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            sequences=scheduler.num_sequences,
            preempted=scheduler.num_preempted,
            prompt_tokens_computed=scheduler.prompt_tokens_computed,
            prompt_cost=scheduler.prompt_cost,
        )

    def begin_step(self, now: float) -> StepPlan | None:
        return self.scheduler.begin_step(now)

    def step_began(self, plan: StepPlan, step_s: float) -> None:
        pass

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        scheduler = self.scheduler
        result = scheduler.finish_step(outcome, now)
        cache_events = scheduler.cache.take_events() if self.worker.connected else None
        gauges = scheduler.num_sequences, scheduler.blocks.num_free, scheduler.num_preempted, scheduler.num_running
        load = self.load() if result.ended or gauges != self._reported_gauges else None
        self._reported_gauges = gauges
        return StepEvents(outcome.step_id, result.tokens, result.ended, load=load, kv_cache_events=cache_events)

    def command(self, command: Command) -> None:
        if not isinstance(command, Prefill):
            raise InvariantError(f"{self.worker} received {type(command).__name__}")
        request = command.request
        if self.worker.refuses(request, self.facts.vocab_size):
            return
        try:
            self.scheduler.submit(request, self.worker.now)
        except BatonError as e:
            self.worker.report_ended(request.sequence_id, e.tier_code, e.message)
            return
        self.worker.track_deadline(request)

    def end(self, sequence: SequenceId, reason: str) -> bool:
        if not self.scheduler.has_sequence(sequence):
            return False
        self.receiver.end(sequence, reason)
        return True

    def receiving(self, sequence: SequenceId) -> bool:
        return self.scheduler.receiving(sequence)

    def check_settled(self) -> None:
        self.scheduler.check()
        blocks = self.scheduler.blocks
        if self.scheduler.num_sequences or blocks.num_free != blocks.num_blocks:
            raise InvariantError(f"{self.worker} keeps {self.scheduler.sequence_ids()}: {self.scheduler!r}")
        if self.receiver.taking:
            raise InvariantError(f"{self.worker} still receives {self.receiver.taking} chunks")

    def accept(self, end: End, first: Any) -> None:
        if not isinstance(first, LinkHello):
            raise InvariantError(f"{self.worker} was dialled with {first!r}")
        if first.run_id != self.worker.run_id:
            end.send(JoinRefused("link refused: run_id", param="run_id"))
            end.close("refused")
            return
        end.send(LinkWelcome(self.worker.name, "", 1, "", self.tensor_parallel, self.facts, STAGING_BYTES))
        self.receiver.serve(end, first)

    def admission(self) -> Admission:
        return Admission(self.worker.handle_key, self.worker.run_clock_ms(), self.worker.draining)


class SimEdge:
    """One end of an edge (baton/transfer/edge_endpoint.py): usable until it has failed once."""

    __slots__ = ("dead", "generation")

    def __init__(self, generation: int) -> None:
        self.generation, self.dead = generation, False


class SimReceiver:
    """The links into a decode worker; `taking` chunks are being received over all of them."""

    def __init__(self, tier: DecodeTier) -> None:
        self.tier = tier
        self.links: list[SimReceivingLink] = []
        self.by_end: dict[End, SimReceivingLink] = {}
        self.taking = 0

    def serve(self, end: End, hello: LinkHello) -> None:
        peer = Peer(hello.prefill_worker, hello.prefill_incarnation, {})
        plans = reshard_layout(self.tier.facts.layout, hello.tensor_parallel, self.tier.tensor_parallel)
        peer.plans = {plan.key: plan for plan in plans}
        link = SimReceivingLink(self, end, peer)
        self.links.append(link)
        self.by_end[end] = link

    def end(self, sequence: SequenceId, reason: str) -> None:
        by_peer = {link.peer: link for link in self.links}
        for action in self.tier.hand_overs.on(EndedByCoordinator(sequence, reason), self.tier.worker.now):
            if isinstance(action, Reply) and action.peer in by_peer:
                by_peer[action.peer].send(action.message)


class SimReceivingLink:
    """One link from one prefill worker."""

    def __init__(self, receiver: SimReceiver, end: End, peer: Peer) -> None:
        self.peer = peer
        self.edges: dict[EdgeKey, SimEdge] = {}
        self._receiver, self._tier, self._worker = receiver, receiver.tier, receiver.tier.worker
        self._end = end
        self._taking: dict[EdgeKey, tuple[Chunk, Part, SimEdge, Timer]] = {}  # the chunk that each edge receives
        self._clock = ListeningClock(self._worker.now, MAX_READ_GAP_S)
        self._reads, self._seen, self._since = 0, -1, 0.0  # messages received, those at `_since`, and that time
        end.on_message, end.on_end = self._on, self._ended
        if self._worker.world.timeouts.watched:
            self._worker.later(LEASE_CHECK_S, self._watch)

    def send(self, message: FromDecode) -> None:
        self._end.send(message)

    def _on(self, message: Any) -> None:
        worker, machine = self._worker, self._tier.hand_overs
        self._reads += 1
        match message:
            case Ping():
                self.send(message)
            case EdgeOpen(prefill_rank, decode_rank, generation):
                key = prefill_rank, decode_rank
                self._edge_failed(key, "replaced")
                self.edges[key] = SimEdge(generation)
                self.send(EdgeReady(prefill_rank, decode_rank, generation))
            case Offer():
                actions = machine.on_offer(self.peer, message, self._tier.admission(), worker.now)
                sequence = message.request.sequence_id
                refused = worker.refused_until.get(sequence, worker.now) > worker.now
                if refused and any(isinstance(a, Reply) and isinstance(a.message, Accept) for a in actions):
                    raise InvariantError(f"{worker} accepts {sequence}, which was aborted before")
                self._execute(actions)
                worker.wake()
            case Chunk():
                self._announced(message)
            case AbortTransfer():
                self._execute(machine.on(AbortedByPeer(self.peer, message), worker.now))
            case _:
                raise InvariantError(f"{worker} received {message!r} on a link")

    # Chunks.

    def _announced(self, chunk: Chunk) -> None:
        worker, machine = self._worker, self._tier.hand_overs
        key = chunk.prefill_rank, chunk.decode_rank
        if worker.loop.happens(worker.world.chunk_faults.no_staging):
            worker.loop.note(worker, "has no staging memory for", chunk.sequence, chunk.index)
            rejected = ChunkRejected(self.peer, chunk.sequence, "no staging memory")
            self._execute(machine.on(rejected, worker.now))
            return
        edge = self.edges.get(key)
        is_open = edge is not None and not edge.dead and edge.generation == chunk.edge_generation
        actions = machine.on(ChunkAnnounced(self.peer, chunk, is_open), worker.now)
        match actions:
            case [Receive(part, posted)] if edge is not None:
                timer = worker.later(worker.world.timeouts.edge_s, self._edge_failed, key, "no bytes arrived in time")
                self._taking[key] = chunk, part, edge, timer
                self._receiver.taking += 1
                self.send(posted)
            case _:
                self._execute(actions)

    def bytes_arrive(self, key: EdgeKey, generation: int, payload: Payload) -> None:
        """All bytes of a chunk arrive on an edge. Those of an edge that has ended here reach no block."""
        taken = self._taking.get(key)
        if taken is None or taken[2].dead or taken[2].generation != generation:
            return
        chunk, part, _, timer = self._taking.pop(key)
        cancel(timer)
        self._receiver.taking -= 1
        worker, machine = self._worker, self._tier.hand_overs
        intact = not worker.loop.happens(worker.world.chunk_faults.damaged)
        if intact:
            self._tier.engine.store(part, self.peer.plans[key], payload)
        worker.loop.note(worker, "received", chunk.sequence, chunk.index, key, intact)
        self._execute(machine.on(ChunkReceived(chunk, intact), worker.now))

    def _edge_failed(self, key: EdgeKey, reason: str) -> None:
        """An edge fails at this end; if a chunk is being received on it, that fails a moment later."""
        edge = self.edges.get(key)
        if edge is None or edge.dead:
            return
        edge.dead = True
        taken = self._taking.pop(key, None)
        if taken is not None:
            cancel(taken[3])
            self._worker.soon(self._receive_failed, taken[0], reason)

    def fail_edge(self, key: EdgeKey, reason: str) -> None:
        """The connection of an edge broke."""
        self._edge_failed(key, reason)

    def _receive_failed(self, chunk: Chunk, reason: str) -> None:
        self._receiver.taking -= 1
        failed = ReceiveFailed(chunk, reason, edge_open=False)
        self._execute(self._tier.hand_overs.on(failed, self._worker.now))

    # The end of the link.

    def _watch(self) -> None:
        if not self._end.open:
            return
        now = self._clock.advance(self._worker.now)
        if self._reads != self._seen:
            self._since, self._seen = now, self._reads
        elif now - self._since >= LINK_SILENCE_S:
            self._end.close("silent")
            self._ended(f"{self.peer.worker_id} was silent for {LINK_SILENCE_S:g} s")
            return
        self._worker.later(LEASE_CHECK_S, self._watch)

    def _ended(self, reason: str) -> None:
        del self._receiver.by_end[self._end]
        for key in list(self.edges):
            self._edge_failed(key, reason)
        self._execute(self._tier.hand_overs.on_link_ended(self.peer, reason, self._worker.now))
        self._receiver.links.remove(self)

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Reply(_, message):
                    self.send(message)
                case Ready() | Dropped():
                    self._worker.wake()
                case Ended(event):
                    self._worker.post(StepEvents(ended=(event,), load=self._tier.load()))
                    self._worker.wake()
                case Receive():
                    raise InvariantError("a receive must be the only action")
