"""Links and edges that cannot be built, or that break: the KV is parked, and the next request gets new ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.core.request import SequenceId
from prefill.link import Link
from tests.support.builders import make_request
from tests.support.fake_runner import oracle
from tests.support.link_gate import Gate
from tests.support.nodes import DecodeNode, links, pair, serve, until
from tests.support.rank_pairs import latest_generation

R = SequenceId("r")


async def test_kv_is_parked_if_the_target_refuses_the_connection() -> None:
    async with pair(timeout_s=5.0) as (source, [decode]):
        address, decode.address = decode.address, "127.0.0.1:1"
        source.submit(make_request("r", 10, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.parked)
        decode.address = address
        source.assign(R, 2, decode)
        await until(lambda: source.posted.handed_over)
        decode.compute()


@pytest.mark.parametrize(("method", "when"), [("offer", "after"), ("announce", "before"), ("announce", "after")])
async def test_broken_link_is_cleaned_up_at_both_ends_and_the_next_has_a_new_generation(
    method: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (source, [decode]):
        await serve(source, decode, "before")
        old = links(source)[0]
        generation = latest_generation(old)
        gate = Gate(monkeypatch, method, when)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        await asyncio.wait_for(gate.reached.wait(), 30)
        old._stream.end("cut by the test")
        gate.opened.set()
        source.compute()
        await until(lambda: source.posted.parked and decode.idle, timeout_s=1.5)
        source.assign(R, 2, decode)
        await until(lambda: source.posted.handed_over and source.idle)
        decode.compute()
        assert decode.posted.output("r") == dict(enumerate(oracle(range(1000, 1020), 4)))
        (new,) = links(source)
        assert new is not old and latest_generation(new) > generation


async def test_spare_target_gets_no_offer_under_an_accepted_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have begun to decode, so the spare gets an offer only under the next attempt."""
    async with pair(DecodeNode("d0"), DecodeNode("d1")) as (source, [decode, spare]):
        gate = Gate(monkeypatch, "announce", "after")
        source.submit(make_request("r", 20, max_tokens=4), decode, spare)
        source.step()
        await asyncio.wait_for(gate.reached.wait(), 30)
        links(source)[0]._stream.end("cut by the test")
        gate.opened.set()
        source.compute()
        await until(lambda: source.posted.parked, timeout_s=1.5)
        assert "d0" in source.posted.parked[0].reason and not spare.worker.scheduler.num_sequences
        assert len(links(source)) == 1, "the spare was not even dialled"
        source.assign(R, 2, spare)
        await until(lambda: source.posted.handed_over)
        assert source.posted.handed_over[0].decode_worker == "d1"
        spare.compute()


async def test_hand_overs_on_a_lost_link_dial_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dials = 0
    original = Link.dial.__func__  # type: ignore[attr-defined]

    async def counted(cls: type[Link], *args: Any) -> Link:
        nonlocal dials
        dials += 1
        return await original(cls, *args)  # type: ignore[no-any-return]

    async with pair(DecodeNode(num_blocks=64)) as (source, [decode]):
        await serve(source, decode, "before")
        links(source)[0]._stream.end("cut by the test")
        monkeypatch.setattr(Link, "dial", classmethod(counted))
        for i in range(3):
            source.submit(make_request(f"r{i}", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: len(source.posted.handed_over) == 4)
        decode.compute()
        assert dials == 1


async def test_hand_overs_that_wait_for_the_edge_of_a_lost_link_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They queue for one lock. None waits for a peer that does not know of its edge, and one dial serves all."""
    names = [f"r{number}" for number in range(4)]
    async with pair(DecodeNode(num_blocks=64), timeout_s=20.0) as (source, [decode]):
        await serve(source, decode, "before")
        (old,) = links(source)
        generation = latest_generation(old)
        gate = Gate(monkeypatch, "announce", "before")
        for name in names:
            source.submit(make_request(name, 8, max_tokens=4), decode)
        source.compute()
        await asyncio.wait_for(gate.reached.wait(), 30)
        await until(lambda: len(old.edge_lock._waiters or ()) == len(names) - 1)
        old._stream.end("cut by the test")
        gate.opened.set()
        await until(lambda: len(source.posted.parked) == len(names), timeout_s=10.0)
        assert latest_generation(old) == generation, "no edge was opened on the lost link"
        for name in names:
            source.assign(SequenceId(name), 2, decode)
        await until(lambda: len(source.posted.handed_over) == len(names) + 1)
        decode.compute()
        assert len(links(source)) == 1
