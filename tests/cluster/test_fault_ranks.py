"""Faults at the followers of a worker, with two ranks each for prefill and decode."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Iterator

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.fault_cluster import FaultCluster, expected, fault_cluster, start
from tests.support.limits import HANG_S, Stall

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

TIMES = [pytest.param(1, id="once"), pytest.param(20, marks=pytest.mark.long, id="20")]
KILL_SEEN_S = 0.5


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    model = make_checkpoint(tmp_path_factory.mktemp("ranks") / "m", "llama", max_position_embeddings=4096)
    flags = {"exact": True, "step_tokens": 64, "kv_memory_gib": 0.02, "prefix_cache": False, "served_model_name": "m"}
    with fault_cluster(model, prefill=1, decode=1, prefill_tp=2, decode_tp=2, **flags) as started:
        yield started


@pytest.mark.long  # the default run has the test of a decode follower in mid-transfer below
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("when", ["during", "after"])
async def test_a_killed_prefill_follower_ends_its_worker_and_no_request(
    running: FaultCluster, when: str, times: int
) -> None:
    """Its worker ends promptly, with all ranks, and restarts; KV that it still held is recomputed, and sequences at the
    decode worker continue."""
    async with Client(running.cluster, timeout_s=120.0) as client:
        answer = await expected(client, count=300)
        for _ in range(times):
            if when == "during":
                running.ask("prefill-0.1", "hold_send")  # the rank with the other half of the heads
            request = start(client, count=300)
            if when == "during":
                await running.held("prefill-0.1")
            else:
                await asyncio.wait_for(request.decoding.wait(), 60)
            await kill_follower(running, "prefill-0")
            running.release("prefill-0.1", "hold_send")
            result = await request.end()
            assert (result.error, result.tokens) == ("", answer), running.cluster.logs()
            await running.wait_until_idle()
            assert await expected(client, count=300) == answer


@pytest.mark.parametrize("times", TIMES)
async def test_a_decode_follower_killed_in_a_transfer_ends_only_its_own_worker(
    running: FaultCluster, times: int
) -> None:
    """Its part of a chunk is posted and being sent: its worker ends with all ranks, the prefill worker survives and
    keeps nothing of the transfer. As there is no other decode worker, the request waits for this one's restart."""
    async with Client(running.cluster, timeout_s=120.0) as client:
        answer, senders = await expected(client), running.cluster.pids("prefill-0")
        for _ in range(times):
            running.ask("prefill-0.1", "hold_send")
            request = start(client)
            await running.held("prefill-0.1")
            await kill_follower(running, "decode-0")
            running.release("prefill-0.1", "hold_send")
            result = await request.end()
            assert (result.error, result.tokens) == ("", answer), running.cluster.logs()
            await running.wait_until_idle()
            assert running.cluster.pids("prefill-0") == senders
            assert await expected(client) == answer


async def kill_follower(running: FaultCluster, worker: str) -> None:
    """Kills the follower of a worker and checks that the leader detects it promptly, and then ends promptly."""
    end = os.pidfd_open(running.cluster.pids(worker)[0])
    lost = running.shared / f"{worker}.lost"
    lost.unlink(missing_ok=True)
    with Stall() as stall:
        killed = running.signal(worker, rank=1)
        ended, *_ = await asyncio.to_thread(select.select, [end], [], [], HANG_S)
    os.close(end)
    assert ended, f"the leader lives on\n{running.cluster.logs()}"
    detected = float(lost.read_text())
    assert 0 < detected - killed < stall.allows(KILL_SEEN_S)
    assert stall.ended - detected < stall.allows(KILL_SEEN_S)  # its memory is freed meanwhile


@pytest.mark.parametrize("times", TIMES)
async def test_a_bit_flipped_on_a_followers_edge_is_detected_and_only_that_edge_resends(
    running: FaultCluster, times: int
) -> None:
    async with Client(running.cluster, timeout_s=120.0) as client:
        answer, before = await expected(client), await running.wait_until_idle()
        for _ in range(times):
            running.ask("prefill-0.1", "flip")
            assert await expected(client) == answer
            await running.fired("prefill-0.1", "flip")
        after = await running.wait_until_idle()
        resent = [s["prefill-0"]["load"]["chunks_resent"] for s in (before, after)]
        damaged = [s["decode-0"]["chunks_damaged"] for s in (before, after)]
        assert (resent[1] - resent[0], damaged[1] - damaged[0]) == (times, times)
        assert not [t for t in running.state("prefill-0.1")["threads"] if t.startswith("edge-")][1:]
