"""What hangs on a node when its job is over on another is killed, and nothing else is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from launch import node_watch, rendezvous
from launch.bounded_store import BoundedStore
from launch.node_watch import NodeWatch
from tests.support.fake_store import FakeStore, Gone, Silent

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(node_watch, "GRACE_S", 0.3)
    monkeypatch.setattr(node_watch, "SILENCE_S", 0.5)


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


def watch_of(
    connect: Callable[[], FakeStore], rank: int, nodes: int, ranks: Callable[[], list[int]], said: list[str]
) -> NodeWatch:
    return NodeWatch(lambda: BoundedStore(connect(), node_watch.SILENCE_S), rank, nodes, ranks, said.append)


@pytest.mark.parametrize(
    ("connect", "why"),
    [
        (lambda: FakeStore("baton/left-2"), "NODE_RANK 2 had left the job"),
        (lambda: FakeStore("baton/alive-0"), "the agent of NODE_RANK 0 had been silent for 0.5 s"),
        (Gone, "the store of the job, kept by NODE_RANK 0, was gone"),
        (Silent, "the store of the job, kept by NODE_RANK 0, was gone"),
        (refuse, "the store of the job, kept by NODE_RANK 0, was gone"),
    ],
)
def test_a_rank_that_hangs_when_its_job_is_over_is_killed_and_told_of(
    connect: Callable[[], FakeStore], why: str, rank: subprocess.Popen[bytes]
) -> None:
    said: list[str] = []
    watch = watch_of(connect, 1, 3, lambda: [rank.pid] if rank.poll() is None else [], said)
    watch.start()
    assert rank.wait(30) == -signal.SIGKILL
    until(lambda: said)
    assert said == [f"0.3 s ago {why}, and ranks still ran here: killed pid {rank.pid}"]
    assert why in watch.reason(rank.pid) and watch.reason(rank.pid + 1) == ""


def test_ranks_that_end_by_themselves_are_not_spoken_of() -> None:
    """They have ended when it looks, or before: then the agent ends, too."""
    for agent_ends in (False, True):
        said: list[str] = []
        watch = watch_of(lambda: FakeStore("baton/left-0"), 1, 2, list, said)
        watch.start()
        if agent_ends:
            watch.leave()
        watch._thread.join(30)
        assert (watch.killed, said) == (frozenset(), [])


class Telling(FakeStore):
    """The other nodes' agents say each time something new."""

    def get(self, key: str, /) -> bytes:
        return str(self.looks).encode()


def test_nothing_is_killed_while_all_are_there_and_whoever_leaves_says_so(rank: subprocess.Popen[bytes]) -> None:
    store, said = Telling("baton/left-1", "baton/alive-0", "baton/alive-2"), list[str]()  # left: of an earlier round
    watch = watch_of(lambda: store, 1, 3, lambda: [rank.pid], said)
    watch.start()
    time.sleep(2 * node_watch.SILENCE_S)
    until(lambda: int(store.marks["baton/alive-1"]) > 3)
    assert watch.over == ""
    del store.marks["baton/left-1"]
    watch.leave()
    assert "baton/left-1" in store.marks and not watch.killed and rank.poll() is None and said == []


def test_who_cannot_say_that_it_leaves_says_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "LEAVE_S", 0.1)
    said: list[str] = []
    watch = NodeWatch(lambda: BoundedStore(Silent(), 30.0), 1, 2, list, said.append)
    watch.start()
    until(lambda: watch._store is not None)
    watch.leave()
    assert said == ["the other nodes of this job were not told that this one has left: no answer in 0.1 s"]


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

    monkeypatch.setattr(rendezvous, "STILL_S", 0.0)
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


def test_a_second_agent_of_a_node_that_lives_is_refused_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Telling("baton/begun-1", "baton/alive-1")
    monkeypatch.setattr(rendezvous, "await_address", lambda *_: None)
    monkeypatch.setattr(rendezvous, "_join", lambda *_: store)
    with pytest.raises(OSError, match="NODE_RANK 1 of this job runs already: end its agent first"):
        rendezvous.open_store("127.0.0.1", 9, 1, 2)
    assert "baton/left-1" not in store.marks


def test_a_store_that_does_not_answer_is_given_up() -> None:
    store = BoundedStore(Silent(), 0.1)
    for _ in range(2):  # the second at once: the connection is still busy
        with pytest.raises(RuntimeError, match=r"store (does|has) not answer"):
            store.check(["x"])
    assert BoundedStore(FakeStore("x"), 5.0).read("y") == ""
