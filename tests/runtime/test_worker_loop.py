"""The loops around a worker's scheduler, with a fake tier: deadlines, tombstones, bugs, the drain."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.core.commands import Abort, Assign, Command, Drain, Join, Prefill
from baton.core.errors import HandoffError, InvariantError, StartupError, innermost
from baton.core.events import Load, StepEvents, TokenEvent
from baton.core.request import SequenceId
from baton.core.sequence import Sequence
from baton.core.step import StepOutcome, StepPlan
from baton.runtime import step_thread, worker_loop
from baton.runtime.config import WorkerConfig
from baton.runtime.worker_loop import HOUSEKEEPING_S, WorkerLoop
from tests.support.builders import make_facts, make_request
from tests.support.limits import HANG_S, Stall
from tests.support.nodes import until

R = SequenceId("r")


class FakeTier:
    """`here` are its sequences; each gets one token per step. `check_idle` raises `bug`, if set. It is its own
    scheduler."""

    def __init__(self) -> None:
        self.here: set[SequenceId] = set()
        self.arriving: set[SequenceId] = set()
        self.commands: list[Command] = []
        self.ended: list[tuple[SequenceId, str]] = []
        self.bug: Exception | None = None
        self.plans = 0
        self.alone: SequenceId | None = None
        self.closed = self.stepping = False
        self.sequences: dict[SequenceId, Sequence] = {}

    def join(self) -> Join:
        return Join("w", "decode", 1, make_facts())

    def load(self) -> Load:
        return Load()

    def begin_step(self, now: float) -> StepPlan | None:
        if not (self.stepping and self.here):
            return None
        self.plans += 1
        return StepPlan(self.plans, ())

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        return StepEvents(outcome.step_id, tuple(TokenEvent(s, outcome.step_id - 1, (7,)) for s in sorted(self.here)))

    def runs_alone(self, plan: StepPlan) -> SequenceId | None:
        return self.alone

    def command(self, command: Command) -> None:
        self.commands.append(command)

    def end(self, sequence: SequenceId, reason: str) -> bool:
        self.ended.append((sequence, reason))
        known = sequence in self.here
        self.here.discard(sequence)
        return known

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self.here)

    @property
    def scheduler(self) -> FakeTier:
        return self

    def receiving(self, sequence: SequenceId) -> bool:
        return sequence in self.arriving & self.here

    def check_idle(self) -> None:
        if self.bug is not None:
            raise self.bug

    async def close(self) -> None:
        self.closed = True


class Running:
    def __init__(self) -> None:
        self.tier = FakeTier()
        config = WorkerConfig(worker_id="w", coordinator="127.0.0.1:1")  # nothing listens there: it redials without end
        self.step_bug: Exception | None = None
        self.step_gate: threading.Event | None = None
        self.step_s = 0.0
        self.main_loop = WorkerLoop(config, self.tier, self._step)
        self.sent: list[StepEvents] = []
        self.main_loop.session.post = self.sent.append  # type: ignore[method-assign]
        self.task = asyncio.create_task(self.main_loop.run())

    def _step(self, plan: StepPlan) -> StepOutcome:
        if self.step_bug is not None:
            raise self.step_bug
        if self.step_gate is not None:
            self.step_gate.wait(10.0)
        time.sleep(self.step_s)
        return StepOutcome(plan.step_id, ())

    async def outcome(self) -> BaseException | None:
        """Waits for `run` to end and returns its exception, if any."""
        with Stall() as stall:
            await asyncio.wait({self.task}, timeout=HANG_S)
        assert self.task.done(), "the worker goes on"
        assert stall.took_s < stall.allows(3.0)
        assert self.tier.closed
        return self.task.exception()


async def test_join_says_what_the_configuration_says() -> None:
    options = {"host": "h", "revision": "v2", "domain": "rack", "both_roles": "on", "replace": True, "step_tokens": 77}
    loop = WorkerLoop(
        WorkerConfig(worker_id="w", **options), FakeTier(), lambda plan: StepOutcome(plan.step_id, ()), "t"
    )
    join = loop.join("r")
    assert (join.host, join.revision, join.domain, join.run_id, join.token) == ("h", "v2", "rack", "r", "t")
    assert (join.both_roles, join.replace, join.step_tokens) == (True, True, 77)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    made = Running()
    yield made
    made.task.cancel()
    await asyncio.wait({made.task})


async def test_a_deadline_ends_a_sequence_and_reports_it(running: Running) -> None:
    running.tier.here.add(R)
    begun = time.monotonic()
    running.main_loop.track_deadline(replace(make_request("r"), deadline_s=0.15))
    await until(lambda: running.sent)
    assert time.monotonic() - begun >= 0.15
    assert running.tier.ended == [(R, "deadline")]
    (ended,) = running.sent[0].ended
    assert (ended.sequence, ended.reason, ended.code) == (R, "error", "deadline_exceeded")


async def test_a_deadline_of_an_absent_sequence_reports_nothing(running: Running) -> None:
    running.main_loop.track_deadline(replace(make_request("r"), deadline_s=0.05))
    await until(lambda: running.tier.ended)
    assert not running.sent and not len(running.main_loop.deadlines)


async def test_abort_ends_a_known_sequence_and_leaves_a_tombstone_for_an_unknown_one(running: Running) -> None:
    running.tier.here.add(R)
    running.main_loop.command(Abort(R, "client left", 5.0))
    assert not running.main_loop.is_tombstoned(R)
    running.main_loop.command(Abort(R, "client left", 0.0))  # nothing of it can arrive any more
    assert not len(running.main_loop.tombstones)
    running.main_loop.command(Abort(R, "client left", 5.0))
    assert running.main_loop.is_tombstoned(R)
    running.main_loop.command(assign := Assign(R, (), 2))
    assert running.tier.commands == [assign]


async def test_a_step_of_one_request_alone_begins_when_that_has_been_reported(running: Running) -> None:
    """The step may end the process: the coordinator must know of it before."""
    reported = asyncio.Event()

    async def sent(timeout_s: float) -> None:
        await reported.wait()

    running.main_loop.session.sent = sent  # type: ignore[method-assign]
    running.tier.here.add(R)
    running.tier.alone, running.tier.stepping = R, True
    running.main_loop.wake()
    await until(lambda: running.sent)
    await asyncio.sleep(0.05)
    assert running.sent == [StepEvents(alone=R)]
    reported.set()
    await until(lambda: len(running.sent) >= 4)
    assert [e.alone for e in running.sent[:4]] == [R, None, R, None] and running.sent[1].step_id == 1


async def test_steps_are_reported_in_order_and_stop_without_sequences(running: Running) -> None:
    running.tier.here.add(R)
    running.tier.stepping = True
    running.main_loop.wake()
    await until(lambda: len(running.sent) >= 3)
    running.tier.here.clear()
    await asyncio.sleep(0.05)
    assert [e.step_id for e in running.sent] == list(range(1, len(running.sent) + 1)) and running.main_loop.steps >= 3


@pytest.mark.parametrize("command", [Prefill(make_request("r", attempt=2)), Assign(R, (), 2)])
async def test_a_refused_command_is_reported_at_once_and_a_bug_ends_the_worker(
    running: Running, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Otherwise its choice waits for its deadline."""
    error: Exception = HandoffError("no KV")

    def raises(command: Command) -> None:
        raise error

    monkeypatch.setattr(running.tier, "command", raises)
    running.main_loop.command(command)
    (ended,) = (ended for events in running.sent for ended in events.ended)
    assert (ended.sequence, ended.code, ended.message) == (R._replace(attempt=2), "handoff_failed", "no KV")
    error = InvariantError("a block leaked")
    with pytest.raises(InvariantError):
        running.main_loop.command(command)


