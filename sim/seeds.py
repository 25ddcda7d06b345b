"""From a seed to a run: a random cluster, random requests, random faults, and what has to hold.

Safety: faults of all kinds, without an end. Every token that a client receives is the right one, every accepted
request ends exactly once (its deadline at the latest), and once the faults have ended nothing of it is left anywhere.
Liveness: requests have no deadline, and the faults end after a while. From then on every request ends in LIVENESS_S.

Each seed enables a random subset of the faults, since a run with all of them rarely gets far (swarm testing: Groce et
al. 2012). The approach follows FoundationDB's and TigerBeetle's simulators.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.core.codes import ErrorCode
from baton.core.errors import InvariantError
from baton.core.request import POOLINGS, GenerateRequest, Pooling, SamplingParams
from coordinator.policy.codes import PlacementCode
from coordinator.policy.losses import MAX_TOKENS
from coordinator.policy.split import Split
from sim.client import RETRY_S, Behaviour, ChoiceEnd
from sim.cluster import LAYERS, SimCluster, SimClusterOptions, SimPoolOptions
from sim.coordinator import SimCoordinatorOptions
from sim.costs import RandomCosts
from sim.engine import EOS, VOCABULARY
from sim.faults import KINDS, FaultPlan, Injector
from sim.loop import Loop, Trace
from sim.process import Clock
from sim.worker import Timeouts

Mode = Literal["safety", "liveness"]
MODES: tuple[Mode, ...] = ("safety", "liveness")
LIVENESS_S = 60.0
"""After the end of all faults: the longest limits that follow each other are a lease, a link's silence, an edge's
timeout, a dial's, and the pauses between offers."""
QUIET_S = 60.0
"""Until a worker that was cut off has noticed (30 s), and has ended its sequences."""
PROBE_S = 20.0
"""For a request to a cluster without faults."""
CHECK_EVERY = 150
"""Events between two checks of all invariants."""
ALLOWED_CODES: frozenset[str] = frozenset(
    {
        ErrorCode.DEADLINE_EXCEEDED,
        PlacementCode.WOULD_EXCEED_DEADLINE,
        ErrorCode.WORKER_LOST,
        ErrorCode.KV_CORRUPT,
        PlacementCode.NO_PREFILL_WORKER,
        PlacementCode.NO_DECODE_WORKER,
        ErrorCode.OVERLOADED,
        PlacementCode.RETRY_BUDGET_EXHAUSTED,
    }
)
"""Errors that a client may receive under faults. All others are bugs: an internal error, tokens that differ."""


@dataclass(slots=True)
class Result:
    """The result of one seed. `error`: what was violated, empty if nothing was. `ended` counts how choices ended.
    `digest` and `lines` are those of a run with a trace."""

    seed: int
    mode: Mode
    digest: str = ""
    error: str = ""
    virtual_s: float = 0.0
    events: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def run_seed(seed: int, mode: Mode, *, window: int = 0, trace: Trace | None = None) -> Result:
    """Runs one seed, with a model whose layers all have this `window` (0: none). Never raises for a violated invariant,
    nor for an error in the code under test. A `trace` changes nothing else and takes a sixth of the time."""
    draw = random.Random(seed * 2 + (mode == "liveness"))
    result = Result(seed, mode)
    crowded = draw.random() < 0.25
    cluster = make_cluster(draw, trace, crowded, window)
    sends = make_requests(draw, mode, crowded)
    for request, at_s, behaviour in sends:
        cluster.send(request, at_s, behaviour)
    plan = make_faults(draw, cluster)
    if random.Random(seed).random() < 0.3:
        plan.kinds["flip"] = 2.0
    injector = Injector(cluster, plan)
    poison(draw, cluster, [request for request, _, _ in sends])
    try:
        _run(cluster, injector, mode, faults_s=2.0 + draw.random() * 6.0)
    except Exception as e:
        # Any exception is a finding: the objects under test raise InvariantError, or a bug raises something else.
        result.error = f"{type(e).__name__}: {e}"
        cluster.loop.note("FAILED", result.error)
    _count(result, cluster, injector)
    if trace is not None:
        result.digest, result.lines = trace.digest, trace.lines or []
    return result


