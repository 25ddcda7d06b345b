"""KV that no decode worker has taken yet goes to another one under the next attempt, or ends with the reason."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.commands import Abort, Assign, Prefill
from baton.core.errors import HandoffError, WorkerLost
from baton.core.request import ChoiceId
from coordinator.live import MAX_TIMES_PARKED
from tests.support.fake_workers import begun, bench
from tests.support.nodes import until


async def test_parked_kv_goes_elsewhere_under_the_next_attempt_and_the_old_one_is_stale() -> None:
    async with bench("p0", "d0", "d1") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.park(s)
        await asyncio.sleep(0.15)
        assert not p.all(Assign)  # its first token will still come under this attempt
        p.say(s, 0, 5)
        assign = await p.told(Assign)
        assert (assign.sequence, assign.attempt) == (s, 2)
        assert assign.targets[0].handle.sequence == s._replace(attempt=2)
        stale = b.cluster.stale_events
        d.say(s, 1, 99)
        await until(lambda: b.cluster.stale_events > stale)
        second = s._replace(attempt=2)
        p.park(second)
        assign = await p.told(Assign, 2)
        assert (assign.sequence, assign.attempt) == (second, 3)
        third = s._replace(attempt=3)
        p.hand_over(third, "d1")
        b.workers[2].say(third, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        assert reader.deltas[-1].timeline.decode_worker == "d1"  # type: ignore[union-attr]


async def test_kv_that_goes_elsewhere_is_ended_where_it_was() -> None:
    """The old decode worker may have had all of it, and only its last word was lost."""
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        d.here.add(s)
        p.park(s)
        await p.told(Assign)
        abort = await d.told(Abort)
        assert (abort.sequence, abort.tombstone_s) == (s, 0)
        second = s._replace(attempt=2)
        p.hand_over(second, "d0")
        d.say(second, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        assert not d.here


@pytest.mark.parametrize("order", ["tokens first", "parked first"])
async def test_kv_does_not_go_elsewhere_once_decode_has_begun(order: str) -> None:
    """Outside exact mode another worker might not repeat the tokens that the client has."""
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        await reader.got(1)
        if order == "tokens first":
            d.say(s, 0, 5, 6)
            await reader.got(2)
            p.park(s)
        else:
            b.cluster.dispatcher.set_ready("d0", False)  # so that nobody can be named
            p.park(s)
            await asyncio.sleep(0.05)
            d.say(s, 0, 5, 6)
        assert isinstance(await reader.failed(), WorkerLost)
        assert reader.tokens == [5, 6]
        assert not p.all(Assign)
        await d.told(Abort)


async def test_a_refusing_decode_worker_is_not_asked_in_a_tight_loop() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, _, s = await begun(b)
        p.say(s, 0, 5)
        p.park(s)
        await p.told(Assign)
        began = time.monotonic()
        for attempt in range(2, 6):
            p.park(s._replace(attempt=attempt))
            await p.told(Assign, attempt)
        assert time.monotonic() - began > 0.25  # one tick each
        await reader.leave()


async def test_kv_that_nobody_ever_takes_ends_with_the_reason() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, _, s = await begun(b)
        p.say(s, 0, 5)
        live = b.cluster._live[ChoiceId("r")]
        live.times_parked = MAX_TIMES_PARKED - 1
        p.park(s)
        assign = await p.told(Assign)
        p.park(s._replace(attempt=assign.attempt))
        error = await reader.failed()
        assert isinstance(error, HandoffError) and "30 tries" in error.message


async def test_kv_is_not_assigned_while_its_worker_cannot_hear() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        b.cluster.dispatcher.set_ready("d0", False)  # nobody can be named yet
        p.say(s, 0, 5)
        p.park(s)
        await until(lambda: b.cluster._live[ChoiceId("r")].parked_since)
        p.wire.refuses = True
        p.cut()
        await until(lambda: b.state("p0") == "joining")
        b.cluster.dispatcher.set_ready("d0", True)
        await asyncio.sleep(0.25)
        p.wire.refuses = False
        assign = await p.told(Assign)
        assert assign.attempt == 2
        d.say(s._replace(attempt=2), 0, 5, 6, 7, 8, ended="length")
        assert len(await reader.done()) == 4


async def test_a_lost_link_is_no_lost_request_while_prefill_has_the_kv() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        d.fail(s, "worker_lost", "lost its KV source")
        await asyncio.sleep(0.05)
        p.park(s)
        await p.told(Assign)
        second = s._replace(attempt=2)
        p.hand_over(second, "d0")
        d.say(second, 0, 5, 6, 7, 8, ended="length")
        assert len(await reader.done()) == 4


async def test_kv_that_arrived_damaged_twice_is_computed_again_and_not_a_third_time() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, _, s = await begun(b)
        p.say(s, 0, 5)
        await reader.got(1)
        p.fail(s, "kv_corrupt", "chunk 0 arrived damaged twice")
        again = (await p.told(Prefill, 2)).request
        assert again.output == (5,) and again.attempt > s.attempt
        p.fail(again.sequence_id, "kv_corrupt", "chunk 0 arrived damaged twice")
        assert (await reader.failed()).code == "kv_corrupt"
        assert len(p.all(Prefill)) == 2
