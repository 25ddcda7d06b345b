"""The cost of a KV hand-over: from the end of prefill compute to the first decode step, and in time to first token.

    python benchmarks/handover.py                        prompts of 512, 2,048 and 8,192 tokens, five of each
    python benchmarks/handover.py --prompts 512 --times 9

One prefill and one decode worker, 135 M shape, one core and thread each. The times are those of the workers' event
logs. Prefill alone is a prompt of the same length with `max_tokens` 1, which is not handed over; the two kinds
alternate. The link bandwidth is that of a bare edge between two processes on the same cores, with as many bytes as the
last chunk, measured after each request while the cluster is idle; the median is used. Writes
`benchmarks/results/handover.md`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import ROOT, checkpoint, cluster, parser, report, table

POSITIONS = 8448  # so that a prompt of 8,192 has room for its answer
FIXED_S, SHARE = 0.010, 1.3
EDGE_END = """
import sys, time, torch
from baton.transfer.edge import EdgeSpec
from baton.transfer.gloo import GlooEdge
side, host, port, prefix, size, times, core = sys.argv[1:]
import os; os.sched_setaffinity(0, {int(core)}); torch.set_num_threads(1)
edge = GlooEdge(EdgeSpec(host, int(port), prefix, 1, side, connect_timeout_s=60.0))
buf = torch.zeros(int(size), dtype=torch.uint8)
edge.connect()
for _ in range(int(times)):
    started = time.monotonic()
    (edge.send if side == "prefill" else edge.recv)(buf, 20.0)
    print(time.monotonic() - started, flush=True)
edge.close()
"""


@dataclass(frozen=True)
class Sample:
    """One request, in seconds and bytes. `last` is its last chunk, which nothing can overlap; `early`: whether the
    first layers of the same tokens were sent before."""

    ttft_s: float
    alone_s: float
    handover_s: float
    bytes: int
    last_bytes: int
    early: bool
    link: float = 0.0  # bytes per second of a bare edge, right after the request


def bandwidth(num_bytes: int, cores: tuple[int, int], times: int = 12) -> float:
    """Bytes per second of a bare edge, the median of transfers of one size."""
    from baton.transfer.rendezvous import EdgeStore

    store = EdgeStore()
    ends = []
    for side, core in zip(("prefill", "decode"), cores, strict=True):
        where = [side, store.host, str(store.port), f"{store.nonce}/bench", str(num_bytes), str(times), str(core)]
        ends.append(subprocess.Popen([sys.executable, "-c", EDGE_END, *where], cwd=ROOT, stdout=subprocess.PIPE))
    took = [[float(line) for line in end.communicate(timeout=120)[0].split()] for end in ends]
    store.close()
    return num_bytes / statistics.median(took[0][2:])


class Bench:
    """A running cluster and its event logs."""

    def __init__(self, url: str, events: Path, seed: int = 0) -> None:
        self._http = httpx.Client(base_url=url, timeout=600.0)
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]
        self._events, self._random = events, random.Random(seed)

    def sample(self, length: int, alone_first: bool) -> Sample:
        prompts = [[self._random.randrange(300, 49_000) for _ in range(length)] for _ in range(2)]
        times: dict[int, float] = {}
        began = 0.0
        for max_tokens in (1, 32) if alone_first else (32, 1):
            if max_tokens > 1:
                began = time.monotonic()
            times[max_tokens] = self._ttft(prompts[max_tokens > 1], max_tokens)
            time.sleep(0.1)
        computed = self._since("prefill-0", "chunk_computed", began)
        sent = self._since("prefill-0", "chunk_sent", began)
        (first_step,) = self._since("decode-0", "decode_begin", began)
        name = first_step["sequence"]
        (end,) = (e["t"] for e in computed if e["last"] and e["sequence"] == name)
        mine = [e for e in sent if e["sequence"] == name]
        size, last = sum(e["bytes"] for e in mine), mine[-1]
        return Sample(times[32], times[1], first_step["t"] - end, size, last["bytes"], last["layers"][0] > 0)

    def _ttft(self, prompt: list[int], max_tokens: int) -> float:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        started, first = time.monotonic(), 0.0
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {") and not first:
                    first = time.monotonic() - started
        return first

    def _since(self, worker: str, kind: str, began: float) -> list[dict[str, Any]]:
        lines = (self._events / f"{worker}.events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [e for e in events if e["kind"] == kind and e["t"] >= began]


def measure(prompts: list[int], times: int) -> list[tuple[int, list[Sample]]]:
    with checkpoint("135m") as model, tempfile.TemporaryDirectory() as events:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
        with cluster("--model", str(model), environment={"BATON_EVENT_LOG_DIR": events}) as running:
            bench = Bench(running.url, Path(events))
            for length in prompts:
                bench.sample(length, True)  # not counted
            return [(n, [with_link(bench.sample(n, bool(i % 2))) for i in range(times)]) for n in prompts]


def with_link(sample: Sample) -> Sample:
    """Adds the bandwidth of the link, measured for each sample since it changes by half within minutes."""
    cores = sorted(os.sched_getaffinity(0))
    return replace(sample, link=bandwidth(sample.last_bytes, (cores[0], cores[-1])))


def rows(results: list[tuple[int, list[Sample]]]) -> Iterator[list[str]]:
    for length, samples in results:
        size, last = samples[0].bytes, statistics.median(s.last_bytes for s in samples)
        rate = statistics.median(s.link for s in samples)
        cost, bar = statistics.median(s.handover_s for s in samples), SHARE * last / rate + FIXED_S
        ttft, alone = (statistics.median(getattr(s, name) for s in samples) for name in ("ttft_s", "alone_s"))
        limit = 1.08 if length <= 512 else 1.05
        in_two = f"{sum(s.early for s in samples)} of {len(samples)}"
        sizes = [str(length), f"{size / 1e6:.1f} MB", f"{last / 1e6:.1f} MB", in_two, f"{rate / 1e9:.2f} GB/s"]
        costs = [f"{cost * 1e3:.1f} ms", f"{bar * 1e3:.1f} ms {_met(cost, bar)}"]
        ratio = [f"{ttft / alone:.3f}", f"{limit} {_met(ttft / alone, limit)}"]
        yield [*sizes, *costs, f"{ttft * 1e3:.0f} ms", f"{alone * 1e3:.0f} ms", *ratio]


def _met(value: float, bar: float) -> str:
    return "met" if value <= bar else "missed"


def main() -> None:
    options = parser(__doc__, "handover.md")
    options.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
    options.add_argument("--times", type=int, default=5)
    arguments = options.parse_args()
    names = [
        "prompt",
        "KV",
        "last chunk",
        "in two",
        "link",
        "hand-over",
        "bar",
        "TTFT",
        "prefill alone",
        "ratio",
        "bar",
    ]
    shown = table(names, rows(measure(arguments.prompts, arguments.times)))
    setting = (
        "135 M shape, bf16 where the processor has it; one prefill and one decode worker here, one core and\n"
        f"thread each; medians of {arguments.times}. Hand-over: from the end of prefill compute to the first decode\n"
        "step. Bars: at most 1.3 x (bytes of the last chunk / bandwidth of a bare edge) + 10 ms; TTFT at most 1.05 x\n"
        "that of prefill alone (1.08 at 512), where prefill alone is the same with `max_tokens` 1, in turns."
    )
    report(arguments.out, "Hand-over: what moving the KV costs", setting, shown)


if __name__ == "__main__":
    main()
