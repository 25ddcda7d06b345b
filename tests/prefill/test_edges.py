"""Hand-overs between workers of several ranks: an edge for each pair of ranks that share KV heads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from baton.core.edge_orders import Part
from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, reshard_layout
from baton.edge_ranks import FollowerEnds, RemoteEnd, WorkerEnds
from baton.transfer import edge_end, sections
from baton.transfer.edge_end import LocalEnd, LocalEnds
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.gloo import GlooEdge
from prefill.link import Link
from tests.support.builders import make_layout, make_request
from tests.support.fake_runner import DecodeNode, FakeRanks, FakeRunner, PrefillNode, kv_bytes, oracle, pair, until
from tests.support.limits import HANG_S
from tests.support.wire import Sums, flipped, on_the_wire

R = SequenceId("r")
SIZES = (1, 2, 4)
ORDERS = [(f"{name}Edge", "prefill") for name in ("Open", "Fill", "Send")]
ORDERS += [(f"{name}Edge", "decode") for name in ("Open", "Take")]


@contextlib.asynccontextmanager
async def ranks(
    prefill_tp: int = 2, decode_tp: int = 2, *, heads: int = 4, timeout_s: float = 4.0, pause_s: float = 0.0
) -> AsyncIterator[tuple[PrefillNode, DecodeNode]]:
    layout = make_layout(4, heads=heads)
    made = [
        FakeRanks(size, 32, layout, pause_s) if size > 1 else FakeRunner(32, layout) for size in (prefill_tp, decode_tp)
    ]
    try:
        nodes = DecodeNode(runner=made[1], timeout_s=timeout_s), PrefillNode(runner=made[0], timeout_s=timeout_s)
        async with pair(nodes[0], prefill=nodes[1]) as (source, [decode]):
            yield source, decode
            await until(lambda: not orders(source) and not orders(decode), what="answered orders")
        for runner in made:
            assert not getattr(runner, "lost", ())
            await until(lambda runner=runner: not any(e._ends for e in getattr(runner, "follower_ends", ())))
    finally:
        for runner in made:
            if isinstance(runner, FakeRanks):
                await asyncio.to_thread(runner.close)


def orders(node: PrefillNode | DecodeNode) -> int:
    ends = node.runner.make_end
    return len(ends) if isinstance(ends, WorkerEnds) else 0


def only_link(source: PrefillNode) -> Link:
    (link,) = (t.result() for t in source.worker.outgoing._links.values())
    return link


async def hand_over(source: PrefillNode, decode: DecodeNode, name: str, prompt: int) -> None:
    request = make_request(name, prompt, max_tokens=5)
    source.submit(request, decode)
    while source.step():
        await asyncio.sleep(0.002)
    await until(lambda: [o for o in source.told.handed_over if o.sequence.request_id == name], what="the hand-over")
    decode.compute()
    assert {**source.told.output(name), **decode.told.output(name)} == dict(enumerate(oracle(request.prompt, 5)))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[EdgeKey, int]:
    """The bytes that arrived, by edge."""
    by_edge: dict[EdgeKey, int] = {}
    original = EdgeWorker.recv

    async def recv(worker: EdgeWorker, buffer: torch.Tensor, **settings: Any) -> None:
        await original(worker, buffer, **settings)
        prefill, decode = worker.spec.prefix.split("/")[1:3]
        key = (int(prefill.rpartition(".")[2]), int(decode.rpartition(".")[2]))
        by_edge[key] = by_edge.get(key, 0) + buffer.numel()

    monkeypatch.setattr(EdgeWorker, "recv", recv)
    return by_edge


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [(p, d) for p in SIZES for d in SIZES])
async def test_every_head_goes_over_once_whatever_the_ranks(
    sizes: tuple[int, int], heads: int, counted: dict[EdgeKey, int]
) -> None:
    async with ranks(*sizes, heads=heads) as (source, decode):
        source.submit(make_request("r", 19, max_tokens=4), decode)
        source.compute()
        blocks = source.worker.scheduler.block_ids(R)
        await until(lambda: source.told.handed_over)
        landed = decode.worker.scheduler.block_ids(R)
        assert kv_bytes(source, blocks, 19) == kv_bytes(decode, landed, 19)
        decode.compute()
        assert decode.told.output("r") == dict(enumerate(oracle(range(1000, 1019), 4)))
        plans = reshard_layout(source.runner.layout, *sizes)
        assert counted == {p.key: 19 * p.bytes_per_token(source.runner.layout) for p in plans}
        replicas = max(sizes[1] // heads, 1)  # each destination rank that keeps a head needs it
        assert sum(counted.values()) == 19 * source.runner.layout.bytes_per_token * replicas
        assert source.told.handed_over[0].bytes == decode.worker.incoming.bytes_received == sum(counted.values())
        assert only_link(source).edges.made == len(plans)


async def test_edges_are_made_once_and_many_requests_share_them() -> None:
    async with ranks(2, 4) as (source, decode):
        for index in range(5):
            await hand_over(source, decode, f"r{index}", 3 + 4 * index)
        assert only_link(source).edges.made == 4


async def test_a_follower_packs_what_it_has_computed_and_no_earlier() -> None:
    """The followers lag: their KV of a chunk is complete only some time after the leader's."""
    async with ranks(4, 1, pause_s=0.05) as (source, decode):
        await hand_over(source, decode, "r", 30)


