"""One hand-over as the prefill worker decides it. Pure: events and `now` in, the next action out.

    WAITING    no blocks are allocated yet
    OFFERING   an offer to a decode worker is outstanding
    SENDING    a decode worker has accepted; chunks are sent as their KV is computed, each acknowledged before the next
    PARKED     all targets refused, or the one that had accepted failed: the KV is kept for new targets
    ENDED      all KV is acknowledged, or the hand-over failed or was aborted

Each event returns the next action; the code that executes the action reports the next event:

    begin, reoffer             -> OfferTo | Park
    OfferTo:   answered        -> SendChunk | OfferTo | Park
    SendChunk: acknowledged    -> SendChunk | Finish
    either:    target_failed   -> OfferTo | Park | Fail

A chunk is a `Span` of the sequence, tokens by layers, sent over all edges of the link concurrently, its own heads over
each. Its size is decided only when it can be sent: on a busy link many small chunks become one. The tokens of the last
step are sent as two chunks if they are many bytes: the first layers while the others compute, so that little is left to
send at the end (decision 0007). Edges are never locked for layers that are not computed. Each edge is acknowledged
separately; if the checksum does not match, only that edge resends the chunk, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from baton.core.commands import Target
from baton.core.errors import BatonError, HandoffError, InvariantError, KVCorrupt
from baton.core.events import HandedOver, Parked, StageStamps
from baton.core.handover import AbortTransfer, Accept, Chunk, Offer, Refuse
from baton.core.kv_layout import KVLayout
from baton.core.request import GenerateRequest, SequenceId, TokenLogprob
from baton.core.reshard import EdgeKey, EdgePlan
from baton.core.sections import early_layers


class Stage(Enum):
    WAITING = "waiting"
    OFFERING = "offering"
    SENDING = "sending"
    PARKED = "parked"
    ENDED = "ended"


LEGAL_MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.OFFERING, Stage.PARKED, Stage.ENDED}),
    Stage.OFFERING: frozenset({Stage.OFFERING, Stage.SENDING, Stage.PARKED, Stage.ENDED}),
    Stage.SENDING: frozenset({Stage.PARKED, Stage.ENDED}),
    Stage.PARKED: frozenset({Stage.OFFERING, Stage.PARKED, Stage.ENDED}),
    Stage.ENDED: frozenset(),
}


# Actions.


@dataclass(frozen=True, slots=True)
class OfferTo:
    """Dial the target if no link to it is open, send it `HandOver.offer`, and report `answered`."""

    target: Target


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Once `next_span` is not None and the edges are free, send it on `HandOver.edges`, and report `acknowledged`."""


@dataclass(frozen=True, slots=True)
class Park:
    """Report `event` to the coordinator, and wait until new targets are assigned."""

    event: Parked


@dataclass(frozen=True, slots=True)
class Finish:
    event: HandedOver


@dataclass(frozen=True, slots=True)
class Fail:
    """The hand-over fails with `error`, which no other target would avoid."""

    error: BatonError


Action = OfferTo | SendChunk | Park | Finish | Fail


@dataclass(frozen=True, slots=True)
class Span:
    """Layers [start_layer, end_layer) of tokens [start, end): the chunk with this `index`."""

    index: int
    start: int
    end: int
    start_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True)
class FirstLayers:
    """The KV of the first `layers` layers is complete up to position `end`; the step that computes the rest is not."""

    end: int
    layers: int


@dataclass(slots=True)
class Counters:
    """Totals of one worker over all its hand-overs. `chunks_early` counts the chunks of first layers."""

    bytes_sent: int = 0
    chunks_resent: int = 0
    chunks_early: int = 0


