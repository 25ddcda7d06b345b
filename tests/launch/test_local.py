"""What `baton up` does with its members, without processes."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

from launch.console import Console
from launch.local import LocalCluster
from launch.members import Members, Programs
from launch.plan import BATCHES, COORDINATOR, make_plan
from launch.topology import parse_topology

DRAIN_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.stops = 1  # as `Signals` counts them

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Run:
    """A run of a process that ends with 0 so many seconds after it was requested to, or at a kill."""

    spec = SimpleNamespace(log="member.log")

    def __init__(self, clock: Clock, drain_s: float = 0.0) -> None:
        self.clock, self.drain_s = clock, drain_s
        self.killed = False
        self.signals = 0

    def terminate(self) -> None:
        self.signals += 1

    def kill(self) -> None:
        self.killed = True

    def poll(self) -> int | None:
        return -signal.SIGKILL if self.killed else 0 if self.clock.now >= self.drain_s else None


def cluster(where: Path, clock: Clock, **drain_s: float) -> LocalCluster:
    """A cluster whose members run and have joined, two workers of each role; they end `drain_s` after a stop."""
    document = {
        "model": "m",
        "nodes": [{"name": "a", "address": "127.0.0.1", "cores": 4}],
        "coordinator": {"node": "a"},
        "prefill": [{"node": "a", "base_port": 9000 + 10 * number} for number in range(2)],
        "decode": [{"node": "a", "base_port": 9100 + 10 * number} for number in range(2)],
        "batches": {"data_dir": "/data"},
    }
    plan = make_plan(parse_topology(document), "/m", "m")
    members = Members(plan, frozenset("a"), where, Programs(), start_timeout_s=900.0, drain_timeout_s=DRAIN_S)
    made = LocalCluster(members, Console())
    for member in made._all:
        member.child = Run(clock, drain_s.get(member.name.replace("-", "_"), 0.0))  # type: ignore[assignment]
        member.joined = True
    return made


def test_the_end_of_a_cluster_signals_no_worker_that_drains_again(tmp_path: Path) -> None:
    """On a host without the coordinator, for example while a roll waits for it. A second signal ends it at once."""
    made = cluster(tmp_path, clock := Clock())
    made._all = [member for member in made._all if member.name not in (COORDINATOR, BATCHES)]
    made._coordinator = made._batches = None
    made._workers[0].renew()
    assert made._stop(clock) == 0  # type: ignore[arg-type]
    assert [worker.child.signals for worker in made._workers] == [1, 1, 1, 1]  # type: ignore[union-attr]
