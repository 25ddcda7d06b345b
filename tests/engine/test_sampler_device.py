"""The sampler for a GPU, on this device, against the plain one: the same token wherever it decides, nearly always."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from baton.core.request import SamplingParams
from baton.engine import sampler_device
from baton.engine.processors import Draw
from baton.engine.sampler import gumbel as plain_gumbel
from baton.engine.sampler import sample
from baton.engine.sampler_device import choose_on_device, gumbel
from tests.engine.sampler_cases import PARAMS, plain, rows


def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("with a GPU the kernel is compiled: see tests/gpu")
    monkeypatch.setattr(sampler_device, "decide", sampler_device.decide_by_kernel)


@pytest.fixture(params=["torch", "kernel"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By torch's operations, or by the one kernel, in Triton's interpreter."""
    if request.param == "kernel":
        by_kernel(monkeypatch)
    return str(request.param)


def rarely(params: dict[str, float], vocab: int) -> tuple[pytest.MarkDecorator, ...]:
    """Triton's interpreter takes seconds for each: all at once, one of top_p and the plain draw in every run."""
    return () if vocab == 65 and params in (PARAMS[-1], PARAMS[7], {}) else (pytest.mark.long,)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 17, 64, 65, 333, 4096])
def test_same_token_as_the_plain_sampler(params: dict[str, float], vocab: int) -> None:
    same_token_as_the_plain_sampler(params, vocab, 12)


@pytest.mark.parametrize(
    ("params", "vocab"),
    [pytest.param(p, v, marks=rarely(p, v), id=f"{p}-{v}") for p in PARAMS for v in (1, 3, 65)],
)
def test_same_token_by_the_kernel(params: dict[str, float], vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kernel(monkeypatch)
    same_token_as_the_plain_sampler(params, vocab, 3)


def same_token_as_the_plain_sampler(params: dict[str, float], vocab: int, count: int) -> None:
    undecided = set()
    for name, row in rows(vocab).items():
        draws = [
            Draw(SamplingParams(**{"temperature": 0.8, "seed": 2**63 + 77 * index, **params}), index % 3, index)
            for index in range(count)
        ]
        for draw, token in zip(draws, choose_on_device(torch.from_numpy(row).expand(count, -1), draws), strict=True):
            if token is None:
                undecided.add(name)
            else:
                assert token == plain(row, draw), (name, draw)
    # 45 of 50 equal weights are top_p 0.9 of them to the last bit.
    assert undecided <= ({"equal"} if params.get("top_k") == 50 else set())


def test_noise_is_that_of_the_plain_sampler() -> None:
    draws = [Draw(SamplingParams(seed=seed), choice, index) for seed, choice, index in ((0, 0, 0), (2**64 - 1, 3, 999))]
    words = torch.tensor(
        [[d.sampling.seed & 0xFFFFFFFF, d.sampling.seed >> 32, d.output_index, d.choice] for d in draws]
    )
    ids = np.arange(5003)
    for row, draw in zip(gumbel(words, torch.from_numpy(ids)).numpy(), draws, strict=True):
        assert np.abs(row - plain_gumbel(ids, draw)).max() < 1e-13


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.5},  # of 4 equal weights 2 are just enough
        {"min_p": float(np.exp(-1.0))},
        {"temperature": 1e-12},  # noise less than float64 tells apart beside 20.0
    ],
    ids=str,
)
def test_what_is_too_close_is_left_to_the_plain_sampler(params: dict[str, float], chosen: str) -> None:
    row = torch.tensor([[20.0, 20.0, 20.0, 20.0 if "top_p" in params or "temperature" in params else 19.0]])
    draw = Draw(SamplingParams(**{"temperature": 1.0, "seed": 1, **params}), 0, 0)
    assert choose_on_device(row, [draw]) == [None]
    assert sample(row, [draw], None, choose_on_device) == sample(row, [draw])


def test_what_is_no_number_is_left_to_the_plain_sampler(chosen: str) -> None:
    for temperature in (0.0, 1.0):
        draw = Draw(SamplingParams(temperature=temperature), 0, 0)
        for bad in (np.nan, np.inf):
            row = torch.zeros(1, 100)
            row[0, 50] = bad
            assert choose_on_device(row, [draw]) == [None]
        assert choose_on_device(torch.full((1, 100), -torch.inf), [draw]) == [None]


def test_of_equal_logits_the_lowest_id_wins_and_a_zero_has_no_sign(chosen: str) -> None:
    greedy = Draw(SamplingParams(temperature=0.0), 0, 0)
    assert choose_on_device(torch.tensor([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [0.0, -0.0, 0.0]]), [greedy] * 3) == [
        1,
        0,
        0,
    ]
    row = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    draws = [Draw(SamplingParams(temperature=1.0, top_k=2, seed=index), 0, index) for index in range(20)]
    tokens = choose_on_device(row.expand(20, -1), draws)
    assert tokens == [plain(row.numpy(), draw) for draw in draws] and {*tokens} == {0, 1}


@pytest.mark.parametrize("at_once", [1, 12_000, 1 << 22])
def test_a_mixed_batch_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(sampler_device, "_AT_ONCE", at_once)
    logits = torch.randn(30, 5000, generator=torch.Generator().manual_seed(0)) * 4
    settings = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(top_p=0.9, seed=9)]
    draws = [Draw(settings[i % 3], 0, i) for i in range(30)]
    chosen = choose_on_device(logits, draws)
    assert None not in chosen and chosen == sample(logits, draws)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU the kernel is compiled: see tests/gpu"
)
def test_the_kernel_decides_a_mixed_batch_as_torch_does() -> None:
    pytest.importorskip("triton")
    logits = torch.randn(8, 2500, generator=torch.Generator().manual_seed(0)) * 4
    logits[5, ::2] = logits[5, 1::2]  # every value twice: cuts fall among equal ones
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(top_p=0.9, seed=9),
        SamplingParams(top_k=7, top_p=0.6, min_p=0.01, seed=2**63),
    ]
    draws = [Draw(settings[i % 4], i % 2, i) for i in range(8)]
    found = sampler_device.decide_by_kernel(logits, draws)
    assert torch.equal(found, sampler_device.decide(logits, draws)) and int(found.min()) >= 0
