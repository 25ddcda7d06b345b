"""The cost of routing by cluster size: a placement, a token's event, a queue head that has to wait, joins.

    python benchmarks/placement.py                   10 to 1,000 workers with 20 active requests for each
    python benchmarks/placement.py --plot FILE.png   draws it too (needs matplotlib)
    python benchmarks/placement.py --before DIR      also another checkout, in turns
    python benchmarks/placement.py --requests        whole requests instead, printed; with --before in turns as well

Half of the workers are prefill workers. Prompts have 1,100 tokens; "shared" ones begin with 1,024 tokens of which each
worker has cached all, the first half, or a few. Placing a request is all that `Dispatcher.place` does for a new one. A
head that waits for blocks is tried when nothing has changed, and "after a report" of a decode worker that has one more
free block, but still too few. In a replay of a trace with too few decode workers these were 75 and 20 % of all calls.
The joining workers run in another process and use gRPC on loopback to a coordinator with its lease clock; `ready` is
when the last of them has received its welcome. Writes `benchmarks/results/placement.md`.

A whole request is everything that `coordinator.policy.requests` does for one of OUTPUT tokens, each in an event of its
own: admitted and placed, first token, hand-over, tokens, end. These names exist in every checkout since 06b5ec8b.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = (10, 30, 100, 300, 1000)
ACTIVE_PER_WORKER, PROMPT, TOTAL, BLOCK, TIMES = 20, 1100, 1500, 16, 1000
OUT = ROOT / "benchmarks" / "results" / "placement.md"
LIMIT_S = 120.0
OUTPUT, TURNS = 64, 5
PARTS = ("admit", "first token", "hand-over", "tokens", "end")


def measure(workers: int, shared: bool) -> dict[str, float]:
    """Times in microseconds."""
    from baton.core.events import KVCacheEvents, Load
    from coordinator.policy.workers import WorkerTable
    from tests.support.builders import add_worker
    from tests.support.placing import Placing, make_choice

    table, dice = WorkerTable(3.0), random.Random(1)
    decodes = []
    hints = tuple(n.to_bytes(8, "big") for n in range(PROMPT // BLOCK))
    for n in range(workers // 2):
        made = [add_worker(table, f"{role}{n}", blocks=10**5, block_size=BLOCK, step_tokens=10**6) for role in "pd"]
        decodes.append(made[1])
        for worker in made if shared else ():
            events = KVCacheEvents(stored=hints[: dice.choice((64, 64, 64, 32, 5))])
            worker.update_cached(events)
    placing = Placing(table)
    prefix = {BLOCK: hints} if shared else {}
    active = workers * ACTIVE_PER_WORKER

    def start(name: str) -> float:
        placing.submit(make_choice(name, PROMPT, TOTAL, prefix=prefix))
        began = time.perf_counter()
        placed = placing.dispatcher.place()
        took = time.perf_counter() - began
        if len(placed) != 1:
            raise SystemExit(f"{len(placed)} requests were placed, not one")
        placing.handed_over(name)
        return took * 1e6

    for n in range(active):
        start(f"r{n}")
    for worker in decodes:
        worker.load = Load(blocks_free=5000)
    places, tokens = [], []
    for n in range(TIMES):
        places.append(start(f"n{n}"))
        began = time.perf_counter()
        for produced in range(1, 33):
            placing.produced(f"n{n}", produced)
        tokens.append((time.perf_counter() - began) * 1e6 / 32)
        placing.finish(f"r{n % active}" if n < active else f"n{n - active}")
    for worker in decodes:
        worker.load = Load(blocks_free=0)
    placing.submit(make_choice("head", PROMPT, TOTAL))
    placing.dispatcher.place()
    heads, reports = [], []
    for n in range(TIMES):
        worker = decodes[n % len(decodes)]
        heads.append(timed(placing.dispatcher.place))
        worker.load = Load(blocks_free=1)
        reports.append(timed(placing.dispatcher.place))
        worker.load = Load(blocks_free=0)
    places.sort()
    return {
        "p50": places[TIMES // 2],
        "p99": places[TIMES * 99 // 100],
        "token": median(tokens),
        "head": median(heads),
        "report": median(reports),
    }


def whole_request(workers: int) -> dict[str, float]:
    """Returns microseconds by part, medians of TIMES requests beside ACTIVE_PER_WORKER others for each worker."""
    from baton.core.events import HandedOver, StepEvents, TokenEvent
    from baton.core.request import GenerateRequest
    from coordinator.policy.requests import Requests
    from coordinator.policy.workers import WorkerTable
    from tests.support.builders import add_worker

    table, spent = WorkerTable(3.0), {part: list[float]() for part in PARTS}
    for n in range(workers // 2):
        for role in "pd":
            add_worker(table, f"{role}{n}", blocks=10**5, block_size=BLOCK, step_tokens=10**6)
    requests, prompt, ticks = Requests(table, 1 << 20, 1 << 30), tuple(range(PROMPT)), itertools.count(1)

    def events(part: str, worker: str, *each: StepEvents) -> None:
        spent[part].append(timed(lambda: [requests.on_events(worker, one, 100.0 + next(ticks) / 1000) for one in each]))

    def token(choice: Any, index: int) -> StepEvents:
        return StepEvents(tokens=(TokenEvent(choice.sequence, index, (5,)),))

    def start(name: str) -> tuple[Any, str]:
        request, admitted = GenerateRequest(name, prompt, OUTPUT), []
        admit = lambda: admitted.append(requests.admit(request, 100.0 + next(ticks) / 1000))  # noqa: E731
        spent["admit"].append(timed(admit))
        ((choice, actions),) = admitted
        (started,) = (action for action in actions if type(action).__name__ == "StartPrefill")
        events("first token", started.prefill, token(choice, 0))
        over = HandedOver(choice.sequence, started.targets[0], 1)
        events("hand-over", started.prefill, StepEvents(handed_over=(over,)))
        return choice, started.targets[0]

    def finish(choice: Any, decode: str) -> None:
        events("tokens", decode, *(token(choice, index) for index in range(1, OUTPUT - 1)))
        events("end", decode, token(choice, OUTPUT - 1))
        if not choice.ended:
            raise SystemExit(f"{choice} has not ended")
        requests.forget(choice)

    active = [start(f"a{n}") for n in range(workers * ACTIVE_PER_WORKER)]
    for times in spent.values():
        times.clear()
    for n in range(TIMES):
        active.append(start(f"n{n}"))
        finish(*active.pop(0))
    return {part: median(times) for part, times in spent.items()}


def compare_requests(trees: dict[str, Path], workers: tuple[int, ...]) -> None:
    """Prints the best of TURNS turns of each checkout by cluster size."""
    from benchmarks.kit import table

    best: dict[tuple[int, str], dict[str, float]] = {}
    for _, (name, tree) in itertools.product(range(TURNS), trees.items()):
        for count in workers:
            command = [sys.executable, __file__, "--tree", str(tree), "--one-request", str(count)]
            printed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
            parts = json.loads(printed.splitlines()[-1])
            known = best.get((count, name), parts)
            best[count, name] = min(known, parts, key=lambda each: sum(each.values()))
    rows = []
    for (count, name), parts in sorted(best.items()):
        ratio = sum(parts.values()) / sum(best[count, "before"].values()) if "before" in trees else 1.0
        figures = [f"{value:.1f}" for value in (*parts.values(), sum(parts.values()))]
        rows.append([str(count), name, *figures, f"{ratio:.3f}"])
    print(table(["workers", "checkout", *PARTS, "all, us", "ratio"], rows))


def timed(call: Callable[[], object]) -> float:
    """Returns microseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6


