"""Modules of a model of transformers that the compiled kernels compute: which ones, with what result, what stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.core.errors import StartupError
from baton.engine import attention_native, transformers_experts, transformers_kernels
from baton.engine.attention_native import NativeAttention
from baton.engine.kernels.build import processor_levels
from baton.engine.kernels.native import Arena, AttentionShape, choose_kernels, load, pack_weight, unpack_weight
from baton.engine.kv_error import median_error
from baton.engine.transformers_experts import PackedExperts, are_experts
from baton.engine.transformers_kernels import KernelModules
from baton.engine.transformers_norms import KernelNorm, rms_norm_of
from baton.engine.transformers_packed import PackedWeight
from tests.support.engine_driver import all_logits, float32_levels, random_tokens, tiny_runner
from tests.support.transformers_models import make_transformers_checkpoint

KERNELS, _ = choose_kernels("auto", torch.device("cpu"))
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels on this machine")

MODULES = {
    "llama": (29, 9, 0, 4, 1, 4, 0, 0),
    "gemma2": (29, 17, 0, 0, 1, 4, 0, 0),  # a norm multiplies by 1 + weight; another gate
    "qwen3": (29, 17, 0, 4, 1, 4, 0, 0),  # norms of heads
    "gpt2": (1, 0, 0, 0, 0, 0, 0, 0),  # its own convolutions, LayerNorm
    "deepseek_v3": (29, 17, 3, 4, 1, 0, 0, 0),  # not what expands latents, which attention reads; a router of groups
    "mixtral": (17, 9, 4, 0, 1, 4, 4, 4),
    "gpt_oss": (17, 9, 4, 0, 0, 0, 4, 0),  # weights transposed, with biases
}
"""Linear layers, norms, modules of experts, gated MLPs, kinds of attention with rotary embedding, modules of
attention at once, routers and whole mixtures in models of 4 layers."""
ONCE = {"gemma2": torch.float32, "qwen3": torch.float32, "gpt2": torch.float32, "gpt_oss": torch.float32}
ONCE |= {"llama": torch.bfloat16, "mixtral": torch.bfloat16, "deepseek_v3": torch.bfloat16}
"""The dtype in which `make test` has a model."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if ONCE[kind] == dtype else pytest.mark.long)
        for kind in MODULES
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_a_step_uses_the_kernels_and_computes_what_torch_does(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, name = make_transformers_checkpoint(tmp_path / kind, kind, dtype), str(dtype).removeprefix("torch.")
    attended: list[NativeAttention] = []
    prepare = NativeAttention.prepare
    count = lambda attention, *call: attended.append(attention) or prepare(attention, *call)  # type: ignore[func-returns-value]  # noqa: E731
    runner = tiny_runner(path, dtype=name, model_impl="transformers", block_size=4)
    monkeypatch.setattr(NativeAttention, "prepare", count)
    modules: KernelModules = runner.adapters._model.by_kernels
    before, experts = modules.calls, [each.calls for each in modules.experts]
    counted = [*modules.mlps, *(modules.mixtures or modules.routers)]
    others = [each.calls for each in counted]
    tokens = random_tokens(24)
    logits = all_logits(runner, tokens, [9, 9, 6])
    replaced = modules.linears, modules.norms, modules.experts, modules.mlps, modules.rotary, modules.attentions
    replaced = *replaced, modules.routers, modules.mixtures
    assert tuple(map(len, replaced)) == MODULES[kind]
    steps = (modules.calls[0] - before[0]) / len(modules.linears)
    assert steps == 3
    assert modules.calls[1] - before[1] == steps * len(modules.norms)
    assert [each.calls - computed for each, computed in zip(counted, others, strict=True)] == [3] * len(others)
    for each, computed in zip(modules.experts, experts, strict=True):
        assert 3 * 2 <= each.calls - computed <= 3 * 4  # of 4 experts those that tokens chose, 2 each
    if kind not in ("gemma2", "gpt_oss", "deepseek_v3"):  # softcap; sinks; latents
        assert attended[-1].calls >= 4 * steps
    plain = all_logits(tiny_runner(path, dtype=name, model_impl="transformers", kernels="torch"), tokens, [9, 9, 6])
    assert median_error(logits, plain) < (1e-5 if dtype == torch.float32 else 0.05)


def test_a_row_of_a_product_has_the_same_bits_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        packed = _packed(torch.randn(96, 80).to(dtype))
        x = torch.randn(1, 40, 80).to(dtype)
        assert torch.equal(packed(x, biased=False)[:, 7:8], packed(x[:, 7:8], biased=False))


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (333, 100)], ids=str)
@pytest.mark.parametrize("level", processor_levels())
def test_a_weight_is_unpacked_bit_for_bit(size: tuple[int, int], level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(size).to(dtype)
        _, tensors = pack_weight(load(level), Arena(), weight, None, dtype=dtype)
        assert torch.equal(unpack_weight(load(level), tensors[0], *size, dtype), weight)


@pytest.mark.parametrize("level", float32_levels())
@pytest.mark.parametrize("size", [16, 24, 100, 576])
def test_norms_match_float64_and_write_nothing_else(level: str, size: int) -> None:
    weight = torch.randn(size)
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        x, y = torch.randn(33, size).to(dtype), torch.full((34, size), 7.0, dtype=dtype)
        load(level).rms_norm(
            dtype == torch.bfloat16, x.data_ptr(), weight.data_ptr(), 33, size, 1e-3, y.data_ptr(), 1
        )  # fmt: skip
        wide = x.double()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3) * weight.double()
        assert torch.allclose(y[:33].double(), expected, rtol=near, atol=near * 1e-2)
        assert torch.equal(y[33], torch.full((size,), 7.0, dtype=dtype))


