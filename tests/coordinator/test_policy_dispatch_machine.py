"""The dispatcher against a model of its contract, in any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.errors import Unavailable
from baton.core.events import KVCacheEvents
from coordinator.policy.choice import Choice
from coordinator.policy.membership import WorkerState
from coordinator.policy.pool import BACKLOG_STEPS, Worker
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker, bring_to
from tests.support.placing import Placement, Placing, make_choice

MAX_REQUESTS, MAX_TOKENS = 4, 60
HINTS = tuple(bytes([n]) * 8 for n in range(3))
hints = st.sampled_from(HINTS)
PREFILLS, DECODES = ["p0", "p1"], ["d0", "d1", "d2"]
prefill_ids, decode_ids = st.sampled_from(PREFILLS), st.sampled_from(DECODES)


class Model:
    """What each request holds, recomputed from the calls so far."""

    def __init__(self) -> None:
        self.queue: list[Choice] = []
        self.placed: dict[str, Choice] = {}
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
        self.d = Placing(self.table, MAX_REQUESTS, MAX_TOKENS)
        for worker in ("p0", "d0"):
            self.add(worker, 12)

    def add(self, worker: str, blocks: int) -> None:
        self.m.held[worker] = set()
        self.m.workers[worker] = add_worker(self.table, worker, blocks=blocks)

    def left(self, worker: str) -> int:
        mine = [self.m.placed[r] for r, d in self.m.decode.items() if d == worker]
        arriving = [self.m.placed[r] for r, d in self.m.decode.items() if d == worker and r not in self.m.arrived]
        return (
            self.m.workers[worker].join.blocks_total
            - sum(-(-c.request.num_prefill_tokens // 4) for c in arriving)
            - len(mine)
        )

    def backlog(self, worker: str) -> int:
        return sum(self.m.cost[r] for r in self.m.computing if self.m.prefill[r] == worker)

    def to_compute(self, worker: str, choice: Choice) -> int:
        held = [hint in self.m.held[worker] for hint in choice.prefix[4]]
        return max(1, choice.request.num_prefill_tokens - 4 * [*held, False].index(False))

    def pool_holds(self, role: str, tokens: int) -> bool:
        pool = [w for w in self.m.workers.values() if w.role == role]
        return any(-(-tokens // 4) <= w.join.blocks_total for w in pool)

    @rule(prefill=st.integers(1, 16), extra=st.integers(1, 12), decode=st.booleans())
    def submit(self, prefill: int, extra: int, decode: bool) -> None:
        self.counter += 1
        prefix = {4: HINTS[: (prefill - 1) // 4]}
        extra = extra if decode else 0
        choice = make_choice(f"r{self.counter}", prefill, prefill + extra, prefix=prefix, age=self.counter)
        queued = sum(c.request.num_prefill_tokens for c in self.m.queue)
        if len(self.m.queue) < MAX_REQUESTS and queued + prefill <= MAX_TOKENS:  # also while a role has no worker
            self.d.submit(choice)
            self.m.queue.append(choice)
        else:
            with pytest.raises(Unavailable):
                self.d.submit(choice)

    @rule()
    def place(self) -> None:
        for p in self.d.place():
            choice = next(c for c in self.m.queue if not self.unservable(c))  # first come, first served
            self.m.queue.remove(choice)
            assert p.name == choice.name.request_id not in self.m.placed
            self.check_prefill(p, choice)
            self.m.placed[p.name], self.m.prefill[p.name] = choice, p.prefill
            self.check_decode(p, choice)
            self.m.decode[p.name] = p.decode
            self.m.computing.add(p.name)

    def check_prefill(self, p: Placement, choice: Choice) -> None:
        worker, backlog, cost = self.m.workers[p.prefill], self.backlog(p.prefill), self.to_compute(p.prefill, choice)
        self.m.cost[p.name] = cost
        assert worker.ready and worker.role == "prefill"
        assert backlog == 0 or backlog + cost <= BACKLOG_STEPS * worker.step_tokens

    def check_decode(self, p: Placement, choice: Choice) -> None:
        if not choice.needs_decode:
            assert p.decode is None and p.spare is None
            return
        assert p.decode is not None and p.decode != p.spare
        for worker in [w for w in (p.decode, p.spare) if w is not None]:
            view = self.m.workers[worker]
            assert (
                view.ready and view.role == "decode" and view.join.blocks_total >= -(-choice.request.max_kv_tokens // 4)
            )
            alone = worker not in self.m.decode.values()
            assert alone or self.left(worker) >= -(-choice.request.num_prefill_tokens // 4)

    def unservable(self, choice: Choice) -> bool:
        """Returns whether no present worker could hold the request."""
        needs = [("prefill", choice.request.num_prefill_tokens)] + [
            ("decode", choice.request.max_kv_tokens)
        ] * choice.needs_decode
        roles = {w.role for w in self.m.workers.values()}
        return any(role not in roles or not self.pool_holds(role, tokens) for role, tokens in needs)

    def draw_placed(self, data: st.DataObject) -> str | None:
        return data.draw(st.sampled_from(sorted(self.m.placed))) if self.m.placed else None

    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        if (r := self.draw_placed(data)) is not None:
            self.prefilled_now(r)

    def prefilled_now(self, r: str) -> None:
        self.d.prefilled(r)
        self.m.computing.discard(r)

    @rule(data=st.data(), to=decode_ids)
    def handed_over(self, data: st.DataObject, to: str) -> None:
        if (r := self.draw_placed(data)) is None or not self.m.placed[r].needs_decode:
            return
        self.d.handed_over(r, to)
        self.m.decode[r] = to if to in self.m.workers else None
        self.m.arrived.add(r)
        self.m.computing.discard(r)

    @rule(data=st.data())
    def reassign(self, data: st.DataObject) -> None:
        r = self.draw_placed(data)
        if r is None or not self.m.placed[r].needs_decode or r in self.m.arrived:
            return
        self.prefilled_now(r)
        placement = self.d.reassign(r)
        self.m.decode[r] = None
        if placement is not None:
            assert placement.prefill == self.m.prefill[r]
            self.check_decode(placement, self.m.placed[r])
            self.m.decode[r] = placement.decode

    def forget(self, r: str) -> None:
        for placed in (self.m.placed, self.m.prefill, self.m.decode):
            placed.pop(r, None)
        self.m.computing.discard(r)
        self.m.arrived.discard(r)

    def reschedule_now(self, r: str) -> None:
        choice = self.m.placed[r]
        self.d.reschedule(r)
        self.m.queue = sorted([*self.m.queue, choice], key=lambda c: (not c.prompt_charged, c.age))
        self.forget(r)

    @rule(data=st.data())
    def reschedule(self, data: st.DataObject) -> None:
        """Reschedules a request: it returns to its place by age before those that never ran, even if the queue is
        full."""
        if (r := self.draw_placed(data)) is not None:
            self.reschedule_now(r)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        known = [c.name.request_id for c in self.m.queue] + sorted(self.m.placed)
        if not known:
            return
        r = data.draw(st.sampled_from(known))
        self.d.finish(r)
        self.m.queue = [c for c in self.m.queue if c.name.request_id != r]
        self.forget(r)

    @rule(worker=prefill_ids | decode_ids, blocks=st.integers(3, 30))
    def join(self, worker: str, blocks: int) -> None:
        if worker not in self.m.workers:
            self.add(worker, blocks)

    @rule(worker=prefill_ids | decode_ids)
    def remove(self, worker: str) -> None:
        if self.m.workers.pop(worker, None) is not None:
            bring_to(self.table._workers[worker], WorkerState.LOST)
        for r in list(self.m.placed):
            if self.m.prefill[r] == worker and r not in self.m.arrived:
                self.reschedule_now(r)
            elif self.m.decode[r] == worker:
                self.m.decode[r] = None

    @rule(worker=prefill_ids | decode_ids, ready=st.booleans())
    def set_ready(self, worker: str, ready: bool) -> None:
        if worker in self.m.workers:
            bring_to(self.m.workers[worker], WorkerState.READY if ready else WorkerState.DISCONNECTED)

    @rule(
        worker=prefill_ids | decode_ids,
        stored=st.sets(hints),
        evicted=st.sets(hints),
        cleared=st.sampled_from([0, 0, 1]),
    )
    def post_events(self, worker: str, stored: set[bytes], evicted: set[bytes], cleared: bool) -> None:
        if worker in self.m.workers:
            self.m.workers[worker].update_cached(KVCacheEvents(tuple(stored - evicted), tuple(evicted), cleared))
            before = set() if cleared else self.m.held[worker]
            self.m.held[worker] = before - evicted | (stored - evicted)

    @invariant()
    def invariants_hold(self) -> None:
        self.d.check()
        assert self.d.dispatcher.num_queued == len(self.m.queue)
        assert self.d.choices.keys() == {c.name.request_id for c in self.m.queue} | self.m.placed.keys()
        for r in self.m.placed:
            choice, present = self.d.choices[r], self.table.get(self.m.decode[r] or "")
            assert choice.decode is present or (present is None and choice.decode is not None and choice.decode.lost)
            assert choice.prefill_worker == self.m.prefill[r]


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=100, stateful_step_count=40)
