"""Streams over HTTP with half of the KV memory that they need: sequences are preempted and recomputed, each stream
produces the same tokens as with enough memory, makes progress and finishes; no block is lost."""

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
from baton.runtime.model_source import builtin_directory
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.fault_cluster import FaultCluster, fault_cluster
from tests.support.limits import Stall

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

BLOCK = 16
PROMPT, OUTPUT = 16, 304
"""Far more output than the coordinator expects: it admits all streams at once, and the pool fills as they grow."""
SILENCE_S = 2.0


@dataclass
class Stream:
    """One stream: its tokens, and the arrival time of each message with tokens."""

    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    @property
    def silence_s(self) -> float:
        return max(later - earlier for earlier, later in pairwise(self.at))


async def read_stream(client: Client, index: int, output: int, salt: str) -> Stream:
    """Odd-numbered streams are sampled with a seed, the others are greedy."""
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


def check_concurrent(streams: Iterable[Stream]) -> None:
    assert max(h.at[0] for h in streams) < min(h.at[-1] for h in streams), "they did not all run at one time"


def blocks_for(streams: int, output: int = OUTPUT) -> int:
    return streams * -(-(PROMPT + output) // BLOCK)


def pool_flags(blocks: int, model: Path) -> dict[str, object]:
    """Returns the flags of an exact cluster whose pools hold `blocks` blocks each."""
    per_block = read_model_config(model).kv_layout(BLOCK, "float32").bytes_per_block
    return {"prefill": 1, "decode": 1, "exact": True, "block_size": BLOCK, "kv_memory_gib": blocks * per_block / 2**30}


def preemptions(running: FaultCluster) -> int:
    return int(running.cluster.workers()["decode-0"]["preemptions"])


async def check_all_freed(running: FaultCluster, blocks: int) -> None:
    """Waits until every block of both pools is free. A worker that violates an invariant ends itself and is replaced by
    one with free blocks, so this also checks that no worker has died."""
    states = await running.wait_until_idle()
    assert {state["load"]["blocks_total"] for state in states.values()} == {blocks}
    assert "died: " not in running.cluster.output.read_text()


async def test_preempted_streams_in_half_the_pool_get_the_same_tokens_as_fewer_streams(tmp_path: Path) -> None:
    """A few streams at a time have all the memory they need; their salt keeps them from reusing cached blocks."""
    many, few = 16, 6
    model = make_checkpoint(tmp_path / "m", "llama", max_position_embeddings=1024)
    half = blocks_for(many) // 2
    with fault_cluster(model, **pool_flags(half, model)) as running:
        async with Client(running.cluster) as client:
            together = await read_streams(client, range(many), salt="together")
            check_concurrent(together)
            short = preemptions(running)
            assert short > 0, "nothing was ever short"
            groups = [range(many)[first : first + few] for first in range(0, many, few)]
            apart = [stream for group in groups for stream in await read_streams(client, group, salt="apart")]
            assert preemptions(running) == short, "a few were too many"
        assert [h.tokens for h in together] == [h.tokens for h in apart]
        assert len({tuple(h.tokens) for h in together}) == many
        await check_all_freed(running, half)


@pytest.mark.long
@pytest.mark.parametrize("draft", ["none", "auto"])
@pytest.mark.parametrize(("count", "output"), [(8, OUTPUT), (16, OUTPUT), (32, OUTPUT), (16, 2 * OUTPUT)])
async def test_streams_in_half_the_pool_pause_under_two_seconds_and_keep_their_tokens(
    count: int, output: int, draft: str
) -> None:
    """The built-in pair, compared with a cluster that has room for all streams plus a block each for draft tokens."""
    streams_of: dict[str, list[Stream]] = {}
    needed = blocks_for(count, output)
    for pool, blocks in (("whole", needed + count), ("half", needed // 2)):
        with fault_cluster("builtin", draft=draft, **pool_flags(blocks, builtin_directory("target"))) as running:
            async with Client(running.cluster) as client:
                with Stall() as stall:
                    streams_of[pool] = await read_streams(client, range(count), output)
                check_concurrent(streams_of[pool])
            short, silence_s = preemptions(running), max(stream.silence_s for stream in streams_of[pool])
            await check_all_freed(running, blocks)
        most_s = stall.allows(SILENCE_S)
        print(f"{pool}: {stall.took_s:.2f} s, silent {silence_s:.2f} of {most_s:.2f} s, {short} preemptions")
        assert (short > 0) == (pool == "half")
        assert silence_s < most_s
    assert [stream.tokens for stream in streams_of["half"]] == [stream.tokens for stream in streams_of["whole"]]