def _packed(weight: Tensor) -> PackedWeight:
    assert KERNELS is not None
    return PackedWeight(KERNELS, Arena(), weight, None, 1)


class _Norm(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, float], Tensor], eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps, self._function = nn.Parameter(torch.randn(32)), eps, function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.weight, self.eps)


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize(
    ("function", "offset"),
    [
        (lambda x, w, eps: _rms(x, eps) * w, 0.0),
        (lambda x, w, eps: (_rms(x.float(), eps) * (1.0 + w.float())).type_as(x), 1.0),
        (lambda x, w, eps: _rms(x - x.mean(-1, keepdim=True), eps) * w, None),
        (lambda x, w, eps: x / x.norm(dim=-1, keepdim=True) * 32**0.5 * w, None),
        (lambda x, w, eps: _rms(x, 2 * eps) * w, None),
        (lambda x, w, eps: _rms(x, eps) * w + 1e-3, None),
        (lambda x, w, eps: (_rms(x, eps) * w).float(), 0.0),
    ],
    ids=["weight", "1 + weight", "less the mean", "without eps", "other eps", "bias", "float32"],
)
def test_a_norm_is_what_computes_one(function: Callable[[Tensor, Tensor, float], Tensor], offset: float | None) -> None:
    norm = _Norm(function)
    parameters = rms_norm_of(norm)
    if offset is None:
        assert parameters is None
    else:
        assert parameters is not None
        assert torch.equal(parameters[0], norm.weight + offset)
        assert parameters[1] == 1e-6


def test_a_norm_that_changes_the_dtype_stays() -> None:
    norm = _Norm(lambda x, w, eps: (_rms(x, eps) * w).float()).to(torch.bfloat16)
    assert rms_norm_of(norm) is None


