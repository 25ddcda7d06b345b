"""The adapters of a worker: what it loads and drops when the coordinator requires others, at every rank."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.core.commands import AdapterSource, AdapterStates, SetAdapters
from baton.core.errors import InvalidRequest, Unavailable
from baton.models.adapter_config import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from baton.runtime import adapters
from baton.runtime.adapters import FollowerAdapters, RankAdapters, WorkerAdapters, read_adapter_files
from baton.runtime.frames import AdapterLoaded, DropAdapter, FrameReader, LoadAdapter, encode
from tests.support.nodes import until


class FakeEngine:
    """Refuses an adapter whose weights are `bad`."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()
        self.loads = 0
        self.gate = threading.Event()
        self.gate.set()

    def load(self, digest: str, config_text: bytes, weights: bytes, max_rank: int) -> None:
        self.gate.wait(10.0)
        if weights == b"bad":
            raise InvalidRequest("tensor T is missing", param="lora_path")
        self.loads += 1
        self.loaded.add(digest)

    def drop(self, digest: str) -> None:
        self.loaded.discard(digest)


def source(path: Path, weights: bytes = b"w") -> AdapterSource:
    path.mkdir(exist_ok=True)
    (path / CONFIG_FILE).write_bytes(b"{}")
    (path / WEIGHTS_FILE).write_bytes(weights)
    return AdapterSource(adapter_digest(b"{}", weights), str(path))


