"""KV changes hands between two real workers over a real link and edge, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton.core.commands import Abort
from baton.core.errors import StaleHandle
from baton.core.handover import AbortTransfer, Accept, Ack, Offer
from baton.core.request import SequenceId
from baton.rpc.streams import MessageStream
from baton.transfer.edge_end import LocalEnd, LocalEnds
from baton.transfer.gloo import GlooEdge
from baton.transfer.sections import Packing
from prefill.link import Link
from prefill.outgoing import Outgoing
from tests.support.builders import make_request
from tests.support.fake_runner import FakeRunner, oracle
from tests.support.nodes import DecodeNode, PrefillNode, kv_bytes, links, pair, serve, until
from tests.support.wire import Sums, flipped, on_the_wire

R = SequenceId("r")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


async def test_the_pool_hears_of_all_blocks_with_the_first_chunk() -> None:
    named: list[tuple[int, ...]] = []
    runner = FakeRunner(num_blocks=32)
    where = (runner.kv.layers, runner.layout.block_size, "127.0.0.1")
    runner.make_end = LocalEnds(*where, expect=named.append, section_bytes=1)
    async with pair(DecodeNode(runner=runner)) as (source, [decode]):
        source.submit(make_request("r", 19, max_tokens=6), decode)
        while source.step():
            await asyncio.sleep(0.01)
        await until(lambda: source.told.handed_over)
        blocks = decode.worker.scheduler.block_ids(R)
        assert len(blocks) > 1 and named and all(ids[: len(blocks)] == blocks for ids in named)
        decode.compute()


async def test_bytes_land_equal_and_decode_goes_on_at_token_2() -> None:
    async with pair() as (source, [decode]):
        request = make_request("r", 19, max_tokens=6)
        source.submit(request, decode)
        source.compute()
        blocks = source.worker.scheduler.block_ids(R)
        await until(lambda: source.told.handed_over)
        landed = decode.worker.scheduler.block_ids(R)
        assert kv_bytes(source, blocks, 19) == kv_bytes(decode, landed, 19)
        decode.compute()
        expected = oracle(request.prompt, 6)
        assert source.told.output("r") == {0: expected[0]}
        assert decode.told.output("r") == dict(enumerate(expected))  # its first event repeats token 1
        assert [e.reason for e in decode.told.ended] == ["length"]
        total = 19 * source.runner.layout.bytes_per_token
        assert source.told.handed_over[0].bytes == decode.worker.incoming.bytes_received == total
        assert decode.worker.scheduler.prompt_tokens_computed == 0


async def test_chunks_are_sent_before_the_last_is_computed() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 30, max_tokens=4), decode)
        for computed in (8, 16, 24):
            assert source.step()
            expected = computed * source.runner.layout.bytes_per_token
            await until(lambda sent=expected: source.worker.outgoing.bytes_sent == sent)
        assert not source.told.tokens
        source.step()
        await until(lambda: source.told.handed_over)
        decode.compute()
        assert decode.told.output("r") == dict(enumerate(oracle(range(1000, 1030), 4)))


async def test_many_at_once_share_one_link_and_one_edge() -> None:
    source = PrefillNode(num_blocks=64, step_tokens=16)
    async with pair(DecodeNode(num_blocks=64), prefill=source) as (_, [decode]):
        prompts = {f"r{i}": [i * 31 + j + 1 for j in range(3 + 4 * i)] for i in range(6)}
        for name, prompt in prompts.items():
            source.submit(make_request(name, prompt, max_tokens=5), decode)
        while source.step():
            await asyncio.sleep(0.002)
        await until(lambda: len(source.told.handed_over) == 6)
        decode.compute()
        for name, prompt in prompts.items():
            assert decode.told.output(name) == dict(enumerate(oracle(prompt, 5)))
        assert len(links(source)) == 1


async def test_decode_too_says_how_much_of_the_prompt_was_not_computed() -> None:
    """It may be heard before the prefill worker is."""
    async with pair() as (source, [decode]):
        prompt = list(range(1000, 1019))
        for name in ("first", "second"):
            source.submit(make_request(name, prompt, max_tokens=3), decode)
            source.compute()
            await until(lambda name=name: name in {o.sequence.request_id for o in source.told.handed_over})
            decode.compute()
        said = {side: {e.sequence.request_id: e.cached_tokens for e in side.told.tokens} for side in (source, decode)}
        assert said[source] == said[decode] == {"first": 0, "second": source.worker.scheduler.prompt_tokens_cached}
        assert said[decode]["second"] > 0


async def test_a_request_that_ends_at_its_first_token_leaves_nothing_at_decode() -> None:
    async with pair() as (source, [decode]):
        first = oracle(range(1000, 1012), 1)[0]
        source.submit(make_request("r", 12, max_tokens=4, eos=(first,)), decode)
        source.step()
        await until(lambda: decode.worker.scheduler.num_sequences)
        source.compute()
        assert [e.reason for e in source.told.ended] == ["stop"]


async def test_a_refusal_goes_to_the_spare() -> None:
    async with pair(DecodeNode("d0", num_blocks=2), DecodeNode("d1")) as (source, [full, spare]):
        source.submit(make_request("r", 10, max_tokens=4), full, spare)
        source.compute()
        await until(lambda: source.told.handed_over)
        assert source.told.handed_over[0].decode_worker == "d1"
        spare.compute()
        assert spare.told.output("r") == dict(enumerate(oracle(range(1000, 1010), 4)))


async def test_parked_kv_is_assigned_again_and_again_until_somebody_takes_it() -> None:
    async with pair(DecodeNode("d0", num_blocks=2), DecodeNode("d1")) as (source, [full, other]):
        source.submit(make_request("r", 10, max_tokens=4), full)
        source.compute()
        for attempt in (2, 3):
            await until(lambda n=attempt - 1: len(source.told.parked) == n)
            assert source.told.parked[-1].sequence == R._replace(attempt=attempt - 1)
            assert "KV blocks" in source.told.parked[-1].reason
            source.assign(R._replace(attempt=attempt - 1), attempt, full)
        await until(lambda: len(source.told.parked) == 3)
        source.assign(R._replace(attempt=3), 4, other)
        await until(lambda: source.told.handed_over)
        assert source.told.handed_over[0].sequence == R._replace(attempt=4)
        assert not source.told.ended
        other.compute()
        assert other.told.output("r") == dict(enumerate(oracle(range(1000, 1010), 4)))
        assert {e.sequence.attempt for e in other.told.tokens} == {4}


async def test_parked_kv_can_be_aborted_under_its_present_name() -> None:
    async with pair(DecodeNode(num_blocks=2)) as (source, [full]):
        source.submit(make_request("r", 10, max_tokens=4), full)
        source.compute()
        await until(lambda: source.told.parked)
        source.assign(R, 2, full)
        await until(lambda: len(source.told.parked) == 2)
        source.abort(R._replace(attempt=2))


async def test_nobody_listens_at_the_target() -> None:
    async with pair(timeout_s=0.5) as (source, [decode]):
        address, decode.address = decode.address, "127.0.0.1:1"
        source.submit(make_request("r", 10, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.told.parked)
        decode.address = address
        source.assign(R, 2, decode)
        await until(lambda: source.told.handed_over)
        decode.compute()


class Gate:
    """Holds the first call of a public method of `Link`, or of its end of an edge, before or after it has done its
    work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, when: str) -> None:
        self.reached, self.opened = asyncio.Event(), asyncio.Event()
        owner = Link if hasattr(Link, method) else LocalEnd
        original = getattr(owner, method)

        async def held(link: Any, *args: Any, **kwargs: Any) -> Any:
            if when == "before":
                await self._pass()
            result = await original(link, *args, **kwargs)
            if when == "after":
                await self._pass()
            return result

        monkeypatch.setattr(owner, method, held)

    async def _pass(self) -> None:
        self.reached.set()
        await self.opened.wait()


