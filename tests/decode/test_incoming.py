"""How a decode worker handles invalid or mistimed messages of a prefill worker: the protocol by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.errors import HandoffError
from baton.core.handover import AbortTransfer, Accept, Ack, EdgeOpen, EdgeReady, Ping, Posted, Refuse
from baton.core.request import SequenceId
from baton.runtime.streams import dial_link
from tests.support.nodes import pair, until
from tests.support.prefill_peer import TOKENS, R, peer


async def test_peer_completes_a_hand_over_in_two_chunks() -> None:
    async with peer() as p:
        assert await p.request(Ping(3)) == Ping(3)
        accept = await p.request(p.offer())
        assert isinstance(accept, Accept)
        assert await p.open_edge(1) == EdgeReady(0, 0, 1)
        assert await p.send(*p.chunk(0, 5)) == Ack(R, 0)
        assert await p.send(*p.chunk(5, 8)) == Ack(R, 5, complete=True)
        assert p.decode.worker.scheduler.num_waiting
        p.decode.compute()


async def test_repeated_offer_is_refused_and_the_first_remains_valid() -> None:
    async with peer() as p:
        await p.request(p.offer())
        again = await p.request(p.offer())
        assert isinstance(again, Refuse) and again.code == "duplicate_request"
        assert p.decode.worker.scheduler.receiving(R)
        short = await p.request(replace(p.offer("s"), num_tokens=3))
        assert isinstance(short, Refuse) and "the offer has 3 tokens, its request 8" in short.message


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("cannot follow 0", {"start_token": 1}),
        ("cannot follow 0", {"end_token": TOKENS + 1}),
        ("cannot follow 0", {"start_token": 0, "end_token": 0}),
        ("layers", {"start_layer": 1}),
        ("layers", {"end_layer": 0}),
        ("layers", {"end_layer": 3}),
        ("layers", {"start_layer": -1}),
        ("layers", {"start_layer": 1, "end_layer": 1}),
        ("bytes cannot be KV", {"end_layer": 1}),
        ("bytes cannot be KV", {"num_bytes": 64}),
        ("the last chunk", {"last": False}),
        ("the last chunk", {"first_token": None}),
        ("first token 65536 is outside the vocabulary of 65536", {"first_token": 1 << 16}),
        ("first token -7 is outside the vocabulary of", {"first_token": -7}),
        ("bytes of KV cannot be staged", {"num_bytes": -(1 << 40)}),
        ("bytes of KV cannot be staged", {"num_bytes": 0}),
        ("is not receiving the sequence", {"sequence": SequenceId("x")}),
        ("is not receiving the sequence", {"sequence": SequenceId("r", 0, 2)}),
        ("generation 2 is closed", {"edge_generation": 2}),
        ("generation 0 is closed", {"edge_generation": 0}),
    ],
)
async def test_invalid_chunk_is_refused_before_a_receive_is_posted(why: str, changes: dict[str, Any]) -> None:
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        chunk, _ = p.chunk()
        answer = await p.request(replace(chunk, **changes))
        if "generation" in why:
            assert isinstance(answer, EdgeReady) and answer.error and answer.generation == changes["edge_generation"]
            answer = await p.receive()
            assert p.decode.worker.load().stale_messages == 1
        assert isinstance(answer, AbortTransfer) and why in answer.reason
        assert not p.decode.worker.hand_overs.writing
        assert p.decode.worker.scheduler.receiving(R) == ("sequence" in changes)  # it ends its own sequence
        if "sequence" not in changes:
            assert "is not receiving the sequence" in (await p.request(p.chunk()[0])).reason
            await p.request(p.offer("s"))
        other = p.chunk(sequence=R if "sequence" in changes else SequenceId("s"))
        assert isinstance(await p.send(*other), Ack)  # other sequences and the edge are intact
        p.decode.compute()


async def test_layers_of_the_same_tokens_are_accepted_in_order() -> None:
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        assert await p.send(*p.chunk(0, 3, end_layer=1)) == Ack(R, 0)
        assert await p.send(*p.chunk(0, 3, index=1, start_layer=1)) == Ack(R, 1)
        assert await p.send(*p.chunk(3, 8, index=2, end_layer=1)) == Ack(R, 2)
        assert p.decode.worker.scheduler.receiving(R)
        assert await p.send(*p.chunk(3, 8, index=3, start_layer=1)) == Ack(R, 3, complete=True)
        p.decode.compute()


@pytest.mark.parametrize(
    ("why", "start", "end", "changes"),
    [
        ("cannot follow 1 of 2 layers up to 5", 0, 5, {}),  # all layers again
        ("cannot follow 1 of 2 layers up to 5", 0, 5, {"end_layer": 1}),
        ("cannot follow 1 of 2 layers up to 5", 0, 4, {"start_layer": 1}),
        ("cannot follow 1 of 2 layers up to 5", 0, 8, {"start_layer": 1}),
        ("cannot follow 0 of 8", 5, 8, {}),
        ("the last chunk", 0, 5, {"start_layer": 1, "last": True}),
    ],
)
async def test_only_the_remaining_layers_are_accepted_after_the_first_layers(
    why: str, start: int, end: int, changes: dict[str, Any]
) -> None:
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        await p.send(*p.chunk(0, 5, end_layer=1))
        answer = await p.request(p.chunk(start, end, **changes)[0])
        assert isinstance(answer, AbortTransfer) and why in answer.reason
        assert p.decode.idle


@pytest.mark.parametrize("first", [{}, {"end_layer": 1}])
async def test_chunk_is_refused_while_the_previous_one_is_still_being_received(first: dict[str, Any]) -> None:
    """Otherwise its bytes could be written after the blocks have been reused for another sequence."""
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk(**first)
        assert isinstance(await p.request(chunk), Posted)
        await p.send_message(p.chunk(index=1)[0])
        await until(lambda: not p.decode.worker.scheduler.receiving(R), what="the end of the hand-over")
        assert p.decode.worker.hand_overs.writing[R] == 1  # posted bytes may still arrive: the blocks stay held
        await p.send_bytes(chunk, buffer)
        answer = await p.receive()
        assert isinstance(answer, AbortTransfer) and "before the previous one completed" in answer.reason
        await until(lambda: p.decode.idle)
        await p.request(p.offer("s"))
        assert (await p.send(*p.chunk(sequence=SequenceId("s")))).complete  # other sequences and the edge are intact
        p.decode.compute()


async def test_chunk_of_an_older_edge_generation_is_refused() -> None:
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        old = p.edge
        await p.open_edge(2)
        answer = await p.request(p.chunk()[0])
        assert isinstance(answer, EdgeReady) and "generation 1 is closed" in answer.error
        assert isinstance(await p.receive(), AbortTransfer)
        await p.request(p.offer("s"))
        assert (await p.send(*p.chunk(sequence=SequenceId("s"), edge_generation=2))).complete
        assert old is not None
        with pytest.raises(HandoffError):
            await old.send(torch.zeros(8, dtype=torch.uint8))
        p.decode.compute()


async def test_chunk_without_an_open_edge_is_refused() -> None:
    async with peer() as p:
        await p.request(p.offer())
        assert isinstance(await p.request(p.chunk()[0]), EdgeReady)
        assert isinstance(await p.receive(), AbortTransfer)


async def test_edge_whose_peer_never_connects_is_reported_as_an_error() -> None:
    async with pair(timeout_s=0.4) as (source, [decode]):
        link = await dial_link(decode.address, source.worker._hello(), 2.0)
        await link.stream.send(EdgeOpen(0, 0, 1, "nobody/else"))
        answer = await asyncio.wait_for(link.stream.receive(), 30)
        assert isinstance(answer, EdgeReady) and answer.error
        await link.close()


@pytest.mark.parametrize("key", [(0, 1), (1, 0), (-1, 0)])
async def test_edge_between_ranks_without_common_heads_is_refused(key: tuple[int, int]) -> None:
    async with peer() as p:
        answer = await p.request(EdgeOpen(*key, 1, "x"))
        assert answer == EdgeReady(*key, 1, f"no edge from prefill rank {key[0]} to decode rank {key[1]}")
        await p.request(p.offer())
        chunk, _ = p.chunk(prefill_rank=key[0], decode_rank=key[1])
        assert isinstance(await p.request(chunk), EdgeReady)
        assert isinstance(await p.receive(), AbortTransfer)