async def test_every_rank_sends_while_it_packs_and_the_bytes_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one section packed the peers have posted long since: the other goes after its sending has begun."""
    packed = sections.pack_layers

    def slowly(*where: Any) -> torch.Tensor:
        time.sleep(0.2)
        return packed(*where)

    monkeypatch.setattr(sections, "pack_layers", slowly)
    monkeypatch.setattr(sections, "AHEAD_BYTES", 1)
    async with ranks(2, 2) as (source, decode):
        await hand_over(source, decode, "r", 8)
        (follower,) = source.runner.follower_ends  # type: ignore[attr-defined]
        ends: list[Any] = [only_link(source).edges.ends[0, 0], *follower._ends.values()]
        assert [end.packed_while_sending for end in ends] == [1, 1]
        assert decode.worker.incoming.chunks_damaged == 0


async def test_only_the_edge_whose_chunk_was_damaged_sends_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    damaged, sent = [0], []

    def damage(edge: GlooEdge, buffer: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        sent.append(edge.spec.prefix)
        if not damaged[0] and "d0.1/" in edge.spec.prefix:
            damaged[0] = 1
            return flipped(buffer, buffer.numel() // 2), sums
        return buffer, sums

    on_the_wire(monkeypatch, damage)
    async with ranks(2, 2) as (source, decode):
        await hand_over(source, decode, "r", 8)
        assert source.worker.load().chunks_resent == 1 == decode.worker.incoming.chunks_damaged
        assert len(sent) == 3 and len(set(sent)) == 2


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_an_edge_that_dies_at_any_rank_costs_that_edge(side: str, rank: int) -> None:
    async with ranks(2, 2) as (source, decode):
        await hand_over(source, decode, "before", 10)
        link = only_link(source)
        if rank == 0:
            (incoming,) = decode.worker.incoming._links
            ends = link.edges.ends if side == "prefill" else incoming._edges
            ends[0, 0].abort("killed by the test")
        else:
            (follower,) = (source if side == "prefill" else decode).runner.follower_ends  # type: ignore[attr-defined]
            for end in follower._ends.values():
                end.abort("killed by the test")
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.told.parked or len(source.told.handed_over) == 2)
        if source.told.parked:  # only the other side knew: the first chunk found out
            source.assign(R, 2, decode)
            await until(lambda: len(source.told.handed_over) == 2)
        decode.compute()
        assert decode.told.output("r") == dict(enumerate(oracle(range(1000, 1020), 4)))
        assert link.edges.made == 3  # of the two edges one was made anew
        assert not source.runner.lost and not decode.runner.lost  # type: ignore[attr-defined]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_little_staging_memory_makes_small_pieces_and_no_deadlock(side: str) -> None:
    async with ranks(2, 2) as (source, decode):
        node = source.worker.outgoing._pieces._staging if side == "prefill" else decode.worker.incoming.staging
        token = source.runner.layout.bytes_per_token
        node.quota.limit_bytes = 3 * token if side == "prefill" else 3 * token // 2
        for index in range(3):
            source.submit(make_request(f"r{index}", 11 + index, max_tokens=5), decode)
        most = 0
        while source.step():
            await asyncio.sleep(0.002)
        while len(source.told.handed_over) < 3:
            most = max(most, node.quota.taken_bytes)
            assert most <= node.quota.limit_bytes
            await asyncio.sleep(0.001)
        assert most > 0 == node.quota.taken_bytes
        decode.compute()
        for index in range(3):
            assert decode.told.output(f"r{index}") == dict(enumerate(oracle(range(1000, 1011 + index), 5)))


async def test_no_room_in_staging_memory_parks_the_kv_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill.pieces.STAGING_WAIT_S", 0.1)
    async with ranks(1, 2) as (source, decode):
        room = source.worker.outgoing._pieces._staging
        async with room.hold(room.quota.limit_bytes, 1.0):
            source.submit(make_request("r", 11, max_tokens=5), decode)
            source.compute()
            await until(lambda: source.told.parked)
            assert "in staging memory within 0.1 s" in source.told.parked[0].reason
        source.assign(R, 2, decode)
        await until(lambda: source.told.handed_over)
        decode.compute()


class Held:
    """Holds the first call of a method of a follower's ends until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, frame: str, side: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        original = FollowerEnds._work

        async def work(ends: FollowerEnds, end: LocalEnd, order: Any) -> int:
            if type(order).__name__ == frame and end.worker.spec.side == side and not self.reached.is_set():
                self.reached.set()
                await asyncio.to_thread(self.go.wait, 5.0)
            return await original(ends, end, order)

        monkeypatch.setattr(FollowerEnds, "_work", work)


