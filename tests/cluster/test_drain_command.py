"""`baton drain` against `baton up`: the worker leaves, its streams continue, and its supervisor does not restart it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from launch.supervisor import Backoff
from tests.support.checkpoints import make_checkpoint
from tests.support.client import body
from tests.support.cluster import Cluster, cluster
from tests.support.forks import run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PROMPT = list(range(20, 60))


def baton_drain(running: Cluster, worker: str, *words: str, url: str = "") -> subprocess.CompletedProcess[str]:
    token = ["--cluster-token-file", str(running.run_dir / "cluster.token")]
    command = [sys.executable, "-m", "launch.cli", "drain", worker, url or running.url, *token, *words]
    return run(command, timeout=120)


async def tokens(running: Cluster, count: int) -> list[int]:
    async with httpx.AsyncClient(base_url=running.url, timeout=90.0) as http:
        answer = await http.post("/v1/completions", json=body(PROMPT, count))
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_checkpoint(tmp_path_factory.mktemp("drain") / "m", arch="llama", max_position_embeddings=4096)
    # Without the prefix cache: requests for one prompt would all go to the worker that holds it.
    flags = {"decode": 2, "exact": True, "step_tokens": 64, "prefix_cache": False, "hold_s": 3.0}
    with cluster(model, **flags, served_model_name="m") as started:
        yield started


async def test_a_drained_worker_leaves_and_is_not_restarted(running: Cluster) -> None:
    expected = await tokens(running, 400)
    streams = [asyncio.create_task(tokens(running, 400)) for _ in range(4)]
    busy = lambda c: all(c.workers()[d]["running"] for d in ("decode-0", "decode-1"))  # noqa: E731
    await asyncio.to_thread(running.wait_until, busy, "a stream on each decode worker")
    pid = running.pids("decode-1")[0]

    done = await asyncio.to_thread(baton_drain, running, "decode-1", "--timeout-s", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[2:] == ["decode-1", "left"]
    assert [await stream for stream in streams] == [expected] * 4  # the drained worker's streams continued elsewhere
    assert running.workers()["prefill-0"]["prompt_tokens_cached"] == 0
    assert sorted(running.workers()) == ["decode-0", "prefill-0"]

    report = lambda c: "decode-1      left" in c.output.read_text()  # noqa: E731
    await asyncio.to_thread(running.wait_until, report, "word of the supervisor")
    await asyncio.sleep(2 * Backoff().first_s)  # a worker that died would have been restarted by now
    lines = [line for line in running.output.read_text().splitlines() if " decode-1 " in line]
    assert sum("starting" in line for line in lines) == 1 and not any("died" in line for line in lines)
    assert pid not in running.processes() and sorted(running.workers()) == ["decode-0", "prefill-0"]
    assert await tokens(running, 400) == expected

    for worker, url, message in (
        ("decode-1", running.url, "decode-1"),
        ("prefill-0", "http://127.0.0.1:9", "no cluster at http://127.0.0.1:9"),
    ):
        refused = await asyncio.to_thread(baton_drain, running, worker, url=url)
        assert refused.returncode == 3 and refused.stderr.startswith("error: ") and message in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_drain_without_the_cluster_token_is_refused(running: Cluster) -> None:
    command = [sys.executable, "-m", "launch.cli", "drain", "decode-0", running.url]
    done = run(command, timeout=60)
    assert done.returncode == 3 and "drain refused: token: it is missing" in done.stderr
    assert running.workers()["decode-0"]["state"] == "ready"


async def test_the_last_worker_of_a_role_can_be_drained(running: Cluster) -> None:
    for worker in sorted(w for w in running.workers() if w.startswith("decode")):  # one is left by the test above
        began = time.monotonic()
        done = await asyncio.to_thread(baton_drain, running, worker)
        assert done.returncode == 0 and "left" in done.stdout, done.stderr
        assert time.monotonic() - began < 30.0  # the worker is idle, so the drain timeout is not waited for
    async with httpx.AsyncClient(base_url=running.url, timeout=30.0) as http:
        answer = await http.post("/v1/completions", json=body(PROMPT, 4))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_worker")
