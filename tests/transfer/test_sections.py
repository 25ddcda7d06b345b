"""A part is sent in sections, each packed, sent, checked and stored by itself, concurrently with the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.core.edge_orders import Part
from baton.core.errors import HandoffError
from baton.transfer import sections
from baton.transfer.edge import EdgeSpec
from baton.transfer.edge_endpoint import LocalEndpoint
from baton.transfer.gloo import GlooEdge
from baton.transfer.sections import Packing, Storing, checksum
from baton.transfer.staging import PagedLayers
from baton.transfer.staging_buffers import StagingBuffers
from tests.support.edges import Sums, flipped, on_the_wire, pack_tokens
from tests.support.end_pair import BLOCK, LAYER_BYTES, LAYERS, PART, Pair, equal, pool
from tests.support.limits import HANG_S

MakeSpec = Callable[..., EdgeSpec]
pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.fixture(autouse=True)
def one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs one section before the first is sent, so that four suffice to make all steps overlap."""
    monkeypatch.setattr(sections, "AHEAD_BYTES", 1)


async def test_a_section_is_stored_before_the_last_is_packed(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four steps overlap: the second section is packed only when the first has been stored at the other end."""
    ends = await Pair(spec).connect()
    packed, stored, first = sections.pack_layers, sections.unpack, threading.Event()
    number = 0

    def packing(layers: Any, *where: Any) -> torch.Tensor:
        nonlocal number
        number += 1
        assert number == 1 or first.wait(HANG_S), "the first section was not stored"
        return packed(layers, *where)

    def storing(*where: Any) -> None:
        stored(*where)
        first.set()

    monkeypatch.setattr(sections, "pack_layers", packing)
    monkeypatch.setattr(sections, "unpack", storing)
    ends.prefill.worker.run = run_with_sections_requested(ends.prefill)  # type: ignore[method-assign]
    assert await ends.hand_over()
    assert equal(ends.source, ends.target) == [True] * LAYERS
    assert ends.prefill.packed_while_sending == LAYERS - 1
    await ends.close()


@pytest.mark.parametrize("ahead", [2, 3, LAYERS + 1])
async def test_some_sections_are_packed_before_the_first_is_sent(
    ahead: int, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await Pair(spec).connect()
    monkeypatch.setattr(sections, "AHEAD_BYTES", ahead * LAYER_BYTES)
    ends.prefill.worker.run = run_with_sections_requested(ends.prefill)  # type: ignore[method-assign]
    assert await ends.hand_over() and equal(ends.source, ends.target) == [True] * LAYERS
    assert ends.prefill.packed_while_sending == max(LAYERS - ahead, 0)
    await ends.close()


def run_with_sections_requested(end: LocalEndpoint) -> Any:
    """The end's `run`, with the sections requested before any is packed."""
    run = end.worker.run

    async def wanted(begin: Any, **more: Any) -> Any:
        begin.__self__.is_sending = True
        return await run(begin, **more)

    return wanted


async def test_a_part_is_packed_completely_before_its_send_is_requested(spec: MakeSpec) -> None:
    ends = await Pair(spec).connect()
    posted = asyncio.Event()
    taking = asyncio.create_task(ends.decode.take(PART, posted.set))
    await ends.prefill.fill(PART, 0)
    await asyncio.wait_for(posted.wait(), HANG_S)
    await ends.prefill.send()
    assert await taking and equal(ends.source, ends.target) == [True] * LAYERS
    assert ends.prefill.packed_while_sending == 0
    await ends.close()


async def test_only_the_damaged_section_is_not_stored(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, damaged = await Pair(spec).connect(), [True, False]

    def damage(edge: GlooEdge, buf: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        return (flipped(buf, 2 * LAYER_BYTES + 5) if damaged.pop(0) else buf), sums

    on_the_wire(monkeypatch, damage)
    assert not await ends.hand_over()
    assert equal(ends.source, ends.target) == [True, True, False, True]
    assert torch.equal(ends.target[2][0], pool(0.0)[2][0])
    assert await ends.hand_over() and equal(ends.source, ends.target) == [True] * LAYERS
    assert ends.kept[0].reused == 2  # damaged or not, the transfers ended in order
    await ends.close()


@pytest.mark.parametrize("with_sums", [False, True])
async def test_swapped_sections_are_detected(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, with_sums: bool) -> None:
    ends = await Pair(spec).connect()

    def swapped(edge: GlooEdge, buf: torch.Tensor, sums: Sums) -> tuple[torch.Tensor, Sums]:
        first, second, third, fourth = buf.chunk(LAYERS)
        if with_sums:
            sums = (sums[0], sums[2], sums[1], sums[3])
        return torch.cat([first, third, second, fourth]), sums

    on_the_wire(monkeypatch, swapped)
    assert not await ends.hand_over()
    assert equal(ends.source, ends.target) == [True, False, False, True]
    await ends.close()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_abort_between_two_sections_ends_both_sides_and_stops_writing(
    side: str, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = await Pair(spec).connect()
    packed, reached, go, number = sections.pack_layers, threading.Event(), threading.Event(), 0

    def packing(layers: Any, *where: Any) -> torch.Tensor:
        nonlocal number
        number += 1
        if number == 3:
            reached.set()
            go.wait(HANG_S)
        return packed(layers, *where)

    monkeypatch.setattr(sections, "pack_layers", packing)
    ends.prefill.worker.run = run_with_sections_requested(ends.prefill)  # type: ignore[method-assign]
    handing_over = asyncio.create_task(ends.hand_over())
    assert await asyncio.to_thread(reached.wait, HANG_S)
    while not all(equal(ends.source, ends.target)[:2]):
        await asyncio.sleep(0.001)
    (ends.prefill if side == "prefill" else ends.decode).abort("the test")
    with pytest.raises(HandoffError):
        await handing_over
    go.set()
    await ends.close()
    assert equal(ends.source, ends.target) == [True, True, False, False]
    assert (len(ends.kept[0]), ends.kept[0].idle_bytes) == (0, 0)
    again = await Pair(spec, generation=2).connect()
    assert await again.hand_over()
    await again.close()


async def test_a_packing_failure_during_a_send_ends_the_edge(spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = await Pair(spec).connect()
    packed, number = sections.pack_layers, 0

    def failing(layers: Any, *where: Any) -> torch.Tensor:
        nonlocal number
        number += 1
        if number == 3:
            raise HandoffError("the test cannot pack")
        return packed(layers, *where)

    monkeypatch.setattr(sections, "pack_layers", failing)
    ends.prefill.worker.run = run_with_sections_requested(ends.prefill)  # type: ignore[method-assign]
    with pytest.raises(HandoffError, match="the test cannot pack"):
        await ends.hand_over()
    assert ends.prefill.dead is not None
    await ends.close()
    assert len(ends.kept[0]) == 0


async def test_an_out_of_range_block_is_refused_and_the_edge_stays_usable(spec: MakeSpec) -> None:
    """Storing fails, but the transfer does not, so the sender completes."""
    ends = await Pair(spec).connect()
    posted, bad = asyncio.Event(), Part((1, 7), 0, 8, PART.num_bytes, PART.identity)
    taking = asyncio.create_task(ends.decode.take(bad, posted.set))
    await asyncio.wait_for(posted.wait(), HANG_S)
    await ends.prefill.fill(PART, 0)
    await ends.prefill.send()
    with pytest.raises(HandoffError, match="block ids 1 to 7"):
        await taking
    assert ends.decode.dead is None and await ends.hand_over()
    await ends.close()


async def test_ends_with_different_section_sizes_fail_with_the_reason(spec: MakeSpec) -> None:
    ends = await Pair(spec).connect()
    ends.decode._rank.section_bytes = 2 * LAYER_BYTES
    with pytest.raises(HandoffError):
        await ends.hand_over()
    assert ends.decode.dead is not None and "sections is 4, expected 2" in ends.decode.dead.message
    assert equal(ends.source, ends.target) == [False] * LAYERS
    await ends.close()


def test_a_part_of_the_wrong_size_is_refused() -> None:
    kept = StagingBuffers(1 << 16)
    for kind in (Packing, Storing):
        part = Part((1, 0), 0, 8, PART.num_bytes - 8, b"who")
        with pytest.raises(HandoffError, match=f"{PART.num_bytes - 8} bytes, the layers have {PART.num_bytes}"):
            kind(PagedLayers.of(pool(1.0)), BLOCK, part, kept.take(part.num_bytes), LAYER_BYTES)


def test_no_section_is_stored_after_a_stop() -> None:
    source, target, kept = pool(1.0), pool(0.0), StagingBuffers(1 << 16)
    storing = Storing(PagedLayers.of(target), BLOCK, PART, kept.take(PART.num_bytes), LAYER_BYTES)
    storing.buffer.view.copy_(pack_tokens(source, PART.block_ids, BLOCK, 0, 8))
    sums = [checksum(storing.identity_of(section), storing.bytes_of(section)) for section in storing.sections]
    storing.arrived(0, sums[0])
    storing.stop()
    storing.arrived(1, sums[1])
    assert storing.stored == 1 and equal(source, target) == [True, False, False, False]
