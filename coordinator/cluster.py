"""The cluster as the coordinator acts on it: where requests go, what workers say of them, what becomes of them.

The Dispatcher decides; Members knows the workers; here commands are sent and events taken in. One event loop owns all
of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from baton.core.commands import Abort, Following, Prefill, Release
from baton.core.commands import Assign as AssignCommand
from baton.core.errors import BatonError, DuplicateRequest, InvariantError, KVCorrupt, Unavailable, WorkerLost
from baton.core.events import HandedOver, Parked, SequenceEnded, StepEvents
from baton.core.prefix_keys import HINT_BYTES, KeyChain
from baton.core.request import ChoiceId, GenerateRequest, SequenceId
from coordinator.live import Live
from coordinator.members import Members
from coordinator.mint import Mint
from coordinator.policy.dispatch import Dispatcher
from coordinator.policy.journal import Journal
from coordinator.policy.own_model import OwnModel
from coordinator.policy.registry import Registry
from coordinator.policy.ticket import Ticket
from coordinator.policy.worker_view import Prefix

log = logging.getLogger("baton.coordinator")
TICK_S = 0.1
_MAX_ATTEMPT = 1 << 30  # an int32 on the wire


class Cluster:
    """Complete state: the members, the dispatcher, the live requests, and the number of the last attempt: no two
    requests share one, so a client may use its request id again at once, while workers still bury, or speak of, the
    sequence that had it before."""

    def __init__(
        self,
        lease_s: float,
        max_queued_requests: int,
        max_queued_tokens: int,
        own_model: OwnModel | None = None,
        token: str = "",
    ) -> None:
        self.dispatcher = Dispatcher(max_queued_requests, max_queued_tokens)
        self._mint = Mint(registry := Registry(lease_s, own_model))
        self.members = Members(self, self.dispatcher, registry, self._mint.key, token)
        self.draining = False
        self.stale_events = 0
        self._live: dict[ChoiceId, Live] = {}
        self._attempt = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def registry(self) -> Registry:
        return self.members.registry

    # Requests.

    def admit(self, request: GenerateRequest) -> Live:
        """Queues one choice of a request and dispatches what can start. Choice 0 speaks for the request: it may be
        refused for want of room, and it stays known until the others have ended; they go ahead of what waits.

        Raises:
            BatonError: refused; nothing was done for it.
        """
        if self.draining:
            raise Unavailable("the cluster is draining", code="draining", retry_after_s=5)
        if request.choice_id in self._live:  # perhaps over, and not yet read to its end
            raise DuplicateRequest(f"request {request.request_id} is already in flight", param="request_id")
        now = time.monotonic()
        live = Live(Journal(replace(request, attempt=self._next_attempt())), now, now + request.deadline_s)
        if request.deadline_s <= 0:
            raise live.late()
        if request.choice:
            self.dispatcher.submit_first(self._ticket(live))
        else:
            self.dispatcher.submit(self._ticket(live))
        self._live[request.choice_id] = live
        self.dispatch()
        return live

    def _ticket(self, live: Live) -> Ticket:
        request = live.request
        goes_on = request.max_tokens - len(request.output) > 1
        total, prefix = request.max_total_tokens, self._prefix(request)
        return Ticket(request.choice_id, request.num_prefill_tokens, total, needs_decode=goes_on, prefix=prefix)

    def _prefix(self, request: GenerateRequest) -> Prefix:
        """The blocks that a worker may hold already; the last token is computed in any case."""
        facts = self.registry.facts()
        tokens = request.prompt + request.output
        prefix: dict[int, tuple[bytes, ...]] = {}
        if facts is None:
            return prefix
        for size in self.dispatcher.held_block_sizes:
            chain = KeyChain(facts.model_digest, request.cache_salt, size)
            keys = chain.grow(lambda start, end: tokens[start:end], len(tokens) - 1)
            prefix[size] = tuple(key[:HINT_BYTES] for key in keys)
        return prefix

    def _next_attempt(self) -> int:
        self._attempt = self._attempt % _MAX_ATTEMPT + 1
        return self._attempt

    def dispatch(self) -> None:
        for placement in self.dispatcher.place():
            live = self._live.get(placement.name)
            if live is None:
                raise InvariantError(f"{placement.name} was placed and is not live")
            live.dispatch(time.monotonic())
            live.prefill_worker, live.decode_worker = placement.prefill, placement.decode or ""
            live.targets = self._mint.targets(live.sequence, placement, live.deadline_at)
            self._start(live)

    def _start(self, live: Live) -> None:
        remaining = max(live.deadline_at - time.monotonic(), 0.001)
        self.members.send(live.prefill_worker, Prefill(replace(live.request, deadline_s=remaining), live.targets))

    def end(self, live: Live, reason: str) -> None:
        """The front end has all of a choice, or wants no more of it: both pools hear of it at once."""
        self._settle(live, reason)
        self.dispatch()

    def forget(self, live: Live) -> None:
        """Its request may be sent again under the same id."""
        if self._live.get(live.request.choice_id) is live:
            del self._live[live.request.choice_id]

    def _settle(self, live: Live, reason: str) -> None:
        """Both pools hear of the end, and what the request held is free: now, however slowly its client reads."""
        if live.settled:
            return
        live.settled = True
        self._withdraw(live, "" if live.journal.finish is not None and reason == "done" else reason)
        self.dispatcher.finish(live.request.choice_id)

    def _withdraw(self, live: Live, reason: str) -> None:
        """The workers of the present attempt forget it; with a reason they end it."""
        left = max(live.deadline_at - time.monotonic(), 1.0)
        for worker in live.workers():
            if reason:
                self.members.send(worker, Abort(live.sequence, reason, tombstone_s=left))
            self.members.send(worker, Release((live.sequence,)))

    def _fail(self, live: Live, error: BatonError) -> None:
        live.fail(error)
        if live.error is not None:
            self._settle(live, error.code)

    # What workers say.

    def events(self, worker: str, events: StepEvents) -> None:
        for t in events.tokens:
            if (live := self._find(worker, t.sequence)) is None:
                continue
            try:
                live.accept(t)
            except InvariantError as e:
                self._fail(live, e)
                continue
            self.dispatcher.produced(t.sequence.choice_id, live.journal.next_index - len(live.request.output))
            if worker == live.prefill_worker:
                self.dispatcher.prefilled(t.sequence.choice_id)
                live.stage = "decode"
            else:
                live.speculation = t.speculation or live.speculation
                live.decode_worker = worker  # it speaks, though its hand-over may not have been told yet
                self.dispatcher.moved(t.sequence.choice_id, worker)
                self.dispatcher.handed_over(t.sequence.choice_id)
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
        if events.block_news is not None:
            self.dispatcher.news(worker, events.block_news)
        if events.tokens or events.ended or events.handed_over:
            self.dispatch()

    def _find(self, worker: str, sequence: SequenceId) -> Live | None:
        live = self._live.get(sequence.choice_id)
        if live is None or live.sequence != sequence or live.error is not None:
            self.stale_events += 1
            self.members.send(worker, Release((sequence,)))
            return None
        return live

    def _handed_over(self, worker: str, over: HandedOver) -> None:
        live = self._find(worker, over.sequence)
        if live is None:
            return
        live.handed_over, live.decode_worker = True, over.decode_worker
        live.fresh.set()
        live.add_stamps(over.stamps)
        self.dispatcher.moved(over.sequence.choice_id, over.decode_worker)
        self.dispatcher.handed_over(over.sequence.choice_id)
        taker = next((t.incarnation for t in live.targets if t.worker_id == over.decode_worker), None)
        if self.registry.has_left(over.decode_worker, taker):
            self._again(live, f"{over.decode_worker} took the KV and left")
        elif self.members.incarnation(over.decode_worker) != taker:
            self._fail(live, WorkerLost(f"worker {over.decode_worker} was lost as it took the KV", retry_after_s=1))

    def _ended(self, worker: str, ended: SequenceEnded) -> None:
        live = self._find(worker, ended.sequence)
        if live is None:
            return
        live.add_stamps(ended.stamps)
        if ended.reason == "error":
            here = live.is_at(worker)
            if ended.code == "unknown_sequence" and here and live.stage == "prefill":
                self._start(live)  # its session broke before the command had arrived
            elif ended.code in ("draining", "abandoned") or (ended.code == "unknown_sequence" and here):
                self._again(live, ended.message)
            elif ended.code == KVCorrupt.code and not live.recomputed:
                live.recomputed = True
                self._again(live, ended.message)  # computed once more, from blocks that nobody had
            elif here or ended.code not in ("unknown_sequence", "worker_lost"):
                self._fail(live, live.error_of(ended))
            elif ended.code == "worker_lost" and not self.members.connected(live.prefill_worker):
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
        if live.over or live.stage != "decode" or not self.members.connected(live.prefill_worker):
            return
        placement = self.dispatcher.reassign(live.request.choice_id, frozenset())
        if placement is None:
            return
        old = live.sequence
        for target in live.targets:  # one of them may have all KV and run, with only its last word lost
            self.members.send(target.worker_id, Abort(old, "its KV goes elsewhere", tombstone_s=0.0))
        live.journal.begin_attempt(max(self._next_attempt(), live.journal.attempt + 1))
        live.parked_since = 0.0
        live.decode_worker = placement.decode or ""
        live.targets = self._mint.targets(live.sequence, placement, live.deadline_at)
        self.members.send(placement.prefill, AssignCommand(old, live.targets, live.journal.attempt))

    def following(self, worker: str) -> tuple[Following, ...]:
        """The sequences that are followed at a worker, and the next output index of each."""
        here = (v for v in self._live.values() if v.dispatched_at and not v.settled and worker in v.workers())
        return tuple(Following(live.sequence, live.journal.next_index, live.is_at(worker)) for live in here)

    def gone(self, worker: str, why: str, *, drained: bool) -> None:
        """A worker is not there any more: what needed it ends, or goes elsewhere when the worker gave it back. What is
        still at prefill goes on there: that worker gives the KV to another one."""
        for name in self.dispatcher.remove_worker(worker):
            if (live := self._live.get(name)) is None:
                continue
            if live.dispatched_at and worker != live.prefill_worker and not live.decoding:
                continue
            if not drained:
                self._fail(live, WorkerLost(f"worker {worker} was lost in stage {live.stage}: {why}", retry_after_s=1))
            elif not live.dispatched_at:
                what = f"no worker that is left after {worker} can hold the request"
                self._fail(live, Unavailable(what, code="exceeds_pool"))
            else:
                self._again(live, why)
        self.dispatch()

    def _again(self, live: Live, why: str) -> None:
        """Begins a request anew under the next attempt: prompt and journal are prefilled on whatever workers are next,
        and it goes on at the next index."""
        if live.over or live.settled:
            return
        log.info("%s goes elsewhere at index %d: %s", live.sequence, live.journal.next_index, why)
        self._withdraw(live, why)
        self.dispatcher.finish(live.request.choice_id)
        live.begin_again(self._next_attempt(), time.monotonic())
        try:
            self.dispatcher.submit_first(self._ticket(live))
        except BatonError as e:
            self._fail(live, e)

    # Time.

    async def tick(self) -> None:
        """Leases, parked KV and the queue, looked after for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.members.expire()
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
        await self.members.drain_all(max(deadline - time.monotonic(), 1.0))
