"""The compiled sampler against the plain one: the same token wherever it decides, and it decides nearly always."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton.core.request import SamplingParams
from baton.engine.kernels import native
from baton.engine.kernels.build import processor_levels
from baton.engine.processors import Draw
from baton.engine.sampler import noised_logits, sample
from baton.engine.sampler_native import Choose, chooser
from tests.engine.driver import float32_levels

pytestmark = pytest.mark.skipif(not processor_levels(), reason="no AVX2")

PARAMS = [
    {},
    {"temperature": 0.1},
    {"temperature": 5.0},
    {"temperature": 1e-5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100_000},
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
]


@pytest.fixture(params=float32_levels())
def choose(request: pytest.FixtureRequest) -> Choose:
    return chooser(native.load(request.param))


def rows(vocab: int) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(vocab)
    normal = generator.normal(size=vocab)
    masked = (normal * 3).astype(np.float32)
    masked[generator.random(vocab) < 0.5] = -np.inf
    masked[vocab // 2] = 1.0
    made = {
        "usual": normal * 3,
        "flat": normal * 1e-3,
        "equal": np.zeros(vocab),
        "few values": np.round(normal),
        "one far above": np.where(np.arange(vocab) == vocab // 3, 60.0, normal),
        "long tail": -np.exp(np.abs(normal) * 2),
        "masked": masked,
    }
    return {name: row.astype(np.float32) for name, row in made.items()}


def plain(row: NDArray[np.float32], draw: Draw) -> int:
    ids, values = noised_logits(row, draw)
    return int(ids[np.argmax(values)])


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 17, 64, 65, 333, 4096])
def test_same_token_as_the_plain_sampler(choose: Choose, params: dict[str, float], vocab: int) -> None:
    undecided = []
    for name, row in rows(vocab).items():
        for index in range(12):
            draw = Draw(SamplingParams(**{"temperature": 0.8, "seed": 2**63 + 77 * index, **params}), index % 3, index)
            token = choose(row, draw)
            if token is None:
                undecided.append(name)
            else:
                assert token == plain(row, draw), (name, index)
    # Sums that meet top_p to the last bit are common among equal weights, and nowhere else.
    assert set(undecided) <= ({"equal", "flat", "few values"} if "top_p" in params or "min_p" in params else set())


def test_what_is_no_number_is_left_to_the_plain_sampler(choose: Choose) -> None:
    draw = Draw(SamplingParams(temperature=1.0), 0, 0)
    for bad in (np.nan, np.inf):
        row = np.zeros(100, dtype=np.float32)
        row[50] = bad
        assert choose(row, draw) is None
    assert choose(np.full(100, -np.inf, dtype=np.float32), draw) is None
    assert choose(np.zeros(100, dtype=np.float32), Draw(SamplingParams(temperature=1e-7), 0, 0)) is None


def test_a_batch_of_draws_through_sample(choose: Choose) -> None:
    logits = torch.randn(30, 5000, generator=torch.Generator().manual_seed(0)) * 4
    settings = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(top_p=0.9, seed=9)]
    draws = [Draw(settings[i % 3], 0, i) for i in range(30)]
    assert sample(logits, draws, None, choose) == sample(logits, draws)


def test_undecided_draws_fall_back() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    draws = [Draw(SamplingParams(seed=i), 0, i) for i in range(3)]
    assert sample(logits, draws, None, lambda row, draw: None) == sample(logits, draws)
