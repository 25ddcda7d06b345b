"""The compiled sampler and the GPU sampler (in Triton's interpreter) against the plain one: the same token wherever
they decide, and they decide nearly always."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton.core.request import SamplingParams
from baton.core.step import Draw
from baton.engine.kernels import native
from baton.engine.processors import ApplyMasks, apply_masks
from baton.engine.sampler import Choose, chooser, masker
from tests.support.engine_driver import float32_levels
from tests.support.sampler_cases import PARAMS, plain, rows, sample

TRITON = "triton"
SMALL_VOCABS, VOCABS = (1, 3, 65), (1, 3, 17, 64, 65, 333, 4096)


def load_sampler(name: str) -> Choose:
    if name != TRITON:
        return chooser(native.load(name))
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("with a GPU the kernel is compiled: see tests/gpu")
    from baton.engine.kernels.sampling import decide

    return lambda logits, draws: [token if token >= 0 else None for token in decide(logits, draws).tolist()]


@pytest.fixture(params=[*float32_levels(), TRITON])
def choose(request: pytest.FixtureRequest) -> Choose:
    return load_sampler(request.param)


@pytest.fixture(params=float32_levels())
def compiled(request: pytest.FixtureRequest) -> Choose:
    return load_sampler(request.param)


def every_case() -> list[object]:
    """Triton's interpreter takes seconds per case: it gets small vocabularies only, and in every run only the case with
    all parameters, one with top_p and the plain draw."""
    found = [
        pytest.param(level, p, v, id=f"{level}-{p}-{v}") for level in float32_levels() for p in PARAMS for v in VOCABS
    ]
    for params in PARAMS:
        for vocab in SMALL_VOCABS:
            often = vocab == 65 and params in (PARAMS[-1], PARAMS[7], {})
            marks = () if often else (pytest.mark.long,)
            found.append(pytest.param(TRITON, params, vocab, marks=marks, id=f"{TRITON}-{params}-{vocab}"))
    return found


@cache
def row_of(vocab: int, kind: str) -> NDArray[np.float32]:
    return rows(vocab)[kind]


@cache
def plain_token(vocab: int, kind: str, draw: Draw) -> int:
    """The reference, computed once for all samplers."""
    return plain(row_of(vocab, kind), draw)


@pytest.mark.parametrize(("name", "params", "vocab"), every_case())
def test_sampler_chooses_the_token_of_the_plain_sampler(name: str, params: dict[str, float], vocab: int) -> None:
    choose, undecided = load_sampler(name), set()
    for kind in rows(1):
        row = row_of(vocab, kind)
        draws = [
            Draw(SamplingParams(**{"temperature": 0.8, "seed": 2**63 + 77 * index, **params}), index % 3, index)
            for index in range(2 if name == TRITON else 8)
        ]
        tokens = choose(torch.from_numpy(row).expand(len(draws), -1), draws)
        for draw, token in zip(draws, tokens, strict=True):
            if token is None:
                undecided.add(kind)
            else:
                assert token == plain_token(vocab, kind, draw), (kind, draw)
    # Sums that equal top_p to the last bit occur among equal weights only; with float32 sums, near matches too.
    if name == TRITON:
        assert undecided <= ({"equal"} if params.get("top_k") == 50 else set())
    else:
        assert undecided <= ({"equal", "flat", "few values"} if "top_p" in params or "min_p" in params else set())


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.5},  # 2 of 4 equal weights are just enough
        {"min_p": float(np.exp(-1.0))},
        {"temperature": 1e-12},  # noise below the float64 resolution at 20.0
    ],
    ids=str,
)
def test_draws_too_close_to_decide_fall_back_to_the_plain_sampler(params: dict[str, float], choose: Choose) -> None:
    row = torch.tensor([[20.0, 20.0, 20.0, 20.0 if "top_p" in params or "temperature" in params else 19.0]])
    draw = Draw(SamplingParams(**{"temperature": 1.0, "seed": 1, **params}), 0, 0)
    assert choose(row, [draw]) == [None]
    assert sample(row, [draw], None, choose) == sample(row, [draw])


def test_rows_of_nan_or_infinite_logits_fall_back_to_the_plain_sampler(choose: Choose) -> None:
    draw = Draw(SamplingParams(temperature=1.0), 0, 0)
    for bad in (np.nan, np.inf):
        row = torch.zeros(1, 100)
        row[0, 50] = bad
        assert choose(row, [draw]) == [None]
    assert choose(torch.full((1, 100), -torch.inf), [draw]) == [None]


def test_lowest_id_wins_among_equal_logits_and_zeros_of_either_sign(choose: Choose) -> None:
    greedy = Draw(SamplingParams(temperature=0.0), 0, 0)
    logits = torch.tensor([[1.0, 3.0, 3.0], [-0.0, 0.0, -1.0], [0.0, -0.0, 0.0]])
    assert choose(logits, [greedy] * 3) == [1, 0, 0]
    row = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    draws = [Draw(SamplingParams(temperature=1.0, top_k=2, seed=index), 0, index) for index in range(8)]
    tokens = choose(row.expand(8, -1), draws)
    assert tokens == [plain(row.numpy(), draw) for draw in draws] and {*tokens} == {0, 1}


@pytest.mark.parametrize("temperature", [1.5e-6, 5e-6])
def test_compiled_sampler_agrees_when_noise_is_below_float32_resolution(compiled: Choose, temperature: float) -> None:
    """The noise is below the float32 resolution at these logits."""
    row = np.full(1000, 20.0, dtype=np.float32)
    draws = [Draw(SamplingParams(temperature=temperature, seed=1), 0, index) for index in range(300)]
    tokens = compiled(torch.from_numpy(row).expand(300, -1), draws)
    decided = [(draw, token) for draw, token in zip(draws, tokens, strict=True) if token is not None]
    assert all(token == plain(row, draw) for draw, token in decided) and len(decided) > 250


@cache
def row_with_a_tail(vocab: int) -> NDArray[np.float32]:
    """The likeliest token, the next one, and a tail with a fifth of the total weight."""
    row = np.full(vocab, np.log(0.5 / vocab), dtype=np.float32) + np.arange(vocab, dtype=np.float32) % 7 * 1e-3
    row[77], row[500] = 0.0, np.log(0.9)
    return row


@cache
def plain_token_with_a_tail(vocab: int, draw: Draw) -> int:
    return plain(row_with_a_tail(vocab), draw)


def top_p_cases() -> list[object]:
    """In Triton's interpreter a case of the large vocabulary takes two seconds."""
    cases = product([-3e-7, -3e-9, 3e-9, 3e-7], [4096, 49_152], [*float32_levels(), TRITON])
    slow = lambda _, vocab, name: name == TRITON and vocab > 4096  # noqa: E731
    return [pytest.param(*case, marks=pytest.mark.long if slow(*case) else ()) for case in cases]


