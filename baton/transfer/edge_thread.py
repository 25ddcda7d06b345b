"""Asynchronous interface to an edge: one small thread per edge, awaited from the event loop.

`EdgeWorker(spec)` starts nothing. The first call starts the thread, which creates the edge and then runs jobs in order:
connect, send, receive, and `run` for packing, scattering and hashing, which must not block the event loop. At most one
operation is in flight; a call made during another one is queued, since the peer may act on the end of an operation
before this event loop has processed it. The first failed or overdue job, or `abort`, makes the EdgeWorker dead: every
pending call immediately raises the same HandoffError, the edge is aborted, and the thread closes the edge and exits as
soon as the backend returns. A new EdgeWorker with the spec of the next generation replaces a dead one. `close` ends a
live one in order.

A job holds its tensors until it has ended, even if its caller was cancelled: cancelling an await cancels the wait, not
the operation (`in_flight` still names it). The thread is a daemon, so it never keeps the process from exiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from baton.core.errors import HandoffError
from baton.transfer.edge import Arrived, Edge, EdgeSpec, MakeEdge, Ready
from baton.transfer.gloo import GlooEdge
from baton.transfer.streams import HELD, current_stream, finish, own_stream

T = TypeVar("T")
_RUN_TIMEOUT_S = 60.0
_FINISH_S = 1.0


class _Job:
    """One call for the thread and the future that its caller awaits."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name = name
        self.call: Callable[[], Any] | None = call  # holds the tensors until the job has ended
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def resolve(self, result: Any = None, error: BaseException | None = None) -> None:
        """Completes the caller's future from any thread, once; later calls and closed loops are ignored."""

        def apply() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(result)
            else:
                self.future.set_exception(error)
                self.future.exception()  # marks it as retrieved: the caller may have been cancelled

        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is waiting
            self.loop.call_soon_threadsafe(apply)