class Worker:
    def __init__(self, ranks: RankAdapters | None = None) -> None:
        self.engine = FakeEngine()
        self.in_use: set[str] = set()
        self.reports: list[AdapterStates] = []
        self.between: list[Callable[[], None]] = []
        self.adapters = WorkerAdapters(lambda: self.in_use, self.reports.append)
        self.adapters.ranks = ranks or RankAdapters(self.engine)

    def between_steps(self, work: Callable[[], None]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.between.append(work)
        work()
        done.set_result(None)
        return done

    async def require(self, *sources: AdapterSource) -> AdapterStates:
        count = len(self.reports)
        self.adapters.require(SetAdapters(sources, 64))
        await until(lambda: len(self.reports) > count, what="a report")
        return self.reports[-1]


@asynccontextmanager
async def worker(ranks: RankAdapters | None = None) -> AsyncIterator[Worker]:
    made = Worker(ranks)
    task = asyncio.create_task(made.adapters.run(made.between_steps))
    try:
        yield made
        assert not task.done(), task
    finally:
        task.cancel()


def test_reading_an_adapter_takes_no_more_memory_than_its_files_have(tmp_path: Path) -> None:
    """`read(n)` allocates n bytes first: with the limit of 8 GiB as n, a machine with less memory refuses."""
    source(tmp_path, b"w" * 1000)
    tracemalloc.start()
    try:
        assert read_adapter_files(str(tmp_path)) == (b"{}", b"w" * 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


async def test_a_worker_loads_what_it_lacks_and_drops_the_others_between_steps(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a", b"a"), source(tmp_path / "b", b"b")
    async with worker() as w:
        assert await w.require(a, b) == AdapterStates(tuple(sorted((a.digest, b.digest))))
        assert w.engine.loaded == {a.digest, b.digest} and not w.between
        assert await w.require(b) == AdapterStates((b.digest,))
        assert w.engine.loaded == {b.digest} and len(w.between) == 1
        w.adapters.check(b.digest)
        w.adapters.check("")
        with pytest.raises(Unavailable, match="is not loaded at this worker"):
            w.adapters.check(a.digest)


async def test_a_worker_in_a_new_role_drops_what_it_had_and_loads_the_others_once(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a", b"a"), source(tmp_path / "b", b"b")
    async with worker() as before:
        await before.require(a, b)
    async with worker(before.adapters.ranks) as after:
        with pytest.raises(Unavailable):
            after.adapters.check(b.digest)
        before.engine.loads = 0
        assert await after.require(b) == AdapterStates((b.digest,))
        assert before.engine.loaded == {b.digest} and before.engine.loads == 0
        after.adapters.check(b.digest)


async def test_what_cannot_be_loaded_is_reported_with_its_reason(tmp_path: Path) -> None:
    good, bad, changed = (source(tmp_path / name, name.encode()) for name in ("good", "bad", "changed"))
    source(tmp_path / "changed", b"later")
    async with worker() as w:
        states = await w.require(good, bad, changed, AdapterSource("d" * 32, str(tmp_path / "none")))
        assert states.loaded == (good.digest,)
        reasons = {failure.digest: failure.reason for failure in states.failed}
        assert reasons[bad.digest] == "tensor T is missing"
        assert "other files than the coordinator has read there" in reasons[changed.digest]
        assert "none: no such directory" in reasons["d" * 32]


async def test_an_adapter_that_a_sequence_uses_is_dropped_when_that_has_ended(tmp_path: Path) -> None:
    a = source(tmp_path / "a")
    async with worker() as w:
        await w.require(a)
        w.in_use.add(a.digest)
        assert (await w.require()).loaded == (a.digest,)
        w.in_use.clear()
        await until(lambda: not w.engine.loaded, what="the adapter to be dropped")


async def test_only_the_last_set_counts_that_arrives_while_one_is_loaded(tmp_path: Path) -> None:
    a, b = source(tmp_path / "a", b"a"), source(tmp_path / "b", b"b")
    async with worker() as w:
        w.engine.gate.clear()
        w.adapters.require(SetAdapters((a,), 64))
        await asyncio.sleep(0.01)
        w.adapters.require(SetAdapters((a, b), 64))
        w.adapters.require(SetAdapters((b,), 64))
        w.engine.gate.set()
        await until(lambda: w.reports and w.reports[-1].loaded == (b.digest,), what="the last set")
        assert w.engine.loaded == {b.digest}


class Ranks:
    """A leader and its followers, whose frames are encoded as between processes."""

    def __init__(self, followers: int) -> None:
        self.engines = [FakeEngine() for _ in range(followers + 1)]
        self.leader = RankAdapters(self.engines[0], self._send, followers)
        self.followers = [
            FollowerAdapters(engine, partial(self._report, rank)) for rank, engine in enumerate(self.engines[1:], 1)
        ]

    def _send(self, frame: object) -> None:
        (order,) = FrameReader().feed(encode(frame))
        for follower in self.followers:
            if isinstance(order, LoadAdapter):
                follower.load(order)
            elif isinstance(order, DropAdapter):
                follower.drop(order.digest)

    def _report(self, rank: int, frame: object) -> None:
        (report,) = FrameReader().feed(encode(frame))
        assert isinstance(report, AdapterLoaded)
        self.leader.receive(rank, report)


def test_an_adapter_is_loaded_when_every_rank_has_it(tmp_path: Path) -> None:
    ranks, a = Ranks(3), source(tmp_path / "a")
    ranks.leader.load(a, 64)
    assert all(engine.loaded == {a.digest} for engine in ranks.engines)
    ranks.leader.drop(a.digest)
    assert not any(engine.loaded for engine in ranks.engines)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "error",
    [
        Unavailable("cuda:1 has no memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory\nat ..."),
        MemoryError(),
    ],
)
def test_if_one_rank_cannot_load_it_none_keeps_it(tmp_path: Path, rank: int, error: Exception) -> None:
    """An error that no rank expects would end its worker, and those that load the adapter next."""
    ranks, a = Ranks(2), source(tmp_path / "a")

    def load(*_: object) -> None:
        raise error

    ranks.engines[rank].load = load  # type: ignore[method-assign]
    with pytest.raises(Unavailable) as caught:
        ranks.leader.load(a, 64)
    reason = str(error).split("\n")[0] or "out of memory"
    assert reason in caught.value.message and "\n" not in caught.value.message
    assert caught.value.message.startswith("rank 2: ") == (rank == 2)
    assert not ranks.engines[0].loaded


async def test_an_adapter_that_a_rank_has_loaded_too_late_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "RANKS_LOAD_S", 0.05)
    ranks, a = Ranks(2), source(tmp_path / "a")
    slow, done = ranks.engines[1], threading.Event()
    slow.gate, load = threading.Event(), slow.load

    def load_late(*given: Any) -> None:
        load(*given)
        done.set()

    slow.load = load_late  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"^rank 1: not loaded within 0\.05 s"):
        await asyncio.to_thread(ranks.leader.load, a, 64)
    slow.gate.set()
    assert await asyncio.to_thread(done.wait, 10.0)
    await until(lambda: not any(engine.loaded for engine in ranks.engines), what="the drop")


def test_a_rank_that_does_not_answer_is_named_after_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "RANKS_LOAD_S", 0.05)
    leader = RankAdapters(FakeEngine(), lambda frame: None, 1)
    with pytest.raises(Unavailable, match=r"rank 1: not loaded within 0\.05 s"):
        leader.load(source(tmp_path / "a"), 64)
