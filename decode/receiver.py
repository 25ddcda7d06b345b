"""Executes the decode side of hand-overs (`decode.handover`): one reader per link, one coroutine per announced chunk.

A link has an edge for each pair of ranks that share KV heads; every edge carries its own bytes of a chunk. They are
received into a staging buffer, whose receive is open before the chunk is posted, and never directly into the pool: a
late or wrong byte cannot reach a block. Each section is verified (checksum over identity and bytes) and scattered into
the blocks, by the rank that holds them, while later sections arrive.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from baton.core.codes import ErrorCode
from baton.core.errors import HandoffError, InvariantError
from baton.core.events import SequenceEnded
from baton.core.handover import (
    AbortTransfer,
    Chunk,
    EdgeOpen,
    EdgeReady,
    FromDecode,
    LinkHello,
    LinkWelcome,
    Offer,
    Ping,
    Refuse,
)
from baton.core.kv_layout import KVLayout
from baton.core.liveness import LEASE_CHECK_S, LINK_SILENCE_S, MAX_READ_GAP_S, ListeningClock
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, reshard_layout
from baton.runtime.event_log import EventLog
from baton.runtime.streams import LinkLost, MessageStream
from baton.transfer.edge import EdgeSpec, edge_connect_s
from baton.transfer.edge_endpoint import EdgeEndpoint, MakeEndpoint
from baton.transfer.staging_buffers import StagingRoom
from decode.admission import Admission, HandOvers
from decode.handover import (
    AbortedByPeer,
    Action,
    ChunkAnnounced,
    ChunkReceived,
    ChunkRejected,
    Dropped,
    Ended,
    EndedByCoordinator,
    Event,
    Peer,
    Ready,
    Receive,
    ReceiveFailed,
    Reply,
)

log = logging.getLogger("baton.receiver")
STAGING_WAIT_SHARE = 0.8  # of the peer's timeout for `posted`: the refusal arrives before the peer gives up its edge


class ReceiverOwner(Protocol):
    """The callbacks into the worker that links need."""

    def welcome(self, hello: LinkHello) -> LinkWelcome:
        """Raises JoinRefused if the two workers do not fit."""
        ...

    def admission(self) -> Admission: ...

    def ready(self, sequence: SequenceId) -> None: ...

    def dropped(self, sequence: SequenceId) -> None: ...

    def hand_over_ended(self, event: SequenceEnded) -> None: ...

    def failed(self, error: InvariantError) -> None:
        """An invariant is violated: the worker must exit."""
        ...


class Receiver:
    """All links into a decode worker. `layout` is that of the whole model."""

    def __init__(
        self,
        owner: ReceiverOwner,
        hand_overs: HandOvers,
        layout: KVLayout,
        make_endpoint: MakeEndpoint,
        staging: StagingRoom,
        events: EventLog,
        *,
        host: str,
        store_port: int,
        tensor_parallel: int,
        edge_timeout_s: float,
    ) -> None:
        self.owner = owner
        self.hand_overs = hand_overs
        self.layout = layout
        self.staging = staging
        self.events = events
        self.tensor_parallel = tensor_parallel
        self.edge_timeout_s = edge_timeout_s
        self._make_endpoint = make_endpoint
        self._host, self._store_port = host, store_port
        self._links: dict[Peer, ReceivingLink] = {}

    async def serve(self, stream: MessageStream, hello: LinkHello) -> None:
        """Serves one link until it ends."""
        peer = Peer(hello.prefill_worker, hello.prefill_incarnation, {})
        link = self._links[peer] = ReceivingLink(stream, hello, peer, self)
        try:
            await link.run()
        except InvariantError as e:
            self.owner.failed(e)
            raise
        finally:
            del self._links[peer]

    def end(self, sequence: SequenceId, reason: str) -> None:
        """Ends a sequence of this worker at the coordinator's request."""
        for action in self.hand_overs.on(EndedByCoordinator(sequence, reason), time.monotonic()):
            match action:
                case Reply(peer, message) if peer in self._links:
                    self._links[peer].reply_soon(message)
                case Dropped(_, reason):
                    self.events.write("transfer_ended", sequence=sequence, reason=reason)

    def make_endpoint(self, peer: Peer, key: EdgeKey, message: EdgeOpen) -> EdgeEndpoint:
        return self._make_endpoint(
            peer.plans[key],
            EdgeSpec(
                host=self._host,
                port=self._store_port,
                prefix=message.prefix,
                generation=message.generation,
                side="decode",
                connect_timeout_s=edge_connect_s(self._make_endpoint.kind, self.edge_timeout_s),
                operation_timeout_s=self.edge_timeout_s,
            ),
        )

    async def close(self) -> None:
        """Closes every edge; the streams end with the server that carries them."""
        await asyncio.gather(*(link.close_edges() for link in self._links.values()))


