"""Prompts of several tenants at one worker: what is placed beside a prompt of many steps, and what goes past one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import virtual_counters
from baton.core.events import Load
from coordinator.policy.choice import Choice
from coordinator.policy.membership import WorkerState
from coordinator.policy.pool import BACKLOG_STEPS, LONG_STEPS
from coordinator.policy.quotas import Client
from coordinator.policy.split import Split
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker, bring_to
from tests.support.placing import Placing, make_choice

STEP, LONG = 8, 160


def of(name: str, prompt: int, output: int = 4, priority: int = 0) -> Choice:
    """The first letter of its name is its tenant."""
    client = Client(name[0], name[0])
    return make_choice(name, prompt, prompt + output - 1, age=int(name[1:]), priority=priority, client=client)


def placing(split: Split = "always", *workers: str, blocks: int = 1000) -> Placing:
    table = WorkerTable(3.0)
    for name in workers or ("p0", "d0"):
        add_worker(table, name, step_tokens=STEP, blocks=blocks)
    d = Placing(table)
    d.dispatcher.split = split
    return d


def submit(d: Placing, *choices: Choice) -> list[str]:
    """Returns the names of what is placed then."""
    for choice in choices:
        d.submit(choice)
    names = d.names()
    d.check()
    return names


@pytest.mark.parametrize(("split", "workers"), [("always", ("p0", "d0")), ("never", ("d0",))])
def test_prompts_of_others_are_placed_beside_a_long_one_as_far_as_they_are_computed_soon(
    split: Split, workers: tuple[str, ...]
) -> None:
    d = placing(split, *workers)
    assert submit(d, of("a1", LONG)) == ["a1"]
    assert submit(d, of("b2", 4), of("c3", 4), of("d4", 4)) == ["b2", "c3", "d4"]
    assert submit(d, of("e5", 4)) == [], (
        "five tenants have a turn of four tokens before it is done: more than two steps"
    )
    assert submit(d, of("a6", 1)) == [], "after its own tenant's"
    d.prefilled("b2") if split == "always" else d.handed_over("b2")
    assert d.names() == ["e5"]
    d.check()


def test_a_long_prompt_is_placed_beside_two_steps_of_others() -> None:
    d = placing()
    assert submit(d, of("b1", 2 * STEP)) == ["b1"]
    assert submit(d, of("a2", LONG_STEPS * STEP)) == [], "of four steps: it waits for an idle worker"
    d.finish("a2")
    assert submit(d, of("a3", LONG)) == ["a3"]
    assert submit(d, of("c4", LONG)) == []
    d.prefilled("a3")
    assert d.names() == ["c4"]


def test_one_tenant_alone_has_two_steps_or_one_long_prompt() -> None:
    d = placing()
    assert submit(d, of("a1", STEP), of("a2", STEP), of("a3", 1)) == ["a1", "a2"]
    d.prefilled("a1")
    assert submit(d, of("a4", LONG)) == ["a3"], "a4 waits for an idle worker"
    assert d.dispatcher.role_without_room == "prefill"
    assert submit(d, of("a5", 1)) == [], "and is not overtaken"
    d.prefilled("a2")
    d.prefilled("a3")
    assert d.names() == ["a4"]


def test_others_go_past_a_prompt_without_room_until_they_have_received_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_counters, "IDLE_CREDIT", 0)
    d = placing()
    assert submit(d, of("a1", LONG)) == ["a1"]
    assert submit(d, of("a2", 40)) == []
    for number in range(3, 13):
        assert submit(d, of(f"b{number}", 4)) == [f"b{number}"]
        d.finish(f"b{number}")
    assert submit(d, of("b13", 4)) == [], "40 tokens, too"
    assert submit(d, of("c14", 4)) == ["c14"]
    d.prefilled("a1")
    assert d.names() == ["a2", "b13"]
    d.check()


def test_a_lower_priority_goes_past_nothing_and_a_higher_one_is_first() -> None:
    d = placing()
    assert submit(d, of("a1", LONG), of("a2", LONG)) == ["a1"]
    assert submit(d, of("b3", 4, priority=1)) == []
    assert submit(d, of("b4", 4, priority=-1)) == ["b4"]
    assert submit(d, of("b5", 4)) == ["b5"]


def test_a_choice_that_waits_for_kv_blocks_is_not_overtaken() -> None:
    d = placing("always", "p0", "p1", "d0", blocks=60)
    assert submit(d, of("a1", 100), of("b2", 4)) == ["a1", "b2"]
    assert submit(d, of("c3", 150), of("b4", 4)) == [], "b4 would take blocks that c3 needs"
    assert d.dispatcher.role_without_room == "decode"


def test_a_rescheduled_choice_is_not_overtaken() -> None:
    d = placing("always", "p0", "p1", "d0")
    assert submit(d, of("a1", LONG), of("c2", LONG)) == ["a1", "c2"]
    bring_to(d.worker("p0"), WorkerState.DRAINING)
    d.reschedule("a1")
    assert submit(d, of("b3", 4)) == [], "a client waits in the middle of an answer"
    d.prefilled("c2")
    assert d.names() == ["a1", "b3"]


def test_the_worker_that_computes_a_prompt_first_is_chosen() -> None:
    d = placing("always", "p0", "p1", "d0")
    assert submit(d, of("a1", LONG), of("c2", LONG), of("a3", LONG)) == ["a1", "c2"]
    assert submit(d, of("b4", 4), of("b5", 4)) == ["b4", "b5"]
    assert [d.choices[name].prefill_worker for name in ("b4", "b5")] == ["p0", "p1"]


def test_prompts_of_others_are_placed_beside_one_of_few_steps() -> None:
    d = placing()
    assert submit(d, of("a1", 3 * STEP)) == ["a1"]
    assert submit(d, of("b2", 4), of("b3", 4), of("b4", 1)) == ["b2", "b3"], "b4 has two turns of b and a before it"
    assert submit(d, of("a5", 1)) == []


@pytest.mark.parametrize(("tokens", "placed"), [(BACKLOG_STEPS * STEP, []), (BACKLOG_STEPS * STEP + 1, ["c3"])])
def test_others_go_past_a_prompt_that_needs_an_idle_worker(tokens: int, placed: list[str]) -> None:
    d = placing()
    assert submit(d, of("a1", BACKLOG_STEPS * STEP)) == ["a1"]
    assert submit(d, of("b2", tokens)) == []
    assert submit(d, of("c3", 4)) == placed


def test_others_go_past_it_again_when_one_that_they_may_not_go_past_has_ended() -> None:
    d = placing(blocks=60)
    d.dispatcher.expectation.mean_tokens = 200.0
    assert submit(d, of("a1", BACKLOG_STEPS * STEP)) == ["a1"]
    assert submit(d, of("b2", BACKLOG_STEPS * STEP + 1)) == []
    d.worker("d0").load = Load(blocks_free=d.worker("d0").reserved_blocks + 10)
    assert submit(d, of("c3", 4, output=200)) == []
    assert submit(d, of("c4", 4)) == [], "it would take blocks that c3 needs"
    d.finish("c3")
    assert d.names() == ["c4"]


PROMPTS = st.tuples(st.sampled_from("abc"), st.sampled_from([1, 4, STEP, 2 * STEP, 3 * STEP, 4 * STEP, 5 * STEP, LONG]))


@pytest.mark.parametrize("split", ["always", "never"])
@given(events=st.lists(PROMPTS | st.integers(0, 5), max_size=30))
def test_what_goes_before_a_prompt_rises_only_when_one_is_placed_and_falls_only_when_one_is_done(
    split: Split, events: list[tuple[str, int] | int]
) -> None:
    """Else a worker that accepts a prompt could refuse it once it has less to compute, and the dispatcher, which asks
    again only when a backlog has fallen, would not see that it accepts one."""
    d = placing(split)
    worker, placed = d.worker("p0" if split == "always" else "d0"), list[str]()

    def before() -> list[int]:
        return [worker.before(tenant, tokens) for tenant in "abcd" for tokens in (1, STEP, LONG)]

    for number, event in enumerate(events, 1):
        earlier = before()
        if isinstance(event, tuple):
            d.submit(of(f"{event[0]}{number}", event[1]))
        elif event < len(placed):
            d.finish(placed.pop(event))
        done = before()
        assert all(now <= then for now, then in zip(done, earlier, strict=True))
        placed += d.names()
        assert all(now >= then for now, then in zip(before(), done, strict=True))
