"""One hand-over as the prefill worker decides it: a state machine (baton.core.machine). Pure.

    WAITING    no blocks are allocated yet
    OFFERING   a decode worker is dialled, or an offer to it is outstanding
    SENDING    a decode worker has accepted; chunks are sent as their KV is computed, each acknowledged before the next
    PARKED     all targets refused, or the one that had accepted failed: the KV is kept for new targets
    ENDED      all KV is acknowledged, or the hand-over failed or was aborted

The code that executes an action (prefill.sender) reports the next event:

    Dial         -> Connected | TargetFailed
    SendOffer    -> Accept | Refuse | TargetFailed
    SendChunk    -> Acknowledged | TargetFailed
    ReportParked -> Assigned

A chunk is a `ChunkSpan` of the sequence, tokens by layers, sent over all edges of the link concurrently, its own heads
over each. Its size is decided only when it can be sent: on a busy link many small chunks become one. The tokens of the
last step are sent as two chunks if they are many bytes: the first layers while the others compute, so that little is
left to send at the end (decision 0007). Edges are never locked for layers that are not computed. Each edge is
acknowledged separately; if the checksum does not match, only that edge resends the chunk, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from baton.core.commands import Target
from baton.core.edge_orders import early_layers
from baton.core.errors import BatonError, HandoffError, InvariantError, KVCorrupt
from baton.core.events import HandedOver, Parked, StageStamps
from baton.core.handover import AbortTransfer, Accept, Chunk, Offer, Refuse
from baton.core.kv_layout import KVLayout
from baton.core.machine import Table, handle, ignore, to
from baton.core.reshard import EdgeKey, EdgePlan
from baton.core.sequence import Sequence
from baton.core.window import Window


class SendStage(Enum):
    WAITING = "waiting"
    OFFERING = "offering"
    SENDING = "sending"
    PARKED = "parked"
    ENDED = "ended"


# Events, besides the messages Accept and Refuse.


@dataclass(frozen=True, slots=True)
class ComputeStarted:
    """The sequence has blocks, and its first chunk is about to be computed."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The link to the target is open."""

    wire: Wire


@dataclass(frozen=True, slots=True)
class TargetFailed:
    """Dialling the target, the offer or a chunk failed, or the target ended the hand-over."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """The KV of the first `layers` layers is complete up to position `end`; the step that computes the others is
    not."""

    end: int
    layers: int


@dataclass(frozen=True, slots=True)
class SpanAnnounced:
    """This `next_span` is about to be announced: a resend repeats the same one."""

    span: ChunkSpan


@dataclass(frozen=True, slots=True)
class EdgeSent:
    """All bytes of the chunk were sent on one edge."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """All edges that sent the chunk are acknowledged; per edge, whether it arrived undamaged."""

    intact: Mapping[EdgeKey, bool]


@dataclass(frozen=True, slots=True)
class Assigned:
    """The coordinator has named targets for parked KV; the sequence has the attempt that they were named for."""

    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """No further chunk may begin; one that is being sent is sent completely."""

    reason: str


Event = (
    ComputeStarted
    | Connected
    | Accept
    | Refuse
    | TargetFailed
    | LayersComputed
    | SpanAnnounced
    | EdgeSent
    | Acknowledged
    | Assigned
    | Aborted
)


# Actions.


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a link to the target, unless one is open."""

    target: Target


@dataclass(frozen=True, slots=True)
class SendOffer:
    offer: Offer


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Once `next_span` is not None and the edges are free, send it on `HandOver.edges`."""


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Send the message to the target if the link to it is open."""

    message: AbortTransfer


@dataclass(frozen=True, slots=True)
class ReportParked:
    """Report `event` to the coordinator, and wait until new targets are assigned."""

    event: Parked


@dataclass(frozen=True, slots=True)
class ReportHandedOver:
    event: HandedOver


@dataclass(frozen=True, slots=True)
class ReportFailed:
    """The hand-over failed with `error`, which no other target would avoid."""

    error: BatonError


