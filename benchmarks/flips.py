"""Goodput of a fixed number of workers on a mix that turns: each fixed split of the roles, and the autoscaler's flips.

    python -m benchmarks.flips --save costs.json                      measured and predicted: 11 minutes on two idle
                                                                      cores, as root
    python -m benchmarks.flips --costs costs.json                     the same with costs measured before
    python -m benchmarks.flips --costs costs.json --predict           predicted only

Workers with QUOTA of a core each (built-in model, CPU, `--exact`) are calibrated, and the same requests are sent to a
cluster of them once for each split and once beside `baton autoscale --flip`. The simulator predicts this with these
costs and its own flips. Without quotas the two cores would be the limit and not the workers: one prefill worker would
have as much of them as three.

The load follows the costs: in each phase one role keeps WORK of the workers busy, which three of four can do and two
cannot, and the limits are what such workers can keep. So the gain is that of a mix that turns as far as this one.

Goodput counts over the time of the phases. A run ends when the last request could have ended within its limits: what
has not ended by then has missed them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.core.commands import Role
from benchmarks import kit
from benchmarks.quota import FLAGS, QUOTA, calibrated, filled, quotas, shape, target_of, use_pools
from launch.autoscale.flip import FLIP_WINDOW_S
from launch.autoscale.law import Policy
from launch.autoscale.simulate import dry_run
from launch.bench.client import ServerTarget, client_session, send
from launch.bench.load import TOKEN_IDS, PlannedRequest, completion
from launch.bench.stats import RequestRecord
from launch.capacity.command import read_calibration
from launch.capacity.loads import LoadClient, cpu_seconds
from launch.cluster_api import get_cluster
from launch.control_options import FLIP_S
from launch.drain import drain
from sim.scale.costs import Calibration
from sim.scale.planner import Size
from sim.scale.replay import Replay
from sim.scale.workload import Lengths, poisson
from sim.stats import Slo, percentile
from sim.trace import TraceRow

WORKERS, PHASES = 4, 2
LONG, SHORT = (Lengths(600, 1200), Lengths(8, 16)), (Lengths(32, 64), Lengths(128, 192))
WORK = 2.6
"""Workers that a phase keeps busy with one role: 0.87 of three, and 1.3 times what two can do. With 2.4 costs that are
5 % too high or low change the goodput of 2:2 by up to 42 %, so with 2.6 by 10 % (flip.md)."""
PROMPTS, ROWS = 8, 40
"""The limits: a prompt waits for as long as so many take, and a token takes as long as a step of so many sequences."""
FLIP_TAKES_S: dict[Role, float] = {"decode": 0.3, "prefill": 0.1}
"""From a worker's last sequence to its join in that role, in the simulator (flip.md)."""


def mean(lengths: Lengths) -> float:
    return (lengths.low + lengths.high) / 2


def limits(kind: Calibration) -> Slo:
    """Returns the limits of TTFT and TPOT, in whole milliseconds, that such workers can keep."""
    step_s = kind.decode.plain_s(ROWS, ROWS * (mean(SHORT[0]) + mean(SHORT[1]) / 2)) + kind.decode.idle_s
    return Slo(round(PROMPTS * kind.prompt_s(round(mean(LONG[0]))), 3), round(step_s, 3))


def rates(kind: Calibration) -> tuple[float, float]:
    """Returns how many requests per second of each phase keep WORK workers busy with its role: with prompts, or with
    hand-overs and tokens, ROWS sequences at a time."""
    prompt, output, link = mean(SHORT[0]), mean(SHORT[1]), kind.link
    decode_s = limits(kind).tpot_s * output / ROWS + link.accept_s + link.receive_s + link.receive_token_s * prompt
    return WORK / kind.prompt_s(round(mean(LONG[0]))), WORK / decode_s


def turning_mix(kind: Calibration, phase_s: float, load: float) -> tuple[TraceRow, ...]:
    """Long prompts with short outputs, then short prompts with long outputs, and again; `load` multiplies the rates."""
    made: list[TraceRow] = []
    for number in range(PHASES):
        lengths, rate = (LONG, SHORT)[number % 2], rates(kind)[number % 2]
        phase = poisson(rate * load, phase_s, *lengths, seed=number)
        made += (replace(row, at_s=row.at_s + number * phase_s) for row in phase)
    return tuple(made)