@pytest.mark.parametrize("where", ["invariants", "step"])
async def test_an_invariant_error_ends_the_worker(running: Running, where: str) -> None:
    """Its supervisor starts another; continuing with a wrong state would be worse."""
    if where == "invariants":
        running.tier.here.add(R)
        await asyncio.sleep(0.15)
        running.tier.bug = InvariantError("a block leaked")
        running.tier.here.clear()
    else:
        running.step_bug = InvariantError("a block leaked")
        running.tier.stepping = True
        running.tier.here.add(R)
        running.main_loop.wake()
    error = await running.outcome()
    assert isinstance(error, BaseExceptionGroup) and error.subgroup(InvariantError) is not None


async def test_an_invariant_error_in_a_hand_over_ends_the_worker(running: Running) -> None:
    first = InvariantError("the first")
    running.main_loop.fail(first)
    running.main_loop.fail(InvariantError("what came of it"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(running.task, 30)
    assert caught.value.exceptions == (first,) and running.tier.closed


async def test_a_step_that_hangs_ends_the_worker(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_thread, "STEP_LIMIT_S", 0.2)
    released = running.step_gate = threading.Event()
    running.tier.stepping = True
    running.tier.here.add(R)
    running.main_loop.wake()
    error = await running.outcome()
    released.set()
    assert isinstance(error, BaseExceptionGroup) and error.subgroup(InvariantError) is not None
    assert "step 1 of 0 rows did not finish within 0.2 s" in str(error.subgroup(InvariantError).exceptions)  # type: ignore[union-attr]


async def test_the_step_limit_applies_to_each_step_separately(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit applies to one step, not to all steps together."""
    monkeypatch.setattr(step_thread, "STEP_LIMIT_S", 0.3)
    running.step_s = 0.02
    running.tier.stepping = True
    running.tier.here.add(R)
    running.main_loop.wake()
    await until(lambda: running.main_loop.steps >= 30, timeout_s=10)
    assert not running.task.done()


async def test_a_leak_is_detected_whenever_the_worker_is_idle(running: Running) -> None:
    running.tier.bug, running.tier.here = InvariantError("a block leaked"), {R}
    await asyncio.sleep(3 * HOUSEKEEPING_S)
    assert not running.task.done()  # what a sequence holds is no leak
    running.tier.bug = None
    running.tier.here.clear()
    await asyncio.sleep(3 * HOUSEKEEPING_S)
    running.tier.bug = InvariantError("a block leaked")
    error = await running.outcome()
    assert isinstance(error, BaseExceptionGroup) and error.subgroup(InvariantError) is not None


async def test_a_drain_waits_for_running_sequences_and_ends_without_error(running: Running) -> None:
    running.tier.here.add(R)
    running.main_loop.command(Drain(2 * HANG_S))
    await asyncio.sleep(0.15)
    assert running.main_loop.draining and not running.task.done()
    running.tier.here.clear()
    assert await running.outcome() is None
    assert not running.tier.ended


async def test_a_drain_gives_sequences_back_after_its_timeout_as_draining(running: Running) -> None:
    """Not as abandoned, which is a failure of the worker and counts against the retry budget."""
    running.tier.here.add(R)
    running.main_loop.command(Drain(0.1))
    assert await running.outcome() is None
    assert running.tier.ended == [(R, "the drain timeout has passed")]
    (ended_event,) = [e for sent in running.sent for e in sent.ended]
    assert (ended_event.sequence, ended_event.code) == (R, "draining")


async def test_a_drained_worker_takes_no_other_role_since_kv_may_still_arrive(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledged = asyncio.Event()

    async def drained(timeout_s: float) -> None:
        await acknowledged.wait()

    monkeypatch.setattr(running.main_loop.session, "drained", drained)
    running.tier.here.add(R)
    running.main_loop.command(Drain(0.1))
    await until(lambda: bool(running.tier.ended))
    running.main_loop.command(Drain(HANG_S, "prefill"))
    acknowledged.set()
    assert await running.outcome() is None
    assert running.main_loop.next_role is None


async def test_abandoned_sequences_are_reported_to_the_coordinator(running: Running) -> None:
    kept = SequenceId("kept")
    running.tier.here |= {R, kept}
    running.main_loop.abandon("nobody asked for it", keep=(kept,))
    ((ended_event,),) = [sent.ended for sent in running.sent]
    assert (ended_event.sequence, ended_event.reason, ended_event.code) == (
        R,
        "error",
        "abandoned",
    ) and "nobody asked" in ended_event.message
    assert running.tier.here == {kept}


class Device:
    """Computes a step when it is collected. `log` records the calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bug: Exception | None = None
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.log.append(f"launch {plan.step_id}")
        if self.bug is not None:
            raise self.bug
        self._launched.append(plan)

    def collect(self) -> StepOutcome:
        plan = self._launched.popleft()
        self.log.append(f"collect {plan.step_id}")
        return StepOutcome(plan.step_id, ())


class AheadTier(FakeTier):
    """Plans six steps, up to two ahead; the fourth waits for the outcome of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.out = 0

    def begin_step(self, now: float) -> StepPlan | None:
        if self.out == 2 or self.plans == 6 or (self.plans == 3 and self.out):
            return None
        self.plans += 1
        self.out += 1
        return StepPlan(self.plans, ())

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents:
        self.out -= 1
        return StepEvents(outcome.step_id)


@pytest.fixture
async def ahead() -> AsyncIterator[tuple[Running, Device]]:
    made = Running()
    made.task.cancel()
    await asyncio.wait({made.task})
    made.tier, device = AheadTier(), Device()
    made.main_loop = WorkerLoop(made.main_loop.config, made.tier, made._step, launcher=device)
    made.main_loop.session.post = made.sent.append  # type: ignore[method-assign]
    yield made, device
    made.task.cancel()
    await asyncio.wait({made.task})


async def test_a_step_is_launched_before_the_previous_one_is_collected(ahead: tuple[Running, Device]) -> None:
    running, device = ahead
    running.task = asyncio.create_task(running.main_loop.run())
    await until(lambda: len(running.sent) == 6)
    expected = "launch 1, launch 2, collect 1, launch 3, collect 2, collect 3, launch 4, launch 5, collect 4, launch 6"
    assert ", ".join(device.log) == expected + ", collect 5, collect 6"
    assert [events.step_id for events in running.sent] == [1, 2, 3, 4, 5, 6] and running.main_loop.steps == 6


async def test_a_launch_that_fails_ends_the_worker(ahead: tuple[Running, Device]) -> None:
    running, device = ahead
    device.bug = InvariantError("a plan that does not fit")
    running.task = asyncio.create_task(running.main_loop.run())
    error = await running.outcome()
    assert isinstance(error, BaseExceptionGroup) and error.subgroup(InvariantError) is not None
    assert device.log == ["launch 1"], "nothing is launched behind it"


async def test_abandoning_an_arriving_sequence_leaves_it_to_the_prefill_worker(running: Running) -> None:
    """The prefill worker has the KV, parks it and offers it to others: nothing is recomputed."""
    running.tier.here.add(R)
    running.tier.arriving.add(R)
    running.main_loop.abandon("the drain timeout has passed")
    ((ended_event,),) = [sent.ended for sent in running.sent]
    assert (ended_event.sequence, ended_event.code) == (R, "worker_lost") and not running.tier.here


async def test_a_check_without_a_coordinator_ends_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_loop, "CHECK_JOIN_S", 0.1)
    loop = WorkerLoop(
        WorkerConfig(check=True, coordinator="127.0.0.1:1"),
        tier := FakeTier(),
        lambda plan: StepOutcome(plan.step_id, ()),
    )
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(loop.run(), HANG_S)
    error = innermost(caught.value)
    assert isinstance(error, StartupError) and tier.closed
    assert "no coordinator at 127.0.0.1:1 replied within 0.1 s; start it first" in error.message
