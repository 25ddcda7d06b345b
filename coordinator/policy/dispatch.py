"""Admission and routing: which request goes to which pair of workers, and when.

The coordinator holds the queue (late dispatch): a prefill worker has a backlog of at most two step budgets of tokens,
or one longer prompt, so queued requests can still go to any worker. A request is dispatched when a prefill worker has
room and a decode worker has blocks for its prompt and an output of expected length, beyond the expected growth of its
own sequences, and at most slightly more sequences than it runs at once. The decode worker must also be able to hold the
whole output of the request alone, so every accepted request can finish. Lower `priority` goes first, then lower age
(first come, first served), so a rescheduled request keeps its place. The head of the queue waits for blocks and is not
overtaken, so short requests cannot starve a long one. Only a request that no present worker can hold is skipped.

The chosen prefill worker is the one that would compute the prompt first: it has the fewest tokens to compute, counting
its backlog and the part of this prompt that it has not cached. The chosen decode worker is the one that holds the
longest prefix, unless more than PREFIX_SLACK more sequences run there than on the emptiest one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.codes import ErrorCode
from baton.core.commands import Role
from baton.core.errors import ContextLengthExceeded, DuplicateRequest, InvariantError, Unavailable
from baton.core.request import ChoiceId
from coordinator.policy.pool import ORDER_BITS, RUNNING_SHIFT, Pool, Prefix, Worker
from coordinator.policy.workers import WorkerTable

PREFIX_SLACK = 4
START_TOKENS = 128.0  # expected output length before any output has ended
_WEIGHT = 0.05  # of each new output in the moving average
_Place = tuple[int, int, int]
"""Position in the queue: priority, age, and submission number."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one choice of a request needs: prefill computes `prefill_tokens`, except those that it has cached;
    `kv_tokens` is the most tokens whose KV the sequence can ever hold. `prefix` names the full blocks that a worker may
    already hold. Lower `priority` goes first; within one priority, lower `age`."""

    name: ChoiceId
    prefill_tokens: int
    kv_tokens: int
    needs_decode: bool = True
    prefix: Prefix = field(default_factory=dict)
    age: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    name: ChoiceId
    prefill: str
    decode: str | None
    spare: str | None

    @property
    def targets(self) -> tuple[str, ...]:
        """The decode workers to which the KV is offered, in order of preference."""
        return tuple(worker for worker in (self.decode, self.spare) if worker is not None)


@dataclass(slots=True)
class _Active:
    """`prefill` is None once it is no longer needed: the KV has been handed over, or the worker is lost. `to_compute`
    is how many tokens it was expected to compute there. While it is `arriving`, its decode worker may not yet count its
    blocks. `produced` is the number of its known tokens; once that exceeds `room`, it needs another block at its decode
    worker. `growth` is how many further blocks it is expected to need."""

    ticket: Ticket
    prefill: str | None
    decode: str | None
    to_compute: int
    prefilling: bool = True
    arriving: bool = True
    produced: int = 0
    room: int = 0
    growth: int = 0


class OutputExpectation:
    """Estimates how many blocks a sequence will need: those of its prompt and of an output of recent average length.

    `max_tokens` is a bad estimate: most outputs end long before it, so reserving for it leaves most of the memory idle.
    The prompt alone is a bad estimate too: sequences admitted without room to grow preempt each other, and preempted
    ones are recomputed.

    Complete state: `mean_tokens`, a moving average of the lengths of ended outputs.
    """

    def __init__(self) -> None:
        self.mean_tokens = START_TOKENS

    def ended(self, produced: int) -> None:
        """Records that an output of `produced` tokens has ended, for any reason."""
        if produced > 0:
            self.mean_tokens += _WEIGHT * (produced - self.mean_tokens)

    def blocks(self, prefill_tokens: int, kv_tokens: int, block_size: int) -> int:
        """Returns all blocks that a sequence is expected to need, at most those of `kv_tokens`."""
        return _blocks(min(kv_tokens, prefill_tokens + round(self.mean_tokens)), block_size)

    def growth(self, prefill_tokens: int, kv_tokens: int, produced: int, block_size: int) -> int:
        """Returns the further blocks that a placed sequence is expected to need, at least the one that decode keeps
        free."""
        expected = self.blocks(prefill_tokens, kv_tokens, block_size)
        return max(1, expected - _blocks(prefill_tokens + produced, block_size))


class Dispatcher:
    """Complete state: the queue (`_order` sorts it by priority, age and arrival), how many choices of each request are
    still to be queued, the active requests with what they hold, the counters of its placements in the worker table, the
    expected output length, and the request for which `place` last found no room, with the pool that lacked it."""

    def __init__(self, workers: WorkerTable, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._workers = workers
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._queue: dict[ChoiceId, tuple[_Place, Ticket]] = {}
        self._order: list[tuple[_Place, ChoiceId]] = []
        self._queued_tokens = 0
        self._to_come: Counter[ChoiceId] = Counter()  # by the name of the first choice
        self._submitted = 0
        self._active: dict[ChoiceId, _Active] = {}
        self._blocked: tuple[object, Pool] | None = None
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
        """Returns a role that has no ready worker, if any."""
        pools = self._workers.prefill, self._workers.decode
        return next((pool.role for pool in pools if not any(w.ready for w in pool.workers)), None)

    def forget_worker(self, worker_id: str) -> None:
        """Drops references to a lost worker and its counters. What requests hold elsewhere stays until `finish`."""
        for active in self._active.values():
            if active.prefill == worker_id:
                active.prefill, active.prefilling = None, False
            if active.decode == worker_id:
                active.decode, active.growth = None, 0

    @property
    def held_block_sizes(self) -> set[int]:
        """Block sizes in pools with cached blocks: for these a request's prefix is worth computing."""
        pools = self._workers.prefill, self._workers.decode
        return {size for pool in pools if pool.index for size in pool.block_sizes}

    def submit(self, ticket: Ticket, choices: int = 1) -> None:
        """Queues a request, or refuses it before any work is done. Reserves queue room for all its `choices`:
        `submit_later` queues the later ones, and `forget` releases the room of those that are never queued.

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
        if ticket.prefill_tokens > self._max_tokens:  # a retry cannot succeed
            what = f"the prompt has {ticket.prefill_tokens} tokens; at most {self._max_tokens} may wait"
            raise ContextLengthExceeded(what, code="exceeds_queue", param="prompt")
        # Later choices share the prompt's tokens; more choices than the limit are accepted into an empty queue.
        full = len(self._queue) + self._to_come.total() + choices > max(self._max_requests, choices)
        if full or self._queued_tokens + ticket.prefill_tokens > self._max_tokens:
            raise Unavailable(
                f"{len(self._queue)} choices with {self._queued_tokens} prompt tokens are already waiting",
                retry_after_s=self._drain_estimate_s(),
            )
        unservable = self.unservable(ticket, self.capacity())
        if unservable is not None:
            message, code = unservable
            raise ContextLengthExceeded(message, code=code, param="max_tokens")  # a retry cannot succeed
        self.enqueue(ticket)
        if choices > 1:
            self._to_come[ticket.name] = choices - 1

    def submit_later(self, ticket: Ticket, first: ChoiceId) -> None:
        """Queues a later choice of the request whose first choice is `first`."""
        if self._to_come[first] > 1:
            self._to_come[first] -= 1
        else:
            del self._to_come[first]
        self.enqueue(ticket)

    @property
    def incomplete(self) -> set[ChoiceId]:
        """The first choices of requests with later choices still to be queued."""
        return set(self._to_come)

    def forget(self, first: ChoiceId) -> None:
        """Releases the queue room of a request's choices that were never queued."""
        del self._to_come[first]

    def enqueue(self, ticket: Ticket) -> None:
        """Queues an accepted request by its priority and age, regardless of the limits."""
        self._submitted += 1
        key = (ticket.priority, ticket.age, self._submitted)
        self._queue[ticket.name] = key, ticket
        insort(self._order, (key, ticket.name))
        self._queued_tokens += ticket.prefill_tokens

    def place(self) -> list[Placement]:
        """Dequeues the requests that can start now, in order, and returns their placements."""
        placed: list[Placement] = []
        position = 0
        while position < len(self._order):
            ticket = self._queue[self._order[position][1]][1]
            if self._still_blocked(ticket):
                break
            prefill = self._pick_prefill(ticket)
            decode, spare = self._pick_decode(ticket) if prefill is not None and ticket.needs_decode else (None, None)
            if prefill is None or (ticket.needs_decode and decode is None):
                if self.unservable(ticket, self.capacity()) is None:
                    pool = self._workers.prefill if prefill is None else self._workers.decode
                    pool.grown, self._blocked = False, (self._wanted(ticket), pool)
                    break
                position += 1  # it waits for another worker and does not block the queue
                continue
            to_compute = self._to_compute(prefill, ticket)
            prefill.count(backlog=to_compute)
            self._dequeue(ticket.name)
            active = self._active[ticket.name] = _Active(ticket, prefill.worker_id, None, to_compute)
            self._take_decode(active, decode)
            placed.append(Placement(ticket.name, prefill.worker_id, decode, spare))
        return placed

    def _still_blocked(self, ticket: Ticket) -> bool:
        """Returns whether `place` last found no room for it, and neither its needs nor the room have changed since."""
        return self._blocked is not None and not self._blocked[1].grown and self._blocked[0] == self._wanted(ticket)

    def _wanted(self, ticket: Ticket) -> object:
        """Returns its submission and everything that decides about its placement except the room of workers."""
        return self._queue[ticket.name][0], round(self.expectation.mean_tokens), self.capacity()

    def reassign(self, name: ChoiceId) -> Placement | None:
        """Reserves a decode worker for parked KV; returns None if none has room now."""
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
        """Records that the spare accepted the sequence instead of the preferred decode worker."""
        active = self._active.get(name)
        if active is None or active.decode == decode:
            return
        self._release_decode(active)
        if self._workers.get(decode) is not None:  # else it is lost; a later one of that name is a new one
            self._take_decode(active, decode)

    def prefilled(self, name: ChoiceId) -> None:
        """Records that its first token is known: prefill has nothing left to compute for it."""
        active = self._active.get(name)
        if active is not None and active.prefilling:
            active.prefilling = False
            worker = self._workers.get(active.prefill or "")
            if worker is not None:
                worker.count(backlog=-active.to_compute)

    def handed_over(self, name: ChoiceId) -> None:
        """Records that decode has all KV: the prefill worker is no longer needed."""
        self.prefilled(name)
        active = self._active.get(name)
        if active is None:
            return
        active.prefill = None
        worker = self._workers.get(active.decode or "")
        if worker is not None and active.arriving:
            worker.count(reserved=-_blocks(active.ticket.prefill_tokens, worker.block_size))
        active.arriving = False

    def produced(self, name: ChoiceId, tokens: int) -> None:
        """Records that `tokens` tokens of an active request are known since this dispatch."""
        active = self._active.get(name)
        if active is None:
            return
        active.produced = tokens
        if tokens > active.room and (worker := self._workers.get(active.decode or "")) is not None:
            self._expect_growth(active, worker)

    def finish(self, name: ChoiceId, *, rescheduled: bool = False) -> None:
        """Frees everything that a request held: it has ended, or is rescheduled and its output is not complete."""
        self._dequeue(name)
        self.prefilled(name)
        active = self._active.pop(name, None)
        if active is not None:
            self._release_decode(active)
            if active.ticket.needs_decode and not rescheduled:
                self.expectation.ended(active.produced)

    def check(self) -> None:
        """Raises InvariantError if the counters of the worker table do not match what active requests hold."""
        at_prefill: dict[str, list[_Active]] = {}
        at_decode: dict[str, list[_Active]] = {}
        for active in self._active.values():
            at_prefill.setdefault(active.prefill or "", []).append(active)
            at_decode.setdefault(active.decode or "", []).append(active)
        for worker in self._workers.present():
            mine = at_decode.get(worker.worker_id, [])
            blocks = sum(_blocks(a.ticket.prefill_tokens, worker.block_size) for a in mine if a.arriving)
            tokens = sum(a.to_compute for a in at_prefill.get(worker.worker_id, []) if a.prefilling)
            counted = (worker.reserved_blocks, worker.backlog_tokens, worker.running, worker.growth)
            if (blocks, tokens, len(mine), growth := sum(a.growth for a in mine)) != counted:
                what = f"{blocks} blocks, {tokens} tokens, {len(mine)} running that grow by {growth}"
                raise InvariantError(f"{worker}, growing by {worker.growth}, should hold {what}")
        if self._queued_tokens != sum(t.prefill_tokens for _, t in self._queue.values()):
            raise InvariantError(f"queued tokens are not {self._queued_tokens}")
        if self._to_come and min(self._to_come.values()) < 1:
            raise InvariantError(f"choices still to come are {self._to_come}")
        if self._order != sorted((key, name) for name, (key, _) in self._queue.items()):
            raise InvariantError("the order of the queue does not match its requests")

    def capacity(self) -> Mapping[Role, int]:
        """Returns for how many tokens of one sequence each role can hold KV; draining workers do not count."""
        return {pool.role: pool.capacity for pool in (self._workers.prefill, self._workers.decode) if pool.capacity}

    def unservable(
        self, ticket: Ticket, capacity: Mapping[Role, int], *, parked: bool = False
    ) -> tuple[str, str] | None:
        """Returns why no present worker can ever serve a request, with an error code; None if one can. When `parked`,
        it needs only a decode worker."""
        needs: list[tuple[Role, int]] = [] if parked else [("prefill", ticket.prefill_tokens)]
        if ticket.needs_decode:
            needs.append(("decode", ticket.kv_tokens))
        for role, tokens in needs:
            most = capacity.get(role)
            if most is None:
                return f"no {role} worker is left", f"no_{role}_worker"
            if tokens > most:
                return (
                    f"the request needs KV for {tokens} tokens; the largest {role} worker holds {most}",
                    ErrorCode.EXCEEDS_POOL,
                )
        return None

    def _to_compute(self, worker: Worker, ticket: Ticket) -> int:
        """Returns how many tokens the worker has to compute: at least the last one."""
        held = worker.held.count(ticket.prefix.get(worker.block_size, ())) * worker.block_size
        return max(1, ticket.prefill_tokens - held)

    def _pick_prefill(self, ticket: Ticket) -> Worker | None:
        """Returns the worker with room and the fewest tokens to compute; an idle one accepts a prompt of any length."""
        pool, tokens = self._workers.prefill, ticket.prefill_tokens
        best: tuple[int, int] | None = None
        for held, workers in itertools.chain(pool.holders(ticket.prefix), ((0, pool.workers),)):
            need = max(1, tokens - held)
            if best is not None and best[0] < need:
                break  # workers that hold less have more to compute, even without a backlog
            rank = min(pool.fitting(workers, tokens, dict.fromkeys(pool.block_sizes, need)), default=None)
            if rank is not None:
                score = (rank >> ORDER_BITS) + need, rank
                best = score if best is None else min(best, score)
        return None if best is None else pool.ranked(best[1])

    def _pick_decode(self, ticket: Ticket) -> tuple[str | None, str | None]:
        """Returns the worker with room that holds the longest prefix and is not much fuller than others, and a
        spare."""
        pool, prefill, total = self._workers.decode, ticket.prefill_tokens, ticket.kv_tokens
        room = {size: self.expectation.blocks(prefill, total, size) for size in pool.block_sizes}
        fits = pool.fitting(pool.workers, total, room)
        if not fits:
            return None, None
        much_fuller = pool.ranked(min(fits)).running + PREFIX_SLACK + 1 << RUNNING_SHIFT
        chosen: list[int] = []
        for _, workers in pool.holders(ticket.prefix):
            near = pool.fitting(workers, total, room)
            while near and len(chosen) < 2 and (rank := min(near)) < much_fuller:
                chosen.append(rank)
                near.remove(rank)
            if len(chosen) > 1:
                break
        for rank in chosen:
            fits.remove(rank)
        while fits and len(chosen) < 2:
            chosen.append(min(fits))
            fits.remove(chosen[-1])
        first, *spare = (pool.ranked(rank).worker_id for rank in chosen)
        return first, spare[0] if spare else None

    def _expect_growth(self, active: _Active, worker: Worker) -> None:
        """Updates how many blocks a sequence on its decode worker, or on its way there, is expected to need beyond
        those of its prompt and output so far. Called again when the sequence has started to fill one of them."""
        ticket = active.ticket
        before, size = active.growth, worker.block_size
        active.room = _blocks(ticket.prefill_tokens + active.produced, size) * size - ticket.prefill_tokens
        active.growth = self.expectation.growth(ticket.prefill_tokens, ticket.kv_tokens, active.produced, size)
        worker.count(growth=active.growth - before)

    def _take_decode(self, active: _Active, decode: str | None) -> None:
        active.decode, active.arriving = decode, True
        worker = self._workers.get(decode or "")
        if worker is not None:
            worker.count(reserved=_blocks(active.ticket.prefill_tokens, worker.block_size), running=1)
            self._expect_growth(active, worker)

    def _release_decode(self, active: _Active) -> None:
        worker = self._workers.get(active.decode or "")
        if worker is not None:
            reserved = _blocks(active.ticket.prefill_tokens, worker.block_size) if active.arriving else 0
            worker.count(reserved=-reserved, running=-1, growth=-active.growth)
        active.decode, active.growth = None, 0

    def _dequeue(self, name: ChoiceId) -> None:
        key, ticket = self._queue.pop(name, (None, None))
        if key is not None and ticket is not None:
            del self._order[bisect_left(self._order, (key, name))]
            self._queued_tokens -= ticket.prefill_tokens

    def _drain_estimate_s(self) -> float:
        """Estimates in how many seconds half of the queue has drained, at 0.1 s per step."""
        budget = sum(w.step_tokens for w in self._workers.present() if w.ready and w.role == "prefill") or 1
        return max(1.0, round(self._queued_tokens / budget * 0.05))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
