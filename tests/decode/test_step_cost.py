"""The expected time of a step."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import DraftRow, Row, StepOutcome, StepPlan
from decode.speculation import draft_model
from decode.speculation.step_cost import StepCost, StepModel
from tests.support.builders import make_layout

CURVE = [(1, 0.010), (8, 0.010), (64, 0.038)]


def test_cost_curve_is_interpolated_between_points_and_extrapolated_beyond_them() -> None:
    cost = StepCost(CURVE)
    assert cost.seconds(0) == 0.0
    assert cost.seconds(4) == pytest.approx(0.010)
    assert cost.seconds(36) == pytest.approx(0.024)
    assert cost.seconds(120) == pytest.approx(0.066)


def test_cost_curve_is_monotonic_despite_noise() -> None:
    assert StepCost([(1, 0.02), (2, 0.01)]).seconds(2) == pytest.approx(0.02)


def test_cost_estimate_follows_faster_steps_sooner_than_slower_ones() -> None:
    slow_start, stalled = StepCost(CURVE), StepCost(CURVE)
    slow_start.scale = 10.0  # measured while the machine was busy
    for _ in range(5):
        slow_start.observe(1, 0.010)
    assert slow_start.seconds(1) < 0.015
    stalled.observe(1, 10.0)
    assert stalled.seconds(1) < 0.014


def plan_of(*rows: int) -> StepPlan:
    return StepPlan(
        1, tuple(Row(SequenceId(f"s{i}"), 0, (1,) * n, (0,), SamplingParams(), n) for i, n in enumerate(rows))
    )


@pytest.mark.parametrize("wrong", [0.25, 1.0, 4.0])
def test_cost_of_a_draft_token_is_learned_separately_from_that_of_a_row(wrong: float) -> None:
    """The machine is 1.5 times as slow as measured, and draft tokens additionally cost `wrong` times as much."""
    model, noise = StepModel(rows=((1, 1e-3), (4, 2e-3)), per_draft_token=((1, 2e-4), (4, 8e-4))), random.Random(1)
    for _ in range(600):
        draft_tokens = noise.choice((0, 1, 2, 4))
        seconds = 1.5 * (1e-3 + 2e-4 * wrong * draft_tokens) * math.exp(noise.gauss(0.0, 0.2))
        model.observe(plan_of(1 + draft_tokens), StepOutcome(1, (), seconds), seconds)
    assert model.short_s(1, 1) == pytest.approx(1.5e-3, rel=0.15)
    assert model.short_s(1, 5) == pytest.approx(1.5e-3 * (1 + 0.8 * wrong), rel=0.15)
    assert model.short_s(4, 4) == pytest.approx(3e-3, rel=0.15)
    assert model.short_s(4, 8) == pytest.approx(3e-3 * (1 + 0.4 * wrong), rel=0.2)


def test_cost_of_a_draft_token_that_was_measured_as_free_is_learned() -> None:
    model, noise = StepModel(rows=((1, 1e-3), (4, 2e-3)), per_draft_token=((1, 0.0), (4, 0.0))), random.Random(1)
    assert model.short_s(1, 2) == pytest.approx(1.03e-3) and model.short_s(4, 8) == pytest.approx(2.06e-3)
    for _ in range(600):
        draft_tokens = noise.choice((0, 1, 2, 4))
        seconds = (1e-3 + 2e-4 * draft_tokens) * math.exp(noise.gauss(0.0, 0.2))
        model.observe(plan_of(1 + draft_tokens), StepOutcome(1, (), seconds), seconds)
    assert model.short_s(1, 1) == pytest.approx(1e-3, rel=0.15)
    assert model.short_s(1, 5) == pytest.approx(1.8e-3, rel=0.15)


def test_switching_cost_after_the_draft_model_is_not_part_of_a_plain_step() -> None:
    """If every step has draft tokens, only the measured switching cost separates the two."""
    rows, more, switching_s = ((1, 1e-3), (4, 2e-3)), ((1, 5e-5), (4, 2e-4)), 4e-4
    model, noise = StepModel(rows=rows, per_draft_token=more, switching_s=switching_s), random.Random(1)
    for _ in range(600):
        draft_tokens = noise.choice((1, 1, 2, 4))
        drafting = DraftRow(SequenceId("s0"), 0, (1,), (0,), draft_tokens, 0)
        plan = replace(plan_of(1 + draft_tokens), drafts=(drafting,))
        seconds = 1.5 * (1e-3 + switching_s + 5e-5 * draft_tokens) * math.exp(noise.gauss(0.0, 0.2))
        model.observe(plan, StepOutcome(1, (), seconds), seconds)
    assert model.short_s(1, 1) == pytest.approx(1.5e-3, rel=0.15)
    assert model.any_draft_s == pytest.approx(1.5 * switching_s, rel=0.15)
    alone = model.of_one_row()
    assert alone is not None and alone[1] > model.any_draft_s


def test_noise_alone_changes_no_estimate() -> None:
    model, noise = StepModel(rows=((1, 1e-3), (4, 2e-3)), per_draft_token=((1, 2e-4), (4, 8e-4))), random.Random(2)
    for _ in range(20_000):
        seconds = 1e-3 * math.exp(noise.gauss(0.0, 0.4))
        model.observe(plan_of(1), StepOutcome(1, (), seconds), seconds)
    assert model.more == 1.0 and 0.7 < model.short.scale < 1.3


def test_single_stall_does_not_change_the_estimated_step_overhead() -> None:
    model, plan = StepModel(), plan_of(1)
    for wall_s in (0.500, 0.002, 0.002, 0.002, 0.002, 3.0, 0.002):
        model.observe(plan, StepOutcome(1, ((1,),), 0.001), wall_s)
    assert model.fixed_s == pytest.approx(0.001, rel=0.15)


def test_tokens_within_returns_the_tokens_that_fit_a_time_budget() -> None:
    assert StepCost(CURVE).tokens_within(0.024, 512) == 36
    assert StepCost(CURVE).tokens_within(0.005, 512) == 0
    assert StepCost(CURVE).tokens_within(1.0, 100) == 100


def test_slow_draft_model_is_timed_for_a_limited_time() -> None:
    calls: list[list[int]] = []

    def propose(plan: Any, counts: list[int]) -> None:
        calls.append(counts)
        time.sleep(0.02 * counts[0])

    layout = make_layout(16)
    draft: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=layout, propose=propose)
    draft.can_propose, draft.can_queue_draft_tokens, draft.kernels = True, False, "avx2"
    ((rows, first_s),), ((same, seconds),) = draft_model.measure_passes(draft, 0.05)
    assert rows == same == 1 and seconds > 0.01 and first_s > 0.01 and calls == [[1], [6]]
    draft.kernels = "torch's"  # as on a GPU, which captures a step's shape on first use
    assert draft_model.measure_passes(draft, 0.05) and calls[2:] == [[6], [1], [6]]
    draft.can_propose = False
    assert draft_model.measure_passes(draft) == ([], [])


def test_draft_tokens_and_steps_on_a_gpu_are_timed_as_they_run_in_serving() -> None:
    """Draft tokens are timed by the seconds that the device reports after it has finished them."""
    waited: list[int] = []

    def queue_draft_tokens(plan: StepPlan, counts: list[int]) -> Any:
        ended = SimpleNamespace(synchronize=lambda: waited.append(len(counts)))
        return SimpleNamespace(ended=ended, seconds=counts[0] * 1.0)

    launched: list[StepPlan] = []
    gpu: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=make_layout(16), kernels="compiled")
    gpu.can_propose = gpu.can_queue_draft_tokens = gpu.launches_ahead = True
    gpu.queue_draft_tokens, gpu.step = queue_draft_tokens, launched.append
    assert draft_model.measure_passes(gpu, 60.0) == (
        [(n, 1.0) for n in (1, 4, 16, 64)],
        [(n, 1.0) for n in (1, 4, 16, 64)],
    )
    assert waited.count(1) == waited.count(64) == 10, "each is waited for"
    assert len(draft_model.measure_rows(gpu, 60.0)[0]) == 4 and draft_model.measure_steps(gpu, 512, 60.0)
    assert {row.num_sampled for plan in launched for row in plan.rows} >= {1, 5, 8}


def test_fills_are_timed_without_sampling_and_within_the_available_blocks() -> None:
    """A row that samples nothing costs a third of one that samples at every token."""
    plans: list[StepPlan] = []
    layout = make_layout(16)
    draft: Any = SimpleNamespace(
        max_model_len=300, num_blocks=512, layout=layout, step=plans.append, launches_ahead=False
    )
    points = draft_model.measure_fills(draft, 512)
    assert [tokens for tokens, _ in points] == [1, 2, 4, 9, 16, 32, 64, 128, 256]
    rows = [plan.rows[0] for plan in plans]
    assert {len(plan.rows) for plan in plans} == {1} and {row.num_sampled for row in rows} == {0}
    assert {len(row.tokens) for row in rows} == {tokens for tokens, _ in points}
    assert all(row.end <= 300 and row.end <= 16 * len(row.block_ids) for row in rows)
    draft.num_blocks = 4
    assert draft_model.measure_fills(draft, 512)[-1][0] == 64


def test_short_steps_are_timed_after_steps_of_the_same_shape() -> None:
    """A step takes longer after one of another size, and the plain step is the baseline for all draft tokens."""
    last: list[StepPlan] = []

    def step(plan: StepPlan) -> None:
        alike = bool(last) and last[-1] == plan
        last.append(plan)
        time.sleep(0.0005 if alike else 0.004)

    runner: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=make_layout(16), step=step)
    runner.launches_ahead = False
    rows, per_draft_token = draft_model.measure_rows(runner)
    assert [n for n, _ in rows] == [n for n, _ in per_draft_token] == [1, 4, 16, 64]
    assert rows[0][1] < 0.003 and rows[1][1] < 0.003 < rows[2][1]


@pytest.mark.parametrize(("step_s", "turns"), [(0.003, 24), (0.1, 1)])
def test_step_after_the_draft_model_is_timed_against_a_step_after_a_step(
    step_s: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer steps are timed if the model is slow."""
    clock, after_draft, proposed = [0.0], [False], [0]

    def step(plan: StepPlan) -> None:
        assert [len(row.tokens) for row in plan.rows] == [2]
        clock[0] += step_s + 0.002 * after_draft[0]
        after_draft[0] = False

    def propose(plan: StepPlan, counts: list[int]) -> None:
        assert counts == [1]
        proposed[0] += 1
        after_draft[0] = True

    monkeypatch.setattr(draft_model, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    runner: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=make_layout(16), step=step)
    draft: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=make_layout(16), propose=propose)
    draft.can_propose, draft.can_queue_draft_tokens = True, False
    assert draft_model.measure_switching(draft, runner) == pytest.approx(0.002)
    assert proposed[0] == turns
    draft.can_queue_draft_tokens = True
    assert draft_model.measure_switching(draft, runner) == 0.0, "on a GPU they are computed ahead"


