"""The 2 x 2 cycle: two prefill workers send to two decode workers in opposite orders concurrently, over real edges.

Two rules prevent a deadlock, and each alone suffices: a sender launches only what its receiver has posted, and every
edge has its own thread. With both disabled the same traffic deadlocks within a few rounds.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from baton.core.handover import Posted
from baton.core.kv_layout import KVLayout
from baton.transfer.edge_thread import EdgeWorker
from prefill.link import Link
from tests.support.builders import make_layout, make_request
from tests.support.fake_runner import FakeRanks, FakeRunner
from tests.support.nodes import DecodeNode, PrefillNode, pair, until

ROUND_LIMIT_S = 20.0  # a deadlock never ends; a slow machine finishes
SMALL = make_layout(4)  # 256 bytes a token
LARGE = make_layout(4, heads=8, head_dim=512)  # 64 KiB a token: far more than sockets buffer without a reader
TOKENS = {SMALL: 8, LARGE: 32}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


async def round_trip(
    number: int, sources: list[PrefillNode], decodes: list[DecodeNode], tokens: int, early: bool
) -> None:
    """The first source sends in order, the second in the opposite order; ends when all four hand-overs are done. With
    `early`, first layers are announced before their step is done."""
    for who, (source, order) in enumerate(zip(sources, (decodes, decodes[::-1]), strict=True)):
        for turn, decode in enumerate(order):
            name = f"{number}-{source.worker.config.worker_id}-{decode.worker.config.worker_id}"
            prompt = [4 * number + 2 * who + turn, *range(tokens - 1)]  # no other prompt has this prefix
            source.submit(make_request(name, prompt, max_tokens=2), decode)

    async def computes(source: PrefillNode) -> None:
        """Stands for the other layers: in the first round until a chunk of first layers was sent, later 2 ms."""
        if number == 0:
            await until(lambda: source.worker.sender.counters.chunks_early, what="first layers")
        else:
            await asyncio.sleep(0.002)

    while early and any(await asyncio.gather(*(s.step_by_layers(1, partial(computes, s)) for s in sources))):
        pass
    while [source for source in sources if source.step()]:  # both sources in turn, step by step
        pass
    deadline = time.monotonic() + ROUND_LIMIT_S
    while not all(len(s.posted.handed_over) + len(s.posted.parked) == 2 for s in sources):
        assert time.monotonic() < deadline, f"round {number} stalls: {sources[0].worker.sender._links}"
        await asyncio.sleep(0.0005)
    for node in (*sources, *decodes):
        node.compute()
        assert not node.posted.parked, node.posted.parked
        for queue in (node.posted.handed_over, node.posted.tokens, node.posted.ended):
            queue.clear()


async def cycle(
    rounds: int,
    layout: KVLayout,
    timeout_s: float = ROUND_LIMIT_S,
    tp: tuple[int, int] = (1, 1),
    edges: int = 1,
    early: bool = False,
) -> None:
    """With `tp` ranks at prefill and decode each of the four links has `edges` edges, and all carry every chunk."""
    tokens = 8 if early else TOKENS[layout]  # one step: no earlier chunk can be late
    runners: list[FakeRunner] = []

    def node(kind: Any, name: str, size: int) -> Any:
        runners.append(FakeRanks(size, 4 * tokens, layout) if size > 1 else FakeRunner(4 * tokens, layout))
        return kind(name, timeout_s=timeout_s, runner=runners[-1])

    try:
        sources, decodes = (
            [node(kind, f"{kind.__name__}{n}", size) for n in range(2)]
            for kind, size in zip((PrefillNode, DecodeNode), tp, strict=True)
        )
        async with pair(*decodes, prefill=sources[0], more=sources[1:]):
            for number in range(rounds):
                await round_trip(number, sources, decodes, tokens, early)
            sent = rounds * 2 * tokens * layout.bytes_per_token
            assert [s.worker.sender.counters.bytes_sent for s in sources] == [sent, sent]
            assert [d.worker.hand_overs.counters.bytes_received for d in decodes] == [sent, sent]
            assert (
                sum(
                    d.worker.hand_overs.counters.chunks_damaged + d.worker.hand_overs.counters.stale_messages
                    for d in decodes
                )
                == 0
            )
            assert all((s.worker.sender.counters.chunks_early > 0) == early for s in sources)
            links = [task.result() for s in sources for task in s.worker.sender._links.values()]
            assert [len(link.endpoints) for link in links] == [edges] * 4
        assert not [runner.lost for runner in runners if isinstance(runner, FakeRanks) and runner.lost]
    finally:
        for runner in runners:
            if isinstance(runner, FakeRanks):
                await asyncio.to_thread(runner.close)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "rounds"), [(SMALL, 20), (LARGE, 20)], ids=["small", "large"])
async def test_sends_in_opposite_orders_do_not_deadlock(layout: KVLayout, rounds: int) -> None:
    await cycle(rounds, layout)


@pytest.mark.timeout(300)
async def test_sending_first_layers_early_does_not_deadlock() -> None:
    await cycle(20, LARGE, early=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
async def test_a_thousand_rounds_do_not_deadlock(layout: KVLayout, early: bool) -> None:
    await cycle(1000, layout, early=early)


# Ranks at prefill and decode, and how many edges a link then has.
TP = [((2, 2), 2), ((2, 1), 2), ((1, 2), 2)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("tp", "edges", "layout", "rounds"),
    [(*TP[0], SMALL, 10), (*TP[1], LARGE, 12), (*TP[2], SMALL, 10)],
    ids=["2-2-small", "2-1-large", "1-2-small"],
)
async def test_links_of_several_edges_do_not_deadlock(
    tp: tuple[int, int], edges: int, layout: KVLayout, rounds: int
) -> None:
    await cycle(rounds, layout, tp=tp, edges=edges)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(("tp", "edges"), TP, ids=[f"{p}-{d}" for (p, d), _ in TP])
async def test_a_thousand_rounds_over_several_edges_do_not_deadlock(
    tp: tuple[int, int], edges: int, layout: KVLayout
) -> None:
    await cycle(1000, layout, tp=tp, edges=edges)


def one_thread_for_all_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs one operation at a time over all its edges, as one thread would, in random order."""
    busy: dict[str, threading.Lock] = defaultdict(threading.Lock)
    chance = random.Random(1)
    execute = EdgeWorker._execute

    def execute_one_at_a_time(edge: EdgeWorker, job: Any) -> None:
        _, prefill, decode, _ = edge.spec.prefix.split("/")
        time.sleep(chance.random() * 0.005)
        with busy[prefill if edge.spec.side == "prefill" else decode]:
            execute(edge, job)

    monkeypatch.setattr(EdgeWorker, "_execute", execute_one_at_a_time)


