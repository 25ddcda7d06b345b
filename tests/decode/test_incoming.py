"""What a decode worker does with a prefill worker that says odd things at odd times: the protocol by hand."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.errors import HandoffError
from baton.core.handover import (
    AbortTransfer,
    Accept,
    Ack,
    Chunk,
    EdgeOpen,
    EdgeReady,
    Offer,
    Ping,
    Posted,
    Refuse,
    chunk_identity,
)
from baton.core.request import SequenceId
from baton.rpc.link import DialledLink, dial_link
from baton.transfer import sections
from baton.transfer.edge import EdgeSpec, edge_prefix
from baton.transfer.edge_thread import EdgeWorker
from baton.transfer.staging import checksum, chunk_bytes
from decode import incoming
from tests.support.builders import make_request
from tests.support.limits import HANG_S
from tests.support.nodes import DecodeNode, PrefillNode, pair, until

R = SequenceId("r")
TOKENS = 8


class Peer:
    """A prefill worker that does as it is told."""

    def __init__(self, source: PrefillNode, decode: DecodeNode, link: DialledLink) -> None:
        self.source, self.decode, self.link = source, decode, link
        self.edge: EdgeWorker | None = None

    async def say(self, message: Any) -> None:
        await self.link.stream.send(message)

    async def hear(self) -> Any:
        return await asyncio.wait_for(self.link.stream.receive(), HANG_S)

    async def ask(self, message: Any) -> Any:
        await self.say(message)
        return await self.hear()

    def offer(self, name: str = "r") -> Offer:
        request = make_request(name, TOKENS, max_tokens=4)
        return Offer(request, self.decode.handle(request.sequence_id, self.source.worker), TOKENS)

    async def open_edge(self, generation: int) -> EdgeReady:
        welcome = self.link.welcome
        prefix = edge_prefix(welcome.store_nonce, "p0", 0, welcome.decode_worker, 0, generation)
        spec = EdgeSpec(welcome.store_host, welcome.store_port, prefix, generation, "prefill", connect_timeout_s=2.0)
        self.edge = EdgeWorker(spec)
        await self.say(EdgeOpen(0, 0, generation, prefix))
        await self.edge.connect()
        ready: EdgeReady = await self.hear()
        return ready

    def chunk(self, start: int = 0, end: int = TOKENS, **changes: Any) -> tuple[Chunk, torch.Tensor]:
        layout = self.source.runner.layout
        layers = range(len(layout.layers))[changes.get("start_layer", 0) : changes.get("end_layer", len(layout.layers))]
        last = end == TOKENS and layers.stop == len(layout.layers)
        size = chunk_bytes(layout, end - start) * len(layers) // len(layout.layers)
        buffer = torch.full((size,), 7, dtype=torch.uint8)
        values = {
            "sequence": R,
            "index": start,
            "start_token": start,
            "end_token": end,
            "start_layer": 0,
            "end_layer": len(layout.layers),
            "num_bytes": buffer.numel(),
            "edge_generation": 1,
            "first_token": 5 if last else None,
            "last": last,
        }
        return Chunk(**{**values, **changes}), buffer  # type: ignore[arg-type]

    async def send_bytes(self, chunk: Chunk, buffer: torch.Tensor, packed: torch.Tensor | None = None) -> None:
        """In sections of one layer; the checksums are those of `packed`, if given."""
        layers = chunk.end_layer - chunk.start_layer
        ends = [buffer.numel() * (index + 1) // layers for index in range(layers)]
        parts = (buffer if packed is None else packed).chunk(layers)
        identity = chunk_identity(chunk)
        sums = [checksum(identity + struct.pack("<II", i, i + 1), part) for i, part in enumerate(parts)]
        assert self.edge is not None
        await self.edge.send(buffer, ends=ends, ready=sums.__getitem__)

    async def send(self, chunk: Chunk, buffer: torch.Tensor, packed: torch.Tensor | None = None) -> Any:
        """Announces, waits for `posted`, sends, and gives the answer. The checksums are those of `packed`, if given."""
        assert isinstance(posted := await self.ask(chunk), Posted), posted
        await self.send_bytes(chunk, buffer, packed)
        return await self.hear()


@contextlib.asynccontextmanager
async def peer() -> AsyncIterator[Peer]:
    async with pair() as (source, [decode]):
        made = Peer(source, decode, await dial_link(decode.address, source.worker._hello(), 2.0))
        try:
            yield made
        finally:
            await made.link.close()
            if made.edge is not None:
                await made.edge.close()


async def test_the_whole_conversation() -> None:
    async with peer() as p:
        assert await p.ask(Ping(3)) == Ping(3)
        accept = await p.ask(p.offer())
        assert isinstance(accept, Accept) and len(accept.block_generations) == 2
        assert await p.open_edge(1) == EdgeReady(0, 0, 1)
        assert await p.send(*p.chunk(0, 5)) == Ack(R, 0)
        assert await p.send(*p.chunk(5, 8)) == Ack(R, 5, complete=True)
        assert p.decode.worker.scheduler.num_waiting
        p.decode.compute()


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
        ("is not being received", {"sequence": SequenceId("x")}),
        ("is not being received", {"sequence": SequenceId("r", 0, 2)}),
        ("generation 2 does not stand", {"edge_generation": 2}),
        ("generation 0 does not stand", {"edge_generation": 0}),
    ],
)
async def test_a_chunk_that_cannot_be_is_refused_before_anything_is_posted(why: str, changes: dict[str, Any]) -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        chunk, _ = p.chunk()
        answer = await p.ask(replace(chunk, **changes))
        if "generation" in why:
            assert isinstance(answer, EdgeReady) and answer.error and answer.generation == changes["edge_generation"]
            answer = await p.hear()
            assert p.decode.worker.load().stale_messages == 1
        assert isinstance(answer, AbortTransfer) and why in answer.reason
        assert not p.decode.worker.incoming.writing
        assert p.decode.worker.scheduler.receiving(R) == ("sequence" in changes)  # it ends the sequence it is of
        if "sequence" not in changes:
            assert "is not being received" in (await p.ask(p.chunk()[0])).reason
            await p.ask(p.offer("s"))
        other = p.chunk(sequence=R if "sequence" in changes else SequenceId("s"))
        assert isinstance(await p.send(*other), Ack)  # others and the edge are as they were
        p.decode.compute()


async def test_a_chunk_cannot_be_left_out() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        await p.send(*p.chunk(0, 3))
        chunk, _ = p.chunk(4, 8)
        assert "cannot follow 3" in (await p.ask(chunk)).reason
        assert p.decode.idle


async def test_the_layers_of_the_same_tokens_come_in_order() -> None:
    async with peer() as p:
        await p.ask(p.offer())
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
        ("cannot follow 1 of 2 layers up to 5", 0, 5, {}),  # all of them again
        ("cannot follow 1 of 2 layers up to 5", 0, 5, {"end_layer": 1}),
        ("cannot follow 1 of 2 layers up to 5", 0, 4, {"start_layer": 1}),
        ("cannot follow 1 of 2 layers up to 5", 0, 8, {"start_layer": 1}),
        ("cannot follow 0 of 8", 5, 8, {}),
        ("the last chunk", 0, 5, {"start_layer": 1, "last": True}),
    ],
)
async def test_behind_first_layers_come_the_others(why: str, start: int, end: int, changes: dict[str, Any]) -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        await p.send(*p.chunk(0, 5, end_layer=1))
        answer = await p.ask(p.chunk(start, end, **changes)[0])
        assert isinstance(answer, AbortTransfer) and why in answer.reason
        assert p.decode.idle


@pytest.mark.parametrize("first", [{}, {"end_layer": 1}])
async def test_a_chunk_before_the_end_of_the_one_before_it_is_refused(first: dict[str, Any]) -> None:
    """Its bytes would be written when the blocks are another's."""
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk(**first)
        assert isinstance(await p.ask(chunk), Posted)
        await p.say(p.chunk(index=1)[0])
        await until(lambda: not p.decode.worker.scheduler.receiving(R), what="the end of the hand-over")
        assert p.decode.worker.incoming.writing[R] == 1  # what is posted may still come, and its blocks wait for it
        await p.send_bytes(chunk, buffer)
        answer = await p.hear()
        assert isinstance(answer, AbortTransfer) and "before the end of the one before it" in answer.reason
        await until(lambda: p.decode.idle)
        await p.ask(p.offer("s"))
        assert (await p.send(*p.chunk(sequence=SequenceId("s")))).complete  # others and the edge are as they were
        p.decode.compute()