PHASES = [(m, w) for m in ("offer", "fill", "announce", "send") for w in ("before", "after")]


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize(("method", "when"), PHASES)
async def test_an_abort_in_any_phase_leaves_nothing_and_the_pair_works_on(
    method: str, when: str, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (source, [decode]):
        gate = Gate(monkeypatch, method, when)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        await asyncio.wait_for(gate.reached.wait(), 3)
        if who != "decode":
            source.abort(R)
        if who != "prefill":
            decode.abort(R)
        await asyncio.sleep(0.02)
        gate.opened.set()
        source.compute()
        if who == "decode":
            await until(lambda: source.told.parked, timeout_s=1.5, what="parked KV")
            source.abort(R)
        await until(lambda: source.idle and decode.idle, timeout_s=1.5, what="idle pools")
        assert not source.told.handed_over and not decode.told.tokens
        assert all(end.dead is None for link in links(source) for end in link.edges.ends.values())  # others go on
        assert not [k for link in links(source) for k in link._waiting if k[0] != "ping"]
        await asyncio.wait_for(serve(source, decode), 1.5)


async def test_a_bug_while_packing_ends_the_receive_that_was_opened_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next chunk on the edge would go into the receive of this one."""
    async with pair(timeout_s=30.0) as (source, [decode]):
        fill, failed = LocalEnd.fill, []

        async def failing(end: LocalEnd, *what: Any) -> None:
            if not failed:
                await until(lambda: decode.worker.incoming.writing[R] == 1, what="an open receive")
                failed.append(end)
                raise RuntimeError("a bug")
            await fill(end, *what)

        monkeypatch.setattr(LocalEnd, "fill", failing)
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: failed and decode.idle and source.idle, what="idle pools")
        assert failed[0].dead is not None and not decode.worker.incoming.writing
        await serve(source, decode)


async def test_the_receive_is_open_before_the_chunk_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (source, [decode]):
        gate = Gate(monkeypatch, "fill", "before")
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await asyncio.wait_for(gate.reached.wait(), 3)
        await until(lambda: decode.worker.incoming.writing[R] == 1, what="an open receive")
        gate.opened.set()
        await until(lambda: source.told.handed_over)
        decode.compute()


async def test_nothing_is_packed_before_its_chunk_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing keeps the core busy: an announcement that is not written by then waits for it."""
    async with pair() as (source, [decode]):
        write, order = MessageStream.send_to_the_end, []

        async def written(stream: Any, message: Any, *limits: float) -> None:
            await write(stream, message, *limits)
            order.append(type(message).__name__)

        begin = Packing.begin
        monkeypatch.setattr(MessageStream, "send_to_the_end", written)
        monkeypatch.setattr(Packing, "begin", lambda packing: (order.append("packed"), begin(packing)))
        source.submit(make_request("r", 8, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.told.handed_over)
        decode.compute()
        assert [what for what in order if what != "Posted"] == ["Chunk", "packed"]


async def test_a_piece_that_nobody_is_before_is_announced_in_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (source, [decode]):
        announced: list[int] = []
        announce = Link.announce

        async def noted(link: Link, chunk: Any, timeout_s: float) -> Any:
            announced.append(chunk.index)
            return await announce(link, chunk, timeout_s)

        monkeypatch.setattr(Link, "announce", noted)
        source.submit(make_request("r", 16, max_tokens=4), decode)
        source.step()
        await until(lambda: source.worker.outgoing.bytes_sent and announced == [0])
        over = source.worker.outgoing._hand_overs[R]
        await until(lambda: over.on_edge is not None and over.on_edge.get_name() == "piece 1")
        await asyncio.sleep(0)  # the first piece is acknowledged, and now the next one waits for the step
        source.step()
        assert announced == [0]
        await asyncio.sleep(0)
        assert announced == [0, 1]
        await until(lambda: source.told.handed_over)
        decode.compute()


async def test_blocks_are_the_sequences_own_as_they_become_full() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 30, max_tokens=4), decode)
        counts = []
        for computed in (8, 16, 24):
            source.step()
            await until(
                lambda n=computed: source.worker.outgoing.bytes_sent == n * source.runner.layout.bytes_per_token
            )
            await until(lambda: R not in decode.worker.incoming.writing)
            counts.append(decode.worker.scheduler.blocks.counts().receiving)
        assert counts == [6, 4, 2]
        source.step()
        await until(lambda: source.told.handed_over)
        assert decode.worker.scheduler.blocks.counts().receiving == 0
        decode.compute()