def _run(cluster: SimCluster, injector: Injector, mode: Mode, faults_s: float) -> None:
    checked = 0

    def over() -> bool:
        nonlocal checked
        if cluster.loop.executed - checked >= CHECK_EVERY:
            checked = cluster.loop.executed
            cluster.check()
            _check_bounds(cluster)
        return not cluster.running

    if mode == "liveness":
        cluster.run(faults_s, over)
        injector.stop()
        limit_s = cluster.loop.now + LIVENESS_S
    else:
        # A refused client tries again, each time against a coordinator that may be paused; only then a deadline begins.
        retries_s = Behaviour().tries * (RETRY_S + LONGEST_FAULT_S)
        limit_s = LONGEST_ARRIVAL_S + retries_s + LONGEST_DEADLINE_S + 30.0
    cluster.run(limit_s, over)
    if not over():
        late = [
            f"{c.request.request_id} {[o.ended or 'runs' for o in c.outcomes]}" for c in cluster.clients if not c.over
        ]
        raise InvariantError(f"not over at {cluster.loop.now:.1f} s: {late}; {cluster.coordinator.requests!r}")
    _check_outcomes(cluster)
    injector.stop()
    _wait_until_settled(cluster)
    _probe(cluster)
    _wait_until_settled(cluster)
    cluster.check_settled()


def _probe(cluster: SimCluster) -> None:
    """Raises InvariantError unless the cluster serves again: as many requests as there are workers in a pool finish."""
    first, options = len(cluster.clients), cluster.options
    for number in range(max(options.prefill.workers, options.decode.workers)):
        request = GenerateRequest(f"probe{number}", tuple(range(1, 12)), 6, deadline_s=NO_DEADLINE_S)
        cluster.send(request, cluster.loop.now)
    cluster.run(cluster.loop.now + PROBE_S, lambda: not cluster.running)
    for client in cluster.clients[first:]:
        if client.outcomes[0].ended not in (ChoiceEnd.STOP, ChoiceEnd.LENGTH):
            raise InvariantError(f"{client.request.request_id} did not finish: {client.outcomes[0]}")


def _wait_until_settled(cluster: SimCluster) -> None:
    """Runs until the cluster is settled and stays so. Raises InvariantError if that takes longer than QUIET_S."""
    limit_s = cluster.loop.now + QUIET_S
    while cluster.loop.now < limit_s:
        cluster.run(limit_s, lambda: cluster.settled)
        cluster.run(cluster.loop.now + 1.0)
        if cluster.settled:
            return
    raise InvariantError(f"not settled at {cluster.loop.now:.1f} s: {[str(p) for p in cluster.processes()]}")


def _check_outcomes(cluster: SimCluster) -> None:
    for client in cluster.clients:
        for outcome in client.outcomes:
            if not outcome.ended:
                raise InvariantError(f"a choice of {client.request.request_id} has no end")
            if outcome.ended is ChoiceEnd.ERROR and outcome.code not in ALLOWED_CODES:
                raise InvariantError(f"{client.request.request_id} ended with {outcome.code}: {outcome.message}")


def _check_bounds(cluster: SimCluster) -> None:
    """Raises InvariantError if a queue grows beyond its limit."""
    limit = cluster.options.coordinator.max_queued_requests
    coordinator = cluster.coordinator
    queued, rescheduled = coordinator.requests.dispatcher.num_queued, coordinator.requests.rescheduled
    if queued > limit + rescheduled:
        raise InvariantError(f"{queued} choices are queued; the limit is {limit}, {rescheduled} were rescheduled")
    for worker in cluster.workers.values():
        if len(worker.log) > 4096 or len(worker.tombstones) > 65536:
            raise InvariantError(f"{worker} keeps {len(worker.log)} records, {len(worker.tombstones)} tombstones")


# What a seed draws.