async def test_an_older_generation_does_not_stand_any_more() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        old = p.edge
        await p.open_edge(2)
        answer = await p.ask(p.chunk()[0])
        assert isinstance(answer, EdgeReady) and "generation 1 has ended" in answer.error
        assert isinstance(await p.hear(), AbortTransfer)
        await p.ask(p.offer("s"))
        assert (await p.send(*p.chunk(sequence=SequenceId("s"), edge_generation=2))).complete
        assert old is not None
        with pytest.raises(HandoffError):
            await old.send(torch.zeros(8, dtype=torch.uint8))
        p.decode.compute()


async def test_no_edge_at_all() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        assert isinstance(await p.ask(p.chunk()[0]), EdgeReady)
        assert isinstance(await p.hear(), AbortTransfer)


async def test_an_edge_whose_other_end_never_comes_is_reported_as_an_error() -> None:
    async with pair(timeout_s=0.4) as (source, [decode]):
        link = await dial_link(decode.address, source.worker._hello(), 2.0)
        await link.stream.send(EdgeOpen(0, 0, 1, "nobody/else"))
        answer = await asyncio.wait_for(link.stream.receive(), 3)
        assert isinstance(answer, EdgeReady) and answer.error
        await link.close()


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_what_was_posted_is_still_sent_and_its_blocks_stay_until_then(who: str) -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk()
        assert isinstance(await p.ask(chunk), Posted)
        if who == "prefill":
            await p.say(AbortTransfer(R, "the client left", 0.0))
        else:
            p.decode.abort(R)
        await until(lambda: not p.decode.worker.scheduler.receiving(R))
        assert p.decode.worker.scheduler.blocks.num_free == 14  # two are still written into
        assert p.edge is not None
        await p.send_bytes(chunk, buffer)
        assert isinstance(await p.hear(), AbortTransfer)
        await until(lambda: p.decode.idle)
        # The edge has not suffered: the next sequence uses it at once.
        await p.ask(p.offer("s"))
        assert (await p.send(*p.chunk(sequence=SequenceId("s")))).complete
        p.decode.compute()


