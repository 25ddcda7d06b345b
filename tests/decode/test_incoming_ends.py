"""A transfer that ends before all its KV has arrived: its blocks are freed, but not while they are being written."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from baton.core.errors import HandoffError
from baton.core.handover import AbortTransfer, EdgeReady, Ping, Posted
from baton.core.request import SequenceId
from baton.runtime.streams import dial_link
from baton.transfer import sections
from decode import receiver
from prefill import link
from tests.support.builders import make_request
from tests.support.nodes import pair, until
from tests.support.prefill_peer import Peer, R, peer


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_blocks_of_an_aborted_sequence_are_held_until_the_posted_receive_ends(who: str) -> None:
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk()
        assert isinstance(await p.request(chunk), Posted)
        if who == "prefill":
            await p.send_message(AbortTransfer(R, "the client left", 0.0))
        else:
            p.decode.abort(R)
        await until(lambda: not p.decode.worker.scheduler.receiving(R))
        assert p.decode.worker.scheduler.blocks.num_free == 14  # two are still being written
        assert p.edge is not None
        await p.send_bytes(chunk, buffer)
        assert isinstance(await p.receive(), AbortTransfer)
        await until(lambda: p.decode.idle)
        # The edge is still usable, by the next sequence.
        await p.request(p.offer("s"))
        assert (await p.send(*p.chunk(sequence=SequenceId("s")))).complete
        p.decode.compute()


async def test_chunk_whose_bytes_never_arrive_ends_the_sequence_and_the_edge() -> None:
    async with pair(timeout_s=1.5) as (source, [decode]):  # building the edge must fit in it
        p = Peer(source, decode, await dial_link(decode.address, source.worker._hello(), 2.0))
        await p.request(p.offer())
        assert not (await p.open_edge(1)).error
        assert isinstance(await p.request(p.chunk()[0]), Posted)
        answer = await p.receive()
        assert isinstance(answer, EdgeReady) and answer.error
        assert isinstance(await p.receive(), AbortTransfer)
        assert decode.idle
        await p.link.close()
        assert p.edge is not None
        await p.edge.close()


async def test_end_of_the_link_frees_the_blocks_of_incomplete_sequences() -> None:
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        await p.send(*p.chunk(0, 5))
        await p.link.close()
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.posted.ended] == [(R, "worker_lost")]


async def test_generating_sequence_aborted_by_its_prefill_worker_is_reported() -> None:
    """Prefill missed the last acknowledgement, and may die before the coordinator learns that it parked the KV."""
    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        assert (await p.send(*p.chunk())).complete
        p.decode.step()
        await p.link.stream.send(AbortTransfer(R, "no last acknowledgement", 1.0))
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.posted.ended] == [(R, "abandoned")]


async def test_a_prefill_worker_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stop at any point; its connection stays open, and there may be no chunk in flight that could time out."""
    monkeypatch.setattr(receiver, "LINK_SILENCE_S", 0.3)
    async with peer() as p:
        await p.request(p.offer())
        for nonce in range(4):
            await asyncio.sleep(0.1)
            assert await p.request(Ping(nonce)) == Ping(nonce)
        assert p.decode.worker.scheduler.receiving(R)
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.posted.ended] == [(R, "worker_lost")]
        assert "silent for 0.3 s" in p.decode.posted.ended[0].message


async def test_a_link_survives_a_stall_of_its_ends_that_is_longer_than_any_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends are in this process. Pings and replies wait unread meanwhile."""
    for module, name, seconds in (
        (receiver, "LINK_SILENCE_S", 1.0),
        (link, "PING_EVERY_S", 0.1),
        (link, "PING_LIMIT_S", 0.8),
        (receiver, "MAX_READ_GAP_S", 0.4),
        (link, "MAX_READ_GAP_S", 0.4),
    ):
        monkeypatch.setattr(module, name, seconds)
    async with pair() as (source, (decode,)):
        for number in range(6):
            source.submit(make_request(f"r{number}", range(8), max_tokens=2), decode)
            source.compute()
            await until(lambda: source.posted.handed_over and not source.posted.parked, what="hand-over")
            source.posted.handed_over.clear()
            decode.compute()
            await asyncio.sleep(0.05 * number)  # at another point between two pings
            time.sleep(1.5)
        await asyncio.sleep(0.3)
        assert not source.posted.parked
        assert [task.result().lost for task in source.worker.sender._links.values()] == [None]


@pytest.mark.parametrize("slow", ["checksum", "unpack"])
async def test_no_kv_is_written_into_freed_blocks(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edge is torn down while its thread still runs: the event loop learns it immediately, the thread does not."""
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
        await p.request(p.offer())
        await p.open_edge(1)
        chunk, buffer = p.chunk()
        assert isinstance(await p.request(chunk), Posted)
        assert p.edge is not None
        sending = asyncio.create_task(p.send_bytes(chunk, buffer))
        await asyncio.to_thread(started.wait, 2)
        await p.link.close()
        await until(lambda: p.decode.idle)
        await asyncio.sleep(0.3)
        with contextlib.suppress(HandoffError):  # the edge may be closed during the send
            await sending
        assert wrote_with_free == ([14] if slow == "unpack" else [])
