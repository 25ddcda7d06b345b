"""Where prompts are computed, on four mixes of requests: always at prefill, never, and per request by cost.

    python -m benchmarks.split [--calibration cpu.json] [--prefill 2 --decode 2] [--out split.md]
    python -m benchmarks.split --cluster [--rounds 2] [--load 0.5] [--quota 0.4]

In the simulator (sim/scale), with the costs of `tests/support/scale.py` unless a calibration is given. The same
requests are replayed under each `--split` on the same workers, and without a prefill pool on as many workers in all.
With `--cluster`, on `baton up` on this machine's CPU: the weights of the built-in model, whose context is extended to
the longest prompts, without a draft, one worker of each role unless given. The clusters of all ways run by turns. With
`--quota` each worker has that share of a core (quota.py), as root: otherwise `never` computes on both cores of a small
machine what the others compute on one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from baton.runtime.model_source import builtin_directory
from benchmarks import kit
from benchmarks.quota import filled, quotas
from coordinator.policy.split import STREAM_WEIGHT, Split
from launch.bench.client import ServerTarget, base_url, first_model, run_load
from launch.bench.load import TOKEN_IDS, LoadPlan
from launch.bench.stats import RunStatistics, statistics
from launch.cluster_api import get_cluster
from sim.scale.costs import Calibration, parse_calibration
from sim.scale.members import ClusterShape
from sim.scale.replay import Replay
from sim.scale.results import Outcome
from sim.scale.workload import Lengths, poisson
from sim.stats import Slo, parse_slo
from sim.trace import TRACE_BLOCK, TraceRow
from tests.support.scale import CALIBRATION

TURNS, FIRST_BLOCKS = 6, 6
"""Of an agent: requests, and blocks of TRACE_BLOCK tokens in the first prompt; each later prompt has one more."""
CONTEXT = 16384
LEAD_IN_S = 10.0
"""Of the first load, sent to a cluster before any is measured."""
Rows = tuple[TraceRow, ...]
Figures = tuple[float, ...]
"""Share of prompts computed by decode workers; TTFT p50, p99, TPOT p50, p99; requests per second within the limits, and
their share."""


def agents(rate: float, duration_s: float, seed: int) -> Rows:
    """Agents, each of whose prompts begins with the one before, a few seconds later."""
    source, rows, at_s, block = random.Random(seed), list[TraceRow](), 0.0, 0
    while (at_s := at_s + source.expovariate(rate / TURNS)) < duration_s:
        blocks, turn_s = list[int](), at_s
        for turn in range(TURNS):
            more = 1 if turn else FIRST_BLOCKS
            blocks += range(block, block + more)
            block += more
            length = len(blocks) * TRACE_BLOCK + source.randint(20, 200)
            rows.append(TraceRow(turn_s, length, source.randint(40, 90), tuple(blocks)))
            turn_s += source.uniform(2.0, 5.0)
    return tuple(sorted(rows, key=lambda row: row.at_s))


def bursts(rate: float, duration_s: float, seed: int) -> Rows:
    """All requests of ten seconds arrive within the first of them."""
    source, rows = random.Random(seed), list[TraceRow]()
    for start in range(0, int(duration_s), 10):
        for _ in range(round(rate * 10)):
            rows.append(TraceRow(start + source.random(), source.randint(500, 2500), source.randint(30, 120)))
    return tuple(sorted(rows, key=lambda row: row.at_s))


MIXES: dict[str, tuple[Callable[[float, float, int], Rows], tuple[float, ...]]] = {
    "short chat": (lambda r, d, s: poisson(r, d, Lengths(30, 300), Lengths(60, 240), s), (10.0, 25.0)),
    "long prompts": (lambda r, d, s: poisson(r, d, Lengths(2000, 8000), Lengths(30, 120), s), (3.0, 4.5)),
    "cached agents": (agents, (6.0, 12.0)),
    "bursts": (bursts, (3.0, 6.0)),
}
"""Requests by rate, duration and seed; and the rates per second of two prefill and two decode workers."""


def ways(prefill: int, decode: int, pairs: bool) -> list[tuple[str, int, int, Split]]:
    """The name of each way to serve, its workers and its `--split`; with `pairs` only those with a prefill pool."""
    same: list[tuple[str, int, int, Split]] = [(way, prefill, decode, way) for way in ("always", "never", "auto")]
    return same if pairs else [*same, ("`--prefill 0`", 0, prefill + decode, "never")]


def figures(on_decode: float, outcome: Outcome | RunStatistics) -> Figures:
    times = outcome.ttft.p50, outcome.ttft.p99, outcome.tpot.p50, outcome.tpot.p99
    return (on_decode, *times, outcome.goodput_per_s, outcome.met_share)


def simulated(
    rows: Rows, way: tuple[str, int, int, Split], slo: Slo, calibration: Calibration, stream_weight: float
) -> Figures:
    _, prefill, decode, split = way
    shape = ClusterShape(calibration, prefill, calibration, decode, split=split, stream_weight=stream_weight)
    outcome = Replay(shape, rows).run(slo)
    return figures(outcome.on_decode / max(outcome.requests, 1), outcome)


@contextlib.contextmanager
def long_context() -> Iterator[Path]:
    """The built-in model with a context that holds every prompt of the mixes."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "long"
        shutil.copytree(builtin_directory("target"), model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        yield model


def measured(url: str, rows: Rows, slo: Slo, seed: int) -> Figures:
    base = base_url(url)
    target = ServerTarget(base, first_model(base, ""), "", 300.0, {"return_timeline": True})
    sessions = LoadPlan(seed, TOKEN_IDS, TOKEN_IDS, trace=rows).sessions(0, len(rows))
    records = asyncio.run(run_load(target, sessions, 0, lambda _: None))
    done = [record for record in records if record.error is None]
    on_decode = sum("transfer" not in record.stages for record in done) / max(len(done), 1)
    return figures(on_decode, statistics(records, slo))


@contextlib.contextmanager
def workers_with(quota: float, flags: tuple[str, ...]) -> Iterator[kit.Cluster]:
    """Runs a cluster whose workers have `quota` of a core each; 0: all of the cores."""
    if not quota:
        with kit.cluster(*flags) as running:
            yield running
        return
    with filled(), kit.cluster(*flags, "--threads", "1") as running, quotas(get_cluster(running.url).workers, quota):
        yield running


def cells(run: Figures) -> list[str]:
    on_decode, ttft, ttft_p99, tpot, tpot_p99, goodput, share = run
    times = f"{ttft * 1e3:.0f} ms", f"{ttft_p99 * 1e3:.0f} ms", f"{tpot * 1e3:.1f} ms", f"{tpot_p99 * 1e3:.1f} ms"
    return [f"{on_decode:.0%}", *times, f"{goodput:.2f}", f"{share:.0%}"]


def main() -> None:
    parser = kit.parser(__doc__, "split.md")
    parser.add_argument("--calibration", type=Path, help="costs from `baton calibrate`, for the simulator")
    parser.add_argument("--cluster", action="store_true", help="on real workers")
    parser.add_argument(
        "--quota", type=float, default=0.0, help="of a core, for each worker of a cluster; default none"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--duration-s", type=float, default=40.0)
    parser.add_argument("--stream-weight", type=float, default=STREAM_WEIGHT, help="of `auto`")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the rates")
    parser.add_argument("--slo", default="ttft=1,tpot=0.05", help="limits in seconds")
    parser.add_argument("--mix", action="append", choices=[*MIXES], help="default all")
    parser.add_argument("--pairs", action="store_true", help="no run without a prefill pool")
    parser.add_argument("--about", default="", help="remark about this run")
    given = parser.parse_args()
    slo = parse_slo(given.slo)
    calibration = simulated_costs(given.calibration)
    loads = [
        (mix, rate * given.load, MIXES[mix][0](rate * given.load, given.duration_s, given.seed))
        for mix in given.mix or MIXES
        for rate in MIXES[mix][1]
    ]
    served = ways(given.prefill, given.decode, given.pairs)
    lead_in = tuple(row for row in loads[0][2] if row.at_s < LEAD_IN_S)
    runs: dict[tuple[str, float, str], list[Figures]] = {
        (mix, rate, way): [] for mix, rate, _ in loads for way, *_ in served
    }
    with long_context() as model:
        for number in range(given.rounds):
            for way in kit.by_turns(number, served):
                name, prefill, decode, split = way
                weight = ("--stream-weight", str(given.stream_weight))
                flags = ("--model", str(model), "--draft", "none", "--device", "cpu", "--split", split, *weight)
                workers = ("--prefill", str(prefill), "--decode", str(decode))
                alone = contextlib.nullcontext()
                with workers_with(given.quota, (*flags, *workers)) if given.cluster else alone as running:
                    if running is not None:  # costs that workers measured at their start were without the quota
                        measured(running.url, lead_in, slo, number)
                    for mix, rate, rows in loads:
                        if running is not None:
                            run = measured(running.url, rows, slo, number)
                        else:
                            run = simulated(rows, way, slo, calibration, given.stream_weight)
                        runs[mix, rate, name].append(run)
                        print(mix, f"{rate:g}", name, *cells(run), file=sys.stderr, flush=True)
    headings = ("mix", "requests/s", "`--split`", "on decode", "TTFT p50", "p99", "TPOT p50", "p99", "goodput/s", "met")
    medians = {load: [median(values) for values in zip(*done, strict=True)] for load, done in runs.items()}
    table = kit.table(
        headings, [[mix, f"{rate:g}", way, *cells(tuple(run))] for (mix, rate, way), run in medians.items()]
    )
    kit.report(given.out, "Where prompts are computed", table, about=given.about)


def simulated_costs(file: Path | None) -> Calibration:
    if file:
        return parse_calibration(json.loads(file.read_text()))
    pool = replace(CALIBRATION.prefill_worker, blocks=20_000), replace(CALIBRATION.decode_worker, blocks=20_000)
    return replace(CALIBRATION, prefill_worker=pool[0], decode_worker=pool[1])


if __name__ == "__main__":
    main()
