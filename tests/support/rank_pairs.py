"""A prefill and a decode worker of several ranks, with threads as followers, and a hand-over between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.runtime.edge_ranks import WorkerEndpoints
from prefill.link import Link
from tests.support.builders import make_layout, make_request
from tests.support.fake_runner import FakeRanks, FakeRunner, oracle
from tests.support.nodes import DecodeNode, PrefillNode, pair, until


@contextlib.asynccontextmanager
async def ranks(
    prefill_tp: int = 2, decode_tp: int = 2, *, heads: int = 4, timeout_s: float = 20.0, pause_s: float = 0.0
) -> AsyncIterator[tuple[PrefillNode, DecodeNode]]:
    layout = make_layout(4, heads=heads)
    made = [
        FakeRanks(size, 32, layout, pause_s) if size > 1 else FakeRunner(32, layout) for size in (prefill_tp, decode_tp)
    ]
    try:
        nodes = DecodeNode(runner=made[1], timeout_s=timeout_s), PrefillNode(runner=made[0], timeout_s=timeout_s)
        async with pair(nodes[0], prefill=nodes[1]) as (source, [decode]):
            yield source, decode
            await until(lambda: not orders(source) and not orders(decode), what="answered orders")
        for runner in made:
            assert not getattr(runner, "lost", ())
            await until(lambda runner=runner: not any(e._endpoints for e in getattr(runner, "follower_endpoints", ())))
    finally:
        for runner in made:
            if isinstance(runner, FakeRanks):
                await asyncio.to_thread(runner.close)


def orders(node: PrefillNode | DecodeNode) -> int:
    ends = node.runner.make_endpoint
    return len(ends) if isinstance(ends, WorkerEndpoints) else 0


def only_link(source: PrefillNode) -> Link:
    (link,) = (t.result() for t in source.worker.sender._links.values())
    return link


def latest_generation(link: Link) -> int:
    """Returns the latest generation of the link's edges, which rises with each edge made on any link."""
    return max(end.generation for end in link.endpoints.values())


async def hand_over(source: PrefillNode, decode: DecodeNode, name: str, prompt: int) -> None:
    request = make_request(name, prompt, max_tokens=5)
    source.submit(request, decode)
    while source.step():
        await asyncio.sleep(0.002)
    await until(lambda: [o for o in source.posted.handed_over if o.sequence.request_id == name], what="the hand-over")
    decode.compute()
    assert {**source.posted.output(name), **decode.posted.output(name)} == dict(enumerate(oracle(request.prompt, 5)))
