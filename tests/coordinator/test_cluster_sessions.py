"""The stream between the coordinator and a worker breaks: output sent meanwhile is sent again, and counts once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from baton.core.commands import AdapterSource, Prefill, SetAdapters, TrackedSequence
from baton.core.events import GpuUsage, StepEvents, TokenEvent
from baton.core.request import SequenceId, TokenLogprob
from baton.runtime import codec
from baton.runtime.streams import LARGE_BYTES, dial
from baton.v1 import worker_pb2, worker_pb2_grpc
from coordinator.policy.choice import Stage
from tests.support.fake_workers import FakeWorker, Wire, bench, run_to_end, wait_for_dispatch
from tests.support.nodes import until


@pytest.mark.parametrize("phase", ["dispatched", "first token", "handed over", "decoding", "last token"])
@pytest.mark.parametrize("who", ["p0", "d0", "both"])
async def test_a_session_that_breaks_in_any_phase_loses_and_repeats_no_token(phase: str, who: str) -> None:
    """Output that is posted while the connection is down is sent again after the redial."""
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await wait_for_dispatch(b)
        steps = {
            "dispatched": lambda: None,
            "first token": lambda: p.report(s, 0, 5),
            "handed over": lambda: (p.hand_over(s, "d0"), p.here.discard(s), d.here.add(s)),
            "decoding": lambda: (d.report(s, 0, 5, 6), d.report(s, 2, 7)),
            "last token": lambda: d.report(s, 3, 8, ended="length"),
        }
        for name, step in steps.items():
            if name == phase:
                broken = [w for w in (p, d) if who in (w.name, "both")]
                for worker in broken:
                    worker.cut()  # the step below posts to a dead stream, or to none
                step()
                await until(lambda ws=broken: all(len(w.welcomes) == 2 for w in ws), what="the redial")
                await asyncio.sleep(0.02)
            else:
                step()
        assert await reader.done() == [5, 6, 7, 8]
        assert not p.abandoned and not d.abandoned
        assert len(p.all(Prefill)) == 1  # the worker had it, though it had reported nothing of it


async def test_a_command_lost_with_its_stream_is_sent_again() -> None:
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
        command = await p.received(Prefill)
        run_to_end(p, d, command.request.sequence_id)
        assert await reader.done() == [5, 6, 7, 8]
        assert len(p.all(Prefill)) == 1


async def test_requests_are_not_refused_during_a_short_session_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.policy.membership.REDIAL_S", 30.0)  # a busy machine takes longer
    async with bench("p0", "d0") as b:
        first, second = b.submit("a", prompt=(1,) * 40), b.submit("b", prompt=(1,) * 8)
        p, d, s = await wait_for_dispatch(b)
        d.wire.refuses = True
        d.cut()
        await until(lambda: b.state("d0") == "disconnected")
        third = b.submit("c", prompt=(1,))
        assert b.pipeline.ready() == (True, "ready")
        await asyncio.sleep(0.25)
        assert third.error is None
        d.wire.refuses = False
        run_to_end(p, d, s)
        assert len(await first.done()) == 4
        for number, reader in ((2, second), (3, third)):
            run_to_end(p, d, (await p.received(Prefill, number)).request.sequence_id)
            assert len(await reader.done()) == 4


async def test_a_decode_worker_is_not_expected_to_have_a_sequence_that_may_be_in_transit() -> None:
    """It would report the sequence as unknown, and the report could arrive after it has received the KV."""
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await wait_for_dispatch(b)
        for handed_over in (False, True):
            if handed_over:
                p.report(s, 0, 5)
                p.hand_over(s, "d0")
                await reader.got(1)
                await until(lambda: b.in_flight(s).stage is Stage.DECODE)
                d.here.add(s)
            welcomes = {w.name: len(w.welcomes) for w in (p, d)}
            for worker in (p, d):
                worker.cut()
            await until(lambda seen=welcomes: all(len(w.welcomes) > seen[w.name] for w in (p, d)))
            assert d.welcomes[-1].tracked == (TrackedSequence(s, int(handed_over), handed_over),)
            assert p.welcomes[-1].tracked == (TrackedSequence(s, int(handed_over), not handed_over),)
        d.report(s, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]


async def test_a_command_that_cannot_be_sent_breaks_the_session_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        b.cluster.send("p0", object())  # type: ignore[arg-type]
        await until(lambda: len(p.welcomes) == 2, what="p0 to join again")
        assert "commands to p0" in caplog.text
        run_to_end(p, d, s)
        assert await reader.done() == [5, 6, 7, 8]


async def test_two_sessions_of_one_incarnation_count_as_one_worker() -> None:
    """A half-open stream and its successor: the successor counts, messages on the old one are dropped."""
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        d.wire.refuses = True  # the old session cannot redial
        # The same incarnation, as after a redial that the coordinator accepts before it detects the break.
        twin = await b.add("d0", here=[s])
        stale = list(b.cluster._outgoing.values())
        assert len(stale) == 2
        run_to_end(p, twin, s)
        assert len(await reader.done()) == 4
        b.requests.check()


async def test_heartbeats_report_gpu_usage() -> None:
    async with bench("p0", "d0") as b:
        b.workers[1].session.show_gpu(GpuUsage(3 << 30, 80 << 30, 0.25))

        def shown() -> dict[str, object]:
            return {row["id"]: row["gpu"] for row in b.pipeline.workers()["workers"]}  # type: ignore[attr-defined]

        await until(lambda: shown()["d0"], what="a heartbeat")
        usage = {"memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30, "utilisation": 0.25}
        assert shown() == {"p0": None, "d0": usage}


async def test_a_large_message_is_parsed_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unwrap, threads = codec.unwrap, dict[str, str]()

    def noted(message: Any) -> Any:
        value = unwrap(message)
        if isinstance(value, StepEvents) and value.tokens:
            threads[value.tokens[0].sequence.request_id] = threading.current_thread().name
        return value

    monkeypatch.setattr(codec, "unwrap", noted)
    score = TokenLogprob(7, -1.0, 1, tuple(range(20)), (-2.0,) * 20)
    large = (score,) * (LARGE_BYTES // 100)
    async with bench("p0") as b:
        (p,) = b.workers
        for number, (name, scores) in enumerate({"small": (), "large": large}.items(), 1):
            p.session.post(StepEvents(tokens=(TokenEvent(SequenceId(name, 0, 1), 0, (7,), prompt_logprobs=scores),)))
            await until(lambda count=number: b.requests.stale_events == count, what=name)
    here = threading.current_thread().name
    assert threads["small"] == here and threads["large"].startswith("large messages")


async def test_the_cause_is_named_if_a_session_breaks_while_a_command_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC gives a failed write no cause."""
    async with bench() as b:
        await (wire := Wire(b.port)).start()
        join = FakeWorker("p0", wire).join("")
        session = worker_pb2.SessionRequest
        channel, _, _ = await dial(
            f"127.0.0.1:{wire.port}", lambda c: worker_pb2_grpc.WorkerControlStub(c).Session, session, join, 5.0
        )
        for _ in range(3):  # more than is buffered for a worker that reads nothing
            b.cluster.send("p0", SetAdapters((AdapterSource("a", "p" * (12 << 20)),)))
        await asyncio.sleep(0.3)
        wire.cut()
        await until(lambda: b.state("p0") == "disconnected")
        assert "session of p0 broke: closed by the peer" in caplog.text
        await channel.close()
        await wire.close()
