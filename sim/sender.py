"""The hand-overs of a simulated prefill worker: the product's machine of each, and a thin model of what executes it.

`SimSender` stands for prefill/sender.py, with callbacks where the product has a coroutine for each hand-over; its links
are in sim/sending_link.py. Staging memory is not modelled.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.compatibility import Compatibility
from baton.core.errors import BatonError, HandoffError, InvariantError
from baton.core.events import HandedOver, Parked
from baton.core.handover import Accept, Chunk, Offer, Refuse
from baton.core.reshard import EdgeKey, EdgePlan
from baton.core.sequence import Sequence
from prefill.handover import (
    Aborted,
    Acknowledged,
    Action,
    Assigned,
    ChunkLimits,
    ComputeStarted,
    Connected,
    Dial,
    EdgeSent,
    HandOver,
    LayersComputed,
    ReportFailed,
    ReportHandedOver,
    ReportParked,
    SendAbort,
    SendChunk,
    SendCounters,
    SendOffer,
    SendStage,
    SpanAnnounced,
    TargetFailed,
)
from sim.decode import STAGING_BYTES
from sim.engine import SimEngine
from sim.sending_link import SimSendingLink
from sim.worker import SimWorker

SECTION_BYTES, MAX_CHUNK_TOKENS = 1, 12


@dataclass(eq=False)
class HandOverRun:
    """The execution of one hand-over. `waits` numbers its waits: the reply to an earlier one has no effect. `sending`:
    the chunk that must be sent completely, even if the sequence is aborted."""

    over: HandOver
    link: SimSendingLink | None = None
    waits: int = 0
    waits_for_step: bool = False
    sending: ChunkSend | None = None

    def __repr__(self) -> str:
        return f"<HandOverRun {self.over!r}{' sending' * (self.sending is not None)}>"

    @property
    def ended(self) -> bool:
        return self.over.state is SendStage.ENDED

    def next_wait(self) -> int:
        self.waits += 1
        self.waits_for_step = False
        return self.waits


@dataclass(eq=False)
class ChunkSend:
    """A chunk on its edges, while it holds them: those that are not done, the first error, and the acknowledgements."""

    run: HandOverRun
    link: SimSendingLink
    pending: set[EdgeKey] = field(default_factory=set)
    error: BatonError | None = None
    intact: dict[EdgeKey, bool] = field(default_factory=dict)


class SendingTier(Protocol):
    """What a sender needs of its tier."""

    worker: SimWorker
    engine: SimEngine
    facts: Compatibility
    tensor_parallel: int

    def parked(self, event: Parked) -> None: ...

    def handed_over(self, event: HandedOver, sequence: Sequence) -> None: ...

    def hand_over_ended(self, sequence: Sequence) -> None: ...

    def hand_over_failed(self, sequence: Sequence, error: BatonError) -> None: ...


class SimSender:
    """All hand-overs of a worker, its links, and the latest offers."""

    def __init__(self, tier: SendingTier) -> None:
        self.tier, self.worker = tier, tier.worker
        self.runs: dict[Sequence, HandOverRun] = {}
        self.links: dict[tuple[str, int], SimSendingLink] = {}
        self.counters = SendCounters()
        self.offered: deque[tuple[SimSendingLink, Offer]] = deque(maxlen=8)
        self._generations = itertools.count(1)
        self._limits = ChunkLimits(tier.facts.layout, SECTION_BYTES, MAX_CHUNK_TOKENS, STAGING_BYTES)

    # From the worker.

    def expect(self, sequence: Sequence, targets: Iterable[Target]) -> None:
        deadline_at = self.worker.now + sequence.request.deadline_s
        over = HandOver(sequence, tuple(targets), deadline_at, self._limits, self.counters)
        sequence.hand_over = over
        self.runs[sequence] = HandOverRun(over)

    def start(self, sequence: Sequence) -> None:
        run = self.runs.get(sequence)
        if run is not None and run.over.state is SendStage.WAITING:
            self._execute(run, run.over.on(ComputeStarted(), self.worker.now))

    def progressed(self, sequence: Sequence) -> None:
        run = self.runs.get(sequence)
        if run is not None and run.waits_for_step:
            self._send(run)

    def layers_computed(self, sequence: Sequence, end: int, layers: int) -> None:
        run = self.runs.get(sequence)
        if run is not None:
            run.over.on(LayersComputed(end, layers), self.worker.now)
            self.progressed(sequence)

    def is_parked(self, sequence: Sequence) -> bool:
        run = self.runs.get(sequence)
        return run is not None and run.over.state is SendStage.PARKED

    def assign(self, sequence: Sequence, targets: Iterable[Target]) -> None:
        run = self.runs[sequence]
        run.link = None
        self._execute(run, run.over.on(Assigned(tuple(targets)), self.worker.now))

    def abort(self, sequence: Sequence, reason: str) -> None:
        run = self.runs.get(sequence)
        if run is None or run.ended:
            return
        actions = run.over.on(Aborted(reason), self.worker.now)
        run.next_wait()
        self._execute(run, actions)
        if run.sending is None:
            self._over(run)  # else when the chunk has been sent

    # One hand-over.

    def _over(self, run: HandOverRun) -> None:
        del self.runs[run.over.sequence]
        if run.link is not None:
            run.link.withdraw(run)
        self.tier.hand_over_ended(run.over.sequence)

    def _execute(self, run: HandOverRun, actions: Iterable[Action]) -> None:
        sequence = run.over.sequence
        for action in actions:
            match action:
                case Dial(target):
                    run.link = None
                    wait = run.next_wait()
                    self._link(target, lambda link, w=wait: self._dialled(run, w, link))  # type: ignore[misc]
                case SendOffer(offer) if run.link is not None:
                    self._offer(run, run.link, offer)
                case SendChunk():
                    self._send(run)
                case SendAbort(message):
                    if run.link is not None:
                        run.link.abort(message)
                case ReportParked(event):
                    run.next_wait()
                    self.tier.parked(event)
                case ReportHandedOver(over):
                    run.next_wait()
                    self.tier.handed_over(over, sequence)
                    self._over(run)
                case ReportFailed(error):
                    run.next_wait()
                    self.tier.hand_over_failed(sequence, error)
                    if sequence in self.runs:
                        self._over(run)

    def _target_failed(self, run: HandOverRun, error: BatonError) -> None:
        run.next_wait()
        self._execute(run, run.over.on(TargetFailed(error), self.worker.now))

    def _link(self, target: Target, opened: Callable[[SimSendingLink | BatonError], None]) -> None:
        """Calls `opened` with the open link to a target, or the error; concurrent callers share one dial."""
        key = target.worker_id, target.incarnation
        link = self.links.get(key)
        if link is None or link.lost is not None:
            tier = self.tier
            ours = tier.engine, tier.facts, tier.tensor_parallel
            link = self.links[key] = SimSendingLink(self.worker, target, *ours, self._generations)
        link.when_open(opened)

    def _dialled(self, run: HandOverRun, wait: int, link: SimSendingLink | BatonError) -> None:
        if run.waits != wait:
            return
        if isinstance(link, BatonError):
            self._target_failed(run, link)
            return
        run.link = link
        self._execute(run, run.over.on(Connected(link.wire), self.worker.now))

    def _offer(self, run: HandOverRun, link: SimSendingLink, offer: Offer) -> None:
        wait = run.next_wait()

        def answered(reply: Accept | Refuse | BatonError) -> None:
            self.offered.append((link, offer))
            if run.waits == wait:
                event = TargetFailed(reply) if isinstance(reply, BatonError) else reply
                self._execute(run, run.over.on(event, self.worker.now))

        timeout_s = self.worker.world.timeouts.connect_s
        link.ask(offer, ("offer", offer.request.sequence_id), timeout_s, "reply to an offer", answered)

    # One chunk.

    def _send(self, run: HandOverRun) -> None:
        """Waits for computed KV, then for the edges of the link, then sends all of it as one chunk."""
        link = run.link
        if link is None:
            raise InvariantError(f"{run!r} has no link")
        wait = run.next_wait()
        if run.over.next_span() is None:
            run.waits_for_step = True
            return
        if link.lost is not None:
            self._target_failed(run, link.lost_error())
            return
        link.acquire(run, lambda: self._holds_edges(run, link, wait), lambda error: self._target_failed(run, error))

    def _holds_edges(self, run: HandOverRun, link: SimSendingLink, wait: int) -> None:
        if run.waits != wait:
            link.release()
            return
        send = run.sending = ChunkSend(run, link)
        missing = [plan for plan in run.over.edges if plan.key not in link.edges or link.edges[plan.key].dead]
        if not missing:
            self._announce(send)
            return
        send.pending = {plan.key for plan in missing}

        def opened(key: EdgeKey, error: BatonError | None) -> None:
            send.pending.discard(key)
            send.error = send.error or error
            if not send.pending:
                if send.error is None:
                    self._announce(send)
                else:
                    self._chunk_over(send)

        for plan in missing:
            link.open_edge(plan, opened)

    def _announce(self, send: ChunkSend) -> None:
        run, link, over = send.run, send.link, send.run.over
        if run.ended:
            send.error = HandoffError(f"the hand-over of {over.sequence.id} was aborted")
            self._chunk_over(send)
            return
        span = over.next_span()
        if span is None:
            raise InvariantError(f"the computed KV of {over.sequence.id} is missing")
        over.on(SpanAnnounced(span), self.worker.now)
        send.pending = {plan.key for plan in over.edges}
        for plan in over.edges:
            chunk = over.chunk(plan, link.edges[plan.key].generation)
            link.expect(("ack", chunk.sequence, chunk.index, plan.key), None, "", self._on_ack(send, plan.key))
            link.announce(chunk, self._on_posted(send, plan, chunk))

    def _on_posted(self, send: ChunkSend, plan: EdgePlan, chunk: Chunk) -> Callable[[Any], None]:
        run, link = send.run, send.link

        def posted(reply: Any) -> None:
            if isinstance(reply, BatonError):
                if not (isinstance(reply, HandoffError) and reply.code is ErrorCode.PEER_ABORTED):
                    link.fail_edge(plan.key, reply.message)
                sent(reply)
                return
            link.send_bytes(chunk, plan, run.over.sequence.block_ids, sent)

        def sent(error: BatonError | None) -> None:
            if plan.key not in send.pending:
                return
            send.pending.discard(plan.key)
            send.error = send.error or error
            if error is None:
                run.over.on(EdgeSent(chunk.num_bytes), self.worker.now)
            if not send.pending:
                self._chunk_over(send)

        return posted

    def _chunk_over(self, send: ChunkSend) -> None:
        """The chunk has been sent on every edge, or failed: the edges are free. Its acknowledgements may follow."""
        run, link = send.run, send.link
        run.sending = None
        link.release()
        if run.ended:
            link.forget_acks(run.over.sequence.id)
            self._over(run)
        elif send.error is not None:
            link.forget_acks(run.over.sequence.id)
            self._target_failed(run, send.error)
        else:
            wait = run.next_wait()
            edge_s = self.worker.world.timeouts.edge_s

            def late() -> None:
                if run.waits == wait:
                    link.forget_acks(run.over.sequence.id)
                    self._target_failed(run, HandoffError(f"{link.name} did not acknowledge a chunk in {edge_s:g} s"))

            self.worker.later(edge_s, late)
            self._acknowledged(send, wait)

    def _on_ack(self, send: ChunkSend, key: EdgeKey) -> Callable[[Any], None]:
        def acknowledged(reply: Any) -> None:
            if isinstance(reply, BatonError):
                if send.error is None:
                    send.error = reply
                    if send.run.sending is not send and not send.run.ended and send.run.link is send.link:
                        send.link.forget_acks(send.run.over.sequence.id)
                        self._target_failed(send.run, reply)
                return
            send.intact[key] = reply.ok
            if send.run.sending is not send and not send.run.ended:
                self._acknowledged(send, send.run.waits)

        return acknowledged

    def _acknowledged(self, send: ChunkSend, wait: int) -> None:
        run = send.run
        if run.waits != wait or any(plan.key not in send.intact for plan in run.over.edges):
            return
        run.next_wait()
        self._execute(run, run.over.on(Acknowledged(send.intact), self.worker.now))