class EdgeWorker:
    """One end of one generation of an edge. All coroutines run in one event loop; `abort` may come from any thread.

    `grace_s` is how long an operation may outlast its own timeout before the watchdog declares the edge dead.
    `kv_device` is the device of the KV: on a GPU, the thread queues all its work on a stream of its own.
    """

    def __init__(
        self, spec: EdgeSpec, make: MakeEdge = GlooEdge, grace_s: float = 0.5, kv_device: torch.device | None = None
    ) -> None:
        self.spec = spec
        self.dead: HandoffError | None = None
        self.connected = False
        self.in_flight: str | None = None  # the job that the thread is running
        self._make, self._grace_s = make, grace_s
        self._kv_device = kv_device or torch.device("cpu")
        self._edge: Edge | None = None
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._pending: set[_Job] = set()
        self._busy_until = 0.0  # when the queued jobs have ended or timed out (monotonic)
        self._lock = threading.Lock()  # guards dead, _edge, _pending
        self._ended = threading.Event()

    async def connect(self) -> None:
        """Creates the edge now rather than at the first transfer. Raises HandoffError."""
        await self._edge_op("connect", lambda edge: None, 0.0)

    async def send(
        self,
        buf: Tensor,
        timeout_s: float | None = None,
        ends: Sequence[int] = (),
        ready: Ready | None = None,
    ) -> None:
        """Sends `buf` and returns when it may be reused; `ready` is called on the edge's thread (see `Edge.send`).
        Raises HandoffError; the EdgeWorker is dead then."""
        limit_s = self.spec.operation_timeout_s if timeout_s is None else timeout_s
        await self._edge_op("send", lambda edge: edge.send(buf, limit_s, ends, ready), limit_s)

    async def recv(
        self,
        buf: Tensor,
        timeout_s: float | None = None,
        on_posted: Callable[[], None] | None = None,
        ends: Sequence[int] = (),
        arrived: Arrived | None = None,
    ) -> None:
        """Fills `buf`. `on_posted` is called in the event loop once the receive is open to the peer, `arrived` on the
        edge's thread (see `Edge.recv`). Raises HandoffError; the EdgeWorker is dead then."""
        limit_s = self.spec.operation_timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()

        def posted() -> None:
            if on_posted is not None:
                loop.call_soon_threadsafe(on_posted)

        await self._edge_op("recv", lambda edge: edge.recv(buf, limit_s, posted, ends, arrived), limit_s)

    async def run(self, fn: Callable[[], T], timeout_s: float = _RUN_TIMEOUT_S) -> T:
        """Runs `fn` on the edge's thread, in order with the transfers, and returns its result. An exception of `fn`
        ends the edge before the next job, as does exceeding `timeout_s`. Raises HandoffError."""
        result: T = await self._submit(_Job("run", fn), timeout_s)
        return result

    def abort(self, reason: str) -> None:
        """Ends the edge now, from any thread: every pending call raises HandoffError(reason). Does not block."""
        self._die(self.spec.error(f"aborted: {reason}"))

    async def close(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread after the jobs already queued, or aborts when half of `timeout_s` has passed. Returns True
        when the thread has ended; False when the backend still blocks it (it then ends by itself)."""
        if self._thread is None:
            self._die(self.spec.error("closed"))
            return True
        self._queue.put(None)
        half_s = timeout_s / 2
        if not await self._thread_ended(half_s):
            self._die(self.spec.error(f"closed with {self.in_flight or 'an operation'} in flight"))
            if not await self._thread_ended(half_s):
                return False
        self._thread.join(0.2)  # `_ended` is set in its last statement: takes microseconds
        return not self._thread.is_alive()

    async def _edge_op(self, name: str, call: Callable[[Edge], None], limit_s: float) -> None:
        connect_s = 0.0 if self.connected else self.spec.connect_timeout_s
        await self._submit(_Job(name, lambda: call(self._connected_edge())), limit_s + connect_s)

    async def _submit(self, job: _Job, limit_s: float) -> Any:
        with self._lock:
            if self.dead is not None:
                raise HandoffError(self.dead.message) from self.dead
            self._pending.add(job)
        if self._thread is None:
            name = f"edge-{self.spec.side}-g{self.spec.generation}"
            self._thread = threading.Thread(target=self._main, name=name, daemon=True)
            self._thread.start()
        now = time.monotonic()
        self._busy_until = max(now, self._busy_until) + limit_s + self._grace_s
        self._queue.put(job)
        done, _ = await asyncio.wait({job.future}, timeout=self._busy_until - now)
        if not done:
            self._die(self.spec.error(f"{job.name} exceeded its limit of {limit_s:.1f} s"))
            await asyncio.wait({job.future})  # `_die` completes it, or the thread, if the job has just ended
        with self._lock:
            if not self._pending:  # later jobs do not inherit time that earlier ones left over
                self._busy_until = 0.0
        return job.future.result()

    def _die(self, error: HandoffError) -> None:
        with self._lock:
            if self.dead is None:
                self.dead = error.with_traceback(None)  # its frames would keep the transfer's tensors alive
                self.dead.__cause__ = self.dead.__context__ = None
            edge, waiting = self._edge, list(self._pending)
            self._pending.clear()
        for job in waiting:
            job.resolve(error=HandoffError(self.dead.message))
        if edge is not None:
            edge.abort()
        self._queue.put(None)

    async def _thread_ended(self, timeout_s: float) -> bool:
        deadline, pause_s = time.monotonic() + timeout_s, 0.001
        while not self._ended.is_set():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        return True

    # Everything below runs on the edge's thread.

    def _main(self) -> None:
        try:
            with own_stream(self._kv_device):
                while self.dead is None:
                    job = self._queue.get()
                    if job is None:
                        break
                    self._execute(job)
                self._close_edge()
        finally:
            self._close_edge()
            self.connected = False
            self._ended.set()

    def _close_edge(self) -> None:
        if self.dead is None:
            self._die(self.spec.error("closed"))
        edge, self._edge = self._edge, None
        if edge is not None:
            edge.close()

    def _execute(self, job: _Job) -> None:
        call, job.call = job.call, None
        if self.dead is not None or call is None:
            return
        self.in_flight = job.name
        result, error = None, None
        try:
            result = call()
        except BaseException as e:
            error = e
        if error is not None or self.dead is not None:  # the caller may have dropped what queued device work uses
            try:
                finish(self._kv_device, _FINISH_S)
            except (HandoffError, RuntimeError):
                HELD.keep(call, current_stream(self._kv_device))
        del call
        self.in_flight = None
        if error is not None:
            self._die(error if isinstance(error, HandoffError) else self.spec.error(f"{job.name}: {error!r}"))
            return
        with self._lock:
            self._pending.discard(job)
        job.resolve(result)

    def _connected_edge(self) -> Edge:
        if self._edge is None:
            edge = self._make(self.spec)
            with self._lock:
                if self.dead is not None:
                    raise self.dead
                self._edge = edge  # from now on `_die` aborts it
        if not self.connected:
            self._edge.connect()
            self.connected = True
        return self._edge

    def __repr__(self) -> str:
        state = "dead" if self.dead else "connected" if self.connected else "new"
        doing = f", in {self.in_flight}" if self.in_flight else ""
        return f"<EdgeWorker {self.spec.prefix} {self.spec.side} {state}{doing}>"
