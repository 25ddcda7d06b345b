"""The effect of the death of one pair of workers on the streams of the other: gaps between tokens, before and after.

    python benchmarks/neighbours.py                      2 prefill x 2 decode workers, built-in model, five turns
    python benchmarks/neighbours.py --runs 3 --streams 4 --window-s 8      a slow processor
    python benchmarks/neighbours.py --only "prefill worker" --before DIR     also another checkout, in turns

Streams run on both pairs, and a long prompt arrives. Shortly afterwards the decode worker of one pair gets SIGKILL; in
another run its prefill worker, which computes that prompt; in a third run, the control, no worker. The figure is the
99th percentile of the gaps of the streams on the other decode worker in the seconds after that instant, compared with
the same seconds of the control run of the same turn, in which work and stream lengths are equal. The seconds before
that instant, printed too, have shorter streams and no prompt (decision 0003). The window includes the expiry of the
dead worker's lease and the start of its replacement. Processor time is that of the dead worker's restart, agent and
rank, until the window ends: it depends less on other load. Every run has its own cluster, since a supervisor waits
longer before each restart. The kinds alternate, in an order that changes with the turn. Writes
`benchmarks/results/neighbours.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import ROOT, cluster, parser, report, table
from sim.stats import percentile

BAR = 1.3
CONTROL = "nobody"
VICTIMS = {"decode worker": "decode-0", "prefill worker": "prefill-0"}
PROMPT_TOKENS, CUT_TOKENS = 64, 3000
WARM_S, CUT_AFTER_S = 2.0, 0.05


@dataclass
class Stream:
    """A stream: when its events arrived, on the clock of the workers' event logs; `error`: why it failed, if it did."""

    name: str
    at: list[float] = field(default_factory=list)
    error: str = ""

    def gaps(self, start: float, end: float) -> list[float]:
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False) if start <= b < end]


@dataclass(frozen=True)
class Run:
    """p99 in seconds and the number of gaps, before and after; `longest_s` is the longest gap after; `back`: the
    restarted worker was ready when the window ended, having used `cost_s` of processor time."""

    before_s: float
    after_s: float
    longest_s: float
    before: int
    after: int
    survivors: int
    back: bool
    cost_s: float | None


async def read(client: httpx.AsyncClient, stream: Stream, seed: int, length: int = PROMPT_TOKENS) -> None:
    prompt = [300 + (seed * 977 + 13 * n) % 3600 for n in range(length)]
    body = {"model": "builtin", "prompt": prompt, "max_tokens": 4060 - length, "stream": True, "ignore_eos": True}
    headers = {"x-request-id": stream.name}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    stream.at.append(time.monotonic())
                    if '"error"' in line:
                        stream.error = json.loads(line[6:]).get("error", {}).get("code", "")
    except httpx.HTTPError as error:
        stream.error = repr(error)


