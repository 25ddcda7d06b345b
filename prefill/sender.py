"""Executes hand-overs (`prefill.handover`): one coroutine per sequence, from just before its first chunk is computed
to the last acknowledgement, over one link to each decode worker.

A chunk is announced, packed while the peer opens its receive, and sent while the rest is packed; the next one computes
meanwhile. When all KV is acknowledged, or the hand-over has failed or was aborted, the pin on the blocks is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.edge_orders import part_of
from baton.core.errors import BatonError, HandoffError, InvariantError
from baton.core.events import HandedOver, Parked
from baton.core.handover import LinkHello, Posted
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.core.reshard import EdgeKey, EdgePlan
from baton.runtime.event_log import EventLog
from baton.runtime.streams import seen
from baton.runtime.tls import ClusterTls
from baton.transfer.edge_end import MakeEnd
from baton.transfer.staging_room import StagingRoom
from prefill.handover import (
    Action,
    Counters,
    Fail,
    Finish,
    FirstLayers,
    HandOver,
    Limits,
    OfferTo,
    Park,
    SendChunk,
    Span,
    Stage,
)
from prefill.link import Link

log = logging.getLogger("baton.handover")
STAGING_WAIT_S = 30.0


class SenderOwner(Protocol):
    """The callbacks into the worker that hand-overs need."""

    def parked(self, event: Parked) -> None: ...

    def handed_over(self, event: HandedOver, source: SequenceId) -> None: ...

    def hand_over_ended(self, sequence: SequenceId) -> None:
        """The sequence's blocks are not read any more."""
        ...

    def hand_over_failed(self, sequence: SequenceId, error: BatonError) -> None:
        """The hand-over failed, with no retry: its KV is damaged, or there is a bug. `hand_over_ended` follows."""
        ...

    def failed(self, error: InvariantError) -> None:
        """An invariant is violated: the worker must exit."""
        ...


@dataclass(slots=True, eq=False)
class _Run:
    """The execution of one hand-over. `origin` is the sequence id at its start, `sending` the task of its current
    chunk, and `holds_edges` whether that task uses the link's edges and must run to its end."""

    over: HandOver
    origin: SequenceId
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    assigned: asyncio.Event = field(default_factory=asyncio.Event)
    link: Link | None = None
    task: asyncio.Task[None] | None = None
    begun: bool = False
    sending: asyncio.Task[Span] | None = None
    holds_edges: bool = False