class ReceivingLink:
    """One link from one prefill worker."""

    def __init__(self, stream: MessageStream, hello: LinkHello, peer: Peer, receiver: Receiver) -> None:
        self._stream = stream
        self._hello = hello
        self._peer = peer
        self._receiver = receiver
        self._hand_overs = receiver.hand_overs
        self._edges: dict[EdgeKey, EdgeEndpoint] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reads, self._reading = 0, False

    async def run(self) -> None:
        """Serves the link until it ends, then ends the sequences whose KV has not arrived completely."""
        reason, receiver = "the link broke", self._receiver
        watch: asyncio.Task[None] | None = None
        try:
            await self._stream.send(receiver.owner.welcome(self._hello))
            plans = reshard_layout(receiver.layout, self._hello.tensor_parallel, receiver.tensor_parallel)
            self._peer.plans = {plan.key: plan for plan in plans}
            async with asyncio.timeout(None) as silence:
                watch = asyncio.create_task(self._watch(silence), name=f"silence of {self._hello.prefill_worker}")
                while (message := await self._receive()) is not None:
                    await self._on(message)
            reason = f"the link to {self._hello.prefill_worker} ended: {self._stream.ended}"
        except LinkLost as e:
            reason = e.message
        except TimeoutError:
            self._stream.end(reason := f"{self._hello.prefill_worker} was silent for {LINK_SILENCE_S:g} s")
        finally:
            if watch is not None:
                watch.cancel()
            for endpoint in self._edges.values():
                endpoint.abort(reason)
            await self._execute(self._hand_overs.on_link_ended(self._peer, reason, time.monotonic()))
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5.0)
            await self.close_edges()

    async def _receive(self) -> object | None:
        self._reads += 1
        self._reading = True
        try:
            return await self._stream.receive()
        finally:
            self._reading = False

    async def _watch(self, silence: asyncio.Timeout) -> None:
        """Ends a read that waits for LINK_SILENCE_S: a live prefill worker pings every second. After a stall of this
        process its messages wait unread (decision 0003)."""
        clock = ListeningClock(time.monotonic(), MAX_READ_GAP_S)
        since, reads = 0.0, -1
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            now = clock.advance(time.monotonic())
            if not self._reading or self._reads != reads:
                since, reads = now, self._reads
            elif now - since >= LINK_SILENCE_S:
                silence.reschedule(asyncio.get_running_loop().time())
                return

    async def close_edges(self) -> None:
        for endpoint in self._edges.values():
            endpoint.abort("the link is closed")
        await asyncio.gather(*(endpoint.close(timeout_s=2.0) for endpoint in self._edges.values()))

    async def _on(self, message: object) -> None:
        match message:
            case Ping():
                await self._send(message)
            case EdgeOpen():
                self._spawn(self._open_edge(message), "edge open")
            case Offer():
                await self._answer(message)
            case Chunk():
                self._spawn(self._receive_when_staged(message), f"chunk {message.index} of {message.sequence}")
            case AbortTransfer():
                await self._handle(AbortedByPeer(self._peer, message))
            case _:
                raise HandoffError(f"{self._hello.prefill_worker}: unexpected {type(message).__name__} on a link")

    async def _answer(self, offer: Offer) -> None:
        admission, now = self._receiver.owner.admission(), time.monotonic()
        try:
            await self._execute(self._hand_overs.on_offer(self._peer, offer, admission, now))
        except InvariantError:
            raise
        except Exception:  # an unforeseen error fails this offer only, not the others on this link
            log.exception("offer of %s failed", offer.request.sequence_id)
            message = "internal error handling an offer"
            await self._send(Refuse(offer.request.sequence_id, ErrorCode.INTERNAL_ERROR, message))

    async def _open_edge(self, message: EdgeOpen) -> None:
        key, error = (message.prefill_rank, message.decode_rank), ""
        if key not in self._peer.plans:
            error = f"no edge from prefill rank {message.prefill_rank} to decode rank {message.decode_rank}"
        else:
            if key in self._edges:
                self._edges[key].abort(f"replaced by generation {message.generation}")
            endpoint = self._edges[key] = self._receiver.make_endpoint(self._peer, key, message)
            try:
                await endpoint.connect()
            except HandoffError as e:
                error = e.message
        await self._send(EdgeReady(*key, message.generation, error))

    async def _receive_when_staged(self, chunk: Chunk) -> None:
        """Receives a chunk once staging has room for it; refuses it before the peer's wait for `posted` times out."""
        try:
            wait_s = STAGING_WAIT_SHARE * self._receiver.edge_timeout_s
            async with self._receiver.staging.hold(chunk.num_bytes, wait_s):
                await self._take(chunk)
        except HandoffError as e:
            await self._handle(ChunkRejected(self._peer, chunk.sequence, e.message))

    async def _take(self, chunk: Chunk) -> None:
        endpoint = self._edges.get((chunk.prefill_rank, chunk.decode_rank))
        edge_open = endpoint is not None and endpoint.dead is None and endpoint.generation == chunk.edge_generation
        actions = self._hand_overs.on(ChunkAnnounced(self._peer, chunk, edge_open), time.monotonic())
        match actions:
            case [Receive(part, posted)] if endpoint is not None:
                pass
            case _:
                await self._execute(actions)
                return
        try:
            intact = await endpoint.take(part, lambda: self.reply_soon(posted))
        except InvariantError:
            raise
        except Exception as e:
            if not isinstance(e, HandoffError):
                log.exception("receiving chunk %d of %s failed", chunk.index, chunk.sequence)
            await self._handle(ReceiveFailed(chunk, str(e) or type(e).__name__, edge_open=endpoint.dead is None))
        else:
            self._note(chunk, intact)
            await self._handle(ChunkReceived(chunk, intact))

    async def _handle(self, event: Event) -> None:
        await self._execute(self._hand_overs.on(event, time.monotonic()))

    def _note(self, chunk: Chunk, intact: bool) -> None:
        layers = (chunk.start_layer, chunk.end_layer)
        if not intact:
            log.warning("chunk %d of %s does not match its checksum", chunk.index, chunk.sequence)
        noted = {"sequence": chunk.sequence, "index": chunk.index, "end": chunk.end_token, "layers": layers}
        self._receiver.events.write("chunk_received", **noted, intact=intact)

    async def _execute(self, actions: Iterable[Action]) -> None:
        owner = self._receiver.owner
        for action in actions:
            match action:
                case Reply(_, message):
                    await self._send(message)
                case Ready(sequence):
                    owner.ready(sequence)
                    await asyncio.sleep(0)  # lets its first step begin before anything else is done
                case Dropped(sequence, reason):
                    self._receiver.events.write("transfer_ended", sequence=sequence, reason=reason)
                    owner.dropped(sequence)
                case Ended(event):
                    owner.hand_over_ended(event)

    def reply_soon(self, message: FromDecode) -> None:
        """Sends a message in a task of its own."""
        self._spawn(self._send(message), type(message).__name__)

    async def _send(self, message: FromDecode) -> None:
        """Sends a message in a task that is cancelled only with the link."""
        try:
            await self._stream.send_unshielded(message)
        except LinkLost as e:
            log.info("%s not sent: %s", type(message).__name__, e.message)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Handles the end of a spawned task, which is never awaited: an error is a bug and closes the link at least."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, InvariantError):
            self._receiver.owner.failed(error)
        elif error is not None:
            log.error("%s: %r", task.get_name(), error, exc_info=error)
            self._stream.end(f"internal error in {task.get_name()}")
