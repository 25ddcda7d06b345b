"""The state machine of one hand-over: targets in order, chunks as they are computed, the result of failures."""

from __future__ import annotations

import pytest

from baton.core.codes import ErrorCode
from baton.core.commands import Target
from baton.core.errors import HandoffError, InvariantError, KVCorrupt
from baton.core.handles import Handle
from baton.core.handover import Accept, Refuse
from baton.core.request import SequenceId
from baton.core.reshard import reshard_layout
from prefill.handover import (
    Counters,
    Fail,
    Finish,
    FirstLayers,
    HandOver,
    Limits,
    OfferTo,
    Park,
    SendChunk,
    Span,
    Stage,
    Wire,
)
from tests.support.builders import make_layout, make_request

R = SequenceId("r")
LAYOUT = make_layout(layers=4)
PLANS = reshard_layout(LAYOUT, 1, 2)
TOKENS = 20


def target(name: str) -> Target:
    return Target(name, 1, "127.0.0.1:1", Handle(R, "p0", 1, name, 1, 0, b""))


def hand_over(*names: str, max_chunk_tokens: int = 8, staging_bytes: int = 1 << 20) -> HandOver:
    limits = Limits(LAYOUT, LAYOUT.layers[0].bytes_per_token, max_chunk_tokens, staging_bytes)
    return HandOver(make_request("r", TOKENS, max_tokens=4), tuple(map(target, names)), 60.0, limits, Counters())


def sending(held: int = 0, **limits: int) -> HandOver:
    over = hand_over("d0", "d1", **limits)
    over.begin((1, 2, 3, 4, 5))
    over.offer(1.0)
    assert isinstance(over.answered(Accept(R, held), Wire(PLANS, LAYOUT, 1 << 20), 2.0), SendChunk)
    return over


def send(over: HandOver, *, intact: bool = True) -> tuple[Span, object]:
    span = over.next_span()
    assert span is not None
    over.begin_span(span)
    for plan in over.edges:
        over.chunk_sent(over.chunk(plan, 1).num_bytes)
    return span, over.acknowledged({plan.key: intact for plan in over.edges}, 3.0)


def test_targets_receive_offers_in_order_until_one_accepts() -> None:
    over = hand_over("d0", "d1", "d2")
    assert over.begin((1,)) == OfferTo(over.targets[0])
    assert over.offer(20.0).request.deadline_s == 40.0
    assert over.answered(Refuse(R, ErrorCode.NO_FREE_BLOCKS, "full"), Wire(PLANS, LAYOUT, 1 << 20), 21.0) == OfferTo(
        over.targets[1]
    )
    message, action = over.target_failed(HandoffError("nobody answers"), 22.0)
    assert (message.sequence, message.reason, message.tombstone_s) == (R, "d1: nobody answers", 38.0)
    assert action == OfferTo(over.targets[2])
    action = over.answered(Refuse(R, ErrorCode.DRAINING, "it drains"), Wire(PLANS, LAYOUT, 1 << 20), 23.0)
    assert isinstance(action, Park) and action.event.reason == "d2 refused: it drains"


def test_parked_kv_is_offered_again_under_the_next_attempt() -> None:
    over = hand_over()
    action = over.begin((1,))
    assert isinstance(action, Park) and action.event.reason == "no target assigned"
    assert over.stage is Stage.PARKED
    over.assign([target("d7")], 2)
    assert over.sequence == R._replace(attempt=2) and over.reoffer() == OfferTo(target("d7"))
    assert over.stage is not Stage.PARKED
    with pytest.raises(InvariantError, match="cannot be given targets: it is not parked"):
        over.assign([target("d8")], 3)


