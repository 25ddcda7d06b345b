"""Taking KV in over one link, one coroutine per announced chunk. A link has an edge for each pair of ranks that share
KV heads; every edge brings its own chunks of a sequence.

1. An offer is checked (handle, tombstone) and reserves all blocks of the sequence, or is refused with the reason. The
   answer says how much of the sequence is here already, in blocks that others may share: only the rest is sent.
2. A chunk is posted, while the peer packs it: a receive into a staging buffer of our own is open before we say so. The
   peer's bytes never go into the pool directly, so a late or wrong byte cannot touch a block.
3. Each section that arrived is verified (checksum over identity and bytes) and scattered into the blocks, by the rank
   that has them, while others still come; with the last of them the chunk is acknowledged.
4. With the last chunk of every edge the sequence is ready. An abort, the end of the link, or an edge that fails ends
   it; its blocks are free as soon as no scatter into them is under way at any rank.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from baton.core.edge_orders import Part
from baton.core.errors import BatonError, HandoffError, InvariantError
from baton.core.handover import (
    AbortTransfer,
    Accept,
    Ack,
    Chunk,
    EdgeOpen,
    EdgeReady,
    FromDecode,
    LinkHello,
    LinkWelcome,
    Offer,
    Ping,
    Posted,
    Refuse,
    chunk_identity,
)
from baton.core.request import SequenceId, TokenLogprob
from baton.core.reshard import EdgeKey, EdgePlan
from baton.rpc.streams import LinkLost, MessageStream
from baton.transfer.edge_end import EdgeEnd
from decode.entry import Reserved
from decode.transfer_state import Transfer

if TYPE_CHECKING:
    from decode.incoming import Incoming

log = logging.getLogger("baton.incoming")
SILENCE_S = 4.0


class IncomingOwner(Protocol):
    """What links need of their worker."""

    def welcome(self, hello: LinkHello) -> LinkWelcome:
        """Raises JoinRefused or LayoutMismatch when the two workers do not fit."""
        ...

    def reserve(self, offer: Offer, hello: LinkHello) -> Reserved:
        """Raises BatonError with the reason to refuse."""
        ...

    def receiving(self, sequence: SequenceId) -> bool: ...

    def knows(self, sequence: SequenceId) -> bool: ...

    def landed(self, sequence: SequenceId, num_tokens: int) -> None: ...

    def received(self, sequence: SequenceId, first_token: int, logprob: TokenLogprob | None, cached: int) -> None: ...

    def transfer_lost(self, sequence: SequenceId, reason: str) -> None:
        """The link broke before all KV had arrived."""
        ...

    def transfer_aborted(self, sequence: SequenceId, reason: str, tombstone_s: float) -> None: ...

    def write_ended(self, sequence: SequenceId) -> None:
        """No scatter into the blocks of the sequence is under way any more."""
        ...

    def failed(self, error: InvariantError) -> None:
        """A bug of ours: the worker must end."""
        ...


class IncomingLink:
    """One link from one prefill worker. Complete state: the stream, the ends of its edges, the transfers that came over
    it, and the refusals that wait for what is posted to end."""

    def __init__(self, stream: MessageStream, hello: LinkHello, owner: IncomingOwner, incoming: Incoming) -> None:
        self._stream = stream
        self._hello = hello
        self._owner = owner
        self._incoming = incoming
        self._source = (hello.prefill_worker, hello.prefill_incarnation)
        self._plans: dict[EdgeKey, EdgePlan] = {}
        self._edges: dict[EdgeKey, EdgeEnd] = {}
        self._transfers: dict[SequenceId, Transfer] = {}
        self._refusals: dict[SequenceId, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves the link to its end, then ends what had not arrived completely."""
        reason = "the link broke"
        try:
            await self._stream.send(self._owner.welcome(self._hello))
            self._plans = self._incoming.plans(self._hello)
            while (message := await self._receive()) is not None:
                await self._on(message)
            reason = f"the link to {self._hello.prefill_worker} ended: {self._stream.ended}"
        except LinkLost as e:
            reason = e.message
        except TimeoutError:
            self._stream.end(reason := f"{self._hello.prefill_worker} was silent for {SILENCE_S:g} s")
        finally:
            for end in self._edges.values():
                end.abort(reason)
            for sequence in list(self._transfers):
                del self._transfers[sequence]
                self._owner.transfer_lost(sequence, reason)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5.0)
            await self.close_edges()

    async def _receive(self) -> object | None:
        """The next message; a prefill worker that lives pings every second."""
        async with asyncio.timeout(SILENCE_S):
            return await self._stream.receive()

    async def close_edges(self) -> None:
        for end in self._edges.values():
            end.abort("the link is closed")
        await asyncio.gather(*(end.close(timeout_s=2.0) for end in self._edges.values()))

    async def _on(self, message: object) -> None:
        match message:
            case Ping():
                await self._send(message)
            case EdgeOpen():
                self._spawn(self._open_edge(message), "edge open")
            case Offer():
                await self._send(self._answer(message))
            case Chunk():
                self._spawn(self._take_in_turn(message), f"chunk {message.index} of {message.sequence}")
            case AbortTransfer(sequence, reason, tombstone_s):
                if self._incoming.may_end(sequence, self._source):
                    self._give_up(sequence, reason, tombstone_s)
            case _:
                raise HandoffError(f"{self._hello.prefill_worker} sent {type(message).__name__} on a link")

    def _answer(self, offer: Offer) -> Accept | Refuse:
        sequence = offer.request.sequence_id
        try:
            reserved = self._owner.reserve(offer, self._hello)
        except InvariantError:
            raise
        except BatonError as e:
            return Refuse(sequence, e.code, e.message)
        except Exception:  # of an offer that nobody thought of: it costs itself, not the others on this link
            log.exception("offer of %s", sequence)
            return Refuse(sequence, "internal_error", "internal error at an offer")
        self._incoming.taken(sequence, self._source)
        arrived = dict.fromkeys(self._plans, reserved.prefix_tokens)
        self._transfers[sequence] = Transfer(reserved.blocks, offer.num_tokens, self._incoming.vocab_size, arrived)
        return Accept(sequence, reserved.prefix_tokens, reserved.generations)

    async def _open_edge(self, message: EdgeOpen) -> None:
        key = (message.prefill_rank, message.decode_rank)
        error, plan = "", self._plans.get(key)
        if plan is None:
            error = f"no KV goes from rank {message.prefill_rank} to rank {message.decode_rank}"
        else:
            if key in self._edges:
                self._edges[key].abort(f"replaced by generation {message.generation}")
            end = self._edges[key] = self._incoming.make_end(plan, message)
            try:
                await end.connect()
            except HandoffError as e:
                error = e.message
        await self._send(EdgeReady(*key, message.generation, error))

    async def _take_in_turn(self, chunk: Chunk) -> None:
        """Takes a chunk in when there is room for its bytes; the peer waits for `posted` no longer than the limit."""
        try:
            async with self._incoming.staging.hold(chunk.num_bytes, self._incoming.staging_wait_s):
                await self._take(chunk)
        except HandoffError as e:
            if chunk.sequence in self._transfers:
                self._give_up(chunk.sequence, e.message, tombstone_s=0.0)
            await self._refuse(chunk.sequence, e.message)

    async def _take(self, chunk: Chunk) -> None:
        """Receives, verifies and stores one chunk."""
        sequence, key = chunk.sequence, (chunk.prefill_rank, chunk.decode_rank)
        end, transfer = self._edges.get(key), self._transfers.get(sequence)
        try:
            if end is None or end.dead is not None or end.generation != chunk.edge_generation:
                self._incoming.stale_messages += 1
                await self._edge_ended(chunk)
                raise HandoffError(f"edge generation {chunk.edge_generation} is closed")
            if transfer is None or not self._owner.receiving(sequence):
                raise HandoffError("the sequence is not being received here")
            transfer.check(chunk, self._plans[key], self._incoming.layout)
        except HandoffError as e:
            if transfer is not None:  # its chunks on other edges, announced before the peer hears of this, end here too
                self._give_up(sequence, e.message, tombstone_s=0.0)
            await self._refuse(sequence, e.message)
            return
        posted = Posted(sequence, chunk.index, end.generation, *key)
        tokens, layers = (chunk.start_token, chunk.end_token), (chunk.start_layer, chunk.end_layer)
        slices = self._plans[key].slices_of(*layers)
        part = Part(transfer.blocks, *tokens, chunk.num_bytes, chunk_identity(chunk), *slices)
        intact, failure, writing = False, "", self._incoming.writing
        writing[sequence] += 1
        transfer.under_way.add(key)
        try:
            intact = await end.take(part, lambda: self._spawn(self._send(posted, spawned=True), "posted"))
            self._incoming.bytes_received += chunk.num_bytes
        except InvariantError:
            raise
        except Exception as e:
            if not isinstance(e, HandoffError):
                log.exception("chunk %d of %s", chunk.index, sequence)
            failure = str(e)
            self._give_up(sequence, failure, tombstone_s=0.0)
            if end.dead is not None:
                await self._edge_ended(chunk)
        finally:
            transfer.under_way.discard(key)
            writing[sequence] -= 1
            if not writing[sequence]:
                del writing[sequence]
                self._owner.write_ended(sequence)
        if failure or not self._owner.receiving(sequence):
            await self._refuse(sequence, failure or "it was ended here")
            return
        if sequence in self._refusals:
            await self._refuse(sequence, "another edge refused its part")
            return
        if intact:
            transfer.take_in(chunk, key, self._incoming.layout)
        else:
            log.warning("chunk %d of %s does not match its checksum", chunk.index, sequence)
            self._incoming.chunks_damaged += 1
        complete = intact and transfer.complete
        self._incoming.events.write(
            "chunk_received", sequence=sequence, index=chunk.index, end=chunk.end_token, layers=layers, intact=intact
        )
        if complete and chunk.first_token is not None:
            self._transfers.pop(sequence, None)
            self._owner.received(sequence, chunk.first_token, chunk.first_logprob, chunk.cached_tokens)
            await asyncio.sleep(0)  # its first step begins before anything else is done
        elif intact:
            self._owner.landed(sequence, transfer.landed)
        await self._send(Ack(sequence, chunk.index, intact, complete, *key))

    async def _refuse(self, sequence: SequenceId, reason: str) -> None:
        """Ends the hand-over at the peer, with the first reason; where receives are open for it on other edges, when
        these have ended: what was posted is still sent."""
        reason = self._refusals.setdefault(sequence, reason)
        if sequence not in self._incoming.writing:
            del self._refusals[sequence]
            await self._send(AbortTransfer(sequence, reason, 0.0))

    async def _edge_ended(self, chunk: Chunk) -> None:
        """An edge ends at one end only now and then: the other must hear of it, or it would go on announcing."""
        error = f"generation {chunk.edge_generation} has ended here"
        await self._send(EdgeReady(chunk.prefill_rank, chunk.decode_rank, chunk.edge_generation, error))

    def _give_up(self, sequence: SequenceId, reason: str, tombstone_s: float) -> None:
        self._transfers.pop(sequence, None)
        self._owner.transfer_aborted(sequence, reason, tombstone_s)

    def abort(self, sequence: SequenceId, reason: str) -> None:
        """This side ends a sequence whose KV is still coming. The peer hears of it now, or where a receive is open
        for it, when that has ended: what was posted is still sent."""
        if self._transfers.pop(sequence, None) is not None and sequence not in self._incoming.writing:
            self._spawn(self._send(AbortTransfer(sequence, reason, 0.0)), "abort")

    async def _send(self, message: FromDecode, *, spawned: bool = False) -> None:
        """`spawned`: in a task that nobody cancels."""
        try:
            await (self._stream.send_to_the_end(message) if spawned else self._stream.send(message))
        except LinkLost as e:
            log.info("%s not sent: %s", type(message).__name__, e.message)

    def _spawn(self, work: object, name: str) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody waits for what was spawned: an error that got this far is a bug, and costs the link at least."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, InvariantError):
            self._owner.failed(error)
        elif error is not None:
            log.error("%s: %r", task.get_name(), error, exc_info=error)
            self._stream.end(f"internal error in {task.get_name()}")
