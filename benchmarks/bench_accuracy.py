"""What `baton bench` measures of a server whose latencies are set, closed and open loop: the error of each number.

    python benchmarks/bench_accuracy.py [--requests 200] [--out benchmarks/results/bench-accuracy.md]

The server is a process of its own that waits until each event is due (no error adds up over a stream) and records when
it wrote it, so two errors are kept apart: what the server was late, and what the client added.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
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


class _Noting(asyncio.StreamReaderProtocol):
    """When its last bytes came: of 64 requests at one moment the last is parsed some milliseconds later."""

    came = 0.0

    def data_received(self, data: bytes) -> None:
        self.came = time.perf_counter()
        super().data_received(data)


def serve(port: Any, ttft_s: float, gap_s: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                count = json.loads(await reader.readexactly(length))["max_tokens"]
                came = writer.transport.get_protocol().came  # type: ignore[union-attr]
                writer.write(HEAD)
                at = []
                for index in range(count):
                    await asyncio.sleep(came + ttft_s + index * gap_s - time.perf_counter())
                    at.append(time.perf_counter())
                    choice: dict[str, Any] = {"index": 0, "text": "x"}
                    if index == count - 1:
                        own = {"ttft": at[0] - came, "tpot": (at[-1] - at[0]) / (count - 1)}
                        choice["timeline"] = {"spans": [{"name": k, "ms": v * 1e3} for k, v in own.items()]}
                    event(writer, {"choices": [choice]})
                event(writer, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})
                chunk(writer, b"data: [DONE]\n\n")
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def event(writer: asyncio.StreamWriter, value: object) -> None:
        chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Noting(asyncio.StreamReader(), handle), "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def main() -> None:
    options = parser(__doc__, "bench-accuracy.md")
    options.add_argument("--requests", type=int, default=200)
    arguments = options.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, TTFT_S, GAP_S), daemon=True)
    server.start()
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
        f"Set: TTFT {TTFT_S * 1e3:g} ms, {GAP_S * 1e3:g} ms between tokens, {TOKENS} tokens. Errors of the medians, as"
        " the client measured them and as the server itself was late; what the client added is the difference, and its"
        f" bar is {BAR:.0%}. In the open loop times count from the moment a request was due."
    )
    names = ("load", "requests", "TTFT", "TPOT", "ITL", "server's TTFT", "server's TPOT", "added", "within")
    title = "What `baton bench` measures of a server with known latencies"
    report(arguments.out, title, what, table(names, rows))


if __name__ == "__main__":
    main()
