"""A decode worker that is lost while a request's KV is still at prefill costs the request nothing: prefill finds its
link gone, parks the KV, and it goes to another decode worker."""

from __future__ import annotations

import pytest

from baton.core.commands import Assign, Prefill
from baton.core.errors import WorkerLost
from baton.core.request import SequenceId
from tests.support.fake_workers import Bench, FakeWorker, begun, bench
from tests.support.nodes import until


async def lose(b: Bench, worker: FakeWorker) -> None:
    worker.wire.refuses = True
    worker.cut()
    await until(lambda: b.state(worker.name) == "lost")


async def goes_to(p: FakeWorker, taker: FakeWorker, s: SequenceId) -> None:
    """Prefill parks the KV of its present attempt, is told of the taker, which then says the rest."""
    p.park(s)
    assign = await p.told(Assign)
    assert [t.worker_id for t in assign.targets] == [taker.name] and assign.targets[0].incarnation == taker.incarnation
    second = s._replace(attempt=assign.attempt)
    p.hand_over(second, taker.name)
    taker.say(second, 0, 5, 6, 7, 8, ended="length")


@pytest.mark.parametrize("first_token", ["before", "after"])
async def test_its_kv_goes_to_another(first_token: str) -> None:
    async with bench("p0", "d0", "d1", lease_s=0.5) as b:
        reader = b.submit()
        p, d0, s = await begun(b)
        d1 = b.workers[2]
        if first_token == "before":
            p.say(s, 0, 5)
            await reader.got(1)
        await lose(b, d0)
        if first_token == "after":
            p.say(s, 0, 5)
        await goes_to(p, d1, s)
        assert await reader.done() == [5, 6, 7, 8]
        assert len(p.all(Prefill)) == 1  # the prompt is not computed again
        b.cluster.dispatcher.check()
        assert b.cluster.dispatcher.num_active == 0


async def test_or_to_its_own_next_life() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, old, s = await begun(b)
        old.wire.mute()
        new = await b.add("d0", incarnation=2)
        p.say(s, 0, 5)
        await goes_to(p, new, s)
        assert await reader.done() == [5, 6, 7, 8]
        b.cluster.dispatcher.check()


async def test_one_that_has_taken_all_of_it_is_a_lost_worker() -> None:
    """Prefill may tell of the hand-over when the taker has been lost already: the KV is nowhere any more."""
    async with bench("p0", "d0", "d1", lease_s=0.5) as b:
        reader = b.submit()
        p, d0, s = await begun(b)
        p.say(s, 0, 5)
        await lose(b, d0)
        p.hand_over(s, "d0")
        error = await reader.failed()
        assert isinstance(error, WorkerLost) and "d0 was lost as it took the KV" in error.message
        b.cluster.dispatcher.check()


async def test_one_whose_last_tokens_came_before_the_word_of_the_hand_over_is_a_lost_worker() -> None:
    async with bench("p0", "d0", "d1", lease_s=0.5) as b:
        reader = b.submit()
        p, d0, s = await begun(b)
        p.say(s, 0, 5)
        d0.say(s, 1, 6)
        await reader.got(2)
        await lose(b, d0)
        assert isinstance(await reader.failed(), WorkerLost)
