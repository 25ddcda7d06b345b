"""How the resident memory of each process develops under a mixed load, by kind of mapping.

    python benchmarks/resident_memory.py --minutes 30 --kv-memory-gib 0.25

One prefill and one decode worker, built-in model, CLIENTS clients in a closed loop: new random prompts of 50 to 1,500
tokens, 1 to 64 output tokens; some stream, some leave early, some request log-probabilities or JSON. A KV pool has no
pages before its blocks are used for the first time (decision 0030); before the first sample the load runs until both
workers have used all blocks, or for `--touch-minutes`. Then each process is sampled every minute from /proc/PID/smaps:
`kv` are anonymous mappings of at least half a tensor of the pool, `heap` that of malloc's main arena, `anonymous` all
other private memory, `files` mapped files, `shared` shared memory. The slope is that of a least-squares line over the
second half of the samples. Writes `benchmarks/results/resident-memory.md`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import cluster, parser, report, table
from launch.cluster_api import get_cluster

CLIENTS = 4
SAMPLE_S = 60.0
VOCABULARY = 4000
KINDS = ("kv", "heap", "anonymous", "files", "shared")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ (\d+) *(.*)$")
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


class Load:
    """Clients in a closed loop until `ended`; `sent` and `failures` count their requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.ended = threading.Event()
        self.sent: Counter[str] = Counter()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        source = Random(number)
        with httpx.Client(base_url=self._url, timeout=120) as http:
            while not self.ended.is_set():
                kind = source.choice(("plain", "plain", "stream", "leave", "logprobs", "json", "n"))
                try:
                    self._send(http, kind, self._body(source, kind))
                except httpx.HTTPError as error:
                    self.failures.append(f"{kind}: {error!r}")
                self.sent[kind] += 1

    @staticmethod
    def _body(source: Random, kind: str) -> dict[str, Any]:
        prompt = [source.randrange(300, VOCABULARY) for _ in range(source.randrange(50, 1500))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": source.randrange(1, 64), "seed": source.randrange(1000)}
        extra: dict[str, dict[str, Any]] = {
            "stream": {"stream": True},
            "leave": {"stream": True, "max_tokens": 200, "ignore_eos": True},
            "logprobs": {"logprobs": 2},
            "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
            "n": {"n": 2},
        }
        return body | extra.get(kind, {})

    def _send(self, http: httpx.Client, kind: str, body: dict[str, Any]) -> None:
        if not body.get("stream"):
            answer = http.post("/v1/completions", json=body)
            if answer.status_code != 200:
                self.failures.append(f"{kind}: {answer.text[:200]}")
            return
        with http.stream("POST", "/v1/completions", json=body) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                if kind == "leave" and count > 10:
                    return


def resident(pid: int, kv_bytes: int) -> dict[str, int]:
    """Returns the resident bytes of a process by kind of mapping."""
    found = dict.fromkeys(KINDS, 0)
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _MAPPING.match(line):
            rights, inode, name = match.groups()
            size = 0
            kind = "heap" if name == "[heap]" else "files" if inode != "0" else "anonymous"
            kind = "shared" if rights.endswith("s") else kind
        elif line.startswith("Size:"):
            size = int(line.split()[1]) << 10
            if kind == "anonymous" and size >= kv_bytes // 2:
                kind = "kv"
        elif line.startswith("Rss:"):
            found[kind] += int(line.split()[1]) << 10
    return found


def processes(url: str) -> dict[str, int]:
    """Returns the pid of each rank's process, and of the coordinator."""
    workers = get_cluster(url, timeout_s=30.0).workers
    found = {str(row["id"]): int(row["pids"][0]) for row in workers}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"coordinator" in command and any(word.endswith(url.rpartition(":")[2].encode()) for word in command):
            found["coordinator"] = int(entry)
    return found


def slope(samples: list[tuple[float, int]]) -> float:
    """Returns MiB a minute over the second half of the samples, (seconds, bytes) each."""
    half = samples[len(samples) // 2 :]
    line = statistics.linear_regression([s / 60 for s, _ in half], [b / (1 << 20) for _, b in half])
    return line.slope


def main() -> None:
    made = parser(__doc__, "resident-memory.md")
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--touch-minutes", type=float, default=10.0)
    made.add_argument("--kv-memory-gib", type=float, default=0.25)
    options = made.parse_args()
    samples: dict[str, list[tuple[float, dict[str, int]]]] = {}
    with cluster("--kv-memory-gib", str(options.kv_memory_gib)) as running, Load(running.url) as load:
        pids = processes(running.url)
        kv_bytes = round(options.kv_memory_gib * (1 << 30)) // 32
        began = time.monotonic()
        time.sleep(options.touch_minutes * 60)
        touched = {name: resident(pid, kv_bytes)["kv"] for name, pid in pids.items()}
        start = time.monotonic()
        while (now := time.monotonic() - start) <= options.minutes * 60:
            for name, pid in pids.items():
                samples.setdefault(name, []).append((now, resident(pid, kv_bytes)))
            print(f"{now:6.0f} s", *(f"{n} {sum(s[-1][1].values()) >> 20}" for n, s in samples.items()), flush=True)
            time.sleep(SAMPLE_S)
        rows_of = {str(row["id"]): row for row in get_cluster(running.url, timeout_s=30.0).workers}
    rows = []
    for name, taken in samples.items():
        for kind in (*KINDS, "all"):
            series = [(at, sum(found.values()) if kind == "all" else found[kind]) for at, found in taken]
            first, last = (f"{series[i][1] / (1 << 20):.1f}" for i in (0, -1))
            most = f"{max(b for _, b in series) / (1 << 20):.1f}"
            rows.append((name, kind, first, last, most, f"{slope(series):+.3f}"))
    computed = {name: row["prompt_tokens_computed"] for name, row in rows_of.items()}
    report(
        options.out,
        "Resident memory under a mixed load",
        table(("process", "mappings", "first MiB", "last MiB", "most MiB", "MiB a minute, second half"), rows),
        f"Requests: {dict(load.sent)}; failed: {len(load.failures)}. Prompt tokens computed: {json.dumps(computed)}. "
        f"KV resident before the first sample: { {n: b >> 20 for n, b in touched.items()} } MiB, after "
        f"{(start - began) / 60:.0f} minutes.",
    )


if __name__ == "__main__":
    main()
