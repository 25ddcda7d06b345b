"""Hand-overs between workers of several ranks: an edge for each pair of ranks that share KV heads."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.request import SequenceId
from baton.core.reshard import EdgeKey, reshard_layout
from baton.runtime.edge_ranks import FollowerEndpoints
from baton.transfer import sections
from baton.transfer.edge_endpoint import LocalEndpoint
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.gloo import GlooEdge
from tests.support.builders import make_request
from tests.support.edges import Sums, flipped, on_the_wire
from tests.support.fake_runner import oracle
from tests.support.nodes import kv_bytes, until
from tests.support.rank_pairs import hand_over, latest_generation, only_link, ranks

R = SequenceId("r")
SIZES = (1, 2, 4)


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


@pytest.mark.parametrize("heads", [1, 2, 4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("sizes", [(p, d) for p in SIZES for d in SIZES])
async def test_each_head_is_sent_once_per_destination_rank_for_all_rank_counts(
    sizes: tuple[int, int], heads: int, counted: dict[EdgeKey, int]
) -> None:
    async with ranks(*sizes, heads=heads) as (source, decode):
        source.submit(make_request("r", 19, max_tokens=4), decode)
        source.compute()
        blocks = source.worker.scheduler.block_ids(R)
        await until(lambda: source.posted.handed_over)
        landed = decode.worker.scheduler.block_ids(R)
        assert kv_bytes(source, blocks, 19) == kv_bytes(decode, landed, 19)
        decode.compute()
        assert decode.posted.output("r") == dict(enumerate(oracle(range(1000, 1019), 4)))
        plans = reshard_layout(source.runner.layout, *sizes)
        assert counted == {p.key: 19 * p.bytes_per_token(source.runner.layout) for p in plans}
        replicas = max(sizes[1] // heads, 1)  # each destination rank that keeps a head needs it
        assert sum(counted.values()) == 19 * source.runner.layout.bytes_per_token * replicas
        assert (
            source.posted.handed_over[0].bytes
            == decode.worker.hand_overs.counters.bytes_received
            == sum(counted.values())
        )
        assert sorted(only_link(source).endpoints) == sorted(p.key for p in plans)


async def test_edges_are_built_once_and_shared_by_requests() -> None:
    async with ranks(2, 4) as (source, decode):
        await hand_over(source, decode, "r0", 3)
        made = latest_generation(only_link(source))
        for index in range(1, 5):
            await hand_over(source, decode, f"r{index}", 3 + 4 * index)
        assert len(only_link(source).endpoints) == 4 and latest_generation(only_link(source)) == made


async def test_follower_packs_a_chunk_only_after_computing_it() -> None:
    """The followers lag: their KV of a chunk is complete only some time after the leader's."""
    async with ranks(4, 1, pause_s=0.05) as (source, decode):
        await hand_over(source, decode, "r", 30)


async def test_all_ranks_send_while_packing_and_the_bytes_are_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers post their receives while the first section is packed, so the second is packed during the sending."""
    packed = sections.pack_layers

    def slowly(*where: Any) -> torch.Tensor:
        time.sleep(0.2)
        return packed(*where)

    monkeypatch.setattr(sections, "pack_layers", slowly)
    monkeypatch.setattr(sections, "AHEAD_BYTES", 1)
    async with ranks(2, 2) as (source, decode):
        await hand_over(source, decode, "r", 8)
        (follower,) = source.runner.follower_endpoints  # type: ignore[attr-defined]
        ends: list[Any] = [only_link(source).endpoints[0, 0], *follower._endpoints.values()]
        assert [end.packed_while_sending for end in ends] == [1, 1]
        assert decode.worker.hand_overs.counters.chunks_damaged == 0


async def test_only_the_edge_with_a_damaged_chunk_resends_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert source.worker.load().chunks_resent == 1 == decode.worker.hand_overs.counters.chunks_damaged
        assert len(sent) == 3 and len(set(sent)) == 2


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_small_staging_memory_makes_small_chunks_without_deadlock(side: str) -> None:
    async with ranks(2, 2) as (source, decode):
        sender = source.worker.sender
        node = sender.staging if side == "prefill" else decode.worker.receiver.staging
        token = source.runner.layout.bytes_per_token
        node.limit_bytes = 3 * token if side == "prefill" else 3 * token // 2
        sender._limits = replace(sender._limits, staging_bytes=sender.staging.limit_bytes)
        for index in range(3):
            source.submit(make_request(f"r{index}", 11 + index, max_tokens=5), decode)
        most = 0
        while source.step():
            await asyncio.sleep(0.002)
        while len(source.posted.handed_over) < 3:
            most = max(most, node.taken_bytes)
            assert most <= node.limit_bytes
            await asyncio.sleep(0.001)
        assert most > 0 == node.taken_bytes
        decode.compute()
        for index in range(3):
            assert decode.posted.output(f"r{index}") == dict(enumerate(oracle(range(1000, 1011 + index), 5)))


async def test_full_staging_memory_parks_the_kv_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill.sender.STAGING_WAIT_S", 0.1)
    async with ranks(1, 2) as (source, decode):
        room = source.worker.sender.staging
        async with room.hold(room.limit_bytes, 1.0):
            source.submit(make_request("r", 11, max_tokens=5), decode)
            source.compute()
            await until(lambda: source.posted.parked)
            assert "in staging memory within 0.1 s" in source.posted.parked[0].reason
        source.assign(R, 2, decode)
        await until(lambda: source.posted.handed_over)
        decode.compute()


async def test_next_chunk_is_announced_while_a_follower_stores_the_previous_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An edge is free for another sequence once its bytes are transferred, so two receives overlap at one end."""
    under_way, most, work, written = [0], [0], FollowerEndpoints._work, sections.unpack

    async def counted(ends: FollowerEndpoints, end: LocalEndpoint, order: Any) -> int:
        under_way[0] += type(order).__name__ == "TakeEdge"
        most[0] = max(most[0], under_way[0])
        try:
            return await work(ends, end, order)
        finally:
            under_way[0] -= type(order).__name__ == "TakeEdge"

    def slowly(*where: Any) -> None:
        time.sleep(0.1)
        written(*where)

    monkeypatch.setattr(FollowerEndpoints, "_work", counted)
    monkeypatch.setattr(sections, "unpack", slowly)
    async with ranks(1, 2) as (source, decode):
        for index in range(3):
            source.submit(make_request(f"r{index}", 8, max_tokens=4), decode)
        while source.step():
            await asyncio.sleep(0.002)
        await until(lambda: len(source.posted.handed_over) == 3, what="three hand-overs")
        assert most[0] >= 2 and decode.worker.hand_overs.counters.chunks_damaged == 0
        decode.compute()
