"""Each alert fires when a fault is injected into a running cluster, and clears when the fault is removed. A real
Prometheus scrapes the coordinator and evaluates docs/monitoring/baton-alerts.yml, with all times divided by SPEED, so
that five minutes take ten seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from baton.engine.checkpoint import read_model_config
from baton.runtime.model_source import builtin_directory
from tests.docs.test_monitoring import RULES, alerts
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.prometheus import Prometheus, prometheus

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus"),
]

SPEED = 30
FIRES_S = CLEARS_S = 120.0
BLOCK, BLOCKS = 16, 64
_TIME = re.compile(r"(\[|for: )(\d+)([sm])\b")


def faster(rules: str) -> str:
    """Returns the rules with all ranges and delays divided by SPEED."""
    return _TIME.sub(lambda m: f"{m[1]}{int(m[2]) * {'s': 1, 'm': 60}[m[3]] * 1000 // SPEED}ms", rules)


@contextlib.contextmanager
def pausing(pid: int, pause_s: float, run_s: float) -> Iterator[None]:
    """Stops a process again and again, for `pause_s`, with `run_s` between."""
    ended = False

    async def alternate() -> None:
        while not ended:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(pause_s)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(run_s)

    task = asyncio.create_task(alternate())
    try:
        yield
    finally:
        ended = True
        task.cancel()
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # its agent kills it after a minute
            os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def load(running: Cluster, streams: int, prompt: int, output: int) -> AsyncIterator[None]:
    """Keeps that many streams running; those that fail are repeated."""

    async def stream(client: Client, index: int) -> None:
        number = 0
        while True:
            number += 1
            ids = [(7 * index + 13 * number + i) % 200 + 6 for i in range(prompt)]
            with contextlib.suppress(AssertionError, httpx.HTTPError):
                async for _ in client.events(ids, output, model=None, cache_salt=f"{index}-{number}"):
                    pass
            await asyncio.sleep(0.05)

    async with Client(running) as client:
        tasks = [asyncio.create_task(stream(client, index)) for index in range(streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def no_workers_on_purpose(running: Cluster) -> AsyncIterator[None]:
    """Reports what an autoscaler reports that keeps no worker."""

    async def report() -> None:
        async with httpx.AsyncClient(base_url=running.url) as client:
            while True:
                assert (await client.post("/expect_workers")).status_code == 200
                await asyncio.sleep(1.0)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()


class Watched:
    """The alerts of a Prometheus."""

    def __init__(self, server: Prometheus) -> None:
        self._server = server
        self.fired: set[str] = set()

    async def fires(self, *names: str) -> None:
        """Fails unless all of them are firing at one time."""
        await self._until(lambda firing: set(names) <= firing, f"{names} to fire", FIRES_S)
        self.fired |= {*names}

    async def clears(self, *names: str) -> None:
        await self._until(lambda firing: not set(names) & firing, f"{names} to clear", CLEARS_S)

    async def _until(self, condition: object, what: str, timeout_s: float) -> None:
        assert callable(condition)
        deadline = time.monotonic() + timeout_s
        while not condition(firing := await asyncio.to_thread(self._server.firing)):
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}; firing: {sorted(firing)}"
            await asyncio.sleep(0.2)


async def test_each_alert_fires_at_its_fault_and_clears(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(faster(RULES.read_text(encoding="utf-8")), encoding="utf-8")
    layout = read_model_config(builtin_directory("target")).kv_layout(BLOCK, "float32")
    memory = BLOCKS * layout.bytes_per_block / 2**30
    flags: dict[str, object] = {"dtype": "float32", "block_size": BLOCK, "kv_memory_gib": memory, "prefix_cache": False}
    flags |= {"hold_s": 25.0, "max_queued_requests": 4}
    with (
        cluster("builtin", prefill=2, **flags) as running,
        prometheus(tmp_path, running.url, rules, every="500ms") as server,
    ):
        watched = Watched(server)
        async with load(running, 6, 200, 16):
            await watched.clears(*alerts())
            lost = "BatonWorkerLost", "BatonRoleMissing", "BatonQueueDoesNotMove", "BatonFailures"
            with stopped(running.pids("prefill-0")[0]), stopped(running.pids("prefill-1")[0]):
                await watched.fires(*lost[:2])
                await watched.fires("BatonQueueDoesNotMove")
                await watched.fires("BatonFailures")  # after --hold-s, and while the queue is full
                async with no_workers_on_purpose(running):
                    await watched.clears("BatonRoleMissing")
            await watched.clears(*lost)
            with pausing(running.pids("prefill-0")[0], 2.2, 0.2), pausing(running.pids("prefill-1")[0], 2.2, 0.2):
                await watched.fires("BatonSlowFirstToken")
            await watched.clears("BatonSlowFirstToken")
            with pausing(running.pids("prefill-1")[0], 0.08, 0.02):
                await watched.fires("BatonSlowWorker")
            await watched.clears("BatonSlowWorker")
            with pausing(running.pids("decode-0")[0], 0.9, 0.1):
                await watched.fires("BatonSlowTokens")
            await watched.clears("BatonSlowTokens")
            with pausing(running.coordinator_pid(), 0.3, 0.5):
                await watched.fires("BatonLoopBlocked")
        await watched.clears("BatonLoopBlocked")
        async with load(running, 12, 16, 300):
            await watched.fires("BatonBlocksShort")
        await watched.clears("BatonBlocksShort")
        assert watched.fired == set(alerts()), "each alert has a fault here"
