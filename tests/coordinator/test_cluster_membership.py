"""Workers join and leave while requests run: which get new work, what is rescheduled, which may rejoin."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.core.commands import Abort, Assign, Drain, Prefill
from baton.core.errors import JoinRefused, NotFound
from tests.support.fake_workers import Bench, FakeWorker, bench
from tests.support.nodes import until


async def finish_drain(b: Bench, worker: FakeWorker) -> None:
    """Ends a drain: the worker sends `Drained`, which the coordinator acknowledges, and stops."""
    await worker.session.drained(2.0)
    assert worker.session._left.is_set()
    await worker.stop()
    assert b.state(worker.name) == "forgotten"


async def test_a_joining_worker_gets_work_and_a_draining_worker_gets_none() -> None:
    async with bench("p0", "d0") as b:
        await b.submit_and_run("a", "p0", "d0")
        await b.add("p1")
        await b.add("d1")
        b.cluster.drain_worker("p0", 5.0)
        b.cluster.drain_worker("d0", 5.0)
        assert (b.state("p0"), b.state("d0")) == ("draining", "draining")
        for name in "bcd":
            await b.submit_and_run(name, "p1", "d1")
        for name in ("p0", "d0"):
            await b.worker(name).received(Drain)
            await finish_drain(b, b.worker(name))
        await b.submit_and_run("e", "p1", "d1")


@pytest.mark.parametrize("who", ["p0", "d0"])
async def test_a_session_that_breaks_does_not_end_a_drain(who: str) -> None:
    """After a redial the worker is still draining, gets no work, and receives `Drain` again: the first may be lost."""
    async with bench("p0", "d0", "p1", "d1") as b:
        worker = b.worker(who)
        b.cluster.drain_worker(who, 5.0)
        await worker.received(Drain)
        worker.cut()
        again = await worker.received(Drain, 2)
        assert again.timeout_s <= 5.0
        assert b.state(who) == "draining"
        await b.submit_and_run("a", "p1" if who == "p0" else "p0", "d1" if who == "d0" else "d0")


async def test_a_leaving_worker_sends_leave_again_after_a_redial() -> None:
    async with bench("p0", "d0", "d1") as b:
        d0 = b.worker("d0")
        d0.session.leave(5.0)
        await until(lambda: b.state("d0") == "draining")
        d0.wire.refuses = True
        d0.cut()
        d0.wire.refuses = False
        await until(lambda: len(d0.welcomes) == 2)
        await asyncio.sleep(0.05)
        assert b.state("d0") == "draining"
        await b.submit_and_run("a", "p0", "d1")
        await finish_drain(b, d0)


async def test_a_worker_that_has_left_is_refused_but_its_next_incarnation_may_join() -> None:
    async with bench("p0", "d0", "d1") as b:
        b.cluster.drain_worker("d0", 5.0)
        await finish_drain(b, b.worker("d0"))
        late = await b.add("d0", ready=False)
        assert late.task is not None
        with pytest.raises(JoinRefused, match="incarnation: 1 has drained and left"):
            await asyncio.wait_for(late.task, 30)
        await b.add("d0", incarnation=2)
        b.cluster.drain_worker("d1", 5.0)
        reader = b.submit("a")
        command = await b.worker("p0").received(Prefill)
        assert [(t.worker_id, t.incarnation) for t in command.targets] == [("d0", 2)]
        await reader.leave()


async def test_a_drain_of_an_unknown_worker_is_refused() -> None:
    async with bench("p0", "d0") as b:
        with pytest.raises(NotFound, match="no worker 'd7' is in this cluster"):
            b.cluster.drain_worker("d7", 1.0)


async def test_prompts_and_parked_requests_of_a_leaving_prefill_worker_are_rescheduled() -> None:
    """One request has its first token and parked KV; the other has no token yet."""
    async with bench("p0", "d0") as b:
        p0, d0 = b.worker("p0"), b.worker("d0")
        parked = b.submit("parked", max_tokens=4)
        s = (await p0.received(Prefill)).request.sequence_id
        waiting = b.submit("waiting", max_tokens=1)
        await p0.received(Prefill, 2)
        p0.report(s, 0, 5)
        b.set_ready("d0", False)
        p0.park(s)
        await parked.got(1)
        await b.add("p1")
        b.cluster.drain_worker("p0", 0.0)
        await finish_drain(b, p0)
        b.set_ready("d0", True)
        p1 = b.worker("p1")
        first, second = await p1.received(Prefill, 1), await p1.received(Prefill, 2)
        again = {c.request.request_id: c for c in (first, second)}
        resumed = again["parked"].request
        assert (resumed.prompt, resumed.output, resumed.num_prefill_tokens) == ((1, 2, 3), (5,), 4)
        assert resumed.attempt > s.attempt and again["parked"].targets[0].handle.sequence == resumed.sequence_id
        assert again["waiting"].request.output == ()
        assert (await d0.received(Abort)).sequence == s
        stale = b.requests.stale_events
        d0.report(s, 1, 99)
        await until(lambda: b.requests.stale_events > stale)
        p1.report(resumed.sequence_id, 1, 6)
        p1.hand_over(resumed.sequence_id, "d0")
        d0.report(resumed.sequence_id, 1, 6, 7, 8, ended="length")
        p1.report(again["waiting"].request.sequence_id, 0, 9, ended="length")
        assert await parked.done() == [5, 6, 7, 8]
        assert await waiting.done() == [9]
        usage = parked.deltas[-1].usage
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (3, 4)


@pytest.mark.parametrize("sent", ["handed over", "only tokens"])
async def test_running_sequences_of_a_leaving_decode_worker_are_rescheduled(sent: str) -> None:
    async with bench("p0", "d0") as b:
        p, d0 = b.worker("p0"), b.worker("d0")
        reader = b.submit(max_tokens=6)
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        if sent == "handed over":
            p.hand_over(s, "d0")
        d0.report(s, 0, 5, 6)
        d0.report(s, 2, 7)
        await reader.got(3)
        await b.add("d1")
        b.cluster.drain_worker("d0", 0.0)
        await finish_drain(b, d0)
        command = await p.received(Prefill, 2)
        assert command.request.output == (5, 6, 7)
        assert [t.worker_id for t in command.targets] == ["d1"]
        if sent == "only tokens":
            p.hand_over(s, "d0")  # of a stale attempt
        again = command.request.sequence_id
        p.report(again, 3, 8)
        p.hand_over(again, "d1")
        b.worker("d1").report(again, 3, 8, 9, 10, ended="length")
        assert await reader.done() == [5, 6, 7, 8, 9, 10]
        timeline = reader.deltas[-1].timeline
        assert timeline is not None and timeline.decode_worker == "d1"


async def test_kv_in_transfer_to_a_leaving_decode_worker_is_not_recomputed() -> None:
    async with bench("p0", "d0") as b:
        p = b.worker("p0")
        reader = b.submit()
        s = (await p.received(Prefill)).request.sequence_id
        p.report(s, 0, 5)
        await b.add("d1")
        b.cluster.drain_worker("d0", 0.0)
        await finish_drain(b, b.worker("d0"))
        p.park(s)  # the link to d0 has ended
        assign = await p.received(Assign)
        assert [t.worker_id for t in assign.targets] == ["d1"]
        again = s._replace(attempt=assign.attempt)
        p.hand_over(again, "d1")
        b.worker("d1").report(again, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        assert len(p.all(Prefill)) == 1


async def test_a_prompt_refused_by_a_draining_worker_is_sent_to_another() -> None:
    """The command and the worker's `Leave` crossed on the way."""
    async with bench("p0", "p1", "d0") as b:
        p0, p1 = b.worker("p0"), b.worker("p1")
        reader = b.submit(max_tokens=1)
        s = (await p0.received(Prefill)).request.sequence_id
        p0.session.leave(5.0)
        p0.fail(s, "draining", "p0 is draining")
        again = (await p1.received(Prefill)).request.sequence_id
        p1.report(again, 0, 5, ended="length")
        assert await reader.done() == [5]


