"""Admission and routing: which request goes to which pair of workers, and when.

The coordinator holds the queue (late dispatch): a prefill worker has at most two step budgets of uncomputed tokens, so
what waits can still go anywhere. A request is dispatched when a prefill worker has room and a decode worker has blocks
for its prompt and as much output as answers have had of late (expectation.py), beside what the sequences there are
expected to grow by; and would have enough for all its output were it alone: what is accepted can finish. First come
first served; the head waits for blocks rather than being overtaken, so a long request is not starved by short ones.

Of several prefill workers the one is named that would have computed the prompt first: the fewest tokens to compute, in
its backlog and of this prompt, of which it may hold a prefix already. Of decode workers the one that holds the longest
prefix, unless PREFIX_SLACK more sequences run there than on the emptiest.
"""

from __future__ import annotations

from collections import OrderedDict

from baton.core.commands import Role
from baton.core.errors import ContextLengthExceeded, DuplicateRequest, InvariantError, Unavailable
from baton.core.events import BlockNews
from baton.core.request import ChoiceId
from coordinator.policy.expectation import OutputExpectation
from coordinator.policy.ticket import Active, Placement, Ticket
from coordinator.policy.worker_view import WorkerView

BACKLOG_STEPS = 2
PREFIX_SLACK = 4


