"""The dispatcher against a model of its contract, in any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.errors import DuplicateRequest, Unavailable
from baton.core.events import KVCacheEvents
from coordinator.policy.dispatch import Dispatcher, Placement, Ticket
from coordinator.policy.pool import BACKLOG_STEPS, Worker
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker

MAX_REQUESTS, MAX_TOKENS = 4, 60
HINTS = tuple(bytes([n]) * 8 for n in range(3))
hints = st.sampled_from(HINTS)
PREFILLS, DECODES = ["p0", "p1"], ["d0", "d1", "d2"]
prefill_ids, decode_ids = st.sampled_from(PREFILLS), st.sampled_from(DECODES)


class Model:
    """What each request holds, recomputed from the calls so far."""

    def __init__(self) -> None:
        self.queue: list[Ticket] = []
        self.placed: dict[str, Ticket] = {}
        self.prefill: dict[str, str | None] = {}
        self.decode: dict[str, str | None] = {}
        self.computing: set[str] = set()
        self.arrived: set[str] = set()
        self.workers: dict[str, Worker] = {}
        self.held: dict[str, set[bytes]] = {}
        self.cost: dict[str, int] = {}


class DispatcherMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.table, self.m, self.counter = WorkerTable(3.0), Model(), 0
        self.d = Dispatcher(self.table, MAX_REQUESTS, MAX_TOKENS)
        for worker in ("p0", "d0"):
            self.add(worker, 12)

    def add(self, worker: str, blocks: int) -> None:
        self.m.held[worker] = set()
        self.m.workers[worker] = add_worker(self.table, worker, blocks=blocks)

    def left(self, worker: str) -> int:
        mine = [self.m.placed[r] for r, d in self.m.decode.items() if d == worker]
        arriving = [self.m.placed[r] for r, d in self.m.decode.items() if d == worker and r not in self.m.arrived]
        return self.m.workers[worker].join.blocks_total - sum(-(-t.prefill_tokens // 4) for t in arriving) - len(mine)

    def backlog(self, worker: str) -> int:
        return sum(self.m.cost[r] for r in self.m.computing if self.m.prefill[r] == worker)

    def to_compute(self, worker: str, ticket: Ticket) -> int:
        held = [hint in self.m.held[worker] for hint in ticket.prefix[4]]
        return max(1, ticket.prefill_tokens - 4 * [*held, False].index(False))

    def pool_holds(self, role: str, tokens: int) -> bool:
        pool = [w for w in self.m.workers.values() if w.role == role]
        return any(-(-tokens // 4) <= w.join.blocks_total for w in pool)

    @rule(prefill=st.integers(1, 16), extra=st.integers(0, 12), decode=st.booleans())
    def submit(self, prefill: int, extra: int, decode: bool) -> None:
        self.counter += 1
        prefix = {4: HINTS[: (prefill - 1) // 4]}
        ticket = Ticket(f"r{self.counter}", prefill, prefill + extra, decode, prefix, self.counter)
        ready = {w.role for w in self.m.workers.values() if w.ready}
        queued = sum(t.prefill_tokens for t in self.m.queue)
        fits = (
            ready == {"prefill", "decode"}
            and len(self.m.queue) < MAX_REQUESTS
            and queued + prefill <= MAX_TOKENS
            and self.pool_holds("prefill", prefill)
            and (not decode or self.pool_holds("decode", prefill + extra))
        )
        if fits:
            self.d.submit(ticket)
            self.m.queue.append(ticket)
        else:
            with pytest.raises(Unavailable):
                self.d.submit(ticket)

    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        known = list(self.m.queue) + list(self.m.placed.values())
        if known:
            with pytest.raises(DuplicateRequest):
                self.d.submit(data.draw(st.sampled_from(known)))

    @rule()
    def place(self) -> None:
        for p in self.d.place():
            ticket = next(t for t in self.m.queue if not self.unservable(t))  # first come, first served
            self.m.queue.remove(ticket)
            assert p.name == ticket.name not in self.m.placed
            self.check_prefill(p, ticket)
            self.m.placed[p.name], self.m.prefill[p.name] = ticket, p.prefill
            self.check_decode(p, ticket)
            self.m.decode[p.name] = p.decode
            self.m.computing.add(p.name)

    def check_prefill(self, p: Placement, ticket: Ticket) -> None:
        worker, backlog, cost = self.m.workers[p.prefill], self.backlog(p.prefill), self.to_compute(p.prefill, ticket)
        self.m.cost[p.name] = cost
        assert worker.ready and worker.role == "prefill"
        assert backlog == 0 or backlog + cost <= BACKLOG_STEPS * worker.step_tokens

    def check_decode(self, p: Placement, ticket: Ticket) -> None:
        if not ticket.needs_decode:
            assert p.decode is None and p.spare is None
            return
        assert p.decode is not None and p.decode != p.spare
        for worker in [w for w in (p.decode, p.spare) if w is not None]:
            view = self.m.workers[worker]
            assert view.ready and view.role == "decode" and view.join.blocks_total >= -(-ticket.kv_tokens // 4)
            alone = worker not in self.m.decode.values()
            assert alone or self.left(worker) >= -(-ticket.prefill_tokens // 4)

    def unservable(self, ticket: Ticket) -> bool:
        """Returns whether no present worker could hold the request."""
        needs = [("prefill", ticket.prefill_tokens)] + [("decode", ticket.kv_tokens)] * ticket.needs_decode
        roles = {w.role for w in self.m.workers.values()}
        return any(role not in roles or not self.pool_holds(role, tokens) for role, tokens in needs)

    def draw_placed(self, data: st.DataObject) -> str | None:
        return data.draw(st.sampled_from(sorted(self.m.placed))) if self.m.placed else None

    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        if (r := self.draw_placed(data)) is not None:
            self.d.prefilled(r)
            self.m.computing.discard(r)

    @rule(data=st.data())
    def handed_over(self, data: st.DataObject) -> None:
        if (r := self.draw_placed(data)) is not None:
            self.d.handed_over(r)
            self.m.arrived.add(r)
            self.m.computing.discard(r)
            self.m.prefill[r] = None

    @rule(data=st.data(), to=decode_ids)
    def moved(self, data: st.DataObject, to: str) -> None:
        if (r := self.draw_placed(data)) is not None and self.m.placed[r].needs_decode:
            self.d.moved(r, to)
            if self.m.decode[r] != to:
                self.m.decode[r] = to if to in self.m.workers else None
                self.m.arrived.discard(r)

    @rule(data=st.data())
    def reassign(self, data: st.DataObject) -> None:
        if (r := self.draw_placed(data)) is None or not self.m.placed[r].needs_decode:
            return
        placement = self.d.reassign(r)
        if self.m.prefill[r] is None:
            assert placement is None
            return
        self.m.decode[r] = None
        if placement is not None:
            assert placement.prefill == self.m.prefill[r]
            self.check_decode(placement, self.m.placed[r])
            self.m.decode[r] = placement.decode

    @rule(data=st.data())
    def reschedule(self, data: st.DataObject) -> None:
        """Reschedules a request: it returns to its place by age in the queue, even if the queue is full."""
        if (r := self.draw_placed(data)) is None:
            return
        ticket = self.m.placed[r]
        self.d.finish(r)
        self.d.enqueue(ticket)
        self.m.queue = sorted([*self.m.queue, ticket], key=lambda t: t.age)
        for table in (self.m.placed, self.m.prefill, self.m.decode):
            table.pop(r, None)
        self.m.computing.discard(r)
        self.m.arrived.discard(r)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        known = [t.name for t in self.m.queue] + sorted(self.m.placed) + ["unknown"]
        r = data.draw(st.sampled_from(known))
        self.d.finish(r)
        self.m.queue = [t for t in self.m.queue if t.name != r]
        for table in (self.m.placed, self.m.prefill, self.m.decode):
            table.pop(r, None)
        self.m.computing.discard(r)
        self.m.arrived.discard(r)

    @rule(worker=prefill_ids | decode_ids, blocks=st.integers(3, 30))
    def join(self, worker: str, blocks: int) -> None:
        if worker not in self.m.workers:
            self.add(worker, blocks)

    @rule(worker=prefill_ids | decode_ids)
    def remove(self, worker: str) -> None:
        if self.m.workers.pop(worker, None) is not None:
            self.table._workers[worker].state = "lost"
        self.d.forget_worker(worker)
        for r in self.m.placed:
            if self.m.prefill[r] == worker:
                self.m.prefill[r] = None
                self.m.computing.discard(r)
            if self.m.decode[r] == worker:
                self.m.decode[r] = None

    @rule(worker=prefill_ids | decode_ids, ready=st.booleans())
    def set_ready(self, worker: str, ready: bool) -> None:
        if worker in self.m.workers:
            self.m.workers[worker].state = "ready" if ready else "joining"

    @rule(
        worker=prefill_ids | decode_ids,
        stored=st.sets(hints),
        evicted=st.sets(hints),
        cleared=st.sampled_from([0, 0, 1]),
    )
    def post_events(self, worker: str, stored: set[bytes], evicted: set[bytes], cleared: bool) -> None:
        if worker in self.m.workers:
            self.m.workers[worker].update_held(KVCacheEvents(tuple(stored - evicted), tuple(evicted), cleared))
            before = set() if cleared else self.m.held[worker]
            self.m.held[worker] = before - evicted | (stored - evicted)

    @invariant()
    def invariants_hold(self) -> None:
        self.d.check()
        assert (self.d.num_queued, self.d.num_active) == (len(self.m.queue), len(self.m.placed))
        for r, active in self.d._active.items():
            assert (active.prefill, active.decode) == (self.m.prefill[r], self.m.decode[r])


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=100, stateful_step_count=40)
