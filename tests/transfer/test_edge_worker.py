"""EdgeWorker: order, deadlines, cancellation and the end of its thread; with fake edges, then with Gloo."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from baton.core.errors import HandoffError
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_thread import EdgeWorker, _Job
from tests.support.limits import HANG_S

MakeSpec = Callable[..., EdgeSpec]
pytestmark = pytest.mark.usefixtures("no_thread_left")
SPEC = EdgeSpec("127.0.0.1", 1, "n/p.0/d.0/g3", 3, "decode", connect_timeout_s=0.3)


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.uint8)


class FakeEdge:
    """Blocks each receive until `gate` opens; if `deaf`, it ignores `abort`."""

    def __init__(self, spec: EdgeSpec, deaf: bool = False) -> None:
        self.spec, self.deaf = spec, deaf
        self.gate, self.connect_gate = threading.Event(), threading.Event()
        self.connect_gate.set()
        self.log: list[str] = []

    def connect(self) -> None:
        self.connect_gate.wait(10)
        self.log.append("connect")

    def send(self, buf: torch.Tensor, timeout_s: float, *sections: object) -> None:
        self.log.append("send")

    def recv(
        self, buf: torch.Tensor, timeout_s: float, on_posted: Callable[[], None] | None = None, *sections: object
    ) -> None:
        if on_posted is not None:
            on_posted()
        self.gate.wait(10)
        buf.fill_(5)
        self.log.append("recv")

    def abort(self) -> None:
        self.log.append("abort")
        if not self.deaf:
            self.gate.set()
            self.connect_gate.set()

    def close(self) -> None:
        self.log.append("close")


def fake(deaf: bool = False) -> tuple[EdgeWorker, FakeEdge]:
    edge = FakeEdge(SPEC, deaf)
    return EdgeWorker(SPEC, lambda spec: edge, grace_s=0.1), edge


async def test_jobs_run_in_order_on_a_dedicated_thread() -> None:
    worker, edge = fake()
    edge.gate.set()
    buf = zeros(4)
    _, value, ident = await asyncio.gather(
        worker.recv(buf), worker.run(lambda: int(buf.sum())), worker.run(threading.get_ident)
    )
    assert value == 20 and ident != threading.get_ident()
    assert repr(worker) == "<EdgeWorker n/p.0/d.0/g3 decode connected>"
    assert await worker.close()
    assert [entry for entry in edge.log if entry != "abort"] == ["connect", "recv", "close"]
    with pytest.raises(HandoffError, match="closed"):
        await worker.send(zeros(1))


async def test_an_exception_in_a_job_ends_the_edge_before_queued_jobs_run() -> None:
    """If the send had begun, the peer would receive part of a message and wait for the rest."""
    worker, edge = fake()
    await worker.connect()
    failing = asyncio.create_task(worker.run(lambda: 1 // 0))
    queued = asyncio.create_task(worker.send(zeros(1)))
    for task in (failing, queued):
        with pytest.raises(HandoffError, match="ZeroDivisionError"):
            await task
    assert "send" not in edge.log and worker.dead is not None
    await worker.close()


async def test_a_second_transfer_starts_only_when_the_first_has_ended() -> None:
    worker, edge = fake()
    posted, posted_later = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(worker.recv(zeros(4), on_posted=posted.set))
    second = asyncio.create_task(worker.recv(zeros(4), on_posted=posted_later.set))
    await asyncio.wait_for(posted.wait(), 30)
    await asyncio.sleep(0.05)
    assert "in recv" in repr(worker) and not posted_later.is_set()
    edge.gate.set()
    await asyncio.gather(first, second)
    assert posted_later.is_set() and edge.log == ["connect", "recv", "recv"]
    assert await worker.close()


async def test_abort_fails_every_waiter_and_ends_the_thread() -> None:
    worker, edge = fake()
    waiting = [asyncio.create_task(c) for c in (worker.recv(zeros(4)), worker.run(lambda: 1), worker.run(lambda: 2))]
    await asyncio.sleep(0.05)
    worker.abort("the peer's stream broke")
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, HandoffError) and "stream broke" in r.message for r in results)
    assert await worker.close()
    assert edge.log[-1] == "close"


async def test_a_stuck_operation_times_out_and_its_thread_ends_when_it_returns() -> None:
    worker, edge = fake(deaf=True)
    buf = zeros(4)
    alive = weakref.ref(buf)
    with pytest.raises(HandoffError, match="recv exceeded its limit"):
        await worker.recv(buf, 0.2)
    assert worker.dead is not None and "abort" in edge.log
    del buf
    assert alive() is not None  # the backend may still write into it
    assert not await worker.close(0.1)
    edge.gate.set()
    assert await worker.close()


async def test_a_job_that_ends_just_as_it_times_out_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is not pending any more, and its result is still on the way from its thread to the event loop."""
    worker, _ = fake()
    await worker.connect()
    resolve = _Job.resolve

    def resolve_late(job: _Job, result: object = None, error: BaseException | None = None) -> None:
        until = time.monotonic() + HANG_S
        while threading.current_thread() is not threading.main_thread() and time.monotonic() < until:
            if worker.dead is not None:
                time.sleep(0.02)
                break
            time.sleep(0.001)
        resolve(job, result, error)

    monkeypatch.setattr(_Job, "resolve", resolve_late)
    assert await worker.run(lambda: 7, timeout_s=0.0) == 7
    assert worker.dead is not None


