"""A roll in which a process does not do its part, without processes: what ends it, with which words, and what it waits
for instead."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.console import Console
from launch.members import Members, Programs
from launch.plan import BATCHES, COORDINATOR, make_plan
from launch.roll import DONE, FAILED, Roll
from launch.run_directory import ROLL, reading
from launch.topology import parse_topology

TICK_S = 0.2
START_S = 900.0


class Run:
    """A run of a process; the coordinator's ends with `code` on a signal, and never if that is None."""

    spec = SimpleNamespace(log="coordinator.log")

    def __init__(self, code: int | None = 0) -> None:
        self.code, self.returncode, self.signals = code, None, list[int]()

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = self.code

    def watch(self, now: float) -> int | None:
        return self.returncode

    poll = lambda self: self.returncode  # noqa: E731

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL


@dataclass
class Member:
    """What a roll sees of a `Supervised`."""

    name: str
    child: Run | None = field(default_factory=Run)
    joined: bool = True
    left: bool = False
    renewed: bool = False
    drains: bool = False

    def renew(self) -> None:
        self.renewed = True


class Cluster:
    """Two workers, batches and a coordinator, which all do their part at each tick, except for those that `hang` while
    they drain and those that do not `join`. `now` is the time."""

    def __init__(self, hang: str = "", absent: str = "") -> None:
        self.hang, self.absent, self.now = hang, absent, 0.0
        self.workers = {name: Member(name) for name in ("prefill-0", "decode-0")}
        self.batches, self.coordinator = Member(BATCHES), Member(COORDINATOR)
        self.restored: list[Run] = []
        self.draining: set[str] = set()

    def groups(self) -> dict[str, list[list[Member]]]:
        return {name.partition("-")[0]: [[worker]] for name, worker in self.workers.items()}

    def drain_timeout_s(self, name: str) -> float:
        return 100.0 if name == "prefill-0" else 30.0

    def drains(self, name: str) -> bool:
        return name in self.draining

    def succeed_coordinator(self) -> Run | None:
        old = self.coordinator.child
        self.coordinator.child, self.coordinator.joined = Run(), False
        return old

    def restore_coordinator(self, child: Run) -> None:
        self.restored.append(child)

    def members(self) -> list[Member]:
        return [*self.workers.values(), self.batches, self.coordinator]

    def live(self) -> None:
        self.now += TICK_S
        for member in self.members():
            if member.renewed and member.name != self.hang:
                member.renewed, member.child, member.joined = False, Run(), False
            elif member.child is not None and member.name != self.absent:
                member.joined = True


@dataclass
class Rolling:
    cluster: Cluster
    file: Path
    roll: Roll

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert not self.roll.ended and self.cluster.now < 10 * START_S
            self.cluster.live()
            self.roll.tick()

    def result(self) -> dict[str, Any]:
        self.until(lambda: self.roll.ended)
        return reading(self.file)


def rolling(where: Path, cluster: Cluster) -> Rolling:
    clock = lambda: cluster.now  # noqa: E731
    roll = Roll(cluster, where, Console(), start_timeout_s=START_S, clock=clock)  # type: ignore[arg-type]
    return Rolling(cluster, where / ROLL, roll)


def test_a_roll_replaces_every_process_once(tmp_path: Path) -> None:
    cluster = Cluster()
    before = {member.name: member.child for member in cluster.members()}
    result = rolling(tmp_path, cluster).result()
    assert (result["state"], result["replaced"]) == (DONE, [*cluster.workers, BATCHES, COORDINATOR])
    assert not [member.name for member in cluster.members() if member.child is before[member.name]]
    old = before[COORDINATOR]
    assert old is not None and old.signals == [signal.SIGUSR1] and not cluster.restored


@pytest.mark.parametrize(
    ("hang", "absent", "replaced", "error"),
    [
        ("prefill-0", "", 0, "prefill-0 has not drained within 115 s; it starts again once it has"),
        ("", "prefill-0", 0, "prefill-0 has not come back within 900 s"),
        ("decode-0", "", 1, "decode-0 has not drained within 45 s; it starts again once it has"),
        (BATCHES, "", 2, "batches has not drained within 45 s; it starts again once it has"),
        ("", COORDINATOR, 3, "the new coordinator has not started within 900 s"),
    ],
)
def test_a_process_that_is_late_ends_the_roll_and_later_ones_keep_running(
    hang: str, absent: str, replaced: int, error: str, tmp_path: Path
) -> None:
    cluster = Cluster(hang, absent)
    order = [member.name for member in cluster.members()]
    before = [member.child for member in cluster.members()]
    result = rolling(tmp_path, cluster).result()
    assert (result["state"], result["replaced"], result["error"]) == (FAILED, order[:replaced], error)
    after = [member.child for member in cluster.members()]
    assert after[replaced + 1 :] == before[replaced + 1 :] and not any(
        m.renewed for m in cluster.members()[replaced + 1 :]
    )
    assert cluster.restored == before[-1:] * (absent == COORDINATOR)


