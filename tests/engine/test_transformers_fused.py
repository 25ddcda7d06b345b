"""Operations of a model of transformers that one call of the compiled kernels computes together: gated MLPs, rotary
embedding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.core.errors import StartupError
from baton.engine import transformers_fused
from baton.engine.attention import FastAttention
from baton.engine.attention_native import NativeAttention
from baton.engine.kernels.native import Arena, choose_kernels, heads_struct, load
from baton.engine.transformers_fused import GatedMlp, KernelRotary, use_gated_mlps, use_rotary
from baton.engine.transformers_packed import PackedWeight, linear
from tests.support.engine_driver import float32_levels, tiny_runner
from tests.support.transformers_models import make_transformers_checkpoint

KERNELS, _ = choose_kernels("auto", torch.device("cpu"))
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels on this machine")

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def near(result: Tensor, expected: Tensor) -> bool:
    error = (result.double() - expected.double()).abs().max()
    return bool(error <= NEAR[result.dtype] * expected.abs().max())


@pytest.mark.parametrize("level", float32_levels())
@pytest.mark.parametrize(("rows", "width", "inner"), [(1, 64, 160), (3, 40, 100), (300, 64, 33)])
def test_a_gated_mlp_matches_float64_row_by_row(level: str, rows: int, width: int, inner: int) -> None:
    kernels = load(level)
    for dtype in NEAR:
        weights = [torch.randn(size).to(dtype) for size in ((inner, width), (inner, width), (width, inner))]
        biases = [torch.randn(len(weight)).to(dtype) for weight in weights]
        arena = Arena()
        layers = [PackedWeight(kernels, arena, w, b, 1) for w, b in zip(weights, biases, strict=True)]
        mlp = GatedMlp(kernels, layers, lambda x: x, 1)
        x = torch.randn(1, rows, width).to(dtype)
        gate, up = (F.linear(x.double(), weights[i].double(), biases[i].double()) for i in range(2))
        expected = F.linear(F.silu(gate) * up, weights[2].double(), biases[2].double())
        result = mlp(x)
        assert near(result, expected)
        assert torch.equal(mlp(x[:, -1:]), result[:, -1:])
        assert [layer.calls for layer in layers] == [2, 2, 2]


@pytest.mark.parametrize("level", float32_levels())
@pytest.mark.parametrize("size", [8, 64, 72])
def test_rotation_matches_float64_and_writes_nothing_else(level: str, size: int) -> None:
    for dtype in NEAR:
        q, k = (torch.randn(1, 5, heads, size).to(dtype).transpose(1, 2) for heads in (3, 2))
        cos, sin = (torch.randn(1, 5, size).to(dtype) for _ in range(2))
        results = [torch.full((5 * heads + 1, size), 7.0, dtype=dtype) for heads in (3, 2)]
        heads = [ctypes.byref(heads_struct(x)) for x in (q, k)]
        load(level).rotate(
            dtype == torch.bfloat16, *heads, cos.data_ptr(), sin.data_ptr(), 5, size,
            *(result.data_ptr() for result in results),
        )  # fmt: skip
        for x, result in zip((q, k), results, strict=True):
            expected = rotate_half(x.double(), cos.double(), sin.double())
            assert near(result[:-1].view(1, 5, -1, size).transpose(1, 2), expected)
            assert torch.equal(result[-1], torch.full((size,), 7.0, dtype=dtype))


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    lower, upper = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-upper, lower), dim=-1) * sin[:, None]


class _Mlp(nn.Module):
    def __init__(self, activation: nn.Module, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act_fn, self._combine = activation, combine

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self._combine(self.act_fn(self.gate_proj(x)), self.up_proj(x)))
        return result


def packed(module: nn.Module) -> nn.Module:
    """Packs its linear layers, as KernelModules does."""
    assert KERNELS is not None
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.__dict__["baton_packed"] = PackedWeight(KERNELS, Arena(), layer.weight.data, layer.bias, 1)
            layer.forward = MethodType(linear, layer)  # type: ignore[method-assign]
    return module


@torch.no_grad()
@pytest.mark.parametrize(
    ("activation", "combine", "is_one"),
    [
        (nn.SiLU(), lambda gate, up: gate * up, True),
        (nn.GELU(), lambda gate, up: gate * up, False),
        (nn.SiLU(), lambda gate, up: gate.clamp(max=7.0) * up, False),
        (nn.SiLU(), lambda gate, up: gate * (up + 1e-2), False),
        (nn.Sequential(nn.SiLU(), nn.Linear(48, 48)), lambda gate, up: gate * up, False),
    ],
    ids=["silu", "gelu", "limit", "up + 0.01", "layer"],
)
def test_an_mlp_is_what_computes_one(activation: nn.Module, combine: Callable[..., Tensor], is_one: bool) -> None:
    assert KERNELS is not None
    module, x = packed(_Mlp(activation, combine)), torch.randn(1, 5, 32)
    expected = module(x)
    made = use_gated_mlps(module, KERNELS, 1)
    assert len(made) == is_one
    assert near(module(x), expected)
    assert [mlp.calls for mlp in made] == [1] * is_one


@torch.no_grad()
def test_an_mlp_whose_layer_exchanges_results_stays() -> None:
    assert KERNELS is not None
    module = packed(_Mlp(nn.SiLU(), torch.mul))
    whole = module.down_proj.forward
    module.down_proj.forward = lambda x: whole(x)  # type: ignore[method-assign]
    assert use_gated_mlps(module, KERNELS, 1) == []


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate_half(q, cos, sin), rotate_half(k, cos, sin)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    turned = [torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) for x in (q, k)]
    rotated = (x * cos[:, None] + t * sin[:, None] for x, t in zip((q, k), turned, strict=True))
    return next(rotated), next(rotated)


@torch.no_grad()
def test_only_rotate_half_is_replaced_and_only_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNELS is not None
    model = _Attention()
    (rotary,) = use_rotary(model, KERNELS)
    q, k = torch.randn(1, 3, 5, 16), torch.randn(1, 2, 5, 16)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    for result, expected in zip(model(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert near(result, expected)
    assert rotary.calls == 1
    half = q[..., :8], k[..., :8], cos[..., :8], sin[..., :8]  # not contiguous: the model's own function
    assert all(near(*pair) for pair in zip(model(*half), apply_rotary_pos_emb(*half), strict=True))
    _Attention()(q, k, cos, sin)
    assert rotary.calls == 1
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", interleaved)
    assert use_rotary(_Attention(), KERNELS) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gated", "rotate"])
def test_the_self_check_finds_a_kernel_that_is_wrong(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled by 1.3, as if a factor were lost."""
    path = make_transformers_checkpoint(tmp_path / "m", "llama", getattr(torch, dtype))
    monkeypatch.setattr(transformers_fused, "_close", lambda *_: True)
    made: Any = GatedMlp if kind == "gated" else KernelRotary
    compute = made.__call__

    def wrong(self: Any, *given: Any) -> Any:
        result = compute(self, *given)
        if self.plain or (kind == "gated" and self._first.convert):
            return result
        return result * 1.3 if kind == "gated" else tuple(1.3 * each for each in result)

    monkeypatch.setattr(made, "__call__", wrong)
    with pytest.raises(StartupError, match="self-check failed: a sequence computed"):
        tiny_runner(path, dtype=dtype, model_impl="transformers")


@pytest.mark.parametrize("level", float32_levels())
@pytest.mark.parametrize("stored", ["same", "float8_e4m3fn"])
def test_kv_is_stored_as_torch_stores_it(level: str, stored: str) -> None:
    slots = torch.tensor([9, 2, 17, 0])
    for dtype in NEAR:
        fast = FastAttention(4, 5, dtype, torch.device("cpu"))
        native = NativeAttention(load(level), 1, 4, fast)
        keys, values = (torch.randn(1, 5, 3, size).to(dtype).transpose(1, 2) * 9 for size in (24, 40))
        pools = []
        for attention in (fast, native):
            in_pool = dtype if stored == "same" else getattr(torch, stored)
            pool = tuple(torch.zeros(6, 4, 3, size).to(in_pool) for size in (24, 40))
            attention.store(pool, slots, keys, values)  # the last token is padding
            pools.append([each.view(torch.uint8) for each in pool])
        assert all(torch.equal(*pair) for pair in zip(*pools, strict=True))
        assert pools[0][0].any()
        with pytest.raises(RuntimeError):
            native.store(pool, slots, values, keys)
