"""A worker is silent, gives up, stalls or rejoins: its requests continue, and no others are affected."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.commands import Abort, Prefill
from baton.core.errors import JoinRefused
from baton.runtime import session
from coordinator.policy.choice import Stage
from tests.support.fake_workers import bench, wait_for_dispatch
from tests.support.nodes import until


@pytest.fixture
def no_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes workers end their sequences after one lease without a message from the coordinator."""
    monkeypatch.setattr(session, "KEEP_SEQUENCES_S", 0.0)


async def test_a_worker_keeps_its_sequences_when_the_coordinator_is_silent_for_a_lease() -> None:
    async with bench("p0", "d0", lease_s=2.0) as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        d.here.add(s)
        d.report(s, 0, 5, 6)
        await reader.got(2)
        sessions = len(d.welcomes)
        d.session._lease_s = 0.05  # it seems to receive nothing, and redials
        await until(lambda: len(d.welcomes) > sessions, what="a redial")
        d.session._lease_s = 2.0
        assert d.abandoned == []
        d.report(s, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_silent_worker_is_lost_after_its_lease_and_its_requests_are_rescheduled(no_retention: None) -> None:
    async with bench("p0", "d0", "d1", lease_s=0.8) as b:
        a, other = b.submit("a"), b.submit("b")
        p, d0, d1 = b.workers
        sa, sb = (await p.received(Prefill, 1)).request.sequence_id, (await p.received(Prefill, 2)).request.sequence_id
        for s, d in ((sa, d0), (sb, d1)):
            p.report(s, 0, 5)
            p.hand_over(s, d.name)
        await a.got(1)
        d0.here.add(sa)
        began = time.monotonic()
        d0.wire.mute()
        resumed = await p.received(Prefill, 3)
        assert time.monotonic() - began > 0.5 and b.state("d0") == "lost"
        assert (resumed.request.request_id, resumed.request.output) == ("a", (5,))
        assert [t.worker_id for t in resumed.targets] == ["d1"]
        assert (await p.received(Abort)).sequence == sa
        again = resumed.request.sequence_id
        p.report(again, 1, 6)
        p.hand_over(again, "d1")
        d1.report(again, 1, 6, 7, 8, ended="length")
        d1.report(sb, 0, 5, 6, 7, 8, ended="length")
        assert await a.done() == await other.done() == [5, 6, 7, 8]
        await until(lambda: d0.abandoned, what="the silent worker to give up by itself")


async def test_the_log_of_a_loss_counts_requests_and_not_their_choices(caplog: pytest.LogCaptureFixture) -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(n=2)
        p, old, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        other = (await p.received(Prefill, 2)).request.sequence_id
        p.report(other, 0, 5)
        p.hand_over(other, "d0")
        await until(lambda: b.in_flight(other).stage is Stage.DECODE)
        old.wire.mute()
        await b.add("d0", incarnation=2)
        assert b.requests.rescheduled == 2 and "a new incarnation; 1 requests rescheduled" in caplog.text
        reader.task.cancel()


async def test_a_new_incarnation_replaces_the_old_one_and_takes_over_its_requests() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, old, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        await reader.got(1)
        old.wire.mute()
        new = await b.add("d0", incarnation=2)
        assert new.welcomes[0].tracked == ()
        command = await p.received(Prefill, 2)
        assert command.targets[0].incarnation == 2 and command.request.output == (5,)
        old.wire.refuses = True
        old.wire._flows.set()
        old.report(s, 0, 5)
        await until(lambda: not old.session.connected, what="the old one to be cut off")
        again = command.request.sequence_id
        p.report(again, 1, 6)
        p.hand_over(again, "d0")
        new.report(again, 1, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        with pytest.raises(JoinRefused, match="incarnation"):
            old.wire.refuses = False
            assert old.task is not None
            await asyncio.wait_for(old.task, 30)


async def test_a_lost_worker_that_received_the_kv_resumes_the_sequence_when_it_rejoins() -> None:
    """Its lease ended during the transfer; if `Welcome` did not list the sequence, it would silently drop it."""
    async with bench("p0", "d0", lease_s=0.8) as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        await reader.got(1)
        d.here.add(s)
        d.session._lease_s = 60.0  # cut off, it does not detect the loss itself
        d.wire.refuses = True
        d.cut()
        await until(lambda: b.state("d0") == "lost")
        d.wire.refuses = False
        await until(lambda: len(d.welcomes) == 2)
        assert [f.sequence for f in d.welcomes[-1].tracked] == [s] and s in d.here
        p.hand_over(s, "d0")
        d.report(s, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_prompt_is_rescheduled_to_the_new_incarnation_of_its_prefill_worker() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=1)
        old, _, s = await wait_for_dispatch(b)
        old.wire.mute()
        new = await b.add("p0", incarnation=2)
        again = (await new.received(Prefill)).request.sequence_id
        assert again.attempt > s.attempt
        new.report(again, 0, 5, ended="length")
        assert await reader.done() == [5]


async def test_sequences_that_a_worker_abandons_are_reported_and_rescheduled(no_retention: None) -> None:
    """It received nothing for a lease; the coordinator may still receive its messages, and clients must not wait."""
    async with bench("p0", "d0", lease_s=2.0) as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        d.report(s, 0, 5, 6)
        await reader.got(2)
        await until(lambda: b.in_flight(s).stage is Stage.DECODE)  # reported by the prefill worker, on another stream
        d.session._lease_s = 0.05  # shorter than the heartbeat interval: it seems to receive nothing
        resumed = (await p.received(Prefill, 2)).request
        assert d.abandoned == ["the coordinator was silent for 0.05 s"]
        assert resumed.output == (5, 6) and resumed.attempt > s.attempt
        p.report(resumed.sequence_id, 2, 7)
        p.hand_over(resumed.sequence_id, "d0")
        d.here.add(resumed.sequence_id)
        d.report(resumed.sequence_id, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_stalled_worker_reads_pending_messages_before_it_abandons_its_sequences() -> None:
    async with bench("p0", "d0", lease_s=1.6) as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        d.report(s, 0, 5, 6)
        await reader.got(2)
        time.sleep(1.0)  # the coordinator, on the same loop, stalls too, and renews the lease first
        d.session._last_received_at -= 0.7
        await asyncio.sleep(0.5)
        assert not d.abandoned
        d.report(s, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_coordinator_stalled_longer_than_a_lease_loses_no_worker() -> None:
    async with bench("p0", "d0", lease_s=1.6) as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        p.hand_over(s, "d0")
        d.report(s, 0, 5, 6)
        await reader.got(2)
        time.sleep(2.4)  # workers, on the same loop, stall too, and send their heartbeats late
        await asyncio.sleep(0.5)
        assert b.state("p0") == b.state("d0") == "ready" and not d.abandoned
        d.report(s, 2, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        began = time.monotonic()
        d.wire.mute()  # now silence counts again
        await until(lambda: b.state("d0") == "lost")
        assert time.monotonic() - began > 0.8
