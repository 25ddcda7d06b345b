"""The cost of the consistency check of an idle worker: its time on the event loop, by the number of KV blocks.

    python benchmarks/idle_check.py [--blocks 50000 1000000]

A prefill and a decode scheduler without sequences, 80 % of their blocks cached. "Totals" is `check_idle()`, "every
block" is `check()`, which tests run. Processor time of the thread, the median of 5. The coordinator's check covers no
blocks: it is measured with 1,000 workers. Prints the content of `benchmarks/results/idle-check.md`, where a column was
added for the commit before `check_idle()`, when an idle worker ran `check()`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kit import commit, machine
from coordinator.policy.requests import Requests
from coordinator.policy.workers import WorkerTable
from tests.support.builders import add_worker, fill_cache, make_decode, make_prefill

WORKERS = 1000


def median_ms(call: Callable[[], None]) -> float:
    took = []
    for _ in range(5):
        began = time.thread_time()
        call()
        took.append((time.thread_time() - began) * 1e3)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[50_000, 1_000_000])
    wanted: list[int] = parser.parse_args().blocks
    command = " ".join(["python", "benchmarks/idle_check.py", *sys.argv[1:]])
    today = datetime.date.today().isoformat()
    lines = [
        "# The check of an idle worker",
        "",
        f"{machine()}. Commit {commit()}, {today}. Milliseconds of processor time on the event loop, medians of 5.",
        "",
        f"    {command}",
        "",
        "| scheduler | blocks, 80 % cached | every block | totals |",
        "|---|---|---|---|",
    ]
    for blocks in wanted:
        for role, scheduler in (("prefill", make_prefill(blocks)), ("decode", make_decode(blocks))):
            fill_cache(scheduler, 0.8)
            whole, totals = median_ms(scheduler.check), median_ms(scheduler.check_idle)
            lines.append(f"| {role} | {blocks:,} | {whole:.1f} | {totals:.4f} |")
    table = WorkerTable(3.0)
    for number in range(WORKERS):
        add_worker(table, f"{'pd'[number % 2]}{number}")
    requests = Requests(table, 1024, 1 << 20)
    took = f"{median_ms(requests.check):.2f} ms with {WORKERS:,} workers and no request"
    lines += ["", f"The coordinator's check, which it makes as it becomes idle, takes {took}."]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
