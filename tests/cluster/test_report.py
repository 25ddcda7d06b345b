"""`baton report` of a running cluster: every prompt token that a worker computed is accounted for."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import pytest

from launch.report import scrape
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.forks import run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def report(running: Cluster, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "launch.cli", "report", running.url, "--json", *options]
    done = run(command, timeout=60)
    done.check_returncode()
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def settled(running: Cluster, computed: int, *options: str) -> dict[str, Any]:
    """Returns the report once the workers have reported that they computed so many tokens."""
    deadline = time.monotonic() + 20
    while (made := report(running, *options))["computed"] != computed and time.monotonic() < deadline:
        time.sleep(0.2)
    assert made["computed"] == computed, made
    return made


async def give_up(client: Client, prompt: list[int]) -> None:
    """Leaves a stream after its second event."""
    events = 0
    async for _ in client.events(prompt, 400, model=None):
        events += 1
        if events == 2:
            return


async def test_computed_prompt_tokens_are_those_of_answers_or_wasted() -> None:
    with cluster("builtin", draft="none") as running:
        async with Client(running) as client:
            prompts = [[(7 * i + k) % 200 + 6 for k in range(60 + 40 * i)] for i in range(6)]
            await asyncio.gather(*(client.complete(prompt, 8, model=None) for prompt in prompts))
            await client.complete(prompts[0], 8, model=None)  # mostly cached
            cached = report(running)["cached_tokens"]
            assert 0 < cached < len(prompts[0])
            computed = sum(map(len, prompts)) + len(prompts[0]) - cached
            done = settled(running, computed, "--price", "3600")
            assert (done["requests"], done["generated_tokens"], done["wasted"]) == (7, 56, {})
            assert scrape(running.url).total("baton_requests_latency_total") == 7
            prefill, decode = done["roles"]["prefill"], done["roles"]["decode"]
            assert 0 < prefill["utilisation"] < 1 and 0 < decode["utilisation"] < 1
            assert done["cost"] == pytest.approx(3600 * (prefill["worker_hours"] + decode["worker_hours"]))
            left = [(11 * k) % 200 + 6 for k in range(300)]
            await give_up(client, left)
            await client.idle(running)
            done = settled(running, computed + len(left))
            assert done["wasted"] == {"cancelled": len(left)} and done["cancelled"] == 1
