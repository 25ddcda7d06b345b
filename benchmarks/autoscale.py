"""The autoscaler on traces, simulated: first tokens in time, worker-hours against the fixed size that meets the limit,
and reversals.

    python -m benchmarks.autoscale
    python -m benchmarks.autoscale --real

Each trace is replayed with a burst: BURST times as many requests from BURST_AT to BURST_END as before and after. The
fixed size is the smallest, in steps of 1/20 of the largest that the autoscaler chose, whose share of first tokens in
time is that of the autoscaler's target: first of prefill workers, then of decode workers. The autoscaler begins with
the fixed size of the time before the burst. EXAMPLE is no measurement: a model for which 100 workers are needed by a
load that can be replayed in minutes.

With --real a cluster of this machine with the built-in model is measured instead: the costs of workers with QUOTA of a
core (or --costs, as `benchmarks.flips --save` writes them), what the simulator predicts, the Azure conversation trace
with a burst on `baton up --autoscale`, clusters of fixed size, from the largest that it chose on with fewer prefill
workers each time until first tokens are not in time, and a start from zero. Fixed sizes are measured from AROUND_S
before the burst to AROUND_S after it, and what is sent at other times counts as in time. Each worker may use QUOTA of a
core from its join on, so that more workers compute more although there are few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from baton.core.errors import StartupError
from benchmarks.kit import cluster, table
from benchmarks.quota import FLAGS, QUOTA, calibrated, filled, limit, shape
from launch.autoscale.law import Policy
from launch.autoscale.simulate import DryRun, dry_run, reversals
from launch.bench.client import ServerTarget, base_url, run_load
from launch.bench.load import LoadPlan
from launch.bench.stats import RequestRecord
from launch.capacity.command import read_calibration
from launch.cluster_api import get_cluster
from sim.scale.costs import Calibration, DecodeCosts, FrontCosts, LinkCosts, PrefillCosts, WorkerKind
from sim.scale.members import ClusterShape
from sim.scale.planner import Size
from sim.scale.replay import Replay
from sim.scale.workload import Lengths, first_seconds, fitting, scaled
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


Span = tuple[float, float, float]  # when a burst begins and ends, and the trace ends


@dataclass(frozen=True, slots=True)
class Load:
    """A trace, how many times as many requests in the burst, its limits, whether there is no burst, and when that
    begins and ends and the trace ends."""

    trace: str
    scale: float
    slo: Slo
    flat: bool = False
    span: Span = (BURST_AT, BURST_END, DURATION_S)


def rows_of(load: Load) -> tuple[TraceRow, ...]:
    """Prefix blocks are dropped: hashing them takes most of a replay's time, and without them there is more to do."""
    begin, end, duration = load.span
    rows = [replace(row, blocks=()) for row in first_seconds(read_trace(trace_path(load.trace)), duration)]
    many = scaled(rows, load.scale, seed=1)
    if load.flat:
        return many
    source = random.Random("burst")
    return tuple(row for row in many if begin <= row.at_s < end or source.random() < 1 / BURST)


def fixed(policy: Policy, rows: Sequence[TraceRow], largest: Size) -> tuple[Size, float]:
    """Returns the fewest prefill workers, of STEPS numbers, beside the largest number of decode workers, and then the
    fewest decode workers beside these, whose share of first tokens in time is enough, and that share."""

    @cache
    def share(size: Size) -> float:
        replay = Replay(ClusterShape(policy.prefill, size.prefill, policy.decode, size.decode), rows)
        replay.run(policy.slo)
        times = replay.measured.times
        return sum(Slo(policy.slo.ttft_s).met(t.ttft_s, None) for t in times) / len(times)

    size = largest
    for role in ("prefill", "decode"):
        number, low, high = getattr(largest, role), 1, STEPS
        while low < high:
            middle = (low + high) // 2
            enough = share(replace(size, **{role: math.ceil(number * middle / STEPS)})) >= policy.slo.share
            low, high = (low, middle) if enough else (middle + 1, high)
        size = replace(size, **{role: math.ceil(number * low / STEPS)})
    return size, share(size)


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


LOOK_S = 0.25
START_LIMIT_S = 180.0
LARGEST = Size(3, 2)
DOWN_S = 60.0
EVERY_S = 1.0  # between two decisions of `baton up --autoscale`
AROUND_S = 20.0
LONGEST = 768, 32  # tokens of a prompt and of an output
TTFT_S = 7.0
BUSY = 2.55
"""Prefill workers that the burst keeps busy: more than two can, so that two are late soon, and less than three."""


