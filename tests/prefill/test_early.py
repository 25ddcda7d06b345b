"""The first layers of a prompt's last tokens are handed over while its other layers are computed."""

from __future__ import annotations

import asyncio

import pytest
import torch

from baton.core.request import SamplingParams, SequenceId
from baton.core.step import Row, StepPlan
from baton.transfer.edge_endpoint import LocalEndpoints
from tests.support.builders import make_layout, make_request
from tests.support.edges import Sums, flipped, on_the_wire
from tests.support.fake_runner import FakeRanks, FakeRunner, oracle
from tests.support.link_gate import Gate
from tests.support.nodes import DecodeNode, PrefillNode, kv_bytes, links, pair, serve, until

R = SequenceId("r")
LAYERS, FIRST = 3, 2
LAYOUT = make_layout(4, layers=LAYERS)


def prefill(step_tokens: int = 8, section_bytes: int = 1) -> PrefillNode:
    runner = FakeRunner(layout=LAYOUT)
    runner.make_endpoint = LocalEndpoints(runner.kv.layers, LAYOUT.block_size, "127.0.0.1", section_bytes=section_bytes)
    return PrefillNode(runner=runner, step_tokens=step_tokens)


def decode(section_bytes: int = 1, name: str = "d0") -> DecodeNode:
    runner = FakeRunner(layout=LAYOUT)
    runner.make_endpoint = LocalEndpoints(runner.kv.layers, LAYOUT.block_size, "127.0.0.1", section_bytes=section_bytes)
    return DecodeNode(name, runner=runner)


def arrived(source: PrefillNode, tokens: int, layers: int = LAYERS) -> bool:
    """Whether exactly the bytes of so many tokens and layers have been sent."""
    return source.worker.sender.counters.bytes_sent == tokens * layers * LAYOUT.layers[0].bytes_per_token


async def early(source: PrefillNode, count: int = 1) -> None:
    await until(lambda: source.worker.sender.counters.chunks_early == count, what="the first layers")


async def test_first_layers_arrive_before_the_step_ends() -> None:
    async with pair(decode(), prefill=prefill()) as (source, [target]):
        request = make_request("r", 14, max_tokens=4)
        source.submit(request, target)
        source.step()
        await until(lambda: arrived(source, 8), what="the first chunk")

        async def sent() -> None:
            await early(source)
            assert (
                source.worker.sender.counters.bytes_sent == (8 * LAYERS + 6 * FIRST) * LAYOUT.layers[0].bytes_per_token
            )
            assert target.worker.scheduler.receiving(R) and not source.posted.tokens

        await source.step_by_layers(FIRST, sent)
        blocks = source.worker.scheduler.block_ids(R)
        await until(lambda: source.posted.handed_over)
        assert (
            arrived(source, 14)
            and source.posted.handed_over[0].bytes == target.worker.hand_overs.counters.bytes_received
        )
        assert kv_bytes(source, blocks, 14) == kv_bytes(target, target.worker.scheduler.block_ids(R), 14)
        target.compute()
        assert target.posted.output("r") == dict(enumerate(oracle(request.prompt, 4)))


async def test_first_layers_exclude_the_prefix_that_the_decode_worker_holds() -> None:
    async with pair(decode(), prefill=prefill(step_tokens=16)) as (source, [target]):
        for name in ("first", "second"):
            request = make_request(name, 14, max_tokens=4)
            source.submit(request, target)
            if name == "second":
                await source.step_by_layers(FIRST, lambda: early(source))
            else:
                source.step()
            await until(lambda n=name: n in {o.sequence.request_id for o in source.posted.handed_over})
            target.compute()
            assert target.posted.output(name) == dict(enumerate(oracle(request.prompt, 4)))
        tokens = source.posted.handed_over[1].bytes / LAYOUT.bytes_per_token
        assert tokens == 14 - 12  # decode already holds three blocks


