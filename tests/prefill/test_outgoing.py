"""KV is handed over between two real workers over a real link and edge, or parked until a decode worker accepts it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.core.handover import Offer
from baton.core.request import SequenceId
from baton.transfer.edge_endpoint import LocalEndpoints
from prefill.link import Link
from tests.support.builders import make_request
from tests.support.fake_runner import FakeRunner, oracle
from tests.support.nodes import DecodeNode, PrefillNode, kv_bytes, links, pair, until

R = SequenceId("r")


async def test_first_chunk_announces_all_blocks_of_its_sequence_to_the_pool() -> None:
    named: list[tuple[int, ...]] = []
    runner = FakeRunner(num_blocks=32)
    where = (runner.kv.layers, runner.layout.block_size, "127.0.0.1")
    runner.make_endpoint = LocalEndpoints(*where, expect=named.append, section_bytes=1)
    async with pair(DecodeNode(runner=runner)) as (source, [decode]):
        source.submit(make_request("r", 19, max_tokens=6), decode)
        while source.step():
            await asyncio.sleep(0.01)
        await until(lambda: source.posted.handed_over)
        blocks = decode.worker.scheduler.block_ids(R)
        assert len(blocks) > 1 and named and all(ids[: len(blocks)] == blocks for ids in named)
        decode.compute()


async def test_received_kv_equals_the_sent_kv_and_decode_continues_at_token_2() -> None:
    async with pair() as (source, [decode]):
        request = make_request("r", 19, max_tokens=6)
        source.submit(request, decode)
        source.compute()
        blocks = source.worker.scheduler.block_ids(R)
        await until(lambda: source.posted.handed_over)
        landed = decode.worker.scheduler.block_ids(R)
        assert kv_bytes(source, blocks, 19) == kv_bytes(decode, landed, 19)
        decode.compute()
        expected = oracle(request.prompt, 6)
        assert source.posted.output("r") == {0: expected[0]}
        assert decode.posted.output("r") == dict(enumerate(expected))  # its first event repeats token 1
        assert [e.reason for e in decode.posted.ended] == ["length"]
        total = 19 * source.runner.layout.bytes_per_token
        assert source.posted.handed_over[0].bytes == decode.worker.hand_overs.counters.bytes_received == total
        assert decode.worker.scheduler.prompt_tokens_computed == 0


async def test_chunks_are_sent_before_the_last_one_is_computed() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 30, max_tokens=4), decode)
        for computed in (8, 16, 24):
            assert source.step()
            expected = computed * source.runner.layout.bytes_per_token
            await until(lambda sent=expected: source.worker.sender.counters.bytes_sent == sent)
        assert not source.posted.tokens
        source.step()
        stamps = source.posted.tokens[0].stamps
        assert stamps is not None and stamps.prefill_s > 0 and stamps.reserve_s > 0
        await until(lambda: source.posted.handed_over)
        assert source.posted.handed_over[0].stamps.prefill_s == stamps.prefill_s
        decode.compute()
        assert decode.posted.output("r") == dict(enumerate(oracle(range(1000, 1030), 4)))


async def test_blocks_leave_the_receiving_state_as_they_become_full() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 30, max_tokens=4), decode)
        counts = []
        for computed in (8, 16, 24):
            source.step()
            await until(
                lambda n=computed: source.worker.sender.counters.bytes_sent == n * source.runner.layout.bytes_per_token
            )
            await until(lambda: R not in decode.worker.hand_overs.writing)
            counts.append(decode.worker.scheduler.blocks.counts().receiving)
        assert counts == [6, 4, 2]
        source.step()
        await until(lambda: source.posted.handed_over)
        assert decode.worker.scheduler.blocks.counts().receiving == 0
        decode.compute()


async def test_concurrent_hand_overs_share_one_link() -> None:
    source = PrefillNode(num_blocks=64, step_tokens=16)
    async with pair(DecodeNode(num_blocks=64), prefill=source) as (_, [decode]):
        prompts = {f"r{i}": [i * 31 + j + 1 for j in range(3 + 4 * i)] for i in range(6)}
        for name, prompt in prompts.items():
            source.submit(make_request(name, prompt, max_tokens=5), decode)
        while source.step():
            await asyncio.sleep(0.002)
        await until(lambda: len(source.posted.handed_over) == 6)
        decode.compute()
        for name, prompt in prompts.items():
            assert decode.posted.output(name) == dict(enumerate(oracle(prompt, 5)))
        assert len(links(source)) == 1


async def test_decode_worker_also_reports_the_cached_tokens_of_the_prompt() -> None:
    """Its report may arrive before that of the prefill worker."""
    async with pair() as (source, [decode]):
        prompt = list(range(1000, 1019))
        for name in ("first", "second"):
            source.submit(make_request(name, prompt, max_tokens=3), decode)
            source.compute()
            await until(lambda name=name: name in {o.sequence.request_id for o in source.posted.handed_over})
            decode.compute()
        cached = {
            side: {e.sequence.request_id: e.cached_tokens for e in side.posted.tokens} for side in (source, decode)
        }
        assert cached[source] == cached[decode] == {"first": 0, "second": source.worker.scheduler.prompt_tokens_cached}
        assert cached[decode]["second"] > 0


async def test_request_that_ends_at_its_first_token_leaves_no_sequence_at_decode() -> None:
    async with pair() as (source, [decode]):
        first = oracle(range(1000, 1012), 1)[0]
        source.submit(make_request("r", 12, max_tokens=4, eos=(first,)), decode)
        source.step()
        await until(lambda: decode.worker.scheduler.num_sequences)
        source.compute()
        assert [e.reason for e in source.posted.ended] == ["stop"]


async def test_offer_carries_the_remaining_time_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    offers: list[Offer] = []
    original = Link.offer

    async def seen(link: Link, offer: Offer, timeout_s: float) -> Any:
        offers.append(offer)
        return await original(link, offer, timeout_s)

    monkeypatch.setattr(Link, "offer", seen)
    async with pair() as (source, [decode]):
        source.submit(replace(make_request("r", 10, max_tokens=4), deadline_s=5.0), decode)
        await asyncio.sleep(0.2)  # it waits for its first step
        source.compute()
        await until(lambda: source.posted.handed_over)
        decode.compute()
    assert 4.0 < offers[0].request.deadline_s <= 4.8


async def test_refused_offer_is_repeated_to_the_spare_target() -> None:
    async with pair(DecodeNode("d0", num_blocks=2), DecodeNode("d1")) as (source, [full, spare]):
        source.submit(make_request("r", 10, max_tokens=4), full, spare)
        source.compute()
        await until(lambda: source.posted.handed_over)
        assert source.posted.handed_over[0].decode_worker == "d1"
        spare.compute()
        assert spare.posted.output("r") == dict(enumerate(oracle(range(1000, 1010), 4)))


async def test_parked_kv_is_reassigned_until_a_decode_worker_accepts_it() -> None:
    async with pair(DecodeNode("d0", num_blocks=2), DecodeNode("d1")) as (source, [full, other]):
        source.submit(make_request("r", 10, max_tokens=4), full)
        source.compute()
        for attempt in (2, 3):
            await until(lambda n=attempt - 1: len(source.posted.parked) == n)
            assert source.posted.parked[-1].sequence == R._replace(attempt=attempt - 1)
            assert "needs 4 blocks" in source.posted.parked[-1].reason
            source.assign(R._replace(attempt=attempt - 1), attempt, full)
        await until(lambda: len(source.posted.parked) == 3)
        source.assign(R._replace(attempt=3), 4, other)
        await until(lambda: source.posted.handed_over)
        assert source.posted.handed_over[0].sequence == R._replace(attempt=4)
        assert not source.posted.ended
        other.compute()
        assert other.posted.output("r") == dict(enumerate(oracle(range(1000, 1010), 4)))
        assert {e.sequence.attempt for e in other.posted.tokens} == {4}


async def test_parked_kv_can_be_aborted_under_its_current_attempt() -> None:
    async with pair(DecodeNode(num_blocks=2)) as (source, [full]):
        source.submit(make_request("r", 10, max_tokens=4), full)
        source.compute()
        await until(lambda: source.posted.parked)
        source.assign(R, 2, full)
        await until(lambda: len(source.posted.parked) == 2)
        source.abort(R._replace(attempt=2))


def test_assignment_of_an_unknown_sequence_is_refused() -> None:
    source = PrefillNode()
    source.assign(R, 2)
    assert [(e.sequence.attempt, e.code) for e in source.posted.ended] == [(2, "handoff_failed")]