def processor_s(pid: int) -> tuple[int, float]:
    """The parent of a process, and the processor time that the process has used; (0, 0) if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0, 0.0


def routes(events: Path) -> dict[str, set[str]]:
    """The workers of each request, from the event logs of the prefill workers."""
    workers: dict[str, set[str]] = {}
    for log in events.glob("prefill-*.events.jsonl"):
        for event in map(json.loads, (line for line in log.read_text().splitlines() if line.endswith("}"))):
            if event["kind"] == "offer":
                name = event["sequence"][0].partition("-")[0]  # the coordinator appends a unique suffix
                workers.setdefault(name, set()).update((log.name.partition(".")[0], event["to"]))
    return workers


async def one(url: str, events: Path, victim: str, streams: int, window_s: float) -> Run:
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=httpx.Limits(max_connections=256)) as client:

        async def workers() -> dict[str, dict[str, Any]]:
            return {str(w["id"]): w for w in (await client.get("/workers")).json()["workers"]}

        made, tasks = [Stream(f"s{n}") for n in range(2 * streams)], []
        for number, stream in enumerate(made):
            tasks.append(asyncio.create_task(read(client, stream, number)))
            while len(stream.at) < 2:  # one by one: each stream has its pair before the next arrives
                await asyncio.sleep(0.02)
        await asyncio.sleep(WARM_S + window_s)
        known, went = await workers(), routes(events)
        survivors = [s for s in made if "decode-1" in went[s.name]]
        tasks.append(asyncio.create_task(read(client, Stream("cut"), 0, CUT_TOKENS)))
        await asyncio.sleep(CUT_AFTER_S)  # so that prefill-0 is busy: idle prefill workers are chosen in order
        struck, agent, agent_s = time.monotonic(), 0, 0.0
        if victim:
            agent, _ = processor_s(int(known[victim]["pids"][0]))
            _, agent_s = processor_s(agent)
            os.kill(int(known[victim]["pids"][0]), signal.SIGKILL)
        await asyncio.sleep(window_s)
        late = next((s for s in survivors if not s.at or s.at[-1] < struck + window_s - 1 or s.error), None)
        if late is not None or not survivors:
            raise SystemExit(f"a stream of the other pair ended too early: {late and (late.name, late.error)}")
        now, back, cost_s = await workers(), False, None
        if victim and now[victim]["state"] == "ready" and now[victim]["incarnation"] != known[victim]["incarnation"]:
            back = True
            above, rank_s = processor_s(int(now[victim]["pids"][0]))
            cost_s = rank_s + processor_s(above)[1] - (agent_s if above == agent else 0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    before = sorted(gap for s in survivors for gap in s.gaps(struck - window_s, struck))
    after = sorted(gap for s in survivors for gap in s.gaps(struck, struck + window_s))
    p99 = percentile(before, 99), percentile(after, 99)
    return Run(*p99, after[-1], len(before), len(after), len(survivors), back, cost_s)


def measure(kind: str, streams: int, window_s: float, tree: Path = ROOT) -> Run:
    """Starts a cluster of the checkout `tree`, measures once, ends it."""
    with tempfile.TemporaryDirectory() as events:
        flags = ("--prefill", "2", "--decode", "2", "--draft", "none")
        with cluster(*flags, tree=tree, environment={"BATON_EVENT_LOG_DIR": events}) as running:
            return asyncio.run(one(running.url, Path(events), VICTIMS.get(kind, ""), streams, window_s))


def rows(results: dict[str, dict[str, list[Run]]]) -> Iterator[list[str]]:
    """One row for each kind of each tree: `results[tree][kind]` has one run for each turn."""
    for which, kinds in results.items():
        for kind, runs in kinds.items():
            before, after, longest = (
                statistics.median(getattr(r, name) for r in runs) for name in ("before_s", "after_s", "longest_s")
            )
            own = f"{statistics.median(r.after_s / r.before_s for r in runs):.2f}"
            gaps = [f"{kind}{which}", f"{before * 1e3:.1f} ms", f"{after * 1e3:.1f} ms", f"{longest * 1e3:.0f} ms"]
            if kind == CONTROL:
                yield [*gaps, "1", "", own, "–", "–", "control"]
                continue
            ratios = sorted(r.after_s / c.after_s for r, c in zip(runs, kinds[CONTROL], strict=True))
            ratio, costs = statistics.median(ratios), [r.cost_s for r in runs if r.cost_s is not None]
            cost = f"{statistics.median(costs):.2f} s" if costs else "–"
            back, met = f"{sum(r.back for r in runs)} of {len(runs)}", "met" if ratio <= BAR else "missed"
            shown = [f"**{ratio:.2f}**", ", ".join(f"{r:.2f}" for r in ratios)]
            yield [*gaps, *shown, own, back, cost, f"{BAR} {met}"]


def main() -> None:
    options = parser(__doc__, "neighbours.md")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--streams", type=int, default=6, help="of each pair")
    options.add_argument("--window-s", type=float, default=6.0)
    options.add_argument("--note", default="", help="what else ran on the machine, for the report")
    options.add_argument("--only", choices=list(VICTIMS), action="append", help="who dies; may be repeated")
    options.add_argument("--before", type=Path, help="another checkout, measured by turns with this one")
    given = options.parse_args()
    trees = {", before": given.before.resolve(), "": ROOT} if given.before else {"": ROOT}
    kinds = [CONTROL, *(given.only or VICTIMS)]
    results: dict[str, dict[str, list[Run]]] = {which: {kind: [] for kind in kinds} for which in trees}
    for number in range(given.runs):
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            for which, tree in trees.items():
                results[which][kind].append(measure(kind, given.streams, given.window_s, tree))
                print(f"turn {number + 1}, {kind}{which}: {results[which][kind][-1]}", flush=True)
    names = ["who died", "ITL p99 before", "after", "longest gap after", "beside the same turn's run of nobody", "runs"]
    names += ["beside the window before", "back within the window", "processor time", "bar"]
    setting = (
        f"Two prefill and two decode workers, built-in model without a draft, {given.streams} streams a pair; the\n"
        "client runs on the same cores. ITL p99 of the streams on the other decode worker, in the"
        f" {given.window_s:g} s before and after;\nmedians of {given.runs} turns, of the ratios too. Bar: at most {BAR}"
        " beside the run of the same turn in which nobody died."
    )
    title = "Neighbours: what the death of one pair costs the other"
    report(given.out, title, setting, table(names, rows(results)), about=given.note)


if __name__ == "__main__":
    main()
