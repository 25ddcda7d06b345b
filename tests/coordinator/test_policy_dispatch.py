"""Admission and routing, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import BatonError, DuplicateRequest, InvalidRequest, Unavailable
from coordinator.policy.dispatch import BACKLOG_STEPS, Dispatcher
from coordinator.policy.ticket import Placement, Ticket
from coordinator.policy.worker_view import WorkerView


def view(name: str, *, blocks: int = 16, block_size: int = 4, step_tokens: int = 8) -> WorkerView:
    return WorkerView(name, "prefill" if name[0] == "p" else "decode", blocks, block_size, step_tokens)


def dispatcher(*workers: WorkerView, requests: int = 100, tokens: int = 1000) -> Dispatcher:
    made = Dispatcher(requests, tokens)
    for worker in workers or (view("p0"), view("d0")):
        made.add_worker(worker)
    return made


def refusal(d: Dispatcher, ticket: Ticket) -> BatonError:
    with pytest.raises(BatonError) as caught:
        d.submit(ticket)
    d.check()
    return caught.value


def test_a_worker_started_with_a_shorter_context_gets_nothing_longer() -> None:
    """Its engine would end with an error of ours, and take the worker with it."""
    short = replace(view("d0"), max_tokens=12)
    d = dispatcher(view("p0"), short)
    assert "13 tokens; the largest decode worker holds 12" in refusal(d, Ticket("long", 4, 13)).message
    d.submit(Ticket("fits", 4, 12))
    d.add_worker(view("d1"))
    d.submit(Ticket("long", 4, 13))
    assert d.place() == [Placement("fits", "p0", "d0", "d1"), Placement("long", "p0", "d1", None)]
    short_prefill = dispatcher(replace(view("p0"), max_tokens=3), view("d0"))
    assert "largest prefill worker holds 3" in refusal(short_prefill, Ticket("x", 4, 8)).message


def test_a_pair_and_a_spare() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"), view("d2"))
    d.submit(Ticket("a", 4, 8))
    assert d.place() == [Placement("a", "p0", "d0", "d1")]
    assert d.place() == []
    assert d.workers_of("a") == ("p0", "d0")


def test_a_request_that_ends_at_its_first_token_reserves_nothing() -> None:
    d = dispatcher(view("p0"), view("d0", blocks=1))
    d.submit(Ticket("a", 4, 400, needs_decode=False))
    assert d.place() == [Placement("a", "p0", None, None)]
    d.check()


def test_at_most_two_step_budgets_are_dispatched_but_an_idle_worker_takes_any_length() -> None:
    d = dispatcher(view("p0", blocks=100), view("d0", blocks=1000))
    for name, tokens in (("long", 20), ("b", 1), ("c", 15), ("d", 1), ("e", 1)):
        d.submit(Ticket(name, tokens, tokens + 1))
    assert [p.name for p in d.place()] == ["long"]
    d.prefilled("long")
    assert [p.name for p in d.place()] == ["b", "c"]
    assert BACKLOG_STEPS * 8 == 16
    d.finish("b")
    assert [p.name for p in d.place()] == ["d"]
    d.check()


def test_the_head_waits_for_blocks_and_is_not_overtaken() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=10))
    for name, prompt in (("a", 28), ("big", 16), ("small", 4)):
        d.submit(Ticket(name, prompt, prompt + 4))
    assert [p.name for p in d.place()] == ["a"]
    d.finish("a")
    assert [p.name for p in d.place()] == ["big", "small"]


def test_blocks_of_what_has_arrived_are_those_that_the_worker_tells() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=10))
    for name in "ab":
        d.submit(Ticket(name, 20, 20))
    assert [p.name for p in d.place()] == ["a"]
    d.handed_over("a")
    d.told("d0", blocks_free=4, preempted=0)
    assert d.place() == []
    d.told("d0", blocks_free=6, preempted=1)
    assert d.place() == [], "who was preempted comes back first"
    d.told("d0", blocks_free=6, preempted=0)
    assert [p.name for p in d.place()] == ["b"]
    d.check()


@pytest.mark.parametrize("away", ["p0", "d0"])
def test_nothing_is_placed_on_a_worker_that_is_not_ready(away: str) -> None:
    d = dispatcher()
    d.submit(Ticket("a", 4, 8))
    d.set_ready(away, False)
    assert d.place() == []
    d.set_ready(away, True)
    assert len(d.place()) == 1


def test_a_spare_is_ready_and_has_room() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"), view("d2", blocks=1))
    d.set_ready("d1", False)
    d.submit(Ticket("a", 4, 8))
    assert d.place() == [Placement("a", "p0", "d0", None)]


def test_refusals_say_why() -> None:
    d = dispatcher(view("p0"), view("d0"), requests=2, tokens=10)
    d.submit(Ticket("a", 4, 8))
    assert isinstance(refusal(d, Ticket("a", 4, 8)), DuplicateRequest)
    assert refusal(d, Ticket("tokens", 7, 8)).code == "overloaded"
    d.submit(Ticket("b", 6, 8))
    full = refusal(d, Ticket("c", 1, 2))
    assert (full.code, full.retry_after_s) == ("overloaded", 1.0)
    assert d.num_queued == 2
    d.place()
    assert isinstance(refusal(d, Ticket("a", 4, 8)), DuplicateRequest)  # active, no longer queued
    too_large = refusal(d, Ticket("huge", 4, 65))
    assert isinstance(too_large, InvalidRequest)  # 400: another try would be in vain
    assert too_large.code == "exceeds_pool" and "65 tokens; the largest decode worker holds 64" in too_large.message
    d.set_ready("d0", False)
    gone = refusal(d, Ticket("x", 1, 2))
    assert isinstance(gone, Unavailable) and (gone.code, gone.retry_after_s) == ("no_decode_worker", 2)
    d.remove_worker("p0")
    assert refusal(d, Ticket("x", 1, 2)).code == "no_prefill_worker"


def test_a_pool_is_missing_altogether_only_when_no_worker_of_it_is_known() -> None:
    d = dispatcher()
    d.set_ready("d0", False)
    assert (d.missing_pool(), d.missing_pool(even_unready=True)) == ("decode", None)
    d.remove_worker("d0")
    assert (d.missing_pool(), d.missing_pool(even_unready=True)) == ("decode", "decode")


def test_a_queued_request_that_only_the_lost_worker_could_hold_is_named_with_it() -> None:
    """It would wait at the head for ever and hold up all others."""
    d = dispatcher(view("p0"), view("d0", blocks=100), view("d1", blocks=4))
    d.submit(Ticket("busy", 15, 16))
    d.place()
    d.submit(Ticket("large", 4, 400))
    d.submit(Ticket("small", 4, 8))
    assert d.remove_worker("d0") == ["busy", "large"]


def test_a_removed_worker_names_its_requests_and_its_namesake_starts_empty() -> None:
    d = dispatcher()
    d.submit(Ticket("a", 4, 8))
    d.place()
    assert d.remove_worker("d0") == ["a"]
    d.add_worker(view("d0"))
    d.check()
    d.finish("a")
    d.check()


def test_moving_to_a_worker_that_is_gone_is_not_charged_to_its_namesake() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"))
    d.submit(Ticket("a", 4, 8))
    assert d.place()[0].spare == "d1"
    d.remove_worker("d1")
    d.moved("a", "d1")
    d.add_worker(view("d1"))
    d.check()
    d.finish("a")
    d.check()


def test_parked_kv_gets_another_decode_worker_or_none() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"))
    d.submit(Ticket("a", 4, 8))
    d.place()
    assert d.reassign("a", frozenset({"d0"})) == Placement("a", "p0", "d1", None)
    assert d.reassign("a", frozenset({"d0", "d1"})) is None
    d.check()
    assert d.reassign("a", frozenset()) is not None
    d.handed_over("a")
    assert d.reassign("a", frozenset()) is None  # prefill has nothing of it any more
    assert d.reassign("unknown", frozenset()) is None
    d.check()
