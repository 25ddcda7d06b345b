"""Packing and storing as for buffers on a GPU: nothing waits between sections, checksums stay on the device, and
damaged sections are not stored. Here the kernels run in Triton's interpreter, with buffers on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.core.errors import HandoffError, InvariantError
from baton.engine.device_stream import StepMarks
from baton.transfer import sections, staging, streams
from baton.transfer.edge_endpoint import LocalEndpoints
from baton.transfer.sections import Packing, Storing
from baton.transfer.staging import PagedLayers
from baton.transfer.staging_buffers import StagingBuffers
from baton.transfer.stream_pool import EDGE_PRIORITY, stream_pool
from tests.support import fake_streams
from tests.support.end_pair import BLOCK, LAYER_BYTES, LAYERS, PART, equal, pool

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)


class Device:
    """Two ends without an edge between them; counts the waits for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        monkeypatch.setattr(sections, "finish", self.finish)
        self.source, self.target, kept = pool(1.0), pool(0.0), StagingBuffers(1 << 16)
        self.packing = Packing(PagedLayers.of(self.source), BLOCK, PART, kept.take(PART.num_bytes), LAYER_BYTES)
        self.storing = Storing(PagedLayers.of(self.target), BLOCK, PART, kept.take(PART.num_bytes), LAYER_BYTES)
        self.packing.on_device = self.storing.on_device = True

    def finish(self, device: torch.device, timeout_s: float) -> None:
        assert timeout_s < 10
        self.waits += 1

    def move(self, damage: int | None = None) -> None:
        self.packing.begin()
        words = [self.packing.ready(index) for index in range(LAYERS)]
        assert all(isinstance(word, Tensor) for word in words) and self.waits == 0, "packing waits for nothing"
        self.storing.buffer.view.copy_(self.packing.buffer.view)
        if damage is not None:
            self.storing.buffer.view[damage] ^= 1
        for index, word in enumerate(words):
            self.storing.arrived(index, word)


def test_storing_waits_for_the_device_twice_per_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.move()
    assert device.storing.result() and equal(device.source, device.target) == [True] * LAYERS
    assert (device.waits, device.storing.stored) == (2, LAYERS)


def test_a_damaged_section_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.move(damage=2 * LAYER_BYTES + 5)
    assert not device.storing.result() and equal(device.source, device.target) == [True, True, False, True]


def test_no_block_is_written_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.storing.stop()
    device.move()
    assert device.storing.stored == 0 and equal(device.source, device.target) == [False] * LAYERS


def test_a_device_that_hangs_fails_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)

    def hang(*_: Any) -> None:
        raise HandoffError("cuda:0 did not finish")

    monkeypatch.setattr(sections, "finish", hang)
    device.move()
    with pytest.raises(HandoffError, match="did not finish"):
        device.storing.result()
    assert equal(device.source, device.target) == [False] * LAYERS


def test_kv_is_read_after_the_step_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, order = Device(monkeypatch), []
    device.packing.before = lambda: order.append("behind")
    pack = sections.pack
    monkeypatch.setattr(sections, "pack", lambda *where: (order.append("read"), pack(*where)))
    device.packing.begin()
    assert order == ["behind"] + ["read"] * LAYERS


class Calls(TorchDispatchMode):
    """Records the operations of torch, and how many rows are selected at once."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.rows = set[str](), 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(call))
        if call is torch.ops.aten.index_select.out:
            self.rows = max(self.rows, args[2].numel())
        return call(*args, **kwargs or {})


def test_the_warm_up_runs_all_that_a_hand_over_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is compiled or loaded at its first use would delay the first hand-over."""
    monkeypatch.setattr(staging, "_MOST_RUNS", 0)  # on a GPU single tokens are copied
    begin = sections._Sections.__init__

    def on_device(self: Any, *settings: Any, **more: Any) -> None:
        begin(self, *settings, **more)
        self.on_device = True

    monkeypatch.setattr(sections._Sections, "__init__", on_device)
    layers = pool(1.0)
    ends = LocalEndpoints(layers, BLOCK, "127.0.0.1")
    with Calls() as warm_up:
        ends._warm_up(torch.device("cpu"))
    assert equal(layers, pool(1.0)) == [True] * LAYERS and ends.buffers.idle_bytes == 0
    device = Device(monkeypatch)
    with Calls() as hand_over:
        device.move()
    assert device.storing.result() and {"aten.cat.default", "aten.eq.Tensor"} <= hand_over.names
    assert hand_over.names <= warm_up.names and warm_up.rows > 16


class Event:
    def __init__(self) -> None:
        self.recorded = self.waited = 0
        self.done = False

    def record(self) -> None:
        self.recorded += 1

    def wait(self) -> None:
        self.waited += 1

    def query(self) -> bool:
        return self.done


def test_a_stream_waits_for_the_named_step_or_a_later_one() -> None:
    events: list[Event] = []

    def new() -> Event:
        events.append(Event())
        return events[-1]

    marks = StepMarks(torch.device("cuda", 0), new)
    marks.order_behind(3)  # no step was computed: there is no event to wait for
    for step in range(100, 200):
        marks.record(step)
    marks.order_behind(150)
    assert [n for n, event in enumerate(events) if event.waited] == [50], "not the newest: it would wait for that, too"
    marks.order_behind(100)  # no longer kept: the oldest kept event, of a later step, is used
    assert [n for n, event in enumerate(events) if event.waited] == [36, 50]
    assert all(event.recorded == 1 for event in events)


def test_a_wait_for_a_device_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Event()
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    with pytest.raises(HandoffError, match=r"cuda:0 did not finish the edge's work within 0\.0 s"):
        streams.finish(torch.device("cuda", 0), 0.01)
    event.done = True
    streams.finish(torch.device("cuda", 0), 0.01)


def test_an_edge_thread_has_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, cuda = fake_streams.install(monkeypatch), torch.device("cuda", 1)
    with streams.own_stream(cuda):
        mine = fake.current.stream
        assert mine.cuda_stream in stream_pool(cuda, EDGE_PRIORITY).in_use()
        with streams.own_stream(cuda):
            assert fake.current.stream is not mine
    assert fake.current.stream is None and not stream_pool(cuda, EDGE_PRIORITY).in_use()
    with streams.own_stream(torch.device("cpu")):
        assert fake.current.stream is None


def test_a_device_that_hangs_while_blocks_are_written_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queued writes may run when the blocks already belong to another sequence."""
    device = Device(monkeypatch)
    calls = []

    def hang_later(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise HandoffError("cuda:0 did not finish")

    monkeypatch.setattr(sections, "finish", hang_later)
    device.move()
    with pytest.raises(InvariantError, match="writing KV into blocks: cuda:0 did not finish"):
        device.storing.result()


def test_staging_buffers_are_allocated_on_their_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reuses freed memory on the stream that it was used on, so staging buffers have a stream of their own."""
    fake, cuda = fake_streams.install(monkeypatch), torch.device("cuda", 0)
    made: list[tuple[Any, int]] = []
    monkeypatch.setattr(streams.torch, "empty", lambda size, **_: made.append((fake.current.stream, size)))
    with streams.own_stream(cuda):
        edge = fake.current.stream
        streams.empty_on_staging_stream(10, cuda)
        streams.empty_on_staging_stream(20, cuda)
    assert [size for _, size in made] == [10, 20] and made[0][0] is made[1][0] is not edge
