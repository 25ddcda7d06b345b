"""The effect of rows with long token-id lists on other streams: gaps of a plain stream beside requests that allow
almost all of 151,936 token ids.

    python benchmarks/large_vocabulary.py [--rows 48] [--turns 3] [--tensor-parallel 1]

A cluster with a checkpoint of that vocabulary and only two layers, so that processing logits takes most of a step. In
turns, the rows beside the stream are plain and carry `allowed_token_ids`; gaps are measured while all of them run.
Writes `benchmarks/results/large-vocabulary.md`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import by_turns, checkpoint, cluster, parser, report, table
from launch.bench.stats import percentile

VOCABULARY = 151_936
BAR = 1.1
SETTLE_S, WINDOW_S, LIMIT_S = 1.0, 6.0, 120.0
TOGETHER = 8  # bodies of 1 MB that are sent at the same time
EXTRA: dict[str, Any] = {"plain": {}, "allowed_token_ids": {"allowed_token_ids": list(range(1000, VOCABULARY))}}


async def gaps(url: str, rows: int, extra: dict[str, Any]) -> list[float]:
    """Seconds between events of a plain stream while `rows` others, with `extra` in their bodies, run."""
    body = {"prompt": [300, 301, 302], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    large = json.dumps(body | extra).encode()
    headers = {"content-type": "application/json"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    times: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits, trust_env=False) as client:

        async def read(content: bytes, note: list[float] | None) -> None:
            async with client.stream("POST", "/v1/completions", content=content, headers=headers) as answer:
                if answer.status_code != 200:
                    raise SystemExit(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
                async for _ in answer.aiter_raw():
                    if note is not None:
                        note.append(time.monotonic())

        tasks = [asyncio.create_task(read(json.dumps(body).encode(), times))]
        for first in range(0, rows, TOGETHER):
            count = min(TOGETHER, rows - first)
            tasks += [asyncio.create_task(read(large, None)) for _ in range(count)]
            await until_running(client, tasks, 1 + first + count)
        await asyncio.sleep(SETTLE_S)
        begin = time.monotonic()
        await asyncio.sleep(WINDOW_S)
        for task in tasks:
            if task.done():
                task.result()
                raise SystemExit("a stream ended in the window")
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_running(client, [], 0)
    return [b - a for a, b in itertools.pairwise(times) if a >= begin]


async def until_running(client: httpx.AsyncClient, tasks: list[asyncio.Task[None]], count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for task in tasks:
            if task.done():
                task.result()
        workers = (await client.get("/workers")).json()["workers"]
        if next(worker["running"] for worker in workers if worker["role"] == "decode") == count:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{count} sequences did not run within {LIMIT_S:g} s")


def by_kind(url: str, rows: int, turns: int, extra: Mapping[str, dict[str, Any]]) -> dict[str, list[list[float]]]:
    """The gaps of each turn by kind of the rows beside the stream; `extra`: what each kind adds to their bodies."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in extra}
    for turn in range(turns):
        for kind in by_turns(turn, extra):
            found[kind].append(asyncio.run(gaps(url, rows, extra[kind])))
            print(turn, kind, f"{statistics.median(found[kind][-1]) * 1e3:.2f} ms", flush=True)
    return found


def ratio(before: list[list[float]], after: list[list[float]]) -> float:
    """The ratio of the medians of a turn; the median over turns."""
    return statistics.median(statistics.median(b) / statistics.median(a) for a, b in zip(before, after, strict=True))


def main() -> None:
    options = parser(__doc__, "large-vocabulary.md")
    options.add_argument("--rows", type=int, default=48)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--tensor-parallel", type=int, default=1)
    arguments = options.parse_args()
    ways = ("--draft", "none", "--decode-tp", str(arguments.tensor_parallel))
    with checkpoint("152k") as model, cluster("--model", str(model), *ways) as running:
        found = by_kind(running.url, arguments.rows, arguments.turns, EXTRA)
    rows = []
    for kind, runs in found.items():
        middle = " ".join(f"{statistics.median(run) * 1e3:.1f}" for run in runs)
        worst = " ".join(f"{percentile(sorted(run), 99) * 1e3:.1f}" for run in runs)
        rows.append([kind, f"{middle} ms", f"{worst} ms"])
    shown = table((f"beside {arguments.rows} rows", "gaps p50 (each turn)", "p99"), rows)
    over = f"Ratio of medians, median over turns: {ratio(*found.values()):.2f} (bar: {BAR})."
    about = f"{VOCABULARY:,} ids, 2 layers of 256."
    report(arguments.out, "Rows with long lists of token ids and their neighbours", shown, over, about=about)


if __name__ == "__main__":
    main()
