"""The simulator against a real cluster on this machine: three loads on which it was not calibrated.

Starts `baton up` with the built-in model on the CPU with one worker of each role and with two, uses the small KV pools
once (their memory costs more when it is first used, how much depends on the host), calibrates each cluster (`baton
calibrate --shared-host`; four processes share the processor's caches otherwise than two), measures the loads with the
client of `baton bench`, and replays the same requests in the simulator. `--rounds` repeats everything; the table has
the medians. Coordinator and client are pinned to the first core, beside the first prefill worker: left to the kernel
they stay beside one worker in one run and beside the other in the next. With `--filled` a process of the lowest
priority on each core reads memory while nothing else runs there: then a step finds as little in the caches whatever the
other workers did before, as on a host that serves other programs too. `--calibration FILE` keeps the last calibration
of one worker of each role, with these errors in it, for `baton plan`. Options after `--` go to `baton up`: another
model, for instance, with a `--pace` at which its workers are as busy.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import kit
from benchmarks.quota import filled, use_pools
from launch.bench.client import ServerTarget, base_url, first_model, run_load
from launch.bench.load import TOKEN_IDS, Session, completion
from launch.bench.stats import RequestRecord, RunStatistics, statistics
from launch.capacity.calibrate import REPEATS, calibrate
from launch.capacity.loads import LoadClient, cpu_seconds
from launch.cluster_api import get_cluster
from launch.cores import place
from sim.scale.costs import Calibration
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.scale.results import Outcome
from sim.scale.workload import Lengths, poisson
from sim.trace import TraceRow

BARS = {"throughput": 0.05, "p50": 0.10, "p99": 0.20}
NUMBERS = ("output tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
STAGES = {
    "queue": ("queue",),
    "prefill queue": ("prefill_queue",),
    "prefill": ("prefill",),
    "hand-over": ("reserve", "transfer", "parked", "hand_over"),
    "decode queue": ("decode_queue",),
    "decode": ("decode", "detokenise"),
}
"""Stages of a request, each with its names in the coordinator's timeline and in the simulator."""
OUTSIDE = "outside"
FRONT_CORES = (0,)
"""Of this process's cores, by position, those of the coordinator and of the client."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load: in an open loop at the rows' times, or with `clients` in a closed loop."""

    name: str
    workers: int
    rows: tuple[TraceRow, ...]
    clients: int = 0


def cases(seconds: float, pace: float) -> list[Case]:
    """Requests of other lengths than those of the calibration, with random arrivals."""
    light = poisson(5.0 * pace, seconds, Lengths(100, 800), Lengths(16, 64), seed=1)
    several = poisson(6.0 * pace, seconds, Lengths(200, 200, 1000), Lengths(32, 96), seed=2)
    full = poisson(40.0 * pace, seconds / 2, Lengths(100, 900), Lengths(24, 80), seed=3)
    return [
        Case(f"1x1, {5 * pace:g} requests/s", 1, light),
        Case(f"2x2, {6 * pace:g} requests/s", 2, several),
        Case("overload, 1x1, 48 clients", 1, full, clients=48),
    ]


def real(case: Case, target: ServerTarget, seed: int) -> dict[str, float]:
    source, sessions = random.Random(seed), []
    for row in case.rows:
        prompt = source.choices(range(TOKEN_IDS.low, TOKEN_IDS.high), k=row.input_len)
        sessions.append(Session((completion(prompt, row.output_len),), row.at_s))
    measured = statistics(good(asyncio.run(run_load(target, sessions, case.clients, lambda _: None))))
    return numbers(measured, {name: stage.mean for name, stage in measured.stages.items()})


def numbers(run: RunStatistics | Outcome, spent_s: Mapping[str, float]) -> dict[str, float]:
    """Returns NUMBERS, and the mean seconds of a request in each of STAGES, of `spent_s`, and OUTSIDE of them."""
    times = (run.ttft.p50, run.ttft.p99, run.tpot.p50, run.tpot.p99)
    stages = {stage: sum(spent_s.get(name, 0.0) for name in names) for stage, names in STAGES.items()}
    outside = {OUTSIDE: run.e2e.mean - sum(stages.values())}
    return dict(zip(NUMBERS, (run.output_tokens_per_s, *times), strict=True)) | stages | outside