LONGEST_DEADLINE_S, LONGEST_ARRIVAL_S, LONGEST_FAULT_S, NO_DEADLINE_S = 20.0, 3.0, 6.0, 1e6


def make_cluster(draw: random.Random, trace: Trace | None, crowded: bool, window: int) -> SimCluster:
    """`crowded`: one small decode worker, whose sequences run out of blocks."""
    prefill = SimPoolOptions(
        workers=draw.choice((1, 2, 2, 3)),
        blocks=draw.choice((20, 32, 64)),
        block_size=draw.choice((4, 4, 8)),
        step_tokens=draw.choice((4, 8, 16)),
        tensor_parallel=draw.choice((1, 1, 2)),
        prefix_cache=draw.random() < 0.8,
        plan_ahead=draw.random() < 0.3,
    )
    drafts = draw.choice(("none", "none", "ngram", "model"))
    decode = SimPoolOptions(
        workers=1 if crowded else draw.choice((1, 2, 2, 3)),
        blocks=20 if crowded else draw.choice((20, 20, 32, 64)),
        block_size=4 if crowded else draw.choice((4, 4, 8)),
        max_running=8 if crowded else draw.choice((2, 4, 8)),
        tensor_parallel=draw.choice((1, 2)),
        prefix_cache=draw.random() < 0.8,
        plan_ahead=drafts == "none" and draw.random() < 0.4,
        drafts=drafts,
        draft_tokens=draw.choice((None, 2, 4)),
    )
    skewed, skew = draw.random() < 0.5, draw.choice((0.001, 0.02))

    def clock(loop: Loop) -> Clock:
        rate = 1.0 + (loop.random.random() * 2.0 - 1.0) * skew if skewed else 1.0
        return Clock(loop.random.random() * 1e5, rate)

    coordinator = SimCoordinatorOptions(
        max_queued_requests=draw.choice((4, 1024)), hold_s=draw.choice((2.0, 30.0)), max_deaths=5
    )
    seed = draw.getrandbits(48)
    more = random.Random(seed)
    coordinator = replace(coordinator, split=more.choice(_SPLITS), retry_tokens=more.choice((0.0, 1.0, MAX_TOKENS)))
    layers = tuple(replace(layer, window=window) for layer in LAYERS)
    cluster = SimCluster(
        SimClusterOptions(prefill, decode, coordinator, layers, expected_output_tokens=1.0 if crowded else None),
        seed,
        clock=clock,
        timeouts=Timeouts(edge_s=draw.choice((1.0, 5.0)), connect_s=draw.choice((2.0, 10.0))),
        trace=trace,
    )
    if isinstance(cluster.costs, RandomCosts):
        cluster.costs.step = draw.choice((0.005, 0.02, 0.08))
        cluster.costs.message = draw.choice((0.0005, 0.004, 0.03))
        cluster.costs.transfer = draw.choice((0.001, 0.01, 0.1))
    return cluster


_SPLITS: tuple[Split, ...] = ("always", "always", "auto", "never")
_POOLED: tuple[Pooling, ...] = ("", "", "", "", "", "", *POOLINGS)


