"""Which mask a process computes next."""

from __future__ import annotations

import pytest

from baton.engine import mask_queue
from baton.engine.mask_queue import MAX_CLIENTS, MAX_RUNNING, OVERDUE_S, MaskQueue

LATER = 2 * OVERDUE_S


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_queue, "BATCH", 1)


def queue_of(*masks: tuple[str, str]) -> MaskQueue[str]:
    queue: MaskQueue[str] = MaskQueue()
    for client, mask in masks:
        queue.add(client, mask, None)
    return queue


def test_client_that_has_used_least_is_next_and_a_new_one_starts_level() -> None:
    queue = queue_of(("a", "a1"), ("a", "a2"), ("b", "b1"), ("b", "b2"))
    assert [queue.begin(0, 0.0), queue.begin(1, 0.0)] == [("a1",), ("a2",)]
    queue.ended(0, 3.0)
    queue.ended(1, 0.0)
    assert queue.begin(0, 1.0) == ("b1",)
    queue.ended(0, 1.0)
    queue.add("a", "a3", None)
    queue.add("new", "n1", None)
    assert [queue.begin(0, 1.0), queue.begin(1, 1.0)] == [("n1",), ("b2",)], "0 and 1 s used; a has used 3 s"
    queue.ended(0, 0.0)
    queue.add("other", "o1", None)
    assert [queue.begin(0, 1.0), queue.begin(2, 1.0)] == [("o1",), ("a3",)], "level with the latest turn, 1 s"


def test_one_client_does_not_occupy_all_processes() -> None:
    queue = queue_of(*(("a", f"a{n}") for n in range(5)))
    running = [queue.begin(process, 0.0) for process in range(4)]
    assert sum(map(len, running)) == MAX_RUNNING
    queue.add("b", "b1", None)
    assert queue.begin(3, 0.0) == ("b1",)
    queue.ended(0, 0.0)
    assert not queue.begin(0, LATER), "its other mask is overdue"
    queue.ended(1, 1.0)
    assert queue.begin(0, LATER) == ("a2",)


def test_sequence_stays_with_its_process_unless_an_overdue_mask_occupies_that() -> None:
    queue = queue_of(("slow", "s1"))
    assert queue.begin(0, 0.0) == ("s1",)
    queue.add("b", "b1", 0)
    assert not queue.begin(1, OVERDUE_S / 2)
    assert queue.overdue(0, LATER) == ("s1",) and not queue.overdue(1, LATER)
    assert queue.begin(1, LATER) == ("b1",)
    queue.ended(0, 1.0)
    queue.add("c", "c1", 0)
    assert not queue.begin(2, LATER) and queue.begin(0, LATER) == ("c1",) and not len(queue)


def test_used_time_of_a_bounded_number_of_clients_is_remembered() -> None:
    queue: MaskQueue[str] = MaskQueue()
    for number in range(3 * MAX_CLIENTS):
        queue.add(f"c{number}", "m", None)
        assert queue.begin(0, 0.0) == ("m",)
        queue.ended(0, 0.0)
    assert len(queue._used_s) <= MAX_CLIENTS


def test_process_is_given_a_batch_of_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_queue, "BATCH", 3)
    queue = queue_of(("a", "a1"), ("b", "b1"), ("a", "a2"))
    queue.add("a", "elsewhere", 1)
    queue.add("a", "a3", 0)
    queue.add("a", "a4", None)
    assert [queue.begin(0, 0.0), queue.begin(1, 0.0), queue.begin(2, 0.0)] == [
        ("a1", "a2", "a3"),
        ("elsewhere", "a4"),
        ("b1",),
    ]
