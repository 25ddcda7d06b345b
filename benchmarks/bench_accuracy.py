"""The error of each number that `baton bench` reports, closed and open loop, for a server with preset latencies.

    python benchmarks/bench_accuracy.py [--requests 200] [--out benchmarks/results/bench-accuracy.md]

The server is a separate process that waits until each event is due (so errors do not accumulate over a stream) and
records when it wrote the event. This separates two errors: how late the server was, and what the client added.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import parser, report, table
from launch.bench.client import Target, run_load
from launch.bench.load import Lengths, Load
from launch.bench.stats import statistics

TTFT_S, GAP_S, TOKENS = 0.1, 0.02, 50
BAR = 0.02
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server(asyncio.Protocol):
    """Answers a request event by event, with as little work as possible: of 64 simultaneous requests, the last waits
    for the work done for all others."""

    def __init__(self, ttft_s: float, gap_s: float) -> None:
        self.ttft_s, self.gap_s = ttft_s, gap_s
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self.received.endswith(b"}"):  # the end of the only object in a body
            return
        came, self.count = time.perf_counter(), int(self.received.partition(b'"max_tokens":')[2].split(b",")[0])
        self.received = b""
        self.transport.write(HEAD)
        self._wait(came, [])

    def _wait(self, came: float, at: list[float]) -> None:
        due = came + self.ttft_s + len(at) * self.gap_s
        asyncio.get_running_loop().call_later(due - time.perf_counter(), self._write, came, at)

    def _write(self, came: float, at: list[float]) -> None:
        at.append(time.perf_counter())
        if len(at) < self.count:
            self.transport.write(EVENT)
            self._wait(came, at)
            return
        own = {"ttft": at[0] - came, "tpot": (at[-1] - at[0]) / (self.count - 1)}
        timeline = {"spans": [{"name": name, "ms": took_s * 1e3} for name, took_s in own.items()]}
        usage = {"prompt_tokens": 1, "completion_tokens": self.count}
        last = {"choices": [{"index": 0, "text": "x", "timeline": timeline}], "usage": usage}
        self.transport.write(event(json.dumps(last)) + event("[DONE]") + b"0\r\n\r\n")


def event(data: str) -> bytes:
    """The event in a chunk of its own."""
    text = f"data: {data}\n\n".encode()
    return f"{len(text):x}\r\n".encode() + text + b"\r\n"


EVENT = event('{"choices": [{"index": 0, "text": "x"}]}')


def serve(port: Any, ttft_s: float, gap_s: float) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Server(ttft_s, gap_s), "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def main() -> None:
    options = parser(__doc__, "bench-accuracy.md")
    options.add_argument("--requests", type=int, default=200)
    arguments = options.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, TTFT_S, GAP_S), daemon=True)
    server.start()
    own_core, *others = sorted(os.sched_getaffinity(0))  # a process that wakes another one may hold its core for 2 ms
    os.sched_setaffinity(server.pid or 0, others or {own_core})
    os.sched_setaffinity(0, {own_core})
    target = Target(f"http://127.0.0.1:{here.recv()}/v1", "m", "", 60.0, {})
    lengths = Lengths(8, 8), Lengths(TOKENS, TOKENS)
    rows = []
    for name, clients, load in (
        ("closed loop, 1 client", 1, Load(0, *lengths)),
        ("closed loop, 8 clients", 8, Load(0, *lengths)),
        ("closed loop, 64 clients", 64, Load(0, *lengths)),
        ("open loop, 5 requests/s", 0, Load(0, *lengths, rate=5.0)),
        ("open loop, 20 requests/s", 0, Load(0, *lengths, rate=20.0)),
    ):
        count = arguments.requests if clients != 1 else max(10, arguments.requests // 8)
        records = asyncio.run(run_load(target, load.sessions(0, count), clients, lambda record: None))
        stats = statistics(records)
        if stats.failed:
            raise SystemExit(f"{stats.failed} requests failed: {stats.errors}")
        found = (("TTFT", stats.ttft, TTFT_S), ("TPOT", stats.tpot, GAP_S), ("ITL", stats.itl, GAP_S))
        of_set = [summary.p50 / wanted - 1 for _, summary, wanted in found]
        own = [stats.stages[name].p50 / wanted - 1 for name, wanted in (("ttft", TTFT_S), ("tpot", GAP_S))]
        shown = [f"{error:+.2%}" for error in (*of_set, *own)]
        added = max(abs(measured - late) for measured, late in zip(of_set, own, strict=False))
        rows.append([name, str(count), *shown, f"{added:.2%}", "yes" if added <= BAR else "NO"])
        print(rows[-1], flush=True)
    server.kill()
    what = (
        f"Set: TTFT {TTFT_S * 1e3:g} ms, {GAP_S * 1e3:g} ms between tokens, {TOKENS} tokens; server and client each on"
        " a core of its own. Errors of the medians, as the client measured them and as the server itself was late; what"
        f" the client added is the difference, and its bar is {BAR:.0%}. In the open loop times count from the moment a"
        " request was due."
    )
    names = ("load", "requests", "TTFT", "TPOT", "ITL", "server's TTFT", "server's TPOT", "added", "within")
    title = "What `baton bench` measures of a server with known latencies"
    report(arguments.out, title, what, table(names, rows))


if __name__ == "__main__":
    main()
