"""The cost of a token outside the engine: processor time and thread switches of every process that handles it.

    python benchmarks/token_cost.py                        this checkout
    python benchmarks/token_cost.py --before DIR           also another checkout, in turns

Clusters of the built-in model run side by side, with and without speculation, for each checkout; one is measured while
the others are idle. Clients stream greedily over HTTP in a closed loop. Processor time is the kernel's count for every
thread (/proc/PID/task/*/schedstat, nanoseconds), from before the first request to after the last; other load affects it
only through caches. Prompts are short, and prefill's share is shown separately. The decode worker's computing thread
(the engine: draft, target, sampler) is separate from its others (scheduling, frames, gRPC). A switch is a voluntary
one: the thread waited. TPOT is that of the client; on a busy machine it means little. Medians over runs. Writes
`benchmarks/results/token-cost.md`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.runtime.model_source import resolve_model
from benchmarks.exactness import prompts
from benchmarks.kit import BATON, ROOT, Server, by_turns, parser, report, serving, table
from launch.bench.load import Job, completion

COLUMNS = ("decode, engine", "decode, rest", "coordinator", "client", "prefill")


@dataclass(frozen=True, slots=True)
class Count:
    """Nanoseconds of processor time and voluntary switches of one thread."""

    ns: int
    switches: int


Threads = dict[tuple[str, int], Count]


@dataclass(frozen=True, slots=True)
class Found:
    """One run, per token: milliseconds of processor time and switches by column; tokens per step and TPOT in ms."""

    ms: dict[str, float]
    switches: dict[str, float]
    tokens_per_step: float
    tpot_ms: float


def threads_of(pids: dict[str, int]) -> Threads:
    """The processor time and switches of every thread of these processes."""
    found: Threads = {}
    for name, pid in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                ns = int((task / "schedstat").read_text().split()[0])
                lines = (task / "status").read_text().splitlines()
                switches = next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
                found[name, int(task.name)] = Count(ns, switches)
    return found


def columns(before: Threads, after: Threads, pids: dict[str, int]) -> dict[str, Count]:
    """The difference by column. The computing thread of decode is its busiest thread besides the main one."""
    used = {key: Count(a.ns - b.ns, a.switches - b.switches) for key, a in after.items() if (b := before.get(key))}
    others = [key for key in used if key[0] == "decode" and key[1] != pids["decode"]]
    computes = max(others, key=lambda key: used[key].ns)
    sums: defaultdict[str, list[Count]] = defaultdict(list)
    for key, count in used.items():
        name = key[0] if key[0] != "decode" else "decode, engine" if key == computes else "decode, rest"
        sums[name].append(count)
    return {name: Count(sum(c.ns for c in counts), sum(c.switches for c in counts)) for name, counts in sums.items()}


class Cluster:
    """A server and the processes of its cluster."""

    def __init__(self, server: Server) -> None:
        self.server = server
        decode, prefill = self._worker("decode")["pids"], self._worker("prefill")["pids"]
        self.pids = {
            "decode": decode[0],
            "prefill": prefill[0],
            "coordinator": _listener(server),
            "client": os.getpid(),
        }

    def _worker(self, role: str) -> dict[str, Any]:
        workers = httpx.get(f"{self.server.url}/workers", timeout=10.0).json()["workers"]
        return next(worker for worker in workers if worker["role"] == role)

    def _progress(self) -> tuple[int, int]:
        """Steps and tokens of the decode worker, once a heartbeat has reported them."""
        time.sleep(1.0)
        decode = self._worker("decode")
        return decode["steps"], decode["tokens_generated"]

    def run(self, jobs: list[Job], clients: int) -> Found:
        steps, generated = self._progress()
        before = threads_of(self.pids)
        records = self.server.run([(self.server.target, job) for job in jobs], clients)
        after = threads_of(self.pids)
        steps_after, generated_after = self._progress()
        tokens = sum(r.output_tokens for r in records)
        used = columns(before, after, self.pids)
        return Found(
            {name: count.ns / tokens / 1e6 for name, count in used.items()},
            {name: count.switches / tokens for name, count in used.items()},
            (generated_after - generated) / max(steps_after - steps, 1),
            statistics.median(t for r in records if (t := r.tpot_s) is not None) * 1e3,
        )


def _listener(server: Server) -> int:
    """The coordinator's process: the one that was started for the server's port."""
    port = server.url.rpartition(":")[2]
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if directory.name.isdigit():
                words = (directory / "cmdline").read_bytes().decode().split("\0")
                if "coordinator" in words and port in words:
                    return int(directory.name)
    raise SystemExit(f"no coordinator serves port {port}")


def cells(key: tuple[str, int, str], runs: list[Found]) -> list[str]:
    """A line of the table: medians."""
    draft, clients, side = key
    ms, switches = (
        {c: statistics.median(getattr(r, of)[c] for r in runs) for c in COLUMNS} for of in ("ms", "switches")
    )
    outside = statistics.median(r.ms["decode, rest"] + r.ms["coordinator"] for r in runs)
    step, tpot = (statistics.median(getattr(r, of) for r in runs) for of in ("tokens_per_step", "tpot_ms"))
    name = f"{clients} client{'s' if clients > 1 else ''}, draft {draft}, {side}"
    shown = [f"{ms[column]:.3f} ({switches[column]:.2f})" for column in COLUMNS]
    return [name, *shown, f"**{outside:.3f}**", f"{step:.2f}", f"{tpot:.2f}"]


def main() -> None:
    options = parser(__doc__, "token-cost.md")
    options.add_argument("--before", type=Path, help="another checkout, measured by turns with this one")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--drafts", nargs="+", default=["none", "auto"])
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--tokens", type=int, default=128, help="generated by each request")
    options.add_argument("--requests", type=int, default=8, help="of a run, and at least one for each client")
    arguments = options.parse_args()
    texts = prompts(resolve_model("builtin"), 64, 4096)
    trees = {"after": ROOT} if arguments.before is None else {"before": arguments.before.resolve(), "after": ROOT}
    found = {key: list[Found]() for key in product(arguments.drafts, arguments.clients, trees)}
    up = [*BATON, "up", "--model", "builtin", "--grpc-port", "0", "--control-port", "0"]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        clusters: dict[tuple[str, str], Cluster] = {}
        for draft, (side, tree) in product(arguments.drafts, trees.items()):
            log, here = Path(directory) / f"{side}-{draft}.log", {"PYTHONPATH": str(tree)}
            server = serving(f"{side} {draft}", [*up, "--draft", draft], log, here, tree=tree)
            clusters[draft, side] = Cluster(stack.enter_context(server))
        offset = 0
        for number in range(-1, arguments.runs):  # the first is a warm-up
            for draft, clients in product(arguments.drafts, arguments.clients):
                count = max(arguments.requests, clients)
                chosen = [texts[(offset + i) % len(texts)][:100] for i in range(count)]
                jobs = [completion(list(text), arguments.tokens if number >= 0 else 16) for text in chosen]
                offset += count
                for side in by_turns(number, trees):
                    run = clusters[draft, side].run(jobs, clients)
                    if number >= 0:
                        found[draft, clients, side].append(run)
    about = (
        f"Built-in model, greedy, {arguments.tokens} tokens for each request, prompts of 100; medians of"
        f" {arguments.runs} runs by turns. Milliseconds of processor time for each token, and in brackets voluntary"
        " switches of threads for each token. Outside: decode's rest and the coordinator."
    )
    names = ("run", *COLUMNS, "outside", "tokens a step", "TPOT, ms")
    shown = table(names, [cells(key, runs) for key, runs in found.items()])
    report(arguments.out, "What a token costs outside of the engine", shown, about=about)


if __name__ == "__main__":
    main()
