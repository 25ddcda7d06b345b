"""What both kinds of worker share around their scheduler: the session, the step loop, deadlines, tombstones, drain.

One event loop owns all state; the engine computes on one thread of its own, from plans. Only this loop uses the
scheduler, also while a step computes, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Protocol

from baton.core.codes import ErrorCode
from baton.core.commands import Abort, Assign, Command, Drain, Join, Prefill, Role, SetAdapters, Welcome
from baton.core.deadlines import Deadlines, Tombstones
from baton.core.errors import BatonError, InvariantError, StartupError
from baton.core.events import Load, SequenceEnded, StepEvents
from baton.core.prefix_cache import KeptBlocks
from baton.core.request import GenerateRequest, SequenceId
from baton.core.sampling_limits import check_sampling, check_tokens
from baton.core.sequence import Sequence
from baton.core.step import StepOutcome, StepPlan
from baton.runtime.adapters import WorkerAdapters
from baton.runtime.config import WorkerConfig
from baton.runtime.session import WorkerSession
from baton.runtime.step_thread import Launcher, StepThread
from baton.runtime.tls import ClusterTls

log = logging.getLogger("baton.worker")
HOUSEKEEPING_S = 0.1
ALONE_REPORT_S = 1.0  # how long a step waits until the coordinator has the report which request it computes alone
SWEEP_S = 30.0  # between two removals of expired tombstones
CHECK_JOIN_S = 10.0  # how long a worker that is only checked waits for the coordinator
CHECK_POLL_S = 0.05
IDLE_S = 10.0  # how long steps and hand-overs may take to end once their sequences have ended
DRAINED_ACK_S = 2.0  # how long a worker that leaves waits for the coordinator's acknowledgement


class Scheduler(Protocol):
    """What the loop uses of the scheduler of either tier."""

    @property
    def sequences(self) -> Mapping[SequenceId, Sequence]: ...

    @property
    def kept(self) -> KeptBlocks:
        """What the worker keeps for its next role."""
        ...

    def sequence_ids(self) -> tuple[SequenceId, ...]: ...

    def runs_alone(self, plan: StepPlan) -> SequenceId | None:
        """Returns the only sequence of a step if its request is to be computed alone."""
        ...

    def check_idle(self) -> None:
        """With no sequence present, raises InvariantError if state of one is left. In constant time: it delays
        requests."""
        ...


class Tier(Protocol):
    """What a prefill or decode worker implements."""

    @property
    def scheduler(self) -> Scheduler: ...

    def join(self) -> Join:
        """Returns its join, without what the loop adds: the run, the token, and what `WorkerConfig` says."""
        ...

    def load(self) -> Load: ...

    def begin_step(self, now: float) -> StepPlan | None: ...

    def finish_step(self, outcome: StepOutcome, now: float) -> StepEvents: ...

    def command(self, command: Prefill | Assign) -> None:
        """Begins a sequence, or its next attempt. Raises BatonError if it cannot."""
        ...

    def end(self, sequence: SequenceId, reason: str) -> bool:
        """Ends one sequence without reporting it to the coordinator; False when it is not present."""
        ...

    def receiving(self, sequence: SequenceId) -> bool:
        """Whether its KV is still being received: the prefill worker then has all of it and reports the outcome."""
        ...

    async def close(self) -> None: ...


class WorkerLoop:
    """A worker around its tier, from its join to the end of its drain."""

    def __init__(
        self,
        config: WorkerConfig,
        tier: Tier,
        step: Callable[[StepPlan], StepOutcome],
        token: str = "",
        launcher: Launcher | None = None,
        tls: ClusterTls | None = None,
    ) -> None:
        """With a `launcher` in place of `step`, a second step is requested from the tier while one is in flight."""
        self.config = config
        self.session = WorkerSession(config.coordinator, self, tls=tls)
        self.adapters = WorkerAdapters(self._adapters_in_use, self.session.post_adapters)
        self.deadlines = Deadlines()
        self.tombstones = Tombstones()
        # Both of the run that was joined last.
        self.handle_key = b""
        self._run_clock_ahead_ms = 0.0
        self.token = token
        self.steps = 0
        self.step_s = 0.0
        self.draining = False
        self.next_role: Role | None = None  # in which the worker joins again once it has drained
        self._tier = tier
        self._step, self._launcher = step, launcher
        self._wake = asyncio.Event()
        self._ends = False  # drained without a next role: KV may still arrive, so no later command changes its role
        self._drain = asyncio.Event()
        self._drain_until = math.inf
        self._failures: asyncio.Queue[InvariantError] = asyncio.Queue()

    async def run(self) -> None:
        """Serves until drained. With a `next_role` no sequence is left then.

        Raises:
            JoinRefused: this worker does not fit the cluster; the message names the field.
            StartupError: it is to be checked, and no coordinator replies.
            InvariantError: a bug. The process must exit; its supervisor starts another.
        """
        compute = StepThread(self._step, self._launcher)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.session.run(), name="session"),
                    group.create_task(self._step_loop(compute), name="step loop"),
                    group.create_task(self._housekeeping(compute), name="housekeeping"),
                    group.create_task(self.adapters.run(compute.between_steps), name="adapters"),
                    group.create_task(self._fails(), name="failure"),
                ]
                if self.config.check:
                    tasks.append(group.create_task(self._leave_once_joined(), name="check"))
                await self._drained()
                for task in tasks:
                    task.cancel()
        finally:
            await self._tier.close()
            compute.close()

    @property
    def accepts_work(self) -> bool:
        return self.session.connected and not self.draining

    def run_clock_ms(self) -> float:
        """Returns the current time on the clock of the run."""
        return time.monotonic() * 1000 + self._run_clock_ahead_ms

    def wake(self) -> None:
        """Called after a change that may allow a step."""
        self._wake.set()

    def track_deadline(self, request: GenerateRequest) -> None:
        """Tracks the deadline of a sequence that has just arrived."""
        self.deadlines.add(request.sequence_id, time.monotonic() + request.deadline_s)

    def is_tombstoned(self, sequence: SequenceId) -> bool:
        """Whether an abort of this sequence arrived before the sequence."""
        return self.tombstones.covers(sequence, time.monotonic())

    def refuses(self, request: GenerateRequest, vocab_size: int) -> bool:
        """Whether a request of the coordinator cannot start here, which is reported unless it was aborted meanwhile."""
        sequence = request.sequence_id
        if self.is_tombstoned(sequence):
            return True
        if self.draining:
            self.report_ended(sequence, ErrorCode.DRAINING, f"{self.config.worker_id} is draining")
            return True
        try:
            self.adapters.check(request.adapter)
            check_tokens(request, vocab_size)
            check_sampling(request.sampling, request.max_tokens, vocab_size)
        except BatonError as e:
            self.report_ended(sequence, e.tier_code, e.message)
            return True
        return False

    def report_ended(self, sequence: SequenceId, code: ErrorCode, message: str) -> None:
        self.deadlines.forget(sequence)
        self.session.post(StepEvents(ended=(SequenceEnded(sequence, "error", code, message),)))

    def fail(self, error: InvariantError) -> None:
        """Reports a bug found by a task outside the loops, such as a hand-over: `run` raises it."""
        self._failures.put_nowait(error)

    def leave(self, timeout_s: float) -> None:
        """Drains the worker, because this process is to exit, and notifies the coordinator."""
        self.next_role = None
        self.session.leave(timeout_s)
        self._begin_drain(timeout_s)

    # Called by the session (SessionOwner).

    def join(self, run_id: str) -> Join:
        config = self.config
        return replace(
            self._tier.join(),
            host=config.host,
            step_tokens=config.step_tokens,
            run_id=run_id,
            token=self.token,
            replace=config.replace,
            both_roles=config.both_roles == "on",
            revision=config.revision,
            domain=config.domain,
        )

    def load(self) -> Load:
        return self._tier.load()

    def welcome(self, welcome: Welcome) -> None:
        if welcome.handle_key != self.handle_key:  # another run: its sequences may reuse ids of aborted ones
            self.tombstones.clear()
        self.handle_key = welcome.handle_key
        self._run_clock_ahead_ms = welcome.now_ms - time.monotonic() * 1000
        log.info("joined run %s of %s", welcome.run_id, self.config.coordinator)

    def command(self, command: Command) -> None:
        match command:
            case Abort(sequence, reason, tombstone_s):
                self.deadlines.forget(sequence)
                if not self._tier.end(sequence, reason) and tombstone_s > 0:
                    self.tombstones.add(sequence, time.monotonic(), tombstone_s)
            case Drain(timeout_s, next_role):
                self.next_role = None if self._ends else next_role
                self._begin_drain(timeout_s)
            case SetAdapters():
                self.adapters.require(command)
            case Prefill(request):
                self._start(request.sequence_id, command)
            case Assign(sequence, attempt=attempt):
                self._start(sequence._replace(attempt=attempt), command)
        self.wake()

    def _start(self, sequence: SequenceId, command: Prefill | Assign) -> None:
        """Lets the tier begin a sequence; reports its end if the tier refuses it."""
        try:
            self._tier.command(command)
        except BatonError as e:
            self.report_ended(sequence, e.tier_code, e.message)

    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return self._tier.scheduler.sequence_ids()

    def _adapters_in_use(self) -> set[str]:
        return {sequence.request.adapter for sequence in self._tier.scheduler.sequences.values()}

    def abandon(self, reason: str, keep: Collection[SequenceId] = (), code: ErrorCode = ErrorCode.ABANDONED) -> None:
        sequences = [s for s in self._tier.scheduler.sequence_ids() if s not in keep]
        if sequences:
            log.warning("ending %d sequences: %s", len(sequences), reason)
        for sequence in sequences:
            lost = self._tier.receiving(sequence)  # to its prefill worker, which parks its KV
            self._tier.end(sequence, reason)
            self.report_ended(sequence, ErrorCode.WORKER_LOST if lost else code, f"ended by the worker: {reason}")
        self.wake()

    # The loops.

    async def _step_loop(self, compute: StepThread) -> None:
        while True:
            plan = self._tier.begin_step(time.monotonic())
            if plan is not None:
                if (alone := self._tier.scheduler.runs_alone(plan)) is not None:
                    self.session.post(StepEvents(alone=alone))
                    await self.session.sent(ALONE_REPORT_S)  # the step may end this process
                compute.begin(plan)
                if not compute.full:
                    continue
            elif not len(compute):
                self._wake.clear()
                await self._wake.wait()  # ended by a command, a hand-over, or housekeeping
                continue
            outcome = await compute.collect()
            self.steps += 1
            self.step_s = compute.busy_s
            events = self._tier.finish_step(outcome, time.monotonic())
            for ended in events.ended:
                self.deadlines.forget(ended.sequence)
            self.session.post(events)

    async def _housekeeping(self, compute: StepThread) -> None:
        sweep_at = time.monotonic() + SWEEP_S
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now = time.monotonic()
            compute.watch(now)
            for sequence in self.deadlines.expire(now):
                if self._tier.end(sequence, "deadline"):
                    message = f"deadline passed at {self.config.worker_id}"
                    self.report_ended(sequence, ErrorCode.DEADLINE_EXCEEDED, message)
            if not self._tier.scheduler.sequence_ids():
                self._tier.scheduler.check_idle()  # a leak is a failure
            if now >= sweep_at:
                sweep_at = now + SWEEP_S
                self.tombstones.expire(now)
            self.wake()

    async def _fails(self) -> None:
        raise await self._failures.get()  # most workers never have one

    async def _leave_once_joined(self) -> None:
        """For --check. Raises StartupError if no coordinator replies."""
        deadline = time.monotonic() + CHECK_JOIN_S
        while not self.session.run_id:
            if time.monotonic() > deadline:
                where = f"no coordinator at {self.config.coordinator} replied within {CHECK_JOIN_S:g} s"
                raise StartupError(f"{where}; start it first, or run `baton doctor`, which takes its place")
            await asyncio.sleep(CHECK_POLL_S)
        log.info("check passed: %s accepted %s, which leaves", self.config.coordinator, self.config.worker_id)
        self.leave(self.config.drain_timeout_s)

    def _begin_drain(self, timeout_s: float) -> None:
        self._drain_until = min(self._drain_until, time.monotonic() + timeout_s)
        self.draining = True
        self._drain.set()

    async def _drained(self) -> None:
        await self._drain.wait()  # the worker serves until a drain is requested
        log.info("draining: %d sequences", len(self._tier.scheduler.sequence_ids()))
        while self._tier.scheduler.sequence_ids() and time.monotonic() < self._drain_until:
            await asyncio.sleep(0.02)
        # The coordinator reschedules the sequences it still tracks; nothing has failed.
        self.abandon("the drain timeout has passed", code=ErrorCode.DRAINING)
        if self.next_role is None:
            self._ends = True
        else:
            await self._idle()
        await self.session.drained(DRAINED_ACK_S)

    async def _idle(self) -> None:
        """Waits until the last step and all hand-overs have ended. Raises InvariantError if they do not, or if they
        leave state behind."""
        deadline = time.monotonic() + IDLE_S
        while left := self._tier.load().sequences:
            if time.monotonic() > deadline:
                raise InvariantError(f"{left} sequences are still present {IDLE_S:g} s after the drain")
            await asyncio.sleep(0.02)
        self._tier.scheduler.check_idle()
