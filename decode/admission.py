"""The hand-overs into one decode worker: which offers it accepts, and what the events of each sequence do to its
scheduler, deadlines and tombstones. Pure.

Each hand-over is a machine of its own (decode.handover), which only decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.core.codes import ErrorCode
from baton.core.deadlines import Deadlines, Tombstones
from baton.core.errors import BatonError, StaleHandle, Unavailable
from baton.core.handover import Offer, Refuse, SpentHandles, verify
from baton.core.request import SequenceId
from baton.core.sampling_limits import check_sampling, check_tokens
from baton.core.sequence import Sequence
from decode.handover import (
    AbortedBeforeOffer,
    Action,
    Destination,
    Dropped,
    Ended,
    EndedByCoordinator,
    Event,
    GivenUp,
    IncomingHandOver,
    KVComplete,
    LinkEnded,
    OfferAccepted,
    Peer,
    Ready,
    ReceiveCounters,
    Reply,
    TokensReceived,
    WritesEnded,
)
from decode.scheduler import DecodeScheduler


@dataclass(frozen=True, slots=True)
class Admission:
    """What an offer is checked against: the run's handle key, the run's clock, whether this worker drains, and the
    digests of its LoRA adapters."""

    handle_key: bytes
    run_clock_ms: float
    draining: bool = False
    adapters: frozenset[str] = frozenset()


@dataclass(eq=False)
class HandOvers:
    """The hand-overs into one worker: it admits offers, passes every event to the hand-over of its sequence, and keeps
    scheduler, deadlines and tombstones, which belong to the worker, up to date."""

    scheduler: DecodeScheduler
    deadlines: Deadlines
    tombstones: Tombstones
    destination: Destination
    counters: ReceiveCounters = field(default_factory=ReceiveCounters)
    _spent: SpentHandles = field(default_factory=SpentHandles)

    @property
    def writing(self) -> Counter[SequenceId]:
        """The number of chunks being received into the blocks of each sequence."""
        return Counter({over.sequence_id: len(over.writing) for over in self._all() if over.writing})

    def on_offer(self, peer: Peer, offer: Offer, admission: Admission, now: float) -> list[Action]:
        """Handles an offer: a second one of a sequence that is here is refused, as the scheduler has it already."""
        sequence_id = offer.request.sequence_id
        try:
            self.check(peer, offer, admission, now)
            sequence = self.scheduler.reserve(offer.request, now)
        except BatonError as e:
            return [Reply(peer, Refuse(sequence_id, e.tier_code, e.message))]
        self.deadlines.add(sequence_id, now + offer.request.deadline_s)
        sequence.hand_over = IncomingHandOver(sequence_id, self.destination, self.counters)
        return self.on(OfferAccepted(peer, sequence), now)

    def check(self, peer: Peer, offer: Offer, admission: Admission, now: float) -> None:
        """Raises BatonError with the reason why an offer is refused."""
        request, sequence = offer.request, offer.request.sequence_id
        try:
            verify(
                admission.handle_key,
                offer.handle,
                sequence=sequence,
                source=peer.worker_id,
                source_incarnation=peer.incarnation,
                destination=self.destination.worker_id,
                incarnation=self.destination.incarnation,
                now_ms=admission.run_clock_ms,
            )
            self._spent.spend(offer.handle, admission.run_clock_ms)
        except StaleHandle:
            self.counters.handles_refused += 1
            raise
        if self.tombstones.covers(sequence, now):
            raise Unavailable("the sequence was aborted", code=ErrorCode.ABORTED)
        if admission.draining:
            raise Unavailable("this decode worker is draining", code=ErrorCode.DRAINING)
        if request.adapter and request.adapter not in admission.adapters:
            raise Unavailable(f"adapter {request.adapter:.12} is not loaded at this decode worker")
        if offer.num_tokens != request.num_prefill_tokens:
            raise Unavailable(f"the offer has {offer.num_tokens} tokens, its request {request.num_prefill_tokens}")
        check_tokens(request, self.destination.vocab_size)
        check_sampling(request.sampling, request.max_tokens, self.destination.vocab_size)

    def on(self, event: Event, now: float) -> list[Action]:
        """Handles an event of one sequence; returns what is to be executed outside."""
        sequence_id = event.sequence_id
        sequence = self.scheduler.sequences.get(sequence_id)
        over = None if sequence is None else _hand_over(sequence)
        if over is None and sequence is not None and isinstance(event, EndedByCoordinator):
            self.deadlines.forget(sequence_id)
            self.scheduler.abort(sequence_id)  # its prompt is computed here: there is no hand-over to end
            return [Dropped(sequence_id, event.reason)]
        if over is None:
            over = IncomingHandOver(sequence_id, self.destination, self.counters)
        actions: list[Action] = []
        for action in over.on(event, now):
            match action:
                case TokensReceived(num_tokens):
                    self.scheduler.tokens_received(sequence_id, num_tokens)
                case KVComplete(first_token, first_logprob, cached_tokens):
                    ended = self.scheduler.received(sequence_id, first_token, now, first_logprob, cached_tokens)
                    if ended is not None:
                        self.deadlines.forget(sequence_id)
                    actions.append(Ready(sequence_id) if ended is None else Ended(ended))
                case GivenUp(writing):
                    self.deadlines.forget(sequence_id)
                    self.scheduler.abort(sequence_id, in_flight=writing)
                case WritesEnded():
                    self.scheduler.receive_ended(sequence_id)
                case AbortedBeforeOffer(tombstone_s):
                    self.deadlines.forget(sequence_id)
                    if tombstone_s > 0:
                        self.tombstones.add(sequence_id, now, tombstone_s)
                case _:
                    actions.append(action)
        return actions

    def on_link_ended(self, peer: Peer, reason: str, now: float) -> list[Action]:
        """Ends every sequence of the link whose KV has not arrived completely."""
        lost = [over.sequence_id for over in self._all() if over.peer is peer]
        return [action for sequence_id in lost for action in self.on(LinkEnded(sequence_id, reason), now)]

    def _all(self) -> Iterator[IncomingHandOver]:
        return (over for sequence in self.scheduler.sequences.values() if (over := _hand_over(sequence)) is not None)


def _hand_over(sequence: Sequence) -> IncomingHandOver | None:
    """None for a sequence whose prompt is computed here."""
    return sequence.hand_over if isinstance(sequence.hand_over, IncomingHandOver) else None
