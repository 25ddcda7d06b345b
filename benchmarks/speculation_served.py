"""What speculation gains as a client sees it: `baton up` beside `baton up --draft none`, in turns on one machine.

    python benchmarks/speculation_served.py                              the built-in pair
    python benchmarks/speculation_served.py --model DIR --draft DIR --force-acceptance 0.8 --works one

Both clusters are up, one of them idle while the other is measured, each with a core for prefill and one for decode. A
pair runs the same requests on both, in an order that alternates; the table has medians over pairs. TPOT is what
arrives: steps, frames between the tiers, the coordinator and HTTP are in it. Writes
`benchmarks/results/speculation-served.md`.

    one     1 client, greedy and T = 0.8
    many    32 clients, greedy: tokens/s
    top_p   8 clients without draft tokens: T = 0.8 with top_p 0.95 against greedy
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from exactness import prompts  # noqa: E402
from peers import Server, free_port, serving  # noqa: E402
from serving import ROOT, commit, machine  # noqa: E402

from baton.model_source import resolve_model  # noqa: E402
from launch.bench.client import client_session, send  # noqa: E402
from launch.bench.load import Job, completion  # noqa: E402
from launch.bench.stats import Record  # noqa: E402

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
    """One line of the table: `first` is what should be faster or no slower, and its gain is second / first in TPOT."""

    name: str
    first: list[Found]
    second: list[Found]
    bar: str
    least: float

    def line(self) -> str:
        gains = [b.tpot_ms / a.tpot_ms for a, b in zip(self.first, self.second, strict=True)]
        if "tokens/s" in self.name:
            gains = [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.first, self.second, strict=True)]
        ours, others = (statistics.median(f.tpot_ms for f in found) for found in (self.first, self.second))
        gain = statistics.median(gains)
        every = " ".join(f"{g:.2f}" for g in gains)
        met = "yes" if gain >= self.least else "**no**"
        return f"| {self.name} | {others:.2f} ms | {ours:.2f} ms | **{gain:.2f}** ({every}) | {self.bar} | {met} |"


class Client:
    """Sends prompts of the built-in model's kind of text (other models get their ids), the same to both servers."""

    def __init__(self, texts: Sequence[Sequence[int]], tokens: int) -> None:
        self._texts, self._tokens = texts, tokens
        self._next = 0

    def jobs(self, count: int) -> list[Job]:
        chosen = [self._texts[(self._next + i) % len(self._texts)] for i in range(count)]
        self._next += count
        return [completion(list(text[:200]), self._tokens) for text in chosen]

    def run(self, server: Server, jobs: Sequence[Job], clients: int, sampling: dict[str, Any]) -> Found:
        records = asyncio.run(_all(server, jobs, clients, sampling))
        failed = [r.error for r in records if r.error is not None]
        if failed:
            raise SystemExit(f"{server.name}: {len(failed)} of {len(records)} requests failed: {failed[0]}")
        span = max(r.ended for r in records) - min(r.sent for r in records)
        tpot = statistics.median(t for r in records if (t := r.tpot_s) is not None)
        return Found(tpot * 1e3, sum(r.output_tokens for r in records) / span)


async def _all(server: Server, jobs: Sequence[Job], clients: int, sampling: dict[str, Any]) -> list[Record]:
    waiting = iter(enumerate(jobs))
    records: list[Record] = []
    async with client_session(server.target) as session:

        async def client() -> None:
            for index, job in waiting:
                target = replace(server.target, extra={**sampling, "seed": index})
                records.append(await send(session, target, job))

        await asyncio.gather(*(client() for _ in range(clients)))
    return records


def counters(server: Server) -> dict[str, Any]:
    """What the decode worker counted: draft tokens made and right, steps."""
    workers = httpx.get(server.target.base.removesuffix("/v1") + "/workers", timeout=10.0).json()
    workers = workers.get("workers", workers) if isinstance(workers, dict) else workers
    (decode,) = (w for w in workers if w["role"] == "decode")
    return dict(decode["speculation"] or {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--works", nargs="+", choices=("one", "many", "top_p"), default=["one", "many", "top_p"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8, help="of one client in a run")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--force-acceptance", type=float)
    parser.add_argument("--up", nargs="*", default=[], help="more options of both `baton up`")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "speculation-served.md")
    arguments = parser.parse_args()
    forced = [] if arguments.force_acceptance is None else ["--force-acceptance", str(arguments.force_acceptance)]
    up = [sys.executable, "-m", "launch.cli", "up", "--model", arguments.model, "--grpc-port", "0", *arguments.up]
    texts = prompts(resolve_model("builtin"), 64, 4096)
    one_bars = {"greedy": 2.0, "T = 0.8": 0.0} if forced else {"greedy": 1.4, "T = 0.8": 1.15}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:

        def start(name: str, options: list[str]) -> Server:
            port = free_port()
            log = Path(directory) / f"{name}.log"
            return stack.enter_context(serving(name, [*up, *options, "--port", str(port)], port, log, {}, "/ready"))

        plain = start("none", ["--draft", "none"])
        guessing = start("draft", ["--draft", arguments.draft, *forced])
        client = Client(texts, arguments.tokens)
        for server in (plain, guessing):
            client.run(server, client.jobs(4), 2, SAMPLINGS["greedy"])  # warm-up

        def compare(clients: int, count: int, a: tuple[Server, str], b: tuple[Server, str]) -> tuple[list[Found], ...]:
            found: tuple[list[Found], list[Found]] = ([], [])
            for pair in range(arguments.pairs):
                jobs = client.jobs(count)
                for side in (0, 1) if pair % 2 == 0 else (1, 0):
                    server, sampling = (a, b)[side]
                    found[side].append(client.run(server, jobs, clients, SAMPLINGS[sampling]))
            return found

        rows: list[Row] = []
        before = counters(guessing)
        if "one" in arguments.works:
            for sampling, least in one_bars.items():
                first, second = compare(1, arguments.requests, (guessing, sampling), (plain, sampling))
                rows.append(Row(f"1 client, {sampling}", first, second, f"at least {least}", least))
        after = counters(guessing)
        if "many" in arguments.works:
            first, second = compare(32, 64, (guessing, "greedy"), (plain, "greedy"))
            rows.append(Row("32 clients, greedy, tokens/s", first, second, "at least 0.97", 0.97))
        if "top_p" in arguments.works:
            first, second = compare(8, 32, (plain, "T = 0.8, top_p 0.95"), (plain, "greedy"))
            rows.append(
                Row(
                    "8 clients, no draft tokens, top_p 0.95 (second) for greedy (first)",
                    first,
                    second,
                    "1/1.15",
                    1 / 1.15,
                )
            )
    made, right = (after.get(k, 0) - before.get(k, 0) for k in ("drafted_tokens", "accepted_tokens"))
    lines = [
        "# Speculation as a client sees it\n",
        f"{machine()}. Commit {commit()}, {datetime.date.today()}. {arguments.pairs} interleaved pairs, prompts of up"
        f" to 200 tokens, {arguments.tokens} generated; the client shares the cores."
        f" {'Acceptance was forced: the output was not real.' if forced else ''}\n",
        f"    python benchmarks/speculation_served.py {' '.join(sys.argv[1:])}\n",
        "| work | TPOT without | TPOT with | gain, median (all) | bar | met |",
        "|---" * 6 + "|",
        *(row.line() for row in rows),
        f"\nWith 1 client {right} of {made} draft tokens were right.\n",
    ]
    arguments.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
