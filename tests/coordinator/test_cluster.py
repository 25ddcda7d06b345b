"""One request and its two workers: the client gets each token once and in order, and each error with its stage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.core.blocks import HINT_BYTES, KeyChain
from baton.core.commands import Abort, Assign, Drained, Prefill
from baton.core.errors import BatonError, DeadlineExceeded, InvariantError, ProtocolError
from baton.core.events import KVCacheEvents, StepEvents
from baton.core.handover import verify
from coordinator.cluster import Cluster
from tests.support.builders import make_facts, make_join
from tests.support.fake_workers import bench, run_to_end, wait_for_dispatch
from tests.support.nodes import until


async def test_a_request_is_prefilled_handed_over_and_decoded() -> None:
    async with bench("p0", "d0", "d1") as b:
        reader = b.submit(max_tokens=4)
        p, d, s = await wait_for_dispatch(b)
        command = p.all(Prefill)[0]
        assert command.request.prompt == (1, 2, 3) and command.request.max_tokens == 4
        assert [t.worker_id for t in command.targets] == ["d0", "d1"]
        for target in command.targets:
            key, now_ms = p.welcomes[0].handle_key, p.welcomes[0].now_ms
            name = target.worker_id
            verify(
                key,
                target.handle,
                sequence=s,
                source="p0",
                destination=name,
                incarnation=1,
                source_incarnation=1,
                now_ms=now_ms,
            )
        run_to_end(p, d, s)
        assert await reader.done() == [5, 6, 7, 8]
        last = reader.deltas[-1]
        assert (last.finish_reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 3, 4)  # type: ignore[union-attr]
        assert last.timeline is not None
        assert (last.timeline.prefill_worker, last.timeline.decode_worker) == ("p0", "d0")
        assert not p.all(Abort) and not d.all(Abort)
        await until(lambda: len(p.session.output_log) == len(d.session.output_log) == 0)


async def test_invariants_are_checked_when_the_last_request_has_ended() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=1)
        p, _, s = await wait_for_dispatch(b)
        await asyncio.sleep(0.2)  # until a tick has run with it in flight
        worker = b.cluster.workers.get("d0")
        assert worker is not None
        worker.running += 1
        p.report(s, 0, 5, ended="length")
        await reader.done()
        with pytest.raises(InvariantError, match="running should be 0"):
            await asyncio.wait_for(b.tick, 30)
        worker.running -= 1
        b.tick = asyncio.create_task(b.cluster.tick())


async def test_a_violated_invariant_in_a_session_ends_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker would redial, repeat the message, and fail again for ever."""
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=1)
        p, _, s = await wait_for_dispatch(b)

        def broken(*_: object, **__: object) -> None:
            raise InvariantError("a counter is wrong")

        monkeypatch.setattr(b.cluster.requests, "on_events", broken)
        p.report(s, 0, 5, ended="length")
        with pytest.raises(InvariantError, match="a counter is wrong"):
            await asyncio.wait_for(b.tick, 30)
        monkeypatch.undo()
        b.cluster._failure = None
        b.tick = asyncio.create_task(b.cluster.tick())
        await reader.done()


