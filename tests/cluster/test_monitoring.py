"""A real Prometheus with a running cluster: every query of the dashboard returns data, and a prefill worker that is
slowed down on purpose stands out in `baton ps` and in the dashboard's query."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.test_monitoring import RULES, expressions
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.topologies import free_ports

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus"),
]


def prometheus(directory: Path, target: str) -> tuple[subprocess.Popen[bytes], str]:
    (port,) = free_ports(1)
    scrape = {"job_name": "baton", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": [scrape]}
    (directory / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    return subprocess.Popen(command), f"http://127.0.0.1:{port}"


def ask(url: str, query: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query.replace("$__rate_interval", "10s")}).json()
    assert answer["status"] == "success", (query, answer)
    return list(answer["data"]["result"])


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


async def test_dashboard_queries_return_data_and_show_a_slow_worker(tmp_path: Path) -> None:
    with cluster("builtin", prefill=2, prefix_cache=False) as running:
        process, url = prometheus(tmp_path, running.url.partition("//")[2])
        try:
            await load(running, time.monotonic() + 15)
            empty = [
                title
                for title, query in expressions()
                if title != "alerts" and not ask(url, query) and "failed_total" not in query
            ]
            assert not empty, empty

            victim = running.pids("prefill-1")[0]
            until = time.monotonic() + 25
            slowing = asyncio.create_task(asyncio.to_thread(throttle_process, victim, until))
            await load(running, until)
            step = next(query for title, query in expressions() if title == "Time of a step")
            found = {row["metric"]["worker"]: float(row["value"][1]) for row in ask(url, step)}
            print(found)
            assert found["prefill-1"] > 2 * found["prefill-0"], found
            await slowing
        finally:
            process.terminate()
            process.wait(10)


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
