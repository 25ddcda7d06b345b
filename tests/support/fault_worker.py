"""A real worker into which a test can inject faults: `python -m tests.support.fault_worker prefill|decode ...`.

Faults are requested by files in $BATON_TEST_FAULTS named WORKER.WHAT; the product does not know about them.

    hold_step, hold_send    while the file exists, a step or a send waits (a send after its receiver has posted); the
                            worker creates WORKER.held. A number in hold_step: only steps with a row that starts at that
                            position or later
    hold_layers             as hold_step, but after the layers that are sent early
    refuse                  while the file exists, a decode worker has no blocks for an offer
    flip, cut               once: one bit of the bytes of the next send is flipped; the next send finds its edge cut
    swap                    once: the next send has the bytes and valid checksums of the last one of the same length
    late                    once: before the next chunk, a chunk of an older generation of the edge is announced again

Every layer is a section, so that small chunks have several, and a prompt's last chunk is sent in two (decision 0007).

SIGUSR1 writes WORKER.state: the checked invariants, the load, threads and tasks. Followers are named WORKER.RANK. A
process that ends because another rank is lost writes when it detected that to WORKER.lost (monotonic clock, seconds).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from baton.core.codes import ErrorCode
from baton.core.errors import Unavailable
from baton.core.handover import Chunk
from baton.core.step import StepPlan
from baton.runtime import worker_main as worker_main_module
from baton.runtime.worker_main import MakeWorker, RunnableWorker, worker_main

VARIABLE = "BATON_TEST_FAULTS"
HOLD_LIMIT_S = 60.0


class Faults:
    """The fault files of one worker process, and the state of its hooks about the last chunk."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self.worker: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last_sent: dict[int, tuple[Any, list[int]]] = {}  # by bytes: a copy and its checksums
        self.last_announced: dict[tuple[str, int, int], Chunk] = {}
        self.of_older_edge: Chunk | None = None

    def path(self, what: str) -> Path:
        return self._directory / f"{self._name}.{what}"

    def holds(self, plan: StepPlan) -> bool:
        try:
            text = self.path("hold_step").read_text()
        except OSError:
            return False
        return not text or any(row.start >= int(text) for row in plan.rows)

    def fires(self, what: str) -> bool:
        """Returns whether a test requested a fault, once for each request."""
        try:
            self.path(what).unlink()
        except OSError:
            return False
        return True

    def hold(self, what: str, ended: threading.Event | None = None) -> None:
        path, deadline = self.path(what), time.monotonic() + HOLD_LIMIT_S
        if path.exists():
            self.path("held").touch()
        while path.exists() and time.monotonic() < deadline and not (ended is not None and ended.is_set()):
            time.sleep(0.005)

    def dump(self, *_: object) -> None:
        """Runs on the main thread, which is the event loop's, between two of its bytecodes."""
        state: dict[str, Any] = {"threads": sorted(t.name for t in threading.enumerate()), "check": "balanced"}
        if self.worker is not None:
            try:
                self.worker.scheduler.check()
            except Exception as e:
                state["check"] = str(e)
            state["load"] = dataclasses.asdict(self.worker.load())
            state["deadlines"] = len(self.worker.main_loop.deadlines)
            hand_overs = getattr(self.worker, "hand_overs", None)
            if hand_overs is not None:
                state["writing"], state["chunks_damaged"] = len(hand_overs.writing), hand_overs.counters.chunks_damaged
            if self.loop is not None:
                state["tasks"] = sorted(t.get_name() for t in asyncio.all_tasks(self.loop) if not t.done())
        partial = self.path("state.partial")
        partial.write_text(json.dumps(state))
        partial.replace(self.path("state"))


