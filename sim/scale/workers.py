"""Simulated workers of both tiers around the production schedulers: steps take what the calibration says.

A decode worker whose next steps are all alike (`plain_steps`) computes them at once, up to the first in which a
sequence ends. A sequence that arrives meanwhile starts with the next step, so the run ends with the present one. When
something else happens before they have ended, the worker first does those that have ended until then; the present step
goes on, and what happens meanwhile matters to the next one. So every step begins and ends when it would otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from baton.core.blocks import BlockTable
from baton.core.errors import InvariantError
from baton.core.events import KVCacheEvents, SequenceEnded, TokenEvent
from baton.core.kv_layout import KVLayout
from baton.core.prefix_cache import KeptBlocks
from baton.core.request import GenerateRequest, SequenceId
from baton.core.sequence import Sequence, State
from baton.core.step import StepOutcome, StepPlan
from coordinator.policy.pool import Worker
from decode.scheduler import DecodeScheduler
from decode.speculation.drafts import ModelDrafts
from decode.speculation.policy import Speculation
from decode.speculation.step_cost import StepModel
from prefill.scheduler import PrefillScheduler, Progress
from sim.loop import Loop, Timer, cancel
from sim.scale.at_once import Plain, admit, advance, plain_steps
from sim.scale.costs import Calibration
from sim.scale.counted_blocks import CountedBlocks
from sim.scale.host import Host
from sim.scale.results import Measured

TOKEN = 7
"""Every token of a simulation: it ends no sequence."""
ROOM_SHARE = 4
"""Steps are computed at once while at least 1 of this many blocks stays free: the coordinator learns of the blocks that
a run uses only at its end, and with fewer free ones they decide where requests go."""


class WorkerOwner(Protocol):
    """What the workers report to."""

    def began(self, worker: SimPrefillWorker, sequence: SequenceId) -> None: ...

    def progressed(self, worker: SimPrefillWorker, progress: Progress) -> None: ...

    def prefill_ended(self, worker: SimPrefillWorker, ended: SequenceEnded) -> None: ...

    def cached(self, name: str, events: KVCacheEvents) -> None: ...

    def decoded(self, worker: SimDecodeWorker, tokens: Iterable[TokenEvent], ended: list[SequenceId]) -> None: ...

    @property
    def decode_is_full(self) -> bool:
        """Whether a queued request waits for room at decode workers: then no steps may be computed at once."""
        ...

    @property
    def compares_costs(self) -> bool:
        """Whether anything depends on the costs of steps as schedulers measure them: then they get each outcome."""
        ...

    def advanced(self, worker: SimDecodeWorker, run: StepRun, steps: int, now: float, ended: list[SequenceId]) -> None:
        """The sequences of a run have generated one token in each of its first `steps` steps. The last of these ended
        at `now`, and with it the sequences in `ended`."""
        ...

    def running(self, worker: SimDecodeWorker, sequence: SequenceId) -> None: ...


class Core:
    """Where a worker computes: cores of its own, or cores of a host that it shares."""

    def __init__(self, loop: Loop, host: Host | None, cores: tuple[int, ...]) -> None:
        self._loop, self._host, self.cores = loop, host, cores

    @property
    def shared(self) -> bool:
        return self._host is not None

    def run(self, seconds: float, idle_s: float, done: Callable[[], object]) -> None:
        """Computes for `seconds`, and calls `done` another `idle_s` later."""
        if self._host is None:
            self._loop.later(seconds + idle_s, done)
        else:
            self._host.run(seconds, self.cores, lambda: self._loop.later(idle_s, done))

    def work(self, seconds: float) -> None:
        """Computes beside the steps for `seconds`, which delays them on a shared core only."""
        if seconds > 0.0:
            self.run(seconds, 0.0, lambda: None)


class Counts:
    """The steps of one worker, their seconds, and the tokens in them."""

    def __init__(self) -> None:
        self.steps, self.step_s, self.tokens = 0, 0.0, 0

    def add(self, steps: int, seconds: float, tokens: int) -> None:
        self.steps, self.step_s, self.tokens = self.steps + steps, self.step_s + seconds, self.tokens + tokens


class SimPrefillWorker:
    """A prefill scheduler whose steps take their measured time. `known` is what the coordinator knows of it."""

    def __init__(
        self,
        known: Worker,
        loop: Loop,
        owner: WorkerOwner,
        calibration: Calibration,
        layout: KVLayout,
        measured: Measured,
        *,
        prefix_cache: bool,
        counted: bool,
        host: Host | None = None,
        cores: tuple[int, ...] = (),
        kept: KeptBlocks | None = None,
    ) -> None:
        kind = calibration.prefill_worker
        self.known, self.name, self.costs = known, known.worker_id, calibration.prefill
        self.scheduler = PrefillScheduler(
            *(layout, kind.blocks, kind.step_tokens),
            prefix_cache=prefix_cache,
            blocks=_blocks(kind.blocks, counted),
            kept=kept,
        )
        self._loop, self._owner, self._measured = loop, owner, measured
        self.core = Core(loop, host, cores)
        self.counts = Counts()
        self.cached = 0  # prompt tokens that were not computed
        self._busy = False
        self._started: set[SequenceId] = set()

    def submit(self, request: GenerateRequest) -> None:
        self.scheduler.submit(request, self._loop.now, hand_over=request.max_tokens - len(request.output) > 1)
        self.wake()

    @property
    def idle(self) -> bool:
        return not self.scheduler.num_sequences

    def release(self, sequence: SequenceId) -> None:
        self.scheduler.release_send(sequence)
        self.wake()

    def abort(self, sequence: SequenceId) -> None:
        self._started.discard(sequence)
        self.scheduler.abort(sequence)
        self.release(sequence)

    def wake(self) -> None:
        if self._busy or not (self.scheduler.num_waiting or self.scheduler.num_running):
            return
        plan = self.scheduler.begin_step(self._loop.now)
        if plan is None:
            return
        self._busy = True
        seconds = self.costs.seconds(plan)
        self._measured.prefill_busy_s += seconds
        self.counts.add(1, seconds, plan.num_tokens)
        for row in plan.rows:
            if row.sequence_id not in self._started:
                self._started.add(row.sequence_id)
                self._owner.began(self, row.sequence_id)
        self.core.run(seconds, self.costs.idle_s, lambda: self._stepped(plan, seconds))

    def _stepped(self, plan: StepPlan, seconds: float) -> None:
        self._busy = False
        self._measured.steps += 1
        sampled = tuple([(TOKEN,) * row.num_sampled for row in plan.rows])
        result = self.scheduler.finish_step(StepOutcome(plan.step_id, sampled, seconds), self._loop.now)
        if self.scheduler.cache.enabled and (events := self.scheduler.cache.take_events()) is not None:
            self._owner.cached(self.name, events)
        for progress in result.progress:
            if progress.first_token is not None:
                self._started.discard(progress.sequence_id)
            self._owner.progressed(self, progress)
        for ended in result.ended:
            self._owner.prefill_ended(self, ended)
        self.wake()


class StepRun:
    """Steps that are computed at once: `steps` of the sequences `running` from `began_at` on, whose contexts add up to
    some number in the first and to one more for each sequence in each later one. None ends before the last step."""

    __slots__ = ("began_at", "first_s", "more_s", "running", "steps", "timer")

    def __init__(self, began_at: float, first_s: float, more_s: float, running: list[Sequence], steps: int) -> None:
        self.began_at, self.first_s, self.more_s = began_at, first_s, more_s
        self.running, self.steps = running, steps
        self.timer: Timer | None = None

    def ends_at(self, step: int) -> float:
        """Returns when step number `step`, from 1 on, ends; 0 is the beginning."""
        return self.began_at + step * self.first_s + self.more_s * step * (step - 1) / 2

    def present(self, done: int) -> StepRun:
        """Returns the step that is computed after `done` steps, as a run of its own."""
        return StepRun(self.ends_at(done), self.first_s + done * self.more_s, self.more_s, self.running, 1)

    def ended_by(self, now: float) -> int:
        """Returns how many steps have ended at `now`."""
        passed = now - self.began_at
        if self.more_s <= 0.0:
            count = int(passed / self.first_s)
        else:
            half = self.first_s - self.more_s / 2
            count = int((math.sqrt(half * half + 2 * self.more_s * passed) - half) / self.more_s)
        count = min(max(count, 0), self.steps)
        while count < self.steps and self.ends_at(count + 1) <= now:  # rounding
            count += 1
        while count > 0 and self.ends_at(count) > now:
            count -= 1
        return count


class SimDecodeWorker:
    """A decode scheduler whose steps take their measured time, alone or as a run of steps that are computed at once.
    `known` is what the coordinator knows of it."""

    def __init__(
        self,
        known: Worker,
        loop: Loop,
        owner: WorkerOwner,
        calibration: Calibration,
        layout: KVLayout,
        measured: Measured,
        *,
        prefix_cache: bool,
        counted: bool,
        at_once: bool,
        host: Host | None = None,
        cores: tuple[int, ...] = (),
        kept: KeptBlocks | None = None,
    ) -> None:
        kind = calibration.decode_worker
        self.known, self.name = known, known.worker_id
        self.costs, self._prompts = calibration.decode, calibration.prefill
        speculation = _speculation(calibration, layout)
        running = kind.max_running or 1 << 20
        self.scheduler = DecodeScheduler(
            *(layout, kind.blocks, running, speculation),
            prefix_cache=prefix_cache,
            blocks=_blocks(kind.blocks, counted),
            kept=kept,
        )
        self._loop, self._owner, self._measured = loop, owner, measured
        self.core = Core(loop, host, cores)
        self.counts = Counts()
        self._at_once = at_once and not self.core.shared
        self._busy = False
        self._run: StepRun | None = None
        self._leave = kind.blocks // ROOM_SHARE
        self._spare, self._reserved = self._leave // 2, 0
        self._new: set[SequenceId] = set()

    @property
    def idle(self) -> bool:
        return not (self._busy or self._run is not None or self.scheduler.num_sequences)

    def reserve(self, request: GenerateRequest) -> int:
        """Returns how many positions are in the prefix cache. Raises Unavailable if blocks are short."""
        blocks = self.scheduler.layout.blocks_for(request.num_prefill_tokens)
        if self._run is not None and self._reserved + blocks <= self._spare:
            self._reserved += blocks  # a run leaves that many blocks free: it continues
        else:
            self.interrupt()
        return self.scheduler.reserve(request, self._loop.now).prefix_tokens

    def submit(self, request: GenerateRequest) -> None:
        """Starts a sequence whose prompt is computed here."""
        self.interrupt()
        self.scheduler.submit(request, self._loop.now)
        self._new.add(request.sequence_id)
        self.wake()

    def abort(self, sequence: SequenceId) -> None:
        self.interrupt()
        if self._run is not None:
            self._run.running = [s for s in self._run.running if s.id != sequence]
        self._new.discard(sequence)
        self.scheduler.abort(sequence)
        self.wake()

    def received(self, sequence: SequenceId) -> None:
        run = self._run
        if run is not None and run.steps > 1 and (steps := run.ended_by(self._loop.now) + 1) < run.steps:
            cancel(run.timer)
            run.steps = steps
            self._run_from(run)
        self.scheduler.received(sequence, TOKEN, self._loop.now)
        self._new.add(sequence)
        self.wake()

    def interrupt(self) -> bool:
        """Brings the scheduler to the present, in which a single step is computed: nothing may be asked of it, or
        changed in it, in the middle of a run of several steps. Returns whether there was one."""
        run = self._run
        if run is None or run.steps == 1:
            return False
        cancel(run.timer)
        done = min(run.ended_by(self._loop.now), run.steps - 1)
        self._advance(run, done)
        self._run_from(run.present(done))
        return True

    def wake(self) -> None:
        if self._busy or self._run is not None:
            return
        now = self._loop.now
        if self._at_once and not self._owner.decode_is_full:
            if self._new:
                admit(self.scheduler, now)
            plain = plain_steps(self.scheduler, self._leave, to_ends=not self._owner.compares_costs)
            if plain is not None:
                self._begin_run(plain, now)
                return
        plan = self.scheduler.begin_step(now) if self._generating() else None
        if plan is None:
            return
        seconds = self._computing(plan)
        self.core.run(seconds, self.costs.idle_s, lambda: self._stepped(plan, seconds))

    def _computing(self, plan: StepPlan) -> float:
        """Counts a step that is computed from now on; returns its seconds."""
        self._busy = True
        if self._new:
            for row in plan.rows:
                if row.sequence_id in self._new:
                    self._new.discard(row.sequence_id)
                    self._owner.running(self, row.sequence_id)
        seconds = self._seconds(plan)
        self._measured.decode_busy_s += seconds
        self.counts.add(1, seconds, len(plan.rows))
        return seconds

    def _seconds(self, plan: StepPlan) -> float:
        """Returns the seconds of a step. Where tokens of long rows were not measured, they cost what they cost at
        prefill; so does their attention."""
        seconds = self.costs.seconds(plan, sum(draft.num_draft_tokens for draft in plan.drafts))
        for row in plan.rows:
            if (count := len(row.tokens)) > 1:
                seconds += self._prompts.pair_s * count * (row.start + (count + 1) / 2)
                seconds += 0.0 if self.costs.token_s else self._prompts.token_s * (count - 1)
        return seconds

    def _generating(self) -> bool:
        return any(s.state is not State.RECEIVING for s in self.scheduler.sequences.values())

    def _begin_run(self, plain: Plain, now: float) -> None:
        rows, costs = len(plain.running), self.costs
        first_s, more_s = costs.plain_s(rows, plain.context) + costs.idle_s, costs.context_s * rows
        self._reserved = 0
        self._run_from(StepRun(now, first_s, more_s, plain.running, plain.steps))
        if self._new:
            for name in [s for s in self._new if self.scheduler.sequences[s].state is State.RUNNING]:
                self._new.discard(name)
                self._owner.running(self, name)

    def _run_from(self, run: StepRun) -> None:
        self._run = run
        run.timer = self._loop.at(max(run.ends_at(run.steps), self._loop.now), self._run_ended)  # rounding

    def _run_ended(self) -> None:
        run, self._run = self._run, None
        if run is None:
            raise InvariantError(f"{self.name} has no run that could end")
        self._advance(run, run.steps)
        self.wake()

    def _advance(self, run: StepRun, steps: int) -> None:
        """Does the first `steps` steps of a run."""
        if not steps:
            return
        ended_at = run.ends_at(steps)
        ended = advance(self.scheduler, run.running, steps, TOKEN, ended_at)
        self._report_cached()
        seconds = ended_at - run.began_at - self.costs.idle_s * steps
        self._measured.decode_busy_s += seconds
        self.counts.add(steps, seconds, steps * len(run.running))
        self._measured.steps += steps
        self._measured.steps_at_once += steps
        self._owner.advanced(self, run, steps, ended_at, ended)

    def _stepped(self, plan: StepPlan, seconds: float) -> None:
        self._busy = False
        self._measured.steps += 1
        drafted = {draft.row: draft.num_draft_tokens for draft in plan.drafts if draft.num_draft_tokens}
        sampled = tuple([(TOKEN,) * row.num_sampled for row in plan.rows])
        if drafted:
            counts = [drafted.get(index, 0) for index in range(len(plan.rows))]
            sampled = tuple([(*s, *(TOKEN,) * n) if s else () for s, n in zip(sampled, counts, strict=True)])
            drafts, draft_s = tuple([(TOKEN,) * n for n in counts]), self.costs.draft_s * sum(counts) / 2
            outcome = StepOutcome(plan.step_id, sampled, seconds, draft_tokens=drafts, draft_s=draft_s)
        else:
            outcome = StepOutcome(plan.step_id, sampled, seconds)
        result = self.scheduler.finish_step(outcome, self._loop.now)
        self._report_cached()
        self._owner.decoded(self, result.tokens, [ended.sequence for ended in result.ended])
        self.wake()

    def _report_cached(self) -> None:
        if self.scheduler.cache.enabled and (events := self.scheduler.cache.take_events()) is not None:
            self._owner.cached(self.name, events)


def _blocks(num_blocks: int, counted: bool) -> BlockTable | None:
    return cast(BlockTable, CountedBlocks(num_blocks)) if counted else None


def _speculation(calibration: Calibration, layout: KVLayout) -> Speculation:
    """Returns the policy of draft tokens with the measured costs; each draft token is accepted with the measured
    probability."""
    costs, kind = calibration.decode, calibration.decode_worker
    points = [(rows, costs.plain_s(rows, 0.0)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    token_s = costs.token_s or calibration.prefill.token_s
    long = [(n, costs.plain_s(1, 0.0) + token_s * (n - 1)) for n in (1, 16, 128, kind.step_tokens + 129)]
    each = [(rows, costs.draft_s / 2 * rows) for rows, _ in points]
    draft = [(rows, costs.draft_s / 2 * rows) for rows, _ in points]
    model = StepModel(long, draft, rows=points, per_draft_token=each, step_tokens=kind.step_tokens)
    if not costs.accepted:
        return Speculation(model=model)
    drafts = ModelDrafts(layout, kind.blocks, calibration.max_model_len)
    return Speculation(drafts, model, forced_rate=costs.accepted)