Action = Dial | SendOffer | SendChunk | SendAbort | ReportParked | ReportHandedOver | ReportFailed


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Layers [start_layer, end_layer) of tokens [start, end): the chunk with this `index`."""

    index: int
    start: int
    end: int
    start_layer: int
    end_layer: int


@dataclass(slots=True)
class SendCounters:
    """Totals of one worker over all its hand-overs."""

    bytes_sent: int = 0
    chunks_resent: int = 0
    # Chunks of first layers.
    chunks_early: int = 0


class Wire:
    """The bytes that each edge of one link carries."""

    def __init__(self, plans: Iterable[EdgePlan], layout: KVLayout, peer_staging_bytes: int) -> None:
        """`plans` are all edges of the link, `layout` is that of the whole model, `peer_staging_bytes` limits what the
        decode worker can stage for one edge."""
        self.plans = tuple(plans)
        self._peer_staging_bytes = peer_staging_bytes
        # Per edge: cumulative bytes per token by layer, of all and of those with a window. Every chunk needs them.
        self._up_to = {plan.key: _bytes_up_to(plan, layout) for plan in self.plans}

    def bytes_on(self, edge: EdgeKey, span: ChunkSpan, window_start: int = 0) -> int:
        """Layers with a window carry only the tokens from `window_start` on."""
        every, sliding = (each[span.end_layer] - each[span.start_layer] for each in self._up_to[edge])
        return every * (span.end - span.start) - sliding * max(0, min(span.end, window_start) - span.start)

    def max_tokens(self, staging_bytes: int) -> int:
        """Returns the longest chunk, in tokens, that fits into staging memory: all edges together into `staging_bytes`
        here, each edge alone into the decode worker's."""
        sizes = [every[-1] for every, _ in self._up_to.values()]
        return min(staging_bytes // sum(sizes), self._peer_staging_bytes // max(sizes))


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Bounds on the chunks of a worker: `layout` is the whole model's, `staging_bytes` its staging memory."""

    layout: KVLayout
    section_bytes: int
    max_chunk_tokens: int
    staging_bytes: int


@dataclass(slots=True, eq=False)
class HandOver:
    """The hand-over of one sequence. What is computed of it, its blocks and its first token are the sequence's."""

    sequence: Sequence
    targets: tuple[Target, ...]
    deadline_at: float
    limits: ChunkLimits
    counters: SendCounters
    state: SendStage = SendStage.WAITING
    # First layers of tokens that are not computed completely.
    first_layers: LayersComputed | None = None
    # That of the link to the present target.
    wire: Wire | None = None
    # Tokens that are acknowledged on all edges, and the first layers of the tokens after them that are.
    acked_tokens: int = 0
    acked_layers: LayersComputed | None = None
    # The first position that is sent of layers with a window.
    window_start: int = 0
    num_chunks: int = 0
    bytes_sent: int = 0
    # The chunk being sent, the edges that still have to send it, and how often it has been sent.
    span: ChunkSpan | None = None
    edges: tuple[EdgePlan, ...] = ()
    sends: int = 0
    _next_target: int = 0
    # Why the last target did not take the KV.
    _reason: str = "no target assigned"
    _offered_at: float = 0.0
    _accepted_at: float = 0.0

    def on(self, event: Event, now: float) -> list[Action]:
        """Handles an event. Raises InvariantError if TABLE does not list it for the present stage."""
        return handle(TABLE, self, event, now)

    @property
    def reserve_s(self) -> float:
        """Seconds from the offer to its acceptance; 0 before that."""
        return max(0.0, self._accepted_at - self._offered_at)

    def __repr__(self) -> str:
        acked = f"{self.acked_tokens} of {self._num_tokens} tokens acknowledged"
        return f"<HandOver {self.sequence.id} {self.state.value}, {acked}>"

    # Targets.

    def _offer_next(self, event: ComputeStarted | Refuse | None, now: float) -> list[Action]:
        if isinstance(event, Refuse):
            self._reason = f"{self._target.worker_id} refused: {event.message}"
        if self._next_target == len(self.targets):
            return self._park()
        self.state = SendStage.OFFERING
        self._next_target += 1
        return [Dial(self._target)]

    def _connected(self, event: Connected, now: float) -> list[Action]:
        self.wire, self._offered_at = event.wire, now
        request = replace(self.sequence.request, deadline_s=self._left_s(now))
        return [SendOffer(Offer(request, self._target.handle, self._num_tokens))]

    def _accepted(self, event: Accept, now: float) -> list[Action]:
        self.state, self._accepted_at, self.bytes_sent = SendStage.SENDING, now, 0
        self.acked_tokens, self.acked_layers, self.num_chunks = event.prefix_tokens, None, 0
        worker, total = self._target.worker_id, self._num_tokens
        if not 0 <= event.prefix_tokens < total:
            message = f"{worker} accepted {total} tokens and reports {event.prefix_tokens} of them as cached"
            return self._target_failed(TargetFailed(HandoffError(message)), now)
        window, layout = Window.of(self.limits.layout), self.limits.layout
        self.window_start = window.first_position(total)
        first = 0 if window.full else window.num_behind(total) * layout.block_size
        if event.prefix_tokens < first:
            message = f"{worker} requests KV from position {event.prefix_tokens}; this worker keeps it from {first}"
            return self._target_failed(TargetFailed(HandoffError(message)), now)
        if self._wire.max_tokens(self.limits.staging_bytes) < 1:
            message = f"the KV of one token does not fit into staging memory on this worker or on {worker}"
            return self._target_failed(TargetFailed(HandoffError(message)), now)
        return self._send_next()

    def _target_failed(self, event: TargetFailed, now: float) -> list[Action]:
        """A target that had accepted may be decoding already, so the KV is parked: other targets need a new attempt."""
        error = event.error
        self._reason = f"{self._target.worker_id}: {error.message}"
        abort = SendAbort(AbortTransfer(self.sequence.id, self._reason, self._left_s(now)))
        if isinstance(error, KVCorrupt):
            self.state = SendStage.ENDED
            return [abort, ReportFailed(error)]
        return [abort, *(self._park() if self.state is SendStage.SENDING else self._offer_next(None, now))]

    def _assigned(self, event: Assigned, now: float) -> list[Action]:
        self.targets, self._next_target, self._reason = event.targets, 0, "no target assigned"
        return self._offer_next(None, now)

    def _abort(self, event: Aborted, now: float) -> list[Action]:
        self.state = SendStage.ENDED
        return []

    def _abort_at_target(self, event: Aborted, now: float) -> list[Action]:
        self.state = SendStage.ENDED
        return [SendAbort(AbortTransfer(self.sequence.id, event.reason, self._left_s(now)))]

    def _park(self) -> list[Action]:
        self.state, self.span = SendStage.PARKED, None
        return [ReportParked(Parked(self.sequence.id, self._reason))]

    # Chunks.

    def _layers_computed(self, event: LayersComputed, now: float) -> list[Action]:
        self.first_layers = event
        return []

    def next_span(self) -> ChunkSpan | None:
        """Returns the largest span that can be sent now, or None."""
        if self.span is not None:
            return self.span  # a resend
        num_layers, first, acked = len(self.limits.layout.layers), self.first_layers, self.acked_layers
        computed, start = self.sequence.num_computed, self.acked_tokens
        if acked is not None:
            remainder = ChunkSpan(self.num_chunks, start, acked.end, acked.layers, num_layers)
            return remainder if remainder.end <= computed else None
        if computed > start:
            return ChunkSpan(self.num_chunks, start, min(computed, start + self._max_tokens()), 0, num_layers)
        if first is None or not 0 < first.end - start <= self._max_tokens():
            return None
        sizes = [
            layer.bytes_per_token * max(0, first.end - (max(start, self.window_start) if layer.window else start))
            for layer in self.limits.layout.layers
        ]
        if not early_layers(sizes, self.limits.section_bytes):  # few bytes: one more message would cost as much
            return None
        early = ChunkSpan(self.num_chunks, start, first.end, 0, first.layers)
        remainder = ChunkSpan(self.num_chunks + 1, start, first.end, first.layers, num_layers)
        wire = self._wire
        each = (wire.bytes_on(plan.key, s, self.window_start) for s in (early, remainder) for plan in wire.plans)
        return early if all(each) else None

    def _announced(self, event: SpanAnnounced, now: float) -> list[Action]:
        if self.span is None:
            self.span, self.sends = event.span, 0
        self.sends += 1
        return []

    def chunk(self, edge: EdgePlan, edge_generation: int) -> Chunk:
        """Returns the message that announces the span on one edge. The last chunk carries the first token."""
        span, sequence = self._span, self.sequence
        last = span.end == self._num_tokens and span.end_layer == len(self.limits.layout.layers)
        return Chunk(
            sequence=sequence.id,
            index=span.index,
            start_token=span.start,
            end_token=span.end,
            start_layer=span.start_layer,
            end_layer=span.end_layer,
            num_bytes=self._wire.bytes_on(edge.key, span, self.window_start),
            edge_generation=edge_generation,
            prefill_rank=edge.prefill_rank,
            decode_rank=edge.decode_rank,
            first_token=sequence.output[-1] if last else None,
            first_logprob=sequence.logprobs[-1] if last and sequence.logprobs else None,
            cached_tokens=sequence.prefix_tokens if last else 0,
            last=last,
        )

    def _edge_sent(self, event: EdgeSent, now: float) -> list[Action]:
        self.bytes_sent += event.num_bytes
        self.counters.bytes_sent += event.num_bytes
        return []

    def _acknowledged(self, event: Acknowledged, now: float) -> list[Action]:
        span, sequence, worker = self._span, self.sequence, self._target.worker_id
        damaged = tuple(plan for plan in self.edges if not event.intact[plan.key])
        if damaged:
            self.edges = damaged
            if self.sends > 1:
                error = KVCorrupt(f"chunk {span.index} of {sequence.id} arrived damaged twice at {worker}")
                return self._target_failed(TargetFailed(error), now)
            self.counters.chunks_resent += len(damaged)
            return [SendChunk()]
        self.span, self.num_chunks = None, self.num_chunks + 1
        if span.end_layer < len(self.limits.layout.layers):
            self.acked_layers = LayersComputed(span.end, span.end_layer)
            self.counters.chunks_early += 1
        else:
            self.acked_layers, self.acked_tokens = None, span.end
        if self.acked_tokens < self._num_tokens:
            return self._send_next()
        self.state = SendStage.ENDED
        stamps = StageStamps(reserve_s=self.reserve_s, transfer_s=now - self._accepted_at)
        return [ReportHandedOver(HandedOver(sequence.id, worker, self.bytes_sent, stamps))]

    def _send_next(self) -> list[Action]:
        self.edges = self._wire.plans
        return [SendChunk()]

    def _max_tokens(self) -> int:
        return min(self.limits.max_chunk_tokens, self._wire.max_tokens(self.limits.staging_bytes))

    @property
    def _num_tokens(self) -> int:
        """Tokens whose KV is handed over."""
        return self.sequence.request.num_prefill_tokens

    @property
    def _wire(self) -> Wire:
        if self.wire is None:
            raise InvariantError(f"{self!r} is sending, but no link was open")
        return self.wire

    @property
    def _span(self) -> ChunkSpan:
        if self.span is None:
            raise InvariantError(f"{self!r} has no chunk in flight")
        return self.span

    @property
    def _target(self) -> Target:
        return self.targets[self._next_target - 1]

    def _left_s(self, now: float) -> float:
        return max(self.deadline_at - now, 0.001)


_OFFER_NEXT = to(HandOver._offer_next, SendStage.OFFERING, SendStage.PARKED)
_TARGET_FAILED = to(HandOver._target_failed, SendStage.PARKED, SendStage.ENDED)
_ABORT = to(HandOver._abort, SendStage.ENDED)
_ABORT_AT_TARGET = to(HandOver._abort_at_target, SendStage.ENDED)
_LAYERS_COMPUTED = to(HandOver._layers_computed)
_EDGE_SENT = to(HandOver._edge_sent)

TABLE: Table = {
    (SendStage.WAITING, ComputeStarted): _OFFER_NEXT,
    (SendStage.WAITING, LayersComputed): _LAYERS_COMPUTED,
    (SendStage.WAITING, Aborted): _ABORT,
    (SendStage.OFFERING, Connected): to(HandOver._connected),
    (SendStage.OFFERING, Accept): to(HandOver._accepted, SendStage.SENDING, SendStage.PARKED),
    (SendStage.OFFERING, Refuse): _OFFER_NEXT,
    (SendStage.OFFERING, TargetFailed): _TARGET_FAILED,
    (SendStage.OFFERING, LayersComputed): _LAYERS_COMPUTED,
    (SendStage.OFFERING, Aborted): _ABORT_AT_TARGET,
    (SendStage.SENDING, TargetFailed): _TARGET_FAILED,
    (SendStage.SENDING, LayersComputed): _LAYERS_COMPUTED,
    (SendStage.SENDING, SpanAnnounced): to(HandOver._announced),
    (SendStage.SENDING, EdgeSent): _EDGE_SENT,
    (SendStage.SENDING, Acknowledged): to(HandOver._acknowledged, SendStage.ENDED),
    (SendStage.SENDING, Aborted): _ABORT_AT_TARGET,
    (SendStage.PARKED, LayersComputed): _LAYERS_COMPUTED,
    (SendStage.PARKED, Assigned): to(HandOver._assigned, SendStage.OFFERING),
    (SendStage.PARKED, Aborted): _ABORT,
    # What was under way when the hand-over ended.
    (SendStage.ENDED, LayersComputed): to(ignore),
    (SendStage.ENDED, EdgeSent): _EDGE_SENT,  # a posted chunk is sent completely
    (SendStage.ENDED, Aborted): to(ignore),
}


def _bytes_up_to(plan: EdgePlan, layout: KVLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = [plan.of_layers(layer, layer + 1).bytes_per_token(layout) for layer in range(len(layout.layers))]
    sliding = [size if layer.window else 0 for size, layer in zip(sizes, layout.layers, strict=True)]
    return tuple(itertools.accumulate(sizes, initial=0)), tuple(itertools.accumulate(sliding, initial=0))
