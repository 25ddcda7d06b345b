"""Agents that wait for each other: they say for whom, end at a signal, and give up in time."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import rendezvous
from launch.rendezvous import await_address, await_nodes
from tests.support.fake_store import FakeStore, Gone
from tests.support.topologies import free_ports


def test_an_address_is_awaited_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    (port,) = free_ports(1)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        naps: list[float] = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 3:
                listener.listen()

        monkeypatch.setattr(time, "sleep", nap)
        await_address("127.0.0.1", port, time.monotonic() + 600, said.append)
    (line,) = said
    assert len(naps) == 3 and f"127.0.0.1 port {port} " in line and line.endswith("Connection refused")


def test_a_connection_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Itself(socket.socket):
        def getpeername(self) -> object:
            return self.getsockname()

    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: Itself())
    with pytest.raises(OSError, match=r"in vain for node 0 .* at 127.0.0.1 port 9 .*: nobody listens"):
        await_address("127.0.0.1", 9, time.monotonic(), print)


def test_nodes_are_awaited_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = FakeStore("baton/ready-1", "baton/ready-2"), list[str]()
    missing = iter([2, 1])
    monkeypatch.setattr(time, "sleep", lambda _: store.set(f"baton/node-{next(missing)}", "here"))
    await_nodes(store, 0, 3, time.monotonic() + 600, said.append)
    assert said == [f"waiting up to 600 s for NODE_RANK {whom} of this job of 3 nodes" for whom in ("1, 2", "1")]
    assert store.looks == 6 + 3
    with pytest.raises(OSError, match=r"in vain for NODE_RANK 1, 3 of this job of 4 nodes"):
        await_nodes(FakeStore("baton/node-2"), 0, 4, time.monotonic(), said.append)


def test_a_node_that_came_and_left_is_awaited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes 1 and 2 have come; 2 needs a nap to see it, 1 is no longer there."""
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.0)
    store, said = FakeStore("baton/node-1", "baton/node-2"), list[str]()
    naps = iter([2, 1])
    monkeypatch.setattr(time, "sleep", lambda _: store.set(f"baton/ready-{next(naps)}", "here"))
    await_nodes(store, 0, 3, time.monotonic() + 600, said.append)
    left = "which came and then left or stood still: start it again if it ended"
    assert said == [f"waiting up to 600 s for NODE_RANK {who} of this job of 3 nodes, {left}" for who in ("1, 2", "1")]
    with pytest.raises(OSError, match=r"in vain for NODE_RANK 1 of this job of 2 nodes, which came and then left"):
        await_nodes(FakeStore("baton/node-1"), 0, 2, time.monotonic(), said.append)


def test_nodes_that_all_wait_are_not_said_to_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = FakeStore("baton/node-1"), list[str]()
    monkeypatch.setattr(time, "sleep", lambda _: store.set("baton/ready-1", "here"))
    await_nodes(store, 0, 2, time.monotonic() + 600, said.append)
    assert said == [] and store.looks == 2 + 2 + 1


def agent(rank: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    """One node's agent of a job of three nodes."""
    flags = f"--nnodes 3 --node-rank {rank} --master-addr 127.0.0.1 --master-port {port} -m no_such_module"
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "launch.agent", *flags.split()], stdout=out, stderr=out)


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in {log.read_text()!r}"
        time.sleep(0.05)


def test_agents_that_wait_for_others_end_at_one_signal(tmp_path: Path) -> None:
    """Node 1 waits for node 0, then both for node 2, which never comes."""
    (port,) = free_ports(1)
    logs = [tmp_path / "0", tmp_path / "1"]
    agents = {1: agent(1, port, logs[1])}
    try:
        wait_for(f"for node 0 of this job at 127.0.0.1 port {port} ", logs[1])
        agents[0] = agent(0, port, logs[0])
        for log in logs:
            wait_for("for NODE_RANK 2 of this job of 3 nodes", log)
        for one, number in ((agents[1], signal.SIGTERM), (agents[0], signal.SIGINT)):
            one.send_signal(number)
            assert one.wait(10) == 0, [log.read_text() for log in logs]
        assert len(logs[1].read_text().splitlines()) == 2, logs[1].read_text()  # and nothing of torch's
    finally:
        for one in agents.values():
            one.kill()
            one.wait(10)


def test_a_node_that_leaves_while_it_waits_is_named_and_the_others_keep_hearing_signals(tmp_path: Path) -> None:
    """Node 1 is gone when node 2, for which it waited, comes."""
    (port,) = free_ports(1)
    logs = [tmp_path / str(rank) for rank in range(3)]
    agents = {rank: agent(rank, port, logs[rank]) for rank in (0, 1)}
    try:
        for rank in agents:
            wait_for("for NODE_RANK 2 of this job of 3 nodes", logs[rank])
        agents[1].send_signal(signal.SIGINT)
        assert agents[1].wait(10) == 0, logs[1].read_text()
        agents[2] = agent(2, port, logs[2])
        for rank in (0, 2):
            wait_for("for NODE_RANK 1 of this job of 3 nodes, which came and then left", logs[rank])
        for rank in (2, 0):
            agents[rank].send_signal(signal.SIGTERM)
            assert agents[rank].wait(10) == 0, logs[rank].read_text()
    finally:
        for one in agents.values():
            one.kill()
            one.wait(10)


def test_whoever_loses_node_0_waits_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = iter([Gone(), FakeStore("baton/node-0", "baton/ready-0")])
    awaited: list[int] = []
    monkeypatch.setattr(rendezvous, "await_address", lambda host, port, *_: awaited.append(port))
    monkeypatch.setattr(rendezvous, "_join", lambda *_: next(stores))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    store, port = rendezvous.open_store("127.0.0.1", 9, 1, 2)
    assert isinstance(store, FakeStore) and (port, awaited) == (9, [9, 9])