async def test_unused_time_of_finished_jobs_does_not_extend_the_limit_of_a_stuck_one() -> None:
    worker, edge = fake(deaf=True)
    edge.gate.set()
    for _ in range(50):
        await worker.recv(zeros(4), HANG_S)
        await worker.run(lambda: None)
    edge.gate.clear()
    async with asyncio.timeout(HANG_S):
        with pytest.raises(HandoffError, match="recv exceeded its limit"):
            await worker.recv(zeros(4), 0.2)
    edge.gate.set()
    assert await worker.close()


async def test_a_failed_operation_does_not_keep_its_buffer() -> None:
    worker, edge = fake()

    def failing(buf: torch.Tensor, *_: object) -> None:
        try:
            raise OSError("the network")
        except OSError as e:
            raise SPEC.error("recv failed") from e

    edge.recv = failing  # type: ignore[method-assign]
    buf = zeros(4)
    alive = weakref.ref(buf)
    with pytest.raises(HandoffError, match="recv failed"):
        await worker.recv(buf)
    del buf
    assert await worker.close()
    gc.collect()  # the exception is in a reference cycle with its frames
    assert worker.dead is not None and alive() is None


async def test_a_stuck_connect_times_out() -> None:
    worker, edge = fake(deaf=True)
    edge.connect_gate.clear()
    with pytest.raises(HandoffError, match="connect exceeded"):
        await worker.connect()
    edge.connect_gate.set()
    assert await worker.close()


async def test_cancelling_the_wait_keeps_the_buffer_until_the_operation_ends() -> None:
    worker, edge = fake()
    buf = zeros(4)
    alive = weakref.ref(buf)
    task = asyncio.create_task(worker.recv(buf))
    while worker.in_flight is None:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del buf, task
    assert worker.in_flight == "recv" and alive() is not None
    edge.gate.set()
    await worker.send(zeros(1))  # queued after the receive, which no task awaits any more
    assert edge.log == ["connect", "recv", "send"]
    assert await worker.close()
    del worker
    assert alive() is None


async def test_close_while_blocked_aborts_after_its_timeout() -> None:
    worker, _ = fake()
    task = asyncio.create_task(worker.recv(zeros(4)))
    await asyncio.sleep(0.05)
    assert await worker.close(0.4)
    with pytest.raises(HandoffError, match="recv in flight"):
        await task


async def test_abort_ends_a_pending_connect(spec: MakeSpec) -> None:
    worker = EdgeWorker(spec("decode", connect_timeout_s=20))
    task = asyncio.create_task(worker.connect())
    await asyncio.sleep(0.1)
    worker.abort("gone")
    with pytest.raises(HandoffError, match="gone"):
        await asyncio.wait_for(task, 30)
    assert await worker.close()


