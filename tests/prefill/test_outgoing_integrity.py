"""A request gets only its own KV: flipped bits, the KV of another request and foreign handles are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core.commands import Abort
from baton.core.errors import StaleHandle
from baton.core.handover import Offer
from baton.core.request import SequenceId
from baton.transfer.gloo import GlooEdge
from decode.handover import Peer
from tests.support.builders import make_request
from tests.support.edges import Sums, flipped, on_the_wire
from tests.support.fake_runner import oracle
from tests.support.nodes import DecodeNode, PrefillNode, pair, until

R = SequenceId("r")


def damage(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    count = 0

    def damaged(edge: GlooEdge, buffer: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        nonlocal count
        count += 1
        return (flipped(buffer, buffer.numel() // 2) if count <= times else buffer), sums

    on_the_wire(monkeypatch, damaged)


async def test_chunk_with_a_flipped_bit_is_resent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch, 1)
    async with pair() as (source, [decode]):
        request = make_request("r", 20, max_tokens=4)
        source.submit(request, decode)
        source.compute()
        await until(lambda: source.posted.handed_over)
        decode.compute()
        assert decode.posted.output("r") == dict(enumerate(oracle(request.prompt, 4)))
        assert source.worker.load().chunks_resent == 1 == decode.worker.hand_overs.counters.chunks_damaged


async def test_chunk_damaged_twice_ends_the_request_and_frees_its_blocks_on_both_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(monkeypatch, 2)
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.posted.ended and decode.idle and source.idle)
        (ended,) = source.posted.ended
        assert (ended.reason, ended.code) == ("error", "kv_corrupt")
        assert "damaged twice" in ended.message


async def test_kv_of_another_request_is_detected_by_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the other request arrive with their own valid checksums."""
    sent: list[tuple[torch.Tensor, Sums]] = []

    def swapped(edge: GlooEdge, buffer: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        sent.append((buffer.clone(), sums))  # the buffer itself is reused
        return sent[0] if len(sent) == 2 else (buffer, sums)

    on_the_wire(monkeypatch, swapped)
    async with pair() as (source, [decode]):
        for name, first in (("a", 1), ("b", 100)):
            source.submit(make_request(name, range(first, first + 8), max_tokens=4), decode)
            source.compute()
            await until(lambda n=name: n in {o.sequence.request_id for o in source.posted.handed_over})
        assert decode.worker.hand_overs.counters.chunks_damaged == 1
        decode.compute()
        assert decode.posted.output("b") == dict(enumerate(oracle(range(100, 108), 4)))


async def test_a_forged_handle_is_refused_and_counted() -> None:
    async with pair() as (source, [decode]):
        good = decode.handle(R, source.worker)
        forged = [
            replace(good, signature=b"x" * 32),
            decode.handle(R._replace(request_id="other"), source.worker),
            decode.handle(R._replace(attempt=2), source.worker),
            decode.handle(R, source.worker, source_worker="p9"),
            decode.handle(R, source.worker, source_incarnation=1),
            decode.handle(R, source.worker, destination_incarnation=1),
        ]
        for number, handle in enumerate(forged, 1):
            source.submit(make_request("r", 6, max_tokens=4), decode, handle=handle)
            assert [e.code for e in source.posted.ended] == ["stale_handle"] * number
            assert "handle of r/0#1" in source.posted.ended[-1].message and source.idle
            offer = Offer(make_request("r", 6, max_tokens=4), handle, 6)
            with pytest.raises(StaleHandle):  # if it is offered anyway
                reserve(decode, source, offer)
        assert source.worker.load().handles_refused == decode.worker.load().handles_refused == len(forged)
        assert decode.worker.scheduler.num_sequences == 0


async def test_expired_handle_ends_its_sequence_by_the_deadline() -> None:
    """A handle is valid until the request's deadline; the client received `stale_handle` (simulator, seed 881)."""
    async with pair() as (source, [decode]):
        handle = decode.handle(R, source.worker, expires_ms=0)
        source.submit(make_request("r", 6, max_tokens=4), decode, handle=handle)
        assert [e.code for e in source.posted.ended] == ["deadline_exceeded"] and source.idle


def reserve(decode: DecodeNode, source: PrefillNode, offer: Offer) -> None:
    peer = Peer(source.worker.config.worker_id, source.worker.incarnation, {})
    decode.worker.hand_overs.check(peer, offer, decode.worker.admission(), now=0.0)


async def test_handle_can_be_used_only_once() -> None:
    async with pair() as (source, [decode]):
        offer = Offer(make_request("r", 6, max_tokens=4), decode.handle(R, source.worker), 6)
        reserve(decode, source, offer)
        decode.worker.main_loop.command(Abort(R, "the client left", 0.0))
        with pytest.raises(StaleHandle, match="already used"):
            reserve(decode, source, offer)
        assert decode.worker.load().handles_refused == 1 and decode.idle
