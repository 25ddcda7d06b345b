"""NCCL without GPUs: groups of two ranks on streams of processes, in virtual time, with faults; for `NcclEdge` itself.

Actors are threads of which one runs at a time: each runs until it sleeps, and the seed decides which one goes on and
which transfer happens. So an order of events is a seed, and a second takes no second.

A process has torch's 32 streams. An operation moves when it is the first of its stream at both ends, in both groups,
and neither group has ended; so a stream that two users share blocks one behind the other, as on a GPU. Bytes are read
and written at that moment, and `moved` checks that no end has reused its buffer.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from baton.transfer.stream_pool import StreamPool
from tests.support.fake_streams import FakeStreams
from tests.support.limits import HANG_S


class Broken(AssertionError):
    """What must hold did not."""


class _Ended(BaseException):
    """Ends an actor when its simulation has ended."""


class Actor:
    def __init__(self, sim: Sim, name: str, process: Process | None, work: Callable[[], None]) -> None:
        self.name, self.process, self.wakes_at, self.done = name, process, sim.now, False
        self.turn = threading.Semaphore(0)
        self.error: BaseException | None = None
        self._sim, self._work = sim, work
        self.thread = threading.Thread(target=self._main, name=f"sim {name}", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        self.turn.acquire()
        try:
            if not self._sim.over:
                self._work()
        except _Ended:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._sim.idle.release()


class Sim:
    """Complete state: the virtual time, the actors, the groups, and what the seed has left to decide."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now, self.over = 0.0, False
        self.actors: list[Actor] = []
        self.links: list[Link] = []
        self.idle = threading.Semaphore(0)
        self.current: Actor | None = None

    def actor(self, name: str, work: Callable[[], None], process: Process | None = None) -> Actor:
        self.actors.append(Actor(self, name, process, work))
        return self.actors[-1]

    def sleep(self, seconds: float) -> None:
        """Called by an actor: the others go on."""
        mine = self.current
        assert mine is not None
        mine.wakes_at = self.now + max(seconds, 1e-6)
        self.idle.release()
        if not mine.turn.acquire(timeout=4 * HANG_S) or self.over:
            raise _Ended

    def run(self, until_s: float) -> None:
        """Runs until every actor of a live process has ended. Raises Broken when one has not after `until_s`, or what
        an actor raised."""
        try:
            while True:
                left = [a for a in self.actors if not a.done and not (a.process and a.process.stopped)]
                if not left:
                    return
                if self.now > until_s:
                    raise Broken(f"a wait without an end: {', '.join(actor.name for actor in left)}")
                for link in self.dice.sample(self.links, len(self.links)):
                    if self.dice.random() < 0.5:
                        link.move()
                ready = [actor for actor in left if actor.wakes_at <= self.now]
                if not ready:
                    self.now = min(actor.wakes_at for actor in left)
                    continue
                self._resume(self.dice.choice(ready))
        finally:
            self.over = True
            for actor in self.actors:
                if not actor.done:
                    self._resume(actor)

    def _resume(self, actor: Actor) -> None:
        self.current = actor
        actor.turn.release()
        if not self.idle.acquire(timeout=4 * HANG_S):
            raise Broken(f"{actor.name} waits for something outside the simulation")
        if actor.error is not None and not self.over:
            raise actor.error

    def time(self) -> Any:
        """In place of the module `time`."""
        return SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)

    def threading(self) -> Any:
        """In place of the module `threading`."""
        sim = self

        class Event:
            def __init__(self) -> None:
                self.on = False

            def is_set(self) -> bool:
                return self.on

            def set(self) -> None:
                self.on = True

            def wait(self, timeout: float) -> bool:
                until = sim.now + timeout
                while not self.on and sim.now < until:
                    sim.sleep(0.01)
                return self.on

        class Lock:
            def __init__(self) -> None:
                self.held = False

            def __enter__(self) -> None:
                while self.held:
                    sim.sleep(0.001)
                self.held = True

            def __exit__(self, *_: object) -> None:
                self.held = False

        def thread(target: Callable[[], None], name: str, daemon: bool) -> Any:
            return SimpleNamespace(start=lambda: sim.actor(name, target, sim.current and sim.current.process))

        return SimpleNamespace(Event=Event, Lock=Lock, Thread=thread)


