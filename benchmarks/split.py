"""Where prompts are computed, on four mixes of requests: always at prefill, never, and per request by cost.

    python -m benchmarks.split [--calibration cpu.json] [--prefill 2 --decode 2] [--out benchmarks/results/split.md]

In the simulator (sim/scale), with the costs of `tests/support/scale.py` unless a calibration is given. The same
requests are replayed under each `--split` on the same workers, and without a prefill pool on as many workers in all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.policy.split import Split
from sim.scale.costs import Calibration, parse_calibration
from sim.scale.replay import ClusterShape, Replay
from sim.scale.results import Outcome
from sim.scale.workload import Lengths, poisson
from sim.stats import Slo
from sim.trace import TRACE_BLOCK, TraceRow
from tests.support.scale import CALIBRATION

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
TURNS, FIRST_BLOCKS = 6, 6
"""Of an agent: requests, and blocks of TRACE_BLOCK tokens in the first prompt; each later prompt has one more."""
Rows = tuple[TraceRow, ...]


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
WAYS: tuple[tuple[str, Split], ...] = (("always", "always"), ("never", "never"), ("auto", "auto"))


def replayed(calibration: Calibration, rows: Sequence[TraceRow], prefill: int, decode: int, split: Split) -> Outcome:
    return Replay(ClusterShape(calibration, prefill, calibration, decode, split=split), rows).run(SLO)


def line(mix: str, rate: float, way: str, outcome: Outcome) -> str:
    cells = (
        *(mix, f"{rate:g}", way, f"{outcome.on_decode / max(outcome.requests, 1):.0%}"),
        *(f"{outcome.ttft.p50 * 1e3:.0f} ms", f"{outcome.ttft.p99 * 1e3:.0f} ms"),
        *(f"{outcome.tpot.p50 * 1e3:.1f} ms", f"{outcome.tpot.p99 * 1e3:.1f} ms"),
        *(f"{outcome.goodput_per_s:.2f}", f"{outcome.met_share:.0%}"),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", default="", help="costs from `baton calibrate`")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--duration-s", type=float, default=40.0)
    parser.add_argument("--load", type=float, default=1.0, help="multiplies the rates")
    parser.add_argument("--mix", action="append", choices=[*MIXES], help="default all")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    pool = replace(CALIBRATION.prefill_worker, blocks=20_000), replace(CALIBRATION.decode_worker, blocks=20_000)
    calibration = replace(CALIBRATION, prefill_worker=pool[0], decode_worker=pool[1])
    if given.calibration:
        calibration = parse_calibration(json.loads(Path(given.calibration).read_text()))
    lines = [
        "| mix | requests/s | `--split` | on decode | TTFT p50 | p99 | TPOT p50 | p99 | goodput/s | within limits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    print(*lines, sep="\n", flush=True)
    for mix in given.mix or MIXES:
        make, rates = MIXES[mix]
        for rate in rates:
            rows = make(rate * given.load, given.duration_s, 1)
            shapes = [(way, given.prefill, given.decode, split) for way, split in WAYS]
            shapes.append(("`--prefill 0`", 0, given.prefill + given.decode, "never"))
            for way, prefill, decode, split in shapes:
                outcome = replayed(calibration, rows, prefill, decode, split)
                lines.append(line(mix, rate * given.load, way, outcome))
                print(lines[-1], flush=True)
    if given.out:
        Path(given.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
