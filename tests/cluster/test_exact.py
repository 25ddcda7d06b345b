"""`--exact` through running clusters: a request gets the same tokens alone and in a batch, for every chunk size, greedy
and seeded, whether prefill or decode computed the KV. (Logits are compared bit by bit in tests/engine.)"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

COUNT = 48
SAMPLED = {"temperature": 0.8, "seed": 1234, "top_p": 0.95}
CHUNKS = [pytest.param(c, marks=[] if c == 7 else pytest.mark.long) for c in (7, 16, 64, 512)]


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("exact") / "m", arch="llama")


@pytest.fixture(scope="module")
def first_answers() -> dict[str, tuple[int, ...]]:
    """The tokens from the first cluster; every later cluster must produce the same."""
    return {}


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_tokens_do_not_depend_on_other_requests_or_chunk_size(
    chunk: int, model: Path, first_answers: dict[str, tuple[int, ...]]
) -> None:
    mine = prompt(1, 100)
    plan_ahead = "on" if chunk == 512 else "off"  # tokens must not depend on this either
    with cluster(model, exact=True, step_tokens=chunk, max_running=16, plan_ahead=plan_ahead) as running:
        async with Client(running) as client:
            alone = {
                "greedy": await client.tokens(mine, COUNT, model=None),
                "sampled": await client.tokens(mine, COUNT, model=None, **SAMPLED),
            }
            others = [
                client.tokens(prompt(n, 20 * n), COUNT, model=None, temperature=n % 2, seed=n) for n in range(2, 10)
            ]
            greedy, sampled, *_ = await asyncio.gather(
                client.tokens(mine, COUNT, model=None), client.tokens(mine, COUNT, model=None, **SAMPLED), *others
            )
            assert greedy == alone["greedy"]
            assert sampled == alone["sampled"]
            assert greedy != sampled
            # Decode computed the positions from 100 on above; now prefill computes them, with the same continuation.
            again = await client.tokens([*mine, *greedy[:20]], COUNT - 20, model=None)
            assert again == greedy[20:]
            await client.idle(running)
        decode = running.workers()["decode-0"]
    assert decode["steps_ahead"] > 100 if plan_ahead == "on" else decode["steps_ahead"] == 0
    assert first_answers.setdefault("greedy", greedy) == greedy
    assert first_answers.setdefault("sampled", sampled) == sampled


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 5},
    {"frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 6, "top_p": 0.95, "presence_penalty": 0.5, "logit_bias": {"300": 1.5, "400": -2}},
    {"temperature": 0.8, "seed": 7, "stop": ["\n\n"], "min_tokens": 4},
    {"stop": ["return"]},
)
SOURCES = (
    "def read_lines(path):\n",
    "class Queue:\n    def __init__(self",
    "for index, name in enumerate(",
    "import os\n",
)


async def answers(**flags: object) -> tuple[list[tuple[int, ...]], Counter[str]]:
    """Sends every kind of request after every text, all concurrently, twice (the second time from cached blocks).
    Returns the tokens, and the sums of the draft token counts in the usage."""
    counted: Counter[str] = Counter()
    with cluster("builtin", exact=True, max_running=32, **flags) as running:
        async with Client(running) as client:

            async def tokens(text: str, kind: dict[str, Any]) -> tuple[int, ...]:
                answer = await client.complete(text, COUNT, model=None, **kind)
                counted.update({k: v for k, v in answer["usage"].get("speculation", {}).items() if k != "forced"})
                return tuple(answer["choices"][0]["token_ids"])

            asked = [(text * 3, kind) for text in SOURCES for kind in KINDS]
            first = await asyncio.gather(*(tokens(*each) for each in asked))
            assert await asyncio.gather(*(tokens(*each) for each in asked)) == first
            await client.idle(running)
            return first, counted


@pytest.mark.long
async def test_tokens_do_not_depend_on_the_drafter() -> None:
    plain, none = await answers(draft="none")
    assert none["drafted_tokens"] == 0 and any(len(tokens) < COUNT for tokens in plain)
    for flags in ({"draft": "auto"}, {"draft": "auto", "draft_tokens": 4}, {"draft": "ngram", "draft_tokens": 4}):
        drafted, counters = await answers(**flags)
        assert drafted == plain, flags
        assert counters["drafted_tokens"] > 0
        assert counters["accepted_tokens"] > counters["drafted_tokens"] / 10