class Sender:
    """Complete state: the links by decode worker and incarnation, the tasks that close lost links, the hand-overs by
    the sequence id at their start, and the counters. `layout` is that of the whole model."""

    def __init__(
        self,
        owner: SenderOwner,
        layout: KVLayout,
        make_end: MakeEnd,
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
        self.counters = Counters()
        self._owner = owner
        self._make_end = make_end
        self._make_hello = make_hello
        self._events = event_log
        self._limits = Limits(layout, make_end.section_bytes, max_chunk_tokens, staging.limit_bytes)
        self._edge_timeout_s = edge_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[tuple[str, int], asyncio.Task[Link]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._runs: dict[SequenceId, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    # From the worker.

    def expect(self, request: GenerateRequest, targets: Sequence[Target]) -> None:
        """Registers a sequence that is handed over once it has blocks."""
        deadline_at = time.monotonic() + request.deadline_s
        over = HandOver(request, tuple(targets), deadline_at, self._limits, self.counters)
        self._runs[over.sequence] = _Run(over, over.sequence)

    def start(self, sequence: SequenceId, block_ids: tuple[int, ...]) -> None:
        """Starts the hand-over with an offer: the first chunk is about to be computed."""
        run = self._runs.get(sequence)
        if run is not None and run.task is None:
            run.task = asyncio.create_task(self._run(run, block_ids), name=f"hand-over {sequence}")

    def advance(
        self,
        sequence: SequenceId,
        computed: int,
        first_token: int | None,
        step: int,
        first_logprob: TokenLogprob | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Records that KV of the first `computed` positions is complete on every rank that has computed `step`."""
        run = self._runs.get(sequence)
        if run is not None:
            run.over.advance(computed, first_token, step)
            run.over.first_logprob, run.over.cached_tokens = first_logprob, cached_tokens
            run.progress.set()

    def reserve_s(self, sequence: SequenceId) -> float:
        run = self._runs.get(sequence)
        return 0.0 if run is None else run.over.reserve_s

    def advance_layers(self, sequence: SequenceId, end: int, layers: int) -> None:
        """Records that KV of the first `layers` layers is complete up to position `end`; only on a one-rank worker."""
        run = self._runs.get(sequence)
        if run is not None:
            run.over.first_layers = FirstLayers(end, layers)
            run.progress.set()

    def assign(self, sequence: SequenceId, targets: Sequence[Target], attempt: int) -> bool:
        """Assigns new targets to parked KV. Returns False if the sequence has no parked KV here."""
        run = self._runs.get(self.find(sequence) or sequence)
        if run is None or run.over.stage is not Stage.PARKED:
            return False
        run.over.assign(targets, attempt)
        run.assigned.set()
        return True

    def current_id(self, sequence: SequenceId) -> SequenceId:
        """Returns the sequence id under its current attempt, which `assign` may have raised."""
        run = self._runs.get(sequence)
        return sequence if run is None else run.over.sequence

    def find(self, sequence: SequenceId) -> SequenceId | None:
        """Returns the id at the start of the hand-over whose id then or now is `sequence`; None if there is none."""
        if sequence in self._runs:
            return sequence
        return next((origin for origin, run in self._runs.items() if run.over.sequence == sequence), None)

    def abort(self, sequence: SequenceId, reason: str) -> None:
        run = self._runs.get(sequence)
        if run is None or run.over.abort_reason is not None:
            return
        run.over.abort(reason)
        if run.task is not None:
            run.task.cancel()
        if run.sending is not None and not run.holds_edges:
            run.sending.cancel()  # nothing is posted yet: frees the link and the blocks without a wait
        if not run.begun:  # a task cancelled before it first runs never reaches its `finally`
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

    async def _run(self, run: _Run, block_ids: tuple[int, ...]) -> None:
        run.begun = True
        try:
            action = run.over.begin(block_ids)
            while not isinstance(action, Finish | Fail):
                action = await self._execute(run, action)
            if isinstance(action, Finish):
                self._owner.handed_over(action.event, source=run.origin)
            else:
                log.error("hand-over of %s failed: %s", run.origin, action.error.message)
                self._owner.hand_over_failed(run.origin, action.error)
        except asyncio.CancelledError:
            log.info("hand-over of %s aborted: %s", run.origin, run.over.abort_reason)
        except InvariantError as e:
            self._owner.failed(e)
        except Exception:
            log.exception("hand-over of %s failed", run.origin)
            self._owner.hand_over_failed(run.origin, BatonError("internal error in a KV hand-over"))
        finally:
            if run.sending is not None and not run.sending.done():
                if not run.holds_edges:
                    run.sending.cancel()
                # No timeout here, which would free blocks that are still read: each wait within a chunk has its own.
                await asyncio.wait({run.sending})
            del self._runs[run.origin]
            try:
                self._owner.hand_over_ended(run.origin)
            except InvariantError as e:
                self._owner.failed(e)

    async def _execute(self, run: _Run, action: Action) -> Action:
        over = run.over
        try:
            match action:
                case OfferTo(target):
                    return await self._offer(run, target)
                case SendChunk() if run.link is not None:
                    return over.acknowledged(await self._send(run, run.link, over.edges), time.monotonic())
                case Park(event):
                    log.warning("KV of %s is parked: %s", event.sequence, event.reason)
                    run.assigned.clear()
                    self._owner.parked(event)
                    await run.assigned.wait()  # ended by assign, abort, or the request's deadline
                    return over.reoffer()
        except asyncio.CancelledError:
            message = over.end(time.monotonic())
            if message is not None and run.link is not None:
                await run.link.abort(message)
            raise
        except BatonError as e:
            message, following = over.target_failed(e, time.monotonic())
            if run.link is not None:
                await run.link.abort(message)
            return following
        raise InvariantError(f"{action!r} cannot be executed")

    async def _offer(self, run: _Run, target: Target) -> Action:
        run.link = None
        run.link = link = await self._link(target)
        self._events.write("offer", sequence=run.over.sequence, to=target.worker_id)
        answer = await link.offer(run.over.offer(time.monotonic()), self._connect_timeout_s)
        return run.over.answered(answer, link.wire, time.monotonic())

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
                    self._make_end,
                    self._edge_timeout_s,
                    self._connect_timeout_s,
                    self._tls,
                ),
                name=f"dial {target.worker_id}",
            )
        return await asyncio.shield(self._links[key])

    # One chunk.

    async def _send(self, run: _Run, link: Link, edges: Sequence[EdgePlan]) -> dict[EdgeKey, bool]:
        """Sends the next chunk on `edges`; returns which arrived intact. Raises HandoffError if not acknowledged."""
        index = run.over.num_chunks
        acks = {plan.key: link.expect_ack(run.over.sequence, index, plan.key) for plan in edges}
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
            log.warning("chunk %d of %s arrived damaged at %s", index, run.over.sequence, link.decode_worker)
        return intact

    async def _when_computed(self, run: _Run, link: Link, edges: Sequence[EdgePlan]) -> Span:
        """Sends all KV that is computed by the time the edges are free as one chunk. It waits for both within this
        task, so that a chunk that need not wait is announced without another iteration of the event loop."""
        over = run.over
        while over.next_span() is None:
            run.progress.clear()
            await run.progress.wait()  # ended by the step loop, abort, or the request's deadline
        async with link.edge_lock:
            run.holds_edges = True
            await link.open_edges(edges)
            if over.abort_reason is not None:  # while this task could not be cancelled
                raise HandoffError(f"{over.sequence} was ended: {over.abort_reason}")
            span = over.next_span()
            if span is None:
                raise InvariantError(f"the computed KV of {over.sequence} is missing")
            needed = sum(link.wire.bytes_on(plan.key, span) for plan in edges)
            run.holds_edges = False
            async with self.staging.hold(needed, STAGING_WAIT_S):
                run.holds_edges = True  # to the end, even if the sequence is aborted
                over.begin_span(span)
                await self._send_on_edges(over, link, edges, span)
                return span

    async def _send_on_edges(self, over: HandOver, link: Link, edges: Sequence[EdgePlan], span: Span) -> None:
        noted = {"sequence": over.sequence, "index": span.index, "start": span.start, "end": span.end}
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
        end = link.ends[plan.key]
        chunk = over.chunk(plan, end.generation)
        begun = asyncio.Event()

        async def send(posted: Coroutine[Any, Any, Posted]) -> None:
            await posted
            await begun.wait()  # set once packing begins; if that fails, cancelled below
            await end.send()

        packing = sending = None
        try:
            # Announced before packing begins, which occupies the core: the peer's reply takes longest.
            posted = await link.announce(chunk, self._edge_timeout_s)
            sending = asyncio.create_task(send(posted), name=f"send {chunk.index}")
            part = part_of(chunk, plan, over.block_ids)
            packing = asyncio.create_task(end.fill(part, over.step, begun.set), name=f"pack {chunk.index}")
            await asyncio.wait({packing, sending}, return_when=asyncio.FIRST_EXCEPTION)
            await packing  # until it ends, even if the peer refuses meanwhile
            await sending
        except BaseException as e:
            if not (isinstance(e, HandoffError) and e.code is ErrorCode.PEER_ABORTED):
                end.abort(str(e) or type(e).__name__)  # the peer may have posted a receive, which must not wait forever
            end.drop()
            raise
        finally:
            for task in filter(None, (packing, sending)):
                task.cancel()
                task.add_done_callback(seen)
        over.chunk_sent(chunk.num_bytes)
        return chunk.num_bytes


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