def test_planning_with_draft_tokens_is_timed_against_planning_without() -> None:
    plans: list[StepPlan] = []
    runner: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=make_layout(16), step=plans.append)
    assert 0.0 < draft_model.measure_planning(runner, 60.0) < 0.1  # enough time for a busy machine, too
    assert len(plans) > 40, "a step lies between every plan and its outcome"
    runner.layout = make_layout(16, window=32, full=1)
    draft_model.measure_planning(runner, 60.0)
    assert len(plans[-1].rows[0].block_ids) == runner.layout.groups == 3, "a block of each group"
    runner.max_model_len = 20
    assert draft_model.measure_planning(runner) == 0.0, "a model too short for it"


def test_planning_with_a_slow_model_is_timed_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a quarter of the time that the whole measurement may take."""
    plans: list[StepPlan] = []
    part_s = draft_model.MEASURING_S / 16
    monkeypatch.setattr(draft_model, "time", SimpleNamespace(perf_counter=lambda: len(plans) * part_s))
    runner: Any = SimpleNamespace(max_model_len=2048, num_blocks=512, layout=make_layout(16), step=plans.append)
    assert draft_model.measure_planning(runner) >= 0.0
    assert len(plans) == 6, "two more after four have taken it all"


def test_planning_cost_follows_the_load() -> None:
    model = StepModel(rows=((1, 1e-3), (4, 2e-3)), per_draft_token=((1, 2e-4), (4, 8e-4)), planning_s=1e-4)
    assert model.planning_s == 1e-4
    for _ in range(200):
        model.observe(plan_of(1), StepOutcome(1, (), 2e-3), 2e-3)
    assert model.planning_s == pytest.approx(2e-4, rel=0.05)


def test_cost_of_a_single_row_is_the_sum_of_its_parts() -> None:
    curves = ([(1, 1e-3)], [(1, 9e-3)], [(1, 1e-4), (4, 2e-4)], [(1, 3e-4), (4, 5e-4)])
    model = StepModel(*curves, rows=((1, 1e-3), (4, 2e-3)), per_draft_token=((1, 2e-4), (4, 8e-4)), planning_s=1e-4)
    model.observe(plan_of(1), StepOutcome(1, (), 1.2e-3), 1.5e-3)
    plain_s, first_s, next_s = model.of_one_row() or (0.0, 0.0, 0.0)
    assert plain_s == pytest.approx(model.short_s(1, 1) + 3e-4) and model.short.scale > 1.0
    assert first_s == pytest.approx(model.short_s(1, 2) - model.short_s(1, 1) + 3e-4 + model.planning_s)
    assert next_s == pytest.approx(model.short_s(1, 3) - model.short_s(1, 2) + 1e-4)
    assert StepModel().of_one_row() is None, "what a draft token adds has no price of its own"


def test_overhead_of_draft_tokens_is_not_attributed_to_every_step() -> None:
    """Otherwise steps without draft tokens are overpriced, and drafting continues where it does not pay."""
    model = StepModel(rows=((1, 1e-3), (4, 2e-3)), per_draft_token=((1, 2e-4), (4, 8e-4)), planning_s=1e-4)
    (row,) = plan_of(3).rows
    drafting = StepPlan(1, (row,), (DraftRow(row.sequence_id, 0, (1,), (0,), 2, 0),))
    for _ in range(200):
        model.observe(drafting, StepOutcome(1, (), 1.8e-3, draft_s=4e-4), 2.0e-3)
    assert model.planning_s == pytest.approx(1e-4, rel=0.1)
    assert model.fixed_s == pytest.approx(1e-4, rel=0.1), "of 0.2 ms around these steps half comes with draft tokens"
    for _ in range(200):
        model.observe(drafting, StepOutcome(1, (), 1.8e-3, draft_s=4e-4), 1.8e-3 + 0.8 * model.planning_s)
    assert model.fixed_s == pytest.approx(0.4 * model.planning_s, rel=0.1), "what they add was timed too dear"


def test_worker_without_speculation_also_estimates_step_costs() -> None:
    """No draft tokens were timed."""
    model = StepModel([(1, 1e-3), (8, 2e-3)], [(1, 1e-6)], [], [], rows=[], per_draft_token=[])
    for rows in (1, 4, 64):
        model.observe(plan_of(*[1] * rows), StepOutcome(1, (), 2e-3), 2e-3)
    assert model.long_tokens(1) > 1