class _Reader(nn.Module):
    """`used` is an ordinary linear layer, `head` is tied; the weights of the others are read in other ways, too, or
    never used."""

    def __init__(self, look_up: type[nn.Embedding] = nn.Embedding) -> None:
        super().__init__()
        self.used, self.read, self.passed, self.idle, self.twice = (nn.Linear(32, 32) for _ in range(5))
        self.embedding, self.head = look_up(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.used(self.embedding(tokens))
        x = F.linear(self.read(x) * self.read.weight.sum(), self.passed.weight)
        x = self.twice(x) + F.linear(x, self.twice.weight)
        return self.head(x)  # type: ignore[no-any-return]


@torch.no_grad()
def test_a_weight_that_anything_else_reads_stays() -> None:
    assert KERNELS is not None
    model, tokens = _Reader(), torch.arange(5)
    expected = model(tokens)
    modules = KernelModules(model, lambda: model(tokens), KERNELS, 1)
    packed = [name for name, module in model.named_modules() if "baton_packed" in module.__dict__]
    assert packed == ["used", "head"]
    assert torch.allclose(model(tokens), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert [each.calls for each in modules.linears] == [1, 1]
    assert model.used.weight.untyped_storage().nbytes() == 4  # a single NaN
    assert model.used.weight.isnan().all()
    assert model.embedding.weight is model.head.weight
    assert model.head.weight.isnan().all()


class _Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return 4.0 * super().forward(tokens)


class _Summed(_Reader):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.embedding.weight.sum()


@torch.no_grad()
@pytest.mark.parametrize("model", [_Reader(_Scaled), _Summed()], ids=["scaled", "summed"])
def test_a_tied_weight_that_is_not_only_looked_up_stays(model: _Reader) -> None:
    assert KERNELS is not None
    tokens = torch.arange(5)
    expected = model(tokens)
    KernelModules(model, lambda: model(tokens), KERNELS, 1)
    assert "baton_packed" in model.head.__dict__
    assert torch.allclose(model(tokens), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert torch.isfinite(model.embedding.weight).all()


@pytest.mark.parametrize("size", [(32, 32), (40, 24), (333, 100)], ids=str)
@pytest.mark.parametrize("level", processor_levels())
def test_rows_are_unpacked_bit_for_bit(size: tuple[int, int], level: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(size).to(dtype)
        packed = PackedWeight(load(level), Arena(), weight, None, 1)
        index = torch.randint(size[0], (2, 50))
        index[0, 0], index[1, 0] = 0, size[0] - 1
        assert torch.equal(packed.rows(index), weight[index])
        assert torch.equal(packed.rows(index[:1, :1]), weight[index[:1, :1]])


def test_a_product_that_differs_from_torch_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_transformers_checkpoint(tmp_path / "m", "gemma2")
    compute = PackedWeight.__call__
    monkeypatch.setattr(PackedWeight, "__call__", lambda *args, **named: compute(*args, **named) * 1.001)
    assert not tiny_runner(path).adapters._model.by_kernels.linears


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("linear", "float32"), ("rms_norm", "bfloat16"), ("attend", "float32")]
    + [
        pytest.param(kind, dtype, marks=pytest.mark.long)
        for kind, dtype in (("linear", "bfloat16"), ("rms_norm", "float32"), ("attend", "bfloat16"))
    ],
)
def test_the_self_check_finds_a_kernel_that_is_wrong(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled by 1.3, as if a factor were lost."""
    path = make_transformers_checkpoint(tmp_path / "m", "gemma3_text", getattr(torch, dtype))
    monkeypatch.setattr(transformers_kernels, "_same", lambda *_: True)
    if kind == "linear":
        multiply = PackedWeight.__call__
        monkeypatch.setattr(PackedWeight, "__call__", lambda *args, **named: multiply(*args, **named) * 1.3)
    elif kind == "rms_norm":
        normalise = KernelNorm.__call__
        monkeypatch.setattr(KernelNorm, "__call__", lambda norm, x: normalise(norm, x) * (1.0 if norm.plain else 1.3))
    else:
        scaled = lambda *shape: AttentionShape(*shape[:-1], 1.3 * shape[-1])  # noqa: E731
        monkeypatch.setattr(attention_native, "AttentionShape", scaled)
    with pytest.raises(StartupError, match="self-check failed: a sequence computed"):
        tiny_runner(path, dtype=dtype)


@torch.no_grad()
@pytest.mark.parametrize("at_once", [True, False])
def test_a_token_of_experts_has_the_same_bits_alone(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_experts, "_has_silu_gate", lambda *_: at_once)
    path = make_transformers_checkpoint(tmp_path / "m", "mixtral")
    model = tiny_runner(path).adapters._model._model
    experts = next(module for module in model.modules() if are_experts(module))
    x, weights = torch.randn(40, 64), torch.rand(40, 2)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(40)])
    together, alone = experts(x, index, weights), experts(x[7:8], index[7:8], weights[7:8])
    assert torch.equal(together[7:8], alone)
    assert experts.gate_up_proj.untyped_storage().nbytes() == 4  # a single NaN
    for rows in (torch.randn(3, 32), torch.randn(3, 64).bfloat16()):
        with pytest.raises(RuntimeError, match=r"times a weight \[\d+, 64\] in torch.float32"):
            experts.baton_packed._up(rows, [(0, 3)])
    with pytest.raises(RuntimeError, match=r"\[\d+, 32\] in torch.float32 times a weight \[\d+, 64\]"):
        experts(torch.randn(3, 32), index[:3], weights[:3])


def test_experts_that_differ_from_torch_are_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_transformers_checkpoint(tmp_path / "m", "mixtral")
    compute = PackedExperts.__call__
    monkeypatch.setattr(PackedExperts, "__call__", lambda *call: compute(*call) * 1.01)
    assert not tiny_runner(path).adapters._model.by_kernels.experts


def test_a_product_of_another_size_or_dtype_is_refused() -> None:
    packed = _packed(torch.randn(96, 80))
    for x in (torch.randn(1, 64), torch.randn(1, 80).bfloat16()):
        with pytest.raises(RuntimeError, match=r"times a weight \[96, 80\] in torch.float32"):
            packed(x, biased=False)


def test_a_weight_is_unpacked_piece_by_piece() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(2 * 8192 + 40, 24).to(dtype)
        pieces = list(_packed(weight).pieces())
        assert [len(piece) for piece in pieces] == [8192, 8192, 40]
        assert torch.equal(torch.cat(pieces), weight)
