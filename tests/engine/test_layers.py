"""The pieces of a layer: fast kinds against plain ones, exact kinds bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.layers import PackedLinear, PlainLinear, RMSNorm, make_linear, rotate, swiglu, swiglu_exact
from baton.engine.weights import Projection


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_linear_matches_plain_linear(dtype: torch.dtype, bias: bool) -> None:
    projection = Projection(randn(48, 80).to(dtype), randn(48, seed=1).to(dtype) if bias else None)
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert isinstance(make_linear(projection), PlainLinear)  # oneDNN packs no bf16 without AVX-512
        return
    plain, packed = PlainLinear(projection), PackedLinear(projection)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    for rows in (1, 2, 17, 100):
        x = randn(rows, 80, seed=rows).to(dtype)
        assert torch.allclose(packed(x), plain(x), rtol=0.01, atol=tolerance)
    assert isinstance(make_linear(projection), PackedLinear)


def test_norm_is_x_over_its_root_mean_square() -> None:
    x, weight = randn(5, 64) * 3, randn(64, seed=1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(RMSNorm(weight, 1e-5)(x), expected, atol=1e-5)


def test_rotary_embedding_rotates_pairs_by_their_angles() -> None:
    x, angle = randn(1, 1, 4), torch.tensor([0.3, 1.1])
    cos = torch.cat([angle.cos(), angle.cos()]).view(1, 1, 4)
    sin = torch.cat([-angle.sin(), angle.sin()]).view(1, 1, 4)
    turned = rotate(x, cos, sin)
    for pair in range(2):
        a, b = x[0, 0, pair], x[0, 0, pair + 2]
        c, s = angle[pair].cos(), angle[pair].sin()
        assert torch.allclose(turned[0, 0, [pair, pair + 2]], torch.stack([a * c - b * s, b * c + a * s]))


def test_exact_and_fast_swiglu_agree() -> None:
    x = randn(9, 128) * 20
    gate, up = x.chunk(2, -1)
    assert torch.equal(swiglu(x), F.silu(gate) * up)
    assert torch.allclose(swiglu_exact(x), swiglu(x), rtol=1e-5, atol=1e-6)
    assert torch.isfinite(swiglu_exact(torch.full((1, 2), -1000.0))).all()


@pytest.mark.parametrize("width", [1152, 1154, 340])
@pytest.mark.parametrize("operation", ["swiglu", "norm", "softmax"])
def test_rows_have_the_same_bits_in_any_number_of_rows(two_threads: None, operation: str, width: int) -> None:
    """With two threads, torch's own silu fails this at 255 rows: it splits a row between the threads."""
    norm = RMSNorm(randn(width, seed=1), 1e-5)
    function = {"swiglu": swiglu_exact, "norm": norm, "softmax": lambda x: torch.softmax(x, -1)}[operation]
    x = randn(700, width) * 3
    whole = function(x)
    for rows in (2, 3, 31, 100, 255, 300):
        for first in (0, 1, 17, 333):
            part = function(x[first : first + rows].clone())
            assert torch.equal(part, whole[first : first + rows]), (rows, first)
