"""A transfer that ends before all of it has landed: its blocks are free again, though not while they are written."""

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
from baton.rpc.link import dial_link
from baton.transfer import sections
from decode import receiver
from tests.support.nodes import pair, until
from tests.support.prefill_peer import Peer, R, peer


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


async def test_the_end_of_the_link_frees_what_had_not_arrived() -> None:
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        await p.send(*p.chunk(0, 5))
        await p.link.close()
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.posted.ended] == [(R, "worker_lost")]


async def test_a_sequence_that_prefill_ends_while_it_generates_is_reported() -> None:
    """Prefill has missed the last acknowledgement. It may die before the coordinator hears that it parks the KV."""
    async with peer() as p:
        await p.ask(p.offer())
        await p.open_edge(1)
        assert (await p.send(*p.chunk())).complete
        p.decode.step()
        await p.link.stream.send(AbortTransfer(R, "no last acknowledgement", 1.0))
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.posted.ended] == [(R, "abandoned")]


async def test_a_prefill_worker_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have stopped in the middle of anything; its connection stands, and no chunk may be under way to tell."""
    monkeypatch.setattr(receiver, "SILENCE_S", 0.3)
    async with peer() as p:
        await p.ask(p.offer())
        for nonce in range(4):
            await asyncio.sleep(0.1)
            assert await p.ask(Ping(nonce)) == Ping(nonce)
        assert p.decode.worker.scheduler.receiving(R)
        await until(lambda: p.decode.idle)
        assert [(e.sequence, e.code) for e in p.decode.posted.ended] == [(R, "worker_lost")]
        assert "silent for 0.3 s" in p.decode.posted.ended[0].message


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