def test_a_worker_whose_coordinator_was_restarted_is_waited_for(tmp_path: Path) -> None:
    """The roll ended with "decode-0 is not running" before it had joined again."""
    cluster = Cluster(absent="decode-0")
    cluster.workers["decode-0"].joined = False
    made = rolling(tmp_path, cluster)
    made.until(lambda: reading(made.file).get("now") == "decode-0")
    assert reading(made.file)["doing"] == "waiting until it has joined"
    made.until(lambda: cluster.now > START_S / 2)
    cluster.absent = ""
    assert made.result()["state"] == DONE

    cluster = Cluster(absent="decode-0")
    cluster.workers["decode-0"].joined = False
    result = rolling(tmp_path, cluster).result()
    assert (result["replaced"], result["error"]) == (["prefill-0"], "decode-0 has not joined within 900 s")


def test_a_worker_that_is_drained_while_a_roll_waits_for_it_is_left_out(tmp_path: Path) -> None:
    cluster = Cluster(absent="decode-0")
    worker = cluster.workers["decode-0"]
    worker.joined = False
    made = rolling(tmp_path, cluster)
    made.until(lambda: cluster.now > 5.0)
    worker.child, worker.left = None, True
    result = made.result()
    assert (result["state"], result["replaced"]) == (DONE, ["prefill-0", BATCHES, COORDINATOR])


@pytest.mark.parametrize("stays", [False, True])
def test_a_worker_that_drains_is_not_signalled_again(stays: bool, tmp_path: Path) -> None:
    """A second signal ends it at once. It leaves, or a flip has drained it and it joins again."""
    cluster = Cluster()
    cluster.draining = {"decode-0"}
    worker = cluster.workers["decode-0"]
    made = rolling(tmp_path, cluster)
    made.until(lambda: reading(made.file).get("now") == "decode-0" and cluster.now > 20.0)
    assert not worker.renewed
    cluster.draining.clear()
    if not stays:
        worker.child, worker.joined, worker.left = None, False, True
    replaced = ["prefill-0", *["decode-0"] * stays, BATCHES, COORDINATOR]
    result = made.result()
    assert (result["state"], result["replaced"]) == (DONE, replaced)


def test_a_worker_that_drains_for_an_earlier_roll_is_replaced_once_it_has_drained(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.draining, cluster.workers["decode-0"].drains = {"decode-0"}, True
    assert rolling(tmp_path, cluster).result()["state"] == DONE
    assert "decode-0" in reading(tmp_path / ROLL)["replaced"]


def test_a_coordinator_between_two_runs_is_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(absent=COORDINATOR)
    cluster.coordinator.child, cluster.coordinator.joined = None, False
    made = rolling(tmp_path, cluster)
    made.until(lambda: reading(made.file).get("now") == COORDINATOR)
    made.until(lambda: cluster.now > 60.0)
    assert not made.roll.ended
    cluster.coordinator.child, cluster.absent = Run(), ""
    assert made.result()["state"] == DONE


def handing_over(where: Path, old: Run) -> Rolling:
    """A roll whose new coordinator has not started yet."""
    cluster = Cluster(absent=COORDINATOR)
    cluster.coordinator.child = old
    made = rolling(where, cluster)
    made.until(lambda: cluster.coordinator.child is not old)
    return made


def test_a_new_coordinator_that_ends_at_its_start_leaves_the_old_one(tmp_path: Path) -> None:
    made = handing_over(tmp_path, old := Run())
    made.cluster.coordinator.child = None
    result = made.result()
    assert result["error"] == "the new coordinator ended at its start; its log is coordinator.log"
    assert made.cluster.restored == [old] and not old.signals


def test_a_cluster_that_ends_before_the_new_coordinator_has_started_keeps_the_old_one(tmp_path: Path) -> None:
    made = handing_over(tmp_path, old := Run())
    made.roll.close()
    assert made.cluster.restored == [old] and old.returncode is None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (1, "the old coordinator ended before its requests did, exit code 1; its log is coordinator.log"),
        (None, "the old coordinator was killed: it has not ended within 45 s"),
    ],
)
def test_an_old_coordinator_that_does_not_end_well_is_named(code: int | None, error: str, tmp_path: Path) -> None:
    made = handing_over(tmp_path, old := Run(code))
    made.cluster.absent = ""
    assert made.result()["error"] == error
    assert old.returncode is not None and not made.cluster.restored, "one coordinator is left, the new one"


def test_a_member_may_drain_for_its_own_time_limit_or_the_longer_one_of_the_coordinator(tmp_path: Path) -> None:
    """A worker that drained for 20 s ended the roll of a cluster with --drain-timeout-s 3."""
    document = {
        "model": "m",
        "nodes": [{"name": "a", "address": "127.0.0.1", "cores": 2}],
        "coordinator": {"node": "a"},
        "prefill": [{"node": "a", "base_port": 9000, "drain_timeout_s": 100.0}],
        "decode": [{"node": "a", "base_port": 9010, "drain_timeout_s": 1.0}],
        "batches": {"data_dir": "/data"},
    }
    plan = make_plan(parse_topology(document), "/m", "m")
    members = Members(plan, frozenset("a"), tmp_path, Programs(), start_timeout_s=START_S, drain_timeout_s=3.0)
    limits = {name: members.drain_timeout_of(name) for name in ("prefill-0", "decode-0", BATCHES, COORDINATOR)}
    assert limits == {"prefill-0": 100.0, "decode-0": 3.0, BATCHES: 30.0, COORDINATOR: 3.0}