class Dispatcher:
    """Complete state: the queue, the active requests with what they hold, the view of each worker, and how long answers
    are expected to be."""

    def __init__(self, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._queue: OrderedDict[ChoiceId, Ticket] = OrderedDict()
        self._queued_tokens = 0
        self._active: dict[ChoiceId, Active] = {}
        self._workers: dict[str, WorkerView] = {}
        self.expectation = OutputExpectation()

    def __repr__(self) -> str:
        ready = sum(w.ready for w in self._workers.values())
        return f"<Dispatcher {len(self._queue)} queued, {len(self._active)} active | {ready} workers ready>"

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def missing_pool(self, *, even_unready: bool = False) -> Role | None:
        """The role that no ready worker has, if any; with `even_unready`, that no worker at all has."""
        roles = {w.role for w in self._workers.values() if w.ready or even_unready}
        return "prefill" if "prefill" not in roles else "decode" if "decode" not in roles else None

    def add_worker(self, view: WorkerView) -> None:
        self._workers[view.worker_id] = view

    def remove_worker(self, worker_id: str) -> list[ChoiceId]:
        """Forgets a worker and returns the requests that needed it: those on it, and queued ones that no other could
        hold (they would block the queue). Holds on it are gone at once, for another incarnation may come under the
        same name; those elsewhere stay until `finish`."""
        self._workers.pop(worker_id, None)
        hit: list[ChoiceId] = []
        for name, active in self._active.items():
            if active.prefill == worker_id:
                hit.append(name)
                active.prefill, active.prefilling = None, False
            if active.decode == worker_id:
                hit.append(name)
                active.decode = None
        hit += [t.name for t in self._queue.values() if self._too_large(t) is not None]
        return hit

    def set_ready(self, worker_id: str, ready: bool) -> None:
        if worker_id in self._workers:
            self._workers[worker_id].ready = ready

    @property
    def held_block_sizes(self) -> set[int]:
        """Block sizes of the workers that hold anything: for these a request's prefix is worth knowing."""
        return {w.block_size for w in self._workers.values() if len(w.held)}

    def news(self, worker_id: str, news: BlockNews) -> None:
        """What a worker holds has changed."""
        if worker_id in self._workers:
            self._workers[worker_id].held.update(news)

    def submit(self, ticket: Ticket) -> None:
        """Queues a request, or refuses it before any work was done.

        Raises:
            DuplicateRequest: the id is in flight.
            ContextLengthExceeded: no pair of workers could ever hold it.
            Unavailable: a pool is missing, or the queue is full.
        """
        if ticket.name in self._queue or ticket.name in self._active:
            raise DuplicateRequest(f"request {ticket.name} is already in flight", param="request_id")
        missing = self.missing_pool()
        if missing is not None:
            raise Unavailable(f"no {missing} worker is ready", code=f"no_{missing}_worker", retry_after_s=2)
        if len(self._queue) >= self._max_requests or self._queued_tokens + ticket.prefill_tokens > self._max_tokens:
            raise Unavailable(
                f"{len(self._queue)} requests with {self._queued_tokens} prompt tokens are waiting already",
                code="overloaded",
                retry_after_s=self._drain_estimate_s(),
            )
        too_large = self._too_large(ticket)
        if too_large is not None:
            raise ContextLengthExceeded(too_large, code="exceeds_pool", param="max_tokens")  # another try is in vain
        self._queue[ticket.name] = ticket
        self._queued_tokens += ticket.prefill_tokens

    def submit_first(self, ticket: Ticket) -> None:
        """Queues a request that was accepted before, ahead of all others and whatever the queue's limits.

        Raises:
            Unavailable: no worker that is here could ever hold it.
        """
        too_large = self._too_large(ticket)
        if too_large is not None:
            raise Unavailable(too_large, code="exceeds_pool")
        self._queue[ticket.name] = ticket
        self._queue.move_to_end(ticket.name, last=False)
        self._queued_tokens += ticket.prefill_tokens

    def place(self) -> list[Placement]:
        """Takes from the queue what can start now, in order."""
        placed: list[Placement] = []
        while self._queue:
            ticket = next(iter(self._queue.values()))
            prefill = self._pick_prefill(ticket)
            if prefill is None:
                break
            decode, spare = None, None
            if ticket.needs_decode:
                decode, spare = self._pick_decode(ticket, exclude=frozenset())
                if decode is None:
                    break
            to_compute = self._to_compute(prefill, ticket)
            prefill.backlog_tokens += to_compute
            self._dequeue(ticket.name)
            active = self._active[ticket.name] = Active(ticket, prefill.worker_id, None, to_compute)
            self._take_decode(active, decode)
            placed.append(Placement(ticket.name, prefill.worker_id, decode, spare))
        return placed

    def reassign(self, name: ChoiceId, refused: frozenset[str]) -> Placement | None:
        """Names another decode worker for parked KV, or None when none has room now."""
        active = self._active.get(name)
        if active is None or active.prefill is None:
            return None
        self._release_decode(active)
        decode, spare = self._pick_decode(active.ticket, exclude=refused)
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
        if decode in self._workers:  # else it is gone, and a later one of that name is another
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

    def told(self, worker_id: str, blocks_free: int, preempted: int) -> None:
        """What a worker says of its blocks, and of sequences that wait there for some."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.blocks_free, worker.preempted = blocks_free, preempted

    def finish(self, name: ChoiceId) -> None:
        """The request has ended, well or not: everything it held is free."""
        self._dequeue(name)
        self.prefilled(name)
        active = self._active.pop(name, None)
        if active is not None:
            self._release_decode(active)
            if active.ticket.needs_decode:
                self.expectation.ended(active.produced)

    def workers_of(self, name: ChoiceId) -> tuple[str, ...]:
        active = self._active.get(name)
        return () if active is None else tuple(w for w in (active.prefill, active.decode) if w is not None)

    def check(self) -> None:
        """Raises InvariantError when what workers are said to hold is not what active requests hold."""
        for worker in self._workers.values():
            mine = [a for a in self._active.values() if a.decode == worker.worker_id]
            blocks = sum(self._blocks(worker, a.ticket.prefill_tokens) for a in mine if a.arriving)
            tokens = sum(a.to_compute for a in self._active.values() if a.prefilling and a.prefill == worker.worker_id)
            if (blocks, tokens, len(mine)) != (worker.reserved_blocks, worker.backlog_tokens, worker.running):
                raise InvariantError(f"{worker} should hold {blocks} blocks, {tokens} tokens, {len(mine)} running")
        if self._queued_tokens != sum(t.prefill_tokens for t in self._queue.values()):
            raise InvariantError(f"queued tokens are not {self._queued_tokens}")

    def _too_large(self, ticket: Ticket) -> str | None:
        """Why no worker of a pool could ever hold a request, if so. An empty pool is another matter."""
        for role, tokens in (("prefill", ticket.prefill_tokens), ("decode", ticket.total_tokens)):
            if role == "decode" and not ticket.needs_decode:
                continue
            pool = [w for w in self._workers.values() if w.role == role]
            if pool and not any(w.could_hold(tokens) for w in pool):
                most = max(min(w.max_tokens, w.blocks_total * w.block_size) for w in pool)
                return f"the request needs KV for {tokens} tokens; the largest {role} worker holds {most}"
        return None

    def _blocks(self, worker: WorkerView, tokens: int) -> int:
        return -(-tokens // worker.block_size)

    def _expected_blocks(self, worker: WorkerView, ticket: Ticket) -> int:
        return self.expectation.blocks(ticket.prefill_tokens, ticket.total_tokens, worker.block_size)

    def _growth(self, worker: WorkerView) -> int:
        """Blocks that sequences on a decode worker, or on their way there, are expected to take beyond their prompts'
        and what they have."""
        return sum(
            self.expectation.growth(a.ticket.prefill_tokens, a.ticket.total_tokens, a.produced, worker.block_size)
            for a in self._active.values()
            if a.decode == worker.worker_id
        )

    def _to_compute(self, worker: WorkerView, ticket: Ticket) -> int:
        """At least the last token always is."""
        return max(1, ticket.prefill_tokens - worker.held_tokens(ticket.prefix))

    def _pick_prefill(self, ticket: Ticket) -> WorkerView | None:
        """The one with the least to compute under its cap; an idle one takes a prompt of any length."""
        fits = [
            w
            for w in self._workers.values()
            if w.ready
            and w.role == "prefill"
            and (
                w.backlog_tokens == 0 or w.backlog_tokens + self._to_compute(w, ticket) <= BACKLOG_STEPS * w.step_tokens
            )
            and w.could_hold(ticket.prefill_tokens)
        ]

        def score(w: WorkerView) -> tuple[int, int, str]:
            return w.backlog_tokens + self._to_compute(w, ticket), w.backlog_tokens, w.worker_id

        return min(fits, key=score, default=None)

    def _pick_decode(self, ticket: Ticket, exclude: frozenset[str]) -> tuple[str | None, str | None]:
        """Among those with room the one that holds most of the prefix and is not much fuller than others, and a
        spare."""
        fits = [
            w
            for w in self._workers.values()
            if w.ready
            and w.role == "decode"
            and w.worker_id not in exclude
            and w.could_hold(ticket.total_tokens)
            and self._expected_blocks(w, ticket) <= w.blocks_left(self._growth(w))
        ]
        emptiest = min((w.running for w in fits), default=0)

        def score(w: WorkerView) -> tuple[int, int, int, str]:
            held = w.held_tokens(ticket.prefix) if w.running <= emptiest + PREFIX_SLACK else 0
            return -held, w.running, w.reserved_blocks, w.worker_id

        fits.sort(key=score)
        first = fits[0].worker_id if fits else None
        return first, fits[1].worker_id if len(fits) > 1 else None

    def _take_decode(self, active: Active, decode: str | None) -> None:
        active.decode, active.arriving = decode, True
        if decode is not None:
            worker = self._workers[decode]
            worker.reserved_blocks += self._blocks(worker, active.ticket.prefill_tokens)
            worker.running += 1

    def _release_decode(self, active: Active) -> None:
        worker = self._workers.get(active.decode or "")
        if worker is not None:
            if active.arriving:
                worker.reserved_blocks -= self._blocks(worker, active.ticket.prefill_tokens)
            worker.running -= 1
        active.decode = None

    def _dequeue(self, name: ChoiceId) -> None:
        ticket = self._queue.pop(name, None)
        if ticket is not None:
            self._queued_tokens -= ticket.prefill_tokens

    def _drain_estimate_s(self) -> float:
        """A guess at when the queue has half drained: one step a tenth of a second."""
        budget = sum(w.step_tokens for w in self._workers.values() if w.ready and w.role == "prefill") or 1
        return max(1.0, round(self._queued_tokens / budget * 0.05))
