"""A worker's session with the coordinator, at the worker's end.

The worker dials, and redials without limit, keeping its weights. Within one run of the coordinator and one lease no
output is lost: after a redial the coordinator sends the next index that it expects per sequence, and the worker sends
the rest again from its output log. When the coordinator has been silent for a lease, the worker redials; when it has
been silent for KEEP_SEQUENCES_S, or another run replies, the worker ends its sequences, since the coordinator no longer
waits for them. A worker that is to exit sends `Leave`, and `Drained` when it has no sequences left. Both are sent again
after a redial; the coordinator replies to `Drained` by ending the session or by refusing the join.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Collection
from typing import Protocol

from baton.core.commands import (
    Abort,
    AdapterStates,
    Assign,
    Command,
    Drain,
    Drained,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Prefill,
    ReleaseRecords,
    SetAdapters,
    Welcome,
)
from baton.core.errors import BatonError, InvalidRequest, JoinRefused, ProtocolError
from baton.core.events import GpuUsage, Load, StepEvents, in_parts
from baton.core.liveness import KEEP_SEQUENCES_S, LEASE_CHECK_S, MAX_LEASE_GAP_S, ListeningClock
from baton.core.output_log import OutputLog, reconcile
from baton.core.request import SequenceId
from baton.runtime.streams import LinkLost, MessageStream, dial
from baton.runtime.tls import ClusterTls
from baton.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger("baton.session")
LOG_EVERY_S = 30.0
"""Between two log lines while no coordinator replies."""


class SessionOwner(Protocol):
    """What the session needs from its worker."""

    def join(self, run_id: str) -> Join: ...

    def load(self) -> Load: ...

    def welcome(self, welcome: Welcome) -> None: ...

    def command(self, command: Command) -> None: ...

    def sequence_ids(self) -> Collection[SequenceId]:
        """Returns the sequences of this worker, whether or not any event of them was sent."""
        ...

    def abandon(self, reason: str, keep: Collection[SequenceId] = ()) -> None:
        """Ends every sequence not in `keep`: the coordinator no longer waits for them."""
        ...


class WorkerSession:
    """A worker's side of its session: joins, redials, sends events and heartbeats, hands commands to its owner."""

    def __init__(
        self,
        address: str,
        owner: SessionOwner,
        clock: Callable[[], float] = time.monotonic,
        tls: ClusterTls | None = None,
    ) -> None:
        self._tls = tls
        self._address = address
        self._owner = owner
        self._clock = clock
        self._outgoing: asyncio.Queue[StepEvents | Leave | Drained | AdapterStates] = asyncio.Queue()
        self.connected = False  # whether posted events are sent immediately
        self._leaves_by: float | None = None  # deadline of a drain
        self._empty = False  # draining, and no sequence is left
        self._left = asyncio.Event()  # the coordinator has acknowledged that
        self._stream: MessageStream | None = None
        self._listening = ListeningClock(clock(), MAX_LEASE_GAP_S)
        self._last_received_at = self._listening.at(clock())
        self._lease_s = 3.0
        self.run_id = ""  # of the coordinator
        self.output_log = OutputLog()
        self._gpu: GpuUsage | None = None

    def post(self, events: StepEvents) -> None:
        """Sends events to the coordinator. Safe at any time: while no stream is open, the log keeps them."""
        self.output_log.record(events)
        if self.connected:
            for part in in_parts(events):
                self._outgoing.put_nowait(part)

    def post_adapters(self, states: AdapterStates) -> None:
        """Reports the adapters; while no stream is open, not at all: the coordinator asks again after the next join."""
        if self.connected:
            self._outgoing.put_nowait(states)

    async def sent(self, timeout_s: float) -> None:
        """Waits until what was posted is on its way to the coordinator, or `timeout_s` have passed."""
        if self.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._outgoing.join()

    def show_gpu(self, usage: GpuUsage | None) -> None:
        """Includes `usage` in the next heartbeats."""
        self._gpu = usage

    async def run(self) -> None:
        """Keeps a session up until cancelled, or until the worker has left.

        Raises:
            JoinRefused: this worker does not fit the cluster; the message names the field.
            InvariantError: a bug, also if it ended the watch for the coordinator's silence.
        """
        watchdog, running = asyncio.create_task(self._watch_lease(), name="lease watchdog"), asyncio.current_task()
        watchdog.add_done_callback(lambda task: running.cancel() if running and not task.cancelled() else None)
        delay, alone_since, logged_at = 0.1, self._clock(), -math.inf
        try:
            while not self._left.is_set():
                started = self._clock()
                try:
                    ended = await self._one_session()
                    alone_since, logged_at = self._clock(), -math.inf
                    if self._empty and ended.closed_by_peer:
                        self._left.set()
                        return
                    log.warning("session with %s ended, reconnecting: %s", self._address, ended.ended)
                except LinkLost as e:
                    if (now := self._clock()) - logged_at >= LOG_EVERY_S:
                        log.info("coordinator unreachable for %.0f s, retrying: %s", now - alone_since, e.message)
                        logged_at = now
                except JoinRefused:
                    if not self._empty:
                        raise
                    self._left.set()
                    return
                except BatonError as e:
                    log.warning("session with %s failed: %s", self._address, e.message)
                if self._clock() - started > 2.0:
                    delay = 0.1
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # all workers lose a coordinator at the same time
                delay = min(delay * 2, 1.0)
        except asyncio.CancelledError:
            if running and watchdog.done() and not watchdog.cancelled():
                running.uncancel()
                watchdog.result()  # raises: it ends only by a violated invariant
            raise
        finally:
            watchdog.cancel()

    def leave(self, timeout_s: float) -> None:
        """Announces that this worker drains for at most `timeout_s`, so that it receives no new work."""
        self._leaves_by = self._clock() + timeout_s
        if self.connected:
            self._outgoing.put_nowait(Leave(timeout_s))

    async def drained(self, timeout_s: float) -> None:
        """Reports that no sequences are left, and waits at most `timeout_s` for the acknowledgement."""
        self._empty = True
        if self.connected:
            self._outgoing.put_nowait(Drained())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()

    async def _one_session(self) -> MessageStream:
        """Runs one session to its end and returns its stream, which has ended."""
        known = self._known()
        channel, stream, welcome = await dial(
            self._address,
            lambda c: worker_pb2_grpc.WorkerControlStub(c).Session,
            worker_pb2.SessionRequest,
            self._owner.join(self.run_id),
            timeout_s=5.0,
            tls=self._tls,
            peer_role="coordinator",
        )
        try:
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"{self._address} replied to Join with {type(welcome).__name__}")
            self._stream = stream
            self._begin(welcome, known)
            async with asyncio.TaskGroup() as group:
                sender = group.create_task(self._send(stream), name="session sender")
                beat = group.create_task(self._beat(stream, welcome.heartbeat_s), name="session heartbeat")
                try:
                    await self._receive(stream)
                finally:
                    sender.cancel()
                    beat.cancel()
        except* (InvalidRequest, ProtocolError) as e:
            log.warning("invalid message from the coordinator at %s: %s", self._address, e.exceptions[0])
        finally:
            self.connected, self._stream = False, None
            stream.end("closed locally")
            await channel.close()
        return stream

    def _known(self) -> set[SequenceId]:
        return {*self._owner.sequence_ids(), *self.output_log.sequences()}

    def _begin(self, welcome: Welcome, known: Collection[SequenceId]) -> None:
        """`known` are the sequences from before the join."""
        self._last_received_at = self._listening.at(self._clock())
        self._lease_s = welcome.lease_s
        if self.run_id and self.run_id != welcome.run_id:
            self._owner.abandon("a different coordinator run replied")
            self.output_log.clear()
        self.run_id = welcome.run_id
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
            self._outgoing.task_done()
        reconciled = reconcile(welcome.tracked, known, self._owner.sequence_ids(), self.output_log)
        self._owner.welcome(welcome)
        self._owner.abandon("the coordinator no longer tracks them", reconciled.keep)
        self.connected = True
        if self._leaves_by is not None:
            self._outgoing.put_nowait(Leave(max(self._leaves_by - self._clock(), 0.0)))
        for part in in_parts(reconciled.resend):
            self._outgoing.put_nowait(part)
        if reconciled.unknown:
            self._outgoing.put_nowait(StepEvents(ended=reconciled.unknown))
        if self._empty:
            self._outgoing.put_nowait(Drained())

    # When a stream ends, its senders and its reader end, and the reader ends the session. If a sender raised, the
    # TaskGroup would also cancel the reader's task, and never undoes that if it is already exiting (Python 3.11).

    async def _send(self, stream: MessageStream) -> None:
        with contextlib.suppress(LinkLost):
            while True:
                message = await self._outgoing.get()
                try:
                    await stream.send_unshielded(message)
                finally:
                    self._outgoing.task_done()

    async def _beat(self, stream: MessageStream, interval_s: float) -> None:
        """Sends heartbeats. Each pause is a random part of the interval, so that the heartbeats of many workers do not
        coincide: 157 at the same moment blocked the coordinator's event loop for 6 ms."""
        with contextlib.suppress(LinkLost):
            for number in itertools.count(1):
                await stream.send(Heartbeat(number, self._owner.load(), self._gpu))
                await asyncio.sleep(interval_s * random.uniform(0.5, 1.0))

    async def _receive(self, stream: MessageStream) -> None:
        while (message := await stream.receive()) is not None:
            self._last_received_at = self._listening.at(self._clock())
            if isinstance(message, HeartbeatAck):
                continue
            if isinstance(message, ReleaseRecords):
                self.output_log.release(message.sequences)
            elif isinstance(message, Prefill | Assign | Abort | Drain | SetAdapters):
                self._owner.command(message)
            else:
                raise ProtocolError(f"unexpected message from the coordinator: {type(message).__name__}")

    async def _watch_lease(self) -> None:
        """Ends the stream when the coordinator has been silent for a lease: the other end may still consider it open,
        and wait. The sequences are kept for longer: a coordinator that stalled resumes them, and one that has
        rescheduled them omits them at the next join. A process that was stopped must first read what arrived meanwhile
        (decision 0003)."""
        ended_at = abandoned_at = -1.0
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            silent_since = self._last_received_at
            silent_s = self._listening.advance(self._clock()) - silent_since
            if silent_s <= self._lease_s:
                continue
            reason = "the coordinator was silent for {:g} s"
            if ended_at != silent_since:
                ended_at = silent_since
                if self._stream is not None:
                    self._stream.end(reason.format(self._lease_s))
            keep_s = max(KEEP_SEQUENCES_S, self._lease_s)
            if silent_s > keep_s and abandoned_at != silent_since:
                abandoned_at = silent_since
                self._owner.abandon(reason.format(keep_s))
