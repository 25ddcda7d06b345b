"""`baton autoscale --dry-run`: the law decides for a simulated cluster, with the requests of a trace, before it acts on
a real one. Production placement and schedulers, measured costs (sim/scale)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.core.commands import Role
from launch.autoscale.flip import Flip, next_flip
from launch.autoscale.law import DECODE, PREFILL, ClusterSample, Memory, Policy, Sizing, WorkerSample, decide
from launch.control_options import FLIP_S
from sim.scale.members import ClusterShape
from sim.scale.planner import Size
from sim.scale.replay import Replay
from sim.scale.results import Outcome, Times
from sim.scale.workers import SimPrefillWorker
from sim.stats import Slo
from sim.trace import TraceRow

EVERY_S = 5.0
FLIP_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    at_s: float
    decision: Sizing


@dataclass(frozen=True, slots=True)
class DryRun:
    """What the law did with a load: the times of all requests in their order, its `changes`, the `flips` of a fixed
    number of workers with their times, the hours of all workers from their start to their end, and the share of the
    requests whose first token came in time, of all and of the `warm_requests` that were not sent while workers were
    starting."""

    outcome: Outcome
    times: tuple[Times, ...]
    changes: tuple[Change, ...]
    flips: tuple[tuple[float, Flip], ...]
    prefill_hours: float
    decode_hours: float
    met_ttft: float
    warm_requests: int
    warm_met_ttft: float
    reversals_per_hour: float

    @property
    def worker_hours(self) -> float:
        return self.prefill_hours + self.decode_hours


class _Simulated:
    """The law beside a replay, whose workers it starts and drains, or with `flip_takes_s` changes in their roles."""

    def __init__(
        self,
        policy: Policy,
        rows: Sequence[TraceRow],
        shape: ClusterShape,
        every_s: float,
        flip_takes_s: Mapping[Role, float] | None,
    ) -> None:
        self.policy, self.rows, self.memory = policy, rows, Memory()
        self.replay = Replay(shape, rows)
        self.changes: list[Change] = []
        self.flips: list[tuple[float, Flip]] = []
        self._every_s, self._flip_takes_s = every_s, flip_takes_s
        self.cold: list[tuple[float, float]] = []  # when workers were starting
        self._size, self._total = Size(shape.num_prefill, shape.num_decode), shape.num_prefill + shape.num_decode
        self._seen = 0  # requests in the replay's list
        self._waiting: list[Times] = []  # without a first token
        self._running: list[Times] = []  # without a last one
        self._counts = {"first_tokens": 0, "late": 0, "ended": 0, "slow": 0}

    def run(self) -> Outcome:
        self.replay.loop.at(self.rows[0].at_s, self._tick)
        return self.replay.run(self.policy.slo)

    def _tick(self) -> None:
        replay, now = self.replay, self.replay.loop.now
        replay.members.remove_idle()
        sample = self._sample()
        decision, self.memory = decide(self.policy, self.memory, sample)
        if decision.size != self._size:
            self.changes.append(Change(now, decision))
            if self._flip_takes_s is None:
                for role in (PREFILL, DECODE):
                    self._act(role, getattr(decision.size, role) - getattr(self._size, role))
            self._size = decision.size
        if self._flip_takes_s is not None and (flip := next_flip(sample, decision.busy, self._total)) is not None:
            self.flips.append((now, flip))
            replay.flip(flip.worker, flip.role, FLIP_S[flip.role], self._flip_takes_s[flip.role])
        if replay.in_flight or now <= self.rows[-1].at_s:
            replay.loop.later(self._every_s, self._tick)

    def _act(self, role: Role, more: int) -> None:
        now, kind = self.replay.loop.now, getattr(self.policy, role)
        start_s = getattr(kind, f"{role}_worker").start_s or self.policy.start_s(role)
        for _ in range(more):
            self.replay.start_worker(role, start_s)
        if more > 0:
            self.cold.append((now, now + start_s))
        for _ in range(-more):
            self.replay.members.drain_least_busy(role)

    def _sample(self) -> ClusterSample:
        replay, demand = self.replay, self.replay.dispatcher.demand()
        self._count(self.policy.slo)
        ready = {worker.worker_id: worker.incarnation for worker in replay.table.present() if worker.ready}
        workers = []
        for worker in replay.members.present():
            if worker.name not in ready:
                continue
            scheduler, counts = worker.scheduler, worker.counts
            if isinstance(worker, SimPrefillWorker):
                role, cached, rows, used = PREFILL, worker.cached, 0, 0
            else:
                used = (scheduler.blocks.num_blocks - scheduler.blocks.num_free) * self.policy.decode.block_size
                role, cached, rows = DECODE, 0, scheduler.num_sequences
            workers.append(
                WorkerSample(
                    *(worker.name, role, ready[worker.name], counts.steps, counts.step_s, counts.tokens),
                    *(cached, rows, used),
                )
            )
        return ClusterSample(
            replay.loop.now,
            admitted=int(demand["admitted"]),
            refused=int(demand["refused"]),
            admitted_tokens=int(demand["admitted_tokens"]),
            admitted_tokens_squared=int(demand["admitted_tokens_squared"]),
            in_flight=replay.in_flight,
            queued=replay.dispatcher.num_queued,
            queued_tokens=int(demand["queued_tokens"]),
            max_queued_tokens=int(demand["max_queued_tokens"]),
            backlog_tokens=int(demand["backlog_tokens"]),
            waits_for=replay.dispatcher.role_without_room or "",
            output_tokens=float(demand["expected_output_tokens"]),
            workers=tuple(workers),
            **self._counts,
        )

    def _count(self, slo: Slo) -> None:
        times, counts = self.replay.measured.times, self._counts
        started, self._waiting = _split([*self._waiting, *times[self._seen :]], "first_at")
        ended, self._running = _split([*self._running, *started], "last_at")
        self._seen = len(times)
        counts["first_tokens"] += len(started)
        counts["late"] += sum(not slo.met(t.ttft_s, None) for t in started)
        counts["ended"] += sum(t.tpot_s is not None for t in ended)
        counts["slow"] += sum(not slo.met(0.0, t.tpot_s) for t in ended)


def _split(times: Sequence[Times], name: str) -> tuple[list[Times], list[Times]]:
    """Returns the requests to which it has happened, and the others that were not refused."""
    return [t for t in times if getattr(t, name)], [t for t in times if not getattr(t, name) and not t.refused]


def dry_run(
    policy: Policy,
    rows: Sequence[TraceRow],
    begin: Size | ClusterShape | None = None,
    flip_takes_s: Mapping[Role, float] | None = None,
    every_s: float | None = None,
) -> DryRun:
    """Replays the requests, which must fit into the context of the calibrated model, on a cluster that the law sizes
    every `every_s` seconds; it begins with `begin`, else with the least workers. With `flip_takes_s`, the seconds from
    a worker's last sequence to its join in each role, the number of workers stays, and their roles change."""
    if not isinstance(begin, ClusterShape):
        size = begin or policy.least
        begin = ClusterShape(policy.prefill, size.prefill, policy.decode, size.decode)
    usual_s = EVERY_S if flip_takes_s is None else FLIP_EVERY_S
    simulated = _Simulated(policy, rows, begin, every_s or usual_s, flip_takes_s)
    outcome = simulated.run()
    times, slo = simulated.replay.measured.times, Slo(policy.slo.ttft_s)
    met = [slo.met(t.ttft_s, None) for t in times]
    warm = [ok for t, ok in zip(times, met, strict=True) if not any(a <= t.sent_at <= b for a, b in simulated.cold)]
    hours = [simulated.replay.members.worker_s(role) / 3600 for role in (PREFILL, DECODE)]
    span_h = max(rows[-1].at_s - rows[0].at_s, 1.0) / 3600
    return DryRun(
        outcome,
        tuple(times),
        tuple(simulated.changes),
        tuple(simulated.flips),
        hours[0],
        hours[1],
        sum(met) / max(len(met), 1),
        len(warm),
        sum(warm) / max(len(warm), 1),
        max(reversals([getattr(c.decision.size, role) for c in simulated.changes]) for role in (PREFILL, DECODE))
        / span_h,
    )


def reversals(sizes: Sequence[int]) -> int:
    """Returns how often a size that grew shrank next, or the other way round."""
    grew = [b > a for a, b in itertools.pairwise(sizes) if a != b]
    return sum(a != b for a, b in itertools.pairwise(grew))
