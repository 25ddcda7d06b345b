"""The workers of the cluster as the coordinator talks to them: who is here, what is sent to whom, who has gone.

Life of a worker's session: it dials and says Join; the Registry takes it in or refuses it by the field's name; Welcome
goes back, then commands go down and events up until the stream breaks. A worker that redials within its lease goes on
where it was. One that drains (by a command, or because it said Leave) gets no new work and says Drained in the end. One
that is replaced, silent for a lease, or drained is gone, and the owner hears of it once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from dataclasses import replace
from typing import Protocol

from baton.core.cluster_token import FLAG, check_token
from baton.core.commands import Command, Drain, Drained, Following, Heartbeat, HeartbeatAck, Join, Leave, Welcome
from baton.core.errors import InvariantError, JoinRefused, NotFound, Unavailable
from baton.core.events import StepEvents
from baton.core.listening import ListeningClock
from baton.rpc.streams import LinkLost, MessageStream
from coordinator.policy.dispatch import Dispatcher
from coordinator.policy.registry import Registry, WorkerRecord
from coordinator.policy.worker_view import WorkerView

log = logging.getLogger("baton.coordinator")
STOOD_STILL_S = 0.5  # a look at the leases that comes later than this: the coordinator itself stood still meanwhile
LAST_WORD_S = 5.0  # how long workers that drain with the whole cluster may take to say that they have
ToWorker = Welcome | Command | HeartbeatAck


class MembersOwner(Protocol):
    """What becomes of requests when workers come, speak and go."""

    draining: bool

    def following(self, worker: str) -> tuple[Following, ...]: ...

    def dispatch(self) -> None: ...

    def events(self, worker: str, events: StepEvents) -> None: ...

    def gone(self, worker: str, why: str, *, drained: bool) -> None:
        """It is not there any more. A drained one gives back what is still followed there."""
        ...


class Members:
    """Complete state: the registry, the queue of commands to each connected worker, the incarnation of each worker that
    has not gone, by when those that drain are to have left, how often a join was refused for each field, and the clock
    of leases. `address` is where workers dial; `token` is what they must know, if not empty."""

    def __init__(
        self, owner: MembersOwner, dispatcher: Dispatcher, registry: Registry, handle_key: bytes, token: str
    ) -> None:
        self.registry = registry
        self.run_id = secrets.token_hex(8)
        self._owner = owner
        self._dispatcher = dispatcher
        self._handle_key = handle_key
        self._outgoing: dict[str, asyncio.Queue[ToWorker]] = {}
        self._incarnations: dict[str, int] = {}
        self._drains: dict[str, float] = {}
        self._token = token
        self._clock = ListeningClock(time.monotonic(), STOOD_STILL_S)
        self.address = ""
        self.joins_refused: Counter[str] = Counter()

    def connected(self, worker: str) -> bool:
        return worker in self._outgoing

    def incarnation(self, worker: str) -> int | None:
        """None for a worker that has gone."""
        return self._incarnations.get(worker)

    def send(self, worker: str, command: ToWorker) -> None:
        queue = self._outgoing.get(worker)
        if queue is not None:
            queue.put_nowait(command)

    async def session(self, stream: MessageStream, first: object) -> None:
        """Runs the session of one worker to its end.

        Raises:
            JoinRefused: it does not fit; the message names the field.
            Unavailable: the whole cluster drains and takes in nobody new; it may try again.
        """
        if not isinstance(first, Join):
            raise InvariantError(f"a session begins with a join, not {type(first).__name__}")
        worker, incarnation = first.worker_id, first.incarnation
        fresh = self._incarnations.get(worker) != incarnation
        replaced = self._admit(first)
        if replaced is not None:
            self._lost(replaced, "it was replaced by a new incarnation")
        if fresh:
            self._dispatcher.add_worker(WorkerView.of(first))
        following = () if fresh else self._owner.following(worker)
        queue: asyncio.Queue[ToWorker] = asyncio.Queue()
        lease_s = self.registry.leases.duration_s
        queue.put_nowait(
            Welcome(self.run_id, lease_s, lease_s / 4, self._handle_key, following, round(time.monotonic() * 1000))
        )
        self._outgoing[worker], self._incarnations[worker] = queue, incarnation
        drains_by = self._drains.get(worker)
        if drains_by is not None:  # it may not have heard of it
            queue.put_nowait(Drain(max(drains_by - time.monotonic(), 0.0)))
        self._dispatcher.set_ready(worker, drains_by is None and not self._owner.draining)
        log.info("%s worker %s joined (incarnation %d)", first.role, worker, incarnation)
        sender = asyncio.create_task(self._pump(stream, queue, first), name=f"commands to {worker}")
        try:
            self._owner.dispatch()
            while (message := await stream.receive()) is not None and self._outgoing.get(worker) is queue:
                if not self._on(worker, incarnation, message):
                    break
        finally:
            sender.cancel()
            self._detach(queue, first, stream)

    def _admit(self, join: Join) -> WorkerRecord | None:
        """The record that it replaces. Nothing is done for one that does not know the token."""
        try:
            who = f"{join.role} worker {join.worker_id[:128]!r}"
            self.check_token(join.token, who)
            if join.token and not self._token:  # its peers have none either, and it would refuse their links
                raise JoinRefused(f"{who} refused: token: this cluster has none; leave out {FLAG}", param="token")
            if self._owner.draining and self._incarnations.get(join.worker_id) != join.incarnation:
                raise Unavailable(f"{join.worker_id} cannot join: the cluster is draining", code="draining")
            return self.registry.join(replace(join, token=""), self.now())
        except JoinRefused as e:
            self.joins_refused[e.param or ""] += 1
            log.warning("%s", e.message)
            raise

    def check_token(self, said: str, who: str) -> None:
        """Raises JoinRefused when it is not this cluster's."""
        check_token(self._token, said, who)

    async def _pump(self, stream: MessageStream, queue: asyncio.Queue[ToWorker], join: Join) -> None:
        try:
            while True:
                await stream.send(await queue.get())
        except Exception as e:
            if not isinstance(e, LinkLost):
                log.exception("commands to %s", join.worker_id)
        self._detach(queue, join, stream)  # it may still be heard, but hears nothing: it has to dial again

    def _detach(self, queue: asyncio.Queue[ToWorker], join: Join, stream: MessageStream) -> None:
        worker = join.worker_id
        if self._outgoing.get(worker) is queue:
            del self._outgoing[worker]
            if self.registry.disconnected(worker, join.incarnation, self.now()):
                self._dispatcher.set_ready(worker, False)
                log.warning("session of %s broke: %s", worker, stream.ended or "ended here")

    def _on(self, worker: str, incarnation: int, message: object) -> bool:
        """Takes in one message; False ends the session."""
        load = message.load if isinstance(message, Heartbeat | StepEvents) else None
        if not self.registry.heard(worker, incarnation, load, self.now()):
            log.warning("%s is fenced: its lease has run out", worker)
            return False
        if load is not None:
            self._dispatcher.told(worker, load.blocks_free, load.preempted)
        match message:
            case StepEvents():
                self._owner.events(worker, message)
            case Heartbeat(number):
                self.send(worker, HeartbeatAck(number))
            case Leave(timeout_s):
                log.info("%s leaves within %.1f s", worker, timeout_s)
                self._begin_drain(worker, timeout_s)
            case Drained():
                log.info("%s has left", worker)
                self.registry.left(worker, incarnation)
                self._outgoing.pop(worker, None)
                self._gone(worker, "it drained", drained=True)
                return False
            case _:
                raise InvariantError(f"{worker} sent {type(message).__name__}")
        return True

    def now(self) -> float:
        """On the clock of leases."""
        return self._clock.at(time.monotonic())

    def expire(self) -> None:
        """Workers whose lease has run out are lost. To be called every now and then: leases do not run while nobody
        does, since a coordinator that stood still has to read first what was said meanwhile."""
        for record in self.registry.expire(self._clock.look(time.monotonic())):
            self._outgoing.pop(record.worker_id, None)
            self._lost(record, f"silent for {self.registry.leases.duration_s:g} s")

    def _lost(self, record: WorkerRecord, why: str) -> None:
        log.warning("%s worker %s is lost: %s", record.role, record.worker_id, why)
        self._gone(record.worker_id, why, drained=False)

    def _gone(self, worker: str, why: str, *, drained: bool) -> None:
        self._incarnations.pop(worker, None)
        self._drains.pop(worker, None)
        self._owner.gone(worker, why, drained=drained)

    # Leaving.

    def drain(self, worker: str, timeout_s: float) -> None:
        """One worker gets no new work, finishes what it has or gives it back after `timeout_s`, and leaves.

        Raises:
            NotFound: there is no such worker.
        """
        if worker not in self._incarnations:
            raise NotFound(f"no worker {worker[:128]!r} is in this cluster", param="worker_id")
        log.info("%s is told to drain within %.1f s", worker, timeout_s)
        self._begin_drain(worker, timeout_s)
        self.send(worker, Drain(timeout_s))

    def _begin_drain(self, worker: str, timeout_s: float) -> None:
        by = time.monotonic() + timeout_s
        self._drains[worker] = min(by, self._drains.get(worker, by))
        self.registry.draining(worker, self.now())
        self._dispatcher.set_ready(worker, False)

    async def drain_all(self, timeout_s: float) -> None:
        """All workers leave, and say so within a while."""
        for worker in list(self._incarnations):
            self.drain(worker, timeout_s)
        patience = time.monotonic() + LAST_WORD_S
        while self._outgoing and time.monotonic() < patience:
            await asyncio.sleep(0.02)