@pytest.mark.parametrize(("frame", "side"), ORDERS)
@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
async def test_an_abort_while_a_follower_is_at_it_leaves_nothing(
    frame: str, side: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks(2, 2) as (source, decode):
        held = Held(monkeypatch, frame, side)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        assert await asyncio.to_thread(held.reached.wait, HANG_S)
        if who != "decode":
            source.abort(R)
        if who != "prefill":
            decode.abort(R)
        await asyncio.sleep(0.02)
        held.go.set()
        source.compute()
        if who == "decode":
            await until(lambda: source.told.parked, what="parked KV")
            source.abort(R)
        await until(lambda: source.idle and decode.idle, what="idle pools")
        assert not source.told.handed_over and not decode.told.tokens
        await hand_over(source, decode, "again", 10)


async def test_the_next_chunk_is_announced_while_a_follower_stores_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edge is free for another sequence when its bytes have gone: two takes at one end."""
    under_way, most, work, written = [0], [0], FollowerEnds._work, sections.unpack

    async def counted(ends: FollowerEnds, end: LocalEnd, order: Any) -> int:
        under_way[0] += type(order).__name__ == "TakeEdge"
        most[0] = max(most[0], under_way[0])
        try:
            return await work(ends, end, order)
        finally:
            under_way[0] -= type(order).__name__ == "TakeEdge"

    def slowly(*where: Any) -> None:
        time.sleep(0.1)
        written(*where)

    monkeypatch.setattr(FollowerEnds, "_work", counted)
    monkeypatch.setattr(sections, "unpack", slowly)
    async with ranks(1, 2) as (source, decode):
        for index in range(3):
            source.submit(make_request(f"r{index}", 8, max_tokens=4), decode)
        while source.step():
            await asyncio.sleep(0.002)
        await until(lambda: len(source.told.handed_over) == 3, what="three hand-overs")
        assert most[0] >= 2 and decode.worker.incoming.chunks_damaged == 0
        decode.compute()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_cannot_pack_what_was_announced_ends_its_edge(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer has opened a receive, which must not wait for its limit."""
    async with ranks(2, 2, timeout_s=30.0) as (source, decode):
        packed, failed, writing = sections.pack_layers, threading.Event(), decode.worker.incoming.writing
        mine: Any = source.runner.ranks[rank].kv.layers  # type: ignore[attr-defined]

        def failing(layers: Any, *where: Any) -> torch.Tensor:
            if layers.rows[0][0].data_ptr() == mine[0][0].data_ptr() and not failed.is_set():
                while writing[R] < 2:  # both are announced
                    time.sleep(0.001)
                failed.set()
                raise edge_end.HandoffError("the test")
            failed.wait(10.0)  # or the other would be done before this one is announced
            return packed(layers, *where)

        monkeypatch.setattr(sections, "pack_layers", failing)
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.told.parked, what="parked KV")
        assert failed.is_set() and "the test" in source.told.parked[0].reason
        await until(lambda: decode.idle and not writing, what="an idle decode worker")
        source.abort(R)
        await until(lambda: source.idle, what="an idle prefill worker")
        await hand_over(source, decode, "again", 10)


