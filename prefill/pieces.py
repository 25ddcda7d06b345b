"""Sending the KV of one sequence over the edges of a link, piece by piece as it is computed.

A piece is a run of tokens. It goes over all edges of the link at once, on each its own heads: announced, packed while
the peer opens its receive, sent while the rest is packed. Each edge is acknowledged by itself, and where a checksum did
not match only that edge sends again. The next piece begins when all edges have acknowledged this one.

The last step's tokens go as two pieces where they are many bytes: the first layers while the others are computed, so
that at the end little is left to send (decision 0044). An edge is never held for layers that are not computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.core.commands import Target
from baton.core.edge_orders import Part
from baton.core.errors import HandoffError, InvariantError, KVCorrupt
from baton.core.handover import Chunk, Posted, chunk_identity
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, TokenLogprob
from baton.core.reshard import EdgePlan
from baton.core.sections import early_layers
from baton.event_log import EventLog
from baton.transfer.staging_room import StagingRoom
from prefill.edges import LinkEdges
from prefill.link import Link

log = logging.getLogger("baton.handover")
STAGING_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The KV of the first `layers` of positions up to `end` is complete; the step that computes it is not."""

    end: int
    layers: int


@dataclass(slots=True)
class HandOver:
    """One sequence on its way. `computed` (positions, complete once `step` is), `first_layers` of more of them and
    `first_token` are set by the step loop, the rest by the coroutine. `on_edge` is its piece under way, `holds_edge`
    whether that has had its turn."""

    request: GenerateRequest
    deadline_at: float
    block_ids: tuple[int, ...]
    targets: list[Target]
    computed: int = 0
    step: int = 0
    first_layers: FirstLayers | None = None
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    assigned: asyncio.Event = field(default_factory=asyncio.Event)
    abort_reason: str | None = None
    bytes_sent: int = 0
    task: asyncio.Task[None] | None = None
    begun: bool = False
    on_edge: asyncio.Task[_Piece] | None = None
    holds_edge: bool = False

    @property
    def left_s(self) -> float:
        return max(self.deadline_at - time.monotonic(), 0.001)


