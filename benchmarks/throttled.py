"""Slows down one of two prefill workers: what an operator sees of it, and how soon.

    python benchmarks/throttled.py            2 prefill workers and 1 decode worker, built-in model

Clients send new random prompts and request 2 tokens each. After a while prefill-0 runs for only a quarter of the time
(SIGSTOP and SIGCONT, 25 ms in every 100). Shown before and after, over WINDOW_S each: `baton ps --watch`, the query of
the dashboard's panel "Time of a step" over two scrapes, and the prefill stage in the log lines of ended requests. Found
means that the throttled worker's number is at least twice that of the other worker, and was not before. Writes
`benchmarks/results/throttled.md`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import BATON, ROOT, cluster, parser, report, table

WINDOW_S = 15.0
PROMPT_TOKENS = 1500
SLOWED = "prefill-0"
_SAMPLE = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LINE = re.compile(r"(prefill-\d) to decode-0; .*?prefill (\d+) ms")


class Slowed:
    """While the context is open, the processes run for only 25 ms in every 100."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._ended = pids, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.075), (signal.SIGCONT, 0.025)):
                for pid in self._pids:
                    os.kill(pid, number)
                time.sleep(seconds)


def clients(url: str, count: int, ended: threading.Event, failures: list[str]) -> list[threading.Thread]:
    def ask(number: int) -> None:
        source = Random(number)
        with httpx.Client(timeout=60) as http:
            while not ended.is_set():
                prompt = [source.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
                answer = http.post(url + "/v1/completions", json={"prompt": prompt, "max_tokens": 2})
                if answer.status_code != 200:
                    failures.append(answer.text[:200])

    return [threading.Thread(target=ask, args=(number,)) for number in range(count)]


def scrape(url: str) -> dict[tuple[str, str], float]:
    text = httpx.get(url + "/metrics", timeout=10).text
    return {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(text)}


def step_ms(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> dict[str, float]:
    """rate(baton_worker_step_seconds_total) / rate(baton_worker_steps_total), by prefill worker."""
    found = {}
    for name, labels in after:
        if name == "baton_worker_steps_total" and (worker := re.search(r'worker="(prefill-\d)"', labels)):
            grown = [
                after[key] - before.get(key, 0.0)
                for key in (("baton_worker_step_seconds_total", labels), (name, labels))
            ]
            found[worker[1]] = grown[0] / grown[1] * 1e3 if grown[1] else 0.0
    return found


def prefill_ms(log: str) -> dict[str, float]:
    """The median of the stage `prefill` in the log's lines, by worker."""
    found: dict[str, list[int]] = {}
    for worker, milliseconds in _LINE.findall(log):
        found.setdefault(worker, []).append(int(milliseconds))
    return {worker: statistics.median(values) for worker, values in sorted(found.items())}


def window(url: str, log: Path) -> tuple[str, dict[str, float], dict[str, float], str]:
    """`baton ps --watch` at the end of a window, time of a step, stage in the log, and one line of each worker."""
    before, from_byte = scrape(url), log.stat().st_size
    command = [*BATON, "ps", "--watch", str(WINDOW_S), url]
    watching = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "150"}
    )
    time.sleep(WINDOW_S + 2.0)
    watching.send_signal(signal.SIGINT)
    shown = watching.communicate(timeout=30)[0].strip()
    lines = log.read_bytes()[from_byte:].decode(errors="replace")
    last = {worker: line for line in lines.splitlines() if (worker := (_LINE.search(line) or [None, None])[1])}
    return shown, step_ms(before, scrape(url)), prefill_ms(lines), "\n".join(last[worker] for worker in sorted(last))


def found(before: dict[str, float], after: dict[str, float]) -> bool:
    """Whether the throttled worker stands out, and did not before."""
    ratio = [values[SLOWED] / max(v for w, v in values.items() if w != SLOWED) for values in (before, after)]
    return ratio[0] < 2 <= ratio[1]


def main() -> None:
    options = parser(__doc__, "throttled.md")
    options.add_argument("--clients", type=int, default=3)
    arguments = options.parse_args()
    failures: list[str] = []
    with cluster("builtin", "--prefill", "2") as running:
        url, log = running.url, running.run_dir / "coordinator.log"
        rows: list[dict[str, Any]] = httpx.get(url + "/workers").json()["workers"]
        pids = next(row["pids"] for row in rows if row["id"] == SLOWED)
        ended = threading.Event()
        asking = clients(url, arguments.clients, ended, failures)
        for thread in asking:
            thread.start()
        time.sleep(3.0)
        before = window(url, log)
        with Slowed(pids):
            after = window(url, log)
        ended.set()
        for thread in asking:
            thread.join()
        states = {row["id"]: row["state"] for row in httpx.get(url + "/workers").json()["workers"]}
    about = (
        f"{arguments.clients} clients, prompts of {PROMPT_TOKENS} tokens, windows of {WINDOW_S:g} s;"
        f" {len(failures)} requests failed; states afterwards: {json.dumps(states)}."
    )
    seen = []
    for name, *each in (
        ("dashboard: time of a step (`ps --watch`: step ms)", before[1], after[1]),
        ("log: stage `prefill`, median", before[2], after[2]),
    ):
        shown = [", ".join(f"{worker} {value:.1f}" for worker, value in sorted(times.items())) for times in each]
        seen.append([name, *shown, "yes" if found(*each) else "no"])
    parts = [table(("seen in", "before, ms", "throttled, ms", "found"), seen)]
    for title, (screen, _, _, lines) in (("Before", before), ("Throttled", after)):
        parts.append(f"{title}, `baton ps --watch {WINDOW_S:g}`, and the log's last line of each worker:")
        parts.append(f"```\n{screen}\n\n{lines}\n```")
    report(arguments.out, "A prefill worker that runs for a quarter of the time", *parts, about=about)


if __name__ == "__main__":
    main()