async def test_blocks_stay_until_every_rank_has_stopped_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link breaks while a follower scatters: its blocks are free only when it has said that it is done."""
    started, free, written = threading.Event(), [-1], sections.unpack
    async with ranks(1, 2) as (source, decode):
        blocks = decode.worker.scheduler.blocks

        follower: Any = decode.runner.ranks[1].kv.layers  # type: ignore[attr-defined]

        def slowly(buffer: torch.Tensor, layers: Any, *where: Any) -> None:
            if layers.rows[0][0].data_ptr() != follower[0][0].data_ptr():
                written(buffer, layers, *where)
                return
            started.set()
            time.sleep(0.3)
            written(buffer, layers, *where)
            free.append(blocks.num_free)

        monkeypatch.setattr(sections, "unpack", slowly)
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        assert await asyncio.to_thread(started.wait, HANG_S)
        only_link(source)._stream.end("cut by the test")
        await until(lambda: decode.idle, what="an idle pool")
        await until(lambda: len(free) == 2)
        assert max(free) < 32
        source.abort(R)


async def test_a_follower_that_never_says_it_has_stopped_writing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.edge_ranks.ANSWER_LIMIT_S", 0.1)
    lost: list[str] = []

    class Deaf:
        on_report: Callable[[int, Any], None] | None = None

        def send_to(self, rank: int, frame: object) -> None:
            pass

        def lose(self, error: Exception) -> None:
            lost.append(str(error))

    ends = WorkerEnds(LocalEnds([], 4, "h"), Deaf())  # type: ignore[arg-type]
    spec = edge_end.EdgeSpec("h", 1, "x", 1, "decode", connect_timeout_s=0.1, operation_timeout_s=0.1)
    plan = reshard_layout(make_layout(), 1, 2)[1]
    end = ends(plan, spec)
    assert isinstance(end, RemoteEnd)
    part = Part((1,), 0, 4, 8, b"")
    with pytest.raises(edge_end.HandoffError, match="rank 1 did not answer an order to store KV within"):
        await end.take(part, lambda: None)
    assert lost == ["rank 1 did not answer an order to store KV within 0.2 s"] and end.dead is not None
    other = ends(plan, spec)
    with pytest.raises(edge_end.HandoffError, match="to pack KV within"):
        await other.fill(part, -1)
    assert len(lost) == 1 and len(ends) == 0
