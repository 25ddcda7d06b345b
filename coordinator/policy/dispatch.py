"""Admission and routing: which request goes to which pair of workers, and when.

The coordinator holds the queue (late dispatch): a prefill worker has at most two step budgets of uncomputed tokens, so
what waits can still go anywhere. A request is dispatched when a prefill worker has room and a decode worker has blocks
for its prompt and for an output of expected length (expectation.py), beside the expected growth of the sequences there,
and not many more than run there at once; and could hold all its output alone: what is accepted can finish. First come,
first served, by the age of the request, so that a rescheduled one keeps its place; the head waits for blocks rather
than being overtaken, so a long request is not starved by short ones. Only a request that no present worker can hold is
passed over.

Of several prefill workers the one is chosen that would have computed the prompt first: the fewest tokens to compute, in
its backlog and of this prompt, of which it may hold a prefix already. Of decode workers the one that holds the longest
prefix, unless PREFIX_SLACK more sequences run there than on the emptiest.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.commands import Role
from baton.core.errors import ContextLengthExceeded, DuplicateRequest, InvariantError, Unavailable
from baton.core.request import ChoiceId
from coordinator.policy.expectation import OutputExpectation
from coordinator.policy.workers import Prefix, Worker, WorkerTable

BACKLOG_STEPS = 2
PREFIX_SLACK = 4


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one choice of a request needs: `prefill_tokens` are computed by prefill unless it holds them, `total_tokens`
    is the most the sequence can ever hold. `prefix` names the full blocks that a worker may hold already. Lower `age`
    goes first."""

    name: ChoiceId
    prefill_tokens: int
    total_tokens: int
    needs_decode: bool = True
    prefix: Prefix = field(default_factory=dict)
    age: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    name: ChoiceId
    prefill: str
    decode: str | None
    spare: str | None

    @property
    def targets(self) -> tuple[str, ...]:
        """The decode workers that may take the KV, in order of preference."""
        return tuple(worker for worker in (self.decode, self.spare) if worker is not None)


@dataclass(slots=True)
class _Active:
    """`prefill` is None once it is no longer needed: the KV has been handed over, or the worker is gone. `to_compute`
    tokens were expected to be computed there. While it is `arriving`, its decode worker may not count its blocks.
    `produced` tokens of it are known."""

    ticket: Ticket
    prefill: str | None
    decode: str | None
    to_compute: int
    prefilling: bool = True
    arriving: bool = True
    produced: int = 0


