"""A coordinator's cluster with workers that a test controls, over real gRPC and connections that it can cut.

A `FakeWorker` has a real `WorkerSession`; it records the coordinator's commands in `commands`, and `say` posts events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from typing import Any, TypeVar

from baton.core.codes import ErrorCode
from baton.core.commands import Abort, Command, Join, Prefill, Role, Welcome
from baton.core.errors import BatonError
from baton.core.events import HandedOver, Load, Parked, SequenceEnded, StepEvents, TokenEvent
from baton.core.request import SequenceId
from baton.runtime.session import WorkerSession
from coordinator.cluster import Cluster
from coordinator.control import serve_control
from coordinator.pipeline import Pipeline
from coordinator.policy.choice import Choice, Stage
from coordinator.policy.membership import WorkerState
from coordinator.submission import Delta, Submission
from coordinator.text.stream import Vocabulary
from tests.support.builders import bring_to, make_facts
from tests.support.nodes import until
from tests.support.tokenizers_kit import byte_level

C = TypeVar("C")


class Wire:
    """A TCP proxy whose connections can be cut, refused, or stalled."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.refuses = False
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuses:
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
        sink.close()

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def mute(self) -> None:
        self._flows.clear()

    async def close(self) -> None:
        self._server.close()
        self._flows.set()
        self.cut()


class FakeWorker:
    def __init__(self, name: str, wire: Wire, *, incarnation: int = 1, blocks: int = 16, **facts: Any) -> None:
        self.name, self.incarnation, self.wire = name, incarnation, wire
        self.role: Role = "prefill" if name[0] == "p" else "decode"
        self._facts, self._blocks = make_facts(**facts), blocks
        self.commands: list[Command] = []
        self.here: set[SequenceId] = set()
        self.welcomes: list[Welcome] = []
        self.abandoned: list[str] = []
        self.session = WorkerSession(f"127.0.0.1:{wire.port}", self)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.session.run(), name=f"fake {self.name}")

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    # Called by the session.

    def join(self, run_id: str) -> Join:
        return Join(
            self.name,
            self.role,
            self.incarnation,
            self._facts,
            link_address=f"{self.name}:1",
            blocks_total=self._blocks,
            step_tokens=8,
            run_id=run_id,
            replace=self.incarnation > 1,
        )

    def load(self) -> Load:
        return Load(blocks_total=self._blocks, blocks_free=self._blocks, sequences=len(self.here))

    def welcome(self, welcome: Welcome) -> None:
        self.welcomes.append(welcome)

    def command(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, Abort):
            self.here.discard(command.sequence)

    def sequence_ids(self) -> Collection[SequenceId]:
        return tuple(self.here)

    def abandon(self, reason: str, keep: Collection[SequenceId] = ()) -> None:
        self.abandoned += [reason] * any(s not in keep for s in self.here)
        self.here &= set(keep)

    # Called by a test.

    async def received(self, kind: type[C], count: int = 1) -> C:
        """Returns the `count`-th command of a kind, once it has arrived."""
        await until(lambda: len(self.all(kind)) >= count, what=f"{kind.__name__} {count} at {self.name}")
        return self.all(kind)[count - 1]

    def all(self, kind: type[C]) -> list[C]:
        return [c for c in self.commands if isinstance(c, kind)]

    def report(self, sequence: SequenceId, first: int, *tokens: int, ended: str = "") -> None:
        self.here.add(sequence)
        ends = (SequenceEnded(sequence, ended),) if ended else ()
        if ended:
            self.here.discard(sequence)
        self.session.post(StepEvents(tokens=(TokenEvent(sequence, first, tokens),) * bool(tokens), ended=ends))

    def fail(self, sequence: SequenceId, code: str, message: str = "said so") -> None:
        self.session.post(StepEvents(ended=(SequenceEnded(sequence, "error", ErrorCode(code), message),)))

    def park(self, sequence: SequenceId, reason: str = "all refused") -> None:
        self.here.add(sequence)
        self.session.post(StepEvents(parked=(Parked(sequence, reason),)))

    def hand_over(self, sequence: SequenceId, to: str) -> None:
        self.session.post(StepEvents(handed_over=(HandedOver(sequence, to, 100),)))

    def cut(self) -> None:
        self.wire.cut()


