"""DecodeScheduler for models whose layers all have a window: what it receives, keeps and gives back."""

from __future__ import annotations

import pytest

from baton.core.errors import Unavailable
from decode.scheduler import DecodeScheduler
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from tests.support.builders import make_decode, make_outcome, make_request

WINDOW, BLOCK, STEP = 16, 4, 16


def decode(num_blocks: int, *, plan_ahead: bool = False, prefix_cache: bool = True, full: int = 0) -> DecodeScheduler:
    speculation = Speculation(model=StepModel(step_tokens=STEP))
    options = {"plan_ahead": plan_ahead, "prefix_cache": prefix_cache, "full": full}
    return make_decode(num_blocks, block_size=BLOCK, window=WINDOW, speculation=speculation, **options)


def test_only_the_window_of_a_prompt_is_received() -> None:
    scheduler = decode(10)
    sequence = scheduler.reserve(make_request("r", 20 * WINDOW, 60), 0.0)
    assert sequence.prefix_tokens == 20 * WINDOW - (WINDOW - 1), "what position 320 attends to"
    assert scheduler.blocks.num_free == 10 - 4
    assert scheduler.bytes_reused == 0
    scheduler.tokens_received(sequence.id, 310)
    assert sequence.num_computed == 308, "whole blocks, the first of which begins before what was received"
    assert scheduler.received(sequence.id, 7, 0.0) is None
    scheduler.check()
    assert len(scheduler.cache) == 3, "not the first block, which is not whole"


@pytest.mark.parametrize("plan_ahead", [False, True])
def test_an_output_of_many_windows_stays_within_few_blocks(plan_ahead: bool) -> None:
    scheduler = decode(13, plan_ahead=plan_ahead)
    sequence = scheduler.reserve(make_request("r", 320, 200, eos=()), 0.0)
    scheduler.received(sequence.id, 7, 0.0)
    peak, plans = 0, []
    while sequence.id in scheduler.sequences:
        while (plan := scheduler.begin_step(0.0)) is not None:
            plans.append(plan)
        peak = max(peak, len(scheduler.cache.held(sequence)) + len(sequence.retired))
        scheduler.finish_step(make_outcome(plans.pop(0)), 0.0)
        scheduler.check()
    assert peak == 5 + plan_ahead
    assert scheduler.preemptions == 0
    assert scheduler.blocks.num_free == 13


def test_a_prompt_computed_here_and_a_preempted_one_need_the_blocks_of_a_window_and_a_step() -> None:
    scheduler = decode(9, prefix_cache=False)
    sequence = scheduler.submit(make_request("here", 320, 40, eos=()), 0.0)
    preempted = False
    while sequence.id in scheduler.sequences:
        plan = scheduler.begin_step(0.0)
        assert plan is not None
        scheduler.finish_step(make_outcome(plan), 0.0)
        scheduler.check()
        if not preempted and len(sequence.output) == 20:
            preempted = True
            scheduler._preempt(sequence)
    assert scheduler.preemptions == 1 and scheduler.prompt_tokens_computed == 2 * 320


def test_what_could_never_fit_is_refused() -> None:
    scheduler = decode(8)
    with pytest.raises(Unavailable, match="needs 9 blocks; this decode worker has 8"):
        scheduler.submit(make_request("long", 320, 40), 0.0)


@pytest.mark.parametrize("full", [0, 1])
def test_the_next_turn_shares_the_blocks_of_its_window(full: int) -> None:
    scheduler = decode(300, full=full)
    first = scheduler.reserve(make_request("a", 320, 40, eos=()), 0.0)
    scheduler.received(first.id, 7, 0.0)
    while first.id in scheduler.sequences:
        plan = scheduler.begin_step(0.0)
        assert plan is not None
        scheduler.finish_step(make_outcome(plan), 0.0)
    turn = first.tokens(0, first.num_tokens)
    second = scheduler.reserve(make_request("b", (*turn, *range(3000, 3010)), 40), 0.0)
    total = len(turn) + 10
    assert (second.num_dropped, second.prefix_tokens) == ((total - 15) // BLOCK, 356)
    sliding = [layer.bytes_per_token for layer in scheduler.layout.layers if layer.window]
    others = scheduler.layout.bytes_per_token - sum(sliding)
    assert scheduler.bytes_reused == 356 * others + (356 - (total - 15)) * sum(sliding), "as much is not received"
    scheduler.check()
