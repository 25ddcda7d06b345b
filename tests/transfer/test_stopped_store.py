"""A store whose process is stopped answers nothing and closes nothing: what waits for it ends all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.rendezvous import EdgeStore
from tests.support.edge_store import num_keys
from tests.support.limits import HANG_S

pytestmark = pytest.mark.usefixtures("no_thread_left")

STORE = """
import time
from baton.transfer.rendezvous import EdgeStore
store = EdgeStore()
print(store.port, flush=True)
time.sleep(600)
"""


class StoreProcess:
    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": "."}
        self.process = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.port, self.test = int(self.process.stdout.readline()), 0

    def stop(self, for_s: float = 0.0) -> None:
        if for_s:  # from another process: this one may hang itself
            subprocess.Popen(["sh", "-c", f"sleep {for_s}; kill -CONT {self.process.pid}"])
        os.kill(self.process.pid, signal.SIGSTOP)

    def edge(self, generation: int = 1, limit_s: float = 1.0) -> EdgeWorker:
        prefix = f"{self.test}/g{generation}"
        spec = EdgeSpec("127.0.0.1", self.port, prefix, generation, "prefill", connect_timeout_s=limit_s)
        return EdgeWorker(spec)


@pytest.fixture(scope="module")
def store_process() -> Iterator[StoreProcess]:
    made = StoreProcess()
    yield made
    made.process.kill()  # ends a stopped process too
    made.process.communicate()


@pytest.fixture
def elsewhere(store_process: StoreProcess) -> Iterator[StoreProcess]:
    """The process, with keys of its own for each test."""
    store_process.test += 1
    yield store_process
    os.kill(store_process.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.long), "meanwhile"])
async def test_an_edge_ends_while_its_store_is_stopped(elsewhere: StoreProcess, when: str) -> None:
    edge = elsewhere.edge()
    if when == "before":
        elsewhere.stop()
    connecting = asyncio.create_task(edge.connect())
    if when == "meanwhile":
        await asyncio.sleep(0.4)  # it has a connection and asks for its peer
        assert edge.in_flight == "connect"
        elsewhere.stop()
    with pytest.raises(HandoffError, match="connect outlasted its limit"):
        await asyncio.wait_for(connecting, HANG_S)
    assert await edge.close(HANG_S)


async def test_an_abort_reaches_a_call_of_a_stopped_store(elsewhere: StoreProcess) -> None:
    edge = elsewhere.edge(limit_s=10 * HANG_S)
    connecting = asyncio.create_task(edge.connect())
    await asyncio.sleep(0.4)
    elsewhere.stop()
    await asyncio.sleep(0.1)
    edge.abort("its link ended")
    with pytest.raises(HandoffError, match="its link ended"):
        await asyncio.wait_for(connecting, HANG_S)
    assert await edge.close(HANG_S)


async def test_several_edges_of_one_store_end_too(elsewhere: StoreProcess) -> None:
    elsewhere.stop()
    edges = [elsewhere.edge(generation) for generation in (1, 2, 3)]
    results = await asyncio.gather(*(edge.connect() for edge in edges), return_exceptions=True)
    assert all(isinstance(result, HandoffError) for result in results), results
    assert all([await edge.close(HANG_S) for edge in edges])


async def test_nothing_else_is_shut_down(elsewhere: StoreProcess, store: EdgeStore) -> None:
    """Neither other connections to the stopped store nor an edge that is made in another one."""
    own = socket.create_connection(("127.0.0.1", elsewhere.port))
    elsewhere.stop()
    later = asyncio.create_task(elsewhere.edge().connect())
    ends = [EdgeWorker(EdgeSpec(store.host, store.port, "y/g1", 1, side)) for side in ("prefill", "decode")]  # type: ignore[arg-type]
    await asyncio.gather(*(end.connect() for end in ends))
    with pytest.raises(HandoffError):
        await asyncio.wait_for(later, HANG_S)
    await asyncio.sleep(1.0)  # by now what can be shut down is
    own.setblocking(False)
    with pytest.raises(BlockingIOError):  # it stands; one that was shut down would say its end
        own.recv(1)
    own.close()
    assert num_keys(store) == 0 and all([await end.close(HANG_S) for end in ends])


async def test_another_edge_of_the_same_store_goes_on(elsewhere: StoreProcess) -> None:
    edges = [elsewhere.edge(generation, limit_s=10 * HANG_S) for generation in (1, 2)]
    connecting = [asyncio.create_task(edge.connect()) for edge in edges]
    await asyncio.sleep(0.4)  # both have a connection
    elsewhere.stop()
    for edge, task in zip(edges, connecting, strict=True):
        assert edge.dead is None and not task.done()
        edge.abort("its link ended")
        assert await edge.close(HANG_S)
        with pytest.raises(HandoffError, match="its link ended"):
            await task


async def test_a_stopped_store_does_not_hold_the_whole_process(elsewhere: StoreProcess) -> None:
    edge = elsewhere.edge(limit_s=HANG_S)
    connecting = asyncio.create_task(edge.connect())
    await asyncio.sleep(0.4)
    elsewhere.stop(for_s=3.0)
    began = last = time.monotonic()
    edge.abort("its link ended")  # between two looks for its peer: it deletes its keys
    silent_s = 0.0
    while last - began < 2.0:
        silent_s, last = max(silent_s, time.monotonic() - last), time.monotonic()
        await asyncio.sleep(0.01)
    assert silent_s < 2.0  # it was as long as the store was stopped
    with pytest.raises(HandoffError, match="its link ended"):
        await connecting
    assert await edge.close(HANG_S)
