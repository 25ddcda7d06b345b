"""Routers of mixtures of experts by one call of the compiled kernels, whole layers of a mixture by one, and for which
modules."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.core.errors import StartupError
from baton.engine import transformers_kernels
from baton.engine.kernels.native import Arena, Routing, choose_kernels, load
from baton.engine.transformers_experts import pack_experts
from baton.engine.transformers_mixtures import KernelMixture, KernelRouter, routing_of, use_mixtures, use_routers
from baton.engine.transformers_packed import PackedWeight
from tests.engine.test_transformers_experts import KINDS, Experts
from tests.support.engine_driver import all_logits, random_tokens, tiny_runner
from tests.support.transformers_models import make_transformers_checkpoint

KERNELS, _ = choose_kernels("auto", torch.device("cpu"))
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no compiled kernels on this machine")

WITHIN = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def softmax(logits: Tensor, chosen: int, over_all: bool) -> tuple[Tensor, Tensor]:
    """Weights and indexes of the largest; of equal ones the first."""
    largest, index = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    whole = logits.double() if over_all else largest[:, :chosen]
    weights = torch.exp(largest[:, :chosen] - whole.logsumexp(-1, keepdim=True))
    return weights, index[:, :chosen]


def routed(level: str, packed: PackedWeight, x: Tensor, choice: Routing) -> tuple[Tensor, Tensor, Tensor]:
    router = KernelRouter(load(level), packed, choice, torch.float32, lambda x: x, 1)
    logits, weights, index = router(x)
    assert router.calls == 1
    return logits, weights, index


@pytest.mark.parametrize(("level", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "count", "chosen"), [(1, 64, 8, 2), (7, 33, 3, 3), (5, 40, 130, 18), (600, 16, 17, 1)]
)
def test_the_largest_logits_are_chosen_and_weighted_by_their_softmax(
    level: str, dtype: torch.dtype, over_all: bool, tokens: int, size: int, count: int, chosen: int
) -> None:
    torch.manual_seed(0)  # of 400 seeds one has an exponent whose rounding to float32 alone takes 1.1e-6
    weight, bias = torch.randn(count, size).to(dtype), torch.randn(count).to(dtype)
    packed = PackedWeight(load(level), Arena(), weight, bias, 1)
    x = torch.randn(tokens, size).to(dtype)
    logits, weights, index = routed(level, packed, x, Routing(chosen, over_all, False))
    assert torch.equal(logits, packed(x, biased=True))
    expected, places = softmax(logits, chosen, over_all)
    assert torch.equal(index, places)
    assert torch.allclose(weights.double(), expected, rtol=1e-6, atol=1e-9)
    rounded = routed(level, packed, x, Routing(chosen, over_all, True))[1]
    assert torch.equal(rounded, weights.to(dtype).float())
    alone = routed(level, packed, x[-1:], Routing(chosen, over_all, False))
    assert all(torch.equal(row, of_all[-1:]) for row, of_all in zip(alone, (logits, weights, index), strict=True))


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_of_equal_logits_the_first_are_chosen_and_nan_stays(dtype: torch.dtype) -> None:
    assert KERNELS is not None
    for values, first in (
        ([1.0, 1.0, 1.0, 1.0], [0, 1]),
        ([0.0, 3.0, 2.0, 3.0], [1, 3]),
        ([0.0, 1.0, torch.nan, 2.0], [2, 3]),
        ([torch.nan] * 4, [0, 1]),
        ([-torch.inf, 1.0, -torch.inf, -torch.inf], [1, 0]),
    ):
        packed = PackedWeight(KERNELS, Arena(), torch.tensor(values).to(dtype)[:, None], None, 1)
        x = torch.ones(1, 1).to(dtype)
        _, weights, index = routed(KERNELS.level, packed, x, Routing(2, False, False))
        assert index.tolist() == [first]
        assert weights.isnan().any() == any(value != value for value in values)


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_a_router_writes_nothing_else(dtype: torch.dtype) -> None:
    assert KERNELS is not None
    packed = PackedWeight(KERNELS, Arena(), torch.randn(40, 64).to(dtype), None, 1)
    x, choice = torch.randn(3, 64).to(dtype), Routing(2, False, False)
    never = 2.0**100  # no logit of these weights
    logits, weights, index = torch.full((4, 40), never, dtype=dtype), torch.full((4, 2), never), torch.full((4, 2), 7)
    KERNELS.route(
        dtype == torch.bfloat16, ctypes.byref(packed.struct), ctypes.byref(choice), x.data_ptr(), 64, 3,
        logits.data_ptr(), weights.data_ptr(), index.data_ptr(), 1,
    )  # fmt: skip
    assert all((each[3] == never).all() and (each[:3] != never).all() for each in (logits, weights))
    assert (index[3] == 7).all()


class Router(nn.Module):
    def __init__(
        self,
        route: Callable[[Tensor], tuple[Tensor, Tensor]],
        dtype: torch.dtype = torch.float32,
        product: Callable[..., Tensor] = F.linear,
    ) -> None:
        super().__init__()
        self.weight, self._route = nn.Parameter((torch.randn(6, 32) / 32**0.5).to(dtype)), route
        self._product = product

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._product(x, self.weight)
        weights, index = self._route(logits)
        return logits, weights, index


def normalised(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = logits.float().softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), index


def of_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = logits.float().softmax(-1).topk(2)
    return weights.to(logits.dtype), index


def of_chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest, index = logits.topk(3)
    return largest.softmax(-1), index


def by_sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits.sigmoid().topk(2)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("route", "product", "expected"),
    [
        (normalised, F.linear, (2, False, False)),
        (of_all, F.linear, (2, True, True)),
        (of_chosen, F.linear, (3, False, True)),
        (by_sigmoid, F.linear, None),
        (lambda x: (2.5 * normalised(x)[0], normalised(x)[1]), F.linear, None),
        (lambda x: normalised(x.clamp(max=7.0)), F.linear, None),
        (lambda x: (normalised(x)[0], normalised(-x)[1]), F.linear, None),
        (lambda x: (normalised(x)[0], normalised(x)[1].int()), F.linear, None),
        (lambda x: (normalised(x)[0].double(), normalised(x)[1]), F.linear, None),
        (normalised, lambda x, w: F.linear(x, w) + 1e-2, None),
        (normalised, lambda x, w: F.linear(x.float(), w.float()), None),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_router_is_what_computes_one(
    route: Callable[[Tensor], Any], product: Callable[..., Tensor], expected: tuple[int, bool, bool] | None
) -> None:
    assert KERNELS is not None
    module, x = Router(route, torch.bfloat16, product), torch.randn(4, 32).bfloat16()
    own = module(x)
    kind = routing_of(module)
    assert (kind and (kind[0].chosen, kind[0].over_all, kind[0].rounded)) == expected
    made = use_routers(nn.Sequential(module), KERNELS, Arena(), 1)
    assert len(made) == (expected is not None)
    result = module(x)
    assert [each.dtype for each in result] == [each.dtype for each in own]
    assert (result[0].float() - own[0].float()).abs().max() <= 2**-6 * own[0].abs().max()
    assert [each.calls for each in made] == [1] * len(made)
    assert module(x[None])[0].ndim == 3  # by its own forward
    assert [each.calls for each in made] == [1] * len(made)


@torch.no_grad()
def test_a_layer_is_no_router() -> None:
    """Nor do three rows of its result look like three results."""
    for module in (nn.Linear(32, 6), nn.Embedding(6, 32), Router(lambda x: x)):  # type: ignore[arg-type,return-value]
        assert routing_of(module) is None


class Mixture(nn.Module):
    def __init__(self, dtype: torch.dtype, after: Callable[[nn.Module, Tensor, Tensor], Any], count: int = 6) -> None:
        super().__init__()
        self.router, self.experts, self._after = Router(normalised, dtype), Experts(count, 32, 48, dtype), after

    def forward(self, x: Tensor) -> Any:
        rows = x.view(-1, x.shape[-1])
        _, weights, index = self.router(rows)
        return self._after(self, self.experts.baton_packed(self.experts, rows, index, weights).view(x.shape), x)


def as_it_is(_: nn.Module, y: Tensor, __: Tensor) -> Tensor:
    return y


def kernel_mixtures(module: Mixture) -> list[KernelMixture]:
    """Replaces what can be, as KernelModules does."""
    assert KERNELS is not None
    module.experts.__dict__["baton_packed"] = pack_experts(module.experts, KERNELS, Arena(), 1)
    assert use_routers(module, KERNELS, Arena(), 1)
    return use_mixtures(module, KERNELS, 1)


@torch.no_grad()
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_a_mixture_has_the_bits_of_its_router_and_experts(dtype: torch.dtype, tokens: int) -> None:
    module, x = Mixture(dtype, as_it_is), torch.randn(1, tokens, 32).to(dtype)
    (mixture,) = kernel_mixtures(module)
    packed = module.experts.baton_packed
    assert (mixture.calls, packed.calls) == (0, 0)
    result = module(x)
    assert (mixture.calls, packed.calls) == (1, len(module.router(x[0])[2].unique()))
    mixture.plain = True
    assert torch.equal(module(x), result)
    mixture.plain = False
    assert torch.equal(module(x[:, -1:]), result[:, -1:])
    assert torch.equal(module(x[0].T.contiguous().T), result[0])
    assert mixture.calls == 3


@torch.no_grad()
@pytest.mark.parametrize(
    ("after", "count", "replaced"),
    [
        (as_it_is, 6, 1),
        (lambda _, y, x: y + 1e-3 * x, 6, 0),
        (lambda _, y, x: (y, x), 6, 0),
        (lambda _, y, x: y.clamp(max=0.1), 6, 0),
        (as_it_is, 7, 0),
    ],
    ids=["as it is", "another term", "two results", "limit", "an expert without a logit"],
)
def test_a_mixture_is_what_computes_one(after: Callable[..., Any], count: int, replaced: int) -> None:
    module = Mixture(torch.float32, after, count)
    assert len(kernel_mixtures(module)) == replaced


@torch.no_grad()
@pytest.mark.parametrize("extra", ["module", "weight", "ranks"])
def test_a_mixture_with_anything_else_stays(extra: str) -> None:
    module = Mixture(torch.float32, as_it_is)
    if extra == "module":
        module.shared = nn.Linear(32, 32)
    elif extra == "weight":
        module.scale = nn.Parameter(torch.ones(1))
    else:  # that exchanges results with other ranks
        module.experts.forward = lambda *rows: rows  # type: ignore[method-assign]
    assert kernel_mixtures(module) == []


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_in_exact_mode_a_mixture_has_the_bits_of_its_parts(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = make_transformers_checkpoint(tmp_path / "m", "mixtral", getattr(torch, dtype)), random_tokens(40)
    runner = tiny_runner(path, dtype=dtype, exact=True)
    logits = all_logits(runner, tokens, [40])
    assert all(mixture.calls for mixture in runner.adapters._model.by_kernels.mixtures)
    assert torch.equal(all_logits(runner, tokens, [1]), logits)
    monkeypatch.setattr(transformers_kernels, "use_mixtures", lambda *_: [])
    apart = tiny_runner(path, dtype=dtype, exact=True)
    assert torch.equal(all_logits(apart, tokens, [40]), logits)
    assert all(router.calls for router in apart.adapters._model.by_kernels.routers)


@pytest.mark.parametrize(
    ("made", "dtype"),
    [(KernelRouter, "bfloat16"), (KernelMixture, "float32")]
    + [
        pytest.param(made, dtype, marks=pytest.mark.long)
        for made, dtype in ((KernelRouter, "float32"), (KernelMixture, "bfloat16"))
    ],
)
def test_the_self_check_finds_a_kernel_that_is_wrong(
    made: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled by 1.3, as if a factor were lost."""
    path = make_transformers_checkpoint(tmp_path / "m", "mixtral", getattr(torch, dtype))
    compute = made.__call__

    def wrong(self: Any, x: Tensor) -> Any:
        result = compute(self, x)
        if self.plain or (dtype == "bfloat16" and x.dtype == torch.float32):
            return result
        return result * 1.3 if made is KernelMixture else (result[0], 1.3 * result[1], result[2])

    if made is KernelRouter:
        monkeypatch.setattr(transformers_kernels, "use_mixtures", lambda *_: [])
    else:
        monkeypatch.setattr("baton.engine.transformers_mixtures._same_bits", lambda *_: True)
    monkeypatch.setattr(made, "__call__", wrong)
    with pytest.raises(StartupError, match="self-check failed: a sequence computed"):
        tiny_runner(path, dtype=dtype)
