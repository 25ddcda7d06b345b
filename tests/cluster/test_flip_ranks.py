"""`baton flip` of a worker of two ranks: both compute in the new role, and one that dies meanwhile ends the flip."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.test_flip import baton_flip, flip, tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.fault_cluster import FaultCluster, fault_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WORKER, FOLLOWER = "prefill-1", "prefill-1.1"
PROMPTS = [[n, *range(20, 180)] for n in range(4)]
COUNT = 40


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultCluster]:
    model = make_checkpoint(tmp_path_factory.mktemp("flip-ranks") / "m", arch="llama", max_position_embeddings=4096)
    flags = {"exact": True, "step_tokens": 64, "served_model_name": "m"}
    with fault_cluster(model, prefill=2, decode=1, prefill_tp=2, **flags) as started:
        yield started


def edges(running: FaultCluster, side: str) -> int:
    """Returns how many edges the follower has as that side of a hand-over."""
    return sum(name.startswith(f"edge-{side}") for name in running.state(FOLLOWER)["threads"])


async def test_a_rank_that_dies_during_a_flip_ends_it_in_one_line_and_the_worker_recovers(
    running: FaultCluster,
) -> None:
    """The second rank is killed in the first step of the new role, whose times are measured before it joins: only once,
    so this is the first flip."""
    cluster = running.cluster
    expected = await tokens(cluster, PROMPTS[0], COUNT)
    pids = cluster.pids(WORKER)
    running.ask(FOLLOWER, "hold_step")
    flipping = asyncio.create_task(asyncio.to_thread(baton_flip, cluster, WORKER, "decode", "--timeout-s", "30"))
    await running.held(FOLLOWER)
    assert await tokens(cluster, PROMPTS[0], COUNT) == expected, "the others do not serve meanwhile"
    cluster.kill(pids[1])
    running.release(FOLLOWER, "hold_step")
    done = await flipping
    assert done.returncode == 1 and done.stderr == ""
    why = f"its process (pid {pids[0]}, {pids[1]} on 127.0.0.1) ended meanwhile and was started again; its log says why"
    assert done.stdout.splitlines()[-1].endswith(f"{WORKER}     joined again as prefill, not as decode: {why}")
    lines = (cluster.run_dir / f"{WORKER}.log").read_text().splitlines()
    changing = next(n for n, line in enumerate(lines) if line.endswith(f"{WORKER} is to become a decode worker"))
    assert lines[changing + 1].startswith("error: lost the connection to rank 1"), lines[changing:]
    await running.wait_until_idle()
    assert await tokens(cluster, PROMPTS[0], COUNT) == expected
    assert httpx.get(f"{cluster.url}/workers").json()["flips"] == {}, "the failed flip counts"


async def test_a_worker_of_two_ranks_changes_its_role_under_streams_and_back(running: FaultCluster) -> None:
    cluster = running.cluster
    expected = [await tokens(cluster, prompt, COUNT) for prompt in PROMPTS]
    pids = cluster.pids(WORKER)
    streams = [asyncio.create_task(tokens(cluster, prompt, COUNT)) for prompt in PROMPTS]
    await flip(cluster, WORKER, "decode")
    streams += [asyncio.create_task(tokens(cluster, prompt, COUNT)) for prompt in PROMPTS * 2]
    assert [await stream for stream in streams] == expected * 3
    row = cluster.workers()[WORKER]
    assert (row["role"], row["pids"]) == ("decode", pids) and row["tokens_generated"] > 0
    assert edges(running, "decode") > 0, "the second rank received nothing"
    await running.wait_until_idle()

    streams = [asyncio.create_task(tokens(cluster, prompt, COUNT)) for prompt in PROMPTS * 2]
    await flip(cluster, WORKER, "prefill", "--timeout-s", "0.1")
    fresh = [asyncio.create_task(tokens(cluster, [200 + n, *PROMPTS[0]], 4)) for n in range(12)]  # cached nowhere
    assert [await stream for stream in streams] == expected * 2
    assert [len(await made) for made in fresh] == [4] * 12
    row = cluster.workers()[WORKER]
    assert (row["role"], row["pids"]) == ("prefill", pids) and row["prompt_tokens_computed"] > 0
    assert edges(running, "prefill") > 0, "the second rank sent nothing"
    await running.wait_until_idle()
    assert httpx.get(f"{cluster.url}/workers").json()["flips"] == {"decode": 1, "prefill": 1}
