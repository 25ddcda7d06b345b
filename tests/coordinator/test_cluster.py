"""The coordinator with workers that do as they please: nothing lost, nothing doubled, nothing left behind."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.commands import Abort, Assign, Drain, Following, Prefill
from baton.core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    HandoffError,
    InvariantError,
    JoinRefused,
    Unavailable,
    WorkerLost,
)
from baton.core.events import BlockNews, StepEvents
from baton.core.handles import verify
from baton.core.prefix_keys import HINT_BYTES, KeyChain
from baton.core.request import ChoiceId, SequenceId
from coordinator.live import MAX_TIMES_PARKED
from tests.support.builders import make_facts
from tests.support.fake_workers import Bench, FakeWorker, bench
from tests.support.nodes import until


async def begun(b: Bench, name: str = "r", **more: object) -> tuple[FakeWorker, FakeWorker, SequenceId]:
    """The two workers of a request that has been dispatched; its first token is not there yet."""
    p, d = b.workers[0], b.workers[1]
    command = await p.told(Prefill, len(p.all(Prefill)) or 1)
    p.here.add(command.request.sequence_id)
    return p, d, command.request.sequence_id


def run_out(p: FakeWorker, d: FakeWorker, s: SequenceId) -> None:
    p.say(s, 0, 5)
    p.hand_over(s, d.name)
    p.here.discard(s)
    d.say(s, 0, 5, 6)
    d.say(s, 2, 7)
    d.say(s, 3, 8, ended="length")


async def test_the_happy_path() -> None:
    async with bench("p0", "d0", "d1") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await begun(b)
        command = p.all(Prefill)[0]
        assert command.request.prompt == (1, 2, 3) and command.request.max_tokens == 4
        assert [t.worker_id for t in command.targets] == ["d0", "d1"]
        for target in command.targets:
            key, now_ms = p.welcomes[0].handle_key, p.welcomes[0].now_ms
            name = target.worker_id
            verify(key, target.handle, sequence=s, source="p0", destination=name, incarnation=1, now_ms=now_ms)
        run_out(p, d, s)
        assert await reader.done() == [5, 6, 7, 8]
        last = reader.deltas[-1]
        assert (last.finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 3, 4)  # type: ignore[union-attr]
        assert last.timeline is not None
        assert (last.timeline.prefill_worker, last.timeline.decode_worker) == ("p0", "d0")
        assert not p.all(Abort) and not d.all(Abort)
        await until(lambda: len(p.session.log) == len(d.session.log) == 0)


async def test_a_gap_is_filled_from_the_other_stream_and_repeats_count_once() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=3)
        p, d, s = await begun(b)
        d.session.post(StepEvents())
        d.say(s, 1, 6)
        await asyncio.sleep(0.05)
        assert reader.deltas == []
        p.say(s, 0, 5)
        await reader.got(2)
        p.say(s, 0, 5)
        d.say(s, 1, 6, 7, ended="length")
        assert await reader.done() == [5, 6, 7]


async def test_a_differing_repeat_ends_the_request_and_both_workers_hear() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        await reader.got(1)
        d.say(s, 0, 9)
        assert isinstance(await reader.failed(), InvariantError)
        await p.told(Abort)
        await d.told(Abort)


async def test_one_token_needs_no_decode_worker() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=1)
        p, _, s = await begun(b)
        assert p.all(Prefill)[0].targets == ()
        p.say(s, 0, 5, ended="length")
        assert await reader.done() == [5]


@pytest.mark.parametrize("phase", ["dispatched", "first token", "handed over", "decoding", "last token"])
@pytest.mark.parametrize("who", ["p0", "d0", "both"])
async def test_a_session_that_breaks_in_any_phase_loses_and_doubles_nothing(phase: str, who: str) -> None:
    """What is said while the wire is down is said again after the redial."""
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await begun(b)
        steps = {
            "dispatched": lambda: None,
            "first token": lambda: p.say(s, 0, 5),
            "handed over": lambda: (p.hand_over(s, "d0"), p.here.discard(s), d.here.add(s)),
            "decoding": lambda: (d.say(s, 0, 5, 6), d.say(s, 2, 7)),
            "last token": lambda: d.say(s, 3, 8, ended="length"),
        }
        for name, step in steps.items():
            if name == phase:
                broken = [w for w in (p, d) if who in (w.name, "both")]
                for worker in broken:
                    worker.cut()  # the step below is said into a dead stream, or into none
                step()
                await until(lambda ws=broken: all(len(w.welcomes) == 2 for w in ws), timeout_s=3, what="the redial")
                await asyncio.sleep(0.02)
            else:
                step()
        assert await reader.done() == [5, 6, 7, 8]
        assert not p.abandoned and not d.abandoned
        assert len(p.all(Prefill)) == 1  # it was here, though nothing had been said of it


async def test_a_command_lost_with_its_stream_is_given_again() -> None:
    async with bench("p0", "d0") as b:
        p, d = b.workers
        p.wire.refuses = True
        p.wire.mute()
        reader = b.submit()
        await asyncio.sleep(0.05)
        assert not p.all(Prefill)
        p.cut()
        p.wire._flows.set()
        p.wire.refuses = False
        command = await p.told(Prefill)
        run_out(p, d, command.request.sequence_id)
        assert await reader.done() == [5, 6, 7, 8]
        assert len(p.all(Prefill)) == 1


async def test_a_short_break_does_not_refuse_what_waits_in_the_queue() -> None:
    async with bench("p0", "d0") as b:
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await begun(b)
        d.wire.refuses = True
        d.cut()
        await until(lambda: b.state("d0") == "joining")
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await b.pipeline.generate(second_submission("c")).__anext__()
        await asyncio.sleep(0.25)
        d.wire.refuses = False
        run_out(p, d, s)
        assert len(await first.done()) == 4
        s2 = (await p.told(Prefill, 2)).request.sequence_id
        run_out(p, d, s2)
        assert len(await second.done()) == 4


def second_submission(name: str):  # type: ignore[no-untyped-def]
    from coordinator.submission import Submission

    return Submission(name, (1,), 4)


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
        _, old, s = await begun(b)
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
        p = b.workers[0]
        command = await p.told(Prefill, 2)
        assert command.targets[0].incarnation == 2
        run_out(p, new, command.request.sequence_id)
        assert len(await again.done()) == 4
        with pytest.raises(JoinRefused, match="incarnation"):
            old.wire.refuses = False
            assert old.task is not None
            await asyncio.wait_for(old.task, 3)


async def test_a_worker_that_does_not_fit_is_told_the_field_and_stays_away() -> None:
    async with bench("p0", "d0") as b:
        worker = await b.add("d1", ready=False, model_digest="other")
        assert worker.task is not None
        with pytest.raises(JoinRefused, match="model_digest: m and other"):
            await asyncio.wait_for(worker.task, 3)
        assert b.state("d1") == "forgotten"


@pytest.mark.parametrize("phase", ["dispatched", "first token", "handed over"])
async def test_both_workers_and_the_spare_hear_when_the_client_leaves(phase: str) -> None:
    async with bench("p0", "d0", "d1") as b:
        reader = b.submit()
        p, _d, s = await begun(b)
        if phase != "dispatched":
            p.say(s, 0, 5)
            await reader.got(1)
        if phase == "handed over":
            p.hand_over(s, "d0")
        await reader.leave()
        for worker in b.workers:
            assert (await worker.told(Abort)).sequence == s
        assert b.cluster.num_live == 0


async def test_a_client_that_leaves_the_queue_is_gone_from_it() -> None:
    async with bench("p0", "d0") as b:
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await begun(b)
        assert b.cluster.dispatcher.num_queued == 1
        await second.leave()
        assert b.cluster.dispatcher.num_queued == 0
        run_out(p, d, s)
        await first.done()
        assert len(p.all(Prefill)) == 1


async def test_a_deadline_names_its_stage_and_both_workers_hear() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(deadline_s=0.3)
        p, d, _ = await begun(b)
        assert p.all(Prefill)[0].request.deadline_s <= 0.3
        error = await reader.failed()
        assert isinstance(error, DeadlineExceeded) and "stage prefill" in error.message
        await p.told(Abort)
        await d.told(Abort)


async def test_a_deadline_that_is_over_starts_nothing() -> None:
    async with bench("p0", "d0") as b:
        assert isinstance(await b.submit(deadline_s=-1.0).failed(), DeadlineExceeded)
        await asyncio.sleep(0.05)
        assert not b.workers[0].commands


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


async def test_a_decode_worker_is_not_asked_for_what_may_be_on_its_way() -> None:
    """It would say that it does not know the sequence, and could be heard after it has taken the KV."""
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await begun(b)
        for handed_over in (False, True):
            if handed_over:
                p.say(s, 0, 5)
                p.hand_over(s, "d0")
                await reader.got(1)
                await until(lambda: b.cluster._live[s.choice_id].handed_over)
                d.here.add(s)
            welcomes = {w.name: len(w.welcomes) for w in (p, d)}
            for worker in (p, d):
                worker.cut()
            await until(lambda seen=welcomes: all(len(w.welcomes) > seen[w.name] for w in (p, d)), timeout_s=3)
            assert d.welcomes[-1].following == (Following(s, int(handed_over), handed_over),)
            assert p.welcomes[-1].following == (Following(s, int(handed_over), not handed_over),)
        d.say(s, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


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


async def test_a_command_that_cannot_be_sent_breaks_the_session_and_not_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        b.cluster.members.send("p0", object())  # type: ignore[arg-type]
        await until(lambda: len(p.welcomes) == 2, what="p0 to join again", timeout_s=3)
        assert "commands to p0" in caplog.text
        run_out(p, d, s)
        assert await reader.done() == [5, 6, 7, 8]


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


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("deadline_exceeded", DeadlineExceeded),
        ("handoff_failed", HandoffError),
        ("nonsense", Exception),
    ],
)
async def test_a_workers_error_reaches_the_client_with_its_stage(code: str, kind: type[Exception]) -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.fail(s, code, "so it is")
        error = await reader.failed()
        assert isinstance(error, kind) and (error.code, error.message) == (code, "so it is (stage prefill)")
        await d.told(Abort)


async def test_a_worker_that_ends_a_sequence_early_has_lost_it() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        p.say(s, 0, 5)
        await reader.got(1)
        d.say(s, 1, 6, ended="aborted")
        assert isinstance(await reader.failed(), WorkerLost)
        assert reader.tokens == [5, 6]  # what was journaled is written before the error


async def test_nobody_there_is_refused_at_once() -> None:
    async with bench() as b:
        assert (await b.submit().failed(0.5)).code == "no_prefill_worker"
        assert b.pipeline.ready() == (False, "no prefill worker is ready")
        await b.add("p0")
        error = await b.submit().failed(0.5)
        assert (error.code, error.retry_after_s) == ("no_decode_worker", 2)
        await b.add("d0")
        assert b.pipeline.ready() == (True, "ready")


async def test_what_waits_is_refused_when_the_last_worker_of_a_pool_is_lost() -> None:
    async with bench("p0", "d0", lease_s=0.5) as b:
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        _, d, _ = await begun(b)
        d.wire.refuses = True
        d.cut()
        assert isinstance(await first.failed(), WorkerLost)
        assert (await second.failed()).code == "no_decode_worker"


async def test_queue_full_and_duplicates() -> None:
    async with bench("p0", "d0", max_requests=1) as b:
        a, waits = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await begun(b)
        assert (await b.submit("c").failed()).code == "overloaded"
        for name in ("a", "b"):
            assert isinstance(await b.submit(name).failed(), DuplicateRequest)
        run_out(p, d, s)
        assert len(await a.done()) == 4
        run_out(p, d, (await p.told(Prefill, 2)).request.sequence_id)
        assert len(await waits.done()) == 4


async def test_draining() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        draining = asyncio.create_task(b.cluster.drain(2.0))
        await asyncio.sleep(0)
        assert (await b.submit("late").failed()).code == "draining"
        assert b.pipeline.ready() == (False, "draining")
        run_out(p, d, s)
        assert len(await reader.done()) == 4
        for worker in (p, d):
            await worker.told(Drain)
            await worker.session.drained(1.0)
            await worker.stop()
        await asyncio.wait_for(draining, 3)
        assert b.pipeline.workers()["workers"] == []


async def test_a_drain_ends_what_does_not_finish_in_time() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        _p, d, s = await begun(b)
        draining = asyncio.create_task(b.cluster.drain(0.1))
        assert (await reader.failed()).code == "draining"
        assert (await d.told(Abort)).sequence == s
        draining.cancel()


async def test_two_sessions_of_one_worker_are_one_worker() -> None:
    """A half-open stream and its successor: the successor counts, what the old one still says is dropped."""
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await begun(b)
        d.wire.refuses = True  # the old one does not dial again
        # The same incarnation, as after a redial that the coordinator saw before the break.
        twin = await b.add("d0", here=[s])
        stale = list(b.cluster.members._outgoing.values())
        assert len(stale) == 2
        run_out(p, twin, s)
        assert len(await reader.done()) == 4
        b.cluster.dispatcher.check()


async def test_second_request_goes_to_the_worker_that_says_it_holds_its_prefix() -> None:
    async with bench("p0", "p1", "d0", "d1") as b:
        prompt = tuple(range(13))
        facts = make_facts()
        chain = KeyChain(facts.model_digest, "", facts.layout.block_size)
        hints = tuple(k[:HINT_BYTES] for k in chain.grow(lambda start, end: prompt[start:end], 12))
        for name in ("p1", "d1"):
            b.worker(name).session.post(StepEvents(block_news=BlockNews(stored=hints)))
        held = b.cluster.dispatcher._workers
        await until(lambda: len(held["p1"].held) and len(held["d1"].held), what="the news", timeout_s=3)
        reader = b.submit("a", prompt=prompt)
        command = await b.worker("p1").told(Prefill)
        assert [t.worker_id for t in command.targets] == ["d1", "d0"]
        await reader.leave()
        reader = b.submit("b", prompt=prompt[::-1])
        assert (await b.worker("p0").told(Prefill)).targets[0].worker_id == "d0"
        await reader.leave()
