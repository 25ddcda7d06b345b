"""What rows with long lists cost their neighbours: gaps of a plain stream beside requests that allow almost all of
151,936 token ids.

    python benchmarks/large_vocabulary.py [--rows 48] [--turns 3] [--tensor-parallel 1]

A cluster with a checkpoint of that vocabulary and hardly any layers, so that what happens to logits is most of a step.
In turns, the rows beside the stream are plain and carry `allowed_token_ids`; gaps are taken while all of them run.
Writes `benchmarks/results/large-vocabulary.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.serving import BATON, ROOT, commit, machine, ready_url
from launch.bench.stats import percentile

VOCABULARY = 151_936
BAR = 1.1
SETTLE_S, WINDOW_S, LIMIT_S = 1.0, 6.0, 120.0
TOGETHER = 8  # bodies of 1 MB that are sent at the same time
KINDS = ("plain", "allowed_token_ids")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "large-vocabulary.md")
    arguments = parser.parse_args()
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "152k"
        subprocess.run([sys.executable, "tools/make_checkpoint.py", "152k", str(model)], cwd=ROOT, check=True)
        flags = ["--model", str(model), "--port", "0", "--grpc-port", "0", "--control-port", "0", "--draft", "none"]
        flags += ["--run-dir", f"{directory}/run", "--decode-tp", str(arguments.tensor_parallel)]
        cluster = subprocess.Popen([*BATON, "up", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            url = ready_url(cluster, Path(directory) / "run" / "cluster.json")
            for turn in range(arguments.turns):
                for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                    found[kind].append(asyncio.run(gaps(url, arguments.rows, EXTRA[kind])))
                    print(turn, kind, f"{statistics.median(found[kind][-1]) * 1e3:.1f} ms", flush=True)
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(30)
    lines = [
        "# Rows with long lists of token ids and their neighbours",
        "",
        f"    python benchmarks/large_vocabulary.py --rows {arguments.rows} --turns {arguments.turns}"
        f" --tensor-parallel {arguments.tensor_parallel}",
        "",
        f"Commit {commit()}, {datetime.date.today()}. {machine()}. {VOCABULARY:,} ids, 2 layers of 256.",
        "",
        f"| beside {arguments.rows} rows | gaps p50 (each turn) | p99 |",
        "|---|---|---|",
    ]
    for kind, runs in found.items():
        middle = " ".join(f"{statistics.median(run) * 1e3:.1f}" for run in runs)
        worst = " ".join(f"{percentile(sorted(run), 99) * 1e3:.1f}" for run in runs)
        lines.append(f"| {kind} | {middle} ms | {worst} ms |")
    ratios = [
        statistics.median(with_list) / statistics.median(plain)
        for plain, with_list in zip(found["plain"], found["allowed_token_ids"], strict=True)
    ]
    lines += ["", f"Ratio of medians, median over turns: {statistics.median(ratios):.2f} (bar: {BAR}).", ""]
    arguments.out.write_text("\n".join(lines))
    print(lines[-2])


if __name__ == "__main__":
    main()
