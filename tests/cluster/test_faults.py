"""Faults in a running cluster of 2 x 2: a killed, stopped or faulty worker is detected, costs only its own requests,
and leaks nothing.

Each test ends with `wait_until_idle`: every worker is ready again, its invariants hold, and no block, lease, sequence,
deadline, task or thread of a request remains. `make test` runs each fault once, but for two that it has elsewhere,
`make test-long` 20 times.
[docs/failure-modes.md](../../docs/failure-modes.md#what-shows-it) lists the defence without which each test fails.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from baton.engine.kernels.build import processor_levels
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.fault_cluster import (
    BYSTANDER,
    COUNT,
    PROMPT,
    FaultCluster,
    calm,
    disturbed,
    expected,
    fault_cluster,
    start,
)
from tests.support.limits import Stall

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

TIMES = [pytest.param(1, id="once"), pytest.param(20, marks=pytest.mark.long, id="20")]
WITNESS = {"decode-0": ("prefill-0", "parked"), "prefill-0": ("decode-0", "transfer_ended")}
KILL_SEEN_S, STOP_SEEN_S, STOPPED_S = 0.5, 5.0, 10.0


@pytest.fixture(scope="module", params=[pytest.param(1, id="tp1"), pytest.param(2, id="tp2", marks=pytest.mark.long)])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    model = make_checkpoint(tmp_path_factory.mktemp("faults") / "m", "llama", max_position_embeddings=4096)
    flags = {"exact": True, "step_tokens": 64, "kv_memory_gib": 0.02, "prefix_cache": False, "served_model_name": "m"}
    with fault_cluster(model, prefill_tp=request.param, decode_tp=request.param, **flags) as started:
        yield started


@pytest.fixture(autouse=True)
def untroubled(request: pytest.FixtureRequest, running: FaultCluster) -> Iterator[None]:
    """Every test starts with an undisturbed cluster; a test that fails prints the logs."""
    if {"running": 2, "times": 20}.items() <= request.node.callspec.params.items():
        pytest.skip("with two ranks a worker once, with one 20 times")
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(running.cluster.logs())
    running.release_all()


@pytest.fixture
async def client(running: FaultCluster) -> AsyncIterator[Client]:
    async with Client(running.cluster, timeout_s=120.0) as made:
        yield made


# When a worker dies: before, during or after the transfer, or between its last chunk's first layers and the others.
MOMENTS = ("before", "during", "between", "after")
# The test below kills a decode worker before the transfer, test_recovery.py one that decodes.
REPEATED = (("before", "decode-0"), ("after", "decode-0"))
KILLS = [
    pytest.param(when, victim, marks=pytest.mark.long if (when, victim) in REPEATED else ())
    for when in MOMENTS
    for victim in ("decode-0", "prefill-0")
]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("when", "victim"), KILLS)
async def test_a_request_survives_kill_9_of_a_worker(
    running: FaultCluster, client: Client, victim: str, when: str, times: int
) -> None:
    """The request is rescheduled; its client only sees a pause."""
    if when == "between" and (running.edges > 1 or not processor_levels()):
        pytest.skip("with several ranks, or without compiled kernels, a step is reported as one")
    count = 400 if when == "after" else COUNT
    answer, stream = await expected(client, count=count), await expected(client, *BYSTANDER)
    for _ in range(times):
        hold = {"before": "hold_step", "during": "hold_send", "between": "hold_layers"}.get(when)
        if hold:
            request, bystander = await disturbed(running, client, hold)
        else:
            request = start(client, count=2000)  # long, so that it cannot have ended before
            await asyncio.wait_for(request.decoding.wait(), 60)  # so it runs on the first pair
            bystander = start(client, *BYSTANDER)
            await asyncio.wait_for(bystander.decoding.wait(), 60)
        in_transfer = when == "during" or (when, victim) == ("between", "prefill-0")
        with Stall() as stall:
            killed = running.signal(victim)
            seen = await running.first(*WITNESS[victim], since=killed) if in_transfer else killed
        assert seen - killed < stall.allows(KILL_SEEN_S), running.cluster.logs()
        if hold:
            running.release("prefill-0", hold)
        result = await request.end()
        assert result.error == "" and result.tokens[:count] == answer, running.cluster.logs()
        await calm(running, client, bystander, stream)


@pytest.mark.parametrize("times", TIMES)
async def test_a_request_in_prefill_survives_the_loss_of_its_decode_worker(
    running: FaultCluster, client: Client, times: int
) -> None:
    """The worker is killed, lost and restarted during the prefill: the KV goes to a decode worker that is ready."""
    answer, stream = await expected(client), await expected(client, *BYSTANDER)
    for _ in range(times):
        request, bystander = await disturbed(running, client, "hold_step")
        before = running.cluster.workers()["decode-0"]["incarnation"]
        running.signal("decode-0")

        def back(before: int = before) -> bool:
            now = running.cluster.workers()["decode-0"]
            return bool(now["state"] == "ready" and now["incarnation"] != before)

        await running.until(back, "the restart of decode-0")
        running.release("prefill-0", "hold_step")
        result = await request.end()
        assert (result.error, result.tokens) == ("", answer), running.cluster.logs()
        await calm(running, client, bystander, stream)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("victim", [pytest.param("prefill-0", marks=pytest.mark.long), "decode-0"])
async def test_a_stopped_worker_is_lost_within_five_seconds_and_joins_again(
    running: FaultCluster, client: Client, victim: str, times: int
) -> None:
    """SIGSTOP during a transfer is detected within 5 s. After SIGCONT the worker is fenced and joins again, unless its
    other ranks have ended it."""
    answer, stream = await expected(client), await expected(client, *BYSTANDER)
    for _ in range(times):
        request, bystander = await disturbed(running, client, "hold_send")
        incarnations = {w: f["incarnation"] for w, f in running.cluster.workers().items()}
        leader = running.cluster.pids(victim)[0]
        try:
            with Stall() as stall:
                stopped = running.signal(victim, signal.SIGSTOP)
                await running.until(
                    lambda: running.cluster.workers()[victim]["state"] == "lost", "the end of its lease"
                )
                seen = time.monotonic()
                if victim == "prefill-0":
                    seen = max(seen, await running.first(*WITNESS[victim], since=stopped))
            assert seen - stopped < stall.allows(STOP_SEEN_S), running.cluster.logs()
            running.release("prefill-0", "hold_send")
            result = await request.end()
            assert (result.error, result.tokens) == ("", answer), running.cluster.logs()
        finally:
            if times > 1 or running.edges > 1:  # else as soon as its request has been rescheduled
                await asyncio.sleep(max(stopped + STOPPED_S - time.monotonic(), 0))
            running.resume(leader)
        await calm(running, client, bystander, stream)
        now = running.cluster.workers()
        # A worker of one rank continues; with more, the other ranks end it after 4 s of silence.
        ended = {victim} if running.edges > 1 else set()
        assert {w for w, before in incarnations.items() if now[w]["incarnation"] != before} == ended


@pytest.mark.parametrize("times", TIMES)
async def test_a_chunk_with_a_flipped_bit_is_detected_and_resent_once(
    running: FaultCluster, client: Client, times: int
) -> None:
    answer, before = await expected(client), await running.wait_until_idle()
    for _ in range(times):
        running.ask("prefill-0", "flip")
        assert await expected(client) == answer
        await running.fired("prefill-0", "flip")
    after = await running.wait_until_idle()
    assert after["decode-0"]["chunks_damaged"] - before["decode-0"]["chunks_damaged"] == times
    resent = [s["prefill-0"]["load"]["chunks_resent"] for s in (before, after)]
    assert resent[1] - resent[0] == times


@pytest.mark.parametrize("times", TIMES)
async def test_intact_kv_of_another_request_is_detected(running: FaultCluster, client: Client, times: int) -> None:
    """The bytes and checksum of one request under the id of another: only the identity in the checksum differs."""
    prompts = [[11 + n] * 40 for n in range(2)]
    answers, before = [await expected(client, p) for p in prompts], await running.wait_until_idle()
    for _ in range(times):
        assert await expected(client, prompts[0]) == answers[0]
        running.ask("prefill-0", "swap")
        for turn in range(1, 20):  # until both have chunks of the same length
            assert await expected(client, prompts[turn % 2]) == answers[turn % 2]
            if not running.asked("prefill-0", "swap"):
                break
        await running.fired("prefill-0", "swap")
    after = await running.wait_until_idle()
    assert after["decode-0"]["chunks_damaged"] - before["decode-0"]["chunks_damaged"] == times


@pytest.mark.parametrize("times", TIMES)
async def test_a_late_chunk_of_an_older_generation_is_refused_and_counted(
    running: FaultCluster, client: Client, times: int
) -> None:
    answer, before = await expected(client), await running.wait_until_idle()
    for _ in range(times):
        running.ask("prefill-0", "cut")  # the next edge has another generation
        assert await expected(client) == answer
        await running.fired("prefill-0", "cut")
        running.ask("prefill-0", "late")
        assert await expected(client) == answer
        await running.fired("prefill-0", "late")
    after = await running.wait_until_idle()
    stale = [sum(s[w]["load"]["stale_messages"] for w in ("decode-0", "decode-1")) for s in (before, after)]
    assert stale[1] - stale[0] == times


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("when", ["hold_step", "hold_send", "decoding"])
async def test_a_client_disconnect_during_a_request_leaks_nothing(
    running: FaultCluster, client: Client, when: str, times: int
) -> None:
    for _ in range(times):
        if when == "decoding":
            request = start(client, count=2000)
            await running.until(lambda: running.cluster.workers()["decode-0"]["running"], "decode-0 at work")
        else:
            running.ask("prefill-0", when)
            request = start(client)
            await running.held("prefill-0")
        assert request.task is not None
        request.task.cancel()
        await asyncio.wait({request.task})
        running.release("prefill-0", when)
        await running.wait_until_idle()


@pytest.mark.parametrize("times", TIMES)
async def test_kv_parked_while_both_decode_workers_refuse_is_handed_over_later(
    running: FaultCluster, client: Client, times: int
) -> None:
    answer, before = await expected(client), await running.wait_until_idle()
    for _ in range(times):
        for worker in ("decode-0", "decode-1"):
            running.ask(worker, "refuse")
        request, asked = start(client), time.monotonic()
        await running.first("prefill-0", "parked", since=asked)
        for worker in ("decode-0", "decode-1"):
            running.release(worker, "refuse")
        assert (await request.end()).error == "" and request.tokens == answer
    after = await running.wait_until_idle()
    computed = [s["prefill-0"]["load"]["prompt_tokens_computed"] for s in (before, after)]
    assert computed[1] - computed[0] == times * len(PROMPT)  # the same KV, and no second prefill


@pytest.mark.parametrize("times", TIMES)
async def test_kill_9_of_a_prefill_worker_with_parked_kv_recomputes_the_prompt_elsewhere(
    running: FaultCluster, client: Client, times: int
) -> None:
    def rescheduled() -> int:
        return int(httpx.get(running.cluster.url + "/workers").json()["coordinator"]["rescheduled"])

    answer, before = await expected(client), rescheduled()
    for _ in range(times):
        await running.until(running.ready, "all workers ready")  # the request goes to prefill-0 then
        for worker in ("decode-0", "decode-1"):
            running.ask(worker, "refuse")
        request, asked = start(client), time.monotonic()
        await running.first("prefill-0", "parked", since=asked)
        running.signal("prefill-0")
        for worker in ("decode-0", "decode-1"):
            running.release(worker, "refuse")
        assert (await request.end()).error == "" and request.tokens == answer, running.cluster.logs()
    await running.wait_until_idle()
    assert rescheduled() >= before + times  # a dead worker's KV is not offered again
