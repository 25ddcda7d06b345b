"""What a prefill worker must not be able to do: neither its offers nor its aborts harm other sequences."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from baton.core.codes import ErrorCode
from baton.core.errors import InvariantError
from baton.core.handover import AbortTransfer, Accept, Offer, Posted, Refuse
from baton.core.request import SequenceId
from baton.runtime.streams import dial_link
from tests.support.builders import make_request
from tests.support.nodes import VOCAB_SIZE, DecodeNode, PrefillNode, pair, until
from tests.support.prefill_peer import TOKENS, Peer, R, peer


def offer_of(p: Peer, name: str, **changes: Any) -> Offer:
    request = replace(make_request(name, TOKENS, max_tokens=4), **changes)
    return Offer(request, p.decode.handle(request.sequence_id, p.source.worker), request.num_prefill_tokens)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, (1 << 31) - 1])
@pytest.mark.parametrize("where", ["prompt", "output"])
async def test_offer_with_invalid_token_ids_is_refused_without_ending_the_link(where: str, token: int) -> None:
    async with peer() as p:
        assert isinstance(await p.request(p.offer()), Accept)
        tokens = (1,) * (TOKENS - 1) + (token,) if where == "prompt" else (token,)
        answer = await p.request(offer_of(p, "s", **{where: tokens}))
        assert isinstance(answer, Refuse) and where in answer.message and "token ids are 0 to 65535" in answer.message
        await p.open_edge(1)
        assert (await p.send(*p.chunk())).complete  # the link and its other sequences are unaffected
        p.decode.compute()


async def test_unexpected_error_at_an_offer_refuses_only_that_offer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unheard of")

    async with peer() as p:
        assert isinstance(await p.request(p.offer()), Accept)
        with monkeypatch.context() as changed:
            changed.setattr(p.decode.worker.scheduler, "reserve", fail)
            answer = await p.request(p.offer("s"))
        assert answer == Refuse(SequenceId("s"), ErrorCode.INTERNAL_ERROR, "internal error handling an offer")
        assert "unheard of" in caplog.text
        await p.open_edge(1)
        assert (await p.send(*p.chunk())).complete
        p.decode.compute()


async def test_only_the_prefill_worker_of_a_sequence_can_abort_it_over_a_link() -> None:
    other = PrefillNode("p1")
    async with pair(more=[other]) as (source, [decode]):
        source.submit(make_request("r", TOKENS, max_tokens=8), decode)
        source.compute()
        await until(lambda: source.posted.handed_over)
        decode.step()
        stranger = await dial_link(decode.address, other.worker._hello(), 2.0)
        await stranger.stream.send(AbortTransfer(R, "not mine", 5.0))
        await until(lambda: decode.worker.load().stale_messages == 1, what="the abort")
        assert decode.worker.scheduler.num_running == 1
        await stranger.stream.send(AbortTransfer(SequenceId("later"), "it comes no more", 5.0))  # not offered yet
        await until(lambda: decode.worker.main_loop.is_tombstoned(SequenceId("later")), what="a tombstone")
        own = await dial_link(decode.address, source.worker._hello(), 2.0)  # another link, the same worker
        await own.stream.send(AbortTransfer(R, "its last chunk was not acknowledged", 0.0))
        await until(lambda: not decode.worker.scheduler.has_sequence(R), what="the end of the sequence")
        for link in (stranger, own):
            await link.close()


async def failure(decode: DecodeNode) -> InvariantError:
    """The error that would end the process."""
    return await asyncio.wait_for(decode.worker.main_loop._failures.get(), 30)


@pytest.mark.parametrize("where", ["received", "reserve"])
async def test_invariant_error_ends_the_worker(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise InvariantError("an invariant does not hold")

    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        with monkeypatch.context() as changed:
            changed.setattr(p.decode.worker.scheduler, where, broken)
            if where == "reserve":
                await p.send_message(p.offer("s"))
            else:
                chunk, buffer = p.chunk()
                assert isinstance(await p.request(chunk), Posted)
                await p.send_bytes(chunk, buffer)
            assert "does not hold" in (await failure(p.decode)).message
        p.decode.abort(R)


async def test_other_error_in_a_task_closes_the_link_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("unheard of")

    async with peer() as p:
        await p.request(p.offer())
        await p.open_edge(1)
        monkeypatch.setattr(p.decode.worker.scheduler, "tokens_received", broken)
        chunk, buffer = p.chunk(0, 3)
        assert isinstance(await p.request(chunk), Posted)
        with caplog.at_level(logging.ERROR, "baton.receiver"):
            await p.send_bytes(chunk, buffer)
            await until(lambda: p.decode.idle, what="the end of the link")
        assert "chunk 0 of r/0#1: KeyError('unheard of')" in caplog.text
        assert [e.code for e in p.decode.posted.ended] == ["worker_lost"]
