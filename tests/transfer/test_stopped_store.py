"""A store whose process is stopped sends no reply and closes no connection: callers that wait for it still end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.rendezvous import EdgeStore
from tests.support.edges import num_keys
from tests.support.limits import HANG_S, Stall
from tests.transfer.conftest import Peer

pytestmark = pytest.mark.usefixtures("no_thread_left")


class StoreProcess:
    def __init__(self) -> None:
        peer = Peer(EdgeSpec("", 0, "", 1, "prefill"))
        peer.send_command("store")
        self.process, self.port, self.test = peer.process, int(peer.read_reply()["port"]), 0

    def stop(self, for_s: float = 0.0) -> None:
        if for_s:  # from another process: this one may hang
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
def external_store(store_process: StoreProcess) -> Iterator[StoreProcess]:
    """The store's process, with separate keys for each test."""
    store_process.test += 1
    yield store_process
    os.kill(store_process.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.long), "meanwhile"])
async def test_a_connect_times_out_while_its_store_is_stopped(external_store: StoreProcess, when: str) -> None:
    edge = external_store.edge()
    if when == "before":
        external_store.stop()
    connecting = asyncio.create_task(edge.connect())
    if when == "meanwhile":
        await asyncio.sleep(0.4)  # it is connected and polls for its peer
        assert edge.in_flight == "connect"
        external_store.stop()
    with pytest.raises(HandoffError, match="connect exceeded its limit"):
        await asyncio.wait_for(connecting, HANG_S)
    assert await edge.close(HANG_S)


async def test_abort_ends_a_connect_that_waits_for_a_stopped_store(external_store: StoreProcess) -> None:
    edge = external_store.edge(limit_s=10 * HANG_S)
    connecting = asyncio.create_task(edge.connect())
    await asyncio.sleep(0.4)
    external_store.stop()
    await asyncio.sleep(0.1)
    edge.abort("its link ended")
    with pytest.raises(HandoffError, match="its link ended"):
        await asyncio.wait_for(connecting, HANG_S)
    assert await edge.close(HANG_S)


async def test_several_connects_to_one_stopped_store_fail(external_store: StoreProcess) -> None:
    external_store.stop()
    edges = [external_store.edge(generation) for generation in (1, 2, 3)]
    results = await asyncio.gather(*(edge.connect() for edge in edges), return_exceptions=True)
    assert all(isinstance(result, HandoffError) for result in results), results
    assert all([await edge.close(HANG_S) for edge in edges])


async def test_other_connections_and_stores_are_not_shut_down(external_store: StoreProcess, store: EdgeStore) -> None:
    """Neither other connections to the stopped store nor an edge that connects through another store."""
    own = socket.create_connection(("127.0.0.1", external_store.port))
    external_store.stop()
    later = asyncio.create_task(external_store.edge().connect())
    ends = [EdgeWorker(EdgeSpec(store.host, store.port, "y/g1", 1, side)) for side in ("prefill", "decode")]  # type: ignore[arg-type]
    await asyncio.gather(*(end.connect() for end in ends))
    with pytest.raises(HandoffError):
        await asyncio.wait_for(later, HANG_S)
    await asyncio.sleep(1.0)  # long enough for any shutdown
    own.setblocking(False)
    with pytest.raises(BlockingIOError):  # open: after a shutdown recv would return
        own.recv(1)
    own.close()
    assert num_keys(store) == 0 and all([await end.close(HANG_S) for end in ends])


async def test_abort_of_one_edge_does_not_end_another_of_the_same_store(external_store: StoreProcess) -> None:
    edges = [external_store.edge(generation, limit_s=10 * HANG_S) for generation in (1, 2)]
    connecting = [asyncio.create_task(edge.connect()) for edge in edges]
    await asyncio.sleep(0.4)  # both have a connection
    external_store.stop()
    for edge, task in zip(edges, connecting, strict=True):
        assert edge.dead is None and not task.done()
        edge.abort("its link ended")
        assert await edge.close(HANG_S)
        with pytest.raises(HandoffError, match="its link ended"):
            await task


async def test_a_stopped_store_does_not_block_the_whole_process(external_store: StoreProcess) -> None:
    edge = external_store.edge(limit_s=HANG_S)
    connecting = asyncio.create_task(edge.connect())
    await asyncio.sleep(0.4)
    external_store.stop(for_s=10.0)  # longer than the limit can become
    silent_s = 0.0
    with Stall() as stall:
        began = last = time.monotonic()
        edge.abort("its link ended")  # between two polls for its peer: it deletes its keys
        while last - began < 2.0:
            silent_s, last = max(silent_s, time.monotonic() - last), time.monotonic()
            await asyncio.sleep(0.01)
    assert silent_s < stall.allows(2.0)  # a blocked process is silent as long as the store is stopped
    with pytest.raises(HandoffError, match="its link ended"):
        await connecting
    assert await edge.close(HANG_S)
