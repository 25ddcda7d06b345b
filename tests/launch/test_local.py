"""What `baton up` does with its members, without processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.core.errors import StartupError
from launch import local, supervisor
from launch.console import Console
from launch.local import AGENT_EXIT_S, STOP_GRACE_S, LocalCluster
from launch.members import Addresses, Members, Programs
from launch.plan import BATCHES, COORDINATOR, make_plan
from launch.topology import parse_topology
from sim.scale.planner import Size

DRAIN_S = 30.0
TICK_S = 0.2


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


def shown(captured: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Returns the printed lines without their times: the member and the text of each."""
    return [line.split(maxsplit=3)[2:] for line in captured.readouterr().out.splitlines()]


def test_each_worker_that_the_autoscaler_ends_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside `baton autoscale --flip`, one that started was ended without any: the size was 2 + 2 before and after
    another worker's change of role, and the law prints only changes."""
    made = cluster(tmp_path, Clock())
    made._workers[-1].joined = False
    roles = {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode"}
    made._autoscaler = SimpleNamespace(roles=roles)  # type: ignore[assignment]
    made._follow(Size(2, 2))
    assert [worker.name for worker in made._workers if worker.retired] == ["decode-1"]
    assert shown(capsys) == [["decode-1", "draining   2 of 3 decode workers are kept"]]
    made._workers[0].child = None
    made._follow(Size(0, 2))
    assert made._workers[0].left and not shown(capsys), "none ended here"


def test_the_autoscaler_ends_workers_that_are_not_ready_first(tmp_path: Path) -> None:
    """An operator drains the first one, and the law finds that the other one suffices: it is to be kept."""
    made = cluster(tmp_path, Clock())
    roles = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-1": "decode"}
    made._autoscaler = SimpleNamespace(roles=roles)  # type: ignore[assignment]
    made._follow(Size(2, 1))
    assert [worker.name for worker in made._workers if worker.retired] == ["decode-0"]


def test_a_batches_process_that_was_stopped_alone_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster(tmp_path, Clock())
    batches, started = made._batches, list[str]()
    assert batches is not None
    batches.child, batches.left, batches.joined = None, True, False
    monkeypatch.setattr(batches, "start", lambda note="": started.append(note))
    made._tick_batches(batches)
    assert started


def test_a_worker_that_left_with_its_coordinator_and_cannot_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process table that is full for a moment ended the whole cluster."""
    made = cluster(tmp_path, Clock())
    made._addresses = Addresses("http://127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    worker = made._workers[0]
    worker._policy.joined(0.0)
    worker.child, worker.left = None, True
    made._restart_left_until = time.monotonic() + 60.0

    def full(*_: object) -> None:
        raise StartupError("cannot start: Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "Child", full)
    for member in made._all:
        monkeypatch.setattr(member, "tick", lambda: None)
    made._tick()
    assert worker.restart_at is not None and "retrying" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batches_s", "worker_s", "ended_s", "late"),
    [
        (25.0, 0.0, 25.0, []),
        (60.0, 0.0, DRAIN_S + STOP_GRACE_S, [BATCHES]),
        (0.0, 60.0, 1.0 + AGENT_EXIT_S, ["decode-0"]),
        (25.0, 60.0, 25.0, ["decode-0"]),
    ],
)
def test_after_the_coordinator_batches_have_their_whole_time_and_workers_ten_seconds(
    batches_s: float,
    worker_s: float,
    ended_s: float,
    late: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The batches process was killed 11 s into a drain of 35 s: the coordinator had ended after one."""
    clock = Clock()
    monkeypatch.setattr(local, "time", clock)
    made = cluster(tmp_path, clock, coordinator=1.0, batches=batches_s, decode_0=worker_s)
    assert made._stop(clock) == bool(late)  # type: ignore[arg-type]
    assert clock.now == pytest.approx(ended_s, abs=2 * TICK_S)
    assert [name for name, text in shown(capsys) if "still running" in text] == late


def test_the_end_of_a_cluster_signals_no_worker_that_drains_again(tmp_path: Path) -> None:
    """On a host without the coordinator, for example while a roll waits for it. A second signal ends it at once."""
    made = cluster(tmp_path, clock := Clock())
    made._all = [member for member in made._all if member.name not in (COORDINATOR, BATCHES)]
    made._coordinator = made._batches = None
    made._workers[0].renew()
    assert made._stop(clock) == 0  # type: ignore[arg-type]
    assert [worker.child.signals for worker in made._workers] == [1, 1, 1, 1]  # type: ignore[union-attr]
