"""Prefix reuse through running clusters: a chat's second turn computes and transfers only what is new; hits on one
pool, both or none give the same tokens; different salts share no blocks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.request import SamplingParams
from baton.engine.checkpoint import read_model_config
from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import Cluster, cluster
from tests.support.engine_driver import Job, run, tiny_runner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

HISTORY, ANSWER, QUESTION = 2000, 40, 24
Plain = Callable[..., list[int]]


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("prefix") / "m", arch="llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    """The reference: one engine, which computes every request alone, without prefix caches."""
    runner = tiny_runner(model, exact=True)

    def complete(prompt: list[int], count: int, **sampling: Any) -> list[int]:
        job = Job(prompt, count, SamplingParams(**{"temperature": 0.0, **sampling}), chunk=256)
        run(runner, [job])
        return job.output

    return complete


@pytest.fixture(scope="module")
def caching(model: Path) -> Iterator[Cluster]:
    """With caches and blocks of 16; each test that shares this cluster uses prompts of its own."""
    with cluster(model, exact=True) as running:
        yield running


def counters(running: Cluster) -> dict[str, int]:
    """Sums over the workers."""
    names = ("prompt_tokens_computed", "prompt_tokens_cached", "kv_bytes_sent", "kv_bytes_received", "kv_bytes_reused")
    return {name: sum(int(fields[name]) for fields in running.workers().values()) for name in names}


async def ask(
    client: Client, running: Cluster, prompt: list[int], count: int, **fields: Any
) -> tuple[Any, dict[str, int]]:
    """Returns the answer and the increase of each counter."""
    before = counters(running)
    answer = await client.complete(prompt, count, model=None, **fields)
    await client.idle(running)
    after = counters(running)
    return answer, {name: after[name] - before[name] for name in after}


def ids(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("block_size", [16, pytest.param(32, marks=pytest.mark.long)])
async def test_second_turn_computes_and_sends_only_the_new_tokens(
    model: Path, plain: Plain, caching: Cluster, block_size: int
) -> None:
    layout = read_model_config(model).kv_layout(block_size, "float32")
    first = tokens(1, HISTORY)
    expected = plain(first, ANSWER)
    second = [*first, *expected, *tokens(2, QUESTION)]
    expected_second = plain(second, ANSWER)
    shared = contextlib.nullcontext(caching)
    with shared if block_size == 16 else cluster(model, exact=True, block_size=block_size) as running:
        async with Client(running) as client:
            answer, moved = await ask(client, running, first, ANSWER)
            assert ids(answer) == expected and cached(answer) == 0
            assert moved["kv_bytes_sent"] == HISTORY * layout.bytes_per_token

            answer, moved = await ask(client, running, second, ANSWER, cache_salt=None)
            assert ids(answer) == expected_second
            at_prefill = HISTORY // block_size * block_size
            at_decode = (HISTORY + ANSWER - 1) // block_size * block_size  # the last token's KV was never computed
            assert cached(answer) == moved["prompt_tokens_cached"] == at_prefill
            assert moved["prompt_tokens_computed"] == len(second) - at_prefill
            assert moved["kv_bytes_sent"] == (len(second) - at_decode) * layout.bytes_per_token
            assert moved["kv_bytes_received"] == moved["kv_bytes_sent"]
            assert moved["kv_bytes_reused"] == at_decode * layout.bytes_per_token

            answer, moved = await ask(client, running, second, ANSWER, cache_salt="another tenant")
            assert ids(answer) == expected_second
            assert (cached(answer), moved["kv_bytes_reused"]) == (0, 0)
            answer, _ = await ask(client, running, second, ANSWER, cache_salt="another tenant")
            assert ids(answer) == expected_second and cached(answer) == (len(second) - 1) // block_size * block_size


@pytest.mark.parametrize("on", ["prefill", "decode"])
async def test_prefix_hit_in_only_one_pool_gives_the_same_tokens(
    model: Path, plain: Plain, caching: Cluster, on: str
) -> None:
    """Only prefill hits if a request of one token came before (nothing was handed over); only decode hits in tokens
    that it generated itself."""
    prompt = tokens({"prefill": 3, "decode": 4}[on], 200)
    turn_1 = plain(prompt, 100, temperature=0.8, seed=9)
    second = [*prompt, *turn_1, 1, 2, 3] if on == "decode" else prompt
    expected = plain(second, 30, temperature=0.8, seed=5)
    async with Client(caching) as client:
        if on == "prefill":
            await ask(client, caching, prompt, 1)
        else:
            answer, _ = await ask(client, caching, prompt, 100, temperature=0.8, seed=9)
            assert ids(answer) == turn_1
        answer, moved = await ask(client, caching, second, 30, temperature=0.8, seed=5)
        assert ids(answer) == expected
        assert cached(answer) == 192
        layout = read_model_config(model).kv_layout(16, "float32")
        assert moved["kv_bytes_reused"] == (288 * layout.bytes_per_token if on == "decode" else 0)


async def test_full_pools_evict_cached_blocks_and_give_the_same_tokens(model: Path, plain: Plain) -> None:
    """Each pool has room for about one and a half of these requests, each of which is sent two or three times."""
    layout = read_model_config(model).kv_layout(16, "float32")
    room_gib = layout.blocks_for(450) * layout.bytes_per_block / (1 << 30)
    prompts = [tokens(seed, 280) for seed in (11, 12, 11, 13, 13, 12, 11)]
    expected = {tuple(p): plain(p, 20) for p in prompts}
    with cluster(model, exact=True, kv_memory_gib=room_gib, max_model_len=400) as running:
        async with Client(running) as client:
            answers = [await ask(client, running, p, 20) for p in prompts]
            assert [ids(a) for a, _ in answers] == [expected[tuple(p)] for p in prompts]
            hits = [cached(a) for a, _ in answers]
            assert hits[0] == hits[1] == 0 < hits[4]
            assert max(hits) == 272 and min(hits[2:]) < 272, "nothing was evicted"
