"""A simulated prefill worker: the product's scheduler and hand-over machine, and a thin model of what executes them.

`PrefillTier` stands for prefill/worker.py, `Sender` for prefill/sender.py (callbacks, where the product has a coroutine
for each hand-over), `SendingLink` for prefill/link.py. Staging memory is not modelled.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from baton.core.codes import ErrorCode
from baton.core.commands import Assign, Command, Join, Prefill, Role, Target
from baton.core.compatibility import Compatibility
from baton.core.edge_orders import early_layers, part_of
from baton.core.errors import BatonError, HandoffError, InvariantError, StaleHandle, Unavailable
from baton.core.events import HandedOver, Load, Parked, StepEvents
from baton.core.handover import (
    AbortTransfer,
    Accept,
    Ack,
    Chunk,
    EdgeOpen,
    EdgeReady,
    LinkHello,
    LinkWelcome,
    Offer,
    Ping,
    Posted,
    Refuse,
    verify,
)
from baton.core.liveness import PING_EVERY_S, PING_LIMIT_S
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, EdgePlan, reshard_layout
from baton.core.sequence import Sequence
from baton.core.step import Row, StepOutcome, StepPlan
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
    Wire,
)
from prefill.scheduler import PrefillScheduler
from sim.decode import STAGING_BYTES, DecodeTier, Edge
from sim.engine import Engine
from sim.loop import Timer, cancel
from sim.network import End
from sim.worker import Worker

SECTION_BYTES, MAX_CHUNK_TOKENS = 1, 12


class PrefillTier:
    """The scheduler and the hand-overs."""

    role: Role = "prefill"

    def __init__(
        self,
        worker: Worker,
        scheduler: PrefillScheduler,
        engine: Engine,
        facts: Compatibility,
        tensor_parallel: int = 1,
    ) -> None:
        self.worker, self.scheduler, self.engine, self.facts = worker, scheduler, engine, facts
        self.tensor_parallel = tensor_parallel
        self.sender = Sender(self)

    # Called by the worker.

    def join(self, run_id: str) -> Join:
        self.scheduler.cache.restart_events()
        return Join(
            self.worker.name,
            "prefill",
            self.worker.incarnation,
            self.facts,
            blocks_total=self.scheduler.blocks.num_blocks,
            step_tokens=self.scheduler.step_tokens,
            run_id=run_id,
            replace=True,
            tensor_parallel=self.tensor_parallel,
            both_roles=True,
        )

    def load(self) -> Load:
        scheduler = self.scheduler
        return Load(
            blocks_total=scheduler.blocks.num_blocks,
            blocks_free=scheduler.blocks.num_free,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            sequences=scheduler.num_sequences,
            hand_overs=len(self.sender.runs),
        )

    def begin_step(self, now: float) -> StepPlan | None:
        plan = self.scheduler.begin_step(now)
        if plan is not None:
            for _, sequence in self.scheduler.rows_of(plan.step_id):
                if sequence.send_pinned:
                    self.sender.start(sequence)
        return plan

    def step_began(self, plan: StepPlan, step_s: float) -> None:
        layers = self._num_early_layers(plan)
        if layers:
            self.worker.later(step_s / 2, self._layers_computed, plan, layers)

    def _num_early_layers(self, plan: StepPlan) -> int:
        if self.tensor_parallel > 1:
            return 0
        sizes = [layer.bytes_per_token for layer in self.scheduler.layout.layers]
        rows = [len(row.tokens) for row in plan.rows if _sends_layers(row)]
        return max((early_layers([n * size for size in sizes], SECTION_BYTES) for n in rows), default=0)

    def _layers_computed(self, plan: StepPlan, layers: int) -> None:
        rows = self.scheduler.rows_of(plan.step_id)
        if not rows:
            return
        self.engine.first_layers(plan, layers)
        for row, sequence in rows:
            if _sends_layers(row):
                self.sender.layers_computed(sequence, row.end, layers)

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        result = self.scheduler.finish_step(outcome, now)
        ended = {e.sequence for e in result.ended}
        tokens = []
        for p in result.progress:
            sequence = self.scheduler.sequences.get(p.sequence_id)
            stamps = None if sequence is None or sequence.id in ended else sequence.prefill_stamps()
            if (event := p.event(stamps)) is not None:
                tokens.append(event)
            if sequence is not None and sequence.id not in ended:
                self.sender.progressed(sequence)
        for e in result.ended:
            if (sequence := self.scheduler.sequences.get(e.sequence)) is not None:
                self.sender.abort(sequence, "the sequence has ended")
        cache_events = self.scheduler.cache.take_events() if self.worker.connected else None
        return StepEvents(outcome.step_id, tuple(tokens), result.ended, load=self.load(), kv_cache_events=cache_events)

    def command(self, command: Command) -> None:
        match command:
            case Prefill():
                self._start(command)
            case Assign():
                self._assign(command)

    def _assign(self, command: Assign) -> None:
        sequence_id, sequence = command.sequence, self.scheduler.sequences.get(command.sequence)
        next_id = sequence_id._replace(attempt=command.attempt)
        if not self._may_hand_over(next_id, command.targets):
            self.end(sequence_id, "the new targets have no valid handles")
        elif sequence is not None and self.sender.is_parked(sequence):
            self.scheduler.begin_attempt(sequence, command.attempt)
            self.worker.deadlines.rename(sequence_id, next_id)
            self.sender.assign(sequence, command.targets)
        else:
            self.end(sequence_id, "new targets were assigned to KV that is not parked")
            self.worker.report_ended(next_id, ErrorCode.HANDOFF_FAILED, "the parked KV no longer exists")

    def end(self, sequence_id: SequenceId, reason: str) -> bool:
        if (sequence := self.scheduler.sequences.get(sequence_id)) is not None:
            self.sender.abort(sequence, reason)
        return self.scheduler.abort(sequence_id)

    def receiving(self, sequence: SequenceId) -> bool:
        return False

    def check_settled(self) -> None:
        self.scheduler.check()
        blocks = self.scheduler.blocks
        if self.scheduler.num_sequences or self.sender.runs or blocks.num_free != blocks.num_blocks:
            raise InvariantError(
                f"{self.worker} keeps {self.scheduler.sequence_ids()} {self.sender.runs}: {self.scheduler!r}"
            )

    def accept(self, end: End, first: Any) -> None:
        end.close(f"{self.worker} accepts no links")  # it was a decode worker before

    def _start(self, command: Prefill) -> None:
        worker, request = self.worker, command.request
        if worker.refuses(request, self.facts.vocab_size):
            return
        if not self._may_hand_over(request.sequence_id, command.targets):
            return
        try:
            sequence = self.scheduler.submit(request, worker.now, hand_over=bool(command.targets))
        except BatonError as e:
            worker.report_ended(request.sequence_id, e.tier_code, e.message)
            return
        worker.track_deadline(request)
        if command.targets:
            self.sender.expect(sequence, command.targets)

    def _may_hand_over(self, sequence: SequenceId, targets: tuple[Target, ...]) -> bool:
        worker = self.worker
        try:
            for target in targets:
                verify(
                    worker.handle_key,
                    target.handle,
                    sequence=sequence,
                    source=worker.name,
                    source_incarnation=worker.incarnation,
                    destination=target.worker_id,
                    incarnation=target.incarnation,
                    now_ms=worker.run_clock_ms(),
                )
        except StaleHandle as e:
            expired = e.param == "expires_ms"
            worker.report_ended(sequence, ErrorCode.DEADLINE_EXCEEDED if expired else e.tier_code, e.message)
            return False
        return True

    # Called by the sender.

    def parked(self, event: Parked) -> None:
        self.worker.post(StepEvents(parked=(event,), load=self.load()))

    def handed_over(self, event: HandedOver, sequence: Sequence) -> None:
        stamps = sequence.prefill_stamps()
        event = replace(event, stamps=replace(event.stamps, queue_s=stamps.queue_s, prefill_s=stamps.prefill_s))
        self.worker.post(StepEvents(handed_over=(event,), load=self.load()))

    def hand_over_ended(self, sequence: Sequence) -> None:
        self.scheduler.release_send(sequence.id)
        self.worker.deadlines.forget(sequence.id)
        self.worker.wake()

    def hand_over_failed(self, sequence: Sequence, error: BatonError) -> None:
        self.worker.report_ended(sequence.id, error.tier_code, error.message)
        self.scheduler.mark_kv_suspect(sequence.id)
        self.scheduler.abort(sequence.id)


def _sends_layers(row: Row) -> bool:
    return row.num_sampled > 0 and not row.sampling.grammar


@dataclass(eq=False)
class Run:
    """The execution of one hand-over. `waits` numbers its waits: the reply to an earlier one has no effect. `sending`:
    the chunk that must be sent completely, even if the sequence is aborted."""

    over: HandOver
    link: SendingLink | None = None
    waits: int = 0
    waits_for_step: bool = False
    sending: ChunkSend | None = None

    def __repr__(self) -> str:
        return f"<Run {self.over!r}{' sending' * (self.sending is not None)}>"

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

    run: Run
    link: SendingLink
    pending: set[EdgeKey] = field(default_factory=set)
    error: BatonError | None = None
    intact: dict[EdgeKey, bool] = field(default_factory=dict)


class Sender:
    """All hand-overs of a worker, its links, and the latest offers."""

    def __init__(self, tier: PrefillTier) -> None:
        self.tier, self.worker = tier, tier.worker
        self.runs: dict[Sequence, Run] = {}
        self.links: dict[tuple[str, int], SendingLink] = {}
        self.counters = SendCounters()
        self.generations = itertools.count(1)
        self.offered: deque[tuple[SendingLink, Offer]] = deque(maxlen=8)
        self._limits = ChunkLimits(tier.facts.layout, SECTION_BYTES, MAX_CHUNK_TOKENS, STAGING_BYTES)

    # From the worker.

    def expect(self, sequence: Sequence, targets: Iterable[Target]) -> None:
        deadline_at = self.worker.now + sequence.request.deadline_s
        over = HandOver(sequence, tuple(targets), deadline_at, self._limits, self.counters)
        sequence.hand_over = over
        self.runs[sequence] = Run(over)

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

    def _over(self, run: Run) -> None:
        del self.runs[run.over.sequence]
        if run.link is not None:
            run.link.withdraw(run)
        self.tier.hand_over_ended(run.over.sequence)

    def _execute(self, run: Run, actions: Iterable[Action]) -> None:
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

    def _target_failed(self, run: Run, error: BatonError) -> None:
        run.next_wait()
        self._execute(run, run.over.on(TargetFailed(error), self.worker.now))

    def _link(self, target: Target, opened: Callable[[SendingLink | BatonError], None]) -> None:
        """Calls `opened` with the open link to a target, or the error; concurrent callers share one dial."""
        key = target.worker_id, target.incarnation
        link = self.links.get(key)
        if link is None or link.lost is not None:
            link = self.links[key] = SendingLink(self, target)
        link.when_open(opened)

    def _dialled(self, run: Run, wait: int, link: SendingLink | BatonError) -> None:
        if run.waits != wait:
            return
        if isinstance(link, BatonError):
            self._target_failed(run, link)
            return
        run.link = link
        self._execute(run, run.over.on(Connected(link.wire), self.worker.now))

    def _offer(self, run: Run, link: SendingLink, offer: Offer) -> None:
        wait = run.next_wait()

        def answered(reply: Accept | Refuse | BatonError) -> None:
            self.offered.append((link, offer))
            if run.waits == wait:
                event = TargetFailed(reply) if isinstance(reply, BatonError) else reply
                self._execute(run, run.over.on(event, self.worker.now))

        timeout_s = self.worker.world.timeouts.connect_s
        link.ask(offer, ("offer", offer.request.sequence_id), timeout_s, "reply to an offer", answered)

    # One chunk.

    def _send(self, run: Run) -> None:
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
        link.acquire(run, lambda: self._holds_edges(run, link, wait))

    def _holds_edges(self, run: Run, link: SendingLink, wait: int) -> None:
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


class SendingLink:
    """Complete state: the stream, the pending replies by what they are to, the edges, and who holds or waits for them
    (prefill/link.py)."""

    def __init__(self, sender: Sender, target: Target) -> None:
        self.name = target.worker_id
        self.lost: str | None = None
        self.edges: dict[EdgeKey, Edge] = {}
        self.wire: Wire
        self._sender, self._worker = sender, sender.worker
        self._end: End | None = None
        self._opening: list[Callable[[SendingLink | BatonError], None]] = []
        self._waiting: dict[tuple[object, ...], tuple[Callable[[Any], None], Timer | None]] = {}
        self._held = False
        self._queue: deque[tuple[Run, Callable[[], None]]] = deque()
        tier, worker = sender.tier, sender.worker
        hello = LinkHello(worker.name, worker.incarnation, worker.run_id, tier.facts, tier.tensor_parallel)
        world = worker.world
        world.network.dial(worker, self.name, hello, world.timeouts.connect_s, self._opened, self._lost_at_dial)

    # The stream.

    def when_open(self, opened: Callable[[SendingLink | BatonError], None]) -> None:
        if self._end is not None:
            self._worker.soon(opened, self)
        else:
            self._opening.append(opened)

    def _opened(self, end: End, welcome: Any) -> None:
        if isinstance(welcome, BatonError):
            end.close("refused")
            self._lost_at_dial(welcome.message)
            return
        if not isinstance(welcome, LinkWelcome):
            raise InvariantError(f"{self._worker}: the reply to a hello is {welcome!r}")
        layout = self._sender.tier.facts.layout
        plans = reshard_layout(layout, self._sender.tier.tensor_parallel, welcome.tensor_parallel)
        self.wire = Wire(plans, layout, welcome.staging_bytes)
        self._end, end.on_message, end.on_end = end, self._resolve, self._ended
        if self._worker.world.timeouts.watched:
            self._worker.later(PING_EVERY_S, self._ping, 1)
        opening, self._opening = self._opening, []
        for opened in opening:
            opened(self)

    def _lost_at_dial(self, reason: str) -> None:
        self.lost = reason
        opening, self._opening = self._opening, []
        for opened in opening:
            opened(self.lost_error())

    def lost_error(self) -> BatonError:
        return Unavailable(f"the link to {self.name} has ended: {self.lost}", code=ErrorCode.LINK_LOST)

    def abort(self, message: AbortTransfer) -> None:
        if self._end is not None:
            self._end.send(message)

    def repeat(self, offer: Offer) -> None:
        """Sends an offer a second time."""
        if self._end is not None:
            self._end.send(offer)

    def _ping(self, number: int) -> None:
        def replied(reply: Any) -> None:
            if isinstance(reply, BatonError):
                if self.lost is None and self._end is not None:
                    self._end.close("no reply to a ping")
                    self._ended(reply.message)
            else:
                self._worker.later(PING_EVERY_S, self._ping, number + 1)

        self.ask(Ping(number), ("ping", number), PING_LIMIT_S, "reply to a ping", replied)

    def _ended(self, reason: str) -> None:
        self.lost = reason
        for key in list(self._waiting):
            self._answer(key, self.lost_error())
        for key in list(self.edges):
            self.fail_edge(key, reason)
        queue, self._queue = self._queue, deque()
        for run, _ in queue:
            self._sender._target_failed(run, self.lost_error())

    # Replies.

    def ask(
        self, message: Any, key: tuple[object, ...], timeout_s: float, reply: str, answered: Callable[[Any], None]
    ) -> None:
        self.expect(key, timeout_s, reply, answered)
        if self._end is not None:
            self._end.send(message)

    def expect(
        self, key: tuple[object, ...], timeout_s: float | None, reply: str, answered: Callable[[Any], None]
    ) -> None:
        if self.lost is not None:
            self._worker.soon(answered, self.lost_error())
            return
        timer = None
        if timeout_s is not None:
            late = HandoffError(f"{self.name} sent no {reply} within {timeout_s:g} s")
            timer = self._worker.later(timeout_s, self._answer, key, late)
        self._waiting[key] = answered, timer

    def _answer(self, key: tuple[object, ...], reply: Any) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            cancel(waiting[1])
            waiting[0](reply)

    def forget_acks(self, sequence: SequenceId) -> None:
        for key in [k for k in self._waiting if k[0] == "ack" and k[1] == sequence]:
            del self._waiting[key]

    def _resolve(self, message: Any) -> None:
        match message:
            case Accept(sequence=s) | Refuse(sequence=s):
                self._answer(("offer", s), message)
            case Posted(sequence=s, index=i, prefill_rank=p, decode_rank=d):
                self._answer(("posted", s, i, (p, d)), message)
            case Ack(sequence=s, index=i, prefill_rank=p, decode_rank=d):
                self._answer(("ack", s, i, (p, d)), message)
            case EdgeReady(prefill_rank=p, decode_rank=d, generation=g, error=e):
                self._answer(("edge", g), message)
                edge = self.edges.get((p, d))
                if e and edge is not None and edge.generation == g:
                    edge.dead = True
            case Ping(nonce=n):
                self._answer(("ping", n), message)
            case AbortTransfer(sequence=s, reason=r):
                error = HandoffError(f"{self.name} ended the hand-over of {s}: {r}", code=ErrorCode.PEER_ABORTED)
                for key in [k for k in self._waiting if len(k) > 1 and k[1] == s]:
                    self._answer(key, error)

    # Edges.

    def acquire(self, run: Run, granted: Callable[[], None]) -> None:
        if self._held:
            self._queue.append((run, granted))
        else:
            self._held = True
            granted()

    def release(self) -> None:
        if self._queue:
            _, granted = self._queue.popleft()
            self._worker.soon(granted)
        else:
            self._held = False

    def withdraw(self, run: Run) -> None:
        self._queue = deque(entry for entry in self._queue if entry[0] is not run)

    def open_edge(self, plan: EdgePlan, opened: Callable[[EdgeKey, BatonError | None], None]) -> None:
        generation = next(self._sender.generations)

        def answered(reply: Any) -> None:
            error = reply if isinstance(reply, BatonError) else None
            if error is None and reply.error:
                error = HandoffError(reply.error)
            if error is not None:
                edge.dead = True
            opened(plan.key, error)

        if self.lost is not None:
            self._worker.soon(opened, plan.key, self.lost_error())
            return
        edge = self.edges[plan.key] = Edge(generation)
        message = EdgeOpen(plan.prefill_rank, plan.decode_rank, generation, f"{self._worker}/{generation}")
        edge_s = self._worker.world.timeouts.edge_s
        self.ask(message, ("edge", generation), edge_s, "reply to EdgeOpen", answered)

    def announce(self, chunk: Chunk, posted: Callable[[Any], None]) -> None:
        key = ("posted", chunk.sequence, chunk.index, (chunk.prefill_rank, chunk.decode_rank))
        edge_s = self._worker.world.timeouts.edge_s
        self.ask(chunk, key, edge_s, f"Posted for chunk {chunk.index}", posted)

    def fail_edge(self, key: EdgeKey, reason: str) -> None:
        """The edge fails at this end; the peer's end notices, unless it cannot be reached."""
        edge = self.edges.get(key)
        if edge is None or edge.dead:
            return
        edge.dead = True
        receiving = self._peer()
        if receiving is not None and self._worker.world.network.connected(self._worker.name, self.name):
            process, link = receiving
            generation = edge.generation

            def notice() -> None:
                theirs = link.edges.get(key)
                if theirs is not None and theirs.generation == generation:
                    link.fail_edge(key, reason)

            self._worker.loop.later(self._worker.world.costs.message_s(), process.receives, notice)

    def _peer(self) -> tuple[Worker, Any] | None:
        if self._end is None:
            return None
        process = self._end.peer.process
        if not isinstance(process, Worker) or not isinstance(process.tier, DecodeTier):
            return None
        link = process.tier.receiver.by_end.get(self._end.peer)
        return None if link is None else (process, link)

    def send_bytes(
        self, chunk: Chunk, plan: EdgePlan, block_ids: tuple[int, ...], sent: Callable[[BatonError | None], None]
    ) -> None:
        """Sends a chunk on an edge whose peer has posted the receive. KV is read at the end: the latest moment at which
        the product may read it."""
        worker, edge = self._worker, self.edges[plan.key]
        world = worker.world

        def arrive() -> None:
            if edge.dead:
                sent(HandoffError("the edge has failed"))
                return
            if not world.network.connected(worker.name, self.name):
                worker.later(world.timeouts.edge_s, fail, "the bytes could not be sent in time")
                return
            if world.loop.happens(world.chunk_faults.edge_failed):
                worker.loop.note(worker, "edge fails", chunk.sequence, chunk.index)
                fail("the connection of the edge broke")
                return
            payload = self._sender.tier.engine.pack(part_of(chunk, plan, block_ids), plan)
            peer = self._peer()
            if peer is not None:
                process, link = peer
                process.receives(link.bytes_arrive, plan.key, edge.generation, payload)
            sent(None)

        def fail(reason: str) -> None:
            self.fail_edge(plan.key, reason)
            sent(HandoffError(reason))

        worker.later(world.costs.transfer_s(worker.name, self.name, chunk.num_bytes), arrive)
