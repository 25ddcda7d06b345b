"""When a decode worker reports its load with a step: only when the load has changed and placement depends on it."""

from __future__ import annotations

import itertools

from tests.support.builders import make_request
from tests.support.fake_runner import FakeRunner
from tests.support.late_device import LateDevice
from tests.support.nodes import DecodeNode, pair, until

BLOCK = 4  # tokens, of the fake runner


async def test_step_reports_the_load_when_free_blocks_change_and_when_a_sequence_ends() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 8, max_tokens=4 * BLOCK), decode)
        source.compute()
        await until(lambda: source.posted.handed_over, what="the hand-over")
        decode.compute()
        steps = decode.posted.steps
        assert len(steps) == 4 * BLOCK - 1 and steps[-1].ended
        free = decode.worker.load().blocks_free
        reported = [step.load.blocks_free if step.load is not None else None for step in steps]
        assert reported[0] is not None and reported[-1] == free and steps[-1].load == decode.worker.load()
        known = [t for t in reported if t is not None]
        assert len(known) == 1 + 3 + 1, reported  # the first step, a block for every four tokens, the end
        assert all(a != b for a, b in itertools.pairwise(known))


async def test_step_reports_the_load_after_a_sequence_was_added_or_ended() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("long", 8, max_tokens=12), decode)
        source.compute()
        await until(lambda: source.posted.handed_over, what="the hand-over")
        decode.step()
        decode.step()
        assert decode.posted.steps[-1].load is None
        source.submit(make_request("short", 8, max_tokens=2), decode)
        source.compute()
        await until(lambda: len(source.posted.handed_over) == 2, what="the hand-over")
        decode.step()
        load = decode.posted.steps[-1].load
        assert load is not None and load.sequences == 1 and decode.posted.steps[-1].ended  # "short" needed one step
        decode.compute()


async def test_load_counts_steps_planned_ahead_and_discarded_rows() -> None:
    runner = FakeRunner(16)
    runner.launches_ahead = True
    async with pair(DecodeNode(runner=runner)) as (source, [decode]):
        source.submit(make_request("r", 8, max_tokens=6), decode)
        source.compute()
        await until(lambda: source.posted.handed_over, what="the hand-over")
        device = LateDevice(runner.step)
        plans = [decode.worker.begin_step(0.0), decode.worker.begin_step(0.0)]
        decode.abort(make_request("r").sequence_id)
        for plan in plans:
            assert plan is not None
            device.launch(plan)
            decode.posted.post(decode.worker.finish_step(device.collect(), 0.0))
        load = decode.worker.load()
        assert (load.steps_ahead, load.rows_discarded) == (1, 2)
