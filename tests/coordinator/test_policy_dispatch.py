"""Admission and routing, rule by rule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.core.errors import BatonError, ContextLengthExceeded, InvalidRequest, Unavailable
from baton.core.events import KVCacheEvents, Load
from baton.core.request import ChoiceId
from coordinator.policy.choice import Choice
from coordinator.policy.fair_queue import FairQueue
from coordinator.policy.membership import WorkerState
from coordinator.policy.pick import PREFIX_SLACK
from coordinator.policy.pool import BACKLOG_STEPS, CachedBlocks, Worker
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker, bring_to
from tests.support.placing import Placement, Placing, make_choice

Size = tuple[str, dict[str, int]]


def view(name: str, **size: int) -> Size:
    return name, size


def dispatcher(*workers: Size, requests: int = 100, tokens: int = 1000) -> Placing:
    made = Placing(WorkerTable(3.0), requests, tokens)
    for name, size in workers or (view("p0"), view("d0")):
        add_worker(made.table, name, **size)
    return made


def worker(d: Placing, name: str) -> Worker:
    return d.worker(name)


def lose(d: Placing, name: str) -> None:
    bring_to(worker(d, name), WorkerState.LOST)


def set_ready(d: Placing, name: str, ready: bool) -> None:
    bring_to(worker(d, name), WorkerState.READY if ready else WorkerState.DISCONNECTED)


def refusal(d: Placing, choice: Choice) -> BatonError:
    with pytest.raises(BatonError) as caught:
        d.submit(choice)
    d.check()
    return caught.value


def test_worker_with_a_shorter_context_gets_no_longer_requests() -> None:
    """A longer request would end its engine with an internal error, and with it the worker."""
    short = view("d0", max_tokens=12)
    d = dispatcher(view("p0"), short)
    assert "13 tokens; the largest decode worker holds 12" in refusal(d, make_choice("long", 4, 13)).message
    d.submit(make_choice("fits", 4, 12))
    add_worker(d.table, "d1")
    d.submit(make_choice("long", 4, 13))
    assert d.place() == [Placement("fits", "p0", "d0", "d1"), Placement("long", "p0", "d1")]
    short_prefill = dispatcher(view("p0", max_tokens=3), view("d0"))
    assert "largest prefill worker holds 3" in refusal(short_prefill, make_choice("x", 4, 8)).message


def test_request_is_placed_on_a_pair_of_workers_and_a_spare() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"), view("d2"))
    d.submit(make_choice("a", 4, 8))
    assert d.place() == [Placement("a", "p0", "d0", "d1")]
    assert d.place() == []


def test_single_token_request_reserves_no_decode_blocks() -> None:
    d = dispatcher(view("p0"), view("d0", blocks=1))
    d.submit(make_choice("a", 4, 4))
    assert d.place() == [Placement("a", "p0")]
    d.check()


def test_prefill_backlog_is_capped_but_an_idle_worker_accepts_any_prompt_length() -> None:
    d = dispatcher(view("p0", blocks=100), view("d0", blocks=1000))
    for name, tokens in (("long", 20), ("b", 1), ("c", 15), ("d", 1), ("e", 1)):
        d.submit(make_choice(name, tokens, tokens + 1))
    assert d.names() == ["long"]
    d.prefilled("long")
    assert d.names() == ["b", "c"]
    assert BACKLOG_STEPS * 8 == 16
    d.finish("b")
    assert d.names() == ["d"]
    d.check()


def test_queue_head_waits_for_blocks_and_is_not_overtaken() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=10))
    for name, prompt in (("a", 28), ("big", 16), ("small", 4)):
        d.submit(make_choice(name, prompt, prompt + 4))
    assert d.names() == ["a"]
    d.finish("a")
    assert d.names() == ["big", "small"]


def test_blocks_of_handed_over_requests_are_counted_from_the_worker_load() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=10))
    for name in "ab":
        d.submit(make_choice(name, 19, 20))
    assert d.names() == ["a"]
    d.handed_over("a")
    worker(d, "d0").load = Load(blocks_free=4, preempted=0)
    assert d.place() == []
    worker(d, "d0").load = Load(blocks_free=6, preempted=1)
    assert d.place() == [], "who was preempted comes back first"
    worker(d, "d0").load = Load(blocks_free=6, preempted=0)
    assert d.names() == ["b"]
    d.check()


@pytest.mark.parametrize("away", ["p0", "d0"])
def test_nothing_is_placed_on_a_worker_that_is_not_ready(away: str) -> None:
    d = dispatcher()
    d.submit(make_choice("a", 4, 8))
    set_ready(d, away, False)
    assert d.place() == []
    set_ready(d, away, True)
    assert len(d.place()) == 1


def test_spare_worker_must_be_ready_and_have_room() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"), view("d2", blocks=1))
    set_ready(d, "d1", False)
    d.submit(make_choice("a", 4, 8))
    assert d.place() == [Placement("a", "p0", "d0")]


def test_refusals_carry_the_reason() -> None:
    d = dispatcher(view("p0"), view("d0"), requests=2, tokens=10)
    d.submit(make_choice("a", 4, 8))
    assert refusal(d, make_choice("tokens", 7, 8)).code == "overloaded"
    never = refusal(d, make_choice("never", 11, 12))
    assert (type(never), never.code, never.param) == (ContextLengthExceeded, "exceeds_queue", "prompt")
    d.submit(make_choice("b", 6, 8))
    full = refusal(d, make_choice("c", 1, 2))
    assert (full.code, full.retry_after_s) == ("overloaded", 1.0)
    assert d.dispatcher.num_queued == 2
    d.place()
    too_large = refusal(d, make_choice("huge", 4, 65))
    assert isinstance(too_large, InvalidRequest)  # 400: a retry would fail too
    assert too_large.code == "exceeds_pool" and "65 tokens; the largest decode worker holds 64" in too_large.message
    lose(d, "p0")
    d.submit(make_choice("x", 1, 2))
    assert d.dispatcher.num_queued == 1  # a worker may be starting


def test_demand_counts_what_is_admitted_queued_and_not_computed_yet() -> None:
    d = dispatcher(view("p0"), view("d0", blocks=2))
    d.submit(make_choice("a", 6, 8))
    d.place()
    d.submit(make_choice("b", 5, 8), choices=3)
    assert not d.place()
    demand = d.dispatcher.demand()
    assert (demand["admitted"], demand["admitted_tokens"], demand["queued_tokens"]) == (4, 11, 5)
    assert (demand["backlog_tokens"], demand["waits_for"]) == (6, "decode")
    assert demand["admitted_tokens_squared"] == 6**2 + 5**2 and demand["refused"] == 0
    with pytest.raises(Unavailable):
        d.submit(make_choice("c", demand["max_queued_tokens"] - 4, 8), choices=2)
    assert d.dispatcher.demand() == demand | {"refused": 2}


def test_role_is_servable_while_a_worker_may_return_but_not_while_all_drain() -> None:
    d, choice = dispatcher(), make_choice("a", 4, 8)
    set_ready(d, "d0", False)
    assert d.dispatcher.missing_role() == "decode" and d.dispatcher.unservable(choice) is None
    bring_to(worker(d, "d0"), WorkerState.DRAINING)
    assert d.dispatcher.unservable(choice) == ("no decode worker is left", "no_decode_worker")
    assert d.dispatcher.unservable(make_choice("a", 4, 4)) is None
    lose(d, "p0")
    assert d.dispatcher.unservable(choice) == (
        "no prefill worker is left",
        "no_prefill_worker",
    )


def test_request_that_fits_only_a_draining_worker_does_not_block_the_queue() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=100), view("d1", blocks=4))
    d.submit(make_choice("large", 4, 400))
    bring_to(worker(d, "d0"), WorkerState.DRAINING)
    d.submit(make_choice("small", 4, 8))
    assert d.names() == ["small"]


def test_request_that_fits_no_present_worker_waits_without_blocking_the_queue() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=100), view("d1", blocks=4))
    for choice in (make_choice("large", 4, 400), make_choice("small", 4, 8)):
        d.submit(choice)
    lose(d, "d0")
    assert d.names() == ["small"]
    too_large = d.dispatcher.unservable(make_choice("large", 4, 400))
    assert too_large == ("the request needs KV for 400 tokens; the largest decode worker holds 16", "exceeds_pool")
    add_worker(d.table, "d0", blocks=100)
    assert d.names() == ["large"]
    d.check()


def test_resubmitted_requests_keep_their_queue_position_by_age() -> None:
    d = dispatcher(view("p0", step_tokens=64, blocks=100), view("d0", blocks=100))
    for age in (1, 2, 3):
        d.submit(make_choice(f"r{age}", 4, 8, age=age))
    assert d.names() == ["r1", "r2", "r3"]
    d.submit(make_choice("r4", 4, 8, age=4))
    for age in (2, 3, 1):
        d.reschedule(f"r{age}")
    d.check()
    assert d.names() == ["r1", "r2", "r3", "r4"]


def test_new_worker_with_the_name_of_a_lost_one_starts_empty() -> None:
    d = dispatcher()
    d.submit(make_choice("a", 4, 8))
    d.place()
    lose(d, "d0")
    add_worker(d.table, "d0")
    d.check()
    d.finish("a")
    d.check()


def test_move_to_a_lost_worker_is_not_charged_to_a_new_worker_of_that_name() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"))
    d.submit(make_choice("a", 4, 8))
    assert d.place()[0].spare == "d1"
    lose(d, "d1")
    d.handed_over("a", to="d1")
    add_worker(d.table, "d1")
    d.check()
    d.finish("a")
    d.check()


def test_a_hand_over_reported_twice_counts_once() -> None:
    d = dispatcher()
    d.submit(make_choice("a", 4, 8))
    d.place()
    for _ in range(2):  # by the prefill worker, and by the decode worker's first tokens
        d.handed_over("a")
        d.check()


def test_parked_kv_is_reassigned_to_a_ready_decode_worker_or_none() -> None:
    d = dispatcher(view("p0"), view("d0"), view("d1"))
    d.submit(make_choice("a", 4, 8))
    d.place()
    set_ready(d, "d0", False)
    d.prefilled("a")
    assert d.reassign("a") == Placement("a", "p0", "d1")
    set_ready(d, "d1", False)
    assert d.reassign("a") is None
    d.check()
    set_ready(d, "d1", True)
    assert d.reassign("a") is not None
    d.handed_over("a")
    d.check()


def test_placements_on_a_decode_worker_are_limited_to_slightly_more_than_it_can_run() -> None:
    """The others wait in the queue, hold no KV, and can be placed on a worker that joins later."""
    d = dispatcher(view("p0", step_tokens=1000), view("d0", blocks=1000, max_running=8))
    for n in range(20):
        d.submit(make_choice(f"r{n}", 4, 8))
    assert len(d.place()) == 9 == worker(d, "d0").running and d.dispatcher.num_queued == 11
    d.finish("r0")
    assert d.names() == ["r9"]
    add_worker(d.table, "d1", blocks=1000, max_running=8)
    assert {p.decode for p in d.place()} == {"d1"} and d.dispatcher.num_queued == 1
    d.check()


def test_queue_limit_counts_all_choices_of_a_request() -> None:
    d = dispatcher(requests=10)
    d.submit(make_choice("a", 4, 8))
    with pytest.raises(Unavailable, match="1 choices with 4 prompt tokens are already waiting"):
        d.submit(make_choice("b", 4, 8), choices=10)
    d.submit(make_choice("b", 4, 8), choices=9)
    d.check()
    empty = dispatcher(requests=10)
    empty.submit(make_choice("a", 4, 8), choices=128)
    empty.check()


def test_queue_room_is_reserved_for_choices_submitted_later() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=64), requests=10)
    d.submit(make_choice("a", 4, 8), choices=8)
    assert d.names() == ["a"]  # the queue is empty, and 7 are still to come
    for name in "bcd":
        d.submit(make_choice(name, 4, 8))
    with pytest.raises(Unavailable):
        d.submit(make_choice("e", 4, 8))
    d.place()
    for number in range(7):
        d.submit_later(make_choice(f"a{number}", 4, 8), "a")
        d.check()
    assert d.dispatcher.num_queued == 7
    d.submit(make_choice("f", 4, 8), choices=3)
    with pytest.raises(Unavailable):
        d.submit(make_choice("g", 4, 8))
    d.finish("f")
    d.dispatcher.forget(ChoiceId("f"))  # it failed before its other choices were submitted
    d.submit(make_choice("g", 4, 8), choices=3)


def test_request_that_reuses_a_name_does_not_wait_for_the_needs_of_the_first() -> None:
    d = dispatcher(view("p0", step_tokens=64), view("d0", blocks=16))
    d.submit(make_choice("a", 20, 24))
    assert d.names() == ["a"]
    d.submit(make_choice("b", 60, 64))
    assert d.place() == []
    d.finish("b")
    d.submit(make_choice("b", 4, 8))
    assert d.names() == ["b"]


def test_waiting_requests_are_reconsidered_when_the_expected_output_shrinks() -> None:
    d = dispatcher(view("p0", blocks=100, step_tokens=1000), view("d0", blocks=100))
    d.submit(make_choice("a", 40, 400))
    assert d.names() == ["a"]
    worker(d, "d0").load = Load(blocks_free=80)
    d.submit(make_choice("b", 100, 390))
    assert d.place() == [], "57 blocks"
    for _ in range(100):
        d.dispatcher.expectation.ended(8)
    assert d.names() == ["b"]


def test_lower_priority_value_goes_first_even_before_waiting_requests() -> None:
    d = dispatcher(view("p0", step_tokens=64, blocks=100), view("d0", blocks=4))
    d.submit(make_choice("runs", 12, 13, age=1))
    assert d.names() == ["runs"]
    for age, (name, priority) in enumerate((("batch", 100), ("late", 0), ("soon", -1)), 2):
        d.submit(make_choice(name, 12, 13, age=age, priority=priority))
        assert not d.place(), "there is no room"
    d.finish("runs")
    placed = []
    while fresh := d.place():
        placed += [p.name for p in fresh]
        for p in fresh:
            d.finish(p.name)
    assert placed == ["soon", "late", "batch"]
    d.check()


# Routing of requests whose prefix some workers have cached.

HINTS = tuple(bytes([n]) * 8 for n in range(10))


def wide(prefill: int, decode: int, *, step_tokens: int = 40) -> Placing:
    names = [*(f"p{n}" for n in range(prefill)), *(f"d{n}" for n in range(decode))]
    return dispatcher(*(view(name, blocks=1000, step_tokens=step_tokens) for name in names))


def placed(d: Placing, name: str, tokens: int = 41, prefix: tuple[bytes, ...] = HINTS) -> tuple[str, str | None]:
    d.submit(make_choice(name, tokens, tokens + 4, prefix={4: prefix}))
    (placement,) = d.place()
    d.check()
    return placement.prefill, placement.decode


def test_prefill_goes_to_the_worker_that_holds_the_prefix() -> None:
    d = wide(2, 1)
    worker(d, "p1").update_cached(KVCacheEvents(stored=HINTS))
    assert placed(d, "a")[0] == "p1"
    assert worker(d, "p1").backlog_tokens == 1
    d.prefilled("a")
    assert worker(d, "p1").backlog_tokens == 0


def test_a_long_backlog_outweighs_a_short_prefix() -> None:
    d = wide(2, 1)
    worker(d, "p1").update_cached(KVCacheEvents(stored=HINTS[:2]))
    assert placed(d, "a", prefix=HINTS[:2])[0] == "p1"
    assert placed(d, "b", prefix=HINTS[:2])[0] == "p0"


def test_request_with_a_cached_prefix_fits_under_the_backlog_cap() -> None:
    d = wide(1, 1)
    assert placed(d, "a", tokens=60, prefix=())[0] == "p0"
    d.submit(make_choice("b", 41, 45, prefix={4: HINTS}))
    assert d.place() == []
    worker(d, "p0").update_cached(KVCacheEvents(stored=HINTS))
    assert d.names() == ["b"]
    d.check()


def test_only_a_contiguous_cached_prefix_counts() -> None:
    held = CachedBlocks(100)
    held.update(KVCacheEvents(stored=HINTS[:3] + HINTS[4:6]))
    assert held.count(HINTS) == 3
    held.update(KVCacheEvents(evicted=HINTS[1:2]))
    assert held.count(HINTS) == 1
    held.update(KVCacheEvents(stored=HINTS[1:2], cleared=True))
    assert (held.count(HINTS), held.count(HINTS[1:])) == (0, 1)


def test_reported_cached_blocks_are_bounded_by_the_pool_size() -> None:
    held = CachedBlocks(4)
    for _ in range(3):
        held.update(KVCacheEvents(stored=HINTS))
    assert len(held) <= 4


def test_decode_prefers_the_worker_with_the_prefix_until_it_is_much_fuller() -> None:
    d = wide(1, 2, step_tokens=10_000)
    worker(d, "d1").update_cached(KVCacheEvents(stored=HINTS))
    went = [placed(d, f"r{n}")[1] for n in range(PREFIX_SLACK + 3)]
    assert went == ["d1"] * (PREFIX_SLACK + 1) + ["d0", "d1"]


def test_prefix_block_sizes_are_those_of_present_workers_with_cached_blocks() -> None:
    d = wide(1, 1)
    assert not d.dispatcher.cached_block_sizes
    worker(d, "p0").update_cached(KVCacheEvents(stored=HINTS))
    assert d.dispatcher.cached_block_sizes == {4}
    bring_to(worker(d, "p0"), WorkerState.LOST)
    assert not d.dispatcher.cached_block_sizes


@pytest.mark.parametrize("missing", ["p0", "d0"])
def test_a_queue_that_waits_for_a_role_is_not_scanned(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each admission, event and tick would look at all its choices in vain, for tens of milliseconds."""
    table = WorkerTable(3.0)
    d = Placing(table, 100, 10_000)
    add_worker(table, "p0" if missing == "d0" else "d0")
    scans = 0
    in_turn = FairQueue.in_turn

    def counted(queue: FairQueue, behind: set[str]) -> Iterator[Choice]:
        nonlocal scans
        scans += 1
        return in_turn(queue, behind)

    monkeypatch.setattr(FairQueue, "in_turn", counted)
    for number in range(5):
        d.submit(make_choice(f"r{number}", 4, 8, age=number))
    assert d.names() == [] and scans == 0
    d.submit(make_choice("short", 4, 4, age=9))  # needs no decode worker
    assert d.names() == (["short"] if missing == "d0" else []) and scans
    add_worker(table, missing)
    assert "r0" in d.names()
