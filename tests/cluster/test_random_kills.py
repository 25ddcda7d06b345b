"""Requests through 2 x 2 workers, of which a random one is killed every few seconds and restarted by the supervisor.

Accepted requests continue on other workers. A request fails if two workers died while they ran it; new requests are
refused while a role has no worker. A refused client retries, so every request is answered, with the right tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client, body
from tests.support.fault_cluster import FaultCluster, fault_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

KILL_EVERY_S, CLIENTS, SEED = 5.0, 8, 7
# The error codes that a client may receive for a request that was interrupted or refused, all with status 503.
CLEAN = {"worker_lost", "no_prefill_worker", "no_decode_worker"}
REQUEST_LIMIT_S = 90.0


class Work:
    """Prompts with their answers, taken from the undisturbed cluster, and the outcomes of the requests."""

    def __init__(self, client: Client, seed: int, requests: int, until: float) -> None:
        self._client, self._random, self._until = client, random.Random(seed), until
        self._left = requests
        self._kinds: list[tuple[list[int], int, tuple[int, ...]]] = []
        self.finished = 0
        self.errors: Counter[str] = Counter()

    async def learn(self, kinds: int) -> None:
        for _ in range(kinds):
            prompt = [self._random.randrange(10, 250) for _ in range(self._random.choice([5, 30, 150, 500]))]
            count = self._random.choice([2, 8, 40])
            self._kinds.append((prompt, count, await self._client.tokens(prompt, count)))

    async def one_client(self) -> None:
        while self._left > 0 or time.monotonic() < self._until:
            self._left -= 1
            prompt, count, answer = self._random.choice(self._kinds)
            deadline = time.monotonic() + REQUEST_LIMIT_S
            while (tokens := await self._ask(prompt, count)) is None:
                assert time.monotonic() < deadline, f"no answer in {REQUEST_LIMIT_S:g} s: {self.errors}"
                await asyncio.sleep(0.3)
            assert tokens == answer, "wrong tokens"
            self.finished += 1

    async def _ask(self, prompt: list[int], count: int) -> tuple[int, ...] | None:
        """Returns None after an expected error; any other failure raises."""
        answer: httpx.Response = await self._client.http.post("/v1/completions", json=body(prompt, count))
        whole = answer.json()
        if answer.status_code == 200:
            return tuple(whole["choices"][0]["token_ids"])
        code = whole["error"]["code"]
        assert answer.status_code == 503 and code in CLEAN, (answer.status_code, whole)
        self.errors[code] += 1
        return None


async def kill_at_random(running: FaultCluster, seed: int, until: float, spare: int) -> int:
    """Kills a random rank of a random ready worker every few seconds if more than `spare` workers of its role are
    ready. Returns the number of kills."""
    choose, kills = random.Random(seed), 0
    while time.monotonic() + KILL_EVERY_S < until:
        await asyncio.sleep(KILL_EVERY_S)
        known = await asyncio.to_thread(running.cluster.workers)
        ready = sorted(w for w, fields in known.items() if fields["state"] == "ready")
        roles = Counter(known[w]["role"] for w in ready)
        ready = [w for w in ready if roles[known[w]["role"]] > spare]
        if ready:
            victim = choose.choice(ready)
            running.signal(victim, rank=choose.randrange(len(known[victim]["pids"])))
            kills += 1
    return kills


@pytest.mark.parametrize(
    ("requests", "seconds", "tp"),
    [
        pytest.param(50, 21.0, 1, marks=pytest.mark.long),  # test_recovery.py has kills at random in every run
        pytest.param(1000, 120.0, 1, marks=pytest.mark.long),
        # Two-rank workers take longer to restart than the time between kills: one of each role is spared.
        pytest.param(300, 120.0, 2, marks=pytest.mark.long),
    ],
    ids=["short", "long", "long-tp2"],
)
async def test_random_kills_leak_no_blocks_and_change_no_tokens(
    requests: int, seconds: float, tp: int, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "m", "llama", max_position_embeddings=1024)
    flags = {"exact": True, "step_tokens": 64, "kv_memory_gib": 0.02, "served_model_name": "m"}
    with fault_cluster(model, prefill_tp=tp, decode_tp=tp, **flags) as running:
        async with Client(running.cluster, timeout_s=REQUEST_LIMIT_S) as client:
            until = time.monotonic() + seconds
            work = Work(client, SEED, requests, until)
            await work.learn(16)
            async with asyncio.TaskGroup() as group:
                kills = group.create_task(kill_at_random(running, SEED, until, spare=tp - 1))
                for _ in range(CLIENTS):
                    group.create_task(work.one_client())
            await running.wait_until_idle()
        log = running.cluster.output.read_text()
        print(f"{work.finished} finished, {kills.result()} kills, errors {dict(work.errors)}")
        least = int(seconds / KILL_EVERY_S * (0.5 if tp == 1 else 0.25))  # two-rank workers are mostly starting
        assert work.finished >= requests and kills.result() >= least
        assert not work.errors["worker_lost"], "kills from outside end no request"
        # No worker died except by these kills: a worker that violates an invariant would end itself and be restarted.
        assert log.count("died: killed by SIGKILL") == log.count("died: ") == kills.result()
