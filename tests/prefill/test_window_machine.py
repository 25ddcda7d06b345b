"""PrefillScheduler for models whose layers all have a window, under random prompts, steps, aborts and hand-overs.

The model tracks what is in every slot of the pool: a row may be computed only if KV of its own tokens is in all
positions that it attends to, and no block of its table may be written to by others while it is outstanding.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.step import Row, StepPlan
from baton.core.window import STEPS_AHEAD, Window
from tests.support.builders import make_layout, make_outcome, make_prefill, make_request
from tests.support.decode_contract import Tracked, WrittenKV


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        spare=st.integers(0, 12),
        block_size=st.integers(1, 3),
        step_tokens=st.integers(1, 4),
        prefix_cache=st.sampled_from([True, True, False]),
        plan_ahead=st.booleans(),
        window=st.integers(1, 7),
        full=st.integers(0, 1),
    )
    def start(
        self,
        spare: int,
        block_size: int,
        step_tokens: int,
        prefix_cache: bool,
        plan_ahead: bool,
        window: int,
        full: int,
    ) -> None:
        layout = make_layout(block_size, window=window, full=full)
        limit = Window.of(layout).max_blocks(40, step_tokens * (STEPS_AHEAD if plan_ahead else 1))
        self.scheduler = make_prefill(
            limit + spare,
            block_size=block_size,
            step_tokens=step_tokens,
            prefix_cache=prefix_cache,
            plan_ahead=plan_ahead,
            window=window,
            full=full,
        )
        self.window, self.size = Window.of(self.scheduler.layout), block_size
        self.kv = WrittenKV(block_size, self.window)
        self.tracked: dict[str, Tracked] = {}
        self.plans: list[StepPlan] = []
        self.submitted = 0

    @rule(prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3), other=st.integers(0, 3))
    def submit(self, prompts: list[int], other: int) -> None:
        for prompt in prompts:
            self.submitted += 1
            tokens = (int(other == 0), *range(1001, 1000 + prompt))
            request = make_request(f"r{self.submitted}", tokens, 2)
            self.scheduler.submit(request, 0.0, hand_over=other != 1)
            self.tracked[request.request_id] = Tracked(request)

    def of(self, row: Row) -> Tracked:
        return self.tracked[row.sequence_id.request_id]

    @rule()
    def begin(self) -> None:
        plan = self.scheduler.begin_step(0.0)
        if plan is None:
            return
        for row in plan.rows:
            assert row.end <= self.scheduler.layout.positions_in(len(row.block_ids))
            self.kv.check(self.of(row), row.block_ids, row.start, self.window.first_position(row.start))
            self.kv.write(self.of(row), row.block_ids, row.start, row.tokens)
        self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule()
    def finish(self) -> None:
        plan = self.plans.pop(0)
        for row in plan.rows:  # also what masks hide, as kernels may load it
            dropped = row.block_ids.count(self.scheduler.cache.null_block) // self.window.sliding
            self.kv.check(self.of(row), row.block_ids, row.end, dropped * self.size)
        self.scheduler.finish_step(make_outcome(plan), 1.0)

    @precondition(lambda self: self.scheduler.num_sequences)
    @rule(data=st.data(), abort=st.booleans())
    def hand_over_ends(self, data: st.DataObject, abort: bool) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.scheduler.sequence_ids())))
        if abort:
            self.scheduler.abort(sequence)
        self.scheduler.release_send(sequence)

    @precondition(lambda self: self.scheduler.num_sequences)
    @rule(data=st.data())
    def next_attempt(self, data: st.DataObject) -> None:
        sequence = self.scheduler.sequences[data.draw(st.sampled_from(sorted(self.scheduler.sequence_ids())))]
        if sequence.send_pinned and not self.scheduler.num_running and not self.scheduler.num_waiting:
            self.scheduler.begin_attempt(sequence, sequence.id.attempt + 1)

    @rule(count=st.integers(1, 12), outstanding=st.integers(1, 2))
    def several_steps(self, count: int, outstanding: int) -> None:
        for _ in range(count):
            while len(self.plans) < outstanding:
                planned = len(self.plans)
                self.begin()
                if len(self.plans) == planned:
                    break
            if self.plans:
                self.finish()

    @invariant()
    def pinned_kv_is_that_of_the_prompt(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        for sequence in self.scheduler.sequences.values():
            total, blocks = sequence.request.num_prefill_tokens, sequence.block_ids
            if sequence.send_pinned and blocks:
                start = self.window.first_position(total)
                self.kv.check(self.tracked[sequence.id.request_id], blocks, sequence.num_computed, start)

    def teardown(self) -> None:
        """In any state, all prompts are computed while the hand-overs of those before them end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(200 * (self.submitted + 1)):
            self.begin()
            if self.plans:
                self.finish()
            else:
                for sequence in self.scheduler.sequence_ids():
                    if self.scheduler.sequences[sequence].computed_at is not None:
                        self.scheduler.release_send(sequence)
            if not self.scheduler.num_sequences:
                break
        assert not self.scheduler.num_sequences, "prompts that are never computed"
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks
        self.scheduler.check()


WindowMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestPrefillWindow = WindowMachine.TestCase


def test_a_prompt_of_20_windows_holds_a_window_and_a_step() -> None:
    scheduler = make_prefill(num_blocks=40, block_size=4, step_tokens=8, window=16)
    sequence = scheduler.submit(make_request("long", 320), 0.0, hand_over=True)
    peak = 0
    while sequence.computed_at is None:
        plan = scheduler.begin_step(0.0)
        assert plan is not None
        peak = max(peak, len(scheduler.cache.held(sequence)))
        scheduler.finish_step(make_outcome(plan), 0.0)
    assert peak == 7  # ceil((16 - 1 + 8) / 4) + 1; the prompt has 80
    assert scheduler.blocks.counts().pinned == 4, "positions 305 to 319"
    scheduler.release_send(sequence.id)
    scheduler.check()


@pytest.mark.parametrize("seed", range(60))
def test_prompts_that_share_blocks_never_all_wait_for_one(seed: int) -> None:
    """In pools that hold the blocks of one or two prompts; most begin with the same tokens. They are of one tenant,
    or of two that take turns, so that none is computed to its end before others."""
    random = Random(seed)
    size, step, ahead = random.choice([1, 2]), random.randint(1, 3), random.random() < 0.3
    window, full, tenants = random.randint(4, 16), seed % 2, 1 + seed // 2 % 2
    layout = make_layout(size, window=window, full=full)
    limit = Window.of(layout).max_blocks(60, step * (STEPS_AHEAD if ahead else 1))
    pool = limit + random.randint(0, limit)
    scheduler = make_prefill(pool, block_size=size, step_tokens=step, window=window, full=full, plan_ahead=ahead)
    plans, submitted = list[StepPlan](), 0
    while submitted < 6 or scheduler.num_sequences:
        if submitted < 6 and (random.random() < 0.1 or not scheduler.num_sequences):
            submitted += 1
            tokens = (random.choice([0, 0, 0, 1]), *range(1001, 1000 + random.randint(20, 60)))
            request = replace(make_request(f"r{submitted}", tokens, 2), tenant=f"t{submitted % tenants}")
            scheduler.submit(request, 0.0, hand_over=False)
        plan = scheduler.begin_step(0.0)
        plans += [plan] if plan else []
        assert plans, f"no prompt can continue: {scheduler!r}"
        if len(plans) > 1 or plan is None or random.random() < 0.6:
            scheduler.finish_step(make_outcome(plans.pop(0)), 0.0)
    scheduler.check()


def test_dropped_blocks_of_suspect_kv_leave_the_cache() -> None:
    scheduler = make_prefill(num_blocks=40, block_size=4, step_tokens=8, window=8)
    sequence = scheduler.submit(make_request("long", 64), 0.0, hand_over=True)
    for _ in range(6):
        plan = scheduler.begin_step(0.0)
        assert plan is not None
        scheduler.finish_step(make_outcome(plan), 0.0)
    assert sequence.num_dropped == 10 and len(scheduler.cache) == 12
    scheduler.mark_kv_suspect(sequence.id)
    assert len(scheduler.cache) == 0
    scheduler.check()
