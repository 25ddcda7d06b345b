"""Bad input and failures with real processes. After each, every block is free and every table is empty."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client, body
from tests.support.cluster import Cluster, cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LIMIT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("trouble") / "m", arch="llama", max_position_embeddings=LIMIT)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Cluster]:
    """Two decode workers: when one is killed, its streams can continue on the other."""
    with cluster(model, dtype="float32", decode=2, step_tokens=32, served_model_name="m") as started:
        yield started


def all_ready(running: Cluster) -> bool:
    workers = running.workers().values()
    return len(workers) == 3 and all(w["state"] == "ready" for w in workers)


async def until(running: Cluster, condition: Callable[[Cluster], bool], what: str) -> None:
    """Waits without blocking the streams of this test."""
    await asyncio.to_thread(running.wait_until, condition, what)


@pytest.fixture(autouse=True)
def wait_for_ready_workers(running: Cluster) -> Iterator[None]:
    yield
    if running.process.poll() is None:
        running.wait_until(all_ready, "all workers ready again", 60)


async def test_an_overlong_prompt_is_refused_with_its_length_and_the_limit(running: Cluster) -> None:
    async with Client(running) as client:
        answer = await client.http.post("/v1/completions", json=body([1] * (LIMIT + 5), 4))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(LIMIT) in error["message"] and str(LIMIT + 5) in error["message"]
        answer = await client.http.post("/v1/completions", json=body([1] * 4000, 200))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        await client.idle(running)


async def test_an_unknown_model_is_404(running: Cluster) -> None:
    async with Client(running) as client:
        answer = await client.http.post("/v1/completions", json={"model": "no", "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_client_disconnect_frees_the_blocks_of_both_pools(running: Cluster) -> None:
    """The client disconnects during prefill (before the first token) and during decode, streaming and not."""
    async with Client(running) as client:
        before = {w: f["tokens_generated"] for w, f in running.workers().items()}
        leaving = [
            asyncio.create_task(client.http.post("/v1/completions", json=body([n] * 3000, 1000, stream=s)))
            for n, s in ((1, False), (2, True), (3, False), (4, True))
        ]
        await asyncio.sleep(0.15)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await client.idle(running, timeout_s=5.0)
        seen = 0
        async for _ in client.events([9] * 20, 3000):
            seen += 1
            if seen == 5:
                break
        await client.idle(running, timeout_s=5.0)
        after = {w: f["tokens_generated"] for w, f in running.workers().items()}
        generated = sum(after[w] - before[w] for w in after)
        assert generated < 4 * 1000 + 3000, "nothing was aborted: everything was generated"
        assert len(await client.tokens([5] * 10, 8)) == 8


@pytest.mark.long  # test_recovery.py does the same with fewer streams
async def test_streams_of_a_killed_decode_worker_continue_on_another_worker(running: Cluster) -> None:
    async with Client(running) as client:
        streams = [asyncio.create_task(_outcome(client, [n + 1] * 30, 2500)) for n in range(8)]
        there: dict[str, int] = {}

        def on_both(c: Cluster) -> bool:
            there.update({w: c.workers()[w]["running"] for w in ("decode-0", "decode-1")})
            return min(there.values()) >= 2 and sum(there.values()) == 8

        await until(running, on_both, "streams on both")
        running.kill(running.pids("decode-0")[0])
        outcomes = await asyncio.gather(*streams)
        assert [(o.tokens, o.error) for o in outcomes] == [(2500, None)] * 8
        await until(running, all_ready, "decode-0 back")
        await client.idle(running)


async def test_requests_wait_for_the_restart_of_a_killed_prefill_worker(running: Cluster) -> None:
    async with Client(running) as client:
        decoding = asyncio.create_task(_outcome(client, [3] * 20, 1500))
        await until(running, lambda c: sum(w["running"] for w in c.workers().values()) >= 1, "a running stream")
        computing = [asyncio.create_task(_outcome(client, [n] * 3900, 100)) for n in range(20, 26)]
        victim = running.pids("prefill-0")[0]
        await asyncio.sleep(1.0)  # all are admitted by then
        running.kill(victim)
        await until(running, lambda c: c.workers()["prefill-0"]["state"] != "ready", "its loss")
        assert (await client.http.get("/ready")).status_code == 200, "requests may wait (--hold-s)"
        assert (await client.http.post("/v1/completions", json=body([1] * 5, 2))).status_code == 200
        outcomes = await asyncio.gather(*computing)
        assert [(o.tokens, o.error) for o in outcomes] == [(100, None)] * 6, "they wait for its restart"
        assert (await decoding).tokens == 1500
        await until(running, all_ready, "prefill-0 back")
        assert (await client.http.get("/ready")).status_code == 200
        await client.idle(running)


async def test_a_client_that_does_not_read_blocks_no_other_client(running: Cluster) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((host, int(port)))
    request = httpx.Request("POST", running.url + "/v1/completions", json=body([7] * 10, 4000, stream=True))
    head = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    slow.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    async with Client(running) as client:
        await asyncio.sleep(0.2)
        answers = await asyncio.gather(*(client.tokens([n + 1] * 12, 64) for n in range(8)))
        assert all(len(a) == 64 for a in answers)
        assert len(slow.recv(100)) > 0
        slow.close()
        await client.idle(running)


async def test_a_request_id_can_be_reused_after_its_client_disconnected(running: Cluster) -> None:
    """Workers keep tombstones of aborted sequences; a retry with the same request id is a new request."""
    named = {"x-request-id": "mine"}
    async with Client(running, timeout_s=20) as client:
        alone = await client.tokens([5] * 10, 40)
        for leave_after_s in (0.3, 0.05, 0.3):
            sent = body([7] * 30, 3000, stream=True)
            leaving = asyncio.create_task(client.http.post("/v1/completions", json=sent, headers=named))
            await asyncio.sleep(leave_after_s)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await client.idle(running)
            answer = await client.http.post("/v1/completions", json=body([5] * 10, 40), headers=named)
            assert tuple(answer.json()["choices"][0]["token_ids"]) == alone
        await client.idle(running)


class _Outcome:
    def __init__(self) -> None:
        self.tokens = 0
        self.error: dict[str, str] | None = None
        self.ended_at = 0.0


async def _outcome(client: Client, prompt: list[int], count: int) -> _Outcome:
    """Reads a stream to its end. Returns how many tokens arrived, and the error that ended it, if any."""
    outcome = _Outcome()
    async with client.http.stream("POST", "/v1/completions", json=body(prompt, count, stream=True)) as answer:
        if answer.status_code != 200:
            outcome.error = (await _json(answer))["error"]
        else:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = httpx.Response(200, content=line[6:]).json()
                    outcome.error = event.get("error", outcome.error)
                    for choice in event.get("choices", []):
                        outcome.tokens += len(choice["token_ids"])
    outcome.ended_at = time.monotonic()
    return outcome


async def _json(answer: httpx.Response) -> dict[str, dict[str, str]]:
    await answer.aread()
    parsed: dict[str, dict[str, str]] = answer.json()
    return parsed


def test_sigterm_drains_and_exits_0(running: Cluster) -> None:
    """The last test of this file: it ends the cluster of the others."""
    stream = httpx.stream("POST", running.url + "/v1/completions", json=body([1] * 9, 400, stream=True), timeout=60)
    with stream as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert running.process.wait(30) == 0