class Bench:
    """A cluster, its pipeline, and its fake workers."""

    def __init__(
        self, lease_s: float, max_requests: int, token: str, hold_s: float, vocabulary: Vocabulary | None = None
    ) -> None:
        self.cluster = Cluster(lease_s, max_requests, 1000, token=token, hold_s=hold_s)
        self.requests = self.cluster.requests
        self.dispatcher = self.cluster.requests.dispatcher
        self.pipeline = Pipeline(self.cluster, vocabulary or Vocabulary(byte_level()))
        self.workers: list[FakeWorker] = []
        self.port = 0
        self.tick: asyncio.Task[None]

    async def add(self, name: str, *, ready: bool = True, here: Collection[SequenceId] = (), **more: Any) -> FakeWorker:
        """Adds a worker with its own wire, which has the sequences `here` from the start; with `ready`, returns once it
        has joined."""
        wire = Wire(self.port)
        await wire.start()
        worker = FakeWorker(name, wire, **more)
        worker.here.update(here)
        self.workers.append(worker)
        worker.start()
        if ready:
            await until(lambda: worker.welcomes, what=f"{name} to join")
        return worker

    def worker(self, name: str) -> FakeWorker:
        """Returns the latest worker of that name."""
        return next(w for w in reversed(self.workers) if w.name == name)

    async def submit_and_run(self, name: str, prefill: str, decode: str) -> None:
        """Submits a request of four tokens that must be placed on these two workers, and runs it to its end."""
        reader, p, d = self.submit(name), self.worker(prefill), self.worker(decode)
        await until(lambda: p.all(Prefill) and p.all(Prefill)[-1].request.request_id == name, timeout_s=3, what=name)
        command = p.all(Prefill)[-1]
        assert command.targets[0].worker_id == decode
        sequence = command.request.sequence_id
        p.report(sequence, 0, 5)
        p.hand_over(sequence, decode)
        p.here.discard(sequence)
        d.report(sequence, 0, 5, 6, 7, 8, ended="length")
        assert await reader.done() == [5, 6, 7, 8]

    def state(self, name: str) -> str:
        found = [w.state.value for w in self.cluster.workers.all() if w.worker_id == name]
        return found[0] if found else "forgotten"

    def in_flight(self, sequence: SequenceId) -> Choice:
        """Returns the choice that a sequence belongs to."""
        found = self.requests.get(sequence.choice_id)
        assert found is not None
        return found

    @property
    def num_active(self) -> int:
        """Number of choices that may be at workers."""
        return sum(choice.stage not in (Stage.QUEUED, Stage.ENDED) for choice in self.requests)

    def set_ready(self, name: str, ready: bool) -> None:
        """Sets whether a worker may be chosen."""
        worker = self.cluster.workers.get(name)
        assert worker is not None
        bring_to(worker, WorkerState.READY if ready else WorkerState.DISCONNECTED)
        if ready:
            self.cluster._execute(self.requests.worker_joined(time.monotonic()))

    def submit(self, name: str = "r", **more: Any) -> Reader:
        return Reader(self, Submission(**{"request_id": name, "prompt": (1, 2, 3), "max_tokens": 4, **more}))


class Reader:
    """A client that reads its deltas in a task."""

    def __init__(self, bench: Bench, submission: Submission) -> None:
        self.sequence = SequenceId(submission.request_id)
        self.deltas: list[Delta] = []
        self.error: BatonError | None = None
        self.task = asyncio.create_task(self._read(bench.pipeline, submission), name=f"reader {submission.request_id}")

    async def _read(self, pipeline: Pipeline, submission: Submission) -> None:
        try:
            async with contextlib.aclosing(pipeline.generate(submission)) as deltas:
                async for delta in deltas:
                    self.deltas.append(delta)
        except BatonError as e:
            self.error = e

    @property
    def tokens(self) -> list[int]:
        return [t for d in self.deltas for t in d.token_ids]

    async def done(self, timeout_s: float = 30.0) -> list[int]:
        """Returns all tokens; the request must have ended without an error."""
        await asyncio.wait_for(self.task, timeout_s)
        assert self.error is None, self.error
        assert self.deltas[-1].finish_reason is not None and self.deltas[-1].usage is not None
        return self.tokens

    async def failed(self, timeout_s: float = 30.0) -> BatonError:
        await asyncio.wait_for(self.task, timeout_s)
        assert self.error is not None, self.deltas
        return self.error

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def got(self, count: int) -> None:
        await until(lambda: len(self.tokens) >= count, what=f"{count} tokens")


@contextlib.asynccontextmanager
async def bench(
    *names: str,
    lease_s: float = 3.0,
    max_requests: int = 100,
    token: str = "",
    hold_s: float = 30.0,
    vocabulary: Vocabulary | None = None,
) -> AsyncIterator[Bench]:
    """A cluster with these workers; afterwards checks that no request remains in any table."""
    made = Bench(lease_s, max_requests, token, hold_s, vocabulary)
    server, made.port = await serve_control(made.cluster, "127.0.0.1", 0)
    made.tick = asyncio.create_task(made.cluster.tick(), name="tick")
    try:
        for name in names:
            await made.add(name)
        yield made
        assert not made.tick.done(), made.tick
        await until(lambda: not len(made.requests), what="no request in flight", timeout_s=2)
        made.requests.check()
        assert (made.num_active, made.dispatcher.num_queued) == (0, 0)
    finally:
        for worker in made.workers:
            await worker.stop()
            await worker.wire.close()
        made.tick.cancel()
        await server.stop(0)


async def wait_for_dispatch(b: Bench) -> tuple[FakeWorker, FakeWorker, SequenceId]:
    """Returns the two workers and the sequence of a request that was dispatched and has no token yet."""
    p, d = b.workers[0], b.workers[1]
    command = await p.received(Prefill, len(p.all(Prefill)) or 1)
    p.here.add(command.request.sequence_id)
    return p, d, command.request.sequence_id


def run_to_end(p: FakeWorker, d: FakeWorker, s: SequenceId) -> None:
    """Runs a request of four tokens to its end, starting at its prefill worker."""
    p.report(s, 0, 5)
    p.hand_over(s, d.name)
    p.here.discard(s)
    d.report(s, 0, 5, 6)
    d.report(s, 2, 7)
    d.report(s, 3, 8, ended="length")
