"""An abort of a hand-over at any moment: all its state is freed, and the pair continues to work."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.handover import AbortTransfer, Accept, Ack
from baton.core.request import SequenceId
from prefill.link import Link
from tests.support.builders import make_request
from tests.support.link_gate import Gate
from tests.support.nodes import DecodeNode, abort_at, check_aborted, links, pair, serve, until

R = SequenceId("r")
PHASES = [(m, w) for m in ("offer", "fill", "announce", "send") for w in ("before", "after")]


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize(("method", "when"), PHASES)
async def test_abort_in_any_phase_leaks_nothing_and_the_link_stays_usable(
    method: str, when: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (source, [decode]):
        gate = Gate(monkeypatch, method, when)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        await asyncio.wait_for(gate.reached.wait(), 30)
        await abort_at(source, decode, R, who)
        gate.opened.set()
        await check_aborted(source, decode, R, who)
        assert all(end.dead is None for link in links(source) for end in link.endpoints.values())  # edges stay open
        assert not [k for link in links(source) for k in link._waiting if k[0] != "ping"]
        await asyncio.wait_for(serve(source, decode), 1.5)


@pytest.mark.parametrize("answer", [Accept, Ack, AbortTransfer])
async def test_abort_in_the_same_event_loop_turn_as_a_reply_is_not_lost(
    answer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers receive an abort at the same moment, so it may coincide with a message of the other worker."""
    async with pair() as (source, [decode]):
        resolve = Link._resolve
        aborted = asyncio.Event()

        def resolve_and_abort(link: Link, message: Any) -> None:
            resolve(link, message)
            if isinstance(message, answer) and not aborted.is_set():
                aborted.set()
                source.abort(R)

        monkeypatch.setattr(Link, "_resolve", resolve_and_abort)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        if answer is AbortTransfer:
            await until(lambda: source.worker.sender.counters.bytes_sent, what="the first chunk")
            decode.abort(R)
        await asyncio.wait_for(aborted.wait(), 30)
        source.compute()
        await until(lambda: source.idle and decode.idle, timeout_s=1.5, what="idle pools")
        assert not source.posted.handed_over and not source.posted.parked
        await asyncio.wait_for(serve(source, decode), 1.5)


@pytest.mark.parametrize("begun", [False, True])
async def test_abort_before_the_hand_over_task_first_runs_leaks_nothing(begun: bool) -> None:
    """A task that is cancelled before it has begun never runs, not even its `finally`."""
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 20, max_tokens=4), decode)
        if begun:
            source.step()  # the task is made here and the event loop has not run since
        source.abort(R)
        source.compute()
        await asyncio.sleep(0)
        assert source.idle
        source.submit(make_request("r", 20, max_tokens=4), decode)  # tombstones are for unknown ones only
        source.compute()
        await until(lambda: source.posted.handed_over)
        decode.compute()


async def test_abort_of_a_hand_over_that_waits_for_the_edge_takes_effect_immediately() -> None:
    async with pair(DecodeNode(num_blocks=64)) as (source, [decode]):
        await serve(source, decode, "before")
        (link,) = links(source)
        async with link.edge_lock:  # another transfer holds the edge
            source.submit(make_request("r", 20, max_tokens=4), decode)
            source.compute()
            await until(lambda: decode.worker.scheduler.num_sequences)
            await asyncio.sleep(0.02)
            source.abort(R)
            await until(lambda: source.idle and decode.idle, timeout_s=1.0, what="idle pools")
        await serve(source, decode)


async def test_abort_while_edges_are_built_ends_the_hand_over_when_they_are_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hand-over then neither waits for staging memory nor announces anything."""
    async with pair() as (source, [decode]):
        gate = Gate(monkeypatch, "connect", "after")
        room = source.worker.sender.staging
        async with room.hold(room.limit_bytes, 1.0):
            source.submit(make_request("r", 20, max_tokens=4), decode)
            source.compute()
            await asyncio.wait_for(gate.reached.wait(), 30)
            source.abort(R)
            gate.opened.set()
            await until(lambda: source.idle and decode.idle, timeout_s=1.5, what="idle pools")
            (link,) = links(source)
            assert not link.edge_lock.locked()
        assert not room.taken_bytes, "it still waited for room"
        assert not source.worker.sender.counters.bytes_sent
        await asyncio.wait_for(serve(source, decode), 1.5)


async def test_blocks_are_held_while_a_chunk_is_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: the send has its own timeouts, and the blocks may be read until it has ended."""
    async with pair(DecodeNode(num_blocks=64)) as (source, [decode]):
        await serve(source, decode, "before")
        edge_timeout_s, source.worker.sender._edge_timeout_s = source.worker.sender._edge_timeout_s, 0.02
        gate = Gate(monkeypatch, "send", "before")
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.compute()
        await asyncio.wait_for(gate.reached.wait(), 30)
        source.abort(R)
        await asyncio.sleep(0.3)
        assert not source.idle
        gate.opened.set()
        await until(lambda: source.idle and decode.idle, timeout_s=1.5, what="idle pools")
        source.worker.sender._edge_timeout_s = edge_timeout_s  # on a busy machine an acknowledgement takes longer
        await asyncio.wait_for(serve(source, decode), 1.5)


async def test_abort_after_the_last_ack_ends_the_sequence_at_decode() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 10, max_tokens=40), decode)
        source.compute()
        await until(lambda: source.posted.handed_over)
        assert source.idle
        decode.step()
        source.abort(R)
        decode.abort(R)
        assert decode.idle


async def test_an_abort_that_overtakes_the_offer_leaves_a_tombstone() -> None:
    async with pair() as (source, [decode]):
        decode.abort(R)
        source.submit(make_request("r", 10, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.parked)
        assert "the sequence was aborted" in source.posted.parked[0].reason
        source.abort(R)
