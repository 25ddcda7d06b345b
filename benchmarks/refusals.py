"""What a refused request costs the coordinator: processor time of its process, and the time at the client.

    python benchmarks/refusals.py                 about half a minute

The coordinator's HTTP server with a full queue and no workers, in this process; one client in another process sends the
same request again and again over one connection. Writes `benchmarks/results/refusals.md`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baton.runtime.model_source import resolve_model
from baton.runtime.ports import bind
from benchmarks.kit import parser, report, table
from coordinator.cluster import Cluster
from coordinator.http.app import HttpSettings, create_app
from coordinator.http.server import HttpServer
from coordinator.pipeline import Pipeline
from coordinator.submission import Submission
from coordinator.text.model import TextModel

QUEUE = 4
TEXT = "the quick brown fox jumps over the lazy dog " * 200
REQUESTS: dict[str, tuple[str, dict[str, object]]] = {
    "completion of 96 token ids": ("completions", {"prompt": [300] * 96}),
    "chat message of 9 KB": ("chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "chat message of 53 KB": ("chat/completions", {"messages": [{"role": "user", "content": TEXT * 6}]}),
}
CLIENT = """
import http.client, sys, time
port, path, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
body, times = sys.stdin.buffer.read(), []
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
for _ in range(count):
    sent = time.perf_counter()
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    times.append(time.perf_counter() - sent)
print(answer.status, sorted(times)[count // 2] * 1e3, sorted(times)[count * 99 // 100] * 1e3)
"""


async def row(port: int, name: str, count: int) -> list[str]:
    path, body = REQUESTS[name]
    command = (sys.executable, "-c", CLIENT, str(port), f"/v1/{path}", str(count))
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    client = await asyncio.create_subprocess_exec(*command, **pipes)
    before = time.process_time()
    async with asyncio.timeout(120.0):
        output, _ = await client.communicate(orjson.dumps({"model": "builtin", **body}))
    status, p50, p99 = output.decode().split()
    cost_ms = (time.process_time() - before) / count * 1e3
    return [name, status, f"{cost_ms:.2f} ms", f"{float(p50):.2f} / {float(p99):.2f} ms"]


async def measure(count: int) -> list[list[str]]:
    text = TextModel.load(resolve_model("builtin"))
    text.start()
    cluster = Cluster(3.0, QUEUE, 1 << 20)
    pipeline = Pipeline(cluster, text.vocabulary)
    server = HttpServer(
        create_app(pipeline, text, HttpSettings("builtin")), bind("127.0.0.1", 0, "--port", "HTTP"), grace_s=1.0
    )
    serving = asyncio.create_task(server.serve())
    waiting = [pipeline.generate(Submission(f"waits-{number}", (300,) * 96, 16)) for number in range(QUEUE)]
    fill = [asyncio.ensure_future(anext(deltas)) for deltas in waiting]
    while not server.started or cluster.requests.dispatcher.num_queued < QUEUE:
        await asyncio.sleep(0.01)
    rows = [await row(server.address[1], name, count) for name in REQUESTS]
    for task in fill:
        task.cancel()
    await asyncio.gather(*fill, return_exceptions=True)
    server.stop()
    await serving
    text.close()
    return rows


def main() -> None:
    options = parser(__doc__, "refusals.md")
    options.add_argument("--count", type=int, default=1000, help="refusals of each kind")
    options.add_argument("--note", default="", help="what else ran on the machine, for the report")
    given = options.parse_args()
    headings = ["request", "status", "processor time of the coordinator", "at the client, p50 / p99"]
    setting = f"A queue of {QUEUE} that is full; {given.count} requests of each kind, one after the other."
    rows = asyncio.run(measure(given.count))
    report(given.out, "What a refused request costs", setting, table(headings, rows), about=given.note)


if __name__ == "__main__":
    main()
