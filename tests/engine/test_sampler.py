"""The sampler against a slow plain twin, bit for bit, and against the distribution it claims to draw from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request import SamplingParams, TokenBias
from baton.core.step import Draw, History
from baton.engine.processors import process
from baton.engine.sampler import gumbel, noised_logits, survivors
from tests.support.plain_sampler import plain_process, plain_sample, plain_survivors
from tests.support.sampler_cases import sample

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
DRAWS = st.builds(Draw, PARAMS, choice=st.integers(0, 3), output_index=st.integers(0, 100_000))


@settings(max_examples=60, deadline=None)
@given(draws=st.lists(DRAWS, min_size=1, max_size=4), seed=st.integers(0, 1000), coarse=st.booleans())
def test_sampler_matches_the_reference_on_mixed_batches(draws: list[Draw], seed: int, coarse: bool) -> None:
    logits = torch.randn(len(draws), 300, generator=torch.Generator().manual_seed(seed)) * 3
    if coarse:
        logits = logits.round()  # many ties
    expected = [plain_sample(row.tolist(), draw) for row, draw in zip(logits, draws, strict=True)]
    assert sample(logits, draws) == expected
    for row, draw in zip(logits, draws, strict=True):
        if not draw.sampling.greedy:
            assert survivors(row.numpy(), draw.sampling).tolist() == plain_survivors(row.tolist(), draw.sampling)


def test_batch_mates_do_not_change_a_token() -> None:
    logits = torch.randn(40, 1000, generator=torch.Generator().manual_seed(3))
    draws = [Draw(SamplingParams(temperature=[0.0, 0.8][i % 2], top_k=i, seed=i), i % 3, i) for i in range(40)]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(40)]


def test_noise_of_a_subset_is_the_noise_of_the_whole_bit_for_bit() -> None:
    draw = Draw(SamplingParams(seed=99), choice=1, output_index=7)
    whole = gumbel(np.arange(50_001), draw)
    for ids in (np.array([3]), np.array([50_000]), np.arange(1, 50_001, 13), np.arange(24_000, 31_111)):
        assert np.array_equal(gumbel(ids, draw), whole[ids])


def test_noise_changes_with_every_part_of_its_key() -> None:
    ids = np.arange(4)
    base = Draw(SamplingParams(seed=5), choice=0, output_index=0)
    others = [
        replace(base, choice=1),
        replace(base, output_index=1),
        replace(base, sampling=SamplingParams(seed=6)),
        replace(base, sampling=SamplingParams(seed=5 + (1 << 32))),
    ]
    noises = [gumbel(ids, draw).tolist() for draw in (base, *others)]
    assert len({value for noise in noises for value in noise}) == 4 * len(noises)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [17, 40, 99]] = 1.0
    assert sample(logits, [Draw(SamplingParams(temperature=0.0, top_k=3, top_p=0.5), 0, 0)]) == [17]


def test_top_k_cuts_ties_by_id_and_keeps_exactly_k() -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[50] = 1.0
    assert survivors(logits, SamplingParams(top_k=4)).tolist() == [0, 1, 2, 50]


def test_top_p_is_applied_after_top_k_and_temperature() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert survivors(logits, SamplingParams(top_p=0.6)).tolist() == [0, 1]
    assert survivors(logits, SamplingParams(top_p=0.5, top_k=2)).tolist() == [0]  # 0.4 / 0.7 is enough
    assert survivors(logits, SamplingParams(top_p=0.6, temperature=0.3)).tolist() == [0]
    assert survivors(logits, SamplingParams(top_p=1e-9)).tolist() == [0]


def test_min_p_is_measured_against_the_likeliest_after_temperature() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert survivors(logits, SamplingParams(min_p=0.4)).tolist() == [0, 1, 2]
    assert survivors(logits, SamplingParams(min_p=0.4, temperature=0.5)).tolist() == [0, 1]
    assert survivors(logits, SamplingParams(min_p=1.0)).tolist() == [0]


def test_masked_tokens_never_survive() -> None:
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[3, 20]] = 0.5, 0.25
    for params in (
        SamplingParams(),
        SamplingParams(top_k=9),
        SamplingParams(top_p=1 - 1e-12),
        SamplingParams(min_p=1e-9),
    ):
        assert survivors(logits, params).tolist() == [3, 20]


def test_top_p_keeps_enough_tokens_of_a_flat_distribution() -> None:
    logits = np.zeros(20_000, dtype=np.float32)
    assert len(survivors(logits, SamplingParams(top_p=0.75))) == 15_000


def test_tokens_with_a_logit_of_minus_infinity_are_never_sampled() -> None:
    logits = torch.full((1, 64), -torch.inf)
    logits[0, 9] = -3.0
    for params in (SamplingParams(seed=1), SamplingParams(top_p=0.9), SamplingParams(top_k=5, top_p=0.9)):
        assert sample(logits, [Draw(params, 0, 0)]) == [9]


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.7, min_p=0.2),
    SamplingParams(repetition_penalty=1.6),
    SamplingParams(frequency_penalty=0.4),
    SamplingParams(presence_penalty=1.2),
    SamplingParams(logit_bias=(TokenBias(2, 1.5), TokenBias(9, -2.0))),
    SamplingParams(min_tokens=9),
    SamplingParams(bad_words=((1, 3), (14,))),
    SamplingParams(allowed_token_ids=(0, 3, 4, 11)),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=9),
]
HISTORY = History((5, 6, 6), (7, 7, 8, 1), (0, 12))


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """Noise for 100,000 draws over 16 tokens, [draws, 16]: 50 output indexes, and 2,000 stretches of ids at each."""
    stretches = [gumbel(np.arange(32_000), Draw(SamplingParams(seed=11), 2, index)) for index in range(50)]
    return np.concatenate(stretches).reshape(-1, 16)


@pytest.mark.parametrize("params", CASES, ids=str)
def test_tokens_are_drawn_from_the_exact_softmax(params: SamplingParams, noise: np.ndarray) -> None:
    logits, kept, probabilities = distribution(params)
    processed = process(torch.from_numpy(logits)[None], [Draw(params, 0, 4, HISTORY)])[0].numpy()
    assert survivors(processed, params).tolist() == kept.tolist()
    winners = (processed[kept] + params.temperature * noise[:, : len(kept)]).argmax(axis=1)
    assert chi_square_holds(np.bincount(winners, minlength=len(kept)), probabilities)


def test_sample_draws_from_the_exact_softmax() -> None:
    count = 2_000
    for params in CASES[1::2]:
        logits, kept, probabilities = distribution(params)
        params = replace(params, min_tokens=params.min_tokens and 10_000)
        draws = [Draw(params, choice, index, HISTORY) for choice in range(2) for index in range(count // 2)]
        tokens = sample(torch.from_numpy(logits).expand(count, -1), draws)
        assert chi_square_holds(np.bincount(np.searchsorted(kept, tokens), minlength=len(kept)), probabilities)


def distribution(params: SamplingParams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw logits, the tokens that may be drawn, and their exact probabilities, computed by the plain twin."""
    logits = np.random.default_rng(4).normal(0, 1.5, 16).astype(np.float32)
    processed = plain_process(logits.tolist(), Draw(params, 0, 4, HISTORY))
    kept = np.array(plain_survivors(processed, params))
    weights = np.exp(np.array(processed)[kept] / params.temperature)
    return logits, kept, weights / weights.sum()


def chi_square_holds(found: np.ndarray, probabilities: np.ndarray) -> bool:
    """Seeds are fixed; with random ones each use fails once in 10,000 times. The limit follows Wilson and Hilferty:
    the cube root of chi-square / freedom is nearly normal, and 3.72 is its 0.9999 quantile."""
    expected = found.sum() * probabilities
    statistic = float(((found - expected) ** 2 / expected).sum())
    freedom = len(found) - 1
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def test_sampled_token_is_the_argmax_of_the_noised_logits() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(8))
    for index in range(20):
        draw = Draw(SamplingParams(temperature=0.9, top_p=0.95, seed=3), 0, index)
        ids, values = noised_logits(logits[0].numpy(), draw)
        assert sample(logits, [draw]) == [int(ids[values.argmax()])]
