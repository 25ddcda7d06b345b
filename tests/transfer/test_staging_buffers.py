"""Kept staging buffers: which are reused, which never are, the limit; by themselves, then at both ends of an edge."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core.edge_orders import Part
from baton.core.errors import HandoffError
from baton.transfer import edge_thread, staging_buffers, streams
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.staging_buffers import MAX_KEPT, StagingBuffer, StagingBuffers, kept_limit
from tests.support.end_pair import PART, Pair, equal
from tests.support.limits import HANG_S

MakeSpec = Callable[..., EdgeSpec]


def test_the_smallest_sufficient_buffer_is_reused() -> None:
    buffers = StagingBuffers(1000)
    large, small = buffers.take(400), buffers.take(100)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(90).whole is small.whole and buffers.take(90).whole is large.whole
    assert buffers.take(90).whole.numel() == 90
    assert (buffers.allocated, buffers.reused) == (3, 2)


def test_a_dropped_buffer_is_never_reused() -> None:
    buffers = StagingBuffers(1000)
    buffers.drop(buffers.take(100))
    assert len(buffers) == buffers.idle_bytes == 0
    buffers.take(100)
    assert (buffers.allocated, buffers.reused) == (2, 0)


def test_a_larger_buffer_replaces_smaller_ones_within_the_limit() -> None:
    buffers = StagingBuffers(100)
    taken = [buffers.take(size) for size in (30, 40, 60)]
    for buffer in taken:
        buffers.give_back(buffer)
    assert (len(buffers), buffers.idle_bytes) == (2, 100)
    buffers.give_back(buffers.take(101))  # more than may be kept in all
    one, other = buffers.take(40), buffers.take(60)
    assert (one.whole, other.whole) == (taken[1].whole, taken[2].whole)


@given(st.integers(0, 300), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), max_size=60))
def test_idle_memory_stays_within_the_limit(limit: int, moves: list[tuple[int, int]]) -> None:
    buffers, taken = StagingBuffers(limit), list[StagingBuffer]()
    for move, number in moves:
        if move < 2 or not taken:
            taken.append(buffers.take(number))
            assert all(taken[-1].whole is not other.whole for other in taken[:-1])
        else:
            buffer = taken.pop(number % len(taken))
            (buffers.give_back if move == 2 else buffers.drop)(buffer)
        held = [*buffers._kept, *(buffer.whole for buffer in taken)]
        in_use = sum(buffer.view.numel() for buffer in taken)
        assert sum(map(torch.Tensor.numel, held)) - in_use == buffers.idle_bytes <= limit


def test_all_ranks_together_keep_a_quarter_of_the_staging_memory() -> None:
    assert 3 * kept_limit(1200, 3) == 1200 // 4


async def test_the_second_chunk_reuses_the_buffers_of_both_ends(spec: MakeSpec) -> None:
    kept = (StagingBuffers(4096), StagingBuffers(4096))
    ends = await Pair(spec, kept=kept).connect()
    for value in (1.0, 2.0, 3.0):
        ends.source[0][0].fill_(value)
        assert await ends.hand_over() and all(equal(ends.source, ends.target))
    assert [(b.allocated, b.reused) for b in kept] == [(1, 2), (1, 2)]
    await ends.close()


@pytest.mark.parametrize("torn", ["prefill", "decode"])
async def test_buffers_of_an_aborted_transfer_are_not_reused(torn: str, spec: MakeSpec) -> None:
    kept = (StagingBuffers(4096), StagingBuffers(4096))
    ends = await Pair(spec, kept=kept).connect()
    assert await ends.hand_over()
    await ends.prefill.fill(PART, 0)
    posted = asyncio.Event()
    taking = asyncio.ensure_future(ends.decode.take(PART, posted.set))
    await asyncio.wait_for(posted.wait(), 10)
    (ends.prefill if torn == "prefill" else ends.decode).abort("the test")
    with pytest.raises(HandoffError):
        await taking
    with pytest.raises(HandoffError):
        await ends.prefill.send()
    await ends.close()
    assert [(len(b), b.idle_bytes) for b in kept] == [(0, 0), (0, 0)]
    again = await Pair(spec, 2, kept=kept).connect()
    assert await again.hand_over() and all(equal(again.source, again.target))
    assert [(b.allocated, b.reused) for b in kept] == [(2, 1), (2, 1)]
    await again.close()


async def test_buffers_that_were_not_sent_or_could_not_be_packed_are_not_kept(spec: MakeSpec) -> None:
    buffers = StagingBuffers(4096)
    ends = Pair(spec, kept=(buffers, buffers))
    await ends.prefill.fill(PART, 0)
    ends.prefill.drop()
    with pytest.raises(HandoffError):
        await ends.prefill.fill(Part((0, 7), 0, 8, PART.num_bytes, b"who"), 0)
    assert (buffers.allocated, len(buffers), buffers.idle_bytes) == (2, 0, 0)
    await ends.close()


def test_the_number_of_kept_buffers_is_limited() -> None:
    buffers = StagingBuffers(1 << 30)
    taken = [buffers.take(size) for size in range(1, MAX_KEPT + 10)]
    for buffer in taken:
        buffers.give_back(buffer)
    assert len(buffers) == MAX_KEPT and buffers.idle_bytes == sum(range(10, MAX_KEPT + 10))


class FakeEvents:
    """torch.cuda.Event without a GPU: each is done when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[FakeEvents.One] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvents.One(self))
        monkeypatch.setattr(streams.HELD, "_objects", [])

    class One:
        def __init__(self, events: FakeEvents) -> None:
            self.events, self.stream, self.done = events, None, False

        def record(self, stream: object = None) -> None:
            self.stream = stream
            self.events.recorded.append(self)

        def query(self) -> bool:
            return self.done