class PieceSender:
    """Complete state: what it counts. `layout` is the whole model's."""

    def __init__(
        self,
        layout: KVLayout,
        staging: StagingRoom,
        event_log: EventLog,
        piece_tokens: int,
        section_bytes: int,
        edge_timeout_s: float,
    ) -> None:
        self._layout = layout
        self._section_bytes = section_bytes
        self._staging = staging
        self._events = event_log
        self._piece_tokens = piece_tokens
        self._edge_timeout_s = edge_timeout_s
        self.bytes_sent = 0
        self.chunks_resent = 0
        self.chunks_early = 0  # pieces of first layers

    async def send_all(self, over: HandOver, link: Link, sent: int, total: int) -> None:
        """Sends tokens [sent, total) as they are computed, and returns when all are acknowledged.

        Raises:
            KVCorrupt: a chunk arrived damaged twice.
            BatonError: the hand-over failed otherwise; another target may do better.
        """
        if not 0 <= sent < total:
            raise HandoffError(f"{link.decode_worker} accepted {total} tokens and says that it holds {sent} of them")
        piece = _Piece(0, sent, 0, total, 0, 0)
        while piece.start < total:
            piece = await self._send_piece(over, link, piece)
            self.chunks_early += piece.end_layer < len(self._layout.layers)
            piece = piece.next(len(self._layout.layers))

    async def _send_piece(self, over: HandOver, link: Link, piece: _Piece) -> _Piece:
        """Sends one piece, and once more where its checksum did not match at the other end; returns what it was."""
        sequence, plans, index = over.request.sequence_id, list(link.edges.plans), piece.index
        for resend in range(2):
            acks = {plan: link.expect_ack(sequence, index, plan.key) for plan in plans}
            try:
                # Shielded: once posted, the peer waits for these bytes whatever becomes of the sequence.
                over.holds_edge = False
                over.on_edge = asyncio.create_task(
                    self._when_computed(over, link, plans, replace(piece, resend=resend)), name=f"piece {index}"
                )
                over.on_edge.add_done_callback(_seen)  # after an abort nobody may come to wait for it
                piece = await asyncio.shield(over.on_edge)
                async with asyncio.timeout(self._edge_timeout_s):  # wait_for would lose an abort that comes with it
                    plans = [plan for plan, ack in acks.items() if not (await ack).ok]
            except TimeoutError:
                raise HandoffError(
                    f"{link.decode_worker} did not acknowledge chunk {index} within {self._edge_timeout_s:g} s"
                ) from None
            finally:
                for ack in acks.values():
                    ack.cancel()
            if not plans:
                return piece
            self.chunks_resent += len(plans)
            log.warning("chunk %d of %s arrived damaged at %s", index, sequence, link.decode_worker)
        raise KVCorrupt(f"chunk {index} of {sequence} arrived damaged twice at {link.decode_worker}")

    async def _when_computed(self, over: HandOver, link: Link, plans: Sequence[EdgePlan], piece: _Piece) -> _Piece:
        """Waits here, where a piece that nobody is before is announced without another turn of the event loop."""
        while self._cut(over, link, piece) is None:
            over.progress.clear()
            await over.progress.wait()  # ended by the step loop, abort, or the request's deadline
        return await self._put_on_edges(over, link, plans, piece)

    async def _put_on_edges(self, over: HandOver, link: Link, plans: Sequence[EdgePlan], piece: _Piece) -> _Piece:
        """Sends one piece on the edges of `plans` and returns it. All that is computed by the time the edges are ours
        goes in one: behind a queue many small chunks become one."""
        async with link.edge_lock:
            over.holds_edge = True
            await link.edges.ready(plans)
            if over.abort_reason is not None:  # meanwhile, when nobody might cancel this
                raise HandoffError(f"{over.request.sequence_id} was ended: {over.abort_reason}")
            cut = self._cut(over, link, piece)
            if cut is None:
                raise InvariantError(f"what was computed of {over.request.sequence_id} is no longer there")
            needed = sum(cut.bytes_on(link.edges, plan) for plan in plans)
            over.holds_edge = False
            async with self._staging.hold(needed, STAGING_WAIT_S):
                over.holds_edge = True  # to the end, whatever becomes of the sequence
                return await self._send_on_edges(over, link, plans, cut)

    def _cut(self, over: HandOver, link: Link, piece: _Piece) -> _Piece | None:
        """As much of a piece as can go now; None: nothing."""
        layers, first = len(self._layout.layers), over.first_layers
        if piece.end:  # that it begins behind other layers of the same tokens, or goes again, has settled it
            return piece if piece.end <= over.computed or piece.end_layer < layers else None
        if over.computed > piece.start:
            end = min(over.computed, piece.start + self._most_tokens(link))
            return replace(piece, end=end, end_layer=layers)
        if first is None or not 0 < first.end - piece.start <= self._most_tokens(link):
            return None
        cut = replace(piece, end=first.end, end_layer=first.layers)
        sizes = [layer.bytes_per_token * (cut.end - cut.start) for layer in self._layout.layers]
        halves = (cut, cut.next(layers))
        if not early_layers(sizes, self._section_bytes):  # few bytes: a message more costs as much
            return None
        return cut if all(half.bytes_on(link.edges, plan) for half in halves for plan in link.edges.plans) else None

    def _most_tokens(self, link: Link) -> int:
        fit = link.edges.most_tokens(self._staging.quota.limit_bytes)
        if fit < 1:
            raise HandoffError(f"the KV of one token does not fit into staging memory, here or at {link.decode_worker}")
        return min(self._piece_tokens, fit)

    async def _send_on_edges(self, over: HandOver, link: Link, plans: Sequence[EdgePlan], piece: _Piece) -> _Piece:
        seen = {"sequence": over.request.sequence_id, "index": piece.index, "start": piece.start, "end": piece.end}
        seen["layers"] = (piece.start_layer, piece.end_layer)
        self._events.write("chunk_send", **seen, resend=piece.resend)
        if len(plans) == 1:
            total = await self._put_on_edge(over, link, plans[0], piece)
        else:
            # Each to its end, whatever becomes of the others: what was posted is sent, or its edge torn down.
            results = await asyncio.gather(
                *(self._put_on_edge(over, link, plan, piece) for plan in plans), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            total = sum(result for result in results if isinstance(result, int))
        self._events.write("chunk_sent", **seen, bytes=total)
        return piece

    async def _put_on_edge(self, over: HandOver, link: Link, plan: EdgePlan, piece: _Piece) -> int:
        """One edge's part of a piece; returns its bytes."""
        end = link.edges.ends[plan.key]
        last = piece.end == piece.total and piece.end_layer == len(self._layout.layers)
        chunk = Chunk(
            sequence=over.request.sequence_id,
            index=piece.index,
            start_token=piece.start,
            end_token=piece.end,
            start_layer=piece.start_layer,
            end_layer=piece.end_layer,
            num_bytes=piece.bytes_on(link.edges, plan),
            edge_generation=end.generation,
            prefill_rank=plan.prefill_rank,
            decode_rank=plan.decode_rank,
            first_token=over.first_token if last else None,
            first_logprob=over.first_logprob if last else None,
            cached_tokens=over.cached_tokens if last else 0,
            last=last,
            resend=piece.resend,
        )
        slices = plan.slices_of(piece.start_layer, piece.end_layer)
        part = Part(over.block_ids, piece.start, piece.end, chunk.num_bytes, chunk_identity(chunk), *slices)
        begun = asyncio.Event()

        async def send(posted: Coroutine[Any, Any, Posted]) -> None:
            await posted
            await begun.wait()  # ended by the packing, or below where it fails
            await end.send()

        packing = sending = None
        try:
            # Written before packing begins, which keeps the core busy: the peer's answer takes longest.
            posted = await link.announce(chunk, self._edge_timeout_s)
            sending = asyncio.create_task(send(posted), name=f"send {piece.index}")
            packing = asyncio.create_task(end.fill(part, over.step, begun.set), name=f"pack {piece.index}")
            await asyncio.wait({packing, sending}, return_when=asyncio.FIRST_EXCEPTION)
            await packing  # to its end, even where the peer refuses meanwhile
            await sending
        except BaseException as e:
            if not (isinstance(e, HandoffError) and e.code == "peer_aborted"):
                end.abort(str(e) or type(e).__name__)  # it may have posted: its receive must not wait for ever
            end.drop()
            raise
        finally:
            for task in filter(None, (packing, sending)):
                task.cancel()
                task.add_done_callback(_seen)
        over.bytes_sent += chunk.num_bytes
        self.bytes_sent += chunk.num_bytes
        return chunk.num_bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """Layers [start_layer, end_layer) of tokens [start, end) of `total`. `end` 0: how many tokens, and which layers, is
    seen when it is sent."""

    index: int
    start: int
    end: int
    total: int
    start_layer: int
    end_layer: int
    resend: int = 0

    def bytes_on(self, edges: LinkEdges, plan: EdgePlan) -> int:
        """What it has on one edge."""
        return edges.bytes_per_token(plan, self.start_layer, self.end_layer) * (self.end - self.start)

    def next(self, num_layers: int) -> _Piece:
        """What comes behind it: the other layers of the same tokens, if there are any, else other tokens."""
        if self.end_layer < num_layers:
            return _Piece(self.index + 1, self.start, self.end, self.total, self.end_layer, num_layers)
        return _Piece(self.index + 1, self.end, 0, self.total, 0, 0)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
