"""A choice that waits is tried again whenever it may have room: a dispatcher that remembers what its choices lacked
places what one without memory does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.commands import AdapterStates
from baton.core.events import KVCacheEvents, Load
from coordinator.policy.choice import Stage
from coordinator.policy.membership import DISCONNECTED, LOST, READY, WorkerState
from coordinator.policy.pool import Worker
from coordinator.policy.quotas import Client
from coordinator.policy.split import Split
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker, bring_to
from tests.support.placing import Placement, Placing, make_choice

BLOCKS, STEP, HINTS = 24, 16, tuple(bytes([n]) * 8 for n in range(8))
SIZES = {"p0": 4, "p1": 4, "d0": 4, "d1": 8}
names = st.sampled_from(sorted(SIZES))


class Plain(Placing):
    """Tries each choice again in each `place`."""

    def place(self) -> list[Placement]:
        self.dispatcher._blocked = {}
        return super().place()


class WaitingMachine(RuleBasedStateMachine):
    @initialize(split=st.sampled_from(["always", "always", "auto", "never"]), workers=st.sets(names))
    def begin(self, split: Split, workers: set[str]) -> None:
        self.number = 0
        self.both = Placing(WorkerTable(3.0)), Plain(WorkerTable(3.0))
        for d in self.both:
            d.dispatcher.split = split
            d.dispatcher.expectation.mean_tokens = 20.0
        for name in {"p0", "d0", *workers}:
            self.join(name, BLOCKS)

    @rule(name=names, blocks=st.sampled_from([10, BLOCKS]))
    def join(self, name: str, blocks: int) -> None:
        for d in self.both:
            if d.table.get(name) is None:
                add_worker(d.table, name, blocks=blocks, block_size=SIZES[name], step_tokens=STEP, max_running=3)

    @rule(
        tenant=st.sampled_from("aab"),
        prompt=st.integers(1, 60),
        output=st.integers(0, 40),
        priority=st.sampled_from([0, 0, 0, 1]),
        adapter=st.sampled_from(["", "", "", "x"]),
    )
    def submit(self, tenant: str, prompt: int, output: int, priority: int, adapter: str) -> None:
        self.number += 1
        for d in self.both:
            choice = make_choice(
                f"r{self.number}",
                prompt,
                prompt + output,
                prefix={4: HINTS[: (prompt - 1) // 4]},
                age=self.number,
                priority=priority,
                adapter=adapter,
                client=Client(tenant, tenant),
            )
            if d.dispatcher.unservable(choice) is None:
                d.submit(choice)

    @precondition(lambda self: self.both[0].choices)
    @rule(data=st.data(), tokens=st.integers(0, 40), ends=st.booleans())
    def proceed(self, data: st.DataObject, tokens: int, ends: bool) -> None:
        """Moves a choice on to the next stage, or ends it."""
        name = data.draw(st.sampled_from(list(self.both[0].choices)))
        for d in self.both:
            stage = d.choices[name].stage
            if ends or stage in (Stage.QUEUED, Stage.DECODE):
                d.finish(name)
                continue
            d.prefilled(name) if stage is Stage.PREFILL else d.handed_over(name)
            d.produced(name, 1 + tokens)

    def change(self, name: str, change: Callable[[Worker], None]) -> None:
        for d in self.both:
            if (worker := d.table.get(name)) is not None:
                change(worker)

    @rule(name=st.sampled_from(["d0", "d1"]), free=st.integers(0, BLOCKS), preempted=st.sampled_from([0, 0, 1]))
    def report(self, name: str, free: int, preempted: int) -> None:
        self.change(name, lambda worker: setattr(worker, "load", Load(blocks_free=free, preempted=preempted)))

    @rule(name=st.sampled_from(["p0", "p1"]), stored=st.integers(0, len(HINTS)))
    def cache(self, name: str, stored: int) -> None:
        self.change(name, lambda worker: worker.update_cached(KVCacheEvents(stored=HINTS[:stored])))

    @rule(name=names, loaded=st.sampled_from([(), ("x",)]))
    def load_adapter(self, name: str, loaded: tuple[str, ...]) -> None:
        self.change(name, lambda worker: worker.update_adapters(AdapterStates(loaded)))

    @rule(name=st.sampled_from(["d0", "d1"]), computes=st.booleans())
    def redial(self, name: str, computes: bool) -> None:
        self.change(name, lambda worker: setattr(worker, "join", replace(worker.join, computes_prompts=computes)))

    @rule(name=names, state=st.sampled_from([READY, READY, DISCONNECTED, LOST]))
    def bring(self, name: str, state: WorkerState) -> None:
        self.change(name, lambda worker: bring_to(worker, state))

    @invariant()
    def same_placements(self) -> None:
        placed, plain = (d.place() for d in self.both)
        assert placed == plain
        self.both[0].check()


TestWaiting = WaitingMachine.TestCase
TestWaiting.settings = settings(max_examples=100, stateful_step_count=50)


def busy() -> tuple[Placing, Worker]:
    """One worker of each role; a choice runs at the decode worker."""
    d = Placing(WorkerTable(3.0))
    for name in ("p0", "d0"):
        add_worker(d.table, name, blocks=100, step_tokens=STEP)
    d.dispatcher.expectation.mean_tokens = 40.0
    d.submit(make_choice("runs", 8, 48))
    assert d.names() == ["runs"]
    d.handed_over("runs")
    return d, d.worker("d0")


def test_a_shorter_expected_output_admits_a_choice_that_waited_for_blocks() -> None:
    d, decode = busy()
    decode.load = Load(blocks_free=decode.growth + 8)
    d.submit(make_choice("waits", 8, 48))
    assert d.names() == [], "12 blocks"
    d.dispatcher.expectation.mean_tokens = 50.0
    assert d.names() == []
    d.dispatcher.expectation.mean_tokens = 10.0
    assert d.names() == ["waits"]


def test_room_for_one_of_two_that_wait_admits_it() -> None:
    d, decode = busy()
    decode.load = Load(blocks_free=decode.growth)
    d.submit(make_choice("long", 8, 48))
    assert d.names() == []
    d.submit(make_choice("urgent", 8, 32, priority=-1))
    assert d.names() == []
    decode.load = Load(blocks_free=decode.growth + 7)
    assert d.names() == [] and not d.dispatcher._blocked[next(iter(d.table.classes))].grown
    decode.load = Load(blocks_free=decode.growth + 8)
    assert d.names() == ["urgent"]
