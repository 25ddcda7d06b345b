"""Goodput of a fixed number of workers on a mix that turns: each fixed split of the roles, and the autoscaler's flips.

    python -m benchmarks.flips                            measured and predicted: 13 minutes on two idle cores, as root
    python -m benchmarks.flips --calibration costs.json   predicted only

Workers with QUOTA of a core each (built-in model, CPU, `--exact`) are calibrated, and the same requests are sent to a
cluster of them once for each split and once beside `baton autoscale --flip`. The simulator predicts this with these
costs and its own flips. Without quotas the two cores would be the limit and not the workers: one prefill worker would
have as much of them as three.
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
from benchmarks.quota import FLAGS, QUOTA, calibrated, quotas, target_of
from launch.autoscale.flip import FLIP_WINDOW_S
from launch.autoscale.law import Policy, rows_within
from launch.autoscale.simulate import dry_run
from launch.bench.client import run_load
from launch.bench.load import TOKEN_IDS, Session, completion
from launch.cluster_api import get_cluster
from launch.control_options import FLIP_S
from launch.drain import drain
from sim.scale.costs import Calibration, parse_calibration
from sim.scale.planner import Size
from sim.scale.replay import ClusterShape, Replay
from sim.scale.workload import Lengths, poisson
from sim.stats import Slo
from sim.trace import TraceRow

WORKERS, PHASES = 4, 4
LONG, SHORT = (Lengths(600, 1200), Lengths(8, 16)), (Lengths(32, 64), Lengths(96, 160))
MIX_SLO = Slo(2.0, 0.08)
WORK = (2.3, 1.6)
"""Workers of prefill that a phase of long prompts keeps busy, and of decode that one of long outputs does: the first
is too much for 2:2, the second for 3:1."""
DOWN_S = 10.0
FLIP_TAKES_S: dict[Role, float] = {"decode": 0.3, "prefill": 0.1}
"""From a worker's last sequence to its join in that role, where it is not measured here (flip.md)."""


def turning_mix(kind: Calibration, phase_s: float, load: float) -> tuple[TraceRow, ...]:
    """Long prompts with short outputs, then short prompts with long outputs, and again; each phase is work for so many
    workers as WORK has, times `load`."""
    prompt, output = (sum((lengths.low, lengths.high)) / 2 for lengths in (LONG[0], SHORT[1]))
    short = sum((SHORT[0].low, SHORT[0].high)) / 2
    rows = rows_within(kind, MIX_SLO, short, output, 1.0)
    step_s = kind.decode.plain_s(rows, rows * (short + output / 2)) + kind.decode.idle_s
    long_rate = WORK[0] / kind.prompt_s(round(prompt))
    made: list[TraceRow] = []
    for number in range(PHASES):
        lengths, rate = (SHORT, WORK[1] * rows / output / step_s) if number % 2 else (LONG, long_rate)
        phase = poisson(rate * load, phase_s, *lengths, seed=number)
        made += (replace(row, at_s=row.at_s + number * phase_s) for row in phase)
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Measured:
    goodput: float
    share: float
    flips: int
    tokens: tuple[tuple[int, ...], ...]


class RealCluster:
    def __init__(self, running: kit.Cluster) -> None:
        self.url, self.token = running.url, str(running.run_dir / "cluster.token")
        self.target = target_of(self.url)

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

    def run(self, name: str, rows: Sequence[TraceRow]) -> Measured:
        source, sessions = random.Random(1), list[Session]()
        for row in rows:
            prompt = source.choices(range(TOKEN_IDS.low, TOKEN_IDS.high), k=row.input_len)
            sessions.append(Session((completion(prompt, row.output_len),), row.at_s))
        extra = {**self.target.extra, "cache_salt": name}  # no run finds the KV of an earlier one
        flips = sum(get_cluster(self.url).document["flips"].values())
        records = asyncio.run(run_load(replace(self.target, extra=extra), sessions, 0, lambda _: None))
        records.sort(key=lambda record: record.sent)
        met = sum(r.error is None and MIX_SLO.met(r.ttft_s, r.tpot_s) for r in records)
        span_s = max(r.ended for r in records) - records[0].sent
        now = sum(get_cluster(self.url).document["flips"].values())
        return Measured(met / span_s, met / len(records), now - flips, tuple(r.token_ids for r in records))

    @contextlib.contextmanager
    def autoscaler(self, calibration: Calibration) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "calibration.json"
            file.write_text(json.dumps(calibration.as_json()))
            options = ["--calibration", str(file), "--slo", str(MIX_SLO), "--down-s", f"{DOWN_S:g}"]
            command = [*kit.BATON, "autoscale", self.url, *options, "--flip", "--cluster-token-file", self.token]
            process = subprocess.Popen(command, stdout=sys.stderr)
            try:
                yield
            finally:
                process.terminate()  # not SIGINT: a shell ignores it for commands started with `&`
                process.wait(60)


