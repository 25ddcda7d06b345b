"""The autoscaler on traces, simulated: first tokens in time, worker-hours against the fixed size that meets the limit,
and reversals.

    python -m benchmarks.autoscale

Each trace is replayed with a burst: BURST times as many requests from BURST_AT to BURST_END as before and after. The
fixed size is the smallest, in steps of 1/20 of the largest that the autoscaler chose, whose share of first tokens in
time is that of the autoscaler's target. The autoscaler begins with the fixed size of the time before the burst. EXAMPLE
is no measurement: a model for which 100 workers are needed by a load that can be replayed in minutes.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.autoscale.law import Policy
from launch.autoscale.simulate import DryRun, dry_run
from sim.scale.costs import Calibration, DecodeCosts, FrontCosts, LinkCosts, PrefillCosts, WorkerKind
from sim.scale.planner import Size
from sim.scale.replay import ClusterShape, Replay
from sim.scale.workload import first_seconds, fitting, scaled
from sim.stats import Slo
from sim.trace import TraceRow, read_trace, trace_path

DURATION_S, BURST_AT, BURST_END, BURST = 3400.0, 1200.0, 1800.0, 5.0
STEPS = 20
START_S = 60.0
EXAMPLE = Calibration(
    name="example",
    block_size=16,
    max_model_len=131072,
    token_bytes=131072,
    tensor_parallel=1,
    prefill=PrefillCosts(base_s=0.04, token_s=6.4e-4, row_s=8e-4, pair_s=8e-9),
    decode=DecodeCosts(base_s=0.032, row_s=8e-4, context_s=8e-8, token_s=6.4e-4),
    link=LinkCosts(latency_s=0.003, bytes_per_s=5e9),
    front=FrontCosts(request_s=0.003, request_cpu_s=5e-4, token_cpu_s=3e-5),
    prefill_worker=WorkerKind(blocks=20000, step_tokens=4096, start_s=START_S),
    decode_worker=WorkerKind(blocks=20000, step_tokens=512, max_running=256, start_s=START_S),
)


@dataclass(frozen=True, slots=True)
class Load:
    """A trace, how many times as many requests in the burst, its limits, and whether its prefixes are kept."""

    trace: str
    scale: float
    slo: Slo
    flat: bool = False


def rows_of(load: Load) -> tuple[TraceRow, ...]:
    """Prefix blocks are dropped: hashing them takes most of a replay's time, and without them there is more to do."""
    rows = [replace(row, blocks=()) for row in first_seconds(read_trace(trace_path(load.trace)), DURATION_S)]
    many = scaled(rows, load.scale, seed=1)
    if load.flat:
        return many
    source = random.Random("burst")
    return tuple(row for row in many if BURST_AT <= row.at_s < BURST_END or source.random() < 1 / BURST)


def fixed(policy: Policy, rows: Sequence[TraceRow], largest: Size) -> tuple[Size, float]:
    """Returns the smallest of STEPS sizes whose share of first tokens in time is enough, and that share."""

    def share(step: int) -> float:
        size = Size(*(max(1, math.ceil(n * step / STEPS)) for n in (largest.prefill, largest.decode)))
        replay = Replay(ClusterShape(policy.prefill, size.prefill, policy.decode, size.decode), rows)
        replay.run(policy.slo)
        times = replay.measured.times
        return sum(Slo(policy.slo.ttft_s).met(t.ttft_s, None) for t in times) / len(times)

    low, high, at = 1, STEPS, dict[int, float]()
    while low < high:
        middle = (low + high) // 2
        at[middle] = share(middle)
        low, high = (low, middle) if at[middle] >= policy.slo.share else (middle + 1, high)
    size = Size(*(max(1, math.ceil(n * low / STEPS)) for n in (largest.prefill, largest.decode)))
    return size, at.get(low) or share(low)


def largest_of(made: DryRun) -> Size:
    sizes = [change.decision.size for change in made.changes]
    return Size(max(size.prefill for size in sizes), max(size.decode for size in sizes))


def line(load: Load, policy: Policy) -> str:
    rows, _ = fitting(rows_of(load), policy.prefill.max_model_len)
    began = time.process_time()
    before = [row for row in rows if row.at_s < BURST_AT]
    made = dry_run(policy, rows, fixed(policy, before, Size(60, 20))[0])
    largest = largest_of(made)
    size, share = fixed(policy, rows, largest)
    hours = (size.prefill + size.decode) * made.outcome.duration_s / 3600
    name = load.trace + ("" if load.flat else ", 5x burst")
    return (
        f"| {name} | {len(rows):,} | {largest} | {made.met_ttft:.1%} | {made.warm_met_ttft:.1%} of"
        f" {made.warm_requests / len(rows):.0%} | {sum(made.outcome.refused.values())} |"
        f" {size} ({share:.1%}) | {made.worker_hours:.1f} of {hours:.1f}: {made.worker_hours / hours:.0%} |"
        f" {made.reversals_per_hour:.1f} | {time.process_time() - began:.0f} s |"
    )


COLUMNS = (
    *("trace", "requests", "largest size", "in time, all", "in time outside cold starts, of so many", "refused"),
    *("fixed size that is in time", "worker-hours", "reversals an hour", "processor time"),
)
LOADS = (
    Load("azure-code", 8.0, Slo(8.0, 0.15, 0.95)),
    Load("mooncake-conversation", 3.0, Slo(60.0, 0.15, 0.95)),
    Load("azure-conv", 18.0, Slo(6.0, 0.15, 0.95)),
    Load("azure-conv", 6.0, Slo(6.0, 0.15, 0.95), flat=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--down-s", type=float, default=600.0)
    parser.add_argument("--only", type=int, default=None, help="the number of one load")
    given = parser.parse_args()
    gc.disable()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for number, load in enumerate(LOADS):
        if given.only in (None, number):
            policy = Policy(load.slo, EXAMPLE, EXAMPLE, Size(1, 1), Size(400, 400), down_s=given.down_s)
            print(line(replace(load, scale=load.scale * given.factor), policy), flush=True)


if __name__ == "__main__":
    main()
