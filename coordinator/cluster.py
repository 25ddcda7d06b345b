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
    Welcome,
)
from baton.core.commands import Assign as AssignCommand
from baton.core.errors import BatonError, DuplicateRequest, InvariantError, Unavailable, WorkerLost
from baton.core.events import HandedOver, Parked, SequenceEnded, StepEvents
from baton.core.request import GenerateRequest, SequenceId
from baton.rpc.streams import LinkLost, MessageStream
from coordinator.live import Live
from coordinator.mint import Mint
from coordinator.policy.dispatch import Dispatcher, Ticket, WorkerView
from coordinator.policy.journal import Journal
from coordinator.policy.registry import Registry, WorkerRecord

log = logging.getLogger("baton.coordinator")
TICK_S = 0.1
ToWorker = Welcome | Command | HeartbeatAck
_MAX_ATTEMPT = 1 << 30  # an int32 on the wire


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
        self._mint = Mint(self.registry)
        self._lease_s = lease_s
        self._live: dict[str, Live] = {}
        self._outgoing: dict[str, asyncio.Queue[ToWorker]] = {}
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
        if request.request_id in self._live:  # perhaps over, and not yet read to its end
            raise DuplicateRequest(f"request {request.request_id} is already in flight", param="request_id")
        now = time.monotonic()
        live = Live(Journal(replace(request, attempt=self._next_attempt())), now, now + request.deadline_s)
        if request.deadline_s <= 0:
            raise live.late()
        goes_on = request.max_tokens - len(request.output) > 1
        ticket = Ticket(request.request_id, request.num_prefill_tokens, request.max_total_tokens, needs_decode=goes_on)
        self.dispatcher.submit(ticket)
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
            live.targets = self._mint.targets(live.sequence, placement, live.deadline_at)
            self._start(live)

    def _start(self, live: Live) -> None:
        remaining = max(live.deadline_at - time.monotonic(), 0.001)
        self._send(live.prefill_worker, Prefill(replace(live.request, deadline_s=remaining), live.targets))

    def end(self, request_id: str, reason: str) -> None:
        """The front end is done with a request, well or not: both pools hear of it at once."""
        if (live := self._live.pop(request_id, None)) is not None:
            self._settle(live, reason)
            self.dispatch()

    def _settle(self, live: Live, reason: str) -> None:
        """Both pools hear of the end, and what the request held is free: now, however slowly its client reads."""
        if live.settled:
            return
        live.settled = True
        left = max(live.deadline_at - time.monotonic(), 1.0)
        for worker in live.workers():
            if live.journal.finish is None or reason != "done":
                self._send(worker, Abort(live.sequence, reason, tombstone_s=left))
            self._send(worker, Release((live.sequence,)))
        self.dispatcher.finish(live.request.request_id)

    def _fail(self, live: Live, error: BatonError) -> None:
        live.fail(error)
        if live.error is not None:
            self._settle(live, error.code)

    def _send(self, worker: str, command: ToWorker) -> None:
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
        fresh = self._incarnations.get(worker) != incarnation
        if fresh:
            self.dispatcher.add_worker(WorkerView.of(first))
        following = () if fresh else tuple(self._following(worker))
        queue: asyncio.Queue[ToWorker] = asyncio.Queue()
        queue.put_nowait(Welcome(self.run_id, self._lease_s, self._lease_s / 4, self._mint.key, following))
        self._outgoing[worker], self._incarnations[worker] = queue, incarnation
        self.dispatcher.set_ready(worker, not self.draining)
        log.info("%s worker %s joined (incarnation %d)", first.role, worker, incarnation)
        sender = asyncio.create_task(self._pump(stream, queue, first), name=f"commands to {worker}")
        try:
            self.dispatch()
            while (message := await stream.receive()) is not None and self._outgoing.get(worker) is queue:
                if not self._on(worker, incarnation, message):
                    break
        finally:
            sender.cancel()
            self._detach(queue, first, stream)

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
            if self.registry.disconnected(worker, join.incarnation, time.monotonic()):
                self.dispatcher.set_ready(worker, False)
                log.warning("session of %s broke: %s", worker, stream.ended)

    def _on(self, worker: str, incarnation: int, message: object) -> bool:
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
            if (live := self._find(worker, t.sequence)) is None:
                continue
            try:
                live.accept(t.sequence.attempt, t.first_index, t.tokens)
            except InvariantError as e:
                self._fail(live, e)
                continue
            if worker == live.prefill_worker:
                self.dispatcher.prefilled(t.sequence.request_id)
                live.stage = "decode"
            else:
                live.decode_worker = worker  # it speaks, though its hand-over may not have been told yet
            if live.journal.finish is not None:
                self._settle(live, "done")
            elif live.parked_since:
                self._reassign(live)
        for over in events.handed_over:
            self._handed_over(worker, over)
        for parked in events.parked:
            self._parked(worker, parked)
        for ended in events.ended:
            self._ended(worker, ended)
        if events.tokens or events.ended or events.handed_over:
            self.dispatch()

    def _find(self, worker: str, sequence: SequenceId) -> Live | None:
        live = self._live.get(sequence.request_id)
        if live is None or live.sequence != sequence or live.error is not None:
            self.stale_events += 1
            self._send(worker, Release((sequence,)))
            return None
        return live

    def _handed_over(self, worker: str, over: HandedOver) -> None:
        live = self._find(worker, over.sequence)
        if live is None:
            return
        live.handed_over, live.decode_worker = True, over.decode_worker
        live.add_stamps(over.stamps)
        self.dispatcher.moved(over.sequence.request_id, over.decode_worker)
        self.dispatcher.handed_over(over.sequence.request_id)
        taker = next((t.incarnation for t in live.targets if t.worker_id == over.decode_worker), None)
        if self._incarnations.get(over.decode_worker) != taker:
            self._fail(live, WorkerLost(f"worker {over.decode_worker} was lost as it took the KV", retry_after_s=1))

    def _ended(self, worker: str, ended: SequenceEnded) -> None:
        live = self._find(worker, ended.sequence)
        if live is None:
            return
        live.add_stamps(ended.stamps)
        if ended.reason == "error":
            here = worker == (live.decode_worker if live.handed_over else live.prefill_worker)
            if ended.code == "unknown_sequence" and here and live.stage == "prefill":
                self._start(live)  # its session broke before the command had arrived
            elif here or ended.code not in ("unknown_sequence", "worker_lost"):
                self._fail(live, live.error_of(ended))
            elif ended.code == "worker_lost" and live.prefill_worker not in self._outgoing:
                self._fail(live, live.error_of(ended))  # else the prefill worker parks it, and it goes elsewhere
        elif live.journal.finish is None:
            self._fail(live, WorkerLost(f"{worker} ended the request: {ended.reason}", retry_after_s=1))

    def _parked(self, worker: str, parked: Parked) -> None:
        live = self._find(worker, parked.sequence)
        if live is None or live.over:
            return
        log.warning("KV of %s is parked: %s", parked.sequence, parked.reason)
        if (error := live.park(parked.reason)) is not None:
            self._fail(live, error)
        elif live.journal.attempt == live.request.attempt:
            self._reassign(live)  # later times wait for the tick: whoever refused just now would refuse again

    def _reassign(self, live: Live) -> None:
        """Names new decode workers for parked KV under the next attempt, when one has room. Not before the first
        token is here (it comes under the present attempt), nor while the prefill worker cannot be told."""
        if live.journal.next_index > len(live.request.output) + 1:  # another one might not repeat what has been told
            self._fail(live, WorkerLost("the link to its decode worker broke after that had begun", retry_after_s=1))
        if live.over or live.stage != "decode" or live.prefill_worker not in self._outgoing:
            return
        placement = self.dispatcher.reassign(live.request.request_id, frozenset())
        if placement is None:
            return
        old = live.sequence
        for target in live.targets:  # one of them may have all KV and run, with only its last word lost
            self._send(target.worker_id, Abort(old, "its KV goes elsewhere", tombstone_s=0.0))
        live.journal.begin_attempt(max(self._next_attempt(), live.journal.attempt + 1))
        live.parked_since = 0.0
        live.decode_worker = placement.decode or ""
        live.targets = self._mint.targets(live.sequence, placement, live.deadline_at)
        self._send(placement.prefill, AssignCommand(old, live.targets, live.journal.attempt))

    def _following(self, worker: str) -> Iterable[Following]:
        for live in self._live.values():
            if live.dispatched_at and not live.settled and worker in live.workers():
                yield Following(live.sequence, live.journal.next_index)

    def _lost(self, record: WorkerRecord, why: str) -> None:
        log.warning("%s worker %s is lost: %s", record.role, record.worker_id, why)
        self._gone(record.worker_id, why)

    def _gone(self, worker: str, why: str) -> None:
        self._incarnations.pop(worker, None)
        for request_id in self.dispatcher.remove_worker(worker):
            if live := self._live.get(request_id):
                self._fail(live, WorkerLost(f"worker {worker} was lost in stage {live.stage}: {why}", retry_after_s=1))

    # Time.

    async def tick(self) -> None:
        """Leases, parked KV and the queue, looked after for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for record in self.registry.expire(now):
                self._outgoing.pop(record.worker_id, None)
                self._lost(record, f"silent for {self._lease_s:g} s")
            missing = self.dispatcher.missing_pool(even_unready=True)
            for live in self._live.values():
                if now >= live.deadline_at:
                    self._fail(live, live.late())  # its reader would find out, but may be slow
                elif missing is not None and (not live.dispatched_at or live.parked_since):
                    what, code = f"no {missing} worker is left", f"no_{missing}_worker"
                    self._fail(live, Unavailable(what, code=code, retry_after_s=2))
                elif live.parked_since:
                    self._reassign(live)
            self.dispatch()

    async def drain(self, timeout_s: float) -> None:
        """No new requests; running ones finish; then the workers leave. Each wait ends with `timeout_s`."""
        self.draining = True
        deadline = time.monotonic() + timeout_s
        log.info("draining: %d requests in flight", len(self._live))
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for live in self._live.values():
            self._fail(live, Unavailable("the cluster stops and the request did not finish in time", code="draining"))
        for worker in list(self._outgoing):
            self.registry.draining(worker, time.monotonic())
            self._send(worker, Drain(max(deadline - time.monotonic(), 1.0)))
        patience = time.monotonic() + 5.0
        while self._outgoing and time.monotonic() < patience:
            await asyncio.sleep(0.02)