class Process:
    """One rank: its streams, by handle the operations queued there, and whether it is stopped."""

    def __init__(self, name: str) -> None:
        self.name, self.stopped = name, False
        self.torch = FakeStreams()
        self.pool = StreamPool(self.torch.take)
        self.queues: dict[int, deque[Work]] = {}

    def stream(self) -> tuple[list[int], int]:
        """What a group that connects takes: the handles that the pool records, and torch's stream."""
        with self.pool.taken_by_torch() as handles:
            taken = self.torch.take().cuda_stream
        return handles, taken


class Work:
    def __init__(self, group: Group, buf: Tensor) -> None:
        self.group, self.buf, self.done = group, buf, False
        self.posted_at, self.moved_after_s = group.now, 0.0  # seconds after both ends had posted it

    def is_completed(self) -> bool:
        if self.group.aborting:
            raise Broken("an operation was polled while its group was aborted: that waits for a lock with the GIL held")
        self.group.may_be_stuck()
        return self.done or self.group.failed

    def wait(self) -> bool:
        if self.group.failed and not self.done:
            raise RuntimeError("NCCL error: remote process exited or there was a network error")
        return True


class Group:
    """One end of a communicator. Complete state: whether it exists, its operations in order, and how it ended. As in
    torch, the first operation creates it; an abort before that ends nothing."""

    def __init__(self, sim: Sim, process: Process, stream: int) -> None:
        self._sim, self.process, self.created = sim, process, False
        self.queue = process.queues.setdefault(stream, deque())
        self.posted: deque[tuple[str, Work]] = deque()
        self.aborting = self.ended = self.failed = False
        self.peer: Group | None = None

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._post("send", tensors[0])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._post("recv", tensors[0])

    def abort(self) -> None:
        """Operations may still move until it returns."""
        self.aborting = True
        self._sim.sleep(self._sim.dice.choice((0.0, 0.001, 0.1)))
        self.aborting, self.ended = False, self.created
        for _, work in self.posted:
            if work in self.queue:
                self.queue.remove(work)
        self.posted.clear()
        if self.peer is not None and self._sim.dice.random() < 0.5:  # else the peer's operations hang
            self.peer.failed = True

    def in_use(self, buf: Tensor) -> bool:
        """Whether an operation on the memory of `buf` may still move bytes."""
        return any(work.buf.untyped_storage().data_ptr() == buf.untyped_storage().data_ptr() for _, work in self.posted)

    def may_be_stuck(self) -> None:
        """A poll seldom waits for a lock of NCCL's, for longer than an edge gives its thread after an abort."""
        if self._sim.dice.random() < 0.1:
            self._sim.sleep(0.3)

    @property
    def now(self) -> float:
        return self._sim.now

    def _post(self, name: str, buf: Tensor) -> Work:
        if not self.created and self._sim.dice.random() < 0.3:
            self._sim.sleep(0.3)
        self.created = True
        if self.ended:
            raise RuntimeError("NCCL communicator was aborted")
        work = Work(self, buf)
        self.posted.append((name, work))
        self.queue.append(work)
        return work


class Link:
    """Two ends that are connected."""

    def __init__(self, sim: Sim, one: Group, other: Group) -> None:
        self._ends = (one, other)
        one.peer, other.peer = other, one
        sim.links.append(self)

    def move(self) -> None:
        """Moves the first operation of both ends, if they match and are the first of their streams."""
        one, other = self._ends
        if one.ended or other.ended or not one.posted or not other.posted:
            return
        (name, mine), (theirs_name, theirs) = one.posted[0], other.posted[0]
        if name == theirs_name or one.queue[0] is not mine or other.queue[0] is not theirs:
            return
        source, target = (mine, theirs) if name == "send" else (theirs, mine)
        target.buf.copy_(source.buf)
        for group, work in ((one, mine), (other, theirs)):
            group.posted.popleft()
            group.queue.popleft()
            work.done = True
            work.moved_after_s = group.now - max(mine.posted_at, theirs.posted_at)
