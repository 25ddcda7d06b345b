"""In which order a chunk is announced, received and packed, and what ends when packing fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.request import SequenceId
from baton.runtime.streams import MessageStream
from baton.transfer.edge_endpoint import LocalEndpoint
from baton.transfer.sections import Packing
from prefill.link import Link
from tests.support.builders import make_request
from tests.support.link_gate import Gate
from tests.support.nodes import pair, serve, until

R = SequenceId("r")


async def test_receive_is_posted_before_the_chunk_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (source, [decode]):
        gate = Gate(monkeypatch, "fill", "before")
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await asyncio.wait_for(gate.reached.wait(), 30)
        await until(lambda: decode.worker.hand_overs.writing[R] == 1, what="an open receive")
        gate.opened.set()
        await until(lambda: source.posted.handed_over)
        decode.compute()


async def test_no_chunk_is_packed_before_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing keeps the core busy, so an announcement that is not written before it would be delayed."""
    async with pair() as (source, [decode]):
        write, order = MessageStream.send_unshielded, []

        async def written(stream: Any, message: Any, *limits: float) -> None:
            await write(stream, message, *limits)
            order.append(type(message).__name__)

        begin = Packing.begin
        monkeypatch.setattr(MessageStream, "send_unshielded", written)
        monkeypatch.setattr(Packing, "begin", lambda packing: (order.append("packed"), begin(packing)))
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.handed_over)
        decode.compute()
        assert [step for step in order if step in ("Chunk", "packed")] == ["Chunk", "packed"]


async def test_chunk_with_none_ahead_of_it_is_announced_in_the_next_event_loop_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (source, [decode]):
        announced: list[int] = []
        announce = Link.announce

        async def noted(link: Link, chunk: Any, timeout_s: float) -> Any:
            announced.append(chunk.index)
            return await announce(link, chunk, timeout_s)

        monkeypatch.setattr(Link, "announce", noted)
        source.submit(make_request("r", 16, max_tokens=4), decode)
        source.step()
        await until(lambda: source.worker.sender.counters.bytes_sent and announced == [0])
        over = source.worker.sender._runs[source.worker.scheduler.sequences[R]]
        await until(lambda: over.sending is not None and over.sending.get_name() == "chunk 1")
        await asyncio.sleep(0)  # the first piece is acknowledged, and now the next one waits for the step
        source.step()
        assert announced == [0]
        await asyncio.sleep(0)
        assert announced == [0, 1]
        await until(lambda: source.posted.handed_over)
        decode.compute()


async def test_error_while_packing_ends_the_receive_that_was_posted_for_the_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the next chunk on the edge would be received in place of this one."""
    async with pair(timeout_s=30.0) as (source, [decode]):
        fill, failed = LocalEndpoint.fill, []

        async def failing(end: LocalEndpoint, *what: Any) -> None:
            if not failed:
                await until(lambda: decode.worker.hand_overs.writing[R] == 1, what="an open receive")
                failed.append(end)
                raise RuntimeError("a bug")
            await fill(end, *what)

        monkeypatch.setattr(LocalEndpoint, "fill", failing)
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: failed and decode.idle and source.idle, what="idle pools")
        assert failed[0].dead is not None and not decode.worker.hand_overs.writing
        await serve(source, decode)