@dataclass
class Watched:
    """What is seen of a cluster: the numbers of ready workers, one after the other, when each worker joined and how
    long after its process had started, the seconds of all workers from their start on, and their control groups."""

    sizes: list[Size] = field(default_factory=list)
    joined: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    worker_s: float = 0.0
    groups: list[Path] = field(default_factory=list)

    def look(self, url: str, seconds: float) -> None:
        """Adds what has happened in the last `seconds`, and gives new workers their quota."""
        rows = [row for row in get_cluster(url).document["workers"] if row["state"] != "lost"]
        self.worker_s += seconds * len(rows)
        for row in rows:
            key = row["id"], row["incarnation"]
            if key not in self.joined and row["pids"]:
                start_s = age_s(row["pids"][0])
                self.joined[key] = time.perf_counter(), start_s
                self.worker_s += start_s
                self.groups += [limit(pid, QUOTA) for pid in row["pids"]]
        ready = [row["role"] for row in rows if row["state"] == "ready"]
        size = Size(ready.count("prefill"), ready.count("decode"))
        if not self.sizes or size != self.sizes[-1]:
            self.sizes.append(size)

    @property
    def start_s(self) -> float:
        return max(seconds for _, seconds in self.joined.values())

    def cold(self, at: float, after: float) -> bool:
        """Whether a worker that joined later than `after` was starting."""
        return any(joined > after and joined - start_s <= at <= joined for joined, start_s in self.joined.values())

    @property
    def reversals(self) -> int:
        return max(reversals([getattr(size, role) for size in self.sizes]) for role in ("prefill", "decode"))


def age_s(pid: int) -> float:
    started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def watched(*flags: str, workers: int) -> Iterator[tuple[str, Watched]]:
    """Runs a cluster until the context ends, and watches it; begins when so many workers have their quota."""
    seen, ended = Watched(), threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not ended.wait(LOOK_S):
            now = time.perf_counter()
            with contextlib.suppress(StartupError):  # it has no time for a reply
                seen.look(running.url, now - last)
            last = now

    try:
        with cluster(*FLAGS, *flags) as running:
            thread = threading.Thread(target=watch)
            thread.start()
            try:
                deadline = time.monotonic() + START_LIMIT_S
                while len(seen.joined) < workers:
                    if time.monotonic() > deadline:
                        raise SystemExit(f"{len(seen.joined)} of {workers} workers joined in {START_LIMIT_S:g} s")
                    time.sleep(LOOK_S)
                yield running.url, seen
            finally:
                ended.set()
                thread.join()
    finally:
        for group in seen.groups:
            group.rmdir()


def replayed(url: str, rows: Sequence[TraceRow]) -> list[RequestRecord]:
    plan = LoadPlan(1, Lengths(1, 1), Lengths(1, 1), trace=tuple(rows))
    target = ServerTarget(base_url(url), "builtin", "", 120.0, {})
    return asyncio.run(run_load(target, plan.sessions(0, len(rows)), 0, lambda _: None))


def share_in_time(records: Sequence[RequestRecord], slo: Slo) -> float:
    return sum(not r.error and slo.met(r.ttft_s, None) for r in records) / max(len(records), 1)


def autoscaled(flags: Sequence[str], rows: Sequence[TraceRow], slo: Slo) -> tuple[Size, list[str]]:
    """Returns the largest size, and the cells of a row."""
    with watched(*flags, workers=2) as (url, seen):
        began, before = time.perf_counter(), seen.worker_s
        records = replayed(url, rows)
        hours = (seen.worker_s - before) / 3600
        warm = [record for record in records if not seen.cold(record.sent, began)]
    share, refused = share_in_time(records, slo), [record.error for record in records if record.error]
    largest = Size(max(s.prefill for s in seen.sizes), max(s.decode for s in seen.sizes))
    cells = [str(largest), f"{share:.1%}", f"{share_in_time(warm, slo):.1%} of {len(warm) / len(records):.0%}"]
    return largest, [*cells, str(len(refused)), f"{hours:.3f}", str(seen.reversals)]


def with_size(size: Size, rows: Sequence[TraceRow], slo: Slo, span: Span) -> tuple[float, int]:
    """Returns the share of first tokens in time beside a fixed size, and how many requests were not served."""
    around = [row for row in rows if span[0] - AROUND_S <= row.at_s < span[1] + AROUND_S]
    with watched(*fixed_flags(size), workers=size.prefill + size.decode) as (url, _):
        records = replayed(url, around)
    outside = len(rows) - len(around)
    return (share_in_time(records, slo) * len(around) + outside) / len(rows), sum(bool(r.error) for r in records)


def fixed_flags(size: Size) -> list[str]:
    return ["--prefill", str(size.prefill), "--decode", str(size.decode)]


def hours_of(size: Size, span: Span) -> float:
    return (size.prefill + size.decode) * span[2] / 3600