async def test_a_rescheduled_request_precedes_queued_ones() -> None:
    async with bench("p0", "d0") as b:
        p0 = b.worker("p0")
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        await p0.received(Prefill)
        assert b.dispatcher.num_queued == 1
        p1 = await b.add("p1")
        await p1.received(Prefill)  # b
        third = b.submit("c", prompt=(1,) * 30)
        await asyncio.sleep(0.05)
        assert b.dispatcher.num_queued == 1
        b.cluster.drain_worker("p0", 0.0)
        await finish_drain(b, p0)
        await b.add("p2")
        assert (await b.worker("p2").received(Prefill)).request.request_id == "a"
        for reader in (first, second, third):
            await reader.leave()


async def test_no_new_worker_is_admitted_while_the_cluster_drains() -> None:
    """A new worker keeps dialling; a known worker that redials receives `Drain`."""
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d = b.worker("p0"), b.worker("d0")
        s = (await p.received(Prefill)).request.sequence_id
        draining = asyncio.create_task(b.cluster.drain(5.0))
        await asyncio.sleep(0)
        late = await b.add("d1", ready=False)
        await asyncio.sleep(0.3)
        assert late.task is not None and not late.task.done() and not late.welcomes
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        d.wire.refuses = True
        d.report(s, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        d.cut()
        await p.received(Drain)
        d.wire.refuses = False
        await d.received(Drain)
        await finish_drain(b, p)
        await finish_drain(b, d)
        await asyncio.wait_for(draining, 30)


async def test_a_malformed_drain_message_is_refused_without_a_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench("d0") as b, grpc.aio.insecure_channel(b.cluster.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/baton.v1.WorkerControl/DrainWorker")(b"\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith("invalid request message: ")
        assert b.state("d0") == "ready" and not [r for r in caplog.records if r.name.startswith("grpc")]
