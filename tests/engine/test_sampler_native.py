"""The compiled sampler against the plain one: the same token wherever it decides, and it decides nearly always."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.core.request import SamplingParams
from baton.engine.kernels import native
from baton.engine.kernels.build import processor_levels
from baton.engine.processors import Draw
from baton.engine.sampler import sample
from baton.engine.sampler_native import Choose, chooser
from tests.engine.driver import float32_levels
from tests.engine.sampler_cases import PARAMS, plain, rows

pytestmark = pytest.mark.skipif(not processor_levels(), reason="no AVX2")


@pytest.fixture(params=float32_levels())
def choose(request: pytest.FixtureRequest) -> Choose:
    return chooser(native.load(request.param))


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 17, 64, 65, 333, 4096])
def test_same_token_as_the_plain_sampler(choose: Choose, params: dict[str, float], vocab: int) -> None:
    undecided = []
    for name, row in rows(vocab).items():
        for index in range(12):
            draw = Draw(SamplingParams(**{"temperature": 0.8, "seed": 2**63 + 77 * index, **params}), index % 3, index)
            (token,) = choose(torch.from_numpy(row)[None], [draw])
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
        assert choose(torch.from_numpy(row)[None], [draw]) == [None]
    assert choose(torch.full((1, 100), -torch.inf), [draw]) == [None]
    assert choose(torch.zeros(1, 100), [Draw(SamplingParams(temperature=1e-7), 0, 0)]) == [None]


@pytest.mark.parametrize("temperature", [1.5e-6, 5e-6])
def test_of_logits_that_noise_hardly_parts_the_same_one_wins(choose: Choose, temperature: float) -> None:
    """Their noise is less than float32 tells apart beside them."""
    row = np.full(1000, 20.0, dtype=np.float32)
    draws = [Draw(SamplingParams(temperature=temperature, seed=1), 0, index) for index in range(300)]
    decided = 0
    for draw, token in zip(draws, choose(torch.from_numpy(row).expand(300, -1), draws), strict=True):
        if token is not None:
            decided += 1
            assert token == plain(row, draw)
    assert decided > 250


@pytest.mark.parametrize("vocab", [4096, 49_152])
@pytest.mark.parametrize("beyond", [-3e-7, -3e-9, 3e-9, 3e-7])
def test_a_cut_that_float32_cannot_place_is_placed(choose: Choose, vocab: int, beyond: float) -> None:
    """The likeliest token alone just reaches top_p, or just does not; a fifth of all is in tokens whose weights are not
    summed in float64 where that is not needed."""
    row = np.full(vocab, np.log(0.5 / vocab), dtype=np.float32) + np.arange(vocab, dtype=np.float32) % 7 * 1e-3
    row[77], row[500] = 0.0, np.log(0.9)
    total = np.exp(row.astype(np.float64)).sum()
    params = SamplingParams(temperature=1.0, top_p=(1.0 + beyond) / total, seed=5)
    draws = [Draw(params, 0, index) for index in range(40)]
    tokens = choose(torch.from_numpy(row).expand(40, -1), draws)
    assert tokens == [plain(row, draw) for draw in draws]
    assert set(tokens) == ({77} if beyond < 0 else {77, 500})


def test_a_batch_of_draws_through_sample(choose: Choose) -> None:
    logits = torch.randn(30, 5000, generator=torch.Generator().manual_seed(0)) * 4
    settings = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(top_p=0.9, seed=9)]
    draws = [Draw(settings[i % 3], 0, i) for i in range(30)]
    assert sample(logits, draws, None, choose) == sample(logits, draws)


def test_undecided_draws_fall_back() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    draws = [Draw(SamplingParams(seed=i), 0, i) for i in range(3)]
    asked: list[int] = []

    def half(rows: torch.Tensor, asking: Sequence[Draw]) -> list[int | None]:
        asked.append(len(asking))
        return [None, sample(rows, asking)[1], None]

    assert sample(logits, draws, None, half) == sample(logits, draws)
    assert asked == [3]