async def joins(workers: int, tree: Path) -> float:
    """Seconds from the first dial to the last welcome."""
    from coordinator.cluster import Cluster
    from coordinator.control import serve_control

    cluster = Cluster(3.0, 100, 1000)
    server, port = await serve_control(cluster, "127.0.0.1", 0)
    tick = asyncio.create_task(cluster.tick())
    command = [sys.executable, __file__, "--tree", str(tree), "--join", str(port), str(workers)]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), LIMIT_S)
        return float(output)
    finally:
        tick.cancel()
        await server.stop(0)


async def join(port: int, count: int) -> None:
    """The workers' process: prints the seconds until all workers have joined; none leaves before."""
    from tests.support.fake_workers import FakeWorker

    names = [f"{'pd'[n % 2]}{n}" for n in range(count)]
    workers = [FakeWorker(name, SimpleNamespace(port=port)) for name in names]  # type: ignore[arg-type]
    began = time.monotonic()
    for worker in workers:
        worker.start()
    while not all(worker.welcomes for worker in workers):
        await asyncio.sleep(0.02)
    print(time.monotonic() - began, flush=True)
    for worker in workers:
        await worker.stop()


def one_run(tree: Path, max_workers: int) -> list[dict[str, Any]]:
    return [
        {"workers": n, "own": measure(n, False), "shared": measure(n, True), "join_s": asyncio.run(joins(n, tree))}
        for n in SIZES
        if n <= max_workers
    ]