def predicted(kind: Calibration, rows: Sequence[TraceRow], slo: Slo, span: Span) -> list[list[str]]:
    """Returns the rows that the simulator predicts."""
    policy = Policy(slo, kind, kind, Size(1, 1), LARGEST, down_s=DOWN_S)
    workers = LARGEST.prefill + LARGEST.decode
    made = dry_run(policy, rows, shape(kind, 1, 1, workers), every_s=EVERY_S)
    turns = round(made.reversals_per_hour * (rows[-1].at_s - rows[0].at_s) / 3600)
    cells = [str(largest_of(made)), f"{made.met_ttft:.1%}"]
    cells.append(f"{made.warm_met_ttft:.1%} of {made.warm_requests / len(rows):.0%}")
    lines = [["autoscaled, simulated", *cells, "0", f"{made.worker_hours:.3f}", str(turns)]]
    for prefill in range(LARGEST.prefill, 0, -1):
        replay, size = Replay(shape(kind, prefill, 1), rows), Size(prefill, 1)
        replay.run(slo)
        share = sum(Slo(slo.ttft_s).met(t.ttft_s, None) for t in replay.measured.times) / len(rows)
        lines.append(
            [f"fixed {size}, simulated", str(size), f"{share:.1%}", "", "0", f"{hours_of(size, span):.3f}", "0"]
        )
    return lines


def real(costs: Path | None, span: Span, predict: bool) -> None:
    kind = read_calibration(str(costs)) if costs else calibrated(QUOTA)
    slo, rows = real_load(kind, span)
    burst = sum(kind.prompt_s(row.input_len) for row in rows if span[0] <= row.at_s < span[1]) / (span[1] - span[0])
    print(f"{len(rows)} requests in {span[2]:g} s, 5x from {span[0]:g} to {span[1]:g} s, when they keep {burst:.2f}")
    print(f"prefill workers busy; TTFT {slo.ttft_s:g} s\n")
    made = predicted(kind, rows, slo, span)
    print(table(("cluster", *REAL_COLUMNS), made), flush=True)
    if predict:
        return
    made = []
    with filled(), tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "costs.json"
        file.write_text(json.dumps(kind.as_json()))
        scaled_up = [*fixed_flags(LARGEST), "--autoscale", str(file), "--hold-s", "120"]
        scaled_up += [
            "--autoscale-slo",
            f"ttft={slo.ttft_s:g},tpot={slo.tpot_s:g}",
            "--autoscale-down-s",
            f"{DOWN_S:g}",
        ]
        largest, cells = autoscaled(scaled_up, rows, slo)
        made.append(["autoscaled", *cells])
        for prefill in range(largest.prefill, 0, -1):
            size = replace(largest, prefill=prefill)
            share, errors = with_size(size, rows, slo, span)
            hours = f"{hours_of(size, span):.3f}"
            made.append([f"fixed {size}", str(size), f"{share:.1%}", "", str(errors), hours, "0"])
            if share < slo.share:
                break
        print(f"\n{table(('cluster', *REAL_COLUMNS), made)}\n")
        print(from_zero([*scaled_up, "--autoscale-min", "0"], rows[:5]), flush=True)


def real_load(kind: Calibration, span: Span) -> tuple[Slo, tuple[TraceRow, ...]]:
    """Returns the limits, and a trace whose burst is work for BUSY prefill workers."""
    name = "azure-conv"
    rows = first_seconds(read_trace(trace_path(name)), span[2])
    seconds = [(row.at_s, kind.prompt_s(min(row.input_len, LONGEST[0]))) for row in rows]
    slo = Slo(TTFT_S, 1.0, 0.95)
    busy = sum(second for at_s, second in seconds if span[0] <= at_s < span[1]) / (span[1] - span[0])
    made = rows_of(Load(name, BUSY / busy, slo, span=span))
    sizes = ((min(row.input_len, LONGEST[0]), min(row.output_len, LONGEST[1])) for row in made)
    return slo, tuple(TraceRow(row.at_s, *size) for row, size in zip(made, sizes, strict=True))


def from_zero(flags: Sequence[str], rows: Sequence[TraceRow]) -> str:
    """Sends a few requests at once to a cluster without workers."""
    with watched(*flags, workers=0) as (url, seen):
        records = replayed(url, [replace(row, at_s=0.0) for row in rows])
    first_s = min(record.ttft_s or math.inf for record in records)
    refused = sum(record.error is not None for record in records)
    return f"from zero: first token after {first_s:.1f} s, workers start in {seen.start_s:.1f} s, {refused} refused"


REAL_COLUMNS = (
    *("largest size", "in time, all", "in time outside cold starts, of so many", "not served", "worker-hours"),
    "reversals",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--down-s", type=float, default=600.0)
    parser.add_argument("--only", type=int, default=None, help="the number of one load")
    parser.add_argument("--real", action="store_true", help="measure a cluster of this machine")
    parser.add_argument("--costs", type=Path, help="--real: measured within the quota, instead of now")
    parser.add_argument(
        "--span", type=float, nargs=3, default=(120.0, 180.0, 420.0), help="--real: burst, its end, end"
    )
    parser.add_argument("--predict", action="store_true", help="--real: measure nothing but the costs")
    given = parser.parse_args()
    if given.real:
        return real(given.costs, given.span, given.predict)
    gc.disable()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for number, load in enumerate(LOADS):
        if given.only in (None, number):
            policy = Policy(load.slo, EXAMPLE, EXAMPLE, Size(1, 1), Size(400, 400), down_s=given.down_s)
            print(line(replace(load, scale=load.scale * given.factor), policy), flush=True)


if __name__ == "__main__":
    main()
