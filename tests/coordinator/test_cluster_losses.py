"""A worker falls silent, gives up, stands still or comes back: only its requests fail, and none that can go on."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.commands import Abort, Prefill
from baton.core.errors import JoinRefused, WorkerLost
from tests.support.fake_workers import begun, bench, run_out
from tests.support.nodes import until


async def test_a_silent_worker_is_lost_after_its_lease_and_only_its_requests_fail() -> None:
    async with bench("p0", "d0", "d1", lease_s=0.8) as b:
        a, other = b.submit("a"), b.submit("b")
        p, d0, d1 = b.workers
        sa, sb = (await p.told(Prefill, 1)).request.sequence_id, (await p.told(Prefill, 2)).request.sequence_id
        for s, d in ((sa, d0), (sb, d1)):
            p.say(s, 0, 5)
            p.hand_over(s, d.name)
        await a.got(1)
        d0.here.add(sa)
        began = time.monotonic()
        d0.wire.mute()
        error = await a.failed()
        assert isinstance(error, WorkerLost) and "d0" in error.message and "stage decode" in error.message
        assert error.retry_after_s and 0.5 < time.monotonic() - began < 1.8
        assert b.state("d0") == "lost"
        assert (await p.told(Abort)).sequence == sa
        d1.say(sb, 0, 5, 6, 7, 8, ended="length")
        assert await other.done() == [5, 6, 7, 8]
        await until(lambda: d0.abandoned, what="the silent worker to give up by itself")


async def test_a_lost_worker_comes_back_empty_handed() -> None:
    async with bench("p0", "d0", lease_s=1.0) as b:  # heartbeats every quarter of it, on a busy machine
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        p.hand_over(s, "d0")
        await reader.got(1)
        d.here.add(s)
        d.wire.refuses = True
        d.cut()
        assert isinstance(await reader.failed(), WorkerLost)
        d.wire.refuses = False
        await until(lambda: b.state("d0") == "ready")
        await until(lambda: len(d.welcomes) == 2)  # it may have dropped what it had before, when its own lease ran out
        await until(lambda: not d.here)
        again = b.submit("again")
        run_out(p, d, (await p.told(Prefill, 2)).request.sequence_id)
        assert len(await again.done()) == 4


async def test_a_new_incarnation_replaces_the_old_one_at_once() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, old, s = await begun(b)
        p.say(s, 0, 5)
        p.hand_over(s, "d0")
        await reader.got(1)
        old.wire.mute()
        new = await b.add("d0", incarnation=2)
        error = await reader.failed(1.0)
        assert isinstance(error, WorkerLost) and "new incarnation" in error.message
        old.wire.refuses = True
        old.wire._flows.set()
        old.say(s, 0, 5)
        await until(lambda: not old.session._connected, what="the old one to be cut off")
        assert new.welcomes[0].following == ()
        again = b.submit("again")
        command = await p.told(Prefill, 2)
        assert command.targets[0].incarnation == 2
        run_out(p, new, command.request.sequence_id)
        assert len(await again.done()) == 4
        with pytest.raises(JoinRefused, match="incarnation"):
            old.wire.refuses = False
            assert old.task is not None
            await asyncio.wait_for(old.task, 3)


async def test_a_prefill_worker_that_dies_before_it_told_of_the_hand_over_is_not_missed() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        d.say(s, 0, 5, 6)  # so it has all KV
        await reader.got(2)
        p.wire.mute()
        await b.add("p0", incarnation=2)
        d.say(s, 2, 7)
        d.say(s, 3, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_worker_that_gave_up_says_so_and_the_request_goes_on() -> None:
    """It heard nothing for a lease; the coordinator may have heard it all the while, and its clients must not wait."""
    async with bench("p0", "d0", lease_s=2.0) as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        p.hand_over(s, "d0")
        d.say(s, 0, 5, 6)
        await reader.got(2)
        await until(lambda: b.cluster._live[s.choice_id].handed_over)  # which another worker says
        d.session._lease_s = 0.05  # shorter than the heartbeat: it seems to hear nothing
        resumed = (await p.told(Prefill, 2)).request
        assert d.abandoned == ["the coordinator was silent for 0.05 s"]
        assert resumed.output == (5, 6) and resumed.attempt > s.attempt
        p.say(resumed.sequence_id, 2, 7)
        p.hand_over(resumed.sequence_id, "d0")
        d.here.add(resumed.sequence_id)
        d.say(resumed.sequence_id, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


@pytest.mark.parametrize("who", ["p0", "d0"])
async def test_what_a_worker_has_ended_by_itself_goes_on_from_the_journal(who: str) -> None:
    """Also where the coordinator has not heard yet that it had got there."""
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        await reader.got(1)
        b.worker(who).fail(s, "abandoned", "ended here")
        again = (await p.told(Prefill, 2)).request
        assert again.output == (5,) and again.attempt > s.attempt
        p.say(again.sequence_id, 1, 6)
        p.hand_over(again.sequence_id, "d0")
        d.say(again.sequence_id, 1, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_kv_that_a_dead_spare_took_is_a_lost_worker() -> None:
    async with bench("p0", "d0", "d1", lease_s=0.5) as b:
        reader = b.submit()
        p, _, s = await begun(b)
        p.say(s, 0, 5)
        spare = b.workers[2]
        spare.wire.refuses = True
        spare.cut()
        await until(lambda: b.state("d1") == "lost")
        p.hand_over(s, "d1")
        assert "d1 was lost" in (await reader.failed()).message


async def test_a_process_that_stood_still_reads_first_what_came_meanwhile() -> None:
    async with bench("p0", "d0", lease_s=1.6) as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        p.hand_over(s, "d0")
        d.say(s, 0, 5, 6)
        await reader.got(2)
        time.sleep(1.0)  # the coordinator, on the same loop, stands still too and renews the lease first
        d.session._last_heard -= 0.7
        await asyncio.sleep(0.5)
        assert not d.abandoned
        d.say(s, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_coordinator_that_stood_still_longer_than_a_lease_loses_nobody() -> None:
    async with bench("p0", "d0", lease_s=1.6) as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        p.hand_over(s, "d0")
        d.say(s, 0, 5, 6)
        await reader.got(2)
        time.sleep(2.4)  # workers, on the same loop, stand still too, and their heartbeats come late
        await asyncio.sleep(0.5)
        assert b.state("p0") == b.state("d0") == "ready" and not d.abandoned
        d.say(s, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        began = time.monotonic()
        d.wire.mute()  # and silence counts again
        await until(lambda: b.state("d0") == "lost")
        assert time.monotonic() - began > 0.8
