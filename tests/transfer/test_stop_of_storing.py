"""An edge that fails while its thread is still storing KV: what becomes of the blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.edge_orders import EdgeDone, TakeEdge
from baton.core.errors import HandoffError, InvariantError
from baton.runtime.edge_ranks import FollowerEndpoints
from baton.transfer import edge_endpoint, sections
from baton.transfer.edge import Arrived, EdgeSpec
from baton.transfer.edge_endpoint import LocalEndpoint, LocalEndpoints
from baton.transfer.staging import PagedLayers
from tests.support.end_pair import BLOCK, LAYER_BYTES, PART, pool
from tests.support.limits import HANG_S

pytestmark = pytest.mark.usefixtures("no_thread_left")


class ArrivingEdge:
    """Every receive completes at once."""

    def __init__(self, spec: EdgeSpec) -> None: ...

    def connect(self) -> None: ...

    def recv(
        self, buf: Tensor, limit_s: float, posted: Callable[[], None], ends: Sequence[int], arrived: Arrived
    ) -> None:
        posted()
        for index in range(len(ends)):
            arrived(index, 0)

    def abort(self) -> None: ...

    def close(self) -> None: ...


class HangingDevice:
    """An endpoint whose device does not finish writing KV before `go`, and whether it does then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, finishes: bool = False) -> None:
        self.writing, self.go, self.finishes = threading.Event(), threading.Event(), finishes
        monkeypatch.setattr(edge_endpoint, "make_edge", lambda kind: ArrivingEdge)
        monkeypatch.setattr(sections, "checksum", lambda *_: 0)
        monkeypatch.setattr(sections, "finish", self.finish)
        layers = pool(0.0)
        self.rank = LocalEndpoints(layers, BLOCK, "127.0.0.1", section_bytes=LAYER_BYTES)
        spec = EdgeSpec("127.0.0.1", 1, "p", 1, "decode")
        self.endpoint = LocalEndpoint(spec, PagedLayers.of(layers), self.rank)

    def finish(self, device: torch.device, timeout_s: float) -> None:
        self.writing.set()
        self.go.wait(HANG_S)
        if not self.finishes:
            raise HandoffError("cuda:0 did not finish")


async def test_an_edge_that_fails_first_does_not_hide_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writes are still queued: blocks that were given to another sequence would be overwritten."""
    device = HangingDevice(monkeypatch)
    taking = asyncio.create_task(device.endpoint.take(PART, lambda: None))
    assert await asyncio.to_thread(device.writing.wait, HANG_S)
    threading.Timer(0.2, device.go.set).start()
    device.endpoint.abort("recv exceeded its limit")
    with pytest.raises(InvariantError, match="writing KV into blocks: cuda:0 did not finish"):
        await taking
    assert await device.endpoint.close(HANG_S)


@pytest.mark.parametrize("cancels", [0, 2])
async def test_the_event_loop_runs_while_a_failed_edge_stops_storing(
    cancels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader's loop also sends pings. The blocks and the buffer are in use until the device has finished."""
    device, dropped = HangingDevice(monkeypatch, finishes=True), list[bool]()
    drop = device.rank.buffers.drop
    monkeypatch.setattr(device.rank.buffers, "drop", lambda buffer: (dropped.append(device.go.is_set()), drop(buffer)))
    taking = asyncio.create_task(device.endpoint.take(PART, lambda: None))
    assert await asyncio.to_thread(device.writing.wait, HANG_S)
    device.endpoint.abort("recv exceeded its limit")
    for _ in range(20):
        await asyncio.sleep(0.01)
    for _ in range(cancels):
        taking.cancel()
        await asyncio.sleep(0.01)
    assert not taking.done() and dropped == []
    device.go.set()
    with pytest.raises(asyncio.CancelledError if cancels else HandoffError):
        await taking
    assert dropped == [True]
    assert await device.endpoint.close(HANG_S)


async def test_a_follower_whose_device_hangs_ends_though_its_edge_fails_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device, failed, ended = HangingDevice(monkeypatch), list[InvariantError](), threading.Event()
    reports: list[Any] = []

    def fail(error: InvariantError) -> None:
        failed.append(error)
        ended.set()

    def report(frame: object) -> None:
        reports.append(frame)
        if isinstance(frame, EdgeDone):
            ended.set()

    follower = FollowerEndpoints(device.rank, report, fail)
    follower._endpoints[1] = device.endpoint
    follower.execute_order(TakeEdge(7, 1, PART))
    assert await asyncio.to_thread(device.writing.wait, HANG_S)
    threading.Timer(0.2, device.go.set).start()
    follower._loop.call_soon_threadsafe(device.endpoint.abort, "recv exceeded its limit")
    assert await asyncio.to_thread(ended.wait, HANG_S)
    assert len(failed) == 1 and not any(isinstance(frame, EdgeDone) for frame in reports)
    await asyncio.to_thread(follower.close)
