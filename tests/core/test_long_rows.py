"""Whose long rows a worker computes next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core import virtual_counters
from baton.core.long_rows import TokenBudget, Turns
from baton.core.sequence import Sequence, State
from tests.support.builders import make_request


def sequence(name: str, tokens: int, number: int, *, priority: int = 0, arrived_at: float = 0.0) -> Sequence:
    """The first letter of its name is its tenant."""
    request = replace(make_request(name, tokens, priority=priority), tenant=name[0])
    return Sequence(request, State.RUNNING, arrived_at, number)


def names(turns: Turns, *sequences: Sequence) -> str:
    order = []
    for each in turns.order({s: s.num_uncomputed for s in sequences}):
        order.append(each.request.request_id)
        turns.computes(each, each.num_uncomputed)
    return " ".join(order)


def test_priority_then_tenants_by_what_was_computed_then_the_shortest() -> None:
    low, long, short, other = (
        sequence("b0", 1, 1, priority=1),
        sequence("a1", 30, 2),
        sequence("a2", 20, 3),
        sequence("b3", 25, 4),
    )
    assert names(Turns(), low, long, short, other) == "a2 b3 a1 b0"


def test_sequences_that_are_computed_again_go_first_and_are_not_charged() -> None:
    turns = Turns()
    again = [sequence(name, 50, number, arrived_at=number) for number, name in enumerate(("b1", "a2", "b3", "b4"))]
    for each in again:
        each.output.append(7)
    again[2].boosted = True
    prompts = sequence("a5", 4, 8), sequence("b6", 5, 9)
    assert names(turns, *prompts, *again) == "b3 b1 a2 b4 a5 b6"
    low = sequence("c7", 4, 10, priority=1)
    low.output.append(7)
    assert names(turns, low, sequence("b8", 2, 11), sequence("a9", 2, 12)) == "a9 b8 c7", "4 tokens of a, 5 of b"


def test_a_step_is_shared_in_turns_and_charged_for_what_it_computes() -> None:
    turns = Turns()
    rows = {s: s.num_uncomputed for s in (sequence("a1", 6, 1), sequence("a2", 8, 2), sequence("b3", 9, 3))}
    for _ in range(2):  # the first one computed nothing
        shared = turns.share(rows, 16)
        assert {s.request.request_id: tokens for s, tokens in shared.items()} == {"a1": 6, "b3": 9, "a2": 1}
    for each, tokens in shared.items():
        turns.computes(each, tokens)
    left = {s: tokens - shared[s] for s, tokens in rows.items() if tokens > shared[s]}
    left[sequence("b4", 12, 4)] = 12
    assert {s.request.request_id: tokens for s, tokens in turns.share(left, 16).items()} == {"a2": 7, "b4": 9}


def test_the_last_row_of_a_step_is_not_cut_if_it_fits_into_a_step_and_the_spare_tokens() -> None:
    def taken(*remainders: int, spare: int = 5) -> list[int]:
        budget = TokenBudget(10, spare)
        return [budget.take(sequence("a1", remainder, 1), remainder) for remainder in remainders]

    assert taken(6, 9, 1) == [6, 9, 0]
    assert taken(6, 10) == [6, 4], "more than the spare tokens"
    assert taken(12) == [10], "more than a step"
    assert taken(6, 9, spare=0) == [6, 4]


@pytest.mark.parametrize(("credit", "order"), [(0, "b2 a1 b3 b4"), (16, "b2 b3 a1 b4")])
def test_a_tenant_that_returns_has_limited_credit(monkeypatch: pytest.MonkeyPatch, credit: int, order: str) -> None:
    monkeypatch.setattr(virtual_counters, "IDLE_CREDIT", credit)
    monkeypatch.setattr(virtual_counters, "BURST", 8)
    turns = Turns()
    here = [sequence("a1", 20, 1)]
    turns.computes(here[0], 16)
    for number in range(2, 5):
        arrived = sequence(f"b{number}", 8, number)
        turns.arrives(arrived, here)
        here.append(arrived)
    assert names(turns, *here) == order