@pytest.mark.parametrize("answer", [Accept, Ack, AbortTransfer])
async def test_an_abort_that_comes_in_one_turn_with_an_answer_is_not_lost(
    answer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pools hear of an abort in the same moment, so the one's word reaches the other together with its own."""
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
            await until(lambda: source.worker.outgoing.bytes_sent, what="the first chunk")
            decode.abort(R)
        await asyncio.wait_for(aborted.wait(), 3)
        source.compute()
        await until(lambda: source.idle and decode.idle, timeout_s=1.5, what="idle pools")
        assert not source.told.handed_over and not source.told.parked
        await asyncio.wait_for(serve(source, decode), 1.5)


@pytest.mark.parametrize("begun", [False, True])
async def test_an_abort_before_the_hand_over_has_made_its_first_step(begun: bool) -> None:
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
        await until(lambda: source.told.handed_over)
        decode.compute()


async def test_an_abort_while_it_waits_for_its_turn_on_the_edge_waits_for_nobody() -> None:
    async with pair(DecodeNode(num_blocks=64)) as (source, [decode]):
        await serve(source, decode, "before")
        (link,) = links(source)
        async with link.edge_lock:  # somebody else's transfer takes long
            source.submit(make_request("r", 20, max_tokens=4), decode)
            source.compute()
            await until(lambda: decode.worker.scheduler.num_sequences)
            await asyncio.sleep(0.02)
            source.abort(R)
            await until(lambda: source.idle and decode.idle, timeout_s=1.0, what="idle pools")
        await serve(source, decode)


async def test_the_offer_carries_what_is_left_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
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
        await until(lambda: source.told.handed_over)
        decode.compute()
    assert 4.0 < offers[0].request.deadline_s <= 4.8


async def test_an_abort_after_the_last_acknowledgement_ends_decode_too() -> None:
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 10, max_tokens=40), decode)
        source.compute()
        await until(lambda: source.told.handed_over)
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
        await until(lambda: source.told.parked)
        assert "the sequence was aborted" in source.told.parked[0].reason
        source.abort(R)


