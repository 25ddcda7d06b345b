"""Whose prompts a prefill worker computes next, and with how many others in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.request import SequenceId
from prefill.scheduler import ACTIVE_S, FIXED_SHARE, LEAST_TOKENS, PrefillScheduler
from tests.support.builders import make_outcome, make_prefill, make_request

STEP_S, TOKEN_S = 0.001, 0.001


def scheduler(step_tokens: int) -> PrefillScheduler:
    return make_prefill(num_blocks=max(64, step_tokens), step_tokens=step_tokens, prefix_cache=False)


def submit(worker: PrefillScheduler, *prompts: tuple[str, int], priority: int = 0, now: float = 0.0) -> None:
    """Submits requests by name, the first letter of which is their tenant, and number of tokens."""
    for name, tokens in prompts:
        request = replace(make_request(name, tokens), tenant=name[0], priority=priority)
        worker.submit(request, now, hand_over=True)


def step(worker: PrefillScheduler, now: float = 0.0, seconds: float = 0.0) -> str:
    """Computes a step; returns the names of its rows."""
    plan = worker.begin_step(now)
    assert plan is not None
    worker.finish_step(make_outcome(plan), now + seconds)
    return " ".join(row.sequence_id.request_id for row in plan.rows)


def measured(step_s: float = STEP_S, step_tokens: int = 16) -> PrefillScheduler:
    """A worker that knows what its steps cost."""
    worker, now = scheduler(step_tokens), 0.0
    for number in range(20):
        tokens = 2 + number % 3
        submit(worker, (f"z{number}", tokens))
        step(worker, now, step_s + TOKEN_S * tokens)
        now += 1.0
    return worker


def test_another_tenant_does_not_wait_for_the_prompts_of_one() -> None:
    worker = scheduler(4)
    submit(worker, ("a1", 4), ("a2", 4), ("a3", 4))
    assert step(worker) == "a1"
    submit(worker, ("b1", 4))
    assert [step(worker) for _ in range(3)] == ["b1", "a2", "a3"]


def test_tenants_take_turns_by_tokens() -> None:
    worker = scheduler(4)
    submit(worker, ("a1", 8), ("a2", 4), ("b1", 4), ("b2", 4), ("b3", 4))
    assert [step(worker) for _ in range(6)] == ["a2", "b1", "a1", "b2", "a1", "b3"]


def test_time_without_requests_earns_no_credit() -> None:
    worker = scheduler(4)
    for number in range(8):
        submit(worker, (f"a{number}", 4))
        step(worker)
    submit(worker, ("a8", 4), ("a9", 4), ("b1", 4), ("b2", 4))
    assert [step(worker) for _ in range(4)] == ["b1", "a8", "b2", "a9"]


def test_priority_goes_before_tenants() -> None:
    worker = scheduler(4)
    submit(worker, ("a1", 4), ("b1", 4), priority=1)
    submit(worker, ("a2", 4), ("a3", 4))
    assert [step(worker) for _ in range(4)] == ["a2", "a3", "b1", "a1"]


def test_a_prompt_is_computed_alone_where_joining_costs_more_than_a_step() -> None:
    worker = measured()
    submit(worker, ("a1", 4), ("b1", 4))
    assert [step(worker, 100.0) for _ in range(2)] == ["a1", "b1"]


def test_prompts_join_where_a_step_costs_more() -> None:
    worker = measured(step_s=0.1)
    submit(worker, ("a1", 4), ("b1", 4))
    assert step(worker, 100.0) == "a1 b1"


def test_steps_are_full_while_more_waits_than_one_holds() -> None:
    worker = measured()
    submit(worker, *((f"a{number}", 4) for number in range(6)))
    assert step(worker, 100.0) == "a0 a1 a2 a3"
    assert step(worker, 100.0) == "a4"


def test_full_steps_are_as_short_as_their_fixed_time_allows_while_several_tenants_send_prompts() -> None:
    worker = measured(step_s=20 * TOKEN_S, step_tokens=512)
    submit(worker, *((f"a{number}", 96) for number in range(20)), now=100.0)
    assert step(worker, 100.0) == "a0 a1 a2 a3 a4 a5", "five and a third"
    submit(worker, ("b1", 96), now=101.0)
    assert 20 / FIXED_SHARE == 96 + 64 + 40
    assert step(worker, 101.0) == "b1 a5 a6", "the last of them is not cut"
    assert step(worker, 102.0) == "a7 a8 a9"
    assert step(worker, 101.0 + ACTIVE_S) == "a10 a11 a12 a13 a14 a15"


def test_a_full_step_has_a_least_length_and_cuts_a_longer_prompt() -> None:
    worker = measured(step_s=TOKEN_S, step_tokens=512)
    submit(worker, ("a1", LEAST_TOKENS - 28), ("b1", LEAST_TOKENS + 72), now=100.0)
    plan = worker.begin_step(100.0)
    assert plan is not None
    assert [len(row.tokens) for row in plan.rows] == [100, 28]


@pytest.mark.parametrize("seconds", [0.5, 5.0])
def test_steps_with_long_contexts_are_not_measured(seconds: float) -> None:
    worker = measured()
    submit(worker, ("a1", 64))
    for number in range(4):
        step(worker, 100.0 + 10 * number, seconds=0.017 if number == 0 else seconds)
    submit(worker, ("a2", 4), ("a3", 4))
    assert [step(worker, 200.0) for _ in range(2)] == ["a2", "a3"]


def test_a_prompt_of_many_steps_gives_way_after_each_and_keeps_its_blocks() -> None:
    worker = scheduler(4)
    submit(worker, ("a1", 40))
    assert step(worker) == "a1"
    held = worker.block_ids(SequenceId("a1"))
    submit(worker, ("b1", 4))
    assert [step(worker) for _ in range(2)] == ["b1", "a1"]
    submit(worker, ("b2", 4), ("b3", 4))
    assert [step(worker) for _ in range(4)] == ["b2", "a1", "b3", "a1"]
    assert worker.block_ids(SequenceId("a1")) == held


def test_its_tenant_has_its_share_while_others_arrive_without_end() -> None:
    worker, names = scheduler(4), list[str]()
    submit(worker, ("a1", 40))
    for number in range(21):
        submit(worker, (f"b{number}", 4))
        names.append(step(worker))
    assert names.count("a1") == 10


def test_a_prompt_of_many_steps_continues_while_another_waits_for_blocks() -> None:
    worker = scheduler(16)
    submit(worker, ("a1", 240))
    assert step(worker) == "a1"
    submit(worker, ("b1", 20))
    assert [step(worker) for _ in range(14)] == ["a1"] * 14, "four of 64 blocks are free, and b1 needs five"
    assert worker.begin_step(0.0) is None
    worker.release_send(SequenceId("a1"))
    assert step(worker) == "b1"
    worker.check()
