"""A simulated prefill worker's link to one decode worker: stands for prefill/link.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.compatibility import Compatibility
from baton.core.edge_orders import part_of
from baton.core.errors import BatonError, HandoffError, InvariantError, Unavailable
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
)
from baton.core.liveness import PING_EVERY_S, PING_LIMIT_S
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, EdgePlan, reshard_layout
from prefill.handover import Wire
from sim.decode import DecodeTier, SimEdge
from sim.engine import SimEngine
from sim.loop import Timer, cancel
from sim.network import End
from sim.worker import SimWorker


class SimSendingLink:
    """A link at its prefill worker (prefill/link.py). `generations` numbers the edges of all links of the worker."""

    def __init__(
        self,
        worker: SimWorker,
        target: Target,
        engine: SimEngine,
        facts: Compatibility,
        tensor_parallel: int,
        generations: Iterator[int],
    ) -> None:
        self.name = target.worker_id
        self.lost: str | None = None
        self.edges: dict[EdgeKey, SimEdge] = {}
        self.wire: Wire
        self._worker, self._engine, self._facts = worker, engine, facts
        self._tensor_parallel, self._generations = tensor_parallel, generations
        self._end: End | None = None
        self._opening: list[Callable[[SimSendingLink | BatonError], None]] = []
        # For replies, by what they are to.
        self._waiting: dict[tuple[object, ...], tuple[Callable[[Any], None], Timer | None]] = {}
        # Whether a hand-over has the edges, and those that wait for them, with what is called.
        self._held = False
        self._queue: deque[tuple[object, Callable[[], None], Callable[[BatonError], None]]] = deque()
        hello = LinkHello(worker.name, worker.incarnation, worker.run_id, facts, tensor_parallel)
        world = worker.world
        world.network.dial(worker, self.name, hello, world.timeouts.connect_s, self._opened, self._lost_at_dial)

    # The stream.

    def when_open(self, opened: Callable[[SimSendingLink | BatonError], None]) -> None:
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
        layout = self._facts.layout
        plans = reshard_layout(layout, self._tensor_parallel, welcome.tensor_parallel)
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
        for _, _, failed in queue:
            failed(self.lost_error())

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

    def acquire(self, holder: object, granted: Callable[[], None], failed: Callable[[BatonError], None]) -> None:
        """Calls `granted` once `holder` has the edges, or `failed` if the link is lost before."""
        if self._held:
            self._queue.append((holder, granted, failed))
        else:
            self._held = True
            granted()

    def release(self) -> None:
        if self._queue:
            _, granted, _ = self._queue.popleft()
            self._worker.soon(granted)
        else:
            self._held = False

    def withdraw(self, holder: object) -> None:
        self._queue = deque(entry for entry in self._queue if entry[0] is not holder)

    def open_edge(self, plan: EdgePlan, opened: Callable[[EdgeKey, BatonError | None], None]) -> None:
        generation = next(self._generations)

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
        edge = self.edges[plan.key] = SimEdge(generation)
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

    def _peer(self) -> tuple[SimWorker, Any] | None:
        if self._end is None:
            return None
        process = self._end.peer.process
        if not isinstance(process, SimWorker) or not isinstance(process.tier, DecodeTier):
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
            payload = self._engine.pack(part_of(chunk, plan, block_ids), plan)
            peer = self._peer()
            if peer is not None:
                process, link = peer
                process.receives(link.bytes_arrive, plan.key, edge.generation, payload)
            sent(None)

        def fail(reason: str) -> None:
            self.fail_edge(plan.key, reason)
            sent(HandoffError(reason))

        worker.later(world.costs.transfer_s(worker.name, self.name, chunk.num_bytes), arrive)
