"""The state machine of every request. Pure: it receives events and `now`, and returns actions.

    QUEUED    waits for a prefill worker and a decode worker (policy.dispatch)
    PREFILL   at a prefill worker; its first token is not known yet
    HANDOVER  the first token is known; the KV is on its way to a decode worker
    PARKED    no decode worker accepted the KV: it stays at the prefill worker until one has room
    DECODE    a decode worker has all KV and generates
    ENDED     finished, failed, or its client disconnected

A request survives the loss of its workers. When the worker that runs it is lost, gives it back, or cannot hand it over,
the request is rescheduled: it returns to QUEUED under the next attempt, with the journal as its output so far, and
generation continues at the next index. KV that is still at the prefill worker is offered to another decode worker
first. Events of earlier attempts are stale. A request that no present worker can serve ends after `hold_s`.

Whether a request ended its worker cannot be determined from outside. A request that was running on SUSPECT_DEATHS
workers when they were lost may be the cause: from then on it is computed in steps of its own, announced by its worker
(`StepEvents.alone`), so that a loss in such a step concerns no other request, and a loss in another step not this one.
It ends with an error when it was alone in its step at ALONE_DEATHS losses, or at `max_deaths` losses in all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from baton.core.codes import ErrorCode
from baton.core.commands import Abort, ReleaseRecords, TrackedSequence
from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    DuplicateRequest,
    GrammarLimit,
    HandoffError,
    InvalidRequest,
    InvariantError,
    KVCorrupt,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from baton.core.events import (
    HandedOver,
    Parked,
    SequenceEnded,
    StageStamps,
    StepEvents,
    TokenEvent,
)
from baton.core.prefix_keys import HINT_BYTES, KeyChain
from baton.core.request import ChoiceId, GenerateRequest, SequenceId
from coordinator.policy.dispatch import Dispatcher, Placement, Ticket
from coordinator.policy.in_flight import (
    AT_PREFILL,
    LEGAL_MOVES,
    WAITING,
    Action,
    AssignTargets,
    Entered,
    Log,
    Request,
    Send,
    Stage,
    StartPrefill,
    WorkerInstance,
)
from coordinator.policy.journal import Journal
from coordinator.policy.pool import Prefix
from coordinator.policy.workers import WorkerTable

ALONE_DEATHS = 2
"""One could be a kill from outside that coincides with its step."""
MAX_TIMES_PARKED = 30
REOFFER_BACKOFF_S = 0.1, 1.0  # delay after the second parking, and its maximum; doubled with each
_MAX_ATTEMPT = 1 << 30  # an int32 on the wire
# The decode worker has started, but the prefill worker saw the hand-over fail and made it end the sequence.
_LOST_ACK = "the link to its decode worker broke before the last acknowledgement"


# The error that a client receives for an error code of a worker; any other code is a bug of this project.
_WORKER_ERRORS: dict[ErrorCode, type[BatonError]] = {
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.KV_CORRUPT: KVCorrupt,
    ErrorCode.WORKER_LOST: WorkerLost,
    ErrorCode.HANDOFF_FAILED: HandoffError,
    ErrorCode.STALE_HANDLE: HandoffError,
    ErrorCode.DRAINING: Unavailable,
    ErrorCode.GRAMMAR_FAILED: InvalidRequest,
    ErrorCode.GRAMMAR_LIMIT: GrammarLimit,
    ErrorCode.PROMPT_EXCEEDS_POOL: Unavailable,
}


class InFlightCounts(NamedTuple):
    """Requests and choices in flight, and how many of each are queued: a request is while all its choices are."""

    requests: int
    queued: int
    choices: int
    queued_choices: int


class Requests:
    """Complete state: the requests by choice; those that wait for a worker; a time before which no deadline of any
    request passes; the request that each worker computes alone now; the dispatcher and its worker table; the last
    numbers assigned (`_attempt` is global: no two requests share a value, so a request id can be reused immediately);
    whether the cluster is draining; and counters. Methods return actions, which the caller executes in order."""

    def __init__(
        self,
        workers: WorkerTable,
        max_queued_requests: int,
        max_queued_tokens: int,
        hold_s: float = 30.0,
        max_deaths: int = 5,
    ) -> None:
        self.workers = workers
        self.dispatcher = Dispatcher(workers, max_queued_requests, max_queued_tokens)
        self.draining = False
        self.stale_events = 0
        self.rescheduled = 0
        self.reassigned = 0
        self._hold_s, self._max_deaths = hold_s, max_deaths
        self._alone: dict[str, ChoiceId] = {}
        self._requests: dict[tuple[str, int], Request] = {}  # by ChoiceId
        self._waiting: dict[ChoiceId, Request] = {}
        self._no_deadline_before = math.inf
        self._attempt = 0
        self._age = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __repr__(self) -> str:
        stages = [r.stage for r in self._requests.values()]
        return "<Requests " + ", ".join(f"{stages.count(s)} {s.value}" for s in Stage if s in stages) + ">"

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def counts(self) -> InFlightCounts:
        started = {r.name.request_id for r in self._requests.values() if r.stage is not Stage.QUEUED}
        names = {r.name.request_id for r in self._requests.values()}
        return InFlightCounts(len(names), len(names) - len(started), len(self._requests), self.dispatcher.num_queued)

    def get(self, name: ChoiceId) -> Request | None:
        return self._requests.get(name)

    # From the front.

    def admit(self, request: GenerateRequest, now: float, choices: int = 1) -> tuple[Request, list[Action]]:
        """Queues one choice and dispatches what can start. Choice 0 represents its request: it is refused if the queue
        has no room for all `choices`, and stays registered until the other choices, which have its age, have ended.

        Raises:
            BatonError: the request is refused, and was not queued.
        """
        if self.draining and not (request.choice and ChoiceId(request.request_id) in self._requests):
            raise Unavailable("the cluster is draining", code=ErrorCode.DRAINING, retry_after_s=5)
        if request.choice_id in self._requests:  # it may have ended with output still unread
            raise DuplicateRequest(f"request {request.request_id} is already in flight", param="request_id")
        first = self._requests.get(ChoiceId(request.request_id)) if request.choice else None
        self._age += first is None
        attempt = self._next_attempt()
        r = Request(
            Journal(replace(request, attempt=attempt)),
            self._age if first is None else first.age,
            started_at=now,
            deadline_at=now + request.deadline_s,
            queued_at=now,
        )
        if request.deadline_s <= 0:
            raise r.late()
        if first is None:
            self.dispatcher.submit(self._ticket(r), choices)
        else:
            self.dispatcher.submit_later(self._ticket(r), first.name)
        self._requests[request.choice_id] = self._waiting[request.choice_id] = r
        self._no_deadline_before = min(self._no_deadline_before, r.deadline_at)
        return r, self._place(now)

    def end(self, r: Request, reason: str, now: float) -> list[Action]:
        """Ends a choice of which the front needs no more output, and notifies both pools immediately."""
        return [*self._end(r, reason, now), *self._place(now)]

    def forget(self, r: Request) -> None:
        """Removes a request, so that its id can be reused."""
        if self._requests.get(r.name) is r:
            del self._requests[r.name]
            self.dispatcher.forget(r.name)

    # From workers.

    def on_events(self, worker: str, events: StepEvents, now: float) -> list[Action]:
        actions: list[Action] = []
        if events.alone is not None:
            self._alone[worker] = events.alone.choice_id
        elif events.step_id:
            self._alone.pop(worker, None)
        queued = self.dispatcher.num_queued
        for token in events.tokens:
            self._on_tokens(worker, token, now, actions)
        for over in events.handed_over:
            actions += self._on_handed_over(worker, over, now)
        for parked in events.parked:
            actions += self._on_parked(worker, parked, now)
        for ended in events.ended:
            actions += self._on_ended(worker, ended, now)
        known = self.workers.get(worker)
        if events.kv_cache_events is not None and known is not None:
            known.update_held(events.kv_cache_events)
        # Tokens from decode free no room; blocks that are free there nevertheless are found at the next tick.
        prefilled = events.tokens and known is not None and known.role == "prefill"
        rescheduled = self.dispatcher.num_queued > queued
        if prefilled or rescheduled or events.ended or events.handed_over or events.parked:
            actions += self._place(now)
        return actions

    def worker_joined(self, now: float) -> list[Action]:
        """Dispatches what can start now that a worker has joined or redialled."""
        return self._place(now)

    def on_worker_lost(self, worker: str, why: str, now: float, *, drained: bool) -> list[Action]:
        """Handles the loss of a worker: reschedules the requests that depend on it. A request whose KV is still on its
        way to that worker is left alone: the prefill worker parks the KV. A drained worker gave its requests back,
        which is not a death."""
        self.dispatcher.forget_worker(worker)
        alone = self._alone.pop(worker, None)
        actions: list[Action] = []
        for r in list(self._requests.values()):
            if r.ended:
                continue
            if worker == r.prefill_worker and r.stage in AT_PREFILL:
                ran = r.stage is Stage.PREFILL
            elif worker == r.decode_worker and r.stage is Stage.DECODE and r.journal.finish is None:
                ran = True
            elif worker == r.prefill_worker and r.stage is Stage.DECODE and self._awaits_prompt_logprobs(r):
                ran = False
            else:
                continue
            if ran and not drained and (r.name == alone if r.alone else alone is None):
                r.alone_deaths += r.alone
                how = ", alone in its step" if r.alone else ""
                r.deaths.append(f"{worker} ({why}, stage {r.stage.value}{how})")
            actions += self._reschedule(r, f"{worker}: {why}", now)
        self._update_servable(now)
        return actions + self._place(now)

    def oldest_queued_s(self, now: float) -> float:
        """Returns how long the oldest queued request has waited; 0.0 if none is queued."""
        return now - min((r.queued_at for r in self._waiting.values() if r.stage is Stage.QUEUED), default=now)

    def tracked(self, worker: str) -> tuple[TrackedSequence, ...]:
        """Returns the sequences that this coordinator expects at a worker, with the next output index of each."""
        here = (r for r in self._requests.values() if r.stage not in (Stage.QUEUED, Stage.ENDED))
        return tuple(
            TrackedSequence(r.sequence, r.journal.next_index, r.runs_at(worker)) for r in here if worker in r.workers()
        )

    # Time.

    def tick(self, now: float) -> list[Action]:
        """Handles deadlines, unservable requests, parked KV and the queue. Called about every 0.1 s."""
        actions: list[Action] = []
        self._update_servable(now)
        if now >= self._no_deadline_before:  # scanning 10,000 requests blocks the loop for 4 ms
            for r in [r for r in self._requests.values() if now >= r.deadline_at and not r.ended]:
                actions += self._fail(r, r.late(), now)
            open_deadlines = (r.deadline_at for r in self._requests.values() if not r.ended)
            self._no_deadline_before = min(open_deadlines, default=math.inf)
        for r in list(self._waiting.values()):
            if r.unservable is not None and now - r.unservable_since >= self._hold_s:
                what, code = r.unservable
                actions += self._fail(r, Unavailable(what, code=code, retry_after_s=2), now)
            elif r.stage is Stage.PARKED and now >= r.offer_at:
                actions += self._assign(r, now)
        return actions + self._place(now)

    def drain(self, now: float) -> list[Action]:
        """Fails the requests that have not finished by the end of a drain."""
        error = Unavailable("the cluster is draining and the request did not finish in time", code=ErrorCode.DRAINING)
        return [action for r in list(self._requests.values()) for action in self._fail(r, error, now)]

    def check(self) -> None:
        """Raises InvariantError if the dispatcher or `_waiting` does not match the requests in flight."""
        self.dispatcher.check()
        if self._waiting != {name: r for name, r in self._requests.items() if r.stage in WAITING}:
            raise InvariantError(f"{self!r} does not match the waiting requests: {[*self._waiting]}")
        stages = [r.stage for r in self._requests.values()]
        queued, ended = stages.count(Stage.QUEUED), stages.count(Stage.ENDED)
        if (self.dispatcher.num_queued, self.dispatcher.num_active) != (queued, len(stages) - queued - ended):
            raise InvariantError(f"{self!r} does not match {self.dispatcher!r}")
        if unknown := self.dispatcher.incomplete - self._requests.keys():
            raise InvariantError(f"room is reserved for choices of requests that have ended: {unknown}")

    # Events, one by one.

    def _on_tokens(self, worker: str, event: TokenEvent, now: float, actions: list[Action]) -> None:
        """Handles the only event that arrives for every sequence in every step; it appends to the step's `actions`."""
        r = self._find(event.sequence)
        if r is None or r.ended:
            actions += self._stale(worker, event.sequence)
            return
        journal = r.journal
        if event.stamps is not None:
            _add_stamps(r, event.stamps)
        if event.cached_tokens and not journal.request.output:
            r.cached_tokens = max(r.cached_tokens, event.cached_tokens)
        try:
            verdict = journal.accept(
                event.sequence.attempt, event.first_index, event.tokens, event.logprobs, event.prompt_logprobs
            )
        except ProtocolError as e:
            actions += self._fail(r, e, now)
            return
        if verdict == "appended":
            r.first_token_at = r.first_token_at or now
        if verdict == "appended" or event.prompt_logprobs:
            actions.append(r.notify)
        was_parked = r.stage is Stage.PARKED  # then a token of the decode worker means that it has all KV after all
        self.dispatcher.produced(r.name, len(journal.tokens) - len(journal.request.output))
        if worker == r.prefill_worker:
            self.dispatcher.prefilled(r.name)
            if r.stage is Stage.PREFILL:
                self._move(r, Stage.PARKED if r.refused else Stage.HANDOVER, now)
        else:
            if event.speculation is not None:
                before = r.earlier_speculation
                r.speculation = event.speculation if before is None else before + event.speculation
            self._decoding(r, worker, now)
        if journal.finish is not None:
            if not self._awaits_prompt_logprobs(r):  # prefill sends them, maybe after decode's last token
                actions += self._end(r, "its answer is complete" if was_parked else "", now)
        elif r.stage is Stage.PARKED:
            actions += self._assign(r, now)
        elif was_parked:
            actions += self._reschedule(r, _LOST_ACK, now)

    def _on_handed_over(self, worker: str, over: HandedOver, now: float) -> list[Action]:
        r = self._find(over.sequence)
        if r is None:
            return self._stale(worker, over.sequence)
        _add_stamps(r, over.stamps)
        if r.ended:
            return [Send(worker, ReleaseRecords((over.sequence,)))]
        self._decoding(r, over.decode_worker, now)
        taker = next((t.incarnation for t in r.targets if t.worker == over.decode_worker), None)
        if self.workers.has_left(over.decode_worker, taker):
            return self._reschedule(r, f"{over.decode_worker} received the KV and left", now)
        if self.workers.incarnation(over.decode_worker) != taker:
            r.deaths.append(f"{over.decode_worker} (lost during the hand-over)")
            return self._reschedule(r, f"{over.decode_worker} was lost during the hand-over", now)
        return [r.notify]

    def _decoding(self, r: Request, worker: str, now: float) -> None:
        """Records that a decode worker has all KV; either worker may report it first."""
        if r.stage is Stage.DECODE and r.decode_worker == worker:
            return
        r.decode_worker = worker
        if r.stage is not Stage.DECODE:
            self._move(r, Stage.DECODE, now)
        self.dispatcher.moved(r.name, worker)
        self.dispatcher.handed_over(r.name)

    def _on_parked(self, worker: str, parked: Parked, now: float) -> list[Action]:
        r = self._find(parked.sequence)
        if parked.sequence.choice_id not in self._requests or (r is not None and r.ended):
            # The worker keeps KV until aborted. Earlier attempts are not aborted: the current one may offer their KV.
            drop = Abort(parked.sequence, "no request needs its KV", tombstone_s=0.0)
            return [Send(worker, drop), *self._stale(worker, parked.sequence)]
        if r is None:
            return self._stale(worker, parked.sequence)
        if r.stage is Stage.PARKED or r.refused:
            return []  # repeated after a redial
        actions: list[Action] = [Log(f"KV of {r.sequence} is parked: {parked.reason}")]
        if r.stage is Stage.DECODE:
            return actions + self._reschedule(r, _LOST_ACK, now)
        r.times_parked += 1
        first, most = REOFFER_BACKOFF_S
        r.offer_at = now if r.times_parked == 1 else now + min(first * 2 ** (r.times_parked - 2), most)
        if r.times_parked > MAX_TIMES_PARKED:
            what = f"KV could not be handed over in {MAX_TIMES_PARKED} tries: {parked.reason}"
            return actions + self._fail(r, HandoffError(what, retry_after_s=1), now)
        if r.stage is Stage.PREFILL:
            r.refused = True  # the first token is still to arrive under this attempt
            return actions
        self._move(r, Stage.PARKED, now)
        if r.journal.attempt == r.request.attempt:
            actions += self._assign(r, now)  # later offers wait for `offer_at`, since the workers have just refused
        return actions

    def _on_ended(self, worker: str, ended: SequenceEnded, now: float) -> list[Action]:
        r = self._find(ended.sequence)
        if r is None:
            return self._stale(worker, ended.sequence)
        _add_stamps(r, ended.stamps)
        if r.ended or (ended.reason != "error" and r.journal.finish is not None):
            return []
        here = r.runs_at(worker)
        if ended.reason != "error":
            r.deaths.append(f"{worker} (ended the request: {ended.reason})")
            return self._reschedule(r, f"{worker} ended the sequence early: {ended.reason}", now)
        targets_unchanged = all(self.workers.incarnation(t.worker) == t.incarnation for t in r.targets)
        unknown = ended.code is ErrorCode.UNKNOWN_SEQUENCE
        if unknown and here and r.stage is Stage.PREFILL and targets_unchanged:
            return [self._start(r, now)]  # its session broke before the command arrived
        if ended.code in (ErrorCode.DRAINING, ErrorCode.ABANDONED) or (unknown and here):
            return self._reschedule(r, ended.message, now)
        if ended.code in (ErrorCode.KV_CORRUPT, ErrorCode.HANDOFF_FAILED) and not r.recomputed:
            r.recomputed = True
            return self._reschedule(r, ended.message, now)  # recomputed once; a second failure ends the request
        if not here and (unknown or ended.code is ErrorCode.WORKER_LOST):
            return []  # the prefill worker has the KV and parks it; if it is lost too, `on_worker_lost` follows
        code = ended.code or ErrorCode.INTERNAL_ERROR
        kind = _WORKER_ERRORS.get(code, BatonError)
        return self._fail(r, kind(f"{ended.message} (stage {r.stage.value})", code=code), now)

    def _find(self, sequence: SequenceId) -> Request | None:
        """Returns the request of a worker's event; None if it is unknown or the event is of an earlier attempt."""
        r = self._requests.get(sequence[:2])
        return None if r is None or r.journal.attempt != sequence.attempt or r.stage is Stage.QUEUED else r

    def _stale(self, worker: str, sequence: SequenceId) -> list[Action]:
        self.stale_events += 1
        return [Send(worker, ReleaseRecords((sequence,)))]

    # Decisions.

    def _place(self, now: float) -> list[Action]:
        """Dispatches what can start."""
        actions: list[Action] = []
        for placement in self.dispatcher.place():
            r = self._requests.get(placement.name)
            if r is None:
                raise InvariantError(f"{placement.name} was placed but is not in flight")
            self._name_workers(r, placement)
            self._move(r, Stage.PREFILL, now)
            r.queued_s += now - r.queued_at
            actions.append(self._start(r, now))
        return actions

    def _start(self, r: Request, now: float) -> StartPrefill:
        request = replace(r.request, deadline_s=max(r.deadline_at - now, 0.001), alone=r.alone)
        return StartPrefill(r.prefill_worker, request, tuple(t.worker for t in r.targets), r.deadline_at)

    def _name_workers(self, r: Request, placement: Placement) -> None:
        r.prefill_worker, r.decode_worker = placement.prefill, placement.decode or ""
        r.targets = tuple(WorkerInstance(w, self._incarnation(w)) for w in placement.targets)

    def _incarnation(self, worker: str) -> int:
        incarnation = self.workers.incarnation(worker)
        if incarnation is None:
            raise InvariantError(f"{worker} was chosen but is not present")
        return incarnation

    def _assign(self, r: Request, now: float) -> list[Action]:
        """Offers parked KV to new decode workers under the next attempt, if one has room and prefill is connected."""
        if not self.workers.connected(r.prefill_worker):
            return []
        placement = self.dispatcher.reassign(r.name)
        if placement is None:
            return []
        old = r.sequence
        # An old target may have all KV and be running: only its last acknowledgement may have been lost.
        actions: list[Action] = [
            Send(t.worker, Abort(old, "its KV is offered to another worker", tombstone_s=0.0)) for t in r.targets
        ]
        actions += [Send(worker, ReleaseRecords((old,))) for worker in sorted(r.workers())]
        r.journal.begin_attempt(self._next_attempt(r))
        r.refused = False
        self._name_workers(r, placement)
        self._move(r, Stage.HANDOVER, now)
        self.reassigned += 1
        names = tuple(t.worker for t in r.targets)
        return [*actions, AssignTargets(r.prefill_worker, old, names, r.journal.attempt, r.deadline_at)]

    def _reschedule(self, r: Request, why: str, now: float) -> list[Action]:
        """Queues a request again under the next attempt: newly chosen workers prefill its prompt and journal, and
        generation continues at the next index."""
        if r.alone_deaths >= ALONE_DEATHS or len(r.deaths) >= self._max_deaths:
            what = f"{len(r.deaths)} workers were lost while they ran the request: {', '.join(r.deaths)}"
            return self._fail(r, WorkerLost(what, retry_after_s=1), now)
        actions: list[Action] = [
            Log(f"{r.sequence} is rescheduled at index {r.journal.next_index}: {why}"),
            *self._withdraw(r, why, now),
        ]
        self.dispatcher.finish(r.name, rescheduled=True)
        self._move(r, Stage.QUEUED, now)
        r.journal.resume(self._next_attempt(r))
        r.prefill_worker = r.decode_worker = ""
        r.targets, r.refused, r.times_parked, r.queued_at = (), False, 0, now
        r.earlier_speculation = r.speculation
        r.earlier_stamps.append(r.stamps)
        r.stamps = StageStamps()
        self.rescheduled += 1
        self.dispatcher.enqueue(self._ticket(r))
        return actions

    def _fail(self, r: Request, error: BatonError, now: float) -> list[Action]:
        if r.ended:
            return []
        r.error = error
        return [*self._end(r, error.code, now), r.notify]

    def _end(self, r: Request, reason: str, now: float) -> list[Action]:
        """Notifies both pools and frees what the request held, without waiting for a slow client. An empty `reason`
        means that the workers already know that it has ended."""
        if r.ended:
            return []
        actions = self._withdraw(r, reason, now)
        self._move(r, Stage.ENDED, now)
        self.dispatcher.finish(r.name)
        return actions

    def _withdraw(self, r: Request, reason: str, now: float) -> list[Action]:
        """Releases the sequence of the current attempt on its workers; with a reason, aborts it first."""
        tombstone_s = max(r.deadline_at - now, 1.0)
        actions: list[Action] = []
        for worker in sorted(r.workers()):
            if reason:
                actions.append(Send(worker, Abort(r.sequence, reason, tombstone_s)))
            actions.append(Send(worker, ReleaseRecords((r.sequence,))))
        return actions

    def _update_servable(self, now: float) -> None:
        """Updates whether any worker that is not draining can serve each waiting request: the `hold_s` timer starts
        when none is left. Parked KV needs only a decode worker; its prefill worker can hand it over while draining."""
        capacity = self.dispatcher.capacity()
        for r in self._waiting.values():
            why = self.dispatcher.unservable(self._size(r), capacity, parked=r.stage is Stage.PARKED)
            if why is not None and r.unservable is None:
                r.unservable_since = now
            r.unservable = why

    def _awaits_prompt_logprobs(self, r: Request) -> bool:
        return r.request.sampling.prompt_logprobs is not None and r.journal.prompt_logprobs is None

    def _move(self, r: Request, stage: Stage, now: float) -> None:
        """Moves a request to a stage. Raises InvariantError if LEGAL_MOVES does not allow it."""
        if stage not in LEGAL_MOVES[r.stage]:
            raise InvariantError(f"{r.sequence} cannot go from {r.stage.value} to {stage.value}")
        r.stage, r.unservable = stage, None
        if stage in WAITING:
            self._waiting[r.name] = r
        else:
            self._waiting.pop(r.name, None)
        at_worker = r.decode_worker if stage is Stage.DECODE else r.prefill_worker if stage in AT_PREFILL else ""
        r.history.append(Entered(stage, now, at_worker))

    def _ticket(self, r: Request) -> Ticket:
        return replace(self._size(r), prefix=self._prefix(r))

    def _size(self, r: Request) -> Ticket:
        request = r.request
        needs_decode = request.max_tokens - len(request.output) > 1
        sizes = request.num_prefill_tokens, request.max_kv_tokens
        return Ticket(r.name, *sizes, needs_decode, age=r.age, priority=request.priority)

    def _prefix(self, r: Request) -> Prefix:
        """Returns the hints of the blocks that a worker may already hold; the last token is always computed."""
        request, facts = r.request, self.workers.facts()
        tokens = request.prompt + request.output
        first = self._requests.get(ChoiceId(request.request_id), r)
        known = first.prefixes if request.prompt is first.request.prompt and not request.output else {}
        prefix: dict[int, tuple[bytes, ...]] = {}
        if facts is None:
            return prefix
        for size in self.dispatcher.held_block_sizes:
            if size in known:
                prefix[size] = known[size]
                continue
            chain = KeyChain(facts.model_digest, request.tenant, request.cache_salt, size)
            keys = chain.grow(lambda start, end: tokens[start:end], len(tokens) - 1)
            known[size] = prefix[size] = tuple(key[:HINT_BYTES] for key in keys)
        return prefix

    def _next_attempt(self, r: Request | None = None) -> int:
        """Returns an unused attempt that exceeds this request's last one, even if the counter wraps."""
        self._attempt = self._attempt % _MAX_ATTEMPT + 1
        return self._attempt if r is None else max(self._attempt, r.journal.attempt + 1)


def _add_stamps(r: Request, stamps: StageStamps) -> None:
    """Merges a worker's stamps: a worker measures only its own stages, so the larger value is the measured one."""
    r.stamps = r.stamps.largest(stamps)
