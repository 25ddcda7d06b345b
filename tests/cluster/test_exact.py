"""`--exact` through running clusters: the same tokens alone and in company, whatever the chunk, greedy and seeded, and
whether prefill or decode made the KV. (The bits of the logits are compared in tests/engine.)"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.client import Client
from tests.support.cluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

COUNT = 48
SAMPLED = {"temperature": 0.8, "seed": 1234, "top_p": 0.95}
CHUNKS = [pytest.param(c, marks=[] if c in (7, 512) else pytest.mark.long) for c in (7, 16, 64, 512)]


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("exact") / "m", arch="llama")


@pytest.fixture(scope="module")
def first_answers() -> dict[str, tuple[int, ...]]:
    """What the first cluster said; every later one must say the same."""
    return {}


@pytest.mark.parametrize("chunk", CHUNKS)
async def test_tokens_do_not_depend_on_company_or_chunk(
    chunk: int, model: Path, first_answers: dict[str, tuple[int, ...]]
) -> None:
    mine = prompt(1, 100)
    with cluster(model, exact=True, step_tokens=chunk, max_running=16) as running:
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
            # Positions 100.. were computed by decode above; now prefill computes them, and goes on equally.
            again = await client.tokens([*mine, *greedy[:20]], COUNT - 20, model=None)
            assert again == greedy[20:]
            await client.idle(running)
    assert first_answers.setdefault("greedy", greedy) == greedy
    assert first_answers.setdefault("sampled", sampled) == sampled
