"""The state machine of every choice. Pure: it receives events and `now`, and returns actions.

`Requests.table` lists every stage of a choice (policy.choice) with the events that it handles, and where they lead.

A choice survives the loss of its workers. When the worker that runs it is lost, gives it back, or cannot hand it over,
it is rescheduled: it returns to QUEUED under the next attempt, with the journal as its output so far, and generation
continues at the next index. KV that is still at the prefill worker is offered to another decode worker first. Events of
earlier attempts are stale. A choice that no present worker can serve is held for a while (policy.holding); one whose
workers are lost again and again ends (policy.losses).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from baton.core.codes import ErrorCode
from baton.core.commands import Abort, ReleaseRecords, TrackedSequence
from baton.core.errors import BatonError, DuplicateRequest, HandoffError, InvariantError, ProtocolError, Unavailable
from baton.core.events import StepEvents, TokenEvent
from baton.core.machine import Table, Transition, handle, ignore, to
from baton.core.request import ChoiceId, GenerateRequest, SequenceId
from coordinator.policy.choice import (
    Action,
    AssignTargets,
    Choice,
    DecodeTokens,
    EndedBy,
    Fail,
    HandedOverBy,
    KVParked,
    LostWorker,
    OfferDue,
    ParkedBy,
    Placed,
    PrefillTokens,
    Rescheduled,
    Send,
    Stage,
    StartPrefill,
    Stop,
    block_hints,
)
from coordinator.policy.dispatch import Dispatcher
from coordinator.policy.holding import Holding
from coordinator.policy.losses import Losses
from coordinator.policy.pool import Prefix, Worker
from coordinator.policy.prefilled import PrefilledTokens
from coordinator.policy.quotas import ANONYMOUS, Client
from coordinator.policy.split import Split
from coordinator.policy.workers import WorkerTable

QUEUED, PREFILL, HANDOVER, PARKED, DECODE, ENDED = Stage
AT_WORKERS = PREFILL, HANDOVER, PARKED, DECODE
WAITING = QUEUED, PARKED
TICK_S = 0.1  # between two calls of `Requests.tick`
MAX_TIMES_PARKED = 30
REOFFER_BACKOFF_S = 0.1, 1.0  # delay after the second parking, and its maximum; doubled with each
PARKED_S = 10.0  # for which KV waits for room at a decode worker, which prompts may hold that wait for its blocks
_MAX_ATTEMPT = 1 << 30  # an int32 on the wire
# The decode worker has started, but the prefill worker saw the hand-over fail and made it end the sequence.
_LOST_ACK = "the link to its decode worker broke before the last acknowledgement"


class InFlightCounts(NamedTuple):
    """Requests and choices in flight, and how many of each are queued: a request is while all its choices are."""

    requests: int
    queued: int
    choices: int
    queued_choices: int


class Requests:
    """Methods return actions, which the caller executes in order."""

    def __init__(
        self,
        workers: WorkerTable,
        max_queued_requests: int,
        max_queued_tokens: int,
        hold_s: float = 30.0,
        max_deaths: int = 5,
        split: Split = "always",
    ) -> None:
        self.workers = workers
        self.dispatcher = Dispatcher(workers, max_queued_requests, max_queued_tokens, split)
        self.table = self._transitions()
        self.draining = False
        self.stale_events = self.rescheduled = self.reassigned = 0  # counters
        self.prefilled = PrefilledTokens()
        self.holding = Holding(self.dispatcher, hold_s)
        self.losses = Losses(max_deaths)
        # By ChoiceId, which `sequence[:2]` equals: a slice is cheaper than a new ChoiceId for every token.
        self._choices: dict[tuple[str, int], Choice] = {}
        self._waiting: dict[ChoiceId, Choice] = {}  # those in a stage that waits for workers
        # Sequences whose records each worker may drop: sent with the next tick, so that one message has many.
        self._released: dict[str, dict[SequenceId, None]] = {}
        self._no_deadline_before = math.inf  # no choice has an earlier deadline
        self._attempt = 0  # last one assigned; no two choices share a value, so an id can be reused immediately
        self._age = 0  # last one assigned

    def __len__(self) -> int:
        return len(self._choices)

    def __repr__(self) -> str:
        stages = [choice.stage for choice in self._choices.values()]
        return "<Requests " + ", ".join(f"{stages.count(s)} {s.value}" for s in Stage if s in stages) + ">"

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices.values())

    def counts(self) -> InFlightCounts:
        names = {choice.name.request_id for choice in self}
        started = {choice.name.request_id for choice in self if choice.stage is not QUEUED}
        return InFlightCounts(len(names), len(names) - len(started), len(self._choices), self.dispatcher.num_queued)

    def get(self, name: ChoiceId) -> Choice | None:
        return self._choices.get(name)

    # From the front.

    def check_room(self, client: Client, limit_s: float | None = None) -> None:
        """Raises as `admit` does if any new request of the client would be refused now, whatever it asks for, with at
        most `limit_s` until its deadline."""
        self._check_draining()
        self.dispatcher.check_room(client.tenant)
        if limit_s is not None:  # a request is never more urgent than its client
            self.dispatcher.check_deadline(client.tenant, client.priority, client.weight, limit_s)

    def _check_draining(self) -> None:
        if self.draining:
            raise Unavailable("the cluster is draining", code=ErrorCode.DRAINING, retry_after_s=5)

    def admit(
        self,
        request: GenerateRequest,
        now: float,
        choices: int = 1,
        session: str = "",
        client: Client = ANONYMOUS,
    ) -> tuple[Choice, list[Action]]:
        """Queues one choice and dispatches what can start. Choice 0 represents its request: it is refused if the queue
        has no room for all `choices`, and stays registered until the other choices, which have its age, have ended.
        `session` is the client's, if it named one.

        Raises:
            BatonError: the request is refused, and was not queued.
        """
        if not (request.choice and ChoiceId(request.request_id) in self._choices):
            self._check_draining()
        if request.choice_id in self._choices:  # it may have ended with output still unread
            raise DuplicateRequest(f"request {request.request_id} is already in flight", param="request_id")
        first = self._choices.get(ChoiceId(request.request_id)) if request.choice else None
        self._age += first is None
        age = self._age if first is None else first.age
        choice = Choice(request, age, now, now + request.deadline_s, client, self._next_attempt())
        if request.deadline_s <= 0:
            raise choice.late()
        if first is None:
            choice.traffic_place = self.dispatcher.traffic.place(request, session)
        else:
            choice.traffic_place = first.traffic_place
        choice.prefix = self._prefix(choice)
        if first is None:
            self.dispatcher.submit(choice, choices)
        else:
            self.dispatcher.submit_later(choice, first.name)
        self._choices[choice.name] = self._waiting[choice.name] = choice
        self._no_deadline_before = min(self._no_deadline_before, choice.deadline_at)
        return choice, self._place(now)

    def end(self, choice: Choice, reason: str, now: float, *, answered: bool = False) -> list[Action]:
        """Ends a choice of which the front needs no more output, and notifies both pools immediately. `answered`: its
        answer is complete."""
        return [*handle(self.table, choice, Stop(reason, answered), now), *self._place(now)]

    def forget(self, choice: Choice) -> None:
        """Removes a choice, so that its id can be reused."""
        if self._choices.get(choice.name) is choice:
            del self._choices[choice.name]
            self.dispatcher.forget(choice.name)

    # From workers.

    def on_events(self, worker: str, events: StepEvents, now: float) -> list[Action]:
        actions: list[Action] = []
        self.losses.reported(worker, events)
        queued, sender = self.dispatcher.num_queued, self.workers.get(worker)
        backlog = 0 if sender is None else sender.backlog_tokens
        for token in events.tokens:
            self._on_tokens(worker, sender, token, now, actions)
        for over in events.handed_over:
            actions += self._on_event(HandedOverBy(worker, over), now)
        for parked in events.parked:
            actions += self._on_event(ParkedBy(worker, parked), now)
        for ended in events.ended:
            actions += self._on_event(EndedBy(worker, ended), now)
        if events.kv_cache_events is not None and sender is not None:
            sender.update_cached(events.kv_cache_events)
        # Tokens free no room, except the first after a prompt; blocks that are free at decode nevertheless are found at
        # the next tick.
        if self.dispatcher.num_queued:
            prefilled = sender is not None and sender.backlog_tokens < backlog
            if prefilled or self.dispatcher.num_queued > queued or events.ended or events.handed_over or events.parked:
                actions += self._place(now)
        return actions

    def worker_joined(self, now: float) -> list[Action]:
        """Dispatches what can start now that a worker has joined or redialled."""
        self.holding.look_for_roles(now)
        return self._place(now)

    def on_worker_lost(self, worker: str, why: str, now: float, *, drained: bool) -> list[Action]:
        """Handles the loss of a worker: reschedules the choices that depend on it. A choice whose KV is still on its
        way to that worker is left alone: the prefill worker parks the KV. A drained worker gave its choices back, which
        is not a death."""
        loss = self.losses.lost(worker, why, drained=drained)
        actions = [action for choice in [*self] for action in handle(self.table, choice, loss, now)]
        self.holding.update(self._waiting.values(), now)
        return actions + self._place(now)

    def oldest_queued_s(self, now: float) -> float:
        """Returns how long the oldest queued choice has waited; 0.0 if none is queued."""
        return now - min((c.queued_at for c in self._waiting.values() if c.stage is QUEUED), default=now)

    def held(self) -> int:
        """Returns how many queued choices no present worker can serve."""
        return sum(c.stage is QUEUED and c.unservable is not None for c in self._waiting.values())

    def tracked(self, worker: str) -> tuple[TrackedSequence, ...]:
        """Returns the sequences that this coordinator expects at a worker, with the next output index of each."""
        here = (choice for choice in self if choice.stage in AT_WORKERS and worker in choice.workers())
        return tuple(TrackedSequence(c.sequence, c.next_index, c.runs_at(worker)) for c in here)

    # Time.

    def tick(self, now: float) -> list[Action]:
        """Handles deadlines, unservable choices, parked KV, the queue, released records. Called every TICK_S."""
        actions: list[Action] = []
        self.holding.look_for_roles(now)
        self.holding.update(self._waiting.values(), now)
        if now >= self._no_deadline_before:  # scanning 10,000 choices blocks the loop for 4 ms
            for choice in [choice for choice in self if now >= choice.deadline_at and not choice.ended]:
                actions += handle(self.table, choice, Fail(choice.late()), now)
            open_deadlines = (choice.deadline_at for choice in self if not choice.ended)
            self._no_deadline_before = min(open_deadlines, default=math.inf)
        for choice in list(self._waiting.values()):
            if (error := self.holding.error(choice, now)) is not None:
                actions += handle(self.table, choice, Fail(error), now)
            elif choice.stage is PARKED and now >= choice.offer_at:
                actions += handle(self.table, choice, OfferDue(), now)
        actions += self._place(now)
        released, self._released = self._released, {}
        return actions + [Send(worker, ReleaseRecords(tuple(each))) for worker, each in released.items()]

    def drain(self, now: float) -> list[Action]:
        """Fails the choices that have not finished by the end of a drain."""
        error = Unavailable("the cluster is draining and the request did not finish in time", code=ErrorCode.DRAINING)
        return [action for choice in [*self] for action in handle(self.table, choice, Fail(error), now)]

    def check(self) -> None:
        """Raises InvariantError if the dispatcher, the counters of workers or `_waiting` do not match the choices."""
        self.dispatcher.check(self._choices.values())
        if self._waiting != {name: choice for name, choice in self._choices.items() if choice.stage in WAITING}:
            raise InvariantError(f"{self!r} does not match the waiting choices: {[*self._waiting]}")
        if unknown := self.dispatcher.incomplete - self._choices.keys():
            raise InvariantError(f"room is reserved for choices of requests that have ended: {unknown}")

    # The machine of a choice.

    def _transitions(self) -> Table:
        """Returns, for the stages of a choice, each event with its handler and the stages that it may lead to."""
        from_workers = PrefillTokens, DecodeTokens, HandedOverBy, ParkedBy, EndedBy
        rows: list[tuple[Iterable[Stage], Iterable[type], Transition]] = [
            ([QUEUED], [Placed], to(self._on_placed, PREFILL)),
            ([QUEUED], from_workers, to(self._on_stale)),
            ([PREFILL], [PrefillTokens], to(self._on_first_token, HANDOVER, PARKED, DECODE, ENDED)),
            ([HANDOVER, PARKED, DECODE], [PrefillTokens], to(self._end_if_complete, ENDED)),
            ([PREFILL, PARKED], [DecodeTokens], to(self._on_decode_tokens, DECODE, QUEUED, ENDED)),
            ([HANDOVER, DECODE], [DecodeTokens], to(self._on_decode_tokens, DECODE, ENDED)),
            (AT_WORKERS, [HandedOverBy], to(self._on_handed_over, DECODE, QUEUED, ENDED)),
            ([PREFILL], [ParkedBy], to(self._on_parked_early, ENDED)),
            ([HANDOVER], [ParkedBy], to(self._on_parked, PARKED, ENDED)),
            ([PARKED], [ParkedBy], to(ignore)),  # repeated after a redial
            ([PARKED], [OfferDue], to(self._offer_again, HANDOVER, QUEUED)),
            ([DECODE], [ParkedBy], to(self._on_lost_ack, QUEUED, ENDED)),
            (AT_WORKERS, [EndedBy], to(self._on_ended, QUEUED, ENDED)),
            ([PREFILL], [LostWorker], to(self._on_lost_prefill, QUEUED, ENDED)),
            ([HANDOVER, PARKED], [LostWorker], to(self._on_lost_prefill, QUEUED, ENDED)),
            ([DECODE], [LostWorker], to(self._on_lost_decode, QUEUED, ENDED)),
            ([QUEUED, ENDED], [LostWorker], to(ignore)),
            ([QUEUED, *AT_WORKERS], [Stop], to(self._on_stop, ENDED)),
            ([QUEUED, *AT_WORKERS], [Fail], to(self._on_fail, ENDED)),
            ([ENDED], [Stop, Fail], to(ignore)),
            ([ENDED], [PrefillTokens, DecodeTokens], to(self._on_stale)),
            ([ENDED], [HandedOverBy], to(self._on_late_hand_over)),
            ([ENDED], [ParkedBy], to(self._drop_kv)),
            ([ENDED], [EndedBy], to(self._on_late_end)),
        ]
        return {(stage, event): row for stages, events, row in rows for stage in stages for event in events}

    def _on_tokens(
        self, worker: str, sender: Worker | None, event: TokenEvent, now: float, actions: list[Action]
    ) -> None:
        """Records tokens, the only event that arrives for every choice in every step. Those of its decode worker change
        no stage until the last one, and do not go through the table."""
        choice = self._choices.get(event.sequence[:2])
        if choice is None or choice.attempt != event.sequence.attempt:
            actions += self._stale(worker, event.sequence)
            return
        stage = choice.stage
        if stage is not QUEUED and stage is not ENDED:
            try:
                appended = choice.accept(event) == "appended"
            except ProtocolError as e:
                actions += handle(self.table, choice, Fail(e), now)
                return
            if appended:
                choice.first_token_at = choice.first_token_at or now
            if appended or event.prompt_logprobs:
                actions.append(choice.notification)
            if choice.finish is None:
                if len(choice.tokens) > choice.grows_at:
                    self.dispatcher.hold(choice)
                if stage is DECODE and choice.decode is sender:
                    return
        tokens = PrefillTokens if worker == choice.prefill_worker else DecodeTokens
        actions += handle(self.table, choice, tokens(worker, event), now)

    def _on_event(self, event: HandedOverBy | ParkedBy | EndedBy, now: float) -> list[Action]:
        """Passes a worker's event to its choice, if that is known and the event is of its current attempt."""
        sequence = event.event.sequence
        choice = self._choices.get(sequence[:2])
        if choice is not None and choice.attempt == sequence.attempt:
            return handle(self.table, choice, event, now)
        if choice is None and isinstance(event, ParkedBy):
            return self._drop_kv(choice, event, now)
        return self._stale(event.worker, sequence)  # not aborted if parked: the current attempt may offer its KV

    def _on_placed(self, choice: Choice, event: Placed, now: float) -> list[Action]:
        choice.enter(PREFILL, now)  # what it holds at its workers has been counted since they were named
        del self._waiting[choice.name]
        choice.queued_s += now - choice.queued_at
        return [self._start(choice, now)]

    def _on_first_token(self, choice: Choice, event: PrefillTokens, now: float) -> list[Action]:
        self.prefilled.first_token(choice, event.event.cached_tokens)
        if choice.on_decode:
            self._enter(choice, DECODE, now)
            return self._end_if_complete(choice, event, now)
        self._enter(choice, PARKED if choice.kv_parked else HANDOVER, now)
        if choice.finish is None and choice.kv_parked:
            return self._offer(choice, event, now)
        return self._end_if_complete(choice, event, now)

    def _on_decode_tokens(self, choice: Choice, event: DecodeTokens, now: float) -> list[Action]:
        self._start_decode(choice, event.worker, now)
        if choice.kv_parked and choice.finish is None:
            return self._reschedule(choice, _LOST_ACK, now)
        return self._end_if_complete(choice, event, now)

    def _on_handed_over(self, choice: Choice, event: HandedOverBy, now: float) -> list[Action]:
        choice.add_stamps(event.event.stamps)
        worker = event.event.decode_worker
        taker = next((t.incarnation for t in choice.targets if t.worker_id == worker), None)
        if self.workers.has_left(worker, taker):
            return self._reschedule(choice, f"{worker} received the KV and left", now, planned=True)
        if taker is None or self.workers.incarnation(worker) != taker:
            # It had all KV, so it may have died in a step with this choice.
            choice.deaths.append(f"{worker} (lost during the hand-over)")
            return self._reschedule(choice, f"{worker} was lost during the hand-over", now)
        choice.kv_parked = False
        self._start_decode(choice, worker, now)
        return [choice.notification]

    def _on_parked_early(self, choice: Choice, event: ParkedBy, now: float) -> list[Action]:
        """All targets refused before the first token is known, which is still to arrive under this attempt."""
        return [] if choice.kv_parked else self._park(choice, event, now)

    def _on_parked(self, choice: Choice, event: ParkedBy, now: float) -> list[Action]:
        actions = self._park(choice, event, now)
        if choice.ended:
            return actions
        self._enter(choice, PARKED, now)
        if choice.times_parked == 1:  # later offers wait, since the workers have just refused
            actions += self._offer(choice, event, now)
        return actions

    def _on_lost_ack(self, choice: Choice, event: ParkedBy, now: float) -> list[Action]:
        """Its decode worker has started, and its prefill worker has made it end the sequence."""
        if choice.kv_parked:
            return []  # repeated after a redial
        return [KVParked(choice.sequence, event.event.reason), *self._reschedule(choice, _LOST_ACK, now)]

    def _on_ended(self, choice: Choice, event: EndedBy, now: float) -> list[Action]:
        worker, ended = event
        choice.add_stamps(ended.stamps)
        if ended.code is None:
            if choice.finish is not None:
                return []
            choice.deaths.append(f"{worker} (ended the request: {ended.reason})")
            return self._reschedule(choice, f"{worker} ended the sequence early: {ended.reason}", now)
        here, unknown = choice.runs_at(worker), ended.code is ErrorCode.UNKNOWN_SEQUENCE
        targets_unchanged = all(self.workers.incarnation(t.worker_id) == t.incarnation for t in choice.targets)
        if unknown and here and choice.stage is PREFILL and targets_unchanged:
            return [self._start(choice, now)]  # its session broke before the command arrived
        if ended.code in (ErrorCode.DRAINING, ErrorCode.ABANDONED) or (unknown and here):
            return self._reschedule(choice, ended.message, now, planned=ended.code is ErrorCode.DRAINING)
        if ended.code in (ErrorCode.KV_CORRUPT, ErrorCode.HANDOFF_FAILED) and not choice.recomputed:
            choice.recomputed = True
            return self._reschedule(choice, ended.message, now)  # recomputed once; a second failure ends the request
        if not here and (unknown or ended.code is ErrorCode.WORKER_LOST):
            return []  # the prefill worker has the KV and parks it; if it is lost too, `on_worker_lost` follows
        return self._fail(choice, event.error(choice.stage), now)

    def _on_lost_prefill(self, choice: Choice, event: LostWorker, now: float) -> list[Action]:
        if event.worker != choice.prefill_worker:
            return []
        return self._after_loss(choice, event, now, ran=choice.stage is PREFILL)

    def _on_lost_decode(self, choice: Choice, event: LostWorker, now: float) -> list[Action]:
        if event.worker == choice.decode_worker and choice.finish is None:
            return self._after_loss(choice, event, now, ran=True)
        if event.worker == choice.prefill_worker and choice.awaits_prompt_logprobs:
            return self._after_loss(choice, event, now, ran=False)
        return []

    def _on_stop(self, choice: Choice, event: Stop, now: float) -> list[Action]:
        if not event.answered:
            self.prefilled.given_up(choice, "cancelled")
        return self._end(choice, event.reason, now, answered=event.answered)

    def _on_fail(self, choice: Choice, event: Fail, now: float) -> list[Action]:
        return self._fail(choice, event.error, now)

    def _on_stale(self, choice: Choice, event: PrefillTokens | DecodeTokens, now: float) -> list[Action]:
        return self._stale(event.worker, event.event.sequence)

    def _on_late_hand_over(self, choice: Choice, event: HandedOverBy, now: float) -> list[Action]:
        choice.add_stamps(event.event.stamps)
        self._release(event.worker, choice.sequence)
        return []

    def _on_late_end(self, choice: Choice, event: EndedBy, now: float) -> list[Action]:
        choice.add_stamps(event.event.stamps)
        return []

    # Decisions.

    def _place(self, now: float) -> list[Action]:
        """Dispatches what can start."""
        placed = self.dispatcher.place()
        self.dispatcher.measure(placed, now)
        return [action for choice in placed for action in handle(self.table, choice, Placed(), now)]

    def _start(self, choice: Choice, now: float) -> StartPrefill:
        left_s = max(choice.deadline_at - now, 0.001)
        request = replace(choice.request, attempt=choice.attempt, deadline_s=left_s, alone=choice.alone)
        targets = tuple(target.worker_id for target in choice.targets)
        return StartPrefill(choice.prefill_worker, request, targets, choice.deadline_at)

    def _start_decode(self, choice: Choice, worker: str, now: float) -> None:
        """Records that a decode worker has all KV; either worker may report it first."""
        if choice.stage is HANDOVER:
            self.dispatcher.handed_over(choice, now)
        self.dispatcher.set_decode(choice, self.workers.get(worker))
        if choice.stage is not DECODE:
            self._enter(choice, DECODE, now)

    def _park(self, choice: Choice, event: ParkedBy, now: float) -> list[Action]:
        """Records that the KV stays at its prefill worker. Fails the choice if that happens too often."""
        choice.kv_parked = True
        choice.times_parked += 1
        first, longest = REOFFER_BACKOFF_S
        repeats = choice.times_parked - 2
        choice.offer_at = now if repeats < 0 else now + min(first * 2**repeats, longest)
        actions: list[Action] = [KVParked(choice.sequence, event.event.reason)]
        if choice.times_parked > MAX_TIMES_PARKED:
            message = f"KV could not be handed over in {MAX_TIMES_PARKED} tries: {event.event.reason}"
            actions += self._fail(choice, HandoffError(message, retry_after_s=1), now)
        return actions

    def _offer(self, choice: Choice, event: PrefillTokens | ParkedBy | OfferDue, now: float) -> list[Action]:
        """Offers parked KV to new decode workers under the next attempt, if one has room and prefill is connected."""
        if not self.workers.connected(choice.prefill_worker):
            return []
        old, targets, workers = choice.sequence, choice.targets, sorted(choice.workers())
        if not self.dispatcher.reassign(choice):
            return []
        # An old target may have all KV and be running: only its last acknowledgement may have been lost.
        actions: list[Action] = [
            Send(t.worker_id, Abort(old, "its KV is offered to another worker", tombstone_s=0.0)) for t in targets
        ]
        for worker in workers:
            self._release(worker, old)
        choice.begin_attempt(self._next_attempt(choice))
        self._enter(choice, HANDOVER, now)
        self.reassigned += 1
        names = tuple(target.worker_id for target in choice.targets)
        return [*actions, AssignTargets(choice.prefill_worker, old, names, choice.attempt, choice.deadline_at)]

    def _offer_again(self, choice: Choice, event: OfferDue, now: float) -> list[Action]:
        """Offers parked KV again; after PARKED_S it is given up if its workers are here and decode has no room, and at
        once if only another class can continue the choice."""
        actions, parked_s = self._offer(choice, event, now), now - choice.history[-1].at
        if choice.stage is not PARKED:
            return actions
        if choice.unservable is not None and self.dispatcher.continues_elsewhere(choice):
            why = f"{choice.unservable[0]} in the class of its KV; another class can continue it"
            return [*actions, *self._reschedule(choice, why, now, planned=True)]
        here = choice.unservable is None and self.workers.connected(choice.prefill_worker)
        if not here or parked_s < PARKED_S:
            return actions
        why = f"no decode worker has room for its KV, which was parked for {parked_s:.1f} s"
        return [*actions, *self._reschedule(choice, why, now, planned=True)]

    def _after_loss(self, choice: Choice, loss: LostWorker, now: float, *, ran: bool) -> list[Action]:
        """Reschedules a choice that depended on a lost worker, which `ran` it or not."""
        self.losses.count(choice, loss, ran=ran)
        return self._reschedule(choice, f"{loss.worker}: {loss.reason}", now, planned=loss.drained)

    def _reschedule(self, choice: Choice, why: str, now: float, *, planned: bool = False) -> list[Action]:
        """Queues a choice again under the next attempt: newly chosen workers prefill its prompt and journal, and
        generation continues at the next index. `planned`: nothing has failed, a worker leaves."""
        error = self.losses.error(choice, why, self.dispatcher.retry_after_s(), planned=planned)
        if error is not None:
            return self._fail(choice, error, now)
        rescheduled = Rescheduled(choice.sequence, choice.next_index, why)
        actions = [rescheduled, *self._withdraw(choice, why, now)]
        self.dispatcher.release(choice)
        choice.resume(self._next_attempt(choice), now)
        self._enter(choice, QUEUED, now)
        choice.prefix = self._prefix(choice)
        self.dispatcher.enqueue(choice)
        self.rescheduled += 1
        return actions

    def _end_if_complete(self, choice: Choice, event: PrefillTokens | DecodeTokens, now: float) -> list[Action]:
        """Ends a choice with all its tokens. Prefill sends the log-probabilities of the prompt, maybe after decode's
        last token; parked KV has to be aborted, and so has an attempt that was for them alone, whose workers go on."""
        if choice.finish is None or choice.awaits_prompt_logprobs:
            return []
        goes_on = choice.kv_parked or not (choice.produced or choice.pooled)
        return self._end(choice, "its answer is complete" if goes_on else "", now)

    def _fail(self, choice: Choice, error: BatonError, now: float) -> list[Action]:
        choice.error = error
        self.prefilled.given_up(choice, "failed")
        return [*self._end(choice, error.code, now), choice.notification]

    def _end(self, choice: Choice, reason: str, now: float, *, answered: bool = False) -> list[Action]:
        """Notifies both pools and frees what the choice held, without waiting for a slow client. An empty `reason`
        means that the workers already know that it has ended."""
        actions = self._withdraw(choice, reason, now)
        if choice.finish is not None or answered:
            self.losses.budget.completed()
        self.dispatcher.finish(choice)
        self._enter(choice, ENDED, now)
        return actions

    def _withdraw(self, choice: Choice, reason: str, now: float) -> list[Action]:
        """Releases the sequence of the current attempt on its workers; with a reason, aborts it first."""
        sequence, tombstone_s = choice.sequence, max(choice.deadline_at - now, 1.0)
        actions: list[Action] = []
        for worker in sorted(choice.workers()):
            if reason:
                actions.append(Send(worker, Abort(sequence, reason, tombstone_s)))
            self._release(worker, sequence)
        return actions

    def _release(self, worker: str, sequence: SequenceId) -> None:
        self._released.setdefault(worker, {})[sequence] = None

    def _drop_kv(self, choice: Choice | None, event: ParkedBy, now: float) -> list[Action]:
        """Aborts KV that its prefill worker would keep until then."""
        sequence = event.event.sequence
        drop = Abort(sequence, "no request needs its KV", tombstone_s=0.0)
        return [Send(event.worker, drop), *self._stale(event.worker, sequence)]

    def _stale(self, worker: str, sequence: SequenceId) -> list[Action]:
        self.stale_events += 1
        self._release(worker, sequence)
        return []

    def _enter(self, choice: Choice, stage: Stage, now: float) -> None:
        choice.enter(stage, now)
        if stage in WAITING:
            self._waiting[choice.name] = choice
        else:
            self._waiting.pop(choice.name, None)
        if stage in AT_WORKERS:
            self.dispatcher.hold(choice)

    def _prefix(self, choice: Choice) -> Prefix:
        """Returns the hints of the blocks that a worker may already hold; the last token is always computed."""
        if not (sizes := self.dispatcher.cached_block_sizes):
            return {}
        request = choice.request
        first = self._choices.get(ChoiceId(request.request_id), choice)
        same = request.prompt is first.request.prompt and not request.output and not first.request.output
        return block_hints(request, self.dispatcher.model_digest(choice), sizes, first.prefix if same else {})

    def _next_attempt(self, choice: Choice | None = None) -> int:
        """Returns an unused attempt that exceeds this choice's last one, even if the counter wraps."""
        self._attempt = self._attempt % _MAX_ATTEMPT + 1
        return self._attempt if choice is None else max(self._attempt, choice.attempt + 1)
