"""A hand-over into a decode worker, as it is decided: one state machine per sequence (baton.core.machine). Pure.

    ABSENT     the worker has no such sequence: it was not offered, was refused, or has left
    RECEIVING  its offer was accepted, and its blocks are reserved: chunks arrive
    CLOSING    it was given up while a chunk is still being written into its blocks
    RECEIVED   all its KV has arrived: the scheduler generates
    ENDED      it was given up, and nothing is being written; a step that computes it may be outstanding

1. An offer is checked (decode.admission). It reserves the blocks for its KV, or is refused with the reason.
   The reply states how many tokens are cached here already, in blocks that other sequences may share.
2. A chunk has to be the next one of its sequence on its edge. A receive is opened for it, and only then is it posted.
3. An intact chunk counts as received. The Ack reports whether it is intact; the peer resends a damaged one, once.
4. With the last chunk of every edge the sequence is ready to decode. An abort, the end of the link, or a failed edge
   ends it; its blocks are freed as soon as nothing is being written into them any more.

If an accepted hand-over is refused or ended here, the peer gets an abort with the first reason, but only after open
receives for it on other edges have ended: a chunk that was posted is still sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from baton.core.codes import ErrorCode
from baton.core.edge_orders import Part, part_of
from baton.core.errors import HandoffError, InvariantError
from baton.core.events import SequenceEnded
from baton.core.handover import (
    AbortTransfer,
    Accept,
    Ack,
    Chunk,
    EdgeReady,
    FromDecode,
    Posted,
)
from baton.core.kv_layout import KVLayout
from baton.core.machine import Table, handle, ignore, to
from baton.core.request import SequenceId, TokenLogprob
from baton.core.reshard import EdgeKey, EdgePlan
from baton.core.sequence import Sequence
from baton.core.window import Window


class ReceiveStage(Enum):
    ABSENT = "absent"
    RECEIVING = "receiving"
    CLOSING = "closing"
    RECEIVED = "received"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Peer:
    """A prefill worker at the other end of one link, and the edges from it."""

    worker_id: str
    incarnation: int
    plans: Mapping[EdgeKey, EdgePlan]


# Events.


@dataclass(frozen=True, slots=True)
class OfferAccepted:
    """The blocks of an offered sequence are reserved."""

    peer: Peer
    sequence: Sequence

    @property
    def sequence_id(self) -> SequenceId:
        return self.sequence.id


@dataclass(frozen=True, slots=True)
class ChunkAnnounced:
    peer: Peer
    chunk: Chunk
    # Whether its edge is open in the generation that the chunk names.
    edge_open: bool

    @property
    def sequence_id(self) -> SequenceId:
        return self.chunk.sequence


@dataclass(frozen=True, slots=True)
class ChunkRejected:
    """An announced chunk cannot be received here."""

    peer: Peer
    sequence_id: SequenceId
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """All bytes of a chunk have arrived; nothing of it is written any more. `intact`: every section matches its
    checksum."""

    chunk: Chunk
    intact: bool

    @property
    def sequence_id(self) -> SequenceId:
        return self.chunk.sequence


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The receive of a chunk failed; nothing of it is written any more."""

    chunk: Chunk
    error: str
    edge_open: bool

    @property
    def sequence_id(self) -> SequenceId:
        return self.chunk.sequence


@dataclass(frozen=True, slots=True)
class AbortedByPeer:
    peer: Peer
    message: AbortTransfer

    @property
    def sequence_id(self) -> SequenceId:
        return self.message.sequence


@dataclass(frozen=True, slots=True)
class LinkEnded:
    """The link over which the sequence arrives has ended."""

    sequence_id: SequenceId
    reason: str


@dataclass(frozen=True, slots=True)
class EndedByCoordinator:
    sequence_id: SequenceId
    reason: str


Event = (
    OfferAccepted
    | ChunkAnnounced
    | ChunkRejected
    | ChunkReceived
    | ReceiveFailed
    | AbortedByPeer
    | LinkEnded
    | EndedByCoordinator
)


# Actions that concern only what the worker knows of the sequence: `HandOvers` executes them.


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """KV of the first `num_tokens` positions, but not all, has arrived on every edge."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVComplete:
    """All KV has arrived, and the first token with it."""

    first_token: int
    first_logprob: TokenLogprob | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The sequence has ended. `writing`: its blocks are still being written into, until `WritesEnded`."""

    writing: bool


