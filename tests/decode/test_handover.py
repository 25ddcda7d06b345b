"""Hand-overs into a decode worker: the state machine alone, driven with values."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from baton.core.deadlines import Deadlines, Tombstones
from baton.core.handover import AbortTransfer, Accept, Ack, Chunk, EdgeReady, Handle, Offer, Refuse, sign
from baton.core.request import SequenceId
from baton.core.reshard import reshard_layout
from decode.admission import Admission, HandOvers
from decode.handover import (
    AbortedByPeer,
    Action,
    ChunkAnnounced,
    ChunkReceived,
    Destination,
    Dropped,
    Ended,
    EndedByCoordinator,
    Peer,
    Ready,
    Receive,
    ReceiveFailed,
    Reply,
)
from decode.scheduler import DecodeScheduler
from tests.support.builders import make_layout, make_outcome, make_request

R, KEY, TOKENS = SequenceId("r"), b"k" * 32, 8
LAYOUT = make_layout()
PLANS = {plan.key: plan for plan in reshard_layout(LAYOUT, 1, 2)}
FIRST, SECOND = PLANS
NOW = 5.0


class Kit:
    def __init__(self, num_blocks: int = 8) -> None:
        self.scheduler = DecodeScheduler(LAYOUT, num_blocks, 8)
        self.tombstones, self.deadlines = Tombstones(), Deadlines()
        destination = Destination("d0", 3, LAYOUT, 2000)
        self.machine = HandOvers(self.scheduler, self.deadlines, self.tombstones, destination)
        self.peer = self.new_peer()

    def new_peer(self, name: str = "p0", incarnation: int = 1) -> Peer:
        return Peer(name, incarnation, PLANS)

    def offer(self, name: str = "r", draining: bool = False, **handle: Any) -> Accept | Refuse:
        request = make_request(name, TOKENS, max_tokens=4)
        fields: dict[str, Any] = {"source_worker": "p0", "source_incarnation": 1, "destination_worker": "d0"}
        fields |= {"destination_incarnation": 3, "expires_ms": 10_000, "nonce": os.urandom(8)}
        signed = sign(KEY, Handle(request.sequence_id, **{**fields, **handle}))
        offer = Offer(request, signed, TOKENS)
        (action,) = self.machine.on_offer(self.peer, offer, Admission(KEY, 5000.0, draining), NOW)
        assert isinstance(action, Reply) and isinstance(action.message, Accept | Refuse)
        return action.message

    def chunk(self, edge: tuple[int, int], start: int = 0, end: int = TOKENS, **changes: Any) -> Chunk:
        last = end == TOKENS
        size = PLANS[edge].bytes_per_token(LAYOUT) * (end - start)
        made = Chunk(R, 0, start, end, 0, 2, size, 1, *edge, first_token=7 if last else None, last=last)
        return replace(made, **changes)

    def announce(self, chunk: Chunk, *, edge_open: bool = True) -> list[Action]:
        return self.machine.on(ChunkAnnounced(self.peer, chunk, edge_open), NOW)

    def arrive(self, chunk: Chunk, *, intact: bool = True) -> list[Action]:
        return self.machine.on(ChunkReceived(chunk, intact), NOW)

    def abort(self, peer: Peer, reason: str, tombstone_s: float = 60.0) -> list[Action]:
        return self.machine.on(AbortedByPeer(peer, AbortTransfer(R, reason, tombstone_s)), NOW)

    def receive_all(self) -> None:
        for edge in PLANS:
            self.announce(self.chunk(edge))
        for edge in PLANS:
            self.arrive(self.chunk(edge))
        assert self.scheduler.generating(R)


def test_sequence_is_ready_when_all_edges_have_delivered_their_kv() -> None:
    kit = Kit()
    assert isinstance(kit.offer(), Accept)
    one, two = kit.chunk(FIRST), kit.chunk(SECOND)
    assert [type(a) for a in kit.announce(one) + kit.announce(two)] == [Receive, Receive]
    assert kit.machine.writing[R] == 2
    assert kit.arrive(one) == [Reply(kit.peer, Ack(R, 0, True, False, *FIRST))]
    assert kit.arrive(two) == [Ready(R), Reply(kit.peer, Ack(R, 0, True, True, *SECOND))]
    assert kit.scheduler.generating(R) and not kit.machine.writing
    assert kit.machine.counters.bytes_received == TOKENS * LAYOUT.bytes_per_token


def test_damaged_chunk_can_be_sent_again() -> None:
    kit = Kit()
    kit.offer()
    for edge in PLANS:
        kit.announce(kit.chunk(edge))
    assert kit.arrive(kit.chunk(FIRST), intact=False) == [Reply(kit.peer, Ack(R, 0, False, False, *FIRST))]
    kit.arrive(kit.chunk(SECOND))
    assert [type(a) for a in kit.announce(kit.chunk(FIRST))] == [Receive]
    assert kit.arrive(kit.chunk(FIRST))[0] == Ready(R) and kit.machine.counters.chunks_damaged == 1


@pytest.mark.parametrize(
    ("why", "refused"),
    [
        ("stale_handle", lambda kit: kit.offer(source_worker="p9")),
        ("stale_handle", lambda kit: kit.offer(expires_ms=1)),
        ("draining", lambda kit: kit.offer(draining=True)),
        ("no_free_blocks", lambda kit: [kit.offer(f"o{i}") for i in range(8)][-1]),
    ],
)
def test_offer_is_refused_with_an_error_code(why: str, refused: Any) -> None:
    kit = Kit()
    answer = refused(kit)
    assert isinstance(answer, Refuse) and answer.code == why
    assert kit.machine.counters.handles_refused == (why == "stale_handle")


def test_an_abort_that_overtakes_its_offer_leaves_a_tombstone() -> None:
    kit = Kit()
    assert kit.abort(kit.peer, "the client left") == []
    answer = kit.offer()
    assert isinstance(answer, Refuse) and (answer.code, answer.message) == ("aborted", "the sequence was aborted")


def test_blocks_are_freed_after_the_last_write_into_them_has_ended() -> None:
    kit = Kit()
    kit.offer()
    for edge in PLANS:
        kit.announce(kit.chunk(edge))
    actions = kit.machine.on(ReceiveFailed(kit.chunk(FIRST), "the edge broke", edge_open=False), NOW)
    assert actions == [
        Dropped(R, "the edge broke"),
        Reply(kit.peer, EdgeReady(*FIRST, 1, "edge generation 1 is closed")),
    ]  # the abort is sent when the other edge has ended, too
    assert kit.scheduler.blocks.num_free < 8
    assert kit.arrive(kit.chunk(SECOND)) == [Reply(kit.peer, AbortTransfer(R, "the edge broke", 0.0))]
    assert kit.scheduler.blocks.num_free == 8 and not kit.scheduler.num_sequences


def test_generating_sequence_continues_after_its_link_ends() -> None:
    kit = Kit()
    kit.offer()
    kit.receive_all()
    assert kit.machine.on_link_ended(kit.peer, "it broke", NOW) == [] and kit.scheduler.generating(R)


def test_only_the_worker_that_offered_a_sequence_can_abort_it() -> None:
    kit = Kit()
    kit.offer()
    for number, stranger in enumerate((kit.new_peer("p1"), kit.new_peer(incarnation=2)), 1):
        assert kit.abort(stranger, "mine") == []
        assert kit.machine.counters.stale_messages == number and kit.scheduler.has_sequence(R)
    assert kit.abort(kit.new_peer(), "mine") == [Dropped(R, "mine")]
    assert not kit.scheduler.has_sequence(R)


def test_coordinator_can_abort_a_sequence_whose_kv_is_still_arriving() -> None:
    kit = Kit()
    kit.offer()
    assert kit.machine.on(EndedByCoordinator(R, "the client left"), NOW) == [
        Dropped(R, "the client left"),
        Reply(kit.peer, AbortTransfer(R, "the client left", 0.0)),
    ]
    assert kit.scheduler.blocks.num_free == 8


def test_chunk_of_another_worker_is_refused_to_it_alone() -> None:
    """Also while the sequence receives: its own hand-over is not affected, and no refusal stays behind."""
    kit = Kit()
    kit.offer()
    kit.announce(kit.chunk(FIRST))
    stranger = kit.new_peer("p1")
    assert kit.machine.on(ChunkAnnounced(stranger, kit.chunk(SECOND), True), NOW) == [
        Reply(stranger, AbortTransfer(R, "the decode worker is not receiving the sequence", 0.0))
    ]
    kit.arrive(kit.chunk(FIRST))
    kit.announce(kit.chunk(SECOND))
    assert kit.arrive(kit.chunk(SECOND))[0] == Ready(R)


def test_abort_after_all_kv_has_arrived_is_reported_once() -> None:
    kit = Kit()
    kit.offer()
    kit.receive_all()
    plan = kit.scheduler.begin_step(NOW)
    assert plan is not None, "its blocks stay while the step computes it"
    dropped, ended = kit.abort(kit.peer, "no reply")
    assert dropped == Dropped(R, "no reply") and isinstance(ended, Ended) and ended.event.code == "abandoned"
    assert kit.abort(kit.peer, "again") == kit.machine.on_link_ended(kit.peer, "it broke", NOW) == []
    assert kit.machine.on(EndedByCoordinator(R, "the client left"), NOW) == []
    assert kit.scheduler.has_sequence(R)
    kit.scheduler.finish_step(make_outcome(plan), NOW)
    assert not kit.scheduler.has_sequence(R) and kit.scheduler.blocks.num_free == 8


def test_abort_of_a_sequence_whose_end_is_reported_reports_nothing() -> None:
    kit = Kit()
    kit.offer()
    kit.receive_all()
    plan = kit.scheduler.begin_step(NOW)
    assert plan is not None
    kit.scheduler.sequences[R].ending = "stop"  # its last token is known, and a step is outstanding
    assert kit.abort(kit.peer, "no reply") == [Dropped(R, "no reply")]
    kit.scheduler.finish_step(make_outcome(plan), NOW)
    assert not kit.scheduler.num_sequences