async def test_bytes_that_never_come_end_the_sequence_and_the_edge() -> None:
    async with pair(timeout_s=1.5) as (source, [decode]):  # the edge itself must be built within it
        p = Peer(source, decode, await dial_link(decode.address, source.worker._hello(), 2.0))
        await p.ask(p.offer())
        assert not (await p.open_edge(1)).error
        assert isinstance(await p.ask(p.chunk()[0]), Posted)
        answer = await p.hear()
        assert isinstance(answer, EdgeReady) and answer.error
        assert isinstance(await p.hear(), AbortTransfer)
        assert decode.idle
        await p.link.close()
        assert p.edge is not None
        await p.edge.close()


async def test_a_damaged_chunk_is_asked_for_once_more() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk()
        damaged = buffer.clone()
        damaged[0] ^= 1
        assert await p.send(chunk, damaged, packed=buffer) == Ack(R, 0, ok=False)
        assert p.decode.worker.scheduler.receiving(R)
        assert (await p.send(chunk, buffer)).complete
        p.decode.compute()


async def test_an_offer_made_twice_is_refused_and_the_first_stands() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        again = await p.ask(p.offer())
        assert isinstance(again, Refuse) and again.code == "duplicate_request"
        assert p.decode.worker.scheduler.receiving(R)
        short = await p.ask(replace(p.offer("s"), num_tokens=3))
        assert isinstance(short, Refuse) and "3 tokens offered of 8" in short.message


async def test_the_end_of_the_link_frees_what_had_not_arrived() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        await p.send(*p.chunk(0, 5))
        await p.link.close()
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.told.ended] == [(R, "worker_lost")]


async def test_a_prefill_worker_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have stopped in the middle of anything; its connection stands, and no chunk may be under way to tell."""
    monkeypatch.setattr(incoming, "SILENCE_S", 0.3)
    async with peer() as p:
        await p.ask(p.offer())
        for nonce in range(4):
            await asyncio.sleep(0.1)
            assert await p.ask(Ping(nonce)) == Ping(nonce)
        assert p.decode.worker.scheduler.receiving(R)
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.told.ended] == [(R, "worker_lost")]
        assert "silent for 0.3 s" in p.decode.told.ended[0].message


@pytest.mark.parametrize("slow", ["checksum", "unpack"])
async def test_nothing_is_written_into_blocks_that_are_free_again(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edge is torn down while its thread is still at work: the loop hears of it at once, the thread does not."""
    started, wrote_with_free = threading.Event(), []
    original = getattr(sections, slow)

    def slowly(*args: Any) -> Any:
        started.set()
        time.sleep(0.2)
        return original(*args)

    monkeypatch.setattr(sections, slow, slowly)
    async with peer() as p:
        written = sections.unpack

        def noted(*args: Any) -> None:
            written(*args)
            wrote_with_free.append(p.decode.worker.scheduler.blocks.num_free)

        monkeypatch.setattr(sections, "unpack", noted)
        await p.ask(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk()
        assert isinstance(await p.ask(chunk), Posted)
        assert p.edge is not None
        sending = asyncio.create_task(p.send_bytes(chunk, buffer))
        await asyncio.to_thread(started.wait, 2)
        await p.link.close()
        await until(lambda: p.decode.idle)
        await asyncio.sleep(0.3)
        with contextlib.suppress(HandoffError):  # the edge may have been torn down under it
            await sending
        assert wrote_with_free == ([14] if slow == "unpack" else [])


@pytest.mark.parametrize("key", [(0, 1), (1, 0), (-1, 0)])
async def test_an_edge_between_ranks_that_share_nothing_is_refused(key: tuple[int, int]) -> None:
    async with peer() as p:
        answer = await p.ask(EdgeOpen(*key, 1, "x"))
        assert answer == EdgeReady(*key, 1, f"no KV goes from rank {key[0]} to rank {key[1]}")
        await p.ask(p.offer())
        chunk, _ = p.chunk(prefill_rank=key[0], decode_rank=key[1])
        assert isinstance(await p.ask(chunk), EdgeReady)
        assert isinstance(await p.hear(), AbortTransfer)
