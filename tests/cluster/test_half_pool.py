"""Streams over HTTP in half of the KV memory that they need: sequences are preempted and computed again, and each
stream says what it says where nothing is short, goes on, and ends; no block is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.engine.checkpoint import read_model_config
from baton.model_source import builtin_directory
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.fault_cluster import FaultCluster, fault_cluster
from tests.support.limits import Stall

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BLOCK = 16
PROMPT, OUTPUT = 16, 304
"""Far more output than the coordinator expects: it lets all in at once, and the pool fills while they grow."""
SILENCE_S = 2.0


@dataclass
class Stream:
    """One stream: its tokens, and when each message with tokens came."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    @property
    def silence_s(self) -> float:
        return max(later - earlier for earlier, later in pairwise(self.at))


async def read_stream(client: Client, index: int, output: int, salt: str) -> Stream:
    """Every other stream is greedy, the rest are seeded."""
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
    prompt = random.Random(index).choices(range(6, 256), k=PROMPT)
    stream = Stream()
    async for event in client.events(prompt, output, model=None, cache_salt=salt or None, **sampling):
        assert event == "[DONE]" or "choices" in event, event
        ids = [] if event == "[DONE]" else [token for choice in event["choices"] for token in choice["token_ids"]]
        if ids:
            stream.tokens += ids
            stream.at.append(time.monotonic())
    assert len(stream.tokens) == output
    return stream


async def read_streams(client: Client, streams: Iterable[int], output: int = OUTPUT, salt: str = "") -> list[Stream]:
    return await asyncio.gather(*(read_stream(client, index, output, salt) for index in streams))


def check_at_once(streams: Iterable[Stream]) -> None:
    assert max(h.at[0] for h in streams) < min(h.at[-1] for h in streams), "they did not all run at one time"


def blocks_for(streams: int, output: int = OUTPUT) -> int:
    return streams * -(-(PROMPT + output) // BLOCK)


def room_for(blocks: int, model: Path) -> dict[str, object]:
    """Flags of an exact cluster whose pools hold so many blocks each."""
    per_block = read_model_config(model).kv_layout(BLOCK, "float32").bytes_per_block
    return {"prefill": 1, "decode": 1, "exact": True, "block_size": BLOCK, "kv_memory_gib": blocks * per_block / 2**30}


def preemptions(running: FaultCluster) -> int:
    return int(running.cluster.workers()["decode-0"]["preemptions"])


async def settle(running: FaultCluster, blocks: int) -> None:
    """Every block of either pool is free. A worker whose an invariant does not hold ends itself, and another with free
    blocks takes its place: none may have."""
    states = await running.settle()
    assert {state["load"]["blocks_total"] for state in states.values()} == {blocks}
    assert "died: " not in running.cluster.output.read_text()


async def test_streams_in_half_the_pool_say_what_a_few_say_in_it(tmp_path: Path) -> None:
    """A few at a time find room for all that they need; by their salt, nothing cached of what the many left."""
    many, few = 16, 6
    model = make_checkpoint(tmp_path / "m", "llama", max_position_embeddings=1024)
    half = blocks_for(many) // 2
    with fault_cluster(model, **room_for(half, model)) as running:
        async with Client(running.cluster) as client:
            together = await read_streams(client, range(many), salt="together")
            check_at_once(together)
            short = preemptions(running)
            assert short > 0, "nothing was ever short"
            groups = [range(many)[first : first + few] for first in range(0, many, few)]
            apart = [stream for group in groups for stream in await read_streams(client, group, salt="apart")]
            assert preemptions(running) == short, "a few were too many"
        assert [h.tokens for h in together] == [h.tokens for h in apart]
        assert len({tuple(h.tokens) for h in together}) == many
        await settle(running, half)


@pytest.mark.long
@pytest.mark.parametrize("draft", ["none", "auto"])
@pytest.mark.parametrize(("count", "output"), [(8, OUTPUT), (16, OUTPUT), (32, OUTPUT), (16, 2 * OUTPUT)])
async def test_no_stream_is_silent_for_two_seconds_and_none_says_anything_else(
    count: int, output: int, draft: str
) -> None:
    """The built-in pair, and the same streams through a cluster with room for all and a block more for draft tokens."""
    streams_of: dict[str, list[Stream]] = {}
    needed = blocks_for(count, output)
    for pool, blocks in (("whole", needed + count), ("half", needed // 2)):
        with fault_cluster("builtin", draft=draft, **room_for(blocks, builtin_directory("target"))) as running:
            async with Client(running.cluster) as client:
                with Stall() as stall:
                    streams_of[pool] = await read_streams(client, range(count), output)
                check_at_once(streams_of[pool])
            short, silence_s = preemptions(running), max(stream.silence_s for stream in streams_of[pool])
            await settle(running, blocks)
        most_s = stall.allows(SILENCE_S)
        print(f"{pool}: {stall.took_s:.2f} s, silent {silence_s:.2f} of {most_s:.2f} s, {short} preemptions")
        assert (short > 0) == (pool == "half")
        assert silence_s < most_s
    assert [stream.tokens for stream in streams_of["half"]] == [stream.tokens for stream in streams_of["whole"]]
