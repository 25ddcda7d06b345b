"""What more than 300 kinds of malformed requests, one behind the other, do to the streams of others: their gaps between
tokens, with and without, by turns.

    python benchmarks/malformed.py            1 prefill and 1 decode worker, built-in model, 4 streams, 5 turns

The requests are the table of the tests (`tests/support/bad_inputs.py`), from one connection after another, as fast as
they are answered. Each has to get the status that the table says. Client, coordinator and workers share the cores.
Writes `benchmarks/results/malformed.md`.
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
from collections.abc import Sequence
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bad_clients import idle_class
from benchmarks.kit import BATON, ROOT, commit, machine, ready_url
from launch.bench.stats import percentile
from tests.support.bad_inputs import TABLE
from tests.support.requests_kit import Bad

WINDOW_S = 8.0
LOAD_S = 3.0  # the other process loads its libraries and begins
BAR = 1.3


async def stream(http: httpx.AsyncClient, url: str, ended: asyncio.Event, gaps: list[float]) -> None:
    """Honest streams, one after the other; a gap counts from the second event on."""
    body = {"prompt": "def read_lines(path):", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    while not ended.is_set():
        async with http.stream("POST", url + "/v1/completions", json=body) as answer:
            before = 0.0
            async for line in answer.aiter_lines():
                if line.startswith("data:"):
                    now = time.perf_counter()
                    if before:
                        gaps.append(now - before)
                    before = now
                if ended.is_set():
                    return


async def malformed(url: str, left_out: Sequence[str]) -> None:
    """Until the end of its input. Prints how many were answered, and those that were not as the table says."""
    count, wrong = 0, set[str]()
    reader, _ = await asyncio.get_running_loop().connect_read_pipe(asyncio.Protocol, sys.stdin)
    async with httpx.AsyncClient(timeout=60) as http:
        for row in itertools.cycle(row for row in TABLE if row.id not in left_out):
            if reader.is_closing():
                break
            answer = await send(http, url, row)
            count += 1
            if answer != row.status:
                wrong.add(f"{row.id}: {answer}")
    print(json.dumps([count, sorted(wrong)]))


async def send(http: httpx.AsyncClient, url: str, row: Bad) -> int:
    """The status; 0 for a head that the client itself refuses to send."""
    headers = {"content-type": "application/json"} | row.headers
    try:
        return (await http.request(row.method, url + row.path, content=row.raw(), headers=headers)).status_code
    except httpx.LocalProtocolError:
        return 0


async def too_small(url: str) -> set[str]:
    """Rows that are refused for the length or vocabulary of the tests' model and fit this one, and what cannot be
    sent: the report names them."""
    async with httpx.AsyncClient(timeout=60) as http:
        return {row.id for row in TABLE if await send(http, url, row) in (0, 200)}


async def window(url: str, streams: int) -> list[float]:
    """Gaps of honest streams, after a second."""
    ended, gaps = asyncio.Event(), list[float]()
    async with httpx.AsyncClient(timeout=60) as http:
        running = [asyncio.create_task(stream(http, url, ended, gaps)) for _ in range(streams)]
        await asyncio.sleep(1.0)
        gaps.clear()
        await asyncio.sleep(WINDOW_S)
        ended.set()
        await asyncio.gather(*running)
    return gaps


def beside(url: str, streams: int, left_out: set[str]) -> tuple[list[float], int, list[str]]:
    command = [sys.executable, __file__, "--malformed", url, *sorted(left_out)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=idle_class
    ) as other:
        time.sleep(LOAD_S)
        gaps = asyncio.run(window(url, streams))
        said, _ = other.communicate(timeout=60)
    count, wrong = json.loads(said)
    return gaps, count, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "malformed.md")
    parser.add_argument("--malformed", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.malformed:
        url, *left_out = arguments.malformed
        asyncio.run(malformed(url, left_out))
        return
    rows, ratios, wrong, total = [], [], set[str](), 0
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [*BATON, "up", "builtin", "--served-model-name", "tiny", "--port", "0", "--grpc-port", "0"]
        command += ["--run-dir", str(run)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            url = ready_url(process, run / "cluster.json")
            left_out = asyncio.run(too_small(url))
            beside(url, arguments.streams, left_out)
            for turn in range(arguments.turns):
                p99 = {}
                for disturbed in (False, True) if turn % 2 == 0 else (True, False):
                    if disturbed:
                        gaps, count, found = beside(url, arguments.streams, left_out)
                        total += count
                        wrong |= set(found)
                    else:
                        gaps = asyncio.run(window(url, arguments.streams))
                    p99[disturbed] = percentile(sorted(gaps), 99) * 1e3
                ratios.append(p99[True] / p99[False])
                rows.append(f"| {turn + 1} | {p99[False]:.2f} | {p99[True]:.2f} | {ratios[-1]:.2f} |")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    median = statistics.median(ratios)
    kinds = len(TABLE) - len(left_out)
    parts = [
        "# Streams beside malformed requests\n",
        f"{machine()}. Commit {commit()}, {datetime.date.today()}. `python benchmarks/malformed.py`:"
        f" {arguments.streams} streams, windows of {WINDOW_S:g} s, {kinds} kinds, {total} malformed requests answered;"
        f" otherwise than the table says: {sorted(wrong) or 'none'}. Left out, as they fit this model or cannot be"
        f" sent: {', '.join(sorted(left_out))}.\n",
        "| turn | ITL p99 alone, ms | beside, ms | ratio |\n| --- | --- | --- | --- |",
        *rows,
        f"\nMedian of the ratios {median:.2f} (bar {BAR}: {'kept' if median <= BAR else 'missed'}).",
    ]
    arguments.out.write_text("\n".join(parts) + "\n")
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
