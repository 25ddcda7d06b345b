"""Whose grammar is compiled next: turns, floods, requests that leave, the limit. The seconds are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import QuotaExceeded
from coordinator.policy.grammar_queue import GrammarQueue

SECONDS = st.floats(0.001, 5.0)


def compiled(queue: GrammarQueue[str], took_s: float = 1.0) -> str | None:
    """Plays the next turn of a compiler and returns its grammar."""
    if (turn := queue.begin()) is None:
        return None
    queue.ended(turn[0], took_s)
    return turn[1]


def all_compiled(queue: GrammarQueue[str], took_s: float = 1.0) -> list[str]:
    return list(iter(lambda: compiled(queue, took_s), None))


def test_single_client_is_served_in_order() -> None:
    queue = GrammarQueue[str]()
    for name in ("x1", "x2", "x3"):
        queue.add("x", name)
    assert all_compiled(queue) == ["x1", "x2", "x3"]


@given(st.integers(1, 20), st.lists(SECONDS, min_size=30, max_size=30), st.integers(0, 20))
def test_new_client_is_served_next_despite_a_flood_from_another(flood: int, took_s: list[float], done: int) -> None:
    queue = GrammarQueue[str]()
    for number in range(flood):
        queue.add("flood", f"flood{number}")
    for seconds in took_s[: min(done, flood - 1)]:
        compiled(queue, seconds)
    queue.begin()
    assert queue.begin() is None  # one per client at a time: a second compiler is idle
    queue.add("small", "small")
    assert queue.begin() == ("small", "small")
    queue.add("third", "third")
    queue.ended("flood", took_s[-1])
    assert queue.begin() == ("third", "third")


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=5, max_size=30))
def test_two_floods_share_the_compile_time_equally(costs: list[tuple[float, float]]) -> None:
    queue, used = GrammarQueue[str](), {"a": 0.0, "b": 0.0}
    for number, _ in enumerate(costs):
        queue.add("a", f"a{number}")
        queue.add("b", f"b{number}")
    while set(queue._waiting) == {"a", "b"}:
        client, grammar = queue.begin() or ("", "")
        took_s = costs[int(grammar[1:])]["ab".index(client)]
        queue.ended(client, took_s)
        used[client] += took_s
    assert abs(used["a"] - used["b"]) <= max(map(max, costs))


def test_idle_client_accrues_no_credit_and_a_lone_flood_is_not_penalized() -> None:
    queue = GrammarQueue[str]()
    queue.add("late", "first")
    compiled(queue)
    for number in range(10):
        queue.add("flood", str(number))
    for _ in range(5):
        compiled(queue, 5.0)
    for number in range(3):
        queue.add("late", f"late{number}")
    assert [compiled(queue, 5.0) for _ in range(6)] == ["late0", "5", "late1", "6", "late2", "7"]


def test_shared_grammar_is_compiled_once_in_the_first_turn_of_any_client() -> None:
    queue = GrammarQueue[str]()
    for name in ("x1", "x2", "x3", "same"):
        queue.add("x", name)
    queue.begin()
    queue.add("y", "same")
    queue.ended("x", 1.0)
    assert all_compiled(queue) == ["same", "x2", "x3"]


def test_abandoned_grammars_are_not_compiled() -> None:
    queue = GrammarQueue[str]()
    for name in ("x1", "twice", "twice", "shared", "left"):
        queue.add("x", name)
    queue.add("y", "shared")
    assert queue.begin() == ("x", "x1")
    assert not queue.leave("x", "x1")  # it is being compiled
    assert not queue.leave("x", "twice") and not queue.leave("x", "shared")
    assert queue.leave("x", "left")
    queue.ended("x", 1.0)
    assert sorted(all_compiled(queue)) == ["shared", "twice"]


def test_waiting_grammars_are_limited_per_client() -> None:
    queue = GrammarQueue[str](limit=2)
    for _ in range(5):  # any number of requests may wait for one grammar
        queue.add("x", "x1")
    queue.add("x", "x2")
    for client, whose in (("x", "this API key"), ("", "clients without an API key")):
        queue.add(client, "x2")
        if not client:
            queue.add(client, "x1")
        with pytest.raises(QuotaExceeded, match=f"2 grammars of {whose} are already waiting") as caught:
            queue.add(client, "x3")
        assert caught.value.retry_after_s == 1
    queue.add("y", "x3")
    assert queue.begin() == ("x", "x1")
    queue.add("x", "x1")  # it is being compiled: nothing more has to wait
    queue.add("x", "x3")
