"""Executes hand-overs (`prefill.handover`): one coroutine per sequence, from just before its first chunk is computed
to the last acknowledgement, over one link to each decode worker.

A chunk is announced, packed while the peer opens its receive, and sent while the rest is packed; the next one computes
meanwhile. When all KV is acknowledged, or the hand-over has failed or was aborted, the pin on the blocks is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.edge_orders import part_of
from baton.core.errors import BatonError, HandoffError, InvariantError
from baton.core.events import HandedOver, Parked
from baton.core.handover import LinkHello, Posted
from baton.core.kv_layout import KVLayout
from baton.core.reshard import EdgeKey, EdgePlan
from baton.core.sequence import Sequence
from baton.runtime.event_log import EventLog
from baton.runtime.streams import seen
from baton.runtime.tls import ClusterTls
from baton.transfer.edge_endpoint import MakeEndpoint
from baton.transfer.staging_buffers import StagingRoom
from prefill.handover import (
    Aborted,
    Acknowledged,
    Action,
    Assigned,
    ChunkLimits,
    ChunkSpan,
    ComputeStarted,
    Connected,
    Dial,
    EdgeSent,
    Event,
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
from prefill.link import Link

log = logging.getLogger("baton.handover")
STAGING_WAIT_S = 30.0


class SenderOwner(Protocol):
    """The callbacks into the worker that hand-overs need."""

    def parked(self, event: Parked) -> None: ...

    def handed_over(self, event: HandedOver, sequence: Sequence) -> None: ...

    def hand_over_ended(self, sequence: Sequence) -> None:
        """The sequence's blocks are not read any more."""
        ...

    def hand_over_failed(self, sequence: Sequence, error: BatonError) -> None:
        """The hand-over failed, with no retry: its KV is damaged, or there is a bug. `hand_over_ended` follows."""
        ...

    def failed(self, error: InvariantError) -> None:
        """An invariant is violated: the worker must exit."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    """The execution of one hand-over."""

    over: HandOver
    # More KV may be ready to be sent.
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    # New targets were assigned, with these actions; or it was aborted, with those.
    assigned: asyncio.Event = field(default_factory=asyncio.Event)
    next_actions: list[Action] = field(default_factory=list)
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    started: bool = False
    # The task of the present chunk, and whether it uses the link's edges and must run to its end.
    sending: asyncio.Task[ChunkSpan] | None = None
    holds_edges: bool = False


class Sender:
    """Executes all hand-overs of a worker. `layout` is that of the whole model."""

    def __init__(
        self,
        owner: SenderOwner,
        layout: KVLayout,
        make_endpoint: MakeEndpoint,
        staging: StagingRoom,
        make_hello: Callable[[], LinkHello],
        event_log: EventLog,
        *,
        max_chunk_tokens: int,
        edge_timeout_s: float,
        connect_timeout_s: float,
        tls: ClusterTls | None = None,
    ) -> None:
        self._tls = tls
        self.staging = staging
        self.counters = SendCounters()
        self._owner = owner
        self._make_endpoint = make_endpoint
        self._make_hello = make_hello
        self._events = event_log
        self._limits = ChunkLimits(layout, make_endpoint.section_bytes, max_chunk_tokens, staging.limit_bytes)
        self._edge_timeout_s = edge_timeout_s
        self._connect_timeout_s = connect_timeout_s
        # By decode worker and incarnation.
        self._links: dict[tuple[str, int], asyncio.Task[Link]] = {}
        # The tasks that close lost links.
        self._closing: set[asyncio.Task[None]] = set()
        self._runs: dict[Sequence, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    # From the worker.

    def expect(self, sequence: Sequence, targets: Iterable[Target]) -> None:
        """Registers a sequence that is handed over once it has blocks."""
        deadline_at = time.monotonic() + sequence.request.deadline_s
        over = HandOver(sequence, tuple(targets), deadline_at, self._limits, self.counters)
        sequence.hand_over = over
        self._runs[sequence] = _Run(over)

    def start(self, sequence: Sequence) -> None:
        """Starts the hand-over with an offer: the first chunk is about to be computed."""
        run = self._runs.get(sequence)
        if run is not None and run.task is None:
            run.task = asyncio.create_task(self._run(run), name=f"hand-over {sequence.id}")

    def progressed(self, sequence: Sequence) -> None:
        """Called when more positions of a sequence are computed, on every rank that has computed their step."""
        run = self._runs.get(sequence)
        if run is not None:
            run.progress.set()

    def layers_computed(self, sequence: Sequence, end: int, layers: int) -> None:
        """Records that KV of the first `layers` layers is complete up to position `end`; only on a one-rank worker."""
        run = self._runs.get(sequence)
        if run is not None:
            run.over.on(LayersComputed(end, layers), time.monotonic())
            run.progress.set()

    def is_parked(self, sequence: Sequence) -> bool:
        """Whether the KV of a sequence waits for new targets."""
        run = self._runs.get(sequence)
        return run is not None and run.over.state is SendStage.PARKED

    def assign(self, sequence: Sequence, targets: Iterable[Target]) -> None:
        """Assigns new targets to parked KV, whose sequence has the attempt that they were named for."""
        run = self._runs[sequence]
        run.next_actions = run.over.on(Assigned(tuple(targets)), time.monotonic())
        run.assigned.set()

    def abort(self, sequence: Sequence, reason: str) -> None:
        run = self._runs.get(sequence)
        if run is None or run.over.state is SendStage.ENDED:
            return
        log.info("hand-over of %s aborted: %s", sequence.id, reason)
        run.next_actions = run.over.on(Aborted(reason), time.monotonic())
        if run.task is not None:
            run.task.cancel()
        if run.sending is not None and not run.holds_edges:
            run.sending.cancel()  # nothing is posted yet: frees the link and the blocks without a wait
        if not run.started:  # a task cancelled before it first runs never reaches its `finally`
            del self._runs[sequence]
            self._owner.hand_over_ended(sequence)

    async def close(self) -> None:
        for sequence in list(self._runs):
            self.abort(sequence, "the prefill worker is stopping")
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        for dialling in list(self._links.values()):
            if dialling.done() and not _failed(dialling):
                await dialling.result().close()
            dialling.cancel()
        self._links.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=5.0)

    # One hand-over.

    async def _run(self, run: _Run) -> None:
        run.started = True
        sequence = run.over.sequence
        try:
            await self._follow(run)
        except InvariantError as e:
            self._owner.failed(e)
        except Exception:
            log.exception("hand-over of %s failed", sequence.id)
            self._owner.hand_over_failed(sequence, BatonError("internal error in a KV hand-over"))
        finally:
            if run.sending is not None and not run.sending.done():
                if not run.holds_edges:
                    run.sending.cancel()
                # No timeout here, which would free blocks that are still read: each wait within a chunk has its own.
                await asyncio.wait({run.sending})
            if run.sending is not None and isinstance(error := _error(run.sending), InvariantError):
                self._owner.failed(error)  # after an abort nothing else reads it
            del self._runs[sequence]
            try:
                self._owner.hand_over_ended(sequence)
            except InvariantError as e:
                self._owner.failed(e)

    async def _follow(self, run: _Run) -> None:
        """Executes actions until none follows, or those of the abort that cancelled the task."""
        try:
            actions = run.over.on(ComputeStarted(), time.monotonic())
            while actions:
                following: list[Action] = []
                for action in actions:  # only the last one has an event that others follow
                    following = await self._perform(run, action)
                actions = following
        except asyncio.CancelledError:
            for action in run.next_actions:
                await self._perform(run, action)

    async def _perform(self, run: _Run, action: Action) -> list[Action]:
        """Executes an action and reports the event that ends it; returns the actions that follow."""
        over = run.over
        try:
            match action:
                case Dial(target):
                    run.link = None
                    run.link = await self._link(target)
                    event: Event = Connected(run.link.wire)
                case SendOffer(offer) if run.link is not None:
                    self._events.write("offer", sequence=offer.request.sequence_id, to=run.link.decode_worker)
                    event = await run.link.offer(offer, self._connect_timeout_s)
                case SendChunk() if run.link is not None:
                    event = Acknowledged(await self._send(run, run.link, over.edges))
                case SendAbort(message):
                    if run.link is not None:
                        await run.link.abort(message)
                    return []
                case ReportParked(parked):
                    log.warning("KV of %s is parked: %s", parked.sequence, parked.reason)
                    run.assigned.clear()
                    self._owner.parked(parked)
                    await run.assigned.wait()  # ended by assign, abort, or the request's deadline
                    following, run.next_actions = run.next_actions, []
                    return following
                case ReportHandedOver(handed_over):
                    self._owner.handed_over(handed_over, over.sequence)
                    return []
                case ReportFailed(error):
                    log.error("hand-over of %s failed: %s", over.sequence.id, error.message)
                    self._owner.hand_over_failed(over.sequence, error)
                    return []
                case _:
                    raise InvariantError(f"{over!r} has no link for {action!r}")
        except BatonError as e:
            event = TargetFailed(e)
        return over.on(event, time.monotonic())

    async def _link(self, target: Target) -> Link:
        """Returns the link to a target; concurrent callers share one dial."""
        key = (target.worker_id, target.incarnation)
        for old, dialling in list(self._links.items()):
            if dialling.done() and (_failed(dialling) or dialling.result().lost is not None):
                del self._links[old]  # before any await: another hand-over may call this meanwhile
                if not _failed(dialling):
                    self._closing.add(closing := asyncio.create_task(dialling.result().close(), name="link close"))
                    closing.add_done_callback(self._closing.discard)
        if key not in self._links:
            self._links[key] = asyncio.create_task(
                Link.dial(
                    target.link_address,
                    self._make_hello(),
                    self._make_endpoint,
                    self._edge_timeout_s,
                    self._connect_timeout_s,
                    self._tls,
                ),
                name=f"dial {target.worker_id}",
            )
        return await asyncio.shield(self._links[key])

    # One chunk.

    async def _send(self, run: _Run, link: Link, edges: tuple[EdgePlan, ...]) -> dict[EdgeKey, bool]:
        """Sends the next chunk on `edges`; returns which arrived intact. Raises HandoffError if not acknowledged."""
        index = run.over.num_chunks
        acks = {plan.key: link.expect_ack(run.over.sequence.id, index, plan.key) for plan in edges}
        try:
            # Shielded: once the receive is posted, the peer waits for these bytes even if the sequence is aborted.
            run.holds_edges = False
            run.sending = asyncio.create_task(self._when_computed(run, link, edges), name=f"chunk {index}")
            run.sending.add_done_callback(seen)  # after an abort it may never be awaited
            await asyncio.shield(run.sending)
            async with asyncio.timeout(self._edge_timeout_s):  # wait_for would lose a coinciding cancellation
                intact = {key: (await ack).ok for key, ack in acks.items()}
        except TimeoutError:
            raise HandoffError(
                f"{link.decode_worker} did not acknowledge chunk {index} within {self._edge_timeout_s:g} s"
            ) from None
        finally:
            for ack in acks.values():
                ack.cancel()
        if not all(intact.values()):
            log.warning("chunk %d of %s arrived damaged at %s", index, run.over.sequence.id, link.decode_worker)
        return intact

    async def _when_computed(self, run: _Run, link: Link, edges: tuple[EdgePlan, ...]) -> ChunkSpan:
        """Sends all KV that is computed by the time the edges are free as one chunk. It waits for both within this
        task, so that a chunk that need not wait is announced without another iteration of the event loop."""
        over = run.over
        while over.next_span() is None:
            run.progress.clear()
            await run.progress.wait()  # ended by the step loop, abort, or the request's deadline
        async with link.edge_lock:
            run.holds_edges = True
            await link.open_edges(edges)
            if over.state is SendStage.ENDED:  # while this task could not be cancelled
                raise HandoffError(f"the hand-over of {over.sequence.id} was aborted")
            span = over.next_span()
            if span is None:
                raise InvariantError(f"the computed KV of {over.sequence.id} is missing")
            needed = sum(link.wire.bytes_on(plan.key, span, over.window_start) for plan in edges)
            run.holds_edges = False
            async with self.staging.hold(needed, STAGING_WAIT_S):
                run.holds_edges = True  # to the end, even if the sequence is aborted
                over.on(SpanAnnounced(span), time.monotonic())
                await self._send_on_edges(over, link, edges, span)
                return span

    async def _send_on_edges(self, over: HandOver, link: Link, edges: tuple[EdgePlan, ...], span: ChunkSpan) -> None:
        noted = {"sequence": over.sequence.id, "index": span.index, "start": span.start, "end": span.end}
        noted["layers"] = (span.start_layer, span.end_layer)
        self._events.write("chunk_send", **noted, resend=over.sends - 1)
        if len(edges) == 1:
            total = await self._send_on_edge(over, link, edges[0])
        else:
            # Every edge is awaited even if another fails: a posted chunk is sent, or its edge is torn down.
            results = await asyncio.gather(
                *(self._send_on_edge(over, link, plan) for plan in edges), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            total = sum(result for result in results if isinstance(result, int))
        self._events.write("chunk_sent", **noted, bytes=total)

    async def _send_on_edge(self, over: HandOver, link: Link, plan: EdgePlan) -> int:
        """Sends the chunk on one edge; returns its size in bytes."""
        endpoint = link.endpoints[plan.key]
        chunk = over.chunk(plan, endpoint.generation)
        packing_began = asyncio.Event()

        async def send(posted: Coroutine[Any, Any, Posted]) -> None:
            await posted
            await packing_began.wait()  # set once packing begins; if that fails, cancelled below
            await endpoint.send()

        packing = sending = None
        try:
            # Announced before packing begins, which occupies the core: the peer's reply takes longest.
            posted = await link.announce(chunk, self._edge_timeout_s)
            sending = asyncio.create_task(send(posted), name=f"send {chunk.index}")
            part = part_of(chunk, plan, over.sequence.block_ids, over.window_start)
            fill = endpoint.fill(part, over.sequence.computed_step, packing_began.set)
            packing = asyncio.create_task(fill, name=f"pack {chunk.index}")
            await asyncio.wait({packing, sending}, return_when=asyncio.FIRST_EXCEPTION)
            await packing  # until it ends, even if the peer refuses meanwhile
            await sending
        except BaseException as e:
            if not (isinstance(e, HandoffError) and e.code is ErrorCode.PEER_ABORTED):
                endpoint.abort(
                    str(e) or type(e).__name__
                )  # the peer may have posted a receive, which must not wait forever
            endpoint.drop()
            raise
        finally:
            for task in filter(None, (packing, sending)):
                task.cancel()
                task.add_done_callback(seen)
        over.on(EdgeSent(chunk.num_bytes), time.monotonic())
        return chunk.num_bytes


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
