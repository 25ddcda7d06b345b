"""Steps that a prefill worker plans while the one before computes: which, with which KV, and what the worker sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import StepPlan
from baton.transfer.staging_buffers import StagingBuffers, kept_limit
from prefill.worker import chunk_tokens
from tests.support.builders import make_outcome, make_prefill, make_request
from tests.support.fake_runner import FakeRunner
from tests.support.nodes import PrefillNode, pair, until


def ranges(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    return [] if plan is None else [(row.sequence_id.request_id, row.start, row.end) for row in plan.rows]


def test_next_chunk_of_a_prompt_is_planned_while_one_computes() -> None:
    scheduler = make_prefill(step_tokens=3, plan_ahead=True)
    scheduler.submit(make_request("a", 8), 0.0, hand_over=True)
    first, second = scheduler.begin_step(0.0), scheduler.begin_step(0.0)
    assert (ranges(first), ranges(second)) == ([("a", 0, 3)], [("a", 3, 6)])
    assert scheduler.begin_step(0.0) is None, "two steps are outstanding"
    assert first is not None and second is not None
    scheduler.finish_step(make_outcome(first), 0.0)
    third = scheduler.begin_step(0.0)
    assert ranges(third) == [("a", 6, 8)] and third is not None and third.rows[0].num_sampled == 1
    scheduler.finish_step(make_outcome(second), 0.0)
    assert scheduler.begin_step(0.0) is None, "all tokens of the prompt are in a row"
    (progress,) = scheduler.finish_step(make_outcome(third, 7), 0.0).progress
    assert progress.first_token == 7 and scheduler.steps_ahead == 2


def test_prompt_that_does_not_fill_a_step_waits_for_others() -> None:
    scheduler = make_prefill(step_tokens=8, plan_ahead=True)
    scheduler.submit(make_request("a", 4), 0.0, hand_over=True)
    out = scheduler.begin_step(0.0)
    scheduler.submit(make_request("b", (9, 9, 9)), 0.0, hand_over=True)
    assert scheduler.begin_step(0.0) is None
    scheduler.submit(make_request("c", (8, 8, 8, 8, 8)), 0.0, hand_over=True)
    assert ranges(scheduler.begin_step(0.0)) == [("b", 0, 3), ("c", 0, 5)] and out is not None


def test_prompt_that_gets_no_blocks_does_not_count_towards_a_full_step() -> None:
    scheduler = make_prefill(num_blocks=4, block_size=4, step_tokens=8, plan_ahead=True)
    scheduler.submit(make_request("a", 8), 0.0, hand_over=False)
    out = scheduler.begin_step(0.0)
    scheduler.submit(make_request("b", (9, 9, 9)), 0.0, hand_over=True)
    scheduler.submit(make_request("c", (8,) * 12), 0.0, hand_over=True)
    assert scheduler.begin_step(0.0) is None, "one of two free blocks is for b, and c needs three"
    assert out is not None
    scheduler.finish_step(make_outcome(out), 0.0)
    assert ranges(scheduler.begin_step(0.0)) == [("b", 0, 3), ("c", 0, 5)]


def test_prompt_that_begins_like_one_being_computed_waits_for_its_cached_blocks() -> None:
    scheduler = make_prefill(num_blocks=16, step_tokens=8, plan_ahead=True)
    shared = tuple(range(100, 112))
    scheduler.submit(make_request("a", shared), 0.0, hand_over=True)
    first, second = scheduler.begin_step(0.0), scheduler.begin_step(0.0)
    scheduler.submit(make_request("b", (*shared, 7)), 0.0, hand_over=True)
    assert ranges(second) == [("a", 8, 12)] and first is not None and second is not None
    scheduler.finish_step(make_outcome(first), 0.0)
    assert scheduler.begin_step(0.0) is None
    scheduler.finish_step(make_outcome(second), 0.0)
    assert ranges(scheduler.begin_step(0.0)) == [("b", 12, 13)] and scheduler.prompt_tokens_cached == 12


@pytest.mark.parametrize(("tenant", "rows"), [("", [("a", 8, 12)]), ("other", [("b", 0, 8)])])
def test_prompt_of_another_tenant_waits_for_no_cached_blocks(tenant: str, rows: list[tuple[str, int, int]]) -> None:
    """They share none; and it is the other tenant's turn."""
    scheduler = make_prefill(num_blocks=16, step_tokens=8, plan_ahead=True)
    shared = tuple(range(100, 112))
    scheduler.submit(make_request("a", shared), 0.0, hand_over=True)
    scheduler.begin_step(0.0)
    scheduler.submit(replace(make_request("b", shared), tenant=tenant), 0.0, hand_over=True)
    assert ranges(scheduler.begin_step(0.0)) == rows


