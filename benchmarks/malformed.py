"""The effect of over 300 kinds of malformed requests, sent one after another, on the streams of other clients: gaps
between tokens, with and without them, in turns.

    python benchmarks/malformed.py            1 prefill and 1 decode worker, built-in model, 4 streams, 5 turns

The requests are the table of the tests (`tests/support/bad_inputs.py`), sent by one client, one at a time: each kind
once per window, or repeatedly as fast as they are answered. Each reply must have the status in the table. Client,
coordinator and workers share the cores. Writes `benchmarks/results/malformed.md`.
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
from sim.stats import percentile
from tests.support.bad_inputs import TABLE
from tests.support.requests_kit import Bad

WINDOW_S = 8.0
LOAD_S = 3.0  # the other process loads its libraries and begins
BAR = 1.3
ALONE, ONCE, ALWAYS = "alone", "each kind once", "as fast as they are answered"


async def stream(http: httpx.AsyncClient, url: str, ended: asyncio.Event, gaps: list[float]) -> None:
    """Well-formed streams, one after the other; a gap counts from the second event on."""
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


async def malformed(url: str, every_s: float, left_out: Sequence[str]) -> None:
    """Sends malformed requests until its stdin closes, at most one per `every_s` seconds. Prints the replies per
    second, and those that differ from the table."""
    count, wrong, due = 0, set[str](), time.monotonic()
    begin = due
    reader, _ = await asyncio.get_running_loop().connect_read_pipe(asyncio.Protocol, sys.stdin)
    async with httpx.AsyncClient(timeout=60) as http:
        for row in itertools.cycle(row for row in TABLE if row.id not in left_out):
            if reader.is_closing():
                break
            due = max(due + every_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            answer = await send(http, url, row)
            count += 1
            if answer != row.status:
                wrong.add(f"{row.id}: {answer}")
    print(json.dumps([count / (time.monotonic() - begin), sorted(wrong)]))


async def send(http: httpx.AsyncClient, url: str, row: Bad) -> int:
    """The status; 0 for a head that the client itself refuses to send."""
    headers = {"content-type": "application/json"} | row.headers
    try:
        return (await http.request(row.method, url + row.path, content=row.raw(), headers=headers)).status_code
    except httpx.LocalProtocolError:
        return 0


async def too_small(url: str) -> set[str]:
    """Rows that this model accepts, since they exceed only the length or vocabulary of the tests' model, and rows that
    cannot be sent: the report names them."""
    async with httpx.AsyncClient(timeout=60) as http:
        return {row.id for row in TABLE if await send(http, url, row) in (0, 200)}


async def window(url: str, streams: int) -> list[float]:
    """The gaps of well-formed streams, after a warm-up of a second."""
    ended, gaps = asyncio.Event(), list[float]()
    async with httpx.AsyncClient(timeout=60) as http:
        running = [asyncio.create_task(stream(http, url, ended, gaps)) for _ in range(streams)]
        await asyncio.sleep(1.0)
        gaps.clear()
        await asyncio.sleep(WINDOW_S)
        ended.set()
        await asyncio.gather(*running)
    return gaps


def beside(url: str, streams: int, every_s: float, left_out: set[str]) -> tuple[list[float], float, list[str]]:
    command = [sys.executable, __file__, "--malformed", url, str(every_s), *sorted(left_out)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=idle_class
    ) as other:
        time.sleep(LOAD_S)
        gaps = asyncio.run(window(url, streams))
        output, _ = other.communicate(timeout=60)
    each_s, wrong = json.loads(output)
    return gaps, each_s, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "malformed.md")
    parser.add_argument("--malformed", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.malformed:
        url, every_s, *left_out = arguments.malformed
        asyncio.run(malformed(url, float(every_s), left_out))
        return
    rows, wrong = [], set[str]()
    ratios: dict[str, list[float]] = {ONCE: [], ALWAYS: []}
    rates: dict[str, list[float]] = {ONCE: [], ALWAYS: []}
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [*BATON, "up", "builtin", "--served-model-name", "tiny", "--port", "0", "--grpc-port", "0"]
        command += ["--run-dir", str(run)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            url = ready_url(process, run / "cluster.json")
            left_out = asyncio.run(too_small(url))
            kinds = len(TABLE) - len(left_out)
            every_s = {ONCE: WINDOW_S / kinds, ALWAYS: 0.0}
            beside(url, arguments.streams, 0.0, left_out)
            for turn in range(arguments.turns):
                p99 = {}
                for how in (ALONE, ONCE, ALWAYS) if turn % 2 == 0 else (ALWAYS, ONCE, ALONE):
                    if how == ALONE:
                        gaps = asyncio.run(window(url, arguments.streams))
                    else:
                        gaps, each_s, failures = beside(url, arguments.streams, every_s[how], left_out)
                        rates[how].append(each_s)
                        wrong |= set(failures)
                    p99[how] = percentile(sorted(gaps), 99) * 1e3
                rows.append(f"| {turn + 1} | {p99[ALONE]:.2f} ")
                for how, found_ratios in ratios.items():
                    found_ratios.append(p99[how] / p99[ALONE])
                    rows[-1] += f"| {p99[how]:.2f} | {found_ratios[-1]:.2f} "
                rows[-1] += "|"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    verdicts = []
    for how, found_ratios in ratios.items():
        median, each_s = statistics.median(found_ratios), statistics.median(rates[how])
        kept = "kept" if median <= BAR else "missed"
        verdicts.append(f"{how}: {each_s:.0f} a second, median of the ratios {median:.2f} (bar {BAR}: {kept}).\n")
    parts = [
        "# Streams beside malformed requests\n",
        f"{machine()}. Commit {commit()}, {datetime.date.today()}. `python benchmarks/malformed.py`:"
        f" {arguments.streams} streams, windows of {WINDOW_S:g} s, {kinds} kinds; answered otherwise than the"
        f" table says: {sorted(wrong) or 'none'}. Left out, as they fit this model or cannot be"
        f" sent: {', '.join(sorted(left_out))}.\n",
        f"| turn | ITL p99 alone, ms | {ONCE}, ms | ratio | {ALWAYS}, ms | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        *verdicts,
    ]
    arguments.out.write_text("\n".join(parts) + "\n")
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
