"""`baton roll`: every process of a cluster is replaced by one of the next protocol version, and back, under mixed
requests: none fails, no token differs, nothing is left behind. Meanwhile a canary of another model gets its share."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.compatibility import PROTOCOL_VERSION
from baton.core.request import GenerateRequest
from coordinator.policy.traffic import Traffic
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client, body
from tests.support.cluster import Cluster, cluster, start_cluster, wait_ready
from tests.support.forks import run
from tests.support.jobs import workers
from tests.support.versioned import VARIABLE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ROLL_S = 900.0
PAUSE_S = 1.0
"""After each request: clients without a pause would slow down the processes that start."""
WORKERS = ("prefill-0", "decode-0", "prefill-1", "decode-1")
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": {"enum": ["a", "b", "c"]}},
    "required": ["age", "tags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "set_age", "parameters": SCHEMA}}
Ask = Callable[[Client, int], Awaitable[object]]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "version").write_text(str(PROTOCOL_VERSION))
    env = {VARIABLE: str(tmp_path / "version"), "PYTHONPATH": str(ROOT)}
    flags = {"prefill": 2, "decode": 2, "exact": True, "draft": "none", "served_model_name": "m"}
    program = (sys.executable, "-m", "tests.support.versioned", "up")
    model = make_checkpoint(tmp_path / "m", arch="llama")
    started = start_cluster(model, run_dir=tmp_path / "run", env=env, program=program, **flags)
    try:
        yield wait_ready(started, 180.0)
    except BaseException:
        print(started.logs())
        started.destroy()
        raise
    started.stop()


async def streamed(client: Client, seed: int) -> object:
    return await client.streamed([5 + seed, 6, 7, 8], 40, temperature=0.9, seed=seed)


async def whole(client: Client, seed: int) -> object:
    return await client.tokens([9, 10 + seed, 11] * 7, 30)


async def over_grpc(client: Client, seed: int) -> object:
    return await client.grpc_tokens([12, 13, 14 + seed], 40, temperature=0.8, seed=seed)


async def chat(client: Client, seed: int, **fields: Any) -> dict[str, Any]:
    sent = {"model": "m", "messages": [{"role": "user", "content": f"write {seed}"}], "seed": seed, "max_tokens": 150}
    answer = await client.http.post("/v1/chat/completions", json={**sent, **fields})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def with_schema(client: Client, seed: int) -> object:
    return (await chat(client, seed, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}))["content"]


async def with_tool(client: Client, seed: int) -> object:
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = (await chat(client, seed, **fields))["tool_calls"]
    return call["function"]


KINDS: tuple[Ask, ...] = (streamed, whole, over_grpc, with_schema, with_tool)


def processes(running: Cluster) -> dict[str, object]:
    rows = running.workers()
    return {**{name: tuple(rows[name]["pids"]) for name in WORKERS}, "coordinator": running.coordinator_pid()}


async def rolled(running: Cluster, version: int) -> None:
    """Replaces every process by one of that version."""
    before = processes(running)
    (running.run_dir.parent / "version").write_text(str(version))
    command = [sys.executable, "-m", "launch.cli", "roll", "--run-dir", str(running.run_dir)]
    done = await asyncio.to_thread(run, command, timeout=ROLL_S)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{running.logs()}"
    after = processes(running)
    assert not {name for name, pids in after.items() if pids == before[name]}, "every process is another one"
    assert {row["protocol_version"] for row in running.workers().values()} == {version}


def other_weights(source: Path, target: Path) -> Path:
    """Copies a checkpoint and changes its last weight."""
    shutil.copytree(source, target)
    weights = next(target.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return target


async def refused_worker(running: Cluster, model: Path) -> str:
    """Starts a worker of another model; returns its last line."""
    command = [sys.executable, "-m", "prefill", "--model", str(model), "--coordinator", running.control]
    command += ["--worker-id", "stray", "--exact", "--threads", "1"]
    command += ["--cluster-token-file", str(running.run_dir / "cluster.token")]
    done = await asyncio.to_thread(run, command, timeout=300.0)
    assert done.returncode == 3, done.stderr
    line: str = done.stderr.strip().splitlines()[-1]
    return line


NEXT = PROTOCOL_VERSION + 1


@pytest.mark.parametrize(
    ("streams", "versions"), [(5, (NEXT,)), pytest.param(100, (NEXT, PROTOCOL_VERSION), marks=pytest.mark.long)]
)
async def test_every_process_is_replaced_by_the_next_version_and_back(
    streams: int, versions: tuple[int, ...], running: Cluster, tmp_path: Path
) -> None:
    async with Client(running, timeout_s=300.0) as client:
        asked = [(KINDS[number % len(KINDS)], number % 25) for number in range(streams)]
        expected = {(ask, seed): await ask(client, seed) for ask, seed in dict.fromkeys(asked)}
        answered: Counter[str] = Counter()
        stop = asyncio.Event()

        async def ask_on(ask: Ask, seed: int) -> None:
            while not stop.is_set():
                assert await ask(client, seed) == expected[ask, seed], f"{ask.__name__} {seed}"
                answered[ask.__name__] += 1
                await asyncio.sleep(PAUSE_S)

        clients = [asyncio.create_task(ask_on(*each)) for each in asked]
        try:
            for version in versions:
                before = Counter(answered)
                await rolled(running, version)
                assert all(answered[ask.__name__] > before[ask.__name__] for ask in KINDS), answered
                if version == NEXT:
                    other = other_weights(tmp_path / "m", tmp_path / "other")
                    line = await refused_worker(running, other)
                    assert "refused this worker" in line and "model_digest: " in line
                failed = [each for each in clients if each.done()]
                await asyncio.gather(*failed)  # raises its error
        except BaseException:
            print(running.logs())
            raise
        finally:
            stop.set()
        await asyncio.gather(*clients)
        await client.idle(running)
        counts = (await client.http.get("/workers")).json()["coordinator"]
        assert counts["requests"] == counts["queued"] == 0


def traffic(running: Cluster, *words: str) -> str:
    command = [sys.executable, "-m", "launch.cli", "traffic", *words, "--url", running.url]
    command += ["--cluster-token-file", str(running.run_dir / "cluster.token")]
    done = run(command, timeout=60.0)
    done.check_returncode()
    return done.stdout


async def test_a_canary_gets_its_share_and_is_rolled_back_while_its_stream_runs(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "m", arch="llama", max_position_embeddings=4096)
    other, sessions = other_weights(model, tmp_path / "v2"), [f"s{number}" for number in range(60)]
    shares = Traffic()
    shares.set({"v2": 30.0})
    places = {s: shares.place(GenerateRequest("r", (1,), 1), s) for s in sessions}
    meant = {s: shares.revisions(place, "r", ("", "v2"))[0] for s, place in places.items()}  # type: ignore[index]
    assert 8 < [*meant.values()].count("v2") < 30
    with cluster(model, run_dir=tmp_path / "run", exact=True, served_model_name="m") as running:
        traffic(running, "v2=30")
        with workers(tmp_path, other, running.control) as jobs:
            for name in ("p9", "d9"):
                jobs.start(name, exact=True, revision="v2", cluster_token_file=running.run_dir / "cluster.token")
            running.wait_until(
                lambda c: {c.workers()[name]["state"] for name in ("p9", "d9")} == {"ready"}, "the canary", 120.0
            )
            async with Client(running) as client:

                async def revision(session: str) -> str:
                    sent = body([1, 2, 3], 4, return_timeline=True)
                    answer = await client.http.post("/v1/completions", json=sent, headers={"x-session-id": session})
                    assert answer.status_code == 200, answer.text
                    timeline = answer.json()["choices"][0]["timeline"]
                    assert (timeline["prefill_worker"] == "p9") == (timeline["decode_worker"] == "d9")
                    return str(timeline["revision"])

                for _ in range(2):
                    assert {session: await revision(session) for session in sessions} == meant
                canary = next(session for session, name in meant.items() if name == "v2")
                sent = body([4, 5, 6], 3000, stream=True)
                ask = client.http.stream("POST", "/v1/completions", json=sent, headers={"x-session-id": canary})
                async with ask as stream:
                    lines = stream.aiter_lines()
                    await anext(lines)
                    there = lambda c: c.workers()["d9"]["running"] == 1  # noqa: E731
                    await asyncio.to_thread(running.wait_until, there, "its stream")
                    assert "0 %" in traffic(running, "v2=0")
                    assert {await revision(session) for session in sessions} == {""}
                    received = [line async for line in lines if line.startswith("data: ")]
                assert received[-1] == "data: [DONE]" and '"finish_reason":"length"' in "".join(received)
                metrics = (await client.http.get("/metrics")).text
                ended = 2 * [*meant.values()].count("v2") + 1
                assert f'baton_revision_requests_total{{outcome="finished",revision="v2"}} {ended}.0' in metrics
                await client.idle(running)
            for name in ("p9", "d9"):
                jobs.jobs[name].terminate()
                assert await jobs.jobs[name].wait_exit(60.0) == 0
