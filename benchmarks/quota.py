"""Workers that have a part of a core each, so that a worker and not the host is the limit, and their costs within it.
By control groups: root, version 1 or 2.

Workers did less within a quota than their processor time divided by it promised (results/flip.md), so their costs are
measured there, as the seconds that pass.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import kit
from launch.bench.client import ServerTarget, base_url, first_model
from launch.capacity.calibrate import calibrate
from launch.capacity.loads import LoadClient
from launch.cluster_api import Row, get_cluster
from sim.scale.costs import Calibration

QUOTA, PERIOD_US = 0.25, 20_000
"""Of a core, for each worker: four of them have half of two cores, the coordinator and the client the other half."""
FLAGS = ("--model", "builtin", "--device", "cpu", "--draft", "none", "--exact", "--threads", "1")
GROUPS = Path("/sys/fs/cgroup/cpu") if Path("/sys/fs/cgroup/cpu").is_dir() else Path("/sys/fs/cgroup")


def limit(pid: int, quota: float) -> Path:
    """Moves a process into a control group of its own; returns the group."""
    group, quota_us = GROUPS / f"baton-benchmark-{pid}", round(quota * PERIOD_US)
    group.mkdir()
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
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


def target_of(url: str) -> ServerTarget:
    base = base_url(url)
    return ServerTarget(base, first_model(base, ""), "", 300.0, {"return_token_ids": True})


def calibrated(quota: float) -> Calibration:
    """Returns the costs of workers that have `quota` of a core each, of one of either role. A load is applied once: it
    takes as much longer as the quota is smaller. What a hand-over costs its prefill worker is not among its steps."""
    with kit.cluster(*FLAGS, "--prefill", "1", "--decode", "1") as running:
        loads = LoadClient(running.url, target_of(running.url), 1)
        with quotas(get_cluster(running.url).workers, quota):
            return calibrate(
                loads,
                f"{quota:g} of a core",
                shared_host=False,
                repeats=1,
                progress=lambda line: print(line, file=sys.stderr),
            )
