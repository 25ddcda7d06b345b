"""What a decode worker does when its blocks run out, without a prefix cache for the blocks that it frees."""

from __future__ import annotations

import pytest

from baton.core.errors import Unavailable
from baton.core.request import SequenceId
from baton.core.step import StepPlan
from decode.anti_starvation import BOOST_TOKENS, TOKEN_GAP_S
from decode.scheduler import DecodeScheduler
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import make_decode, make_outcome, make_request


def ready(scheduler: DecodeScheduler, name: str, prompt: int = 4, max_tokens: int = 20, priority: int = 0) -> None:
    request = make_request(name, prompt, max_tokens, eos=(), priority=priority)
    scheduler.reserve(request, 0.0)
    scheduler.received(request.sequence_id, 5, 0.0)


def step(scheduler: DecodeScheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.begin_step(now)
    assert plan is not None
    scheduler.finish_step(make_outcome(plan), now)
    scheduler.check()
    return plan


def names(plan: StepPlan) -> list[str]:
    return [row.sequence_id.request_id for row in plan.rows]


def until_preempted(scheduler: DecodeScheduler, now: float = 0.0) -> StepPlan:
    while True:
        before, plan = scheduler.preemptions, step(scheduler, now)
        if scheduler.preemptions > before:
            return plan


def test_running_sequence_gives_its_place_to_an_older_one_that_has_the_blocks_it_needs() -> None:
    """Its KV arrived first. Otherwise both would wait for ever: one for a block, the other for a place."""
    scheduler = make_decode(8, block_size=2, max_running=1)
    older = make_request("older", 1, max_tokens=2)
    scheduler.reserve(older, 0.0)
    ready(scheduler, "newer", 12, max_tokens=4)
    step(scheduler)
    scheduler.received(older.sequence_id, 5, 0.0)
    assert names(step(scheduler)) == ["newer"]
    assert names(step(scheduler)) == ["older"] and scheduler.preemptions == 1
    while scheduler.num_sequences:
        assert names(step(scheduler)) == ["newer"]


def test_newest_sequence_is_preempted_and_recomputed_to_the_same_position() -> None:
    scheduler = make_decode(num_blocks=7, block_size=4, prefix_cache=False)
    ready(scheduler, "a")
    ready(scheduler, "b")
    assert names(until_preempted(scheduler)) == ["a"]
    output = list(scheduler.sequences[SequenceId("b")].output)
    while names(plan := step(scheduler)) == ["a"]:
        pass
    (row,) = plan.rows
    assert (row.start, len(row.tokens), row.num_sampled, row.output_index) == (0, 4 + len(output), 1, len(output))
    while scheduler.num_sequences:
        step(scheduler)
    assert scheduler.blocks.num_free == 7


def test_lower_priority_is_preempted_regardless_of_arrival_order() -> None:
    scheduler = make_decode(num_blocks=7, block_size=4, prefix_cache=False)
    ready(scheduler, "low", priority=1)
    ready(scheduler, "high", priority=0)
    assert names(until_preempted(scheduler)) == ["high"]


def test_new_sequence_is_refused_while_a_preempted_one_waits() -> None:
    """There are blocks for it, but the preempted sequence would wait longer."""
    scheduler = make_decode(num_blocks=7, block_size=4, prefix_cache=False)
    ready(scheduler, "a")
    ready(scheduler, "b")
    until_preempted(scheduler)
    scheduler.abort(SequenceId("a"))
    assert scheduler.blocks.num_free == 7 and scheduler.num_preempted == 1
    with pytest.raises(Unavailable, match="1 preempted") as caught:
        ready(scheduler, "new")
    assert caught.value.code == "no_free_blocks"
    assert names(step(scheduler)) == ["b"]


def test_sequence_that_can_preempt_no_other_waits_and_keeps_its_blocks() -> None:
    scheduler = make_decode(num_blocks=7, block_size=4, prefix_cache=False)
    ready(scheduler, "a", max_tokens=16)
    scheduler.reserve(make_request("arriving", 16, 2), 0.0)  # its blocks are being written
    for _ in range(8):
        step(scheduler)
    assert scheduler.begin_step(0.0) is None
    assert scheduler.preemptions == 0
    scheduler.received(SequenceId("arriving"), 5, 0.0)
    assert names(step(scheduler)) == ["a"]


def test_sequence_that_waited_too_long_is_boosted_for_some_tokens() -> None:
    scheduler = make_decode(num_blocks=16, block_size=4, prefix_cache=False)
    ready(scheduler, "a", max_tokens=60)
    ready(scheduler, "b", max_tokens=60)
    until_preempted(scheduler)
    plan = step(scheduler, TOKEN_GAP_S)
    assert names(plan) == ["b"], "it came back, and the blocks it needs are those of who ran until now"
    for _ in range(BOOST_TOKENS - 2):
        assert names(step(scheduler, 3 * TOKEN_GAP_S)) == ["b"]
    step(scheduler, 3 * TOKEN_GAP_S)
    assert names(step(scheduler, 3 * TOKEN_GAP_S)) == ["a"]


def test_recomputation_is_cut_into_chunks_that_fit_the_budget() -> None:
    costs = [(1, 0.001), (1000, 1.0)]
    speculation = Speculation(model=StepModel(costs, budget_s=0.0195))
    scheduler = make_decode(num_blocks=40, block_size=4, prefix_cache=False, speculation=speculation)
    ready(scheduler, "a", prompt=60, max_tokens=60)
    ready(scheduler, "b", prompt=60, max_tokens=60)
    until_preempted(scheduler)
    while names(step(scheduler)) == ["a"]:
        pass
    lengths = []
    while len(lengths) < 6:
        plan = step(scheduler)
        lengths.append((len(plan.rows[-1].tokens), plan.rows[-1].num_sampled))
    chunks = lengths[: lengths.index((1, 1))]
    assert all(tokens <= 19 for tokens, _ in chunks) and [n for _, n in chunks] == [0] * (len(chunks) - 1) + [1]
