"""Taking KV in: one handler per link, one coroutine per announced chunk.

1. An offer is checked (handle, tombstone) and reserves all blocks of the sequence, or is refused with the reason.
2. A chunk is posted: a receive into a staging buffer of our own is open before we say so. The peer's bytes never go
   into the pool directly, so a late or wrong byte cannot touch a block.
3. What arrived is verified (checksum over identity and bytes), scattered into the blocks, and acknowledged.
4. With the last chunk the sequence is ready. An abort, the end of the link, or a damaged chunk ends it; its blocks are
   free as soon as no scatter into them is under way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from baton.core.errors import BatonError, HandoffError
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
from baton.core.kv_layout import KVLayout
from baton.core.request import SequenceId
from baton.event_log import EventLog
from baton.rpc.streams import LinkLost, MessageStream
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.staging import checksum, chunk_bytes, unpack

log = logging.getLogger("baton.incoming")


class IncomingOwner(Protocol):
    """What links need of their worker."""

    def welcome(self, hello: LinkHello) -> LinkWelcome:
        """Raises JoinRefused or LayoutMismatch when the two workers do not fit."""
        ...

    def reserve(self, offer: Offer, hello: LinkHello) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Blocks of the sequence and their generations; raises BatonError with the reason to refuse."""
        ...

    def receiving(self, sequence: SequenceId) -> bool: ...

    def received(self, sequence: SequenceId, first_token: int) -> None: ...

    def transfer_lost(self, sequence: SequenceId, reason: str) -> None:
        """The link broke before all KV had arrived."""
        ...

    def transfer_aborted(self, sequence: SequenceId, reason: str, tombstone_s: float) -> None: ...

    def write_ended(self, sequence: SequenceId) -> None:
        """No scatter into the blocks of the sequence is under way any more."""
        ...


