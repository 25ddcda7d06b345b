"""Sending the KV of one sequence over the edges of a link, piece by piece as it is computed.

A piece is a run of tokens. It goes over all edges of the link at once, on each its own heads: announced, packed while
the peer opens its receive, sent while the rest is packed. Each edge is acknowledged by itself, and where a checksum did
not match only that edge sends again. The next piece begins when all edges have acknowledged this one.
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
from baton.core.errors import HandoffError, KVCorrupt
from baton.core.handover import Chunk, Posted, chunk_identity
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, TokenLogprob
from baton.core.reshard import EdgePlan
from baton.event_log import EventLog
from baton.transfer.staging_room import StagingRoom
from prefill.link import Link

log = logging.getLogger("baton.handover")
STAGING_WAIT_S = 30.0


@dataclass(slots=True)
class HandOver:
    """One sequence on its way. `computed` (positions, complete once `step` is) and `first_token` are set by the step
    loop, the rest by the coroutine. `on_edge` is its piece under way, `holds_edge` whether that has had its turn."""

    request: GenerateRequest
    deadline_at: float
    block_ids: tuple[int, ...]
    targets: list[Target]
    computed: int = 0
    step: int = 0
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    assigned: asyncio.Event = field(default_factory=asyncio.Event)
    abort_reason: str | None = None
    bytes_sent: int = 0
    task: asyncio.Task[None] | None = None
    begun: bool = False
    on_edge: asyncio.Task[int] | None = None
    holds_edge: bool = False

    @property
    def left_s(self) -> float:
        return max(self.deadline_at - time.monotonic(), 0.001)


class PieceSender:
    """Complete state: what it counts. `layout` is the whole model's."""

    def __init__(
        self, layout: KVLayout, staging: StagingRoom, event_log: EventLog, piece_tokens: int, edge_timeout_s: float
    ) -> None:
        self._layout = layout
        self._staging = staging
        self._events = event_log
        self._piece_tokens = piece_tokens
        self._edge_timeout_s = edge_timeout_s
        self.bytes_sent = 0
        self.chunks_resent = 0

    async def send_all(self, over: HandOver, link: Link, sent: int, total: int) -> None:
        """Sends tokens [sent, total) as they are computed, and returns when all are acknowledged.

        Raises:
            KVCorrupt: a chunk arrived damaged twice.
            BatonError: the hand-over failed otherwise; another target may do better.
        """
        if not 0 <= sent < total:
            raise HandoffError(f"{link.decode_worker} accepted {total} tokens and says that it holds {sent} of them")
        index = 0
        while sent < total:
            sent = await self._send_piece(over, link, index, sent, total)
            index += 1

    async def _send_piece(self, over: HandOver, link: Link, index: int, start: int, total: int) -> int:
        """Sends one piece, and once more where its checksum did not match at the other end; returns its end."""
        sequence, plans, end = over.request.sequence_id, list(link.edges.plans), 0
        for resend in range(2):
            acks = {plan: link.expect_ack(sequence, index, plan.key) for plan in plans}
            try:
                # Shielded: once posted, the peer waits for these bytes whatever becomes of the sequence.
                over.holds_edge = False
                over.on_edge = asyncio.create_task(
                    self._when_computed(over, link, plans, _Piece(index, start, end, total, resend)),
                    name=f"piece {index}",
                )
                over.on_edge.add_done_callback(_seen)  # after an abort nobody may come to wait for it
                end = await asyncio.shield(over.on_edge)
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
                return end
            self.chunks_resent += len(plans)
            log.warning("chunk %d of %s arrived damaged at %s", index, sequence, link.decode_worker)
        raise KVCorrupt(f"chunk {index} of {sequence} arrived damaged twice at {link.decode_worker}")

    async def _when_computed(self, over: HandOver, link: Link, plans: Sequence[EdgePlan], piece: _Piece) -> int:
        """Waits here, where a piece that nobody is before is announced without another turn of the event loop."""
        while over.computed <= piece.start:
            over.progress.clear()
            await over.progress.wait()  # ended by the step loop, abort, or the request's deadline
        return await self._put_on_edges(over, link, plans, piece)

    async def _put_on_edges(self, over: HandOver, link: Link, plans: Sequence[EdgePlan], piece: _Piece) -> int:
        """Sends one piece on the edges of `plans` and returns its end. Where that is 0, all that is computed by the
        time the edges are ours goes in one piece: behind a queue many small chunks become one."""
        async with link.edge_lock:
            over.holds_edge = True
            await link.edges.ready(plans)
            if not piece.end:
                piece = replace(piece, end=min(over.computed, piece.start + self._most_tokens(link)))
            needed = sum(plan.bytes_per_token(self._layout) for plan in plans) * (piece.end - piece.start)
            over.holds_edge = False
            async with self._staging.hold(needed, STAGING_WAIT_S):
                over.holds_edge = True  # to the end, whatever becomes of the sequence
                return await self._send_on_edges(over, link, plans, piece)

    def _most_tokens(self, link: Link) -> int:
        fit = link.edges.most_tokens(self._layout, self._staging.quota.limit_bytes)
        if fit < 1:
            raise HandoffError(f"the KV of one token does not fit into staging memory, here or at {link.decode_worker}")
        return min(self._piece_tokens, fit)

    async def _send_on_edges(self, over: HandOver, link: Link, plans: Sequence[EdgePlan], piece: _Piece) -> int:
        seen = {"sequence": over.request.sequence_id, "index": piece.index, "start": piece.start, "end": piece.end}
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
        return piece.end

    async def _put_on_edge(self, over: HandOver, link: Link, plan: EdgePlan, piece: _Piece) -> int:
        """One edge's part of a piece; returns its bytes."""
        end = link.edges.ends[plan.key]
        last = piece.end == piece.total
        chunk = Chunk(
            sequence=over.request.sequence_id,
            index=piece.index,
            start_token=piece.start,
            end_token=piece.end,
            start_layer=0,
            end_layer=len(self._layout.layers),
            num_bytes=plan.bytes_per_token(self._layout) * (piece.end - piece.start),
            edge_generation=end.generation,
            prefill_rank=plan.prefill_rank,
            decode_rank=plan.decode_rank,
            first_token=over.first_token if last else None,
            first_logprob=over.first_logprob if last else None,
            cached_tokens=over.cached_tokens if last else 0,
            last=last,
            resend=piece.resend,
        )
        part = Part(over.block_ids, piece.start, piece.end, chunk.num_bytes, chunk_identity(chunk))
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
    """Tokens [start, end) of `total`; `end` 0 means: as many as there are when it is sent."""

    index: int
    start: int
    end: int
    total: int
    resend: int


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
