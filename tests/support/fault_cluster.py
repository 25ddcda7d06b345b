"""A cluster of `fault_worker`s for a test: injects faults, and afterwards proves that they left nothing behind.

with fault_cluster(model, prefill=2, decode=2) as running:
    running.ask("prefill-0", "hold_send")
    ...
    running.release("prefill-0", "hold_send")
    await running.wait_until_idle()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.runtime.event_log import VARIABLE as EVENT_LOG
from tests.support.client import Client, body
from tests.support.cluster import Cluster, start_cluster, wait_ready
from tests.support.fault_worker import VARIABLE

ROOT = Path(__file__).parents[2]
UP = (sys.executable, "-m", "tests.support.fault_up")
IDLE_WITHIN_S = 60.0


class FaultCluster:
    """`cluster` is the running cluster; `shared` has the files that control its workers, `events` their event logs."""

    def __init__(self, cluster: Cluster, shared: Path, events: Path, workers: list[str], edges: int) -> None:
        self.cluster, self.shared, self._events, self.workers = cluster, shared, events, workers
        self.edges = edges  # of one link at one rank, at most

    def ask(self, worker: str, what: str) -> None:
        (self.shared / f"{worker}.held").unlink(missing_ok=True)
        (self.shared / f"{worker}.{what}").touch()

    def asked(self, worker: str, what: str) -> bool:
        """Returns whether a fault is still requested and has not happened yet."""
        return (self.shared / f"{worker}.{what}").exists()

    def release(self, worker: str, what: str) -> None:
        (self.shared / f"{worker}.{what}").unlink(missing_ok=True)

    def release_all(self) -> None:
        for file in self.shared.iterdir():
            file.unlink(missing_ok=True)

    async def held(self, worker: str) -> None:
        """Waits until a requested hold has begun."""
        await self.until(lambda: (self.shared / f"{worker}.held").exists(), f"{worker} held")

    async def fired(self, worker: str, what: str) -> None:
        await self.until(lambda: not self.asked(worker, what), f"{what} at {worker}")

    async def until(self, condition: Callable[[], object], what: str, timeout_s: float = IDLE_WITHIN_S) -> None:
        """Polls without blocking the streams of a test; the coordinator may be down."""
        await asyncio.to_thread(self.cluster.wait_until, lambda _: bool(condition()), what, timeout_s)

    def signal(self, worker: str, sig: int = signal.SIGKILL, rank: int = 0) -> float:
        """Sends a signal to one process of a worker; returns when, on the clock of the event logs."""
        pid = self.cluster.pids(worker)[rank]
        now = time.monotonic()
        self.cluster.kill(pid, sig)
        return now

    def events(self, worker: str, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        path = self._events / f"{worker}.events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        # A killed worker may have written only part of its last line.
        parsed = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in parsed if event["kind"] == kind and event["t"] >= since]

    async def first(self, worker: str, kind: str, since: float) -> float:
        """Waits for such an event; returns the time of the first one."""
        await self.until(lambda: self.events(worker, kind, since), f"{kind} at {worker}")
        return float(self.events(worker, kind, since)[0]["t"])

    def resume(self, pid: int) -> None:
        """Sends SIGCONT to a stopped process, unless its own launcher has ended it meanwhile."""
        if self.cluster.runs(pid):
            self.cluster.kill(pid, signal.SIGCONT)

    def ready(self) -> bool:
        """Whether all workers are, and run: the coordinator needs a moment to see a killed one."""
        known = self.cluster.workers()
        rows = [known.get(worker, {}) for worker in self.workers]
        return all(row.get("state") == "ready" and all(map(self.cluster.runs, row["pids"])) for row in rows)

    def state(self, worker: str) -> dict[str, Any]:
        """Requests the current state of a worker's leader, or of another rank (WORKER.RANK)."""
        file = self.shared / f"{worker}.state"
        file.unlink(missing_ok=True)
        name, _, rank = worker.partition(".")
        self.signal(name, signal.SIGUSR1, int(rank or 0))
        self.cluster.wait_until(lambda _: file.exists(), f"state of {worker}", 30.0)
        state: dict[str, Any] = json.loads(file.read_text())
        return state

    async def wait_until_idle(self) -> dict[str, dict[str, Any]]:
        """Waits until every worker is ready, and within `IDLE_WITHIN_S` no block, lease, sequence, thread or task of a
        request remains. Returns the states that prove it."""
        await self.until(self.ready, "all workers ready")
        states: dict[str, dict[str, Any]] = {}

        def rested() -> bool:
            for worker in self.workers:
                states[worker] = self.state(worker)
            return not any(self._left(worker, state) for worker, state in states.items())

        try:
            await self.until(rested, "rest")
        except AssertionError as e:
            left = {worker: self._left(worker, state) for worker, state in states.items()}
            raise AssertionError(f"left behind: {left}\n{e}") from None
        return states

    def _left(self, worker: str, state: dict[str, Any]) -> dict[str, Any]:
        load = state["load"]
        peers = sum(w.split("-")[0] != worker.split("-")[0] for w in self.workers)
        edges = [t for t in state["threads"] if t.startswith("edge-")]
        found = {
            "blocks": load["blocks_total"] - load["blocks_free"],
            "hand_overs": load["hand_overs"],
            "sequences": load["sequences"] + load["running"] + load["waiting"],
            "deadlines": state["deadlines"],
            "writing": state.get("writing", 0),
            "books": "" if state["check"] == "balanced" else state["check"],
            "threads": edges if len(edges) > peers * self.edges else [],  # an open link has its edges, and no more
            "tasks": [t for t in state["tasks"] if t.startswith(("hand-over", "chunk", "edge open", "posted"))],
        }
        return {name: what for name, what in found.items() if what}


@contextlib.contextmanager
def fault_cluster(
    model: Path | str, *, prefill: int = 2, decode: int = 2, prefill_tp: int = 1, decode_tp: int = 1, **flags: object
) -> Iterator[FaultCluster]:
    """Yields a ready cluster, which must also stop cleanly."""
    workers = [f"{role}-{n}" for role, count in (("prefill", prefill), ("decode", decode)) for n in range(count)]
    with tempfile.TemporaryDirectory(prefix="baton-faults-") as directory:
        shared, events = Path(directory) / "shared", Path(directory) / "events"
        shared.mkdir()
        env = {VARIABLE: str(shared), EVENT_LOG: str(events), "PYTHONPATH": str(ROOT)}
        counts = {"prefill": prefill, "decode": decode, "prefill_tp": prefill_tp, "decode_tp": decode_tp}
        running = start_cluster(model, run_dir=Path(directory) / "run", env=env, program=UP, **counts, **flags)
        try:
            yield FaultCluster(wait_ready(running), shared, events, workers, max(prefill_tp, decode_tp))
        except BaseException:
            print(running.logs())
            running.destroy()
            raise
        running.stop()


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
