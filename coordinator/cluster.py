"""The cluster as the coordinator acts on it: sessions of workers, dispatch of requests, what becomes of both.

Registry and Dispatcher decide; here commands are sent and events taken in. One event loop owns all of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace

from baton.core.commands import (
    Abort,
    Command,
    Drain,
    Drained,
    Following,
    Heartbeat,
    HeartbeatAck,
    Join,
    Prefill,
    Release,
    Target,
    Welcome,
)
from baton.core.commands import Assign as AssignCommand
from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffError,
    InvariantError,
    KVCorrupt,
    Unavailable,
    WorkerLost,
)
from baton.core.events import Parked, SequenceEnded, StepEvents
from baton.core.handles import Handle, sign
from baton.core.request import GenerateRequest, SequenceId
from baton.rpc.streams import LinkLost, MessageStream
from coordinator.live import Live
from coordinator.policy.dispatch import Dispatcher, Placement, Ticket, WorkerView
from coordinator.policy.journal import Journal
from coordinator.policy.registry import Registry, WorkerRecord

log = logging.getLogger("baton.coordinator")
TICK_S = 0.1
_MAX_ATTEMPT = 1 << 30  # an int32 on the wire

# What a worker's error code means to the client; any other is our bug.
_WORKER_ERRORS: dict[str, type[BatonError]] = {
    "deadline_exceeded": DeadlineExceeded,
    "kv_corrupt": KVCorrupt,
    "worker_lost": WorkerLost,
    "handoff_failed": HandoffError,
    "draining": Unavailable,
    "prompt_exceeds_pool": Unavailable,
}


class Cluster:
    """Complete state: registry, dispatcher, the stream of each connected worker, the live requests, and the number of
    the last attempt: no two requests share one, so a client may use its request id again at once, while workers still
    bury, or speak of, the sequence that had it before."""

    def __init__(
        self, lease_s: float, max_queued_requests: int, max_queued_tokens: int, config_digest: str = ""
    ) -> None:
        self.registry = Registry(lease_s, config_digest)
        self.dispatcher = Dispatcher(max_queued_requests, max_queued_tokens)
        self.run_id = secrets.token_hex(8)
        self.draining = False
        self.stale_events = 0
        self._key = secrets.token_bytes(32)
        self._lease_s = lease_s
        self._live: dict[str, Live] = {}
        self._outgoing: dict[str, asyncio.Queue[Command | HeartbeatAck]] = {}
        self._incarnations: dict[str, int] = {}
        self._attempt = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    # Requests.

    def admit(self, request: GenerateRequest) -> Live:
        """Queues a request and dispatches what can start.

        Raises:
            BatonError: refused; nothing was done for it.
        """
        if self.draining:
            raise Unavailable("the cluster is draining", code="draining", retry_after_s=5)
        ticket = Ticket(
            request.request_id,
            request.num_prefill_tokens,
            request.max_total_tokens,
            needs_decode=request.max_tokens - len(request.output) > 1,
        )
        self.dispatcher.submit(ticket)
        now = time.monotonic()
        live = Live(Journal(replace(request, attempt=self._next_attempt())), now, now + request.deadline_s)
        self._live[request.request_id] = live
        self.dispatch()
        return live

    def _next_attempt(self) -> int:
        self._attempt = self._attempt % _MAX_ATTEMPT + 1
        return self._attempt

    def dispatch(self) -> None:
        for placement in self.dispatcher.place():
            live = self._live.get(placement.request_id)
            if live is None:
                raise InvariantError(f"{placement.request_id} was placed and is not live")
            live.dispatched_at = time.monotonic()
            live.stage = "prefill"
            live.prefill_worker, live.decode_worker = placement.prefill, placement.decode or ""
            remaining = max(live.deadline_at - live.dispatched_at, 0.001)
            request = replace(live.request, deadline_s=remaining)
            self._send(placement.prefill, Prefill(request, self._targets(live, placement)))

    def end(self, request_id: str, reason: str) -> None:
        """The front end is done with a request, well or not: both pools hear of it at once."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        workers = {w for w in (*self.dispatcher.workers_of(request_id), live.prefill_worker, live.decode_worker) if w}
        unfinished = live.journal.finish is None or reason != "done"
        for worker in workers:
            if unfinished:
                left = max(live.deadline_at - time.monotonic(), 1.0)
                self._send(worker, Abort(live.sequence, reason, tombstone_s=left))
            self._send(worker, Release((live.sequence,)))
        self.dispatcher.finish(request_id)
        self.dispatch()

    def _targets(self, live: Live, placement: Placement) -> tuple[Target, ...]:
        return tuple(
            self._target(live.sequence, placement.prefill, decode, live.deadline_at)
            for decode in (placement.decode, placement.spare)
            if decode is not None
        )

    def _target(self, sequence: SequenceId, prefill: str, decode: str, deadline_at: float) -> Target:
        source, destination = self.registry.get(prefill), self.registry.get(decode)
        if source is None or destination is None:
            raise InvariantError(f"{prefill} or {decode} was picked and is not registered")
        handle = Handle(
            sequence,
            prefill,
            source.join.incarnation,
            decode,
            destination.join.incarnation,
            valid_ms=max(round((deadline_at - time.monotonic()) * 1000), 1),
            nonce=secrets.token_bytes(12),
        )
        return Target(decode, destination.join.incarnation, destination.join.link_address, sign(self._key, handle))

    def _send(self, worker: str, command: Command | HeartbeatAck) -> None:
        queue = self._outgoing.get(worker)
        if queue is not None:
            queue.put_nowait(command)

    # Workers.

    async def session(self, stream: MessageStream, first: object) -> None:
        """Runs the session of one worker to its end.

        Raises:
            JoinRefused: it does not fit; the message names the field.
        """
        if not isinstance(first, Join):
            raise InvariantError(f"a session begins with a join, not {type(first).__name__}")
        replaced = self.registry.join(first, time.monotonic())
        worker, incarnation = first.worker_id, first.incarnation
        if replaced is not None:
            self._lost(replaced, "it was replaced by a new incarnation")
        fresh = self._incarnations.get(worker) != incarnation or replaced is not None
        queue: asyncio.Queue[Command | HeartbeatAck] = asyncio.Queue()
        self._outgoing[worker], self._incarnations[worker] = queue, incarnation
        following = () if fresh else tuple(self._following(worker))
        await stream.send(Welcome(self.run_id, self._lease_s, self._lease_s / 4, self._key, following))
        if fresh:
            self.dispatcher.add_worker(_view(first))
        self.dispatcher.set_ready(worker, not self.draining)
        log.info("%s worker %s joined (incarnation %d)", first.role, worker, incarnation)
        self.dispatch()
        sender = asyncio.create_task(self._pump(stream, queue), name=f"commands to {worker}")
        try:
            while (message := await stream.receive()) is not None:
                if not self._on(worker, incarnation, message, stream):
                    break
        finally:
            sender.cancel()
            if self._outgoing.get(worker) is queue:
                del self._outgoing[worker]
                if self.registry.disconnected(worker, incarnation, time.monotonic()):
                    self.dispatcher.set_ready(worker, False)
                    log.warning("session of %s broke: %s", worker, stream.ended)

    async def _pump(self, stream: MessageStream, queue: asyncio.Queue[Command | HeartbeatAck]) -> None:
        try:
            while True:
                await stream.send(await queue.get())
        except LinkLost as e:
            log.info("%s", e.message)

    def _on(self, worker: str, incarnation: int, message: object, stream: MessageStream) -> bool:
        """Takes in one message; False ends the session."""
        load = message.load if isinstance(message, Heartbeat | StepEvents) else None
        if not self.registry.heard(worker, incarnation, load, time.monotonic()):
            log.warning("%s is fenced: its lease has run out", worker)
            return False
        match message:
            case StepEvents():
                self._events(worker, message)
            case Heartbeat(number):
                self._send(worker, HeartbeatAck(number))
            case Drained():
                self.registry.left(worker, incarnation)
                self._gone(worker, "it drained")
                return False
            case _:
                raise InvariantError(f"{worker} sent {type(message).__name__}")
        return True

    def _events(self, worker: str, events: StepEvents) -> None:
        for t in events.tokens:
            live = self._find(t.sequence)
            if live is None:
                continue
            try:
                live.accept(t.sequence.attempt, t.first_index, t.tokens)
            except InvariantError as e:
                live.fail(e)
                continue
            if worker == live.prefill_worker:
                self.dispatcher.prefilled(t.sequence.request_id)
                live.stage = "decode"
        for over in events.handed_over:
            live = self._find(over.sequence)
            if live is not None:
                live.decode_worker = over.decode_worker
                live.add_stamps(over.stamps)
                self.dispatcher.moved(over.sequence.request_id, over.decode_worker)
                self.dispatcher.handed_over(over.sequence.request_id)
        for parked in events.parked:
            self._parked(parked)
        for ended in events.ended:
            self._ended(worker, ended)
        if events.tokens or events.ended:
            self.dispatch()

    def _find(self, sequence: SequenceId) -> Live | None:
        live = self._live.get(sequence.request_id)
        if live is None or live.sequence != sequence:
            self.stale_events += 1
            return None
        return live

    def _ended(self, worker: str, ended: SequenceEnded) -> None:
        live = self._find(ended.sequence)
        if live is None:
            return
        live.add_stamps(ended.stamps)
        if ended.reason == "error":
            kind = _WORKER_ERRORS.get(ended.code, BatonError)
            live.fail(kind(f"{ended.message} (stage {live.stage})", code=ended.code))
        elif live.journal.finish is None:
            live.fail(WorkerLost(f"{worker} ended the request: {ended.reason}", code="worker_lost", retry_after_s=1))

    def _parked(self, parked: Parked) -> None:
        live = self._find(parked.sequence)
        if live is None or live.over:
            return
        log.warning("KV of %s is parked: %s", parked.sequence, parked.reason)
        live.parked_since = time.monotonic()
        self._reassign(live)

    def _reassign(self, live: Live) -> None:
        """Names new decode workers for parked KV under the next attempt, when one has room."""
        placement = self.dispatcher.reassign(live.request.request_id, frozenset())
        if placement is None:
            return
        old = live.sequence
        live.journal.begin_attempt(max(self._next_attempt(), live.journal.attempt + 1))
        live.parked_since = 0.0
        live.decode_worker = placement.decode or ""
        self._send(placement.prefill, AssignCommand(old, self._targets(live, placement), live.journal.attempt))

    def _following(self, worker: str) -> Iterable[Following]:
        for live in self._live.values():
            if live.dispatched_at and worker in (live.prefill_worker, live.decode_worker):
                yield Following(live.sequence, live.journal.next_index)

    def _lost(self, record: WorkerRecord, why: str) -> None:
        log.warning("%s worker %s is lost: %s", record.role, record.worker_id, why)
        self._gone(record.worker_id, why)

    def _gone(self, worker: str, why: str) -> None:
        self._incarnations.pop(worker, None)
        for request_id in self.dispatcher.remove_worker(worker):
            live = self._live.get(request_id)
            if live is not None:
                error = WorkerLost(f"worker {worker} was lost in stage {live.stage}: {why}", retry_after_s=1)
                live.fail(error)

    # Time.

    async def tick(self) -> None:
        """Leases, parked KV and the queue, looked after for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for record in self.registry.expire(now):
                self._outgoing.pop(record.worker_id, None)
                self._lost(record, f"silent for {self._lease_s:g} s")
            for live in list(self._live.values()):
                if live.parked_since and not live.over:
                    self._reassign(live)
            missing = self.dispatcher.missing_pool()
            if missing is not None:
                self._refuse_waiting(f"no {missing} worker is left", f"no_{missing}_worker")
            self.dispatch()

    def _refuse_waiting(self, message: str, code: str) -> None:
        for live in list(self._live.values()):
            if not live.dispatched_at or live.parked_since:
                live.fail(Unavailable(message, code=code, retry_after_s=2))

    async def drain(self, timeout_s: float) -> None:
        """No new requests; running ones finish; then the workers leave. Each wait ends with `timeout_s`."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        log.info("draining: %d requests in flight", len(self._live))
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for live in self._live.values():
            live.fail(Unavailable("the cluster stops and the request did not finish in time", code="draining"))
        for worker in list(self._outgoing):
            self.registry.draining(worker, time.monotonic())
            self._send(worker, Drain(max(deadline - time.monotonic(), 1.0)))
        patience = time.monotonic() + 5.0
        while self._outgoing and time.monotonic() < patience:
            await asyncio.sleep(0.02)


def _view(join: Join) -> WorkerView:
    return WorkerView(
        join.worker_id, join.role, join.blocks_total, join.facts.layout.block_size, max(join.step_tokens, 1)
    )
