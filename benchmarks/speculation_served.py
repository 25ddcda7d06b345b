"""The gain of speculation as a client sees it: `baton up` against `baton up --draft none`, in turns on one machine.

    python benchmarks/speculation_served.py                              the built-in pair
    python benchmarks/speculation_served.py --model DIR --draft DIR --force-acceptance 0.8 --works one

Both clusters run, one of them idle while the other is measured, each with one core for prefill and one for decode. A
pair runs the same requests on both, in an order that alternates; the table has medians over pairs. TPOT is measured at
the client: it includes steps, frames between the tiers, the coordinator and HTTP. Writes
`benchmarks/results/speculation-served.md`.

    one     1 client, greedy and T = 0.8
    many    32 clients, greedy: tokens/s
    top_p   8 clients without draft tokens: T = 0.8 with top_p 0.95 against greedy
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.runtime.model_source import resolve_model
from benchmarks.exactness import prompts
from benchmarks.kit import BATON, Server, by_turns, parser, report, serving, table
from launch.bench.load import PlannedRequest, completion

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T = 0.8": {"temperature": 0.8},
    "T = 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass(frozen=True, slots=True)
class Found:
    """Medians of one run: milliseconds per token of a client, and tokens per second of all."""

    tpot_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """`first` should be faster or no slower; its gain is second / first in TPOT, first / second in tokens/s."""

    name: str
    first: list[Found]
    second: list[Found]
    bar: str
    least: float

    def cells(self) -> list[str]:
        gains = [b.tpot_ms / a.tpot_ms for a, b in zip(self.first, self.second, strict=True)]
        if "tokens/s" in self.name:
            gains = [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.first, self.second, strict=True)]
        ours, theirs = (statistics.median(f.tpot_ms for f in runs) for runs in (self.first, self.second))
        gain = statistics.median(gains)
        every = " ".join(f"{g:.2f}" for g in gains)
        met = "yes" if gain >= self.least else "**no**"
        return [self.name, f"{theirs:.2f} ms", f"{ours:.2f} ms", f"**{gain:.2f}** ({every})", self.bar, met]


class Client:
    """Sends prompts of the built-in model's kind of text (other models get their ids), the same to both servers."""

    def __init__(self, texts: Sequence[Sequence[int]], tokens: int) -> None:
        self._texts, self._tokens = texts, tokens
        self._next = 0

    def jobs(self, count: int) -> list[PlannedRequest]:
        chosen = [self._texts[(self._next + i) % len(self._texts)] for i in range(count)]
        self._next += count
        return [completion(list(text[:200]), self._tokens) for text in chosen]

    def run(self, server: Server, jobs: Sequence[PlannedRequest], clients: int, sampling: dict[str, Any]) -> Found:
        seeded = [replace(server.target, extra={**sampling, "seed": index}) for index in range(len(jobs))]
        records = server.run(list(zip(seeded, jobs, strict=True)), clients)
        span = max(r.ended for r in records) - min(r.sent for r in records)
        tpot = statistics.median(t for r in records if (t := r.tpot_s) is not None)
        return Found(tpot * 1e3, sum(r.output_tokens for r in records) / span)


def counters(server: Server) -> dict[str, Any]:
    """The decode worker's counters: draft tokens made and accepted, steps."""
    workers = httpx.get(f"{server.url}/workers", timeout=10.0).json()["workers"]
    (decode,) = (w for w in workers if w["role"] == "decode")
    return dict(decode["speculation"] or {})


def main() -> None:
    options = parser(__doc__, "speculation-served.md")
    options.add_argument("--model", default="builtin")
    options.add_argument("--draft", default="auto")
    options.add_argument("--works", nargs="+", choices=("one", "many", "top_p"), default=["one", "many", "top_p"])
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--requests", type=int, default=8, help="of one client in a run")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--force-acceptance", type=float)
    options.add_argument("--up", nargs="*", default=[], help="more options of both `baton up`")
    arguments = options.parse_args()
    forced = [] if arguments.force_acceptance is None else ["--force-acceptance", str(arguments.force_acceptance)]
    up = [*BATON, "up", "--model", arguments.model, "--grpc-port", "0", "--control-port", "0", *arguments.up]
    one_bars = {"greedy": 2.0, "T = 0.8": 0.0} if forced else {"greedy": 1.4, "T = 0.8": 1.15}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:

        def start(name: str, *flags: str) -> Server:
            return stack.enter_context(serving(name, [*up, *flags], Path(directory) / f"{name}.log"))

        plain, drafting = start("none", "--draft", "none"), start("draft", "--draft", arguments.draft, *forced)
        client = Client(prompts(resolve_model("builtin"), 64, 4096), arguments.tokens)
        for server in (plain, drafting):
            client.run(server, client.jobs(4), 2, SAMPLINGS["greedy"])  # warm-up

        def compare(clients: int, count: int, *sides: tuple[Server, str]) -> tuple[list[Found], list[Found]]:
            runs: tuple[list[Found], list[Found]] = ([], [])
            for pair in range(arguments.pairs):
                jobs = client.jobs(count)
                for side in by_turns(pair, (0, 1)):
                    server, sampling = sides[side]
                    runs[side].append(client.run(server, jobs, clients, SAMPLINGS[sampling]))
            return runs

        rows: list[Row] = []
        before = counters(drafting)
        if "one" in arguments.works:
            for sampling, least in one_bars.items():
                runs = compare(1, arguments.requests, (drafting, sampling), (plain, sampling))
                rows.append(Row(f"1 client, {sampling}", *runs, f"at least {least}", least))
        after = counters(drafting)
        if "many" in arguments.works:
            runs = compare(32, 64, (drafting, "greedy"), (plain, "greedy"))
            rows.append(Row("32 clients, greedy, tokens/s", *runs, "at least 0.97", 0.97))
        if "top_p" in arguments.works:
            runs = compare(8, 32, (plain, "T = 0.8, top_p 0.95"), (plain, "greedy"))
            name = "8 clients, no draft tokens, top_p 0.95 (second) for greedy (first)"
            rows.append(Row(name, *runs, "1/1.15", 1 / 1.15))
    made, right = (after.get(k, 0) - before.get(k, 0) for k in ("drafted_tokens", "accepted_tokens"))
    about = (
        f"{arguments.pairs} interleaved pairs, prompts of up to 200 tokens, {arguments.tokens} generated; the client"
        f" shares the cores. {'Acceptance was forced: the output was not real.' if forced else ''}"
    )
    names = ("work", "TPOT without", "TPOT with", "gain, median (all)", "bar", "met")
    shown = table(names, [row.cells() for row in rows])
    of_one = f"With 1 client {right} of {made} draft tokens were right."
    report(arguments.out, "Speculation as a client sees it", shown, of_one, about=about)


if __name__ == "__main__":
    main()
