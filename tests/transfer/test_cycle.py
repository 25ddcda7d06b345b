"""The 2 x 2 cycle: two prefill workers send to two decode workers in opposite orders at once, over real edges.

What keeps it from stalling are two habits, and each alone is enough: a sender launches only what its receiver has
posted, and every edge has its own thread. With both switched off (`naive`) the same traffic stalls within a few rounds.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from baton.core.handover import Posted
from baton.core.kv_layout import KVLayout
from baton.transfer.edge_thread import EdgeWorker
from prefill.link import Link
from tests.support.builders import make_layout, make_request
from tests.support.fake_runner import DecodeNode, FakeRunner, PrefillNode, pair

ROUND_LIMIT_S = 20.0  # a stall lasts for ever; a slow machine does not
SMALL = make_layout(4)  # 256 bytes a token
LARGE = make_layout(4, heads=8, head_dim=512)  # 64 KiB a token: far beyond what sockets take without a reader
TOKENS = {SMALL: 8, LARGE: 32}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


async def round_trip(number: int, sources: list[PrefillNode], decodes: list[DecodeNode], tokens: int) -> None:
    """The first sends in order, the second in the opposite order; ends when all four have handed over."""
    for source, order in zip(sources, (decodes, decodes[::-1]), strict=True):
        for decode in order:
            name = f"{number}-{source.worker.config.worker_id}-{decode.worker.config.worker_id}"
            source.submit(make_request(name, range(number, number + tokens), max_tokens=2), decode)
    while [source for source in sources if source.step()]:  # both at once, step by step
        pass
    deadline = time.monotonic() + ROUND_LIMIT_S
    while not all(len(s.told.handed_over) + len(s.told.parked) == 2 for s in sources):
        assert time.monotonic() < deadline, f"round {number} stalls: {sources[0].worker.outgoing._links}"
        await asyncio.sleep(0.0005)
    for node in (*sources, *decodes):
        node.compute()
        assert not node.told.parked, node.told.parked
        for told in (node.told.handed_over, node.told.tokens, node.told.ended):
            told.clear()


async def cycle(rounds: int, layout: KVLayout, timeout_s: float = ROUND_LIMIT_S) -> None:
    tokens = TOKENS[layout]

    def node(kind: Any, name: str) -> Any:
        return kind(name, timeout_s=timeout_s, runner=FakeRunner(4 * tokens, layout))

    sources, decodes = ([node(kind, f"{kind.__name__}{n}") for n in range(2)] for kind in (PrefillNode, DecodeNode))
    async with pair(*decodes, prefill=sources[0], more=sources[1:]):
        for number in range(rounds):
            await round_trip(number, sources, decodes, tokens)
        sent = rounds * 2 * tokens * layout.bytes_per_token
        assert [s.worker.outgoing.bytes_sent for s in sources] == [sent, sent]
        assert [d.worker.incoming.bytes_received for d in decodes] == [sent, sent]
        assert sum(d.worker.incoming.chunks_damaged + d.worker.incoming.stale_messages for d in decodes) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "rounds"), [(SMALL, 300), (LARGE, 100)], ids=["small", "large"])
async def test_opposite_orders_never_stall(layout: KVLayout, rounds: int) -> None:
    await cycle(rounds, layout)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
async def test_a_thousand_rounds_never_stall(layout: KVLayout) -> None:
    await cycle(1000, layout)


def one_thread_for_all_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs one operation at a time over all its edges, as one thread would; which comes first is chance."""
    busy: dict[str, threading.Lock] = defaultdict(threading.Lock)
    chance = random.Random(1)
    execute = EdgeWorker._execute

    def in_turn(edge: EdgeWorker, job: Any) -> None:
        _, prefill, decode, _ = edge.spec.prefix.split("/")
        time.sleep(chance.random() * 0.005)
        with busy[prefill if edge.spec.side == "prefill" else decode]:
            execute(edge, job)

    monkeypatch.setattr(EdgeWorker, "_execute", in_turn)


def launch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender does not wait until its receiver has posted."""

    async def announce(link: Link, chunk: Any, timeout_s: float) -> Posted:
        await link._stream.send(chunk)
        return Posted(chunk.sequence, chunk.index, chunk.edge_generation, chunk.prefill_rank, chunk.decode_rank)

    monkeypatch.setattr(Link, "announce", announce)


@pytest.mark.parametrize("switched_off", ["threads", "posted", "both"])
async def test_which_habits_keep_it_from_stalling(switched_off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if switched_off != "posted":
        one_thread_for_all_edges(monkeypatch)
    if switched_off != "threads":
        launch_at_once(monkeypatch)
    if switched_off == "both":
        with pytest.raises(AssertionError, match=r"stalls|waited|Parked"):
            await cycle(400, LARGE, timeout_s=1.0)
    else:
        await cycle(20, LARGE)