def cells(row: dict[str, Any]) -> list[str]:
    own, shared = (f"{row[kind]['p50']:.0f} us ({row[kind]['p99']:.0f})" for kind in ("own", "shared"))
    times = (f"{row['own'][kind]:.1f} us" for kind in ("token", "head", "report"))
    costs = [*times, f"{row['join_s']:.2f} s"]
    return [str(row["workers"]), str(row["workers"] * ACTIVE_PER_WORKER), own, shared, *costs]


def plot(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib  # type: ignore[import-not-found]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found]

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, rows in runs.items():
        sizes = [row["workers"] for row in rows]
        for kind, style in (("own", "-"), ("shared", "--")):
            axes[0].plot(sizes, [row[kind]["p50"] for row in rows], style, marker="o", label=f"{name}, {kind} prompts")
        axes[1].plot(sizes, [row["join_s"] for row in rows], marker="o", label=name)
    axes[0].axhline(200, color="grey", linewidth=0.8)
    axes[0].set(xscale="log", yscale="log", xlabel="workers", ylabel="one placement, us (p50)")
    axes[1].set(xscale="log", yscale="log", xlabel="workers", ylabel="all have joined, s")
    for axis in axes:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, measured too")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="workers")
    parser.add_argument("--before-most", type=int, default=100, help="workers of the other checkout")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--requests", action="store_true", help="measure whole requests")
    parser.add_argument("--one-request", type=int, metavar="WORKERS", help=argparse.SUPPRESS)
    parser.add_argument("--join", nargs=2, type=int, metavar=("PORT", "COUNT"), help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.tree))
    if options.join:
        asyncio.run(join(*options.join))
        return
    if options.one_request:
        print(json.dumps(whole_request(options.one_request)))
        return
    if options.requests:
        before = {"before": options.before.resolve()} if options.before else {}
        compare_requests({**before, "now": ROOT}, tuple(n for n in (10, 100, 1000) if n <= options.most))
        return
    if options.tree != ROOT:  # run by the benchmark of another checkout
        print(json.dumps(one_run(options.tree, options.most)))
        return
    from benchmarks.kit import report, table

    runs = {}
    if options.before:
        command = [
            sys.executable,
            __file__,
            "--tree",
            str(options.before.resolve()),
            "--most",
            str(options.before_most),
        ]
        printed = subprocess.run(command, cwd=options.before, capture_output=True, text=True, check=True).stdout
        runs["before"] = json.loads(printed.splitlines()[-1])
    runs["now"] = one_run(options.tree, options.most)
    if options.plot:
        plot(runs, options.plot)
    names = ["workers", "active", "place, own prompts, p50 (p99)", "place, shared prefix, p50 (p99)"]
    names += ["a token's event", "a head that waits", "after a report", "all have joined after"]
    parts = [f"## {name.capitalize()}\n\n{table(names, map(cells, rows))}" for name, rows in runs.items()]
    report(options.out, "Routing over workers", *parts)


if __name__ == "__main__":
    main()
