"""The hand-overs of a simulated cluster: the pure machines of both tiers (`prefill.handover`, `decode.handover`), with
messages and bytes that take virtual time. Links break, chunks arrive damaged, and final acknowledgements get lost.

As in the product, a link delivers in order, both ends of a link are notified of its end a moment later, and a posted
chunk is received or its edge has ended. Each link has two edges: decode workers have two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.deadlines import Deadlines, Tombstones
from baton.core.errors import BatonError, HandoffError
from baton.core.events import HandedOver, Parked, SequenceEnded
from baton.core.handover import AbortTransfer, Accept, Ack, Chunk, FromDecode, Refuse
from baton.core.request import GenerateRequest, SequenceId
from baton.core.reshard import EdgeKey, reshard_layout
from decode.handover import Action as DecodeAction
from decode.handover import Admission, Ended, HandOvers, Peer, Ready, Receive, Reply
from decode.scheduler import DecodeScheduler
from prefill.handover import Action, Counters, Fail, Finish, HandOver, Limits, OfferTo, Park, SendChunk, Stage, Wire
from tests.support.builders import make_layout

KEY = b"k" * 32
MESSAGE_S, BYTES_S, DIAL_S = 0.002, 0.004, 0.01
LAYOUT = make_layout()
PLANS = reshard_layout(LAYOUT, 1, 2)


class World(Protocol):
    """The parts of the surrounding simulation that hand-overs use."""

    now: float
    random: random.Random

    def later(self, after_s: float, act: Callable[[], None]) -> None: ...

    def receiver(self, target: Target) -> Receiver | None:
        """Returns the decode worker of that name and incarnation, while it runs."""
        ...


@dataclass(eq=False)
class Link:
    sender: Sender
    receiver: Receiver
    peer: Peer
    wire: Wire
    broken: bool = False


@dataclass(eq=False)
class Run:
    """One hand-over and what it waits for: a step, or the acknowledgements of the current chunk on these edges."""

    over: HandOver
    origin: SequenceId
    link: Link | None = None
    waits_for_step: bool = False
    intact: dict[EdgeKey, bool] = field(default_factory=dict)
    unacknowledged: set[EdgeKey] = field(default_factory=set)


@dataclass
class Faults:
    """Probabilities: that the acknowledgement of all KV is lost with its link, and that a chunk is damaged."""

    lost_acks: float = 0.0
    damaged: float = 0.0


class Sender:
    """The hand-overs of one prefill worker. `parked`, `finished` and `failed` report to the worker; `ended` reports
    that the blocks are no longer read."""

    def __init__(
        self,
        world: World,
        name: str,
        incarnation: int,
        *,
        parked: Callable[[Parked], None],
        finished: Callable[[HandedOver], None],
        failed: Callable[[SequenceId, BatonError], None],
        ended: Callable[[SequenceId], None],
    ) -> None:
        self.name, self.incarnation, self.alive = name, incarnation, True
        self.counters = Counters()
        self.runs: dict[SequenceId, Run] = {}
        self.links: dict[Receiver, Link] = {}
        self._world = world
        self._limits = Limits(LAYOUT, 1, 12, 1 << 20)
        self._parked, self._finished, self._failed, self._ended = parked, finished, failed, ended

    def expect(self, request: GenerateRequest, targets: Sequence[Target]) -> None:
        deadline_at = self._world.now + request.deadline_s
        over = HandOver(request, tuple(targets), deadline_at, self._limits, self.counters)
        self.runs[over.sequence] = Run(over, over.sequence)

    def start(self, sequence: SequenceId, block_ids: tuple[int, ...]) -> None:
        run = self.runs.get(sequence)
        if run is not None and run.over.stage is Stage.WAITING:
            self._execute(run, run.over.begin(block_ids))

    def progress(self, sequence: SequenceId, change: Callable[[HandOver], None]) -> None:
        run = self.runs.get(sequence)
        if run is not None:
            change(run.over)
            if run.waits_for_step:
                self._send(run)

    def find(self, sequence: SequenceId) -> Run | None:
        return self.runs.get(sequence) or next((r for r in self.runs.values() if r.over.sequence == sequence), None)

    def assign(self, sequence: SequenceId, targets: Sequence[Target], attempt: int) -> bool:
        run = self.find(sequence)
        if run is None or run.over.stage is not Stage.PARKED:
            return False
        run.over.assign(targets, attempt)
        self._execute(run, run.over.reoffer())
        return True

    def abort(self, sequence: SequenceId) -> None:
        run = self.runs.pop(sequence, None)
        if run is not None:
            run.over.abort("the client left")
            message = run.over.end(self._world.now)
            if message is not None and run.link is not None:
                self._deliver(run.link, lambda link: link.receiver.on_abort(link.peer, message))
            self._ended(sequence)

    def die(self) -> None:
        self.alive = False
        for link in list(self.links.values()):
            break_link(self._world, link, "prefill died")

    def _execute(self, run: Run, action: Action) -> None:
        match action:
            case OfferTo(target):
                self._offer(run, target)
            case SendChunk():
                self._send(run)
            case Park(event):
                run.link = None
                self._parked(event)
            case Finish(event):
                del self.runs[run.origin]
                self._finished(event)
                self._ended(run.origin)
            case Fail(error):
                del self.runs[run.origin]
                self._failed(run.over.sequence, error)
                self._ended(run.origin)

    def _offer(self, run: Run, target: Target) -> None:
        attempt, run.link = run.over.sequence, None

        def dialled() -> None:
            if not self._awaits_reply(run, attempt, None, Stage.OFFERING):
                return
            receiver = self._world.receiver(target)
            if receiver is None:
                self._target_failed(run, HandoffError("nobody answers"))
                return
            link = self.links.get(receiver)
            if link is None:
                wire = Wire(PLANS, LAYOUT, 1 << 20)
                peer = Peer(self.name, self.incarnation, {plan.key: plan for plan in PLANS})
                link = self.links[receiver] = Link(self, receiver, peer, wire)
                receiver.links.append(link)
            run.link = link
            offer = run.over.offer(self._world.now)
            self._deliver(link, lambda to: to.receiver.on_offer(to, offer))

        self._world.later(DIAL_S, dialled)

    def _send(self, run: Run) -> None:
        over, link = run.over, run.link
        assert link is not None
        try:
            span = over.next_span()
        except BatonError as e:
            self._target_failed(run, e)
            return
        run.waits_for_step = span is None
        if span is None:
            return
        over.begin_span(span)
        run.intact, run.unacknowledged = {}, {plan.key for plan in over.edges}
        for plan in over.edges:
            chunk = over.chunk(plan, 1)
            over.chunk_sent(chunk.num_bytes)
            self._deliver(link, lambda to, c=chunk: to.receiver.on_chunk(to, c))

    def _deliver(self, link: Link, act: Callable[[Link], None]) -> None:
        if not link.broken:
            self._world.later(MESSAGE_S, lambda: None if link.broken else act(link))

    def _awaits_reply(self, run: Run, sequence: SequenceId, link: Link | None, stage: Stage) -> bool:
        """Returns whether a hand-over still waits for a reply under this attempt over this link."""
        current = self.runs.get(run.origin) is run and run.over.sequence == sequence and run.link is link
        return self.alive and current and run.over.stage is stage

    def on_reply(self, link: Link, message: FromDecode) -> None:
        sequence = getattr(message, "sequence", None)
        run = None if sequence is None else self.find(sequence)
        if run is None or sequence is None:
            return
        offering, sending = (self._awaits_reply(run, sequence, link, s) for s in (Stage.OFFERING, Stage.SENDING))
        match message:
            case Accept() | Refuse() if offering:
                self._execute(run, run.over.answered(message, link.wire, self._world.now))
            case AbortTransfer(reason=reason) if offering or (sending and not run.waits_for_step):
                self._target_failed(run, HandoffError(f"ended by its peer: {reason}", code=ErrorCode.PEER_ABORTED))
            case Ack(index=index, prefill_rank=p, decode_rank=d) if sending and index == run.over.num_chunks:
                run.intact[p, d] = message.ok
                run.unacknowledged.discard((p, d))
                if not run.unacknowledged:
                    self._acknowledged(run)

    def _acknowledged(self, run: Run) -> None:
        try:
            action = run.over.acknowledged(run.intact, self._world.now)
        except BatonError as e:
            self._target_failed(run, e)
        else:
            self._execute(run, action)

    def _target_failed(self, run: Run, error: BatonError) -> None:
        run.waits_for_step = False
        message, following = run.over.target_failed(error, self._world.now)
        if run.link is not None:
            self._deliver(run.link, lambda link: link.receiver.on_abort(link.peer, message))
        self._execute(run, following)

    def on_link_ended(self, link: Link, reason: str) -> None:
        self.links.pop(link.receiver, None)
        for run in list(self.runs.values()):
            if run.link is link and run.over.stage in (Stage.OFFERING, Stage.SENDING):
                self._target_failed(run, HandoffError(reason))


class Receiver:
    """The hand-overs into one decode worker. `ready`: a sequence has all its KV; `ended`: report to the coordinator."""

    def __init__(
        self,
        world: World,
        scheduler: DecodeScheduler,
        name: str,
        incarnation: int,
        vocabulary: int,
        faults: Faults,
        *,
        ready: Callable[[], None],
        ended: Callable[[SequenceEnded], None],
    ) -> None:
        self.name, self.incarnation, self.alive = name, incarnation, True
        self.links: list[Link] = []
        self.tombstones, self.lost_acks = Tombstones(), 0
        self.machine = HandOvers(
            scheduler,
            Deadlines(),
            self.tombstones,
            worker_id=name,
            incarnation=incarnation,
            vocab_size=vocabulary,
        )
        self._scheduler, self._world, self._faults = scheduler, world, faults
        self._ready, self._ended = ready, ended

    def on_offer(self, link: Link, offer: object) -> None:
        admission = Admission(KEY, self._world.now * 1000)
        answer = self.machine.on_offer(link.peer, offer, admission, self._world.now)  # type: ignore[arg-type]
        self._execute(link, [Reply(link.peer, answer)])

    def on_chunk(self, link: Link, chunk: Chunk) -> None:
        self._execute(link, self.machine.on_chunk(link.peer, chunk, self._world.now, edge_open=True), chunk)

    def on_abort(self, peer: Peer, message: AbortTransfer) -> None:
        link = next(link for link in self.links if link.peer is peer)
        self._execute(link, self.machine.on_abort(peer, message, self._world.now))

    def end(self, sequence: SequenceId) -> None:
        """Ends a sequence, as the coordinator's abort does."""
        if not self._scheduler.has_sequence(sequence):
            self.tombstones.add(sequence, self._world.now, 60.0)
            return
        by_peer = {link.peer: link for link in self.links}
        for action in self.machine.end(by_peer, sequence, "the client left"):
            self._execute(by_peer[action.peer], [action])

    def die(self) -> None:
        self.alive = False
        for link in list(self.links):
            break_link(self._world, link, "decode died")

    def _execute(self, link: Link, actions: Iterable[DecodeAction], chunk: Chunk | None = None) -> None:
        for action in actions:
            match action:
                case Receive():
                    assert chunk is not None
                    self._world.later(BYTES_S, lambda c=chunk: self._received(link, c))
                case Reply(_, message):
                    if isinstance(message, Ack) and message.complete and self._happens(self._faults.lost_acks):
                        self.lost_acks += 1
                        break_link(self._world, link, "the link broke")
                        return
                    self._world.later(MESSAGE_S, lambda m=message: self._reply(link, m))
                case Ready():
                    self._ready()
                case Ended(event):
                    self._ended(event)

    def _reply(self, link: Link, message: FromDecode) -> None:
        if not link.broken and link.sender.alive:
            link.sender.on_reply(link, message)

    def _received(self, link: Link, chunk: Chunk) -> None:
        if not self.alive:
            return
        machine, now = self.machine, self._world.now
        machine.write_ended(link.peer, chunk)
        if link.broken:
            actions = machine.receive_failed(link.peer, chunk, "the edge has ended", now, edge_open=False)
        else:
            actions = machine.received(link.peer, chunk, now, intact=not self._happens(self._faults.damaged))
        self._execute(link, actions)

    def _happens(self, share: float) -> bool:
        return share > 0 and self._world.random.random() < share

    def on_link_ended(self, link: Link, reason: str) -> None:
        self.links.remove(link)
        self._execute(link, self.machine.on_link_ended(link.peer, reason, self._world.now))


def break_link(world: World, link: Link, reason: str) -> None:
    """Breaks a link; both ends that are alive are notified a moment later."""
    if link.broken:
        return
    link.broken = True
    for end in (link.sender, link.receiver):
        world.later(MESSAGE_S, lambda end=end: end.on_link_ended(link, reason) if end.alive else None)