def simulated(kind: Calibration, rows: Sequence[TraceRow], takes_s: Mapping[Role, float]) -> dict[str, Measured]:
    """By the split, and with flips: what the simulator predicts."""
    made = dict[str, Measured]()
    for prefill in range(1, WORKERS):
        outcome = Replay(ClusterShape(kind, prefill, kind, WORKERS - prefill), rows).run(MIX_SLO)
        made[f"{prefill}:{WORKERS - prefill}"] = Measured(outcome.goodput_per_s, outcome.met_share, 0, ())
    policy = Policy(MIX_SLO, kind, kind, Size(1, 1), Size(16, 16), down_s=DOWN_S, window_s=FLIP_WINDOW_S)
    dry = dry_run(policy, rows, Size(WORKERS // 2, WORKERS - WORKERS // 2), takes_s)
    made["flips"] = Measured(dry.outcome.goodput_per_s, dry.outcome.met_share, len(dry.flips), ())
    return made


def gain(of: Mapping[str, Measured]) -> float:
    return of["flips"].goodput / max(m.goodput for name, m in of.items() if name != "flips")


def on_a_turning_mix(phase_s: float, load: float, quota: float, costs: Path | None, save: Path | None) -> str:
    """Returns the table of all splits and of flips, simulated, and unless `costs` are given measured too."""
    real = dict[str, Measured]()
    kind, takes_s = parse_calibration(json.loads(costs.read_text())) if costs else calibrated(quota), FLIP_TAKES_S
    if save:
        save.write_text(json.dumps(kind.as_json(), indent=1) + "\n")
    rows = turning_mix(kind, phase_s, load)
    if not costs:
        half = ("--prefill", str(WORKERS // 2), "--decode", str(WORKERS - WORKERS // 2))
        with kit.cluster(*FLAGS, *half) as running:
            cluster = RealCluster(running)
            for name in ("prefill-0", "prefill-1"):  # a first flip to decode measures steps: not within a quota
                cluster.flip(name, "decode")
                cluster.flip(name, "prefill")
            with quotas(get_cluster(cluster.url).workers, quota):
                cluster.flip("prefill-1", "decode")
                back_s, there_s = cluster.flip("prefill-1", "prefill"), cluster.flip("prefill-1", "decode")
                takes_s = {"prefill": back_s, "decode": there_s}
                for prefill in range(1, WORKERS):
                    cluster.split(prefill)
                    name = f"{prefill}:{WORKERS - prefill}"
                    real[name] = cluster.run(name, rows)
                cluster.split(WORKERS // 2)
                with cluster.autoscaler(kind):
                    real["flips"] = cluster.run("flips", rows)
        same = sum(a == b for a, b in zip(real["flips"].tokens, real["2:2"].tokens, strict=True))
    predicted = simulated(kind, rows, takes_s)
    cells = []
    for name, model in predicted.items():
        measured = [f"{real[name].goodput:.2f}", f"{real[name].share:.0%}", str(real[name].flips)] if real else []
        error = [f"{model.goodput / max(real[name].goodput, 1e-9) - 1:+.0%}"] if real else []
        cells.append([name, *measured, f"{model.goodput:.2f}", f"{model.share:.0%}", str(model.flips), *error])
    columns = ["goodput/s", "within limits", "flips"]
    headings = ["prefill:decode", *columns * bool(real), *(f"{c}, simulated" for c in columns), *["error"] * bool(real)]
    text = (
        f"{len(rows)} requests in {PHASES} phases of {phase_s:g} s, limits {MIX_SLO}, {WORKERS} workers with {quota:g}"
        f" of a core each; a flip of an idle worker takes {takes_s['decode']:.2f} s to decode,"
        f" {takes_s['prefill']:.2f} s to prefill.\n\n{kit.table(headings, cells)}\n\n"
        f"With flips over the best fixed split, simulated: {gain(predicted):.2f}x"
    )
    if real:
        text += f"; measured: {gain(real):.2f}x. {same} of {len(rows)} requests have the tokens of 2:2"
    return text + "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase-s", type=float, default=30.0, help=f"of each of {PHASES} phases")
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the rates")
    parser.add_argument("--quota", type=float, default=QUOTA, help="of a core, for each worker")
    parser.add_argument("--calibration", type=Path, help="costs within the quota (--save): simulate only")
    parser.add_argument("--save", type=Path, help="file for the calibration")
    given = parser.parse_args()
    gc.disable()  # as in `baton simulate`
    print(on_a_turning_mix(given.phase_s, given.load, given.quota, given.calibration, given.save))


if __name__ == "__main__":
    main()