def test_aborted_prompt_keeps_its_blocks_until_its_last_row_is_done() -> None:
    scheduler = make_prefill(step_tokens=3, plan_ahead=True)
    scheduler.submit(make_request("a", 8), 0.0, hand_over=False)
    first, second = scheduler.begin_step(0.0), scheduler.begin_step(0.0)
    assert first is not None and second is not None
    scheduler.abort(SequenceId("a"))
    assert scheduler.begin_step(0.0) is None
    scheduler.finish_step(make_outcome(first), 0.0)
    assert scheduler.blocks.num_free < scheduler.blocks.num_blocks, "the second row still writes into them"
    scheduler.finish_step(make_outcome(second), 0.0)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks and not scheduler.num_sequences


class LaunchingRunner(FakeRunner):
    launches_ahead = True


async def test_worker_launches_ahead_where_its_engine_does() -> None:
    for runner, expected in ((LaunchingRunner(), True), (FakeRunner(), False)):
        worker = PrefillNode(runner=runner).worker
        assert worker.scheduler.plan_ahead == expected
        assert (worker.main_loop._launcher is runner) == expected
        await worker.close()


async def test_only_kv_of_finished_steps_is_sent() -> None:
    node = PrefillNode(runner=LaunchingRunner(), step_tokens=4)
    async with pair(prefill=node) as (source, [target]):
        claimed: list[tuple[int, int]] = []
        progressed = source.worker.sender.progressed

        def seen(sequence: Sequence) -> None:
            claimed.append((sequence.num_computed, sequence.computed_step))
            progressed(sequence)

        source.worker.sender.progressed = seen  # type: ignore[method-assign]
        source.submit(make_request("r", 12, max_tokens=4), target)
        worker, runner = source.worker, source.runner
        plans = [worker.begin_step(0.0), worker.begin_step(0.0)]
        assert [ranges(plan) for plan in plans] == [[("r", 0, 4)], [("r", 4, 8)]]
        sequence = worker.scheduler.sequences[SequenceId("r")]
        assert not claimed and sequence.num_computed == sequence.hand_over.acked_tokens == 0, "nothing is computed yet"
        for plan in plans:
            assert plan is not None
            source.posted.post(worker.finish_step(runner.step(plan), 0.0))
        source.compute()
        assert claimed[:2] == [(4, 1), (8, 2)]
        assert max(step for _, step in claimed) == 3 and max(computed for computed, _ in claimed) == 12
        await until(lambda: source.posted.handed_over, what="the hand-over")
        target.compute()


def test_chunks_of_long_steps_fit_into_a_staging_buffer_that_is_kept() -> None:
    of_8b = 32 * 2 * 8 * 128 * 2
    for step_tokens, bytes_per_token, expected in (
        (4096, of_8b, 512),  # 64 MiB, a quarter of the staging memory
        (4096, of_8b // 4, 2048),
        (4096, 1024, 4096),
        (512, of_8b, 512),
        (8, 1024, 512),
    ):
        found = chunk_tokens(step_tokens, 256 << 20, bytes_per_token)
        assert found == expected
        kept = StagingBuffers(kept_limit(256 << 20, 1))
        kept.give_back(kept.take(found * bytes_per_token))
        assert len(kept) == 1