@pytest.mark.parametrize(("beyond", "vocab", "name"), top_p_cases())
def test_top_p_cut_is_exact_where_float32_sums_cannot_decide(name: str, vocab: int, beyond: float) -> None:
    """The likeliest token alone barely reaches top_p, or barely does not; a fifth of the total weight is in tokens
    whose weights are summed in float64 only if that is needed."""
    row = row_with_a_tail(vocab)
    total = np.exp(row.astype(np.float64)).sum()
    params = SamplingParams(temperature=1.0, top_p=(1.0 + beyond) / total, seed=5)
    count = 2 if name == TRITON else 40
    draws = [Draw(params, 0, index) for index in range(count)]
    tokens = load_sampler(name)(torch.from_numpy(row).expand(count, -1), draws)
    assert tokens == [plain_token_with_a_tail(vocab, draw) for draw in draws]
    assert name == TRITON or set(tokens) == ({77} if beyond < 0 else {77, 500})


@pytest.mark.parametrize(
    "params",
    [pytest.param({"top_p": 0.9}, marks=pytest.mark.long), {"top_p": 0.9, "top_k": 15_000}, {"min_p": 0.9}],
    ids=str,
)
def test_cut_in_a_long_flat_tail_is_found_on_a_gpu(params: dict[str, float]) -> None:
    """Weights of 1e-4 of the sum or less, which a search in float32 may miss by a value."""
    choose, vocab = load_sampler(TRITON), 20_000
    row = (np.random.default_rng(3).normal(size=vocab) * 0.1).astype(np.float32)
    draws = [Draw(SamplingParams(**{"temperature": 0.7, "seed": index, **params}), 0, index) for index in range(2)]
    assert choose(torch.from_numpy(row).expand(len(draws), -1), draws) == [plain(row, draw) for draw in draws]


