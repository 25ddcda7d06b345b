"""Requests for a cluster with injected faults, each on a pair of workers that a test controls, and their results."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from tests.support.client import Client, body
from tests.support.fault_cluster import FaultCluster

PROMPT, COUNT = [7 + n % 200 for n in range(200)], 24
BYSTANDER = ([5] * 40, 150)


@dataclass
class StreamResult:
    """What a client received for one request: its tokens, and its error ("" for none)."""

    tokens: list[int] = field(default_factory=list)
    error: str = ""
    decoding: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    async def end(self) -> StreamResult:
        assert self.task is not None
        await self.task
        return self


def start(client: Client, prompt: list[int] = PROMPT, count: int = COUNT) -> StreamResult:
    result = StreamResult()

    async def read() -> None:
        sent = body(prompt, count, stream=True)
        async with client.http.stream("POST", "/v1/completions", json=sent) as answer:
            if answer.status_code != 200:
                await answer.aread()
                result.error = answer.json()["error"]["code"]
                return
            finished = False
            async for line in answer.aiter_lines():
                finished = finished or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                result.error = event.get("error", {}).get("code", result.error)
                result.tokens += [t for c in event.get("choices", []) for t in c["token_ids"]]
                if len(result.tokens) > 1:
                    result.decoding.set()  # prefill generated the first token
            assert finished or result.error, "a stream ended without [DONE] and without an error"

    result.task = asyncio.create_task(read())
    return result


async def expected(client: Client, prompt: list[int] = PROMPT, count: int = COUNT) -> list[int]:
    """Returns the tokens from the undisturbed cluster; with --exact they do not depend on the worker or the batch."""
    return list(await client.tokens(prompt, count))


async def disturbed(running: FaultCluster, client: Client, what: str) -> tuple[StreamResult, StreamResult]:
    """Starts a request from prefill-0 to decode-0, held in its first step, in its first send, or in its last step with
    its first layers computed and sent; and meanwhile a stream that prefill-1 has handed over to decode-1."""
    running.ask("prefill-0", "hold_step")
    victim = start(client)
    await running.held("prefill-0")
    bystander = start(client, *BYSTANDER)
    await asyncio.wait_for(bystander.decoding.wait(), 60)
    if what != "hold_step":
        began = time.monotonic()
        running.ask("prefill-0", what)
        running.release("prefill-0", "hold_step")
        await running.held("prefill-0")
        if what == "hold_layers":
            await running.until(lambda: sent_early(running, "prefill-0", began), "first layers sent")
    return victim, bystander


def sent_early(running: FaultCluster, worker: str, since: float) -> int:
    """Returns the number of chunks of first layers that a worker has sent."""
    return sum(event["layers"] == [0, 2] for event in running.events(worker, "chunk_sent", since))


async def calm(running: FaultCluster, client: Client, bystander: StreamResult, stream: list[int]) -> None:
    """Checks that the other pair's stream continued, the cluster has settled, and nothing remains."""
    result = await bystander.end()
    assert result.error == "" and result.tokens == stream, running.cluster.logs()
    await running.wait_until_idle()
