"""Handing KV over: one coroutine per sequence, from its first computed chunk to the last acknowledgement.

1. Offer the request to the first target while the first chunk computes; a refusal goes to the next one.
2. As KV becomes complete, send the new piece over all edges of the link (`prefill.pieces`); the next one computes
   meanwhile.
3. The last piece carries the first token. When decode has acknowledged all of it, the pin on the blocks is dropped.
4. When all targets refused, or the one that had accepted is lost, the KV stays parked until the coordinator names
   others (`assign`, under the next attempt), or the sequence is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from baton.core.commands import Target
from baton.core.errors import BatonError, InvariantError, KVCorrupt
from baton.core.events import HandedOver, Parked, StageStamps
from baton.core.handover import LinkHello, Offer, Refuse
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.event_log import EventLog
from baton.transfer.edge_end import MakeEnd
from baton.transfer.staging_room import StagingRoom
from prefill.link import Link
from prefill.pieces import FirstLayers, HandOver, PieceSender

log = logging.getLogger("baton.handover")


class OutgoingOwner(Protocol):
    """What hand-overs need of their worker."""

    def parked(self, event: Parked) -> None: ...

    def handed_over(self, event: HandedOver, source: SequenceId) -> None: ...

    def hand_over_ended(self, sequence: SequenceId) -> None:
        """Nobody reads the sequence's blocks any more."""
        ...

    def hand_over_failed(self, sequence: SequenceId, error: BatonError) -> None:
        """No other worker could do better (the KV is damaged here, or a bug of ours); `hand_over_ended` follows."""
        ...

    def failed(self, error: InvariantError) -> None:
        """an invariant does not hold: the worker must end."""
        ...


