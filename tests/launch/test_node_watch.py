"""What hangs on a node when its job is over on another is killed, and nothing else is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from launch import node_watch, rendezvous
from launch.node_watch import NodeWatch
from tests.support.fake_store import FakeStore, Gone

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(node_watch, "GRACE_S", 0.3)


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped, as a rank that hangs may be."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.wait(10)


def refuse() -> FakeStore:
    raise RuntimeError("nobody listens")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("connect", "why"),
    [
        (lambda: FakeStore("baton/left-2"), "NODE_RANK 2 had left the job"),
        (Gone, "the store of the job, kept by NODE_RANK 0, was gone"),
        (refuse, "the store of the job, kept by NODE_RANK 0, was gone"),
    ],
)
def test_a_rank_that_hangs_when_its_job_is_over_is_killed_and_told_of(
    connect: Callable[[], FakeStore], why: str, rank: subprocess.Popen[bytes]
) -> None:
    said: list[str] = []
    watch = NodeWatch(connect, 1, 3, lambda: [rank.pid] if rank.poll() is None else [], said.append)
    watch.start()
    assert rank.wait(30) == -signal.SIGKILL
    until(lambda: said)
    assert said == [f"0.3 s ago {why}, and ranks still ran here: killed pid {rank.pid}"]
    assert why in watch.reason(rank.pid) and watch.reason(rank.pid + 1) == ""


def test_ranks_that_end_by_themselves_are_not_spoken_of(rank: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    left = [rank.pid] * 3

    def ranks() -> list[int]:
        return [left.pop()] if left else []

    watch = NodeWatch(lambda: FakeStore("baton/left-0"), 1, 2, ranks, said.append)
    watch.start()
    until(lambda: not left)
    time.sleep(0.5)  # more than the grace
    watch.leave()
    assert (watch.killed, said, rank.poll()) == (frozenset(), [], None)


def test_nothing_is_killed_while_all_are_there_and_whoever_leaves_says_so(rank: subprocess.Popen[bytes]) -> None:
    store, said = FakeStore("baton/left-1"), list[str]()  # its own mark, of an earlier round
    watch = NodeWatch(lambda: store, 1, 3, lambda: [rank.pid], said.append)
    watch.start()
    until(lambda: store.looks > 60)
    assert watch.over == ""
    store = watch._store = FakeStore()
    watch.leave()
    assert store.check(["baton/left-1"]) and not watch.killed and rank.poll() is None and said == []


def test_whoever_comes_back_to_a_job_that_has_begun_says_so_and_waits_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would take the marks of its earlier life for a meeting, and start a rank that nobody expects."""
    begun = FakeStore("baton/node-0", "baton/node-1", "baton/ready-0", "baton/ready-1", "baton/begun-1")
    fresh = FakeStore("baton/node-0", "baton/ready-0")
    stores, naps = iter([begun, fresh]), iter(range(3))

    def nap(_: float) -> None:
        if next(naps, None) is None:  # node 0 has ended it
            monkeypatch.setattr(begun, "check", Gone().check)

    monkeypatch.setattr(rendezvous, "await_address", lambda *_: None)
    monkeypatch.setattr(rendezvous, "_join", lambda *_: next(stores))
    monkeypatch.setattr(time, "sleep", nap)
    store, _ = rendezvous.open_store("127.0.0.1", 9, 1, 2)
    assert store is fresh and fresh.check(["baton/begun-1"])
    assert FakeStore.check(begun, ["baton/left-1"])
    stores = iter([FakeStore("baton/begun-1")])
    monkeypatch.setattr(rendezvous, "MEET_TIMEOUT_S", 0.0)
    with pytest.raises(OSError, match="in vain for node 0 of this job to end what it began before this node came"):
        rendezvous.open_store("127.0.0.1", 9, 1, 2)