Times = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Phase:
    """Of the requests of one phase: the share within the limits, and the median TTFT and TPOT in seconds of those that
    have ended."""

    share: float
    ttft_s: float
    tpot_s: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.ttft_s:.2f} s, {self.tpot_s * 1e3:.0f} ms)"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: requests per second within their limits, its phases, flips, how much of their quotas the workers used,
    and each request's tokens (None: it has not ended)."""

    goodput: float
    phases: tuple[Phase, ...]
    flips: int
    used: float = 0.0
    tokens: tuple[tuple[int, ...] | None, ...] = ()


def counted(rows: Sequence[TraceRow], times: Sequence[Times], slo: Slo, phase_s: float, flips: int) -> Measured:
    """`times`: TTFT and TPOT of each request; None where it has none."""
    phases = []
    for number in range(PHASES):
        own = [t for row, t in zip(rows, times, strict=True) if number <= row.at_s / phase_s < number + 1]
        medians = [percentile(sorted(t[part] or 0.0 for t in own if t[0] is not None), 50) for part in (0, 1)]
        phases.append(Phase(sum(slo.met(*t) for t in own) / max(len(own), 1), *medians))
    return Measured(sum(slo.met(*t) for t in times) / (PHASES * phase_s), tuple(phases), flips)


class RealCluster:
    def __init__(self, running: kit.Cluster, slo: Slo, phase_s: float, quota: float) -> None:
        self.slo = slo
        self.url, self.token = running.url, str(running.run_dir / "cluster.token")
        self.target = target_of(self.url)
        self.phase_s, self.quota = phase_s, quota

    def roles(self) -> dict[str, str]:
        return {row["id"]: row["role"] for row in get_cluster(self.url).workers}

    def flip(self, worker: str, role: Role) -> float:
        """Returns the seconds from the command to the join."""
        began = time.monotonic()
        if drain(worker, self.url, FLIP_S[role], role, "", self.token, ""):
            raise SystemExit(f"{worker} did not become a {role} worker")
        return time.monotonic() - began

    def split(self, prefill: int) -> None:
        roles = self.roles()
        for name in sorted(roles, reverse=True):
            more = prefill - sum(role == "prefill" for role in self.roles().values())
            if more and (roles[name] == "decode") == (more > 0):
                self.flip(name, "prefill" if more > 0 else "decode")

    def flips(self) -> int:
        return sum(get_cluster(self.url).document["flips"].values())

    def run(self, name: str, rows: Sequence[TraceRow]) -> Measured:
        source, jobs = random.Random(1), list[tuple[float, PlannedRequest]]()
        for row in rows:
            prompt = source.choices(range(TOKEN_IDS.low, TOKEN_IDS.high), k=row.input_len)
            jobs.append((row.at_s, completion(prompt, row.output_len)))
        target = replace(self.target, extra={**self.target.extra, "cache_salt": name})  # no KV of an earlier run
        pids = [pid for row in get_cluster(self.url).workers for pid in row["pids"]]  # one that flips now has none
        flips, cpu_s, began = self.flips(), sum(map(cpu_seconds, pids)), time.monotonic()
        longest_s = self.slo.ttft_s + self.slo.tpot_s * SHORT[1].high
        records = asyncio.run(sent(target, jobs, PHASES * self.phase_s + longest_s))
        used = (sum(map(cpu_seconds, pids)) - cpu_s) / (time.monotonic() - began) / self.quota / WORKERS
        ended: list[Times] = [(None, None) if r is None or r.error else (r.ttft_s, r.tpot_s) for r in records]
        made = counted(rows, ended, self.slo, self.phase_s, self.flips() - flips)
        while get_cluster(self.url).document["coordinator"]["requests"]:
            time.sleep(0.1)
        return replace(made, used=used, tokens=tuple(None if r is None or r.error else r.token_ids for r in records))

    @contextlib.contextmanager
    def autoscaler(self, calibration: Calibration) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "calibration.json"
            file.write_text(json.dumps(calibration.as_json()))
            options = ["--calibration", str(file), "--slo", str(self.slo), "--flip", "--cluster-token-file", self.token]
            command = [*kit.BATON, "autoscale", self.url, *options]
            process = subprocess.Popen(command, stdout=sys.stderr)
            try:
                yield
            finally:
                process.terminate()  # not SIGINT: a shell ignores it for commands started with `&`
                process.wait(60)


async def sent(
    target: ServerTarget, jobs: Sequence[tuple[float, PlannedRequest]], until_s: float
) -> list[RequestRecord | None]:
    """Sends each request at its time; returns their records, None for those that have not ended after `until_s`, which
    are then aborted."""
    async with client_session(target) as http:
        began = time.perf_counter()

        async def one(at_s: float, job: PlannedRequest) -> RequestRecord:
            await asyncio.sleep(began + at_s - time.perf_counter())
            return await send(http, target, job, began + at_s)

        tasks = [asyncio.create_task(one(*job)) for job in jobs]
        _, left = await asyncio.wait(tasks, timeout=until_s)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return [None if task in left else task.result() for task in tasks]


