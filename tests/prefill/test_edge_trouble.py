"""Hand-overs between workers of several ranks that are cut, aborted or fail at one of the ranks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.core.edge_orders import Part
from baton.core.request import SequenceId
from baton.core.reshard import reshard_layout
from baton.runtime.edge_ranks import FollowerEndpoints, RemoteEndpoint, WorkerEndpoints
from baton.transfer import edge_endpoint, sections
from baton.transfer.edge_endpoint import LocalEndpoint, LocalEndpoints
from tests.support.builders import make_layout, make_request
from tests.support.fake_runner import oracle
from tests.support.limits import HANG_S
from tests.support.nodes import abort_at, check_aborted, until
from tests.support.rank_pairs import hand_over, latest_generation, only_link, ranks

R = SequenceId("r")
ORDERS = [(f"{name}Edge", "prefill") for name in ("Open", "Fill", "Send")]
ORDERS += [(f"{name}Edge", "decode") for name in ("Open", "Take")]


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("rank", [0, 1])
async def test_edge_that_breaks_at_any_rank_is_rebuilt_alone(side: str, rank: int) -> None:
    async with ranks(2, 2) as (source, decode):
        await hand_over(source, decode, "before", 10)
        link = only_link(source)
        made = latest_generation(link)
        if rank == 0:
            (incoming,) = decode.worker.receiver._links.values()
            ends = link.endpoints if side == "prefill" else incoming._edges
            ends[0, 0].abort("killed by the test")
        else:
            (follower,) = (source if side == "prefill" else decode).runner.follower_endpoints  # type: ignore[attr-defined]
            for end in follower._endpoints.values():
                end.abort("killed by the test")
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.parked or len(source.posted.handed_over) == 2)
        if source.posted.parked:  # only the other side had detected it: the first chunk failed
            source.assign(R, 2, decode)
            await until(lambda: len(source.posted.handed_over) == 2)
        decode.compute()
        assert decode.posted.output("r") == dict(enumerate(oracle(range(1000, 1020), 4)))
        assert latest_generation(link) == made + 1, "of the two edges one was made anew"
        assert only_link(source) is link
        assert not source.runner.lost and not decode.runner.lost  # type: ignore[attr-defined]


class Held:
    """Holds the first call of a method of a follower's ends until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, frame: str, side: str) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        original = FollowerEndpoints._work

        async def work(ends: FollowerEndpoints, end: LocalEndpoint, order: Any) -> int:
            if type(order).__name__ == frame and end.worker.spec.side == side and not self.reached.is_set():
                self.reached.set()
                await asyncio.to_thread(self.go.wait, 5.0)
            return await original(ends, end, order)

        monkeypatch.setattr(FollowerEndpoints, "_work", work)


@pytest.mark.parametrize(("frame", "side"), ORDERS)
@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
async def test_abort_while_a_follower_handles_an_order_leaks_nothing(
    frame: str, side: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks(2, 2) as (source, decode):
        held = Held(monkeypatch, frame, side)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        assert await asyncio.to_thread(held.reached.wait, HANG_S)
        await abort_at(source, decode, R, who)
        held.go.set()
        await check_aborted(source, decode, R, who)
        await hand_over(source, decode, "again", 10)


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_that_fails_to_pack_an_announced_chunk_closes_its_edge(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer has posted a receive, which must not wait for its timeout."""
    async with ranks(2, 2, timeout_s=30.0) as (source, decode):
        packed, failed, hand_overs = sections.pack_layers, threading.Event(), decode.worker.hand_overs
        mine: Any = source.runner.ranks[rank].kv.layers  # type: ignore[attr-defined]

        def failing(layers: Any, *where: Any) -> torch.Tensor:
            if layers.rows[0][0].data_ptr() == mine[0][0].data_ptr() and not failed.is_set():
                while hand_overs.writing[R] < 2:  # both are announced
                    time.sleep(0.001)
                failed.set()
                raise edge_endpoint.HandoffError("the test")
            failed.wait(10.0)  # else the other rank ends before this one is announced
            return packed(layers, *where)

        monkeypatch.setattr(sections, "pack_layers", failing)
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.parked, what="parked KV")
        assert failed.is_set() and "the test" in source.posted.parked[0].reason
        await until(lambda: decode.idle and not hand_overs.writing, what="an idle decode worker")
        source.abort(R)
        await until(lambda: source.idle, what="an idle prefill worker")
        await hand_over(source, decode, "again", 10)


async def test_blocks_are_held_until_all_ranks_have_stopped_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link breaks while a follower scatters: the blocks are freed only after it has reported that it is done."""
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


async def test_follower_that_does_not_answer_an_order_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.edge_ranks.ANSWER_LIMIT_S", 0.1)
    lost: list[str] = []

    class SilentRanks:
        on_report: Callable[[int, Any], None] | None = None

        def send_to(self, rank: int, frame: object) -> None:
            pass

        def lose(self, error: Exception) -> None:
            lost.append(str(error))

    ends = WorkerEndpoints(LocalEndpoints([], 4, "h"), SilentRanks())  # type: ignore[arg-type]
    spec = edge_endpoint.EdgeSpec("h", 1, "x", 1, "decode", connect_timeout_s=0.1, operation_timeout_s=0.1)
    plan = reshard_layout(make_layout(), 1, 2)[1]
    end = ends(plan, spec)
    assert isinstance(end, RemoteEndpoint)
    part = Part((1,), 0, 4, 8, b"")
    with pytest.raises(edge_endpoint.HandoffError, match="rank 1 did not reply to an order to store KV within"):
        await end.take(part, lambda: None)
    assert lost == ["rank 1 did not reply to an order to store KV within 0.2 s"] and end.dead is not None
    other = ends(plan, spec)
    with pytest.raises(edge_endpoint.HandoffError, match="to pack KV within"):
        await other.fill(part, -1)
    assert len(lost) == 1 and len(ends) == 0