class Wire:
    """The bytes per token that each edge of one link carries. `plans` are all edges of the link, `layout` is that of
    the whole model, `peer_staging_bytes` the most that the decode worker can stage for one edge."""

    def __init__(self, plans: Sequence[EdgePlan], layout: KVLayout, peer_staging_bytes: int) -> None:
        self.plans = tuple(plans)
        self._peer_staging_bytes = peer_staging_bytes
        # Per edge: cumulative bytes per token by layer. Every chunk needs them.
        self._up_to = {plan.key: _bytes_up_to(plan, layout) for plan in plans}

    def bytes_on(self, edge: EdgeKey, span: Span) -> int:
        up_to = self._up_to[edge]
        return (up_to[span.end_layer] - up_to[span.start_layer]) * (span.end - span.start)

    def max_tokens(self, staging_bytes: int) -> int:
        """Returns the longest chunk, in tokens, that fits into staging memory: all edges together into `staging_bytes`
        here, each edge alone into the decode worker's."""
        sizes = [up_to[-1] for up_to in self._up_to.values()]
        return min(staging_bytes // sum(sizes), self._peer_staging_bytes // max(sizes))


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the chunks of a worker: `layout` is the whole model's, `staging_bytes` its staging memory."""

    layout: KVLayout
    section_bytes: int
    max_chunk_tokens: int
    staging_bytes: int


@dataclass(slots=True, eq=False)
class HandOver:
    """The hand-over of one sequence. Positions before `computed` are complete once `step` is done; `first_layers` is
    the progress beyond them. `sent` tokens are acknowledged on all edges, and `sent_layers` of the tokens after them.
    `span` is the chunk being sent, `edges` are those that still have to send it, `sends` counts its sends."""

    request: GenerateRequest
    targets: tuple[Target, ...]
    deadline_at: float
    limits: Limits
    counters: Counters
    stage: Stage = Stage.WAITING
    block_ids: tuple[int, ...] = ()
    computed: int = 0
    step: int = 0
    first_layers: FirstLayers | None = None
    first_token: int | None = None
    first_logprob: TokenLogprob | None = None
    cached_tokens: int = 0
    abort_reason: str | None = None
    bytes_sent: int = 0
    wire: Wire | None = None
    sent: int = 0
    sent_layers: FirstLayers | None = None
    num_chunks: int = 0
    span: Span | None = None
    edges: tuple[EdgePlan, ...] = ()
    sends: int = 0
    _next_target: int = 0
    _reason: str = "no target assigned"
    _offered_at: float = 0.0
    _accepted_at: float = 0.0

    @property
    def sequence(self) -> SequenceId:
        """The sequence id under the current attempt."""
        return self.request.sequence_id

    def left_s(self, now: float) -> float:
        return max(self.deadline_at - now, 0.001)

    # What the scheduler computes.

    def advance(self, computed: int, first_token: int | None, step: int) -> None:
        self.computed, self.first_token, self.step = computed, first_token, step

    # Targets.

    def begin(self, block_ids: tuple[int, ...]) -> Action:
        """Starts the hand-over: the sequence has blocks, and its first chunk is about to be computed."""
        self.block_ids = block_ids
        return self._offer_next()

    @property
    def reserve_s(self) -> float:
        """Seconds from the offer to its acceptance; 0 before that."""
        return max(0.0, self._accepted_at - self._offered_at)

    def offer(self, now: float) -> Offer:
        """Returns the offer for the current target."""
        self._offered_at = now
        request = replace(self.request, deadline_s=self.left_s(now))
        return Offer(request, self._target.handle, self.request.num_prefill_tokens)

    def answered(self, answer: Accept | Refuse, wire: Wire, now: float) -> Action:
        """Handles the reply to an offer. Raises HandoffError if it is invalid: report that as `target_failed`."""
        if isinstance(answer, Refuse):
            self._reason = f"{self._target.worker_id} refused: {answer.message}"
            return self._offer_next()
        self._move(Stage.SENDING)
        self._accepted_at = now
        self.wire, self.bytes_sent = wire, 0
        self.sent, self.sent_layers, self.num_chunks = answer.prefix_tokens, None, 0
        total = self.request.num_prefill_tokens
        if not 0 <= self.sent < total:
            raise HandoffError(
                f"{self._target.worker_id} accepted {total} tokens and reports {self.sent} of them as cached"
            )
        return self._send_next()

    def target_failed(self, error: BatonError, now: float) -> tuple[AbortTransfer, Action]:
        """Handles a failed offer or chunk: returns the message for the target, and the next action. A target that had
        accepted may be decoding already, so the KV is parked: other targets need a new attempt."""
        reason, accepted = f"{self._target.worker_id}: {error.message}", self.stage is Stage.SENDING
        self._reason = reason
        message = AbortTransfer(self.sequence, reason, self.left_s(now))
        if isinstance(error, KVCorrupt):
            self._move(Stage.ENDED)
            return message, Fail(error)
        return message, self._park() if accepted else self._offer_next()

    def assign(self, targets: Sequence[Target], attempt: int) -> None:
        """Sets the targets that the coordinator has named for parked KV; `reoffer` follows."""
        if self.stage is not Stage.PARKED:
            raise InvariantError(f"{self!r} cannot be given targets: it is not parked")
        self.request = replace(self.request, attempt=attempt)
        self.targets = tuple(targets)

    def reoffer(self) -> Action:
        self._next_target, self._reason = 0, "no target assigned"
        return self._offer_next()

    def abort(self, reason: str) -> None:
        """Aborts the hand-over: no further chunk is begun, but one that is being sent is sent completely."""
        if self.abort_reason is None:
            self.abort_reason = reason

    def end(self, now: float) -> AbortTransfer | None:
        """Ends an aborted hand-over; returns the message for the target that has its offer, or None."""
        asked = self.stage in (Stage.OFFERING, Stage.SENDING)
        if self.stage is not Stage.ENDED:
            self._move(Stage.ENDED)
        return AbortTransfer(self.sequence, self.abort_reason or "aborted", self.left_s(now)) if asked else None

    # Chunks.

    def next_span(self) -> Span | None:
        """Returns the largest span that can be sent now, or None. Raises HandoffError if staging cannot hold one
        token."""
        if self.span is not None:
            return self.span  # a resend
        num_layers, first, gone = len(self.limits.layout.layers), self.first_layers, self.sent_layers
        if gone is not None:
            rest = Span(self.num_chunks, self.sent, gone.end, gone.layers, num_layers)
            return rest if rest.end <= self.computed else None
        if self.computed > self.sent:
            end = min(self.computed, self.sent + self._max_tokens())
            return Span(self.num_chunks, self.sent, end, 0, num_layers)
        if first is None or not 0 < first.end - self.sent <= self._max_tokens():
            return None
        sizes = [layer.bytes_per_token * (first.end - self.sent) for layer in self.limits.layout.layers]
        if not early_layers(sizes, self.limits.section_bytes):  # few bytes: one more message would cost as much
            return None
        early = Span(self.num_chunks, self.sent, first.end, 0, first.layers)
        rest = Span(self.num_chunks + 1, self.sent, first.end, first.layers, num_layers)
        wire = self._wire
        return early if all(wire.bytes_on(plan.key, s) for s in (early, rest) for plan in wire.plans) else None

    def begin_span(self, span: Span) -> None:
        """Fixes the span that is about to be announced: a resend repeats the same span."""
        if self.span is None:
            self.span, self.sends = span, 0
        self.sends += 1

    def chunk(self, edge: EdgePlan, edge_generation: int) -> Chunk:
        """Returns the message that announces the span on one edge. The last chunk carries the first token."""
        span, wire = self._begun, self._wire
        last = span.end == self.request.num_prefill_tokens and span.end_layer == len(self.limits.layout.layers)
        return Chunk(
            sequence=self.sequence,
            index=span.index,
            start_token=span.start,
            end_token=span.end,
            start_layer=span.start_layer,
            end_layer=span.end_layer,
            num_bytes=wire.bytes_on(edge.key, span),
            edge_generation=edge_generation,
            prefill_rank=edge.prefill_rank,
            decode_rank=edge.decode_rank,
            first_token=self.first_token if last else None,
            first_logprob=self.first_logprob if last else None,
            cached_tokens=self.cached_tokens if last else 0,
            last=last,
        )

    def chunk_sent(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        self.counters.bytes_sent += num_bytes

    def acknowledged(self, intact: Mapping[EdgeKey, bool], now: float) -> Action:
        """Handles the acknowledgements; `intact` is, per edge, whether the chunk arrived undamaged. Raises KVCorrupt if
        a resent chunk is damaged again: report that as `target_failed`."""
        span = self._begun
        damaged = tuple(plan for plan in self.edges if not intact[plan.key])
        if damaged:
            self.edges = damaged
            if self.sends > 1:
                worker = self._target.worker_id
                raise KVCorrupt(f"chunk {span.index} of {self.sequence} arrived damaged twice at {worker}")
            self.counters.chunks_resent += len(damaged)
            return SendChunk()
        self.span, self.num_chunks = None, self.num_chunks + 1
        if span.end_layer < len(self.limits.layout.layers):
            self.sent_layers = FirstLayers(span.end, span.end_layer)
            self.counters.chunks_early += 1
        else:
            self.sent_layers, self.sent = None, span.end
        if self.sent < self.request.num_prefill_tokens:
            return self._send_next()
        self._move(Stage.ENDED)
        stamps = StageStamps(reserve_s=self.reserve_s, transfer_s=now - self._accepted_at)
        return Finish(HandedOver(self.sequence, self._target.worker_id, self.bytes_sent, stamps))

    def __repr__(self) -> str:
        sent = f"{self.sent} of {self.request.num_prefill_tokens} tokens sent"
        return f"<HandOver {self.sequence} {self.stage.value}, {sent}>"

    @property
    def _wire(self) -> Wire:
        if self.wire is None:
            raise InvariantError(f"{self!r} is sending, but no target has accepted")
        return self.wire

    @property
    def _begun(self) -> Span:
        if self.span is None:
            raise InvariantError(f"{self!r} has no chunk in flight")
        return self.span

    @property
    def _target(self) -> Target:
        return self.targets[self._next_target - 1]

    def _offer_next(self) -> Action:
        if self._next_target == len(self.targets):
            return self._park()
        self._move(Stage.OFFERING)
        self._next_target += 1
        return OfferTo(self._target)

    def _park(self) -> Park:
        self._move(Stage.PARKED)
        self.span = None
        return Park(Parked(self.sequence, self._reason))

    def _send_next(self) -> SendChunk:
        self.edges = self._wire.plans
        return SendChunk()

    def _max_tokens(self) -> int:
        fit = self._wire.max_tokens(self.limits.staging_bytes)
        if fit < 1:
            where = f"on this worker or on {self._target.worker_id}"
            raise HandoffError(f"the KV of one token does not fit into staging memory {where}")
        return min(self.limits.max_chunk_tokens, fit)

    def _move(self, stage: Stage) -> None:
        if stage not in LEGAL_MOVES[self.stage]:
            raise InvariantError(f"{self!r} cannot become {stage.value}")
        self.stage = stage


def _bytes_up_to(plan: EdgePlan, layout: KVLayout) -> tuple[int, ...]:
    sizes = [plan.of_layers(layer, layer + 1).bytes_per_token(layout) for layer in range(len(layout.layers))]
    return tuple(itertools.accumulate(sizes, initial=0))