async def test_gloo_edge_fails_with_its_peer_and_the_next_generation_works(spec: MakeSpec) -> None:
    for generation in (1, 2):
        prefill, decode = (EdgeWorker(spec(side, generation)) for side in ("prefill", "decode"))
        got = zeros(1000)
        await asyncio.gather(decode.recv(got), prefill.send(zeros(1000) + generation))
        assert got.eq(generation).all()
        task = asyncio.create_task(decode.recv(got, 20))
        await asyncio.sleep(0.05)
        prefill.abort("its request ended")
        with pytest.raises(HandoffError, match="decode side"):
            await asyncio.wait_for(task, 30)
        assert await prefill.close() and await decode.close()


@pytest.mark.parametrize("num_bytes", [1024, 1_000_000])
async def test_two_by_two_edges_in_opposite_orders_do_not_deadlock(spec: MakeSpec, num_bytes: int) -> None:
    rounds, order = 50, {0: (0, 1), 1: (1, 0)}
    pairs = [(p, d) for p in (0, 1) for d in (0, 1)]
    send = {(p, d): EdgeWorker(spec("prefill", 1, p, d)) for p, d in pairs}
    recv = {(p, d): EdgeWorker(spec("decode", 1, p, d)) for p, d in pairs}
    await asyncio.gather(*(worker.connect() for worker in (*send.values(), *recv.values())))
    posted = {pair: asyncio.Semaphore(0) for pair in pairs}
    bufs = {pair: zeros(num_bytes) for pair in pairs}
    payloads = {(p, d): zeros(num_bytes) + (1 + 2 * p + d) for p, d in pairs}

    async def prefill(p: int) -> None:
        for _ in range(rounds):
            for d in order[p]:
                await posted[p, d].acquire()
                await send[p, d].send(payloads[p, d], 20)

    async def decode(d: int) -> None:
        for _ in range(rounds):
            tasks = {
                p: asyncio.create_task(recv[p, d].recv(bufs[p, d], 20, posted[p, d].release)) for p in order[1 - d]
            }
            for p in order[1 - d]:
                await tasks[p]

    await asyncio.wait_for(asyncio.gather(prefill(0), prefill(1), decode(0), decode(1)), 60)
    assert all(torch.equal(bufs[pair], payloads[pair]) for pair in pairs)
    assert all([await worker.close() for worker in (*send.values(), *recv.values())])


async def test_a_busy_edge_does_not_block_the_event_loop(spec: MakeSpec) -> None:
    prefill, decode = EdgeWorker(spec("prefill")), EdgeWorker(spec("decode"))
    ticks, longest_s = 0, 0.0

    async def tick() -> None:
        nonlocal ticks, longest_s
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            ticks, longest_s, last = ticks + 1, max(longest_s, now - last), now

    ticker = asyncio.create_task(tick())
    blocked = asyncio.create_task(decode.recv(zeros(8_000_000), 20))
    await asyncio.sleep(0.3)
    while_blocked = ticks
    await prefill.send(zeros(8_000_000), 20)
    await blocked
    ticker.cancel()
    print(f"{ticks} ticks, longest {longest_s * 1e3:.1f} ms")
    assert while_blocked > 5  # a loop blocked by the receive would have had none
    assert await prefill.close() and await decode.close()


async def test_the_limit_of_a_queued_job_includes_those_of_the_jobs_before_it() -> None:
    worker, gate = EdgeWorker(SPEC, FakeEdge, grace_s=0.05), threading.Event()
    first = asyncio.create_task(worker.run(lambda: gate.wait(HANG_S), HANG_S))
    await asyncio.sleep(0)
    second = asyncio.create_task(worker.run(lambda: "second", 0.05))
    await asyncio.sleep(0.4)
    assert not second.done(), "its own limit has passed, but not that of the job in front of it"
    gate.set()
    assert await second == "second" and await first and worker.dead is None
    assert await worker.close()