def good(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    failed = [record.error for record in records if record.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    return records


def cores_here() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def simulated(case: Case, calibration: Calibration) -> dict[str, float]:
    host = cores_here()
    placed = tuple(p.cores for p in place([1] * 2 * case.workers, host))
    position = {core: index for index, core in enumerate(host)}
    own = tuple(tuple(position[core] for core in worker) for worker in placed)
    shape = ClusterShape(calibration, case.workers, calibration, case.workers, own, len(host), FRONT_CORES)
    outcome = Replay(shape, case.rows, clients=case.clients).run()
    return numbers(outcome, outcome.waits_s)


@contextmanager
def pinned(coordinator: int) -> Iterator[None]:
    """Keeps the coordinator, a process id, and this process on FRONT_CORES until the context ends."""
    here = cores_here()
    own = {here[position] for position in FRONT_CORES}
    for thread in Path(f"/proc/{coordinator}/task").iterdir():
        os.sched_setaffinity(int(thread.name), own)
    os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, here)


def connected(url: str) -> ServerTarget:
    base = base_url(url)
    return ServerTarget(base, first_model(base, ""), "", 300.0, {"return_timeline": True})


@dataclass(frozen=True, slots=True)
class Round:
    """Calibrations by the workers of each role; by the name of a case its `numbers` on the real cluster, and which
    share of the host's processor time other processes used meanwhile."""

    calibrations: dict[int, Calibration]
    numbers: dict[str, dict[str, float]]
    other_share: dict[str, float]


def one_round(todo: Sequence[Case], number: int, repeats: int, beside: Sequence[int], options: Sequence[str]) -> Round:
    """`beside`: processes of the benchmark that are no part of the cluster; `options`: more of `baton up`."""
    done = Round({}, {}, {})
    for workers in sorted({case.workers for case in todo}):
        flags = ("--model", "builtin", "--device", "cpu", "--draft", "none", "--kv-memory-gib", "0.25", *options)
        cores = len(cores_here())
        with kit.cluster(*flags, "--prefill", str(workers), "--decode", str(workers)) as running:
            target = connected(running.url)
            cluster = LoadClient(running.url, target, number)

            def own_cpu_s(cluster: LoadClient = cluster) -> float:
                return cluster.cpu_s() + time.process_time() + sum(map(cpu_seconds, beside))

            use_pools(cluster)
            with pinned(int(get_cluster(running.url).document["coordinator"]["pid"])):
                done.calibrations[workers] = calibrate(
                    cluster, "cpu", shared_host=True, progress=_print, repeats=repeats
                )
                for case in (case for case in todo if case.workers == workers):
                    began, host_s, own_s = time.perf_counter(), host_cpu_s(), own_cpu_s()
                    done.numbers[case.name] = real(case, target, number)
                    own_s = own_cpu_s() - own_s
                    available_s = (time.perf_counter() - began) * cores
                    done.other_share[case.name] = max(0.0, host_cpu_s() - host_s - own_s) / available_s
                    _print(f"{case.name}: {done.numbers[case.name]}")
    return done


def host_cpu_s() -> float:
    """Returns the processor time of all processes on this host, without waiting for I/O or another virtual machine."""
    user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def bar(name: str) -> float:
    return BARS["throughput"] if name == NUMBERS[0] else BARS[name.split()[-1]]


def main() -> None:
    parser = kit.parser(__doc__, "simulator.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of each load")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each load of a calibration")
    parser.add_argument("--calibration", type=Path, help="file for the last calibration and its errors")
    parser.add_argument("--filled", action="store_true", help="keep all cores busy with memory, at the lowest priority")
    parser.add_argument("--about", default="", help="remark about this run")
    parser.add_argument("--pace", type=float, default=1.0, help="factor of the loads' requests/s")
    parser.add_argument("flags", nargs="*", help="options of `baton up`, after --")
    options = parser.parse_args()
    todo = cases(options.seconds, options.pace)
    with filled() if options.filled else nullcontext([]) as beside:
        rounds = [one_round(todo, number, options.repeats, beside, options.flags) for number in range(options.rounds)]
    rows, spent, errors = [], [], dict[str, list[float]]()
    for case in todo:
        measured = [done.numbers[case.name] for done in rounds]
        modelled = [simulated(case, done.calibrations[case.workers]) for done in rounds]
        other_share = f"{max(done.other_share[case.name] for done in rounds):.0%}"
        for stage in (*STAGES, OUTSIDE):
            a, b = (1e3 * median(each[stage] for each in many) for many in (measured, modelled))
            spent.append([case.name, stage, f"{a:.1f} ms", f"{b:.1f} ms", f"{b - a:+.1f} ms"])
        for name in NUMBERS:
            a, b = (median(each[name] for each in many) for many in (measured, modelled))
            spread = (max(each[name] for each in measured) - min(each[name] for each in measured)) / a
            error = b / a - 1
            errors.setdefault(name, []).append(abs(error))
            unit, scale = ("", 1.0) if name == NUMBERS[0] else (" ms", 1e3)
            met = "yes" if abs(error) <= bar(name) else "no"
            cells = [f"{a * scale:.1f}{unit}", f"{b * scale:.1f}{unit}", f"{error:+.1%}"]
            rows.append([case.name, name, *cells, f"{bar(name):.0%}", met, f"{spread:.0%}", other_share])
    headings = (
        "load",
        "number",
        "real",
        "simulated",
        "error",
        "bar",
        "within",
        "spread of the real one",
        "other processes",
    )
    last = rounds[-1].calibrations
    fits = [
        [f"{workers}x{workers}", name, f"{r.median:.1%}", f"{r.largest:.1%}", str(r.count)]
        for workers, calibration in last.items()
        for name, r in calibration.residuals.items()
    ]
    largest = {_key(name): max(values) for name, values in errors.items()}
    if options.calibration:
        document = replace(last[min(last)], errors=largest).as_json()
        options.calibration.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    within = sum(row[6] == "yes" for row in rows)
    kit.report(
        options.out,
        "The simulator against a real cluster",
        f"{within} of {len(rows)} numbers are within their bars. Medians of {options.rounds} rounds; the"
        " spread is the difference between the largest and the smallest measurement, relative to the median: what"
        " repeats so far apart cannot be predicted more closely. The last column is the share of the host's"
        " processor time that other processes used meanwhile, at most.",
        kit.table(headings, rows),
        "Where a request's time goes, means: what the model lacks is in the stage that is too short. The coordinator's"
        " timeline on the left; the simulated decode includes the way of the last token to the client.",
        kit.table(("load", "stage", "real", "simulated", "difference"), spent),
        "Errors of the last calibrations' fits:",
        kit.table(("cluster", "fit", "median", "largest", "loads"), fits),
        about=f"The coordinator, all workers and the client share {len(cores_here())} cores. {options.about}".rstrip(),
    )


def _key(name: str) -> str:
    """Returns the name of a number in a calibration's `errors`."""
    return "throughput" if name == NUMBERS[0] else name.lower().replace(" ", "_")


if __name__ == "__main__":
    main()