def _install(faults: Faults) -> None:
    """Wraps the functions that a hand-over calls. Imports torch, so it is not called at import time."""
    from baton.engine.runner import Runner
    from baton.runtime import worker_ranks
    from baton.runtime.streams import MessageStream
    from baton.transfer.edge_endpoint import LocalEndpoints
    from baton.transfer.gloo import GlooEdge

    step, tell_first = Runner.step, Runner.set_first_layers_callback
    send, say = GlooEdge.send, MessageStream.send_unshielded
    end = worker_ranks._end

    def held_step(runner: Runner, plan: StepPlan) -> Any:
        if faults.holds(plan):
            faults.hold("hold_step")
        return step(runner, plan)

    def held_first_layers(runner: Runner, wanted: Any, tell: Any) -> None:
        def on_layers(step_id: int, layers: int) -> None:
            tell(step_id, layers)
            faults.hold("hold_layers")

        tell_first(runner, wanted, on_layers)

    def faulty_send(edge: GlooEdge, buf: Any, timeout_s: float, ends: Any = (), ready: Any = lambda _: 0) -> None:
        faults.hold("hold_send", edge._meeting._aborted)
        if faults.fires("cut"):
            edge.abort()
        sums = [ready(index) for index in range(len(ends))]  # waits until everything is packed
        before, faults.last_sent[buf.numel()] = faults.last_sent.get(buf.numel()), (buf.clone(), sums)
        if faults.fires("flip"):
            buf = buf.clone()
            buf[buf.numel() // 3] ^= 4
        if before is not None and faults.fires("swap"):
            buf, sums = before
        send(edge, buf, timeout_s, ends, sums.__getitem__)

    async def faulty_stream_send(stream: MessageStream, value: object, timeout_s: float = 5.0) -> None:
        if isinstance(value, Chunk):
            edge = (stream.peer, value.prefill_rank, value.decode_rank)  # each edge has generations of its own
            before, faults.last_announced[edge] = faults.last_announced.get(edge), value
            if before is not None and before.edge_generation < value.edge_generation:
                faults.of_older_edge = before
            if faults.of_older_edge is not None and faults.fires("late"):
                await say(stream, faults.of_older_edge, timeout_s)
        await say(stream, value, timeout_s)

    def end_of_rank(*args: Any) -> None:
        faults.path("lost").write_text(str(time.monotonic()))
        end(*args)

    worker_ranks._end = end_of_rank
    Runner.step = held_step  # type: ignore[method-assign]
    Runner.set_first_layers_callback = held_first_layers  # type: ignore[method-assign]
    GlooEdge.send = faulty_send  # type: ignore[method-assign]
    MessageStream.send_unshielded = faulty_stream_send  # type: ignore[method-assign]
    worker_ranks.LocalEndpoints = partial(LocalEndpoints, section_bytes=1)  # type: ignore[attr-defined]


def _refuse(faults: Faults, worker: Any) -> None:
    scheduler = worker.scheduler
    reserve = getattr(scheduler, "reserve", None)

    def refusing(*args: Any) -> Any:
        if faults.path("refuse").exists():
            raise Unavailable("no KV blocks, says the test", code=ErrorCode.NO_FREE_BLOCKS)
        return reserve(*args)

    if reserve is not None:
        scheduler.reserve = refusing


def main() -> None:
    role, argv = sys.argv[1], sys.argv[2:]
    name, rank = argv[argv.index("--worker-id") + 1], os.environ.get("RANK", "0")
    faults = Faults(Path(os.environ[VARIABLE]), name if rank == "0" else f"{name}.{rank}")
    signal.signal(signal.SIGUSR1, faults.dump)

    def maker(role: str) -> MakeWorker:
        make = importlib.import_module(f"{role}.__main__").load()

        def made(*given: Any) -> RunnableWorker:
            faults.worker, faults.loop = make(*given), asyncio.get_running_loop()
            _refuse(faults, faults.worker)
            return faults.worker  # type: ignore[no-any-return]

        return made

    def load() -> MakeWorker:
        made = maker(role)
        _install(faults)
        return made

    worker_main_module._load_other = maker  # for a change of role

    if rank != "0":
        _install(faults)  # a follower creates no worker
    worker_main(role, load, argv)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