def launch_before_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a sender launch without waiting until its receiver has posted."""

    async def announce(link: Link, chunk: Any, timeout_s: float) -> Coroutine[Any, Any, Posted]:
        async def already_posted() -> Posted:
            return Posted(chunk.sequence, chunk.index, chunk.edge_generation, chunk.prefill_rank, chunk.decode_rank)

        await link._stream.send(chunk)
        return already_posted()

    monkeypatch.setattr(Link, "announce", announce)


@pytest.mark.parametrize(
    ("switched_off", "tp", "edges"),
    [
        ("threads", (1, 1), 1),
        ("posted", (1, 1), 1),
        ("both", (1, 1), 1),
        pytest.param("both", *TP[0], marks=pytest.mark.long),
    ],
    ids=["threads", "posted", "both", "both-2-2"],
)
async def test_sends_deadlock_only_if_edge_threads_and_posted_are_both_disabled(
    switched_off: str, tp: tuple[int, int], edges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switched_off != "posted":
        one_thread_for_all_edges(monkeypatch)
    if switched_off != "threads":
        launch_before_posted(monkeypatch)
    if switched_off == "both":
        with pytest.raises(AssertionError, match=r"stalls|waited|Parked"):
            await cycle(400, LARGE, 1.0, tp, edges)
    else:
        await cycle(14, LARGE, ROUND_LIMIT_S, tp, edges)