class Outgoing:
    """Complete state: the links by decode worker and incarnation, and the hand-overs by the sequence they began as."""

    def __init__(
        self,
        owner: OutgoingOwner,
        layout: KVLayout,
        make_end: MakeEnd,
        staging: StagingRoom,
        make_hello: Callable[[], LinkHello],
        event_log: EventLog,
        *,
        piece_tokens: int,
        edge_timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self._owner = owner
        self._make_end = make_end
        self._make_hello = make_hello
        self._events = event_log
        self._pieces = PieceSender(layout, staging, event_log, piece_tokens, make_end.section_bytes, edge_timeout_s)
        self._edge_timeout_s = edge_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[tuple[str, int], asyncio.Task[Link]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._hand_overs: dict[SequenceId, HandOver] = {}

    @property
    def bytes_sent(self) -> int:
        return self._pieces.bytes_sent

    @property
    def chunks_resent(self) -> int:
        return self._pieces.chunks_resent

    @property
    def chunks_early(self) -> int:
        """Last chunks whose first layers were sent while the others were computed."""
        return self._pieces.chunks_early

    def __len__(self) -> int:
        return len(self._hand_overs)

    def expect(self, request: GenerateRequest, targets: Sequence[Target]) -> None:
        """A sequence will be handed over once it has blocks."""
        deadline_at = time.monotonic() + request.deadline_s
        self._hand_overs[request.sequence_id] = HandOver(request, deadline_at, (), list(targets))

    def start(self, sequence: SequenceId, block_ids: tuple[int, ...]) -> None:
        """The first chunk is about to compute: offer."""
        over = self._hand_overs.get(sequence)
        if over is not None and over.task is None:
            over.block_ids = block_ids
            over.task = asyncio.create_task(self._run(over), name=f"hand-over {sequence}")

    def current_id(self, sequence: SequenceId) -> SequenceId:
        """The name under which a sequence is known now: `assign` may have raised its attempt."""
        over = self._hand_overs.get(sequence)
        return sequence if over is None else over.request.sequence_id

    def advance(
        self,
        sequence: SequenceId,
        computed: int,
        first_token: int | None,
        step: int,
        first_logprob: TokenLogprob | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """KV of the first `computed` positions is complete at every rank that has computed `step`."""
        over = self._hand_overs.get(sequence)
        if over is not None:
            over.computed, over.first_token, over.step = computed, first_token, step
            over.first_logprob, over.cached_tokens = first_logprob, cached_tokens
            over.progress.set()

    def advance_layers(self, sequence: SequenceId, end: int, layers: int) -> None:
        """KV of the first `layers` is complete up to position `end` as well: where this is the leader's alone."""
        over = self._hand_overs.get(sequence)
        if over is not None:
            over.first_layers = FirstLayers(end, layers)
            over.progress.set()

    def assign(self, sequence: SequenceId, targets: Sequence[Target], attempt: int) -> bool:
        """Names new targets for parked KV. False when it is not (or no longer) here."""
        over = self._hand_overs.get(self.find(sequence) or sequence)
        if over is None:
            return False
        over.request = replace(over.request, attempt=attempt)
        over.targets = list(targets)
        over.assigned.set()
        return True

    def find(self, sequence: SequenceId) -> SequenceId | None:
        """The sequence a hand-over began as, whichever of its attempts is asked for."""
        if sequence in self._hand_overs:
            return sequence
        for origin, over in self._hand_overs.items():
            if over.request.sequence_id == sequence:
                return origin
        return None

    def abort(self, sequence: SequenceId, reason: str) -> None:
        over = self._hand_overs.get(sequence)
        if over is None or over.abort_reason is not None:
            return
        over.abort_reason = reason
        if over.task is not None:
            over.task.cancel()
        if over.on_edge is not None and not over.holds_edge:
            over.on_edge.cancel()  # nothing is posted yet: others need not wait for it, nor its blocks for others
        if not over.begun:  # a task cancelled before its first step never runs, not even its `finally`
            del self._hand_overs[sequence]
            self._owner.hand_over_ended(sequence)

    async def close(self) -> None:
        for sequence in list(self._hand_overs):
            self.abort(sequence, "the prefill worker stops")
        tasks = [o.task for o in self._hand_overs.values() if o.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        for dialling in list(self._links.values()):
            if dialling.done() and not _failed(dialling):
                await dialling.result().close()
            dialling.cancel()
        self._links.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=5.0)

    async def _run(self, over: HandOver) -> None:
        origin, over.begun = over.request.sequence_id, True
        try:
            while not await self._try_targets(over, origin):
                over.assigned.clear()
                await over.assigned.wait()  # ended by assign, abort, or the request's deadline
        except asyncio.CancelledError:
            log.info("hand-over of %s aborted: %s", origin, over.abort_reason)
        except KVCorrupt as e:
            log.error("hand-over of %s failed: %s", origin, e.message)
            self._owner.hand_over_failed(origin, e)
        except InvariantError as e:
            self._owner.failed(e)
        except Exception:
            log.exception("hand-over of %s failed", origin)
            self._owner.hand_over_failed(origin, BatonError("internal error in a KV hand-over"))
        finally:
            if over.on_edge is not None and not over.on_edge.done():
                if not over.holds_edge:
                    over.on_edge.cancel()
                # No limit here, it would free blocks that are still read: each wait of a piece has its own.
                await asyncio.wait({over.on_edge})
            del self._hand_overs[origin]
            try:
                self._owner.hand_over_ended(origin)
            except InvariantError as e:
                self._owner.failed(e)

    async def _try_targets(self, over: HandOver, origin: SequenceId) -> bool:
        """True when a target has all KV; else the KV is parked and the coordinator was told."""
        reason = "no target named"
        for target in over.targets:
            accepted = False
            link: Link | None = None
            try:
                link = await self._link(target)
                offered = time.monotonic()
                self._events.write("offer", sequence=over.request.sequence_id, to=target.worker_id)
                num_tokens = over.request.num_prefill_tokens
                offer = Offer(replace(over.request, deadline_s=over.left_s), target.handle, num_tokens)
                answer = await link.offer(offer, self._connect_timeout_s)
                if isinstance(answer, Refuse):
                    reason = f"{target.worker_id} refused: {answer.message}"
                    continue
                accepted, over.bytes_sent = True, 0
                started = time.monotonic()
                await self._pieces.send_all(over, link, answer.prefix_tokens, num_tokens)
                stamps = StageStamps(reserve_s=started - offered, transfer_s=time.monotonic() - started)
                event = HandedOver(over.request.sequence_id, target.worker_id, over.bytes_sent, stamps)
                self._owner.handed_over(event, source=origin)
                return True
            except asyncio.CancelledError:
                if link is not None:
                    why = over.abort_reason or "aborted"
                    await link.abort(over.request.sequence_id, why, tombstone_s=over.left_s)
                raise
            except InvariantError:
                raise
            except BatonError as e:
                reason = f"{target.worker_id}: {e.message}"
                if link is not None:
                    await link.abort(over.request.sequence_id, reason, tombstone_s=over.left_s)
                if isinstance(e, KVCorrupt):
                    raise
                if accepted:  # it may have begun to decode: only another attempt may are rescheduled
                    break
        log.warning("KV of %s is parked: %s", over.request.sequence_id, reason)
        self._owner.parked(Parked(over.request.sequence_id, reason))
        return False

    async def _link(self, target: Target) -> Link:
        """The link to a target, dialled once however many sequences ask."""
        key = (target.worker_id, target.incarnation)
        for old, dialling in list(self._links.items()):
            if dialling.done() and (_failed(dialling) or dialling.result().lost is not None):
                del self._links[old]  # before any await: another hand-over may ask meanwhile
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
                ),
                name=f"dial {target.worker_id}",
            )
        return await asyncio.shield(self._links[key])


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None