class Dispatcher:
    """Complete state: the queue (`_order` sorts it by age and arrival), the active requests with what they hold, those
    of each decode worker, the counters of its placements in the worker table, and how long outputs are expected to
    be."""

    def __init__(self, workers: WorkerTable, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._workers = workers
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._queue: dict[ChoiceId, tuple[tuple[int, int], Ticket]] = {}
        self._order: list[tuple[tuple[int, int], ChoiceId]] = []
        self._queued_tokens = 0
        self._submitted = 0
        self._active: dict[ChoiceId, _Active] = {}
        self._at_decode: dict[str, dict[ChoiceId, _Active]] = {}
        self.expectation = OutputExpectation()

    def __repr__(self) -> str:
        ready = sum(w.ready for w in self._workers.present())
        return f"<Dispatcher {len(self._queue)} queued, {len(self._active)} active | {ready} workers ready>"

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def missing_role(self) -> Role | None:
        """The role that no ready worker has, if any."""
        roles = {w.role for w in self._workers.present() if w.ready}
        return "prefill" if "prefill" not in roles else "decode" if "decode" not in roles else None

    def forget_worker(self, worker_id: str) -> None:
        """A worker is gone, and its counters with it. What requests hold elsewhere stays until `finish`."""
        for active in self._active.values():
            if active.prefill == worker_id:
                active.prefill, active.prefilling = None, False
            if active.decode == worker_id:
                active.decode = None
        self._at_decode.pop(worker_id, None)

    @property
    def held_block_sizes(self) -> set[int]:
        """Block sizes of the workers that hold anything: for these a request's prefix is worth computing."""
        return {w.block_size for w in self._workers.present() if len(w.held)}

    def submit(self, ticket: Ticket, choices: int = 1) -> None:
        """Queues a request, or refuses it before any work was done. Room is asked for all its `choices`: the later ones
        are queued with `resubmit`.

        Raises:
            DuplicateRequest: the id is in flight.
            ContextLengthExceeded: no pair of workers could ever hold it.
            Unavailable: no worker of a role is ready, or the queue is full.
        """
        if ticket.name in self._queue or ticket.name in self._active:
            raise DuplicateRequest(f"request {ticket.name} is already in flight", param="request_id")
        missing = self.missing_role()
        if missing is not None:
            raise Unavailable(f"no {missing} worker is ready", code=f"no_{missing}_worker", retry_after_s=2)
        # Later choices have the same prompt; what could never fit is let into an empty queue.
        full = len(self._queue) + choices > max(self._max_requests, choices)
        if full or self._queued_tokens + ticket.prefill_tokens > self._max_tokens:
            raise Unavailable(
                f"{len(self._queue)} requests with {self._queued_tokens} prompt tokens are waiting already",
                code="overloaded",
                retry_after_s=self._drain_estimate_s(),
            )
        unservable = self.unservable(ticket, self.capacity())
        if unservable is not None:
            message, code = unservable
            raise ContextLengthExceeded(message, code=code, param="max_tokens")  # a retry is in vain
        self.resubmit(ticket)

    def resubmit(self, ticket: Ticket) -> None:
        """Queues a request that was accepted before, at the place of its age and whatever the queue's limits."""
        self._submitted += 1
        key = (ticket.age, self._submitted)
        self._queue[ticket.name] = key, ticket
        insort(self._order, (key, ticket.name))
        self._queued_tokens += ticket.prefill_tokens

    def place(self) -> list[Placement]:
        """Takes from the queue what can start now, in order."""
        placed: list[Placement] = []
        position = 0
        while position < len(self._order):
            ticket = self._queue[self._order[position][1]][1]
            prefill = self._pick_prefill(ticket)
            decode, spare = self._pick_decode(ticket) if prefill is not None and ticket.needs_decode else (None, None)
            if prefill is None or (ticket.needs_decode and decode is None):
                if self.unservable(ticket, self.capacity()) is None:
                    break
                position += 1  # it waits for another worker, and nobody waits for it
                continue
            to_compute = self._to_compute(prefill, ticket)
            prefill.backlog_tokens += to_compute
            self._dequeue(ticket.name)
            active = self._active[ticket.name] = _Active(ticket, prefill.worker_id, None, to_compute)
            self._take_decode(active, decode)
            placed.append(Placement(ticket.name, prefill.worker_id, decode, spare))
        return placed

    def reassign(self, name: ChoiceId) -> Placement | None:
        """Names another decode worker for parked KV, or None when none has room now."""
        active = self._active.get(name)
        if active is None or active.prefill is None:
            return None
        self._release_decode(active)
        decode, spare = self._pick_decode(active.ticket)
        if decode is None:
            return None
        self._take_decode(active, decode)
        return Placement(name, active.prefill, decode, spare)

    def moved(self, name: ChoiceId, decode: str) -> None:
        """The spare took the sequence instead of the worker it was meant for."""
        active = self._active.get(name)
        if active is None or active.decode == decode:
            return
        self._release_decode(active)
        if self._workers.get(decode) is not None:  # else it is gone, and a later one of that name is another
            self._take_decode(active, decode)

    def prefilled(self, name: ChoiceId) -> None:
        """Its first token is there: prefill has nothing more to compute for it."""
        active = self._active.get(name)
        if active is not None and active.prefilling:
            active.prefilling = False
            worker = self._workers.get(active.prefill or "")
            if worker is not None:
                worker.backlog_tokens -= active.to_compute

    def handed_over(self, name: ChoiceId) -> None:
        """Decode has all KV: the prefill worker is no longer needed."""
        self.prefilled(name)
        active = self._active.get(name)
        if active is None:
            return
        active.prefill = None
        worker = self._workers.get(active.decode or "")
        if worker is not None and active.arriving:
            worker.reserved_blocks -= self._blocks(worker, active.ticket.prefill_tokens)
        active.arriving = False

    def produced(self, name: ChoiceId, tokens: int) -> None:
        """So many tokens of an active request are known, of this dispatch."""
        active = self._active.get(name)
        if active is not None:
            active.produced = tokens

    def finish(self, name: ChoiceId) -> None:
        """The request has ended, well or not: everything it held is free."""
        self._dequeue(name)
        self.prefilled(name)
        active = self._active.pop(name, None)
        if active is not None:
            self._release_decode(active)
            if active.ticket.needs_decode:
                self.expectation.ended(active.produced)

    def check(self) -> None:
        """Raises InvariantError when the counters of the worker table are not what active requests hold."""
        for worker in self._workers.present():
            mine = [a for a in self._active.values() if a.decode == worker.worker_id]
            if {a.ticket.name for a in mine} != set(self._at_decode.get(worker.worker_id, {})):
                raise InvariantError(f"the requests at {worker} are not those that are placed there")
            blocks = sum(self._blocks(worker, a.ticket.prefill_tokens) for a in mine if a.arriving)
            tokens = sum(a.to_compute for a in self._active.values() if a.prefilling and a.prefill == worker.worker_id)
            if (blocks, tokens, len(mine)) != (worker.reserved_blocks, worker.backlog_tokens, worker.running):
                raise InvariantError(f"{worker} should hold {blocks} blocks, {tokens} tokens, {len(mine)} running")
        if self._queued_tokens != sum(t.prefill_tokens for _, t in self._queue.values()):
            raise InvariantError(f"queued tokens are not {self._queued_tokens}")
        if self._order != sorted((key, name) for name, (key, _) in self._queue.items()):
            raise InvariantError("the order of the queue is not that of its requests")

    def capacity(self) -> Mapping[Role, int]:
        """Tokens of the longest sequence that each role can hold, without draining workers: they take nothing."""
        found: dict[Role, int] = {}
        for worker in self._workers.present():
            if worker.state != "draining":
                found[worker.role] = max(found.get(worker.role, 0), worker.max_tokens)
        return found

    def unservable(
        self, ticket: Ticket, capacity: Mapping[Role, int], *, parked: bool = False
    ) -> tuple[str, str] | None:
        """Why no worker can ever serve a request, and the code of that error; None where one can. When `parked` it
        needs a decode worker only."""
        needs: list[tuple[Role, int]] = [] if parked else [("prefill", ticket.prefill_tokens)]
        if ticket.needs_decode:
            needs.append(("decode", ticket.total_tokens))
        for role, tokens in needs:
            most = capacity.get(role)
            if most is None:
                return f"no {role} worker is left", f"no_{role}_worker"
            if tokens > most:
                return (
                    f"the request needs KV for {tokens} tokens; the largest {role} worker holds {most}",
                    "exceeds_pool",
                )
        return None

    def _blocks(self, worker: Worker, tokens: int) -> int:
        return -(-tokens // worker.block_size)

    def _expected_blocks(self, worker: Worker, ticket: Ticket) -> int:
        return self.expectation.blocks(ticket.prefill_tokens, ticket.total_tokens, worker.block_size)

    def _growth(self, worker: Worker) -> int:
        """Blocks that sequences on a decode worker, or on their way there, are expected to need beyond those of their
        prompts and of their output so far."""
        return sum(
            self.expectation.growth(a.ticket.prefill_tokens, a.ticket.total_tokens, a.produced, worker.block_size)
            for a in self._at_decode.get(worker.worker_id, {}).values()
        )

    def _to_compute(self, worker: Worker, ticket: Ticket) -> int:
        """At least the last token always is."""
        return max(1, ticket.prefill_tokens - worker.held_tokens(ticket.prefix))

    def _pick_prefill(self, ticket: Ticket) -> Worker | None:
        """The one with the least to compute under its cap; an idle one takes a prompt of any length."""
        fits = [
            w
            for w in self._workers.present()
            if w.ready
            and w.role == "prefill"
            and (
                w.backlog_tokens == 0 or w.backlog_tokens + self._to_compute(w, ticket) <= BACKLOG_STEPS * w.step_tokens
            )
            and ticket.prefill_tokens <= w.max_tokens
        ]

        def score(w: Worker) -> tuple[int, int, str]:
            return w.backlog_tokens + self._to_compute(w, ticket), w.backlog_tokens, w.worker_id

        return min(fits, key=score, default=None)

    def _pick_decode(self, ticket: Ticket) -> tuple[str | None, str | None]:
        """Among those with room the one that holds most of the prefix and is not much fuller than others, and a
        spare."""
        fits = [
            w
            for w in self._workers.present()
            if w.ready
            and w.role == "decode"
            and w.running < w.max_running
            and ticket.total_tokens <= w.max_tokens
            and self._expected_blocks(w, ticket) <= w.blocks_left(self._growth(w))
        ]
        emptiest = min((w.running for w in fits), default=0)

        def score(w: Worker) -> tuple[int, int, int, str]:
            held = w.held_tokens(ticket.prefix) if w.running <= emptiest + PREFIX_SLACK else 0
            return -held, w.running, w.reserved_blocks, w.worker_id

        fits.sort(key=score)
        first = fits[0].worker_id if fits else None
        return first, fits[1].worker_id if len(fits) > 1 else None

    def _take_decode(self, active: _Active, decode: str | None) -> None:
        active.decode, active.arriving = decode, True
        if decode is not None:
            self._at_decode.setdefault(decode, {})[active.ticket.name] = active
        worker = self._workers.get(decode or "")
        if worker is not None:
            worker.reserved_blocks += self._blocks(worker, active.ticket.prefill_tokens)
            worker.running += 1

    def _release_decode(self, active: _Active) -> None:
        worker = self._workers.get(active.decode or "")
        if worker is not None:
            if active.arriving:
                worker.reserved_blocks -= self._blocks(worker, active.ticket.prefill_tokens)
            worker.running -= 1
        self._at_decode.get(active.decode or "", {}).pop(active.ticket.name, None)
        active.decode = None

    def _dequeue(self, name: ChoiceId) -> None:
        key, ticket = self._queue.pop(name, (None, None))
        if key is not None and ticket is not None:
            del self._order[bisect_left(self._order, (key, name))]
            self._queued_tokens -= ticket.prefill_tokens

    def _drain_estimate_s(self) -> float:
        """When the queue may have half drained, in seconds: one step a tenth of a second."""
        budget = sum(w.step_tokens for w in self._workers.present() if w.ready and w.role == "prefill") or 1
        return max(1.0, round(self._queued_tokens / budget * 0.05))
