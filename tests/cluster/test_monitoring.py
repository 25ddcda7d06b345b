"""A real Prometheus with a running cluster: every query of the dashboard and of vLLM's public users returns data, and a
prefill worker that is slowed down on purpose stands out in `baton ps` and in the dashboard's query.

GRAFANA_DASHBOARDS=DIR: also runs the queries of exported Grafana dashboards in DIR, and prints those without data."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.test_monitoring import RULES, expressions
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.prometheus import Prometheus, prometheus
from tests.support.vllm_queries import QUERIES, dashboard_queries, substituted

MODEL = "builtin"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus"),
]


async def load(running: Cluster, until: float) -> None:
    async with Client(running) as client:

        async def stream(index: int) -> None:
            number = 0
            while time.monotonic() < until:
                number += 1
                prompt = [(7 * index + 13 * number + i) % 200 + 6 for i in range(200)]
                async for _ in client.events(prompt, 24, model=None, cache_salt=f"{index}-{number}"):
                    pass

        await asyncio.gather(*(stream(index) for index in range(4)))


def throttle_process(pid: int, until: float) -> None:
    """Lets a process run for only a fifth of the time."""
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.08)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


def check_queries(server: Prometheus) -> None:
    """Asserts that all queries return data; prints those of GRAFANA_DASHBOARDS that do not."""
    empty = [
        title
        for title, query in expressions()
        if title != "alerts" and not server.ask(substituted(query, MODEL)) and "failed_total" not in query
    ]
    assert not empty, empty
    queries = [substituted(query, MODEL) for queries in QUERIES.values() for query in queries]
    assert not (empty := [query for query in queries if not server.ask(query)]), empty
    for path in sorted(Path(os.environ.get("GRAFANA_DASHBOARDS", os.devnull)).glob("*.json")):
        asked = {query: title for title, query in dashboard_queries(path)}
        empty = [f"{title}: {query}" for query, title in asked.items() if not server.ask(substituted(query, MODEL))]
        print(f"{path.name}: {len(asked)} queries, {len(empty)} without data", *empty, sep="\n  ")


async def test_dashboard_queries_return_data_and_show_a_slow_worker(tmp_path: Path) -> None:
    with (
        cluster("builtin", prefill=2, prefix_cache=False, metrics_compat="vllm") as running,
        prometheus(tmp_path, running.url, RULES) as server,
    ):
        loading = asyncio.create_task(load(running, time.monotonic() + 40))
        await asyncio.sleep(15)
        await asyncio.to_thread(check_queries, server)
        await loading

        victim = running.pids("prefill-1")[0]
        until = time.monotonic() + 25
        slowing = asyncio.create_task(asyncio.to_thread(throttle_process, victim, until))
        await load(running, until)
        step = next(query for title, query in expressions() if title == "Time of a prefill step")
        found = {row["metric"]["worker"]: float(row["value"][1]) for row in server.ask(substituted(step, MODEL))}
        print(found)
        assert found["prefill-1"] > 2 * found["prefill-0"], found
        await slowing


async def test_ps_watch_shows_a_slow_worker() -> None:
    with cluster("builtin", prefill=2, prefix_cache=False) as running:
        victim, until = running.pids("prefill-1")[0], time.monotonic() + 12
        slowing = asyncio.create_task(asyncio.to_thread(throttle_process, victim, until))
        loaded = asyncio.create_task(load(running, until))
        await asyncio.sleep(1)
        command = [sys.executable, "-m", "launch.cli", "ps", running.url, "--watch", "4"]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        await asyncio.sleep(9)
        watching.send_signal(signal.SIGINT)
        shown = watching.communicate(timeout=10)[0]
        await asyncio.gather(slowing, loaded)
        print(shown)
        rows = [line.split() for line in shown.splitlines() if line.startswith("prefill-")]
        step_ms = {row[0]: float(row[-2]) for row in rows if row[-2] != "-"}
        assert step_ms["prefill-1"] > 2 * step_ms["prefill-0"], shown
