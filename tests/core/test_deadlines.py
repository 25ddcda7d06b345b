"""Deadlines of sequences; an abort that overtook its offer leaves a tombstone until its deadline, in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.deadlines import Deadlines, Tombstones
from baton.core.request import SequenceId

A, B = SequenceId("a"), SequenceId("b")


def test_deadline_follows_a_sequence_to_its_next_attempt() -> None:
    deadlines = Deadlines()
    deadlines.add(A, 5.0)
    deadlines.rename(A, A._replace(attempt=2))
    deadlines.rename(B, B._replace(attempt=2))
    assert len(deadlines) == 1 and deadlines.expire(4.9) == []
    assert deadlines.expire(5.0) == [A._replace(attempt=2)]


def test_tombstone_covers_its_attempt_until_its_deadline() -> None:
    stones = Tombstones()
    stones.add(A, now=1.0, duration_s=2.0)
    assert stones.covers(A, now=2.999)
    assert not stones.covers(A, now=3.0)
    assert not stones.covers(A._replace(attempt=2), now=2.0)


def test_second_abort_never_shortens_the_first() -> None:
    stones = Tombstones()
    stones.add(A, now=0.0, duration_s=60.0)
    stones.add(A, now=1.0, duration_s=1.0)
    assert stones.covers(A, now=59.0)


def test_adding_a_tombstone_again_drops_no_other() -> None:
    stones = Tombstones(limit=2)
    for sequence in (A, B, B):
        stones.add(sequence, now=0.0, duration_s=60.0)
    assert stones.covers(A, now=1.0)


def test_expire_drops_expired_tombstones() -> None:
    stones = Tombstones()
    stones.add(A, now=0.0, duration_s=1.0)
    stones.expire(now=1.0)
    assert len(stones) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=60), st.integers(1, 5))
def test_memory_is_bounded_and_the_latest_is_kept(adds: list[tuple[int, int]], limit: int) -> None:
    stones = Tombstones(limit)
    for now, (name, duration) in enumerate(adds):
        stones.add(SequenceId(str(name)), float(now), duration + 0.5)
        assert len(stones) <= limit
        assert stones.covers(SequenceId(str(name)), float(now))