def simulated(kind: Calibration, rows: Sequence[TraceRow], phase_s: float) -> dict[str, Measured]:
    """By the split, and with flips: what the simulator predicts."""
    made, slo = dict[str, Measured](), limits(kind)
    for prefill in range(1, WORKERS):
        replay = Replay(shape(kind, prefill, WORKERS - prefill), rows)
        replay.run(slo)
        times = [(t.ttft_s, t.tpot_s) for t in replay.measured.times]
        made[f"{prefill}:{WORKERS - prefill}"] = counted(rows, times, slo, phase_s, 0)
    policy = Policy(slo, kind, kind, Size(1, 1), Size(16, 16), window_s=FLIP_WINDOW_S)
    dry = dry_run(policy, rows, shape(kind, WORKERS // 2, WORKERS - WORKERS // 2), FLIP_TAKES_S)
    made["flips"] = counted(rows, [(t.ttft_s, t.tpot_s) for t in dry.times], slo, phase_s, len(dry.flips))
    return made


def gain(of: Mapping[str, Measured]) -> float:
    return of["flips"].goodput / max(m.goodput for name, m in of.items() if name != "flips")


def measured(kind: Calibration, rows: Sequence[TraceRow], phase_s: float, quota: float) -> dict[str, Measured]:
    """The same, measured."""
    made = dict[str, Measured]()
    half = ("--prefill", str(WORKERS // 2), "--decode", str(WORKERS - WORKERS // 2))
    with filled(), kit.cluster(*FLAGS, *half) as running:
        cluster = RealCluster(running, limits(kind), phase_s, quota)
        for name in ("prefill-0", "prefill-1"):  # a first flip to decode measures steps: not within a quota
            cluster.flip(name, "decode")
            cluster.flip(name, "prefill")
        use_pools(LoadClient(cluster.url, cluster.target, 2))
        with quotas(get_cluster(cluster.url).workers, quota):
            for prefill in range(1, WORKERS):
                cluster.split(prefill)
                made[f"{prefill}:{WORKERS - prefill}"] = cluster.run(str(prefill), rows)
            cluster.split(WORKERS // 2)
            with cluster.autoscaler(kind):
                made["flips"] = cluster.run("flips", rows)
    return made


def rows_of(runs: Mapping[str, Measured], note: str) -> str:
    """Returns a table of runs, and what flips gain."""
    cells = []
    for name, run in runs.items():
        cells.append(
            [name, f"{run.goodput:.2f}", *map(str, run.phases), str(run.flips), f"{run.used:.0%}" if run.used else ""]
        )
    phases = ["long prompts: within limits (TTFT, TPOT p50)", "long outputs"] * (PHASES // 2)
    headings = (f"prefill:decode, {note}", "goodput/s", *phases, "flips", "quotas used")
    return f"{kit.table(headings, cells)}\n\nWith flips over the best fixed split, {note}: {gain(runs):.2f}x.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=50.0, help=f"of each of {PHASES} phases")
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the rates")
    parser.add_argument("--quota", type=float, default=QUOTA, help="of a core, for each worker")
    parser.add_argument("--costs", type=Path, help="costs within the quota (--save), instead of measuring them now")
    parser.add_argument("--save", type=Path, help="file for the costs")
    parser.add_argument("--predict", action="store_true", help="measure nothing but the costs")
    given = parser.parse_args()
    gc.disable()  # as in `baton simulate`
    kind = read_calibration(str(given.costs)) if given.costs else calibrated(given.quota)
    if given.save:
        given.save.write_text(json.dumps(kind.as_json(), indent=1) + "\n")
    rows = turning_mix(kind, given.phase_s, given.load)
    print(
        f"{len(rows)} requests in {PHASES} phases of {given.phase_s:g} s, limits {limits(kind)}, {WORKERS} workers with"
    )
    print(
        f"{given.quota:g} of a core each.\n\n{rows_of(simulated(kind, rows, given.phase_s), 'simulated')}", flush=True
    )
    if given.predict:
        return
    made = measured(kind, rows, given.phase_s, given.quota)
    pairs = list(zip(made["flips"].tokens, made["2:2"].tokens, strict=True))
    both = [a == b for a, b in pairs if a is not None and b is not None]
    print(
        f"{rows_of(made, 'measured')}\nOf {len(both)} requests that ended in both, {sum(both)} have the tokens of 2:2."
    )


if __name__ == "__main__":
    main()
