"""A request that is refused, left by its client, late or drained ends with a code, and its workers get `Abort`."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.commands import Abort, Drain, Prefill
from baton.core.errors import DeadlineExceeded, DuplicateRequest, JoinRefused
from tests.support.fake_workers import bench, run_to_end, until, wait_for_dispatch


async def test_requests_wait_while_a_role_has_no_worker() -> None:
    """From zero: nothing is refused, and the first pair of workers serves what waits."""
    async with bench() as b:
        first = b.submit("a")
        p = await b.add("p0")
        second = b.submit("b")
        await until(lambda: b.dispatcher.num_queued == 2, what="both in the queue")
        d = await b.add("d0")
        for number, reader in enumerate((first, second), start=1):
            run_to_end(p, d, (await p.received(Prefill, number)).request.sequence_id)
            assert len(await reader.done()) == 4


async def test_a_request_ends_when_no_worker_of_a_role_joins_within_the_hold() -> None:
    async with bench(hold_s=0.2) as b:
        assert (await b.submit().failed()).code == "no_prefill_worker"
        await b.add("p0")
        error = await b.submit().failed()
        assert (error.code, error.retry_after_s) == ("no_decode_worker", 2)


async def test_a_worker_with_different_facts_is_refused_with_the_field_name() -> None:
    async with bench("p0", "d0") as b:
        worker = await b.add("d1", ready=False, model_digest="other")
        assert worker.task is not None
        with pytest.raises(JoinRefused, match="model_digest: 'm' at d0 and 'other' at d1"):
            await asyncio.wait_for(worker.task, 30)
        assert b.state("d1") == "forgotten"


async def test_waiting_requests_end_when_a_role_has_no_worker_for_longer_than_the_hold() -> None:
    async with bench("p0", "d0", lease_s=0.5, hold_s=0.3) as b:
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await wait_for_dispatch(b)
        d.wire.refuses = True
        d.cut()
        assert (await second.failed()).code == "no_decode_worker"
        p.report(s, 0, 5)
        p.park(s)
        assert (await first.failed()).code == "no_decode_worker"


async def test_a_front_is_ready_while_a_role_is_empty_up_to_the_hold() -> None:
    async with bench("p0", "d0", lease_s=0.5, hold_s=1.0) as b:
        await until(lambda: b.pipeline.ready()[0], what="both roles")
        for name in ("p0", "d0"):
            b.cluster.workers.left(name, 1, b.cluster.lease_now())
        assert b.pipeline.ready() == (True, "ready")
        assert (await b.submit("b").failed()).code == "no_prefill_worker"
        assert b.pipeline.ready() == (False, "no prefill worker is ready")
        b.pipeline.expect_workers()
        assert b.pipeline.ready() == (True, "ready")


async def test_requests_beyond_the_queue_limit_and_duplicate_ids_are_refused() -> None:
    async with bench("p0", "d0", max_requests=1) as b:
        a, waits = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await wait_for_dispatch(b)
        assert (await b.submit("c").failed()).code == "overloaded"
        for name in ("a", "b"):
            assert isinstance(await b.submit(name).failed(), DuplicateRequest)
        run_to_end(p, d, s)
        assert len(await a.done()) == 4
        run_to_end(p, d, (await p.received(Prefill, 2)).request.sequence_id)
        assert len(await waits.done()) == 4


@pytest.mark.parametrize("phase", ["dispatched", "first token", "handed over"])
async def test_all_target_workers_receive_abort_when_the_client_disconnects(phase: str) -> None:
    async with bench("p0", "d0", "d1") as b:
        reader = b.submit()
        p, _d, s = await wait_for_dispatch(b)
        if phase != "dispatched":
            p.report(s, 0, 5)
            await reader.got(1)
        if phase == "handed over":
            p.hand_over(s, "d0")
        await reader.leave()
        for worker in b.workers:
            assert (await worker.received(Abort)).sequence == s
        assert len(b.requests) == 0


async def test_a_queued_request_is_removed_when_its_client_disconnects() -> None:
    async with bench("p0", "d0") as b:
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await wait_for_dispatch(b)
        assert b.dispatcher.num_queued == 1
        await second.leave()
        assert b.dispatcher.num_queued == 0
        run_to_end(p, d, s)
        await first.done()
        assert len(p.all(Prefill)) == 1


async def test_an_exceeded_deadline_names_the_stage_and_aborts_both_workers() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(deadline_s=0.3)
        p, d, _ = await wait_for_dispatch(b)
        assert p.all(Prefill)[0].request.deadline_s <= 0.3
        error = await reader.failed()
        assert isinstance(error, DeadlineExceeded) and "stage prefill" in error.message
        await p.received(Abort)
        await d.received(Abort)


async def test_a_request_whose_deadline_has_passed_is_not_dispatched() -> None:
    async with bench("p0", "d0") as b:
        assert isinstance(await b.submit(deadline_s=-1.0).failed(), DeadlineExceeded)
        await asyncio.sleep(0.05)
        assert not b.workers[0].all(Prefill)


async def test_a_drain_finishes_running_requests_and_refuses_new_ones() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        draining = asyncio.create_task(b.cluster.drain(2.0))
        await asyncio.sleep(0)
        assert (await b.submit("late").failed()).code == "draining"
        assert b.pipeline.ready() == (False, "draining")
        run_to_end(p, d, s)
        assert len(await reader.done()) == 4
        for worker in (p, d):
            await worker.received(Drain)
            await worker.session.drained(1.0)
            await worker.stop()
        await asyncio.wait_for(draining, 30)
        assert b.pipeline.workers()["workers"] == []


async def test_a_drain_aborts_requests_that_do_not_finish_in_time() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        _p, d, s = await wait_for_dispatch(b)
        draining = asyncio.create_task(b.cluster.drain(0.1))
        assert (await reader.failed()).code == "draining"
        assert (await d.received(Abort)).sequence == s
        draining.cancel()
