"""Real workers of both pools on fake runners, stepped by a test, and pairs of them that are checked for leaks.

There is no engine and no coordinator: `Posted` records what a worker would have sent to the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import torch

from baton.core.commands import Abort, Assign, Prefill, Target, Welcome
from baton.core.compatibility import Compatibility
from baton.core.events import HandedOver, Parked, SequenceEnded, StepEvents, TokenEvent
from baton.core.handover import Handle, sign
from baton.core.request import GenerateRequest, SequenceId
from baton.runtime.config import WorkerConfig
from baton.runtime.streams import serve_links
from decode.worker import DecodeWorker
from prefill.link import Link
from prefill.worker import PrefillWorker
from tests.support.builders import make_facts, make_request
from tests.support.edges import pack_tokens
from tests.support.fake_runner import FakeRunner, oracle

KEY = b"k" * 32
VOCAB_SIZE = 1 << 16


class Posted:
    """The events that a worker posted to the coordinator."""

    def __init__(self) -> None:
        self.tokens: list[TokenEvent] = []
        self.ended: list[SequenceEnded] = []
        self.parked: list[Parked] = []
        self.handed_over: list[HandedOver] = []
        self.steps: list[StepEvents] = []

    def post(self, events: StepEvents) -> None:
        if events.tokens:
            self.steps.append(events)
        for name in ("tokens", "ended", "parked", "handed_over"):
            getattr(self, name).extend(getattr(events, name))

    def output(self, name: str) -> dict[int, int]:
        token_at: dict[int, int] = {}
        for event in (e for e in self.tokens if e.sequence.request_id == name):
            for index, token in enumerate(event.tokens, event.first_index):
                assert token_at.setdefault(index, token) == token
        return token_at


def _config(name: str, timeout_s: float, step_tokens: int) -> WorkerConfig:
    return WorkerConfig(
        worker_id=name, step_tokens=step_tokens, edge_timeout_s=timeout_s, connect_timeout_s=timeout_s, max_running=8
    )


def _facts(runner: FakeRunner) -> Compatibility:
    return make_facts(layout=runner.layout, vocab_size=VOCAB_SIZE)


def _pids(runner: FakeRunner) -> tuple[int, ...]:
    return tuple(range(1, 1 + len(getattr(runner, "ranks", (runner,)))))


class PrefillNode:
    def __init__(
        self,
        name: str = "p0",
        num_blocks: int = 16,
        step_tokens: int = 8,
        timeout_s: float = 20.0,
        runner: FakeRunner | None = None,
    ) -> None:
        self.runner, self.posted = runner or FakeRunner(num_blocks), Posted()
        self.worker = PrefillWorker(
            _config(name, timeout_s, step_tokens),
            self.runner,
            _facts(self.runner),
            _pids(self.runner),
            self.runner.make_endpoint,  # type: ignore[arg-type]
        )
        _join(self.worker, self.posted)

    def step(self) -> bool:
        """Runs one step of the engine; returns False if there is nothing to compute."""
        return _step(self.worker, self.runner, self.posted)

    def compute(self) -> None:
        while self.step():
            pass

    async def step_by_layers(self, first: int, meanwhile: Callable[[], Awaitable[object]]) -> bool:
        """Runs one step; `meanwhile` runs when only its first layers are computed. Returns False if there is none."""
        plan = self.worker.begin_step(time.monotonic())
        if plan is None:
            return False
        self.runner.step(plan, slice(first))
        self.worker.layers_computed(plan.step_id, first)
        await meanwhile()
        self.posted.post(self.worker.finish_step(self.runner.step(plan, slice(first, None)), time.monotonic()))
        return True

    def submit(self, request: GenerateRequest, *decodes: DecodeNode, handle: Handle | None = None) -> None:
        self.worker.main_loop.command(Prefill(request, self.targets(request.sequence_id, decodes, handle)))

    def assign(self, sequence: SequenceId, attempt: int, *decodes: DecodeNode) -> None:
        fresh = sequence._replace(attempt=attempt)
        self.worker.main_loop.command(Assign(sequence, self.targets(fresh, decodes), attempt))

    def targets(
        self, sequence: SequenceId, decodes: Sequence[DecodeNode], handle: Handle | None = None
    ) -> tuple[Target, ...]:
        return tuple(d.target(sequence, self.worker, handle) for d in decodes)

    def abort(self, sequence: SequenceId) -> None:
        self.worker.main_loop.command(Abort(sequence, "the client left", 5.0))

    @property
    def idle(self) -> bool:
        blocks = self.worker.scheduler.blocks
        return not self.worker.scheduler.num_sequences and not len(self.worker.sender) and _free(blocks)


class DecodeNode:
    def __init__(
        self, name: str = "d0", num_blocks: int = 16, timeout_s: float = 20.0, runner: FakeRunner | None = None
    ) -> None:
        self.runner, self.posted = runner or FakeRunner(num_blocks), Posted()
        self.worker = DecodeWorker(
            _config(name, timeout_s, 8),
            self.runner,
            _facts(self.runner),
            _pids(self.runner),
            self.runner.make_endpoint,  # type: ignore[arg-type]
        )
        _join(self.worker, self.posted)
        self.server: Any = None
        self.address = ""

    async def start(self) -> None:
        self.server, port = await serve_links("127.0.0.1", self.worker.receiver.serve)
        self.address = f"127.0.0.1:{port}"

    def handle(self, sequence: SequenceId, source: PrefillWorker, **changes: Any) -> Handle:
        values = {
            "source_worker": source.config.worker_id,
            "source_incarnation": source.incarnation,
            "destination_worker": self.worker.config.worker_id,
            "destination_incarnation": self.worker.incarnation,
            "expires_ms": round(self.worker.main_loop.run_clock_ms()) + 60_000,
        }
        return sign(KEY, Handle(sequence, **{**values, **changes}, nonce=os.urandom(8)))  # type: ignore[arg-type]

    def target(self, sequence: SequenceId, source: PrefillWorker, handle: Handle | None = None) -> Target:
        name, incarnation = self.worker.config.worker_id, self.worker.incarnation
        return Target(name, incarnation, self.address, handle or self.handle(sequence, source))

    def step(self) -> bool:
        return _step(self.worker, self.runner, self.posted)

    def compute(self) -> None:
        while self.step():
            pass

    def abort(self, sequence: SequenceId) -> None:
        self.worker.main_loop.command(Abort(sequence, "the client left", 5.0))

    @property
    def idle(self) -> bool:
        return (
            not self.worker.scheduler.num_sequences
            and not self.worker.hand_overs.writing
            and _free(self.worker.scheduler.blocks)
        )


def kv_bytes(node: PrefillNode | DecodeNode, blocks: tuple[int, ...], num_tokens: int) -> bytes:
    """Returns the KV of a sequence as bytes, with all heads."""
    runner = node.runner
    ranks = getattr(runner, "ranks", [runner])
    heads = runner.layout.layers[0].num_kv_heads
    shares = ranks[:: max(len(ranks) // heads, 1)]  # one of each group of ranks that replicate the same head
    caches = zip(*(r.kv.layers for r in shares), strict=True)
    layers = [(torch.cat([k for k, _ in c], dim=2), torch.cat([v for _, v in c], dim=2)) for c in caches]
    return bytes(pack_tokens(layers, blocks, runner.layout.block_size, 0, num_tokens).tolist())


def links(source: PrefillNode) -> list[Link]:
    return [t.result() for t in source.worker.sender._links.values() if t.done() and t.exception() is None]


async def abort_at(source: PrefillNode, decode: DecodeNode, sequence: SequenceId, who: str) -> None:
    """Aborts as the coordinator does, with the abort arriving first at `who`: "prefill", "decode" or "both"."""
    if who != "decode":
        source.abort(sequence)
    if who != "prefill":
        decode.abort(sequence)
    await asyncio.sleep(0.02)


async def check_aborted(source: PrefillNode, decode: DecodeNode, sequence: SequenceId, who: str) -> None:
    """Checks that nothing of a sequence remains once the abort has also arrived at the other side."""
    source.compute()
    if who == "decode":
        await until(lambda: source.posted.parked, timeout_s=3, what="parked KV")
        source.abort(sequence)
    await until(lambda: source.idle and decode.idle, timeout_s=3, what="idle pools")
    assert not source.posted.handed_over and not decode.posted.tokens


async def serve(source: PrefillNode, decode: DecodeNode, name: str = "again") -> None:
    """Serves one more request from end to end, to check that everything still works."""
    request = make_request(name, 10, max_tokens=4)
    source.submit(request, decode)
    source.compute()
    await until(lambda: [o for o in source.posted.handed_over if o.sequence.request_id == name], what="the hand-over")
    decode.compute()
    assert {**source.posted.output(name), **decode.posted.output(name)} == dict(enumerate(oracle(request.prompt, 4)))


@contextlib.asynccontextmanager
async def pair(
    *decodes: DecodeNode, prefill: PrefillNode | None = None, timeout_s: float = 20.0, more: Sequence[PrefillNode] = ()
) -> AsyncIterator[tuple[PrefillNode, list[DecodeNode]]]:
    """Starts a prefill worker (and perhaps `more`) and decode workers; afterwards checks that no block is held and no
    thread, task or transfer remains."""
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    source = prefill or PrefillNode(timeout_s=timeout_s)
    nodes = list(decodes) or [DecodeNode(timeout_s=timeout_s)]
    sources = (source, *more)
    for node in nodes:
        await node.start()
    try:
        yield source, nodes
        await until(lambda: all(n.idle for n in (*sources, *nodes)), what="idle pools")
        for worker in (n.worker for n in (*sources, *nodes)):
            worker.scheduler.check()
            assert not len(worker.main_loop.deadlines)
    finally:
        for each in sources:
            await each.worker.close()
        for node in nodes:
            await node.worker.close()
            await node.server.stop(0)
    await until(
        lambda: not [t for t in set(threading.enumerate()) - threads if t.name.startswith("edge-")],
        what="no edge thread",
    )
    await until(lambda: not [t for t in asyncio.all_tasks() - tasks if not _is_grpcs(t)], what="no task")


def _is_grpcs(task: asyncio.Task[Any]) -> bool:
    return "grpc" in repr(task.get_coro())


async def until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what or condition}"
        await asyncio.sleep(0.002)


def _join(worker: PrefillWorker | DecodeWorker, posted: Posted) -> None:
    worker.main_loop.welcome(Welcome("run", 3.0, 1.0, KEY))
    worker.main_loop.session.run_id = "run"
    worker.main_loop.session.post = posted.post  # type: ignore[method-assign]


def _step(worker: Any, runner: FakeRunner, posted: Posted) -> bool:
    plan = worker.begin_step(time.monotonic())
    if plan is None:
        return False
    events = worker.finish_step(runner.step(plan), time.monotonic())
    for ended in events.ended:
        worker.main_loop.deadlines.forget(ended.sequence)
    posted.post(events)
    return True


def _free(blocks: Any) -> bool:
    return bool(blocks.num_free == blocks.num_blocks)
