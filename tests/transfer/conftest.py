"""Edges for the tests: a store, specs for both ends of an edge, and a peer in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton.transfer.edge import Edge, EdgeSpec, MakeEdge, edge_prefix
from baton.transfer.gloo import GlooEdge
from baton.transfer.rendezvous import EdgeStore
from tests.support.edges import in_threads
from tests.support.forks import ROOT, start

MakeSpec = Callable[..., EdgeSpec]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[EdgeStore]:
    """Listens on 127.0.0.1, or on the address that a test names (`ADDRESSES`)."""
    store = EdgeStore(getattr(request, "param", "127.0.0.1"))
    yield store
    store.close()


@pytest.fixture
def spec(store: EdgeStore) -> MakeSpec:
    def make(side: str, generation: int = 1, p: int = 0, d: int = 0, **more: Any) -> EdgeSpec:
        prefix = edge_prefix(store.nonce, "prefill-0", p, "decode-0", d, generation)
        more.setdefault("bind_host", store.host)
        return EdgeSpec(store.host, store.port, prefix, generation, side, **more)  # type: ignore[arg-type]

    return make


@pytest.fixture
def connected(spec: MakeSpec) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Makes a connected pair (prefill, decode) of a generation and kind; all are closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(generation: int = 1, kind: MakeEdge = GlooEdge) -> tuple[Edge, Edge]:
            ends = kind(spec("prefill", generation)), kind(spec("decode", generation))
            for end in ends:
                stack.callback(end.close)
            assert in_threads(*(end.connect for end in ends)) == [None, None]
            return ends

        yield make


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("edge-")]
    for thread in left:
        thread.join(2)
    assert not [t for t in left if t.is_alive()]


class Peer:
    """The other end, in its own process: reads one JSON command per line, replies with one JSON line."""

    def __init__(self, spec: EdgeSpec) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.transfer.peer", spec.side, spec.host, str(spec.port)]
        self.process: subprocess.Popen[Any] = start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send_command(self, op: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()

    def read_reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has ended"
        reply: dict[str, Any] = json.loads(line)
        return reply


@pytest.fixture
def peers() -> Iterator[Callable[[EdgeSpec], Peer]]:
    made: list[Peer] = []

    def make(spec: EdgeSpec) -> Peer:
        made.append(Peer(spec))
        return made[-1]

    yield make
    for peer in made:
        peer.process.kill()  # ends a stopped process too
        peer.process.communicate()
