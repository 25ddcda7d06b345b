"""`baton flip` against `baton up`: a worker changes its role while requests run and keeps its cached KV."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import body
from tests.support.cluster import Cluster, cluster
from tests.support.forks import run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = list(range(20, 180))


def baton_flip(running: Cluster, worker: str, role: str, *words: str) -> subprocess.CompletedProcess[str]:
    token = ["--cluster-token-file", str(running.run_dir / "cluster.token")]
    command = [sys.executable, "-m", "launch.cli", "flip", worker, role, running.url, *token, *words]
    return run(command, timeout=120)


async def flip(running: Cluster, worker: str, role: str, *words: str) -> None:
    done = await asyncio.to_thread(baton_flip, running, worker, role, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[2:] == [worker, "joined", "as", role]


async def tokens(running: Cluster, prompt: list[int], count: int) -> list[int]:
    async with httpx.AsyncClient(base_url=running.url, timeout=120.0) as http:
        answer = await http.post("/v1/completions", json=body(prompt, count))
        assert answer.status_code == 200, answer.text
        made: list[int] = answer.json()["choices"][0]["token_ids"]
        return made


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_checkpoint(tmp_path_factory.mktemp("flip") / "m", arch="llama", max_position_embeddings=4096)
    with cluster(model, prefill=2, decode=2, exact=True, step_tokens=64, served_model_name="m") as started:
        yield started


def roles(running: Cluster) -> dict[str, str]:
    return {name: row["role"] for name, row in running.workers().items() if row["state"] == "ready"}


async def test_workers_change_their_roles_while_streams_run(running: Cluster) -> None:
    prompts = [[n, *PROMPT] for n in range(6)]
    expected = [await tokens(running, prompt, 120) for prompt in prompts]
    pids = {name: row["pids"] for name, row in running.workers().items()}
    streams = [asyncio.create_task(tokens(running, prompt, 120)) for prompt in prompts * 2]
    await flip(running, "prefill-1", "decode")
    assert roles(running) == {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode", "decode-1": "decode"}
    more = [asyncio.create_task(tokens(running, prompt, 120)) for prompt in prompts * 2]
    await flip(running, "decode-0", "prefill", "--timeout-s", "0.1")
    await flip(running, "decode-1", "prefill")
    assert roles(running) == {
        "prefill-0": "prefill", "prefill-1": "decode", "decode-0": "prefill", "decode-1": "prefill",
    }  # fmt: skip
    assert [await stream for stream in streams + more] == expected * 4
    assert [await tokens(running, prompt, 120) for prompt in prompts] == expected
    fresh = [tokens(running, [200 + n, *PROMPT], 4) for n in range(12)]  # cached nowhere
    assert all(len(made) == 4 for made in await asyncio.gather(*fresh))
    now = running.workers()
    assert {name: row["pids"] for name, row in now.items()} == pids  # no process has been replaced
    assert now["prefill-1"]["tokens_generated"] > 0
    assert sum(now[name]["prompt_tokens_computed"] for name in ("decode-0", "decode-1")) > 0
    assert now["prefill-1"]["kv_bytes_received"] > 0
    assert httpx.get(f"{running.url}/workers").json()["flips"] == {"decode": 1, "prefill": 2}


async def test_a_flip_keeps_cached_kv(running: Cluster) -> None:
    """The decode worker that becomes a prefill worker still has the blocks of what it generated."""
    await tokens(running, PROMPT, 8)
    before = roles(running)
    decode = next(name for name, role in before.items() if role == "decode")
    prefill = next(name for name, role in before.items() if role == "prefill")
    made = await tokens(running, PROMPT, 64)
    await flip(running, prefill, "decode")
    await flip(running, decode, "prefill")
    for name, role in roles(running).items():
        if role == "prefill" and name != decode:
            await flip(running, name, "decode")
    again = await tokens(running, PROMPT + made, 8)
    row = running.workers()[decode]
    assert row["role"] == "prefill" and row["prompt_tokens_cached"] >= len(PROMPT + made) - 2 * row["block_size"]
    assert len(again) == 8


@pytest.mark.parametrize(
    ("worker", "role", "message"),
    [("decode-9", "prefill", "no worker 'decode-9'"), ("", "", "is a")],
)
def test_a_flip_that_cannot_be_is_refused(running: Cluster, worker: str, role: str, message: str) -> None:
    if not worker:
        worker, role = next(iter(roles(running).items()))
        message = f"{worker} is a {role} worker already"
    done = baton_flip(running, worker, role)
    assert done.returncode == 3 and done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.timeout(2400)
async def test_sixty_flips_under_load_change_no_tokens(running: Cluster) -> None:
    """Every request of 3,000 gets the tokens that it gets without flips, and no blocks stay held."""
    prompts = [[n, *PROMPT[: 8 + 4 * n]] for n in range(30)]
    expected = [await tokens(running, prompt, 24) for prompt in prompts]
    done, ended = 0, False

    async def client(first: int) -> None:
        nonlocal done
        for n in range(first, 3000, 12):
            assert await tokens(running, prompts[n % 30], 24) == expected[n % 30]
            done += 1

    async def flips() -> int:
        count = 0
        while count < 60 or not ended:
            before = roles(running)
            ready = [name for name in sorted(before) if list(before.values()).count(before[name]) > 1]
            worker = ready[count % len(ready)]
            await flip(running, worker, "decode" if before[worker] == "prefill" else "prefill", "--timeout-s", "0.5")
            count += 1
        return count

    earlier = sum(httpx.get(f"{running.url}/workers").json()["flips"].values())
    flipping = asyncio.create_task(flips())
    await asyncio.gather(*(client(first) for first in range(12)))
    ended = True
    count = await flipping
    document = httpx.get(f"{running.url}/workers").json()
    assert done == 3000 and count >= 60 and sum(document["flips"].values()) - earlier == count
    free = lambda c: all(row["blocks_free"] == row["blocks_total"] for row in c.workers().values())  # noqa: E731
    await asyncio.to_thread(running.wait_until, free, "no block held")