@pytest.mark.parametrize("call", ["admit", "end"])
async def test_a_violated_invariant_in_a_client_s_task_ends_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Others that were taken from the queue with it would wait for their deadline."""
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=1)
        await wait_for_dispatch(b)

        def broken(*_: object, **__: object) -> None:
            raise InvariantError("a counter is wrong")

        monkeypatch.setattr(b.cluster.requests, call, broken)
        if call == "admit":
            reader = b.submit("another", max_tokens=1)
        else:
            reader.task.cancel()
        with pytest.raises(InvariantError, match="a counter is wrong"):
            await reader.task
        with pytest.raises(InvariantError, match="a counter is wrong"):
            await asyncio.wait_for(b.tick, 30)
        monkeypatch.undo()
        for choice in list(b.requests):
            b.cluster.forget(choice)
        b.cluster._failure = None
        b.tick = asyncio.create_task(b.cluster.tick())


@pytest.mark.parametrize("call", ["join", "set_traffic", "session_ended", "on_message"])
async def test_a_violated_invariant_in_what_workers_and_operators_call_ends_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """To them it is an error of one call, after which a worker would redial for ever."""
    cluster = Cluster(3.0, 10, 1000)
    queue = cluster.join(make_join("p0"), "peer")

    def broken(*_: object, **__: object) -> None:
        raise InvariantError("a counter is wrong")

    for owner, name in ((cluster.requests, "worker_joined"), (cluster.requests, "tick")):
        monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr(cluster.workers, "disconnected", broken)
    monkeypatch.setattr(cluster.workers, "left", broken)
    calls: dict[str, Callable[[], object]] = {
        "join": lambda: cluster.join(make_join("d0"), "peer"),
        "set_traffic": lambda: cluster.set_traffic({}, clear=True),
        "session_ended": lambda: cluster.session_ended("p0", 1, queue, "closed"),
        "on_message": lambda: cluster.on_message("p0", 1, Drained()),
    }
    with pytest.raises(InvariantError, match="a counter is wrong"):
        calls[call]()
    monkeypatch.undo()
    with pytest.raises(InvariantError, match="a counter is wrong"):
        await asyncio.wait_for(cluster.tick(), 30)


async def test_a_gap_is_filled_from_the_other_worker_and_repeated_tokens_count_once() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=3)
        p, d, s = await wait_for_dispatch(b)
        d.session.post(StepEvents())
        d.report(s, 1, 6)
        await asyncio.sleep(0.05)
        assert reader.deltas == []
        p.report(s, 0, 5)
        await reader.got(2)
        p.report(s, 0, 5)
        d.report(s, 1, 6, 7, ended="length")
        assert await reader.done() == [5, 6, 7]


async def test_a_repeated_token_that_differs_ends_the_request_and_aborts_both_workers() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.report(s, 0, 5)
        await reader.got(1)
        d.report(s, 0, 9)
        assert isinstance(await reader.failed(), ProtocolError)
        await p.received(Abort)
        await d.received(Abort)


async def test_a_one_token_request_needs_no_decode_worker() -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit(max_tokens=1)
        p, _, s = await wait_for_dispatch(b)
        assert p.all(Prefill)[0].targets == ()
        p.report(s, 0, 5, ended="length")
        assert await reader.done() == [5]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("deadline_exceeded", DeadlineExceeded),
        ("internal_error", BatonError),
    ],
)
async def test_a_workers_error_reaches_the_client_with_its_stage(code: str, kind: type[Exception]) -> None:
    async with bench("p0", "d0") as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.fail(s, code, "so it is")
        error = await reader.failed()
        assert isinstance(error, kind) and (error.code, error.message) == (code, "so it is (stage prefill)")
        await d.received(Abort)


async def test_a_request_goes_to_the_workers_that_reported_its_prefix_as_cached() -> None:
    async with bench("p0", "p1", "d0", "d1") as b:
        prompt = tuple(range(13))
        facts = make_facts()
        chain = KeyChain(facts.model_digest, "", "", "", facts.layout.block_size)
        hints = tuple(k[:HINT_BYTES] for k in chain.grow(lambda start, end: prompt[start:end], 12))
        for name in ("p1", "d1"):
            b.worker(name).session.post(StepEvents(kv_cache_events=KVCacheEvents(stored=hints)))
        await until(
            lambda: len(b.cluster.workers.get("p1").cached) and len(b.cluster.workers.get("d1").cached),
            what="the news",
        )
        reader = b.submit("a", prompt=prompt)
        command = await b.worker("p1").received(Prefill)
        assert [t.worker_id for t in command.targets] == ["d1", "d0"]
        await reader.leave()
        reader = b.submit("b", prompt=prompt[::-1])
        assert (await b.worker("p0").received(Prefill)).targets[0].worker_id == "d0"
        await reader.leave()


async def test_parked_kv_is_offered_under_the_next_attempt_and_older_events_are_stale() -> None:
    async with bench("p0", "d0", "d1") as b:
        reader = b.submit()
        p, d, s = await wait_for_dispatch(b)
        p.park(s)
        p.report(s, 0, 5)
        assign = await p.received(Assign)
        assert (assign.sequence, assign.attempt) == (s, 2)
        assert assign.targets[0].handle.sequence == s._replace(attempt=2)
        stale = b.requests.stale_events
        d.report(s, 1, 99)
        await until(lambda: b.requests.stale_events > stale)
        second = s._replace(attempt=2)
        p.park(second)
        assign = await p.received(Assign, 2)
        assert (assign.sequence, assign.attempt) == (second, 3)
        third = s._replace(attempt=3)
        p.hand_over(third, "d1")
        b.workers[2].report(third, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]
        assert reader.deltas[-1].timeline.decode_worker == "d1"  # type: ignore[union-attr]