def test_float32_noise_is_near_the_exact_noise_for_every_kind_of_random_word() -> None:
    """Tokens are skipped by it. The margin is 1e-3; a GPU's logarithms add 1e-5."""
    load_sampler(TRITON)
    from tests.engine.sampler_parts import noise32

    few = torch.arange(4096)
    words = torch.cat([few, 2**32 - 1 - few, torch.randint(2**32, (8192,)), 2**28 + few - 2048])
    exact = -np.log(-np.log1p(-(words.double().numpy() + 0.5) * 2.0**-32))
    assert np.abs(noise32(words).numpy() - exact).max() < 1e-4


def test_mixed_batch_gets_the_tokens_of_the_plain_sampler(choose: Choose) -> None:
    logits = torch.randn(8, 2500, generator=torch.Generator().manual_seed(0)) * 4
    logits[5, ::2] = logits[5, 1::2]  # every value occurs twice, so cuts fall among equal values
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(top_p=0.9, seed=9),
        SamplingParams(top_k=7, top_p=0.6, min_p=0.01, seed=2**63),
    ]
    draws = [Draw(settings[i % 4], i % 2, i) for i in range(8)]
    assert None not in choose(logits, draws)
    assert sample(logits, draws, None, choose) == sample(logits, draws)


def test_undecided_draws_fall_back_to_the_plain_sampler() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    draws = [Draw(SamplingParams(seed=i), 0, i) for i in range(3)]
    asked: list[int] = []

    def half(rows: torch.Tensor, asking: Sequence[Draw]) -> list[int | None]:
        asked.append(len(asking))
        return [None, sample(rows, asking)[1], None]

    assert sample(logits, draws, None, half) == sample(logits, draws)
    assert asked == [3]


def load_masker(name: str) -> ApplyMasks:
    if name != TRITON:
        return masker(native.load(name))
    load_sampler(name)  # or skips
    from baton.engine.kernels.masks import mask_rows

    return mask_rows


@pytest.mark.parametrize("level", [*float32_levels(), TRITON])
@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 16, 17, 64, 333, 4096, 4097])
@pytest.mark.parametrize("padding", [0, 3], ids=["as_packed", "whole_words"])
def test_fast_masks_equal_the_plain_ones_and_write_nothing_beyond_their_rows(
    level: str, vocab: int, padding: int
) -> None:
    draw = np.random.default_rng(vocab)
    mask = load_masker(level)
    for share in (0.0, 0.01, 0.5, 1.0):
        many = [np.packbits(draw.random(vocab) < share, bitorder="little") for _ in range(2)]
        masks = [
            (row, np.concatenate([bits, np.full(padding, 0xFF, np.uint8)]))
            for row, bits in zip((3, 1), many, strict=True)
        ]
        rows = torch.randn(5, vocab)
        plain = rows.clone()
        apply_masks(plain, masks)
        mask(rows, masks)
        assert torch.equal(rows, plain)


def test_masks_of_a_step_reach_a_device_in_one_copy_of_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = load_masker(TRITON)
    from baton.engine.kernels import masks as module

    copied: list[int] = []

    def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(module, "to_device", to_device)
    mask(torch.randn(64, 4096), [(row, np.full(512, 255, np.uint8)) for row in range(64)])
    assert copied == [64 * (512 + 8)]