def damage(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    count = 0

    def damaged(edge: GlooEdge, buffer: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        nonlocal count
        count += 1
        return (flipped(buffer, buffer.numel() // 2) if count <= times else buffer), sums

    on_the_wire(monkeypatch, damaged)


async def test_a_flipped_bit_is_sent_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch, 1)
    async with pair() as (source, [decode]):
        request = make_request("r", 20, max_tokens=4)
        source.submit(request, decode)
        source.compute()
        await until(lambda: source.told.handed_over)
        decode.compute()
        assert decode.told.output("r") == dict(enumerate(oracle(request.prompt, 4)))
        assert source.worker.load().chunks_resent == 1 == decode.worker.incoming.chunks_damaged


async def test_a_bit_flipped_twice_ends_the_request_and_frees_both(monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch, 2)
    async with pair() as (source, [decode]):
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.told.ended and decode.idle and source.idle)
        (ended,) = source.told.ended
        assert (ended.reason, ended.code) == ("error", "kv_corrupt")
        assert "damaged twice" in ended.message


async def test_intact_kv_of_another_request_is_found_by_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes come with the checksums that belong to them."""
    sent: list[tuple[torch.Tensor, Sums]] = []

    def swapped(edge: GlooEdge, buffer: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        sent.append((buffer.clone(), sums))  # the buffer itself is used again
        return sent[0] if len(sent) == 2 else (buffer, sums)

    on_the_wire(monkeypatch, swapped)
    async with pair() as (source, [decode]):
        for name, first in (("a", 1), ("b", 100)):
            source.submit(make_request(name, range(first, first + 8), max_tokens=4), decode)
            source.compute()
            await until(lambda n=name: n in {o.sequence.request_id for o in source.told.handed_over})
        assert decode.worker.incoming.chunks_damaged == 1
        decode.compute()
        assert decode.told.output("b") == dict(enumerate(oracle(range(100, 108), 4)))


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
            assert [e.code for e in source.told.ended] == ["stale_handle"] * number
            assert "handle of r/0#1" in source.told.ended[-1].message and source.idle
            offer = Offer(make_request("r", 6, max_tokens=4), handle, 6)
            with pytest.raises(StaleHandle):  # were it offered all the same
                decode.worker.reserve(offer, source.worker._hello())
        assert source.worker.load().handles_refused == decode.worker.load().handles_refused == len(forged)
        assert decode.worker.scheduler.num_sequences == 0


async def test_a_handle_gives_its_right_once() -> None:
    async with pair() as (source, [decode]):
        offer = Offer(make_request("r", 6, max_tokens=4), decode.handle(R, source.worker), 6)
        decode.worker.reserve(offer, source.worker._hello())
        decode.worker.shell.command(Abort(R, "the client left", 0.0))
        with pytest.raises(StaleHandle, match="used before"):
            decode.worker.reserve(offer, source.worker._hello())
        assert decode.worker.load().handles_refused == 1 and decode.idle


@pytest.mark.parametrize(("method", "when"), [("offer", "after"), ("announce", "before"), ("announce", "after")])
async def test_a_link_that_breaks_cleans_up_both_ends_and_the_next_one_has_a_new_generation(
    method: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair() as (source, [decode]):
        await serve(source, decode, "before")
        old = links(source)[0]
        generation = old.edges.generation
        gate = Gate(monkeypatch, method, when)
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.step()
        await asyncio.wait_for(gate.reached.wait(), 3)
        old._stream.end("cut by the test")
        gate.opened.set()
        source.compute()
        await until(lambda: source.told.parked and decode.idle, timeout_s=1.5)
        source.assign(R, 2, decode)
        await until(lambda: source.told.handed_over and source.idle)
        decode.compute()
        assert decode.told.output("r") == dict(enumerate(oracle(range(1000, 1020), 4)))
        (new,) = links(source)
        assert new is not old and new.edges.generation > generation


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_edge_that_died_at_one_end_is_rebuilt_for_the_next_request(side: str) -> None:
    async with pair() as (source, [decode]):
        await serve(source, decode, "before")
        (link,) = links(source)
        (incoming,) = decode.worker.incoming._links
        generation = link.edges.generation
        (end,) = (link.edges.ends if side == "prefill" else incoming._edges).values()
        end.abort("killed by the test")
        source.submit(make_request("r", 20, max_tokens=4), decode)
        source.compute()
        await until(lambda: source.told.parked or len(source.told.handed_over) == 2)
        if source.told.parked:  # only the decode side knew: the first chunk found out
            source.assign(R, 2, decode)
            await until(lambda: len(source.told.handed_over) == 2)
        decode.compute()
        assert decode.told.output("r") == dict(enumerate(oracle(range(1000, 1020), 4)))
        assert link.edges.generation > generation
        assert links(source) == [link]


async def test_many_on_a_lost_link_dial_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
        await until(lambda: len(source.told.handed_over) == 4)
        decode.compute()
        assert dials == 1


def test_an_unknown_assignment_is_not_taken() -> None:
    source = PrefillNode()
    assert not source.worker.outgoing.assign(R, (), 2)
    assert isinstance(source.worker.outgoing, Outgoing)
    source.assign(R, 2)
    assert [(e.sequence.attempt, e.code) for e in source.told.ended] == [(2, "handoff_failed")]
