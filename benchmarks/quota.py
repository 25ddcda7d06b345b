"""Workers that have a part of a core each, so that a worker and not the host is the limit, and their costs within it.
By control groups: root, version 1 or 2.

A group has the weight of WEIGHT other processes: with that of one, a worker that shared its core with other processes
had 0.19 of a core instead of 0.25, and never used up its quota (results/flip.md). What it does not use in one period it
may use in the next. Costs are processor time over the quota, hand-overs included, measured within it: a worker that is
stopped for most of each period reads its weights from memory again, not from a cache. That is as much for a step of
few rows as for one of many, so no factor makes costs within the quota of those that were measured without it.

Pools are small, and used once before anything is measured. On a virtual machine 4 KiB that are written for the
first time took 1 to 30 us of a worker's quota: for the KV of 900 tokens up to 34 ms, where receiving it takes about
20 ms (results/flip.md).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import kit
from launch.bench.client import ServerTarget, base_url, first_model
from launch.capacity.calibrate import calibrate
from launch.capacity.loads import ClosedLoop, LoadClient
from launch.cluster_api import Row
from sim.scale.costs import Calibration
from sim.scale.members import ClusterShape

QUOTA, PERIOD_US = 0.25, 20_000
"""Of a core, for each worker: four of them have half of two cores, the coordinator and the client the other half."""
WEIGHT = 8
"""Times that of another process on the same core."""
FLAGS = ("--model", "builtin", "--device", "cpu", "--draft", "none", "--exact", "--threads", "1")
FLAGS += ("--kv-memory-gib", "0.25")  # 52,000 tokens
TWO_OF_EACH = ("--prefill", "2", "--decode", "2")
GROUPS = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").is_dir() else Path("/sys/fs/cgroup")
_FILLER = """
import os, sys
import numpy
parent = os.getppid()
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
values = numpy.zeros(1 << 24, numpy.float32)
while os.getppid() == parent:
    values += 1.0
"""


def limit(pid: int, quota: float) -> Path:
    """Moves a process into a control group of its own; returns the group."""
    group, quota_us = GROUPS / f"baton-benchmark-{pid}", round(quota * PERIOD_US)
    group.mkdir()
    values: dict[str, object]
    if (group / "cpu.max").exists():
        values = {"cpu.max": f"{quota_us} {PERIOD_US}", "cpu.max.burst": quota_us, "cpu.weight": 100 * WEIGHT}
    else:
        values = {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": quota_us, "cpu.cfs_burst_us": quota_us}
        values["cpu.shares"] = 1024 * WEIGHT
    for name, value in values.items():
        (group / name).write_text(str(value))
    (group / "cgroup.procs").write_text(str(pid))
    return group


@contextlib.contextmanager
def quotas(rows: Iterable[Row], quota: float) -> Iterator[None]:
    """Gives each worker's process `quota` of a core."""
    made = dict[int, Path]()
    try:
        for pid in (pid for row in rows for pid in row["pids"]):
            made[pid] = limit(pid, quota)
        yield
    finally:
        for pid, group in made.items():
            with contextlib.suppress(OSError):
                (GROUPS / "cgroup.procs").write_text(str(pid))
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def filled() -> Iterator[list[int]]:
    """Keeps all cores busy with memory for as long as nothing else runs on them; yields the processes that do so. A
    step takes longer the more the other core computes, and the less the other workers leave of it in the caches: always
    the same with this."""
    fillers = [subprocess.Popen([sys.executable, "-c", _FILLER, str(core)]) for core in sorted(os.sched_getaffinity(0))]
    try:
        yield [filler.pid for filler in fillers]
    finally:
        for filler in fillers:
            filler.kill()
            filler.wait()


def page_faults(pid: int) -> int:
    """Returns how many pages of memory a process on this host has been given so far, also ahead of their use."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def use_pools(client: LoadClient) -> None:
    """Sends prompts until workers are given next to no pages of memory for them: every pool has been used once."""
    rows = client.rows()
    pids = [pid for row in rows for pid in row["pids"]]
    tokens = sum(int(row["blocks_total"]) * int(row["block_size"]) for row in rows if row["role"] == "prefill")
    round_of = ClosedLoop("first use", -(-tokens // 4 // 1024), 4 * len(rows), 1024, 2)
    for _ in range(20):
        before = sum(map(page_faults, pids))
        sample = client.measure(round_of)
        if (sum(map(page_faults, pids)) - before) * mmap.PAGESIZE < sample.prefill.kv_bytes / 20:
            return
    raise SystemExit("the KV pools still have memory that was never used")


def target_of(url: str) -> ServerTarget:
    base = base_url(url)
    return ServerTarget(base, first_model(base, ""), "", 300.0, {"return_token_ids": True})


def calibrated(quota: float) -> Calibration:
    """Returns the costs of workers that have `quota` of a core each, measured on two of each role: they share caches as
    the workers of the benchmarks do."""
    with filled(), kit.cluster(*FLAGS, *TWO_OF_EACH) as running:
        target = target_of(running.url)
        use_pools(LoadClient(running.url, target, 2))
        loads = LoadClient(running.url, target, 1, core_share=quota)
        with quotas(loads.rows(), quota):
            return calibrate(loads, f"{quota:g} of a core", shared_host=True, repeats=1, progress=_print)


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def shape(kind: Calibration, prefill: int, decode: int, max_workers: int = 0) -> ClusterShape:
    """Each worker has a core, as slow as its quota makes it, which its hand-overs share with its steps; the coordinator
    and the client have the one after those of `max_workers` workers."""
    workers = prefill + decode
    max_workers = max(max_workers, workers)
    cores = tuple((number,) for number in range(workers))
    return ClusterShape(kind, prefill, kind, decode, cores, max_workers + 1, (max_workers,))
