"""The state machine of one hand-over: targets in order, chunks as they are computed, the result of failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.errors import HandoffError, InvariantError, KVCorrupt
from baton.core.handover import Accept, Handle, Refuse
from baton.core.request import SequenceId
from baton.core.reshard import EdgePlan, reshard_layout
from baton.core.sequence import Prefilled, Sequence, Started, State
from prefill import handover as machine
from prefill.handover import (
    Aborted,
    Acknowledged,
    Action,
    Assigned,
    ChunkLimits,
    ChunkSpan,
    Connected,
    Dial,
    EdgeSent,
    HandOver,
    LayersComputed,
    ReportFailed,
    ReportHandedOver,
    ReportParked,
    SendAbort,
    SendChunk,
    SendCounters,
    SendOffer,
    SendStage,
    SpanAnnounced,
    TargetFailed,
    Wire,
)
from tests.support.builders import make_layout, make_request

R = SequenceId("r")
LAYOUT = make_layout(layers=4)
PLANS = reshard_layout(LAYOUT, 1, 2)
WIRE = Wire(PLANS, LAYOUT, 1 << 20)
TOKENS = 20
BEGIN = machine.ComputeStarted()


def target(name: str) -> Target:
    return Target(name, 1, "127.0.0.1:1", Handle(R, "p0", 1, name, 1, 0, b""))


def hand_over(*names: str, max_chunk_tokens: int = 8, staging_bytes: int = 1 << 20) -> HandOver:
    limits = ChunkLimits(LAYOUT, LAYOUT.layers[0].bytes_per_token, max_chunk_tokens, staging_bytes)
    sequence = Sequence(make_request("r", TOKENS, max_tokens=4), State.WAITING, 0.0, block_ids=(1, 2, 3, 4, 5))
    sequence.on(Started(), 0.0)
    return HandOver(sequence, tuple(map(target, names)), 60.0, limits, SendCounters())


def computed(over: HandOver, tokens: int, first_token: int | None = None) -> None:
    """The prefill worker has computed the first `tokens` tokens."""
    over.sequence.num_computed = tokens
    if first_token is not None:
        over.sequence.append(first_token)
        over.sequence.on(Prefilled())


def offering(*names: str, **limits: int) -> HandOver:
    over = hand_over(*(names or ("d0", "d1")), **limits)
    over.on(BEGIN, 0.0)
    assert isinstance(over.on(Connected(WIRE), 1.0)[0], SendOffer)
    return over


def sending(held: int = 0, **limits: int) -> HandOver:
    over = offering(**limits)
    assert over.on(Accept(R, held), 2.0) == [SendChunk()]
    return over


def announce(over: HandOver) -> ChunkSpan:
    span = over.next_span()
    assert span is not None
    assert over.on(SpanAnnounced(span), 3.0) == []
    return span


def send(over: HandOver, *damaged: EdgePlan) -> tuple[ChunkSpan, list[Action]]:
    span = announce(over)
    for plan in over.edges:
        over.on(EdgeSent(over.chunk(plan, 1).num_bytes), 3.0)
    return span, over.on(Acknowledged({plan.key: plan not in damaged for plan in over.edges}), 3.0)


def test_targets_receive_offers_in_order_until_one_accepts() -> None:
    over = hand_over("d0", "d1", "d2")
    assert over.on(BEGIN, 0.0) == [Dial(over.targets[0])]
    (sent,) = over.on(Connected(WIRE), 20.0)
    assert isinstance(sent, SendOffer) and sent.offer.request.deadline_s == 40.0
    assert over.on(Refuse(R, ErrorCode.NO_FREE_BLOCKS, "full"), 21.0) == [Dial(over.targets[1])]
    abort, action = over.on(TargetFailed(HandoffError("nobody answers")), 22.0)
    assert isinstance(abort, SendAbort)
    message = abort.message
    assert (message.sequence, message.reason, message.tombstone_s) == (R, "d1: nobody answers", 38.0)
    assert action == Dial(over.targets[2])
    over.on(Connected(WIRE), 22.5)
    (action,) = over.on(Refuse(R, ErrorCode.DRAINING, "it drains"), 23.0)
    assert isinstance(action, ReportParked) and action.event.reason == "d2 refused: it drains"


def test_parked_kv_is_offered_again_under_the_next_attempt() -> None:
    over = hand_over()
    (action,) = over.on(BEGIN, 0.0)
    assert isinstance(action, ReportParked) and action.event.reason == "no target assigned"
    assert over.state is SendStage.PARKED
    over.sequence.begin_attempt(2)
    assert over.on(Assigned((target("d7"),)), 1.0) == [Dial(target("d7"))]
    (sent,) = over.on(Connected(WIRE), 2.0)
    assert isinstance(sent, SendOffer) and sent.offer.request.sequence_id == R._replace(attempt=2)
    assert over.state is not SendStage.PARKED
    with pytest.raises(InvariantError, match="in state offering cannot handle Assigned"):
        over.on(Assigned((target("d8"),)), 3.0)


def test_chunks_follow_the_computed_tokens_and_the_last_one_carries_the_first_token() -> None:
    over = sending(held=4)
    assert over.next_span() is None
    computed(over, 6)
    assert send(over) == (ChunkSpan(0, 4, 6, 0, 4), [SendChunk()])
    computed(over, TOKENS, 9)
    assert send(over)[0] == ChunkSpan(1, 6, 14, 0, 4)
    assert announce(over) == ChunkSpan(2, 14, TOKENS, 0, 4)
    chunks = [over.chunk(plan, 5) for plan in over.edges]
    assert all(c.last and c.first_token == 9 and c.edge_generation == 5 for c in chunks)
    assert sum(c.num_bytes for c in chunks) == 6 * LAYOUT.bytes_per_token
    (action,) = over.on(Acknowledged({plan.key: True for plan in over.edges}), 5.0)
    assert isinstance(action, ReportHandedOver) and over.state is SendStage.ENDED
    assert (action.event.decode_worker, action.event.stamps.reserve_s, action.event.stamps.transfer_s) == (
        "d0",
        1.0,
        3.0,
    )


def test_first_layers_of_the_last_tokens_are_sent_while_the_other_layers_compute() -> None:
    over = sending()
    computed(over, 12)
    send(over)
    send(over)
    over.on(LayersComputed(TOKENS, 3), 2.5)
    assert send(over)[0] == ChunkSpan(2, 12, TOKENS, 0, 3)
    assert over.next_span() is None  # their other layers are not computed yet
    computed(over, TOKENS, 9)
    span, (action,) = send(over)
    assert span == ChunkSpan(3, 12, TOKENS, 3, 4) and isinstance(action, ReportHandedOver)
    assert over.counters.chunks_early == 1
    assert over.bytes_sent == over.counters.bytes_sent == TOKENS * LAYOUT.bytes_per_token


def test_only_the_edge_with_a_damaged_chunk_resends_it_and_only_once() -> None:
    over, bad = sending(), PLANS[1]
    computed(over, 8)
    assert send(over, bad)[1] == [SendChunk()] and over.edges == (bad,)
    computed(over, TOKENS, 9)
    assert over.next_span() == ChunkSpan(0, 0, 8, 0, 4)  # the same span, whatever was computed meanwhile
    assert over.counters.chunks_resent == 1
    _, (abort, action) = send(over, bad)
    assert isinstance(abort, SendAbort) and isinstance(action, ReportFailed) and isinstance(action.error, KVCorrupt)
    assert action.error.message == "chunk 0 of r/0#1 arrived damaged twice at d0"


def test_no_second_target_gets_an_offer_under_an_accepted_attempt() -> None:
    over = sending()
    computed(over, 8)
    announce(over)
    _, action = over.on(TargetFailed(HandoffError("the link has ended")), 3.0)
    assert isinstance(action, ReportParked) and over.state is SendStage.PARKED
    over.sequence.begin_attempt(2)
    over.on(Assigned((target("d1"),)), 4.0)
    over.on(Connected(WIRE), 4.0)
    over.on(Accept(R, 0), 4.0)
    assert over.next_span() == ChunkSpan(0, 0, 8, 0, 4) and over.bytes_sent == 0  # from the beginning


@pytest.mark.parametrize("held", [-1, TOKENS, TOKENS + 1])
def test_target_that_claims_an_impossible_number_of_cached_tokens_is_refused(held: int) -> None:
    abort, action = offering().on(Accept(R, held), 2.0)
    assert isinstance(abort, SendAbort) and f"reports {held} of them as cached" in abort.message.reason
    assert isinstance(action, ReportParked)


def test_target_that_asks_for_kv_behind_the_window_is_refused() -> None:
    over = offering()
    over.limits = replace(over.limits, layout=make_layout(layers=4, window=6))
    abort, action = over.on(Accept(R, 11), 2.0)  # position 20 attends to 15, in the block from 12 on
    assert (
        isinstance(abort, SendAbort)
        and "requests KV from position 11; this worker keeps it from 12" in abort.message.reason
    )
    assert isinstance(action, ReportParked)


def test_kv_behind_the_window_is_not_sent() -> None:
    over = offering()
    over.limits = replace(over.limits, layout=make_layout(layers=4, window=6))
    assert over.on(Accept(R, 15), 2.0) == [SendChunk()]
    computed(over, 15)
    assert over.next_span() is None
    computed(over, 16)
    assert over.next_span() == ChunkSpan(0, 15, 16, 0, 4)


def test_staging_memory_bounds_a_chunk() -> None:
    over = sending(staging_bytes=3 * LAYOUT.bytes_per_token)
    computed(over, 8)
    assert over.next_span() == ChunkSpan(0, 0, 3, 0, 4)
    abort, action = offering(staging_bytes=1).on(Accept(R, 0), 2.0)
    assert isinstance(action, ReportParked) and isinstance(abort, SendAbort)
    reason = "KV of one token does not fit into staging memory on this worker or on d0"
    assert reason in abort.message.reason


def test_abort_is_sent_to_the_target_that_received_an_offer() -> None:
    over = hand_over("d0")
    assert over.on(Aborted("the client left"), 1.0) == []
    over = sending()
    (action,) = over.on(Aborted("the client left"), 20.0)
    assert isinstance(action, SendAbort)
    assert (action.message.reason, action.message.tombstone_s) == ("the client left", 40.0)
    assert over.on(Aborted("again"), 21.0) == []
    over = hand_over()
    over.on(BEGIN, 0.0)
    assert over.on(Aborted("the client left"), 1.0) == [] and over.state is SendStage.ENDED


def test_chunk_that_is_being_sent_at_an_abort_is_sent_completely() -> None:
    over = sending()
    computed(over, 8)
    announce(over)
    over.on(Aborted("the client left"), 4.0)
    over.on(EdgeSent(100), 5.0)
    assert over.counters.bytes_sent == 100 and over.chunk(PLANS[0], 1).end_token == 8