@pytest.mark.parametrize("used", [False, True])
def test_dropped_buffer_is_kept_until_the_device_has_done_its_queued_work(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was exported to another process is not covered by torch's `record_stream`."""
    events, buffers = FakeEvents(monkeypatch), StagingBuffers(1000)
    monkeypatch.setattr(staging_buffers, "current_stream", lambda device: "stream of the edge")
    buffer = buffers.take(100)
    whole = weakref.ref(buffer.whole)
    if used:
        buffer.use()
    buffers.drop(buffer)
    del buffer
    if not used:
        assert whole() is None and not events.recorded
        return
    assert whole() is not None and [event.stream for event in events.recorded] == ["stream of the edge"]
    streams.HELD.release()
    assert whole() is not None
    events.recorded[0].done = True
    streams.HELD.release()
    assert whole() is None and not len(streams.HELD)


def test_memory_is_kept_for_good_when_the_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    events, held = FakeEvents(monkeypatch), streams.HeldBuffer()

    def broken(*_: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    held.keep("one", "stream")
    monkeypatch.setattr(FakeEvents.One, "query", broken)
    held.release()
    monkeypatch.setattr(FakeEvents.One, "record", broken)
    held.keep("two", "stream")
    assert len(held) == 2 and len(events.recorded) == 1


async def test_what_an_aborted_job_queued_keeps_its_buffers(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on after the abort, and queues more work than the drop of its buffer knows of."""
    events, device = FakeEvents(monkeypatch), torch.device("cpu")
    monkeypatch.setattr(edge_thread, "current_stream", lambda device: "stream of the edge")
    waits: list[float] = []

    def never(device: torch.device, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise HandoffError("the device did not finish")

    monkeypatch.setattr(edge_thread, "finish", never)
    worker = EdgeWorker(spec("prefill"), kv_device=device)
    running, go = threading.Event(), threading.Event()

    def job(buffer: object) -> None:
        running.set()
        assert go.wait(HANG_S)

    buffer = object()
    asking = asyncio.ensure_future(worker.run(partial(job, buffer)))
    while not running.is_set():
        await asyncio.sleep(0.001)
    worker.abort("the test")
    go.set()
    with pytest.raises(HandoffError):
        await asking
    assert await worker.close() and len(waits) == 1
    (kept,) = streams.HELD._objects
    assert kept[0] is events.recorded[0] and kept[1].args == (buffer,)  # type: ignore[attr-defined]
    kept[0].done = True
    streams.HELD.release()
    assert not len(streams.HELD)