@dataclass(frozen=True, slots=True)
class KVSink:
    layout: KVLayout
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True, eq=False)
class _Transfer:
    """A sequence on its way in; `arrived` tokens are here. Its blocks are written under `lock`, and not once it is
    `closed`: the thread of an edge that was torn down may still run."""

    blocks: tuple[int, ...]
    num_tokens: int
    arrived: int = 0
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class IncomingLink:
    """One link from one prefill worker. Complete state: the stream, the edge, and the transfers that came over it."""

    def __init__(
        self, stream: MessageStream, hello: LinkHello, owner: IncomingOwner, incoming: Incoming, sink: KVSink
    ) -> None:
        self._stream = stream
        self._hello = hello
        self._owner = owner
        self._incoming = incoming
        self._sink = sink
        self._edge: EdgeWorker | None = None
        self._transfers: dict[SequenceId, _Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serves the link to its end, then ends what had not arrived completely."""
        reason = "the link broke"
        try:
            await self._stream.send(self._owner.welcome(self._hello))
            while (message := await self._stream.receive()) is not None:
                await self._on(message)
            reason = f"the link to {self._hello.prefill_worker} ended: {self._stream.ended}"
        except LinkLost as e:
            reason = e.message
        finally:
            if self._edge is not None:
                self._edge.abort(reason)
            for sequence in list(self._transfers):
                del self._transfers[sequence]
                self._owner.transfer_lost(sequence, reason)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5.0)
            await self.close_edge()

    async def close_edge(self) -> None:
        if self._edge is not None:
            self._edge.abort("the link is closed")
            await self._edge.close(timeout_s=2.0)

    async def _on(self, message: object) -> None:
        match message:
            case Ping():
                await self._send(message)
            case EdgeOpen():
                self._spawn(self._open_edge(message), "edge open")
            case Offer():
                await self._send(self._answer(message))
            case Chunk():
                self._spawn(self._take(message), f"chunk {message.index} of {message.sequence}")
            case AbortTransfer(sequence, reason, tombstone_s):
                self._give_up(sequence, reason, tombstone_s)
            case _:
                raise HandoffError(f"{self._hello.prefill_worker} sent {type(message).__name__} on a link")

    def _answer(self, offer: Offer) -> Accept | Refuse:
        sequence = offer.request.sequence_id
        try:
            blocks, generations = self._owner.reserve(offer, self._hello)
        except BatonError as e:
            return Refuse(sequence, e.code, e.message)
        self._transfers[sequence] = _Transfer(blocks, offer.num_tokens)
        return Accept(sequence, 0, generations)

    async def _open_edge(self, message: EdgeOpen) -> None:
        if self._edge is not None:
            self._edge.abort(f"replaced by generation {message.generation}")
        edge = self._incoming.make_edge(message)
        self._edge = edge
        error = ""
        try:
            await edge.connect()
        except HandoffError as e:
            error = e.message
        await self._send(EdgeReady(message.prefill_rank, message.decode_rank, message.generation, error))

    async def _take(self, chunk: Chunk) -> None:
        """Receives, verifies and scatters one chunk."""
        sequence, edge = chunk.sequence, self._edge
        transfer = self._transfers.get(sequence)
        try:
            if edge is None or edge.dead is not None or edge.generation != chunk.edge_generation:
                self._incoming.stale_messages += 1
                await self._edge_ended(chunk)
                raise HandoffError(f"edge generation {chunk.edge_generation} does not stand")
            if transfer is None or not self._owner.receiving(sequence):
                raise HandoffError("the sequence is not being received here")
            self._check(chunk, transfer)
        except HandoffError as e:
            await self._send(AbortTransfer(sequence, e.message, 0.0))
            return
        buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8)
        posted = Posted(sequence, chunk.index, edge.generation, chunk.prefill_rank, chunk.decode_rank)
        self._incoming.writing.add(sequence)
        try:
            await edge.recv(buffer, on_posted=lambda: self._spawn(self._send(posted), "posted"))
            self._incoming.bytes_received += chunk.num_bytes
            intact = await edge.run(lambda: self._store(chunk, buffer, transfer))
        except Exception as e:
            if not isinstance(e, HandoffError):
                log.exception("chunk %d of %s", chunk.index, sequence)
            with transfer.lock:  # the edge's thread may still be at it, whatever became of the edge
                transfer.closed = True
            self._give_up(sequence, str(e), tombstone_s=0.0)
            if edge.dead is not None:
                await self._edge_ended(chunk)
            await self._send(AbortTransfer(sequence, str(e), 0.0))
            return
        finally:
            self._incoming.writing.discard(sequence)
            self._owner.write_ended(sequence)
        if not self._owner.receiving(sequence):
            await self._send(AbortTransfer(sequence, "it was ended here", 0.0))
            return
        if intact:
            transfer.arrived = chunk.end_token
        else:
            log.warning("chunk %d of %s does not match its checksum", chunk.index, sequence)
            self._incoming.chunks_damaged += 1
        complete = intact and chunk.last
        self._incoming.events.write("chunk_received", sequence=sequence, index=chunk.index, end=chunk.end_token)
        if complete and chunk.first_token is not None:
            self._transfers.pop(sequence, None)
            self._owner.received(sequence, chunk.first_token)
        await self._send(Ack(sequence, chunk.index, intact, complete))

    def _check(self, chunk: Chunk, transfer: _Transfer) -> None:
        """Raises HandoffError unless this is the next part of the sequence, whole and of the right size."""
        layout = self._sink.layout
        if chunk.start_token != transfer.arrived or not chunk.start_token < chunk.end_token <= transfer.num_tokens:
            raise HandoffError(
                f"tokens [{chunk.start_token}, {chunk.end_token}) cannot follow {transfer.arrived} of"
                f" {transfer.num_tokens}"
            )
        if (chunk.start_layer, chunk.end_layer) != (0, len(layout.layers)):
            raise HandoffError(f"layers [{chunk.start_layer}, {chunk.end_layer}) are not all {len(layout.layers)}")
        if chunk.num_bytes != chunk_bytes(layout, chunk.end_token - chunk.start_token):
            raise HandoffError(f"{chunk.num_bytes} bytes cannot be KV of {chunk.end_token - chunk.start_token} tokens")
        ends = chunk.end_token == transfer.num_tokens
        if chunk.last != ends or (ends and chunk.first_token is None):
            raise HandoffError("the last chunk, and only it, carries the end and the first token")

    def _store(self, chunk: Chunk, buffer: torch.Tensor, transfer: _Transfer) -> bool:
        """On the edge's thread: verifies, and scatters what is intact and still wanted."""
        if checksum(chunk_identity(chunk), buffer) != chunk.checksum:
            return False
        with transfer.lock:
            if not transfer.closed and self._owner.receiving(chunk.sequence):
                layers, block_size = self._sink.layers, self._sink.layout.block_size
                arrived = buffer.to(layers[0][0].device)
                unpack(arrived, layers, transfer.blocks, block_size, chunk.start_token, chunk.end_token)
        return True

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

    async def _send(self, message: FromDecode) -> None:
        try:
            await self._stream.send(message)
        except LinkLost as e:
            log.info("%s not sent: %s", type(message).__name__, e.message)

    def _spawn(self, work: object, name: str) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Incoming:
    """All links into a decode worker, and what they count."""

    def __init__(
        self, owner: IncomingOwner, sink: KVSink, events: EventLog, *, host: str, store_port: int, edge_timeout_s: float
    ) -> None:
        self._owner = owner
        self._sink = sink
        self._host = host
        self._store_port = store_port
        self._edge_timeout_s = edge_timeout_s
        self._links: set[IncomingLink] = set()
        self.events = events
        self.writing: set[SequenceId] = set()
        self.bytes_received = 0
        self.chunks_damaged = 0
        self.stale_messages = 0

    async def handle(self, stream: MessageStream, hello: LinkHello) -> None:
        link = IncomingLink(stream, hello, self._owner, self, self._sink)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)

    def abort(self, sequence: SequenceId, reason: str) -> None:
        for link in self._links:
            link.abort(sequence, reason)

    async def close(self) -> None:
        """Ends every edge; the streams end with the server that carries them."""
        await asyncio.gather(*(link.close_edge() for link in self._links))

    def make_edge(self, message: EdgeOpen) -> EdgeWorker:
        return EdgeWorker(
            EdgeSpec(
                host=self._host,
                port=self._store_port,
                prefix=message.prefix,
                generation=message.generation,
                side="decode",
                bind_host=self._host,
                connect_timeout_s=self._edge_timeout_s,
                operation_timeout_s=self._edge_timeout_s,
            )
        )
