"""Every hand-over into a decode worker, as it is decided. Pure: messages of peers and `now` in, actions out.

1. An offer is checked (handle, tombstone, limits). It reserves the blocks for its KV, or is refused with the reason.
   The reply states how many tokens are cached here already, in blocks that other sequences may share.
2. A chunk has to be the next one of its sequence on its edge. A receive is opened for it, and only then is it posted.
3. An intact chunk counts as arrived. The Ack reports whether it is intact; the peer resends a damaged one, once.
4. With the last chunk of every edge the sequence is ready to decode. An abort, the end of the link, or a failed edge
   ends it; its blocks are freed as soon as nothing is being written into them any more.

If an accepted hand-over is refused or ended here, the peer gets an abort with the first reason, but only after open
receives for it on other edges have ended: a chunk that was posted is still sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baton.core.codes import ErrorCode
from baton.core.deadlines import Deadlines, Tombstones
from baton.core.edge_orders import Part, part_of
from baton.core.errors import BatonError, HandoffError, StaleHandle, Unavailable
from baton.core.events import SequenceEnded
from baton.core.handles import SpentHandles, verify
from baton.core.handover import AbortTransfer, Accept, Ack, Chunk, EdgeReady, FromDecode, Offer, Posted, Refuse
from baton.core.kv_layout import KVLayout
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, EdgePlan
from baton.core.sampling_limits import check_sampling, check_tokens
from decode.scheduler import DecodeScheduler


@dataclass(slots=True, eq=False)
class Transfer:
    """A sequence being received into its `blocks`. `arrived`: per edge, how many tokens have arrived. `begun`: if only
    first layers of further tokens have arrived, how far: (end_token, layers). A chunk is being received on the edges
    `under_way`. `first_token`, below `vocab_size`, is set once it has arrived."""

    blocks: tuple[int, ...]
    num_tokens: int
    vocab_size: int
    arrived: dict[EdgeKey, int]
    begun: dict[EdgeKey, tuple[int, int]] = field(default_factory=dict)
    first_token: int | None = None
    under_way: set[EdgeKey] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return all(tokens == self.num_tokens for tokens in self.arrived.values())

    @property
    def tokens_received(self) -> int:
        """Tokens that have arrived on every edge."""
        return min(self.arrived.values())

    def check(self, chunk: Chunk, plan: EdgePlan, layout: KVLayout) -> None:
        """Raises HandoffError unless this is the next chunk of the sequence on its edge, of the right size: tokens in
        order, and for each range of tokens its layers in order."""
        if plan.key in self.under_way:  # it would be written after one that may be the last
            raise HandoffError(f"chunk {chunk.index} was announced before the previous one completed")
        arrived, tokens, total = self.arrived[plan.key], chunk.end_token - chunk.start_token, len(layout.layers)
        if chunk.start_token != arrived or tokens < 1 or chunk.end_token > self.num_tokens:
            raise HandoffError(
                f"tokens [{chunk.start_token}, {chunk.end_token}) cannot follow {arrived} of {self.num_tokens}"
            )
        end, layers = self.begun.get(plan.key, (chunk.end_token, 0))
        if (chunk.end_token, chunk.start_layer) != (end, layers) or not layers < chunk.end_layer <= total:
            raise HandoffError(
                f"layers [{chunk.start_layer}, {chunk.end_layer}) of tokens up to {chunk.end_token} cannot follow"
                f" {layers} of {total} layers up to {end}"
            )
        size = plan.of_layers(chunk.start_layer, chunk.end_layer).bytes_per_token(layout) * tokens
        if chunk.num_bytes != size or not size:
            raise HandoffError(f"{chunk.num_bytes} bytes cannot be KV of {tokens} tokens")
        ends = chunk.end_token == self.num_tokens and chunk.end_layer == total
        if chunk.last != ends or (ends and chunk.first_token is None):
            raise HandoffError("the last chunk, and only it, must be marked last and carry the first token")
        if ends and chunk.first_token is not None and not 0 <= chunk.first_token < self.vocab_size:
            raise HandoffError(f"first token {chunk.first_token} is outside the vocabulary of {self.vocab_size}")
        if ends and self.first_token not in (None, chunk.first_token):
            raise HandoffError(f"first token {chunk.first_token} on this edge, {self.first_token} on another")

    def record_chunk(self, chunk: Chunk, key: EdgeKey, layout: KVLayout) -> None:
        """Records a chunk that is stored in the blocks intact."""
        if chunk.end_layer < len(layout.layers):
            self.begun[key] = (chunk.end_token, chunk.end_layer)
            return
        self.begun.pop(key, None)
        self.arrived[key] = chunk.end_token
        if chunk.last:
            self.first_token = chunk.first_token


@dataclass(slots=True, eq=False)
class Peer:
    """A prefill worker at the other end of one link: the edges from it, the transfers that arrive over this link, and
    the refusals that are delayed until open receives have ended."""

    worker_id: str
    incarnation: int
    plans: Mapping[EdgeKey, EdgePlan]
    transfers: dict[SequenceId, Transfer] = field(default_factory=dict)
    refusals: dict[SequenceId, str] = field(default_factory=dict)


# Actions.


@dataclass(frozen=True, slots=True)
class Reply:
    peer: Peer
    message: FromDecode


@dataclass(frozen=True, slots=True)
class Receive:
    """Open a receive of `part`, then send `posted`; report `write_ended`, then `received` or `receive_failed`."""

    part: Part
    posted: Posted


@dataclass(frozen=True, slots=True)
class Ready:
    """All KV of the sequence has arrived."""

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


Action = Reply | Receive | Ready | Dropped | Ended


@dataclass(frozen=True, slots=True)
class Admission:
    """What an offer is checked against: the run's handle key, the run's clock, and whether this worker drains."""

    handle_key: bytes
    run_clock_ms: float
    draining: bool = False


@dataclass(eq=False)
class HandOvers:
    """Complete state: the number of chunks being received into the blocks of each sequence (`writing`), the prefill
    worker that offered each sequence (name and incarnation), the used handles, and the counters. The scheduler,
    deadlines and tombstones belong to the worker."""

    scheduler: DecodeScheduler
    deadlines: Deadlines
    tombstones: Tombstones
    worker_id: str
    incarnation: int
    vocab_size: int
    _sources: dict[SequenceId, tuple[str, int]] = field(default_factory=dict)
    _spent: SpentHandles = field(default_factory=SpentHandles)
    writing: Counter[SequenceId] = field(default_factory=Counter)
    bytes_received: int = 0
    chunks_damaged: int = 0
    stale_messages: int = 0
    handles_refused: int = 0

    # From a peer.

    def on_offer(self, peer: Peer, offer: Offer, admission: Admission, now: float) -> Accept | Refuse:
        sequence = offer.request.sequence_id
        try:
            blocks = self.reserve(peer, offer, admission, now)
        except BatonError as e:
            return Refuse(sequence, e.tier_code, e.message)
        # Drops the sequences that have ended.
        self._sources = {s: source for s, source in self._sources.items() if self.scheduler.has_sequence(s)}
        self._sources[sequence] = (peer.worker_id, peer.incarnation)
        cached = self.scheduler.sequences[sequence].prefix_tokens
        arrived = dict.fromkeys(peer.plans, cached)
        peer.transfers[sequence] = Transfer(blocks, offer.num_tokens, self.vocab_size, arrived)
        return Accept(sequence, cached)

    def reserve(self, peer: Peer, offer: Offer, admission: Admission, now: float) -> tuple[int, ...]:
        """Checks an offer and reserves its blocks. Raises BatonError with the reason for a refusal."""
        request, sequence = offer.request, offer.request.sequence_id
        try:
            verify(
                admission.handle_key,
                offer.handle,
                sequence=sequence,
                source=peer.worker_id,
                source_incarnation=peer.incarnation,
                destination=self.worker_id,
                incarnation=self.incarnation,
                now_ms=admission.run_clock_ms,
            )
            self._spent.spend(offer.handle, admission.run_clock_ms)
        except StaleHandle:
            self.handles_refused += 1
            raise
        if self.tombstones.covers(sequence, now):
            raise Unavailable("the sequence was aborted", code=ErrorCode.ABORTED)
        if admission.draining:
            raise Unavailable("this decode worker is draining", code=ErrorCode.DRAINING)
        if offer.num_tokens != request.num_prefill_tokens:
            raise Unavailable(f"the offer has {offer.num_tokens} tokens, its request {request.num_prefill_tokens}")
        check_tokens(request, self.vocab_size)
        check_sampling(request.sampling, request.max_tokens, self.vocab_size)
        reserved = self.scheduler.reserve(request, now)
        self.deadlines.add(sequence, now + request.deadline_s)
        return reserved.block_ids

    def on_chunk(self, peer: Peer, chunk: Chunk, now: float, *, edge_open: bool) -> list[Action]:
        """Handles an announced chunk. `edge_open`: its edge is open in the generation that the chunk names."""
        sequence, key = chunk.sequence, (chunk.prefill_rank, chunk.decode_rank)
        transfer = peer.transfers.get(sequence)
        actions: list[Action] = []
        try:
            if not edge_open:
                self.stale_messages += 1
                actions.append(_edge_closed(peer, chunk))
                raise HandoffError(f"edge generation {chunk.edge_generation} is closed")
            if transfer is None or not self.scheduler.receiving(sequence):
                raise HandoffError("the decode worker is not receiving the sequence")
            transfer.check(chunk, peer.plans[key], self.scheduler.layout)
        except HandoffError as e:
            return actions + self.refused(peer, sequence, e.message, now)
        self.writing[sequence] += 1
        transfer.under_way.add(key)
        part = part_of(chunk, peer.plans[key], transfer.blocks)
        return [Receive(part, Posted(sequence, chunk.index, chunk.edge_generation, *key))]

    def refused(self, peer: Peer, sequence: SequenceId, reason: str, now: float) -> list[Action]:
        """Gives up a sequence of which a chunk cannot be received. Its chunks on other edges, announced before the peer
        receives the refusal, end here too."""
        actions = self._give_up(peer, sequence, reason, now) if sequence in peer.transfers else []
        return actions + self._refuse(peer, sequence, reason)

    def on_abort(self, peer: Peer, message: AbortTransfer, now: float) -> list[Action]:
        """Handles an abort. A prefill worker may end its own sequences, and those that are not here (yet)."""
        sequence = message.sequence
        source = (peer.worker_id, peer.incarnation)
        if self.scheduler.has_sequence(sequence) and self._sources.get(sequence) != source:
            self.stale_messages += 1
            return []
        return self._give_up(peer, sequence, message.reason, now, message.tombstone_s)

    def on_link_ended(self, peer: Peer, reason: str, now: float) -> list[Action]:
        """Ends every sequence of the link whose KV has not arrived completely."""
        actions: list[Action] = []
        for sequence in list(peer.transfers):
            if self.scheduler.receiving(sequence):
                lost = f"{self.worker_id} lost its KV source: {reason}"
                actions.append(Ended(SequenceEnded(sequence, "error", ErrorCode.WORKER_LOST, lost)))
            actions += self._give_up(peer, sequence, reason, now)
        return actions

    # From the edges.

    def write_ended(self, peer: Peer, chunk: Chunk) -> None:
        """Records that the receive of a chunk has ended, however it went: nothing of the chunk is written any more."""
        sequence = chunk.sequence
        if sequence in peer.transfers:
            peer.transfers[sequence].under_way.discard((chunk.prefill_rank, chunk.decode_rank))
        self.writing[sequence] -= 1
        if not self.writing[sequence]:
            del self.writing[sequence]
            self.scheduler.receive_ended(sequence)

    def receive_failed(self, peer: Peer, chunk: Chunk, error: str, now: float, *, edge_open: bool) -> list[Action]:
        actions = self._give_up(peer, chunk.sequence, error, now)
        if not edge_open:
            actions.append(_edge_closed(peer, chunk))
        return actions + self._refuse(peer, chunk.sequence, error)

    def received(self, peer: Peer, chunk: Chunk, now: float, *, intact: bool) -> list[Action]:
        """Handles a chunk whose bytes have all arrived; `intact`: every section matches its checksum."""
        sequence, key, scheduler = chunk.sequence, (chunk.prefill_rank, chunk.decode_rank), self.scheduler
        self.bytes_received += chunk.num_bytes
        transfer = peer.transfers.get(sequence)
        if transfer is None or not scheduler.receiving(sequence):
            return self._refuse(peer, sequence, "the sequence has ended")
        if sequence in peer.refusals:
            return self._refuse(peer, sequence, "another edge refused its chunk")
        actions: list[Action] = []
        complete = False
        if intact:
            transfer.record_chunk(chunk, key, scheduler.layout)
            complete = transfer.complete
        else:
            self.chunks_damaged += 1
        if complete and chunk.first_token is not None:
            del peer.transfers[sequence]
            ended = scheduler.received(sequence, chunk.first_token, now, chunk.first_logprob, chunk.cached_tokens)
            if ended is not None:
                self.deadlines.forget(sequence)
            actions.append(Ready(sequence) if ended is None else Ended(ended))
        elif intact:
            scheduler.tokens_received(sequence, transfer.tokens_received)
        return [*actions, Reply(peer, Ack(sequence, chunk.index, intact, complete, *key))]

    # From the coordinator.

    def end(self, peers: Iterable[Peer], sequence: SequenceId, reason: str) -> list[Reply]:
        """Ends a sequence at the coordinator's request. A peer that is still sending its KV gets an abort now, or once
        an open receive of it has ended."""
        actions: list[Reply] = []
        for peer in peers:
            if peer.transfers.pop(sequence, None) is not None and sequence not in self.writing:
                actions.append(Reply(peer, AbortTransfer(sequence, reason, 0.0)))
        self.scheduler.abort(sequence, in_flight=sequence in self.writing)
        return actions

    def _give_up(
        self, peer: Peer, sequence: SequenceId, reason: str, now: float, tombstone_s: float = 0.0
    ) -> list[Action]:
        actions: list[Action] = [Dropped(sequence, reason)]
        peer.transfers.pop(sequence, None)
        if self.scheduler.generating(sequence):  # prefill missed the last Ack, and may fail before it reports the end
            message = f"{self.worker_id} ended the sequence: {reason}"
            actions.append(Ended(SequenceEnded(sequence, "error", ErrorCode.ABANDONED, message)))
        self.deadlines.forget(sequence)
        if not self.scheduler.abort(sequence, in_flight=sequence in self.writing) and tombstone_s > 0:
            self.tombstones.add(sequence, now, tombstone_s)
        return actions

    def _refuse(self, peer: Peer, sequence: SequenceId, reason: str) -> list[Action]:
        reason = peer.refusals.setdefault(sequence, reason)
        if sequence in self.writing:
            return []
        del peer.refusals[sequence]
        return [Reply(peer, AbortTransfer(sequence, reason, 0.0))]


def _edge_closed(peer: Peer, chunk: Chunk) -> Reply:
    """Returns the message that the edge is closed: it may be only here, and the peer would announce more chunks."""
    error = f"edge generation {chunk.edge_generation} is closed"
    return Reply(peer, EdgeReady(chunk.prefill_rank, chunk.decode_rank, chunk.edge_generation, error))