def test_chunks_follow_the_computed_tokens_and_the_last_one_carries_the_first_token() -> None:
    over = sending(held=4)
    assert over.next_span() is None
    over.advance(6, None, 1)
    assert send(over) == (Span(0, 4, 6, 0, 4), SendChunk())
    over.advance(TOKENS, 9, 2)
    assert send(over)[0] == Span(1, 6, 14, 0, 4)
    span = over.next_span()
    assert span == Span(2, 14, TOKENS, 0, 4)
    over.begin_span(span)
    chunks = [over.chunk(plan, 5) for plan in over.edges]
    assert all(c.last and c.first_token == 9 and c.edge_generation == 5 for c in chunks)
    assert sum(c.num_bytes for c in chunks) == 6 * LAYOUT.bytes_per_token
    action = over.acknowledged({plan.key: True for plan in over.edges}, 5.0)
    assert isinstance(action, Finish) and over.stage is Stage.ENDED
    assert (action.event.decode_worker, action.event.stamps.reserve_s, action.event.stamps.transfer_s) == (
        "d0",
        1.0,
        3.0,
    )


def test_first_layers_of_the_last_tokens_are_sent_while_the_other_layers_compute() -> None:
    over = sending()
    over.advance(12, None, 1)
    send(over)
    send(over)
    over.first_layers = FirstLayers(TOKENS, 3)
    assert send(over)[0] == Span(2, 12, TOKENS, 0, 3)
    assert over.next_span() is None  # their other layers are not computed yet
    over.advance(TOKENS, 9, 2)
    span, action = send(over)
    assert span == Span(3, 12, TOKENS, 3, 4) and isinstance(action, Finish)
    assert over.counters.chunks_early == 1
    assert over.bytes_sent == over.counters.bytes_sent == TOKENS * LAYOUT.bytes_per_token


def test_only_the_edge_with_a_damaged_chunk_resends_it_and_only_once() -> None:
    over = sending()
    over.advance(8, None, 1)
    over.begin_span(over.next_span() or pytest.fail("nothing to send"))
    bad = PLANS[1]
    assert over.acknowledged({PLANS[0].key: True, bad.key: False}, 3.0) == SendChunk() and over.edges == (bad,)
    over.advance(TOKENS, 9, 2)
    assert over.next_span() == Span(0, 0, 8, 0, 4)  # the same span, whatever was computed meanwhile
    over.begin_span(Span(0, 0, 8, 0, 4))
    assert over.counters.chunks_resent == 1
    with pytest.raises(KVCorrupt, match="chunk 0 of r/0#1 arrived damaged twice at d0") as e:
        over.acknowledged({bad.key: False}, 4.0)
    _, action = over.target_failed(e.value, 4.0)
    assert isinstance(action, Fail) and action.error is e.value


def test_no_second_target_gets_an_offer_under_an_accepted_attempt() -> None:
    over = sending()
    over.advance(8, None, 1)
    over.begin_span(over.next_span() or pytest.fail("nothing to send"))
    _, action = over.target_failed(HandoffError("the link has ended"), 3.0)
    assert isinstance(action, Park) and over.stage is Stage.PARKED
    over.assign([target("d1")], 2)
    over.reoffer()
    over.offer(4.0)
    over.answered(Accept(R, 0), Wire(PLANS, LAYOUT, 1 << 20), 4.0)
    assert over.next_span() == Span(0, 0, 8, 0, 4) and over.bytes_sent == 0  # from the beginning


@pytest.mark.parametrize("held", [-1, TOKENS, TOKENS + 1])
def test_target_that_claims_an_impossible_number_of_cached_tokens_is_refused(held: int) -> None:
    with pytest.raises(HandoffError, match=f"reports {held} of them as cached"):
        sending(held)


def test_staging_memory_bounds_a_chunk() -> None:
    over = sending(staging_bytes=3 * LAYOUT.bytes_per_token)
    over.advance(8, None, 1)
    assert over.next_span() == Span(0, 0, 3, 0, 4)
    over = sending(staging_bytes=1)
    over.advance(8, None, 1)
    with pytest.raises(HandoffError, match="KV of one token does not fit into staging memory on this worker or on d0"):
        over.next_span()


def test_abort_is_sent_to_the_target_that_received_an_offer() -> None:
    over = hand_over("d0")
    over.abort("the client left")
    assert over.end(1.0) is None
    over = sending()
    over.abort("the client left")
    over.abort("again")
    message = over.end(20.0)
    assert message is not None and (message.reason, message.tombstone_s) == ("the client left", 40.0)
    over = hand_over()
    over.begin((1,))
    over.abort("the client left")
    assert over.end(1.0) is None and over.stage is Stage.ENDED