@dataclass(frozen=True, slots=True)
class WritesEnded:
    """Nothing is being written into the blocks of a sequence that was given up."""


@dataclass(frozen=True, slots=True)
class AbortedBeforeOffer:
    """Refuse an offer of the sequence for `tombstone_s` seconds."""

    tombstone_s: float


# Actions for the code that executes hand-overs (decode.receiver).


@dataclass(frozen=True, slots=True)
class Reply:
    peer: Peer
    message: FromDecode


@dataclass(frozen=True, slots=True)
class Receive:
    """Open a receive of `part`, then send `posted`; report ChunkReceived or ReceiveFailed."""

    part: Part
    posted: Posted


@dataclass(frozen=True, slots=True)
class Ready:
    """The sequence joins the next step."""

    sequence: SequenceId


@dataclass(frozen=True, slots=True)
class Dropped:
    """The hand-over was given up, and its sequence aborted."""

    sequence: SequenceId
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Report `event` to the coordinator."""

    event: SequenceEnded


OwnAction = TokensReceived | KVComplete | GivenUp | WritesEnded | AbortedBeforeOffer
Action = Reply | Receive | Ready | Dropped | Ended


@dataclass(frozen=True, slots=True)
class Destination:
    """This worker."""

    worker_id: str
    incarnation: int
    layout: KVLayout
    vocab_size: int


@dataclass(slots=True)
class ReceiveCounters:
    """Totals of one worker over all its hand-overs."""

    bytes_received: int = 0
    chunks_damaged: int = 0
    # Messages about another use of the sequence or edge that they name.
    stale_messages: int = 0
    handles_refused: int = 0


@dataclass(slots=True, eq=False)
class IncomingHandOver:
    """The hand-over of one sequence into this worker; without `sequence` and `peer` while the worker has none."""

    sequence_id: SequenceId
    destination: Destination
    counters: ReceiveCounters
    state: ReceiveStage = ReceiveStage.ABSENT
    sequence: Sequence | None = None
    # The other end of the link over which the KV arrives.
    peer: Peer | None = None
    # How many tokens have arrived on each edge.
    tokens_received: dict[EdgeKey, int] = field(default_factory=dict)
    # Where only first layers of further tokens have arrived, how far: (end_token, layers).
    layers_received: dict[EdgeKey, tuple[int, int]] = field(default_factory=dict)
    # Edges on which a chunk is being received.
    writing: set[EdgeKey] = field(default_factory=set)
    # Set once it has arrived on an edge.
    first_token: int | None = None
    # The first reason for which it was refused: sent once nothing is being written any more.
    refusal: str = ""

    def on(self, event: Event, now: float) -> list[OwnAction | Action]:
        """Handles an event. Raises InvariantError if TABLE does not list it for the present stage."""
        return handle(TABLE, self, event, now)

    def __repr__(self) -> str:
        return f"<IncomingHandOver {self.sequence_id} {self.state.value}, writing on {len(self.writing)} edges>"

    def _accepted(self, event: OfferAccepted, now: float) -> list[OwnAction | Action]:
        self.state, self.sequence, self.peer = ReceiveStage.RECEIVING, event.sequence, event.peer
        self.tokens_received = dict.fromkeys(event.peer.plans, event.sequence.prefix_tokens)
        return [Reply(event.peer, Accept(self.sequence_id, event.sequence.prefix_tokens))]

    # Chunks.

    def _announced(self, event: ChunkAnnounced, now: float) -> list[OwnAction | Action]:
        chunk, peer, key = event.chunk, event.peer, _edge(event.chunk)
        if peer is not self.peer or not event.edge_open:
            return self._announced_in_vain(event, now)
        try:
            self._check(chunk, peer.plans[key])
        except HandoffError as e:
            return self._give_up(e.message) + self._refuse(peer, e.message)
        self.writing.add(key)
        part = part_of(chunk, peer.plans[key], self._sequence.block_ids, self._window_start)
        return [Receive(part, Posted(chunk.sequence, chunk.index, chunk.edge_generation, *key))]

    def _announced_in_vain(self, event: ChunkAnnounced, now: float) -> list[OwnAction | Action]:
        """Rejects a chunk on a closed edge, or of a sequence that does not arrive (any more) from this peer."""
        closed: list[OwnAction | Action] = []
        reason = "the decode worker is not receiving the sequence"
        if not event.edge_open:
            self.counters.stale_messages += 1
            reason = f"edge generation {event.chunk.edge_generation} is closed"
            closed.append(_edge_closed(event.peer, event.chunk))
        return closed + self._rejected(ChunkRejected(event.peer, self.sequence_id, reason), now)

    def _rejected(self, event: ChunkRejected, now: float) -> list[OwnAction | Action]:
        """Gives up a sequence of which a chunk cannot be received. Its chunks on other edges, announced before the peer
        receives the refusal, end here too."""
        given_up = self.state is ReceiveStage.RECEIVING and event.peer is self.peer
        return (self._give_up(event.reason) if given_up else []) + self._refuse(event.peer, event.reason)

    def _received(self, event: ChunkReceived, now: float) -> list[OwnAction | Action]:
        chunk, key = event.chunk, _edge(event.chunk)
        self.writing.discard(key)
        self.counters.bytes_received += chunk.num_bytes
        actions: list[OwnAction | Action] = []
        if not event.intact:
            self.counters.chunks_damaged += 1
        else:
            self._record(chunk, key)
            tokens = min(self.tokens_received.values())
            if tokens < self._num_tokens:
                actions.append(TokensReceived(tokens))
            elif chunk.first_token is not None:
                self.state = ReceiveStage.RECEIVED
                actions.append(KVComplete(chunk.first_token, chunk.first_logprob, chunk.cached_tokens))
        complete = self.state is ReceiveStage.RECEIVED
        return [*actions, Reply(self._peer, Ack(chunk.sequence, chunk.index, event.intact, complete, *key))]

    def _received_in_vain(self, event: ChunkReceived, now: float) -> list[OwnAction | Action]:
        self.counters.bytes_received += event.chunk.num_bytes
        return self._write_ended(event.chunk, "the sequence has ended")

    def _receive_failed(self, event: ReceiveFailed, now: float) -> list[OwnAction | Action]:
        self.writing.discard(_edge(event.chunk))
        closed = [] if event.edge_open else [_edge_closed(self._peer, event.chunk)]
        return [*self._give_up(event.error), *closed, *self._refuse(self._peer, event.error)]

    def _receive_failed_in_vain(self, event: ReceiveFailed, now: float) -> list[OwnAction | Action]:
        closed = [] if event.edge_open else [_edge_closed(self._peer, event.chunk)]
        return [*closed, *self._write_ended(event.chunk, event.error)]

    def _write_ended(self, chunk: Chunk, reason: str) -> list[OwnAction | Action]:
        self.writing.discard(_edge(chunk))
        if self.writing:
            return self._refuse(self._peer, reason)
        self.state = ReceiveStage.ENDED
        return [WritesEnded(), *self._refuse(self._peer, reason)]

    # Ends.

    def _aborted(self, event: AbortedByPeer, now: float) -> list[OwnAction | Action]:
        """A prefill worker may end its own sequences, also over another link than the one that they arrived over."""
        return self._give_up(event.message.reason) if self._is_from_source(event) else []

    def _aborted_again(self, event: AbortedByPeer, now: float) -> list[OwnAction | Action]:
        self._is_from_source(event)
        return []

    def _aborted_after_kv(self, event: AbortedByPeer, now: float) -> list[OwnAction | Action]:
        """The prefill worker missed the last Ack, and may fail before it reports the end."""
        if not self._is_from_source(event):
            return []
        reason, actions = event.message.reason, self._give_up(event.message.reason)
        if self._sequence.ending is None:
            message = f"{self.destination.worker_id} ended the sequence: {reason}"
            actions.append(Ended(SequenceEnded(self.sequence_id, "error", ErrorCode.ABANDONED, message)))
        return actions

    def _aborted_before_offer(self, event: AbortedByPeer, now: float) -> list[OwnAction | Action]:
        return [AbortedBeforeOffer(event.message.tombstone_s)]

    def _link_ended(self, event: LinkEnded, now: float) -> list[OwnAction | Action]:
        message = f"{self.destination.worker_id} lost its KV source: {event.reason}"
        lost = Ended(SequenceEnded(self.sequence_id, "error", ErrorCode.WORKER_LOST, message))
        return [lost, *self._give_up(event.reason)]

    def _ended(self, event: EndedByCoordinator, now: float) -> list[OwnAction | Action]:
        """A peer that is still sending the KV gets an abort now, or once an open receive of it has ended."""
        abort = Reply(self._peer, AbortTransfer(self.sequence_id, event.reason, 0.0))
        return self._give_up(event.reason) + ([] if self.writing else [abort])

    def _ended_after_kv(self, event: EndedByCoordinator, now: float) -> list[OwnAction | Action]:
        return self._give_up(event.reason)[:1]

    def _give_up(self, reason: str) -> list[OwnAction | Action]:
        self.state = ReceiveStage.CLOSING if self.writing else ReceiveStage.ENDED
        return [GivenUp(bool(self.writing)), Dropped(self.sequence_id, reason)]

    def _refuse(self, peer: Peer, reason: str) -> list[OwnAction | Action]:
        """Returns the refusal for a peer; none yet if it is that of the sequence and chunks of it are being written."""
        if peer is self.peer:
            reason = self.refusal = self.refusal or reason
            if self.writing:
                return []
        return [Reply(peer, AbortTransfer(self.sequence_id, reason, 0.0))]

    def _is_from_source(self, event: AbortedByPeer) -> bool:
        if (event.peer.worker_id, event.peer.incarnation) == (self._peer.worker_id, self._peer.incarnation):
            return True
        self.counters.stale_messages += 1
        return False

    # What has arrived.

    def _check(self, chunk: Chunk, plan: EdgePlan) -> None:
        """Raises HandoffError unless this is the next chunk of the sequence on its edge, of the right size: tokens in
        order, and for each range of tokens its layers in order."""
        if plan.key in self.writing:  # it would be written after one that may be the last
            raise HandoffError(f"chunk {chunk.index} was announced before the previous one completed")
        layout, num_tokens, vocab_size = self.destination.layout, self._num_tokens, self.destination.vocab_size
        received, tokens, total = (
            self.tokens_received[plan.key],
            chunk.end_token - chunk.start_token,
            len(layout.layers),
        )
        if chunk.start_token != received or tokens < 1 or chunk.end_token > num_tokens:
            raise HandoffError(
                f"tokens [{chunk.start_token}, {chunk.end_token}) cannot follow {received} of {num_tokens}"
            )
        end, layers = self.layers_received.get(plan.key, (chunk.end_token, 0))
        if (chunk.end_token, chunk.start_layer) != (end, layers) or not layers < chunk.end_layer <= total:
            raise HandoffError(
                f"layers [{chunk.start_layer}, {chunk.end_layer}) of tokens up to {chunk.end_token} cannot follow"
                f" {layers} of {total} layers up to {end}"
            )
        carried = plan.of_layers(chunk.start_layer, chunk.end_layer)
        size = carried.num_bytes(layout, chunk.start_token, chunk.end_token, self._window_start)
        if chunk.num_bytes != size or not size:
            raise HandoffError(f"{chunk.num_bytes} bytes cannot be KV of {tokens} tokens")
        ends = chunk.end_token == num_tokens and chunk.end_layer == total
        if chunk.last != ends or (ends and chunk.first_token is None):
            raise HandoffError("the last chunk, and only it, must be marked last and carry the first token")
        if ends and chunk.first_token is not None and not 0 <= chunk.first_token < vocab_size:
            raise HandoffError(f"first token {chunk.first_token} is outside the vocabulary of {vocab_size}")
        if ends and self.first_token not in (None, chunk.first_token):
            raise HandoffError(f"first token {chunk.first_token} on this edge, {self.first_token} on another")

    def _record(self, chunk: Chunk, key: EdgeKey) -> None:
        """Records a chunk that is stored in the blocks intact."""
        if chunk.end_layer < len(self.destination.layout.layers):
            self.layers_received[key] = (chunk.end_token, chunk.end_layer)
            return
        self.layers_received.pop(key, None)
        self.tokens_received[key] = chunk.end_token
        if chunk.last:
            self.first_token = chunk.first_token

    @property
    def _sequence(self) -> Sequence:
        if self.sequence is None:
            raise InvariantError(f"{self!r} has no sequence")
        return self.sequence

    @property
    def _peer(self) -> Peer:
        if self.peer is None:
            raise InvariantError(f"{self!r} has no peer")
        return self.peer

    @property
    def _window_start(self) -> int:
        """The first position that is received of layers with a window."""
        return Window.of(self.destination.layout).first_position(self._num_tokens)

    @property
    def _num_tokens(self) -> int:
        """Tokens whose KV is handed over."""
        return self._sequence.request.num_prefill_tokens


def _edge(chunk: Chunk) -> EdgeKey:
    return chunk.prefill_rank, chunk.decode_rank


def _edge_closed(peer: Peer, chunk: Chunk) -> Reply:
    """Returns the message that the edge is closed: it may be only here, and the peer would announce more chunks."""
    error = f"edge generation {chunk.edge_generation} is closed"
    return Reply(peer, EdgeReady(chunk.prefill_rank, chunk.decode_rank, chunk.edge_generation, error))


TABLE: Table = {
    (ReceiveStage.ABSENT, OfferAccepted): to(IncomingHandOver._accepted, ReceiveStage.RECEIVING),
    # A peer may announce chunks, and abort, before it receives our refusal or abort.
    (ReceiveStage.ABSENT, ChunkAnnounced): to(IncomingHandOver._announced_in_vain),
    (ReceiveStage.ABSENT, ChunkRejected): to(IncomingHandOver._rejected),
    (ReceiveStage.ABSENT, AbortedByPeer): to(IncomingHandOver._aborted_before_offer),
    (ReceiveStage.RECEIVING, ChunkAnnounced): to(IncomingHandOver._announced, ReceiveStage.CLOSING, ReceiveStage.ENDED),
    (ReceiveStage.RECEIVING, ChunkRejected): to(IncomingHandOver._rejected, ReceiveStage.CLOSING, ReceiveStage.ENDED),
    (ReceiveStage.RECEIVING, ChunkReceived): to(IncomingHandOver._received, ReceiveStage.RECEIVED),
    (ReceiveStage.RECEIVING, ReceiveFailed): to(
        IncomingHandOver._receive_failed, ReceiveStage.CLOSING, ReceiveStage.ENDED
    ),
    (ReceiveStage.RECEIVING, AbortedByPeer): to(IncomingHandOver._aborted, ReceiveStage.CLOSING, ReceiveStage.ENDED),
    (ReceiveStage.RECEIVING, LinkEnded): to(IncomingHandOver._link_ended, ReceiveStage.CLOSING, ReceiveStage.ENDED),
    (ReceiveStage.RECEIVING, EndedByCoordinator): to(IncomingHandOver._ended, ReceiveStage.CLOSING, ReceiveStage.ENDED),
    # The refusal follows when the last receive has ended.
    (ReceiveStage.CLOSING, ChunkAnnounced): to(IncomingHandOver._announced_in_vain),
    (ReceiveStage.CLOSING, ChunkRejected): to(IncomingHandOver._rejected),
    (ReceiveStage.CLOSING, ChunkReceived): to(IncomingHandOver._received_in_vain, ReceiveStage.ENDED),
    (ReceiveStage.CLOSING, ReceiveFailed): to(IncomingHandOver._receive_failed_in_vain, ReceiveStage.ENDED),
    (ReceiveStage.CLOSING, AbortedByPeer): to(IncomingHandOver._aborted_again),
    (ReceiveStage.CLOSING, LinkEnded): to(ignore),
    (ReceiveStage.CLOSING, EndedByCoordinator): to(ignore),
    # The link and the peer may end, and the peer may have missed the last Ack.
    (ReceiveStage.RECEIVED, ChunkAnnounced): to(IncomingHandOver._announced_in_vain),
    (ReceiveStage.RECEIVED, ChunkRejected): to(IncomingHandOver._rejected),
    (ReceiveStage.RECEIVED, AbortedByPeer): to(IncomingHandOver._aborted_after_kv, ReceiveStage.ENDED),
    (ReceiveStage.RECEIVED, LinkEnded): to(ignore),
    (ReceiveStage.RECEIVED, EndedByCoordinator): to(IncomingHandOver._ended_after_kv, ReceiveStage.ENDED),
    (ReceiveStage.ENDED, ChunkAnnounced): to(IncomingHandOver._announced_in_vain),
    (ReceiveStage.ENDED, ChunkRejected): to(IncomingHandOver._rejected),
    (ReceiveStage.ENDED, AbortedByPeer): to(IncomingHandOver._aborted_again),
    (ReceiveStage.ENDED, LinkEnded): to(ignore),
    (ReceiveStage.ENDED, EndedByCoordinator): to(ignore),
}