@pytest.mark.parametrize("damaged", [0, 1])
async def test_each_part_is_resent_if_it_arrives_damaged(damaged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []

    def once(edge: object, buffer: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        parts.append(buffer.numel())
        return (flipped(buffer, 0) if len(parts) == damaged + 1 else buffer), sums

    on_the_wire(monkeypatch, once)
    async with pair(decode(), prefill=prefill()) as (source, [target]):
        request = make_request("r", 8, max_tokens=4)
        source.submit(request, target)
        await source.step_by_layers(FIRST, lambda: early(source))
        await until(lambda: source.posted.handed_over)
        first, late = (8 * layers * LAYOUT.layers[0].bytes_per_token for layers in (FIRST, LAYERS - FIRST))
        assert parts == ([first, first, late] if damaged == 0 else [first, late, late])
        assert source.worker.load().chunks_resent == 1 == target.worker.hand_overs.counters.chunks_damaged
        target.compute()
        assert target.posted.output("r") == dict(enumerate(oracle(request.prompt, 4)))


async def test_kv_damaged_twice_is_not_cached_even_if_its_step_ends_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_the_wire(monkeypatch, lambda edge, buffer, sums: (flipped(buffer, 0), sums))
    async with pair(decode(), prefill=prefill(step_tokens=16)) as (source, [target]):
        source.submit(make_request("r", 12, max_tokens=4), target)

        async def ended() -> None:
            await until(lambda: [e.code for e in source.posted.ended] == ["kv_corrupt"], what="the end")

        await source.step_by_layers(FIRST, ended)
        await until(lambda: source.idle and target.idle, what="idle pools")
        cached = source.worker.scheduler.prompt_tokens_cached
        source.submit(make_request("s", 12, max_tokens=1), target)
        source.step()
        assert source.worker.scheduler.prompt_tokens_cached == cached == 0
        await until(lambda: source.idle and target.idle, what="idle pools")


async def test_two_prompts_that_end_in_one_step_are_sent_one_after_the_other() -> None:
    async with pair(decode(), prefill=prefill(step_tokens=16)) as (source, [target]):
        prompts = {name: list(range(first, first + 8)) for name, first in (("a", 1), ("b", 100))}
        for name, prompt in prompts.items():
            source.submit(make_request(name, prompt, max_tokens=4), target)
        await source.step_by_layers(FIRST, lambda: early(source, 2))
        await until(lambda: len(source.posted.handed_over) == 2)
        target.compute()
        for name, prompt in prompts.items():
            assert target.posted.output(name) == dict(enumerate(oracle(prompt, 4)))


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize("posted", [False, True])
async def test_abort_between_the_two_parts_leaks_nothing_and_the_link_stays_usable(
    who: str, posted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(decode(), prefill=prefill()) as (source, [target]):
        await serve(source, target, "before")
        gate = Gate(monkeypatch, "send", "before")
        if posted:
            gate.opened.set()
        source.submit(make_request("r", range(50, 58), max_tokens=4), target)
        before = source.worker.sender.counters.chunks_early

        async def ended() -> None:
            if posted:
                await early(source, before + 1)
            else:
                await until(lambda: target.worker.hand_overs.writing, what="an open receive")
            if who != "decode":
                source.abort(R)
            if who != "prefill":
                target.abort(R)
            assert not source.idle
            gate.opened.set()

        await source.step_by_layers(FIRST, ended)
        if who == "decode":
            await until(lambda: source.posted.parked, timeout_s=3, what="parked KV")
            source.abort(R)
        await until(lambda: source.idle and target.idle, timeout_s=3, what="idle pools")
        assert all(end.dead is None for link in links(source) for end in link.endpoints.values())
        await serve(source, target, "behind")


async def test_second_target_receives_all_layers_after_the_first_received_a_part() -> None:
    async with pair(decode(), decode(name="d1"), prefill=prefill()) as (source, [first, second]):
        request = make_request("r", 8, max_tokens=4)
        source.submit(request, first)

        async def lost() -> None:
            await early(source)
            first.abort(R)

        await source.step_by_layers(FIRST, lost)
        await until(lambda: source.posted.parked, what="parked KV")
        source.assign(R, 2, second)
        await until(lambda: source.posted.handed_over)
        assert source.posted.handed_over[0].bytes == 8 * LAYOUT.bytes_per_token
        second.compute()
        assert second.posted.output("r") == dict(enumerate(oracle(request.prompt, 4)))


async def test_both_edges_of_a_link_carry_first_layers() -> None:
    ranks = FakeRanks(2, layout=LAYOUT)
    try:
        async with pair(DecodeNode(runner=ranks), prefill=prefill()) as (source, [target]):
            request = make_request("r", 8, max_tokens=4)
            source.submit(request, target)
            await source.step_by_layers(FIRST, lambda: early(source))
            blocks = source.worker.scheduler.block_ids(R)
            await until(lambda: source.posted.handed_over)
            assert kv_bytes(source, blocks, 8) == kv_bytes(target, target.worker.scheduler.block_ids(R), 8)
            target.compute()
            assert target.posted.output("r") == dict(enumerate(oracle(request.prompt, 4)))
    finally:
        ranks.close()


async def test_all_layers_are_sent_together_if_the_edge_is_busy() -> None:
    async with pair(decode(), prefill=prefill()) as (source, [target]):
        await serve(source, target, "before")
        (link,) = links(source)
        request = make_request("r", range(50, 58), max_tokens=4)
        source.submit(request, target)
        async with link.edge_lock:

            async def offered() -> None:
                await until(lambda: target.worker.scheduler.receiving(R), what="an accepted offer")

            await source.step_by_layers(FIRST, offered)
        await until(lambda: len(source.posted.handed_over) == 2)
        assert source.worker.sender.counters.chunks_early == 0
        target.compute()
        assert target.posted.output("r") == dict(enumerate(oracle(request.prompt, 4)))


async def test_first_layers_of_few_bytes_are_sent_with_the_other_layers() -> None:
    whole = 8 * LAYOUT.bytes_per_token
    async with pair(decode(whole), prefill=prefill(section_bytes=whole)) as (source, [target]):
        source.submit(make_request("r", 8, max_tokens=4), target)

        async def offered() -> None:
            await until(lambda: target.worker.scheduler.receiving(R), what="an accepted offer")
            await asyncio.sleep(0.1)  # they would be sent meanwhile

        await source.step_by_layers(FIRST, offered)
        await until(lambda: source.posted.handed_over)
        assert source.worker.sender.counters.chunks_early == 0
        target.compute()


async def test_prompt_that_ends_with_its_first_token_leaks_nothing() -> None:
    async with pair(decode(), prefill=prefill()) as (source, [target]):
        (first,) = oracle(range(1000, 1008), 1)
        source.submit(make_request("r", 8, max_tokens=4, eos=(first,)), target)
        await source.step_by_layers(FIRST, lambda: early(source))
        await until(lambda: source.idle and target.idle, what="idle pools")
        assert source.posted.ended[0].reason == "stop" and not source.posted.handed_over


def test_worker_requests_reports_of_the_layers_that_can_be_sent_early() -> None:
    def plan(*rows: tuple[int, int]) -> StepPlan:
        """A plan with a row for each (tokens, number sampled)."""
        made = [Row(R, 0, (1,) * n, (0, 1, 2, 3), SamplingParams(), num_sampled=s) for n, s in rows]
        return StepPlan(1, tuple(made))

    of_one_layer = LAYOUT.layers[0].bytes_per_token
    worker = prefill(section_bytes=4 * of_one_layer).worker
    assert worker.num_early_layers(plan((16, 0))) == 0  # its last tokens are in a later step
    assert worker.num_early_layers(plan((1, 1))) == 0  # one section
    assert worker.num_early_layers(plan((4, 1))) == 2
    assert worker.num_early_layers(plan((1, 1), (16, 0), (2, 1))) == worker.num_early_layers(plan((2, 1))) == 2


async def test_layers_reported_for_a_step_that_is_not_running_are_not_sent() -> None:
    async with pair(decode(), prefill=prefill()) as (source, [target]):
        source.worker.layers_computed(1, FIRST)  # no step is out
        source.submit(make_request("r", 8, max_tokens=4), target)

        async def reported_of_another() -> None:
            source.worker.scheduler.sequences[R].hand_over.first_layers = None  # undoes the report of step_by_layers
            source.worker.layers_computed(7, FIRST)
            await until(lambda: target.worker.scheduler.receiving(R), what="an accepted offer")
            await asyncio.sleep(0.1)  # they would be sent meanwhile
            assert not target.worker.hand_overs.writing and not source.worker.sender.counters.bytes_sent

        await source.step_by_layers(FIRST, reported_of_another)
        await until(lambda: source.posted.handed_over)
        target.compute()