def make_requests(draw: random.Random, mode: Mode, crowded: bool) -> list[tuple[GenerateRequest, float, Behaviour]]:
    """Requests that share beginnings, of several tenants, with everything that sampling depends on."""
    shared = [tuple(draw.randrange(1, VOCABULARY) for _ in range(24)) for _ in range(2)]
    tenants = ("", "a") if draw.random() < 0.5 else ("",)
    long, arrival_s = (40, 0.2) if crowded else (draw.choice((8, 24, 40)), draw.choice((0.1, 1.0, LONGEST_ARRIVAL_S)))
    sends = []
    for number in range(draw.randint(3, 9)):
        own = tuple(draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 10)))
        prompt = draw.choice(shared)[: draw.choice((0, 8, 16, 24))] + own
        penalised = draw.random() < 0.3
        max_tokens = draw.choice((40, 2, 30, 20) if crowded else (1, 2, draw.randint(2, long), draw.randint(2, long)))
        sampling = SamplingParams(
            seed=draw.randrange(1 << 16),
            repetition_penalty=1.2 if penalised else 1.0,
            min_tokens=draw.choice((0, 0, min(6, max_tokens))),
            logprobs=draw.choice((None, None, None, 0)),
            prompt_logprobs=draw.choice((None, None, None, None, 0)),
            stop_token_ids=draw.choice(((), (), (3, 5))),
        )
        choices = draw.choice((1, 1, 1, 1, 2, 3))
        deadline_s = NO_DEADLINE_S if mode == "liveness" else draw.choice((3.0, 8.0, LONGEST_DEADLINE_S))
        request = GenerateRequest(
            f"r{number}",
            prompt,
            max_tokens,
            sampling,
            eos_token_ids=draw.choice(((EOS,), ())),
            deadline_s=deadline_s,
            tenant=draw.choice(tenants),
            priority=draw.choice((0, 0, 0, 1)),
        )
        behaviour = Behaviour(
            choices=choices,
            read_delay_s=draw.choice((0.0, 0.0, 0.0, 0.5)),
            leaves_after_tokens=draw.choice((None,) * 7 + (draw.randint(1, 8),)),
            leaves_after_s=draw.choice((None,) * 7 + (draw.random() * 2.0,)),
            stop_after=draw.choice((None,) * 7 + (draw.randint(1, 8),)),
        )
        if pooling := random.Random(sampling.seed).choice(_POOLED):
            plain = SamplingParams(seed=sampling.seed)
            request = replace(request, max_tokens=1, sampling=plain, eos_token_ids=(), pooling=pooling)
            behaviour = replace(behaviour, choices=1, stop_after=None)
        sends.append((request, draw.random() * arrival_s, behaviour))
    return sends


def make_faults(draw: random.Random, cluster: SimCluster) -> FaultPlan:
    """Enables a random subset of all faults."""
    kinds = {kind: draw.choice((1.0, 3.0)) for kind in KINDS if draw.random() < 0.4}
    if "kill coordinator" in kinds and draw.random() < 0.7:
        del kinds["kill coordinator"]  # it ends every request, which hides other faults
    faults, chunks = cluster.network.faults, cluster.chunk_faults
    if draw.random() < 0.3:
        faults.broken = draw.choice((0.002, 0.01))
    if draw.random() < 0.5:
        faults.delayed, faults.delay_s = draw.choice((0.02, 0.2)), draw.choice((0.05, 1.0))
    if draw.random() < 0.3:
        chunks.damaged = draw.choice((0.02, 0.2))
    if draw.random() < 0.3:
        chunks.edge_failed = draw.choice((0.02, 0.2))
    if draw.random() < 0.2:
        chunks.no_staging = 0.1
    return FaultPlan(kinds, every_s=draw.choice((0.3, 1.0, 2.0)), most_s=draw.choice((1.0, LONGEST_FAULT_S)))


def poison(draw: random.Random, cluster: SimCluster, requests: list[GenerateRequest]) -> None:
    """Now and then a request ends every worker in whose step it runs."""
    if draw.random() < 0.05:
        cluster.poison.add(draw.choice(requests).request_id)


def _count(result: Result, cluster: SimCluster, injector: Injector) -> None:
    result.virtual_s, result.events = cluster.loop.now, cluster.loop.executed
    for client in cluster.clients:
        for outcome in client.outcomes:
            result.ended[outcome.code or outcome.ended or "runs"] += 1
    counts = result.counts
    counts.update(injector.counts)
    network, policy = cluster.network.counters, cluster.coordinator.requests
    counts.update(
        {
            "messages": network.messages,
            "messages lost": network.lost,
            "streams broken": network.broken,
            "dials failed": network.dials_failed,
            "kills": cluster.kills,
            "flips done": cluster.flips,
            "rescheduled": policy.rescheduled,
            "reassigned": policy.reassigned,
            "stale events": policy.stale_events,
            "preemptions": cluster.preempted(),
            "blocks given back": sum(w.tier.scheduler.kept.cache.blocks_given_back for w in cluster.workers.values()),
        }
    )
