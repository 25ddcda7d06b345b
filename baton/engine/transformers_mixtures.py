"""Routers of mixtures of experts of a model of transformers by one call of the compiled kernels, and with the experts
whole layers of a mixture.

A router is replaced if it computes what every one of this kind does: a product, a softmax, the largest few. A layer is
one call if nothing but a router and experts computes it: its result then has the bits of the two calls.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.engine.kernels.native import Arena, Kernels, Routing
from baton.engine.transformers_experts import PackedExperts
from baton.engine.transformers_packed import DTYPES, PackedWeight, kernel_rows

_PROBED_ROWS = 5
_PROBED_SIZES = (1.0, 30.0)  # of logits: with the second, limits show


class KernelRouter:
    """The forward of a module that computes logits [T, E], and weights and indexes [T, k] of each row's experts; with
    `plain`, and for other arguments, the module's own. `calls` counts results of the kernel."""

    def __init__(
        self,
        kernels: Kernels,
        packed: PackedWeight,
        routing: Routing,
        dtype: torch.dtype,
        forward: Callable[..., Any],
        threads: int,
    ) -> None:
        """`dtype` is that of the weights of experts."""
        self.packed, self.routing = packed, routing
        self._dtype, self._forward, self._threads = dtype, forward, threads
        self._route, self._structs = kernels.route, (ctypes.byref(packed.struct), ctypes.byref(routing))
        self.calls, self.plain = 0, False

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        packed = self.packed
        if self.plain or arguments or options or x.dtype != packed.dtype or x.ndim != 2:
            return self._forward(x, *arguments, **options)
        self.calls += 1
        x, tokens, chosen = kernel_rows(x, packed.shape, packed.dtype), len(x), self.routing.chosen
        logits = torch.empty((tokens, packed.shape[0]), dtype=x.dtype)
        weights = torch.empty((tokens, chosen), dtype=torch.float32)
        index = torch.empty((tokens, chosen), dtype=torch.int64)
        self._route(
            x.dtype == torch.bfloat16, *self._structs, x.data_ptr(), x.shape[1], tokens, logits.data_ptr(),
            weights.data_ptr(), index.data_ptr(), self._threads,
        )  # fmt: skip
        return logits, weights.to(self._dtype), index


class KernelMixture:
    """The forward of a module that computes experts [..., n] of what a router chooses for rows; with `plain`, and for
    other arguments, the module's own. `calls` counts results of the kernel."""

    def __init__(
        self, kernels: Kernels, router: KernelRouter, experts: PackedExperts, forward: Callable[..., Any], threads: int
    ) -> None:
        self._packed, self._experts, self._forward, self._threads = router.packed, experts, forward, threads
        self._structs = ctypes.byref(router.packed.struct), ctypes.byref(router.routing), *experts.layers
        self._mixture = kernels.mixture
        self.calls, self.plain = 0, False

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        packed = self._packed
        if self.plain or arguments or options or x.dtype != packed.dtype:
            return self._forward(x, *arguments, **options)
        self.calls += 1
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        x = kernel_rows(x, packed.shape, packed.dtype)
        width = x.shape[-1]
        self._experts.calls += self._mixture(
            x.dtype == torch.bfloat16, *self._structs, x.data_ptr(), width, x.numel() // width, y.data_ptr(),
            self._threads,
        )  # fmt: skip
        return y


def use_routers(model: Any, kernels: Kernels, arena: Arena, threads: int) -> list[KernelRouter]:
    """Replaces the forward of each router whose choices are those of the kernel."""
    made = []
    for module in model.modules():
        if (result := routing_of(module)) is not None:
            routing, dtype = result
            bias = getattr(module, "bias", None)
            packed = PackedWeight(kernels, arena, module.weight.data, None if bias is None else bias.data, threads)
            module.forward = KernelRouter(kernels, packed, routing, dtype, module.forward, threads)
            made.append(module.forward)
    return made


def routing_of(module: Any) -> tuple[Routing, torch.dtype] | None:
    """Returns what a router chooses, and the dtype of its weights; None for any other module."""
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    if parameters.keys() - {"bias"} != {"weight"} or isinstance(module, nn.Linear | nn.Embedding):
        return None
    if "forward" in module.__dict__ or any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    weight, bias = parameters["weight"], parameters.get("bias")
    count = len(weight)
    shapes = (count, weight.shape[-1]), (count,)
    if weight.ndim != 2 or weight.dtype not in DTYPES or (bias is not None and bias.shape != shapes[1]):
        return None
    generator, alone = torch.Generator().manual_seed(0), copy.copy(module)
    matrix, offset = torch.randn(shapes[0], generator=generator), torch.randn(shapes[1], generator=generator)
    alone.__dict__["_parameters"] = {"weight": matrix} if bias is None else {"weight": matrix, "bias": offset}
    ways, sizes = {False, True}, set[int]()
    try:
        for size in _PROBED_SIZES:
            x = size / shapes[0][1] ** 0.5 * torch.randn((_PROBED_ROWS, shapes[0][1]), generator=generator)
            ways &= _softmaxes(alone(x), F.linear(x, matrix, None if bias is None else offset))
            logits, weights, index = module(x.to(weight.dtype))
            if logits.dtype != weight.dtype or weights.dtype not in (torch.float32, weight.dtype):
                return None
            sizes.add(index.shape[1])
    except Exception:  # of a module that takes other arguments, or computes something else
        return None
    if not ways or len(sizes) != 1 or index.dtype != torch.int64:
        return None
    return Routing(sizes.pop(), min(ways), weights.dtype != torch.float32), weights.dtype


def _softmaxes(result: Any, expected: Tensor) -> set[bool]:
    """Returns which weights a router has that chooses by logits `expected`: True, the softmax over all experts; False,
    over those that it chooses; empty: neither."""
    logits, weights, index = result
    largest = expected.topk(index.shape[1])
    if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4) or not torch.equal(largest.indices, index):
        return set()
    ways = {False: largest.values.softmax(-1), True: expected.softmax(-1).gather(1, index)}
    return {over_all for over_all, each in ways.items() if torch.allclose(weights, each, rtol=1e-4, atol=1e-6)}


def use_mixtures(model: Any, kernels: Kernels, threads: int) -> list[KernelMixture]:
    """Replaces the forward of each module that has a router and experts, and nothing else, if its result then has the
    same bits."""
    made = []
    for module in model.modules():
        children = list(module.children())
        routers = [each.forward for each in children if isinstance(each.__dict__.get("forward"), KernelRouter)]
        experts = [each for each in children if isinstance(each.__dict__.get("baton_packed"), PackedExperts)]
        if (len(routers), len(experts), len(children)) != (1, 1, 2) or "forward" in module.__dict__:
            continue
        packed, (count, size) = experts[0].baton_packed, routers[0].packed.shape
        if not packed.has_silu_gate or packed.count != count or packed.size != size:
            continue
        if "forward" in experts[0].__dict__ or any(True for _ in module.parameters(recurse=False)):
            continue  # exchanged with other ranks; of a weight of its own
        mixture = KernelMixture(kernels, routers[0], packed, module.forward, threads)
        if _same_bits(mixture, module):
            module.forward = mixture
            made.append(mixture)
    return made


def _same_bits(mixture: KernelMixture, module: Any) -> bool:
    packed, calls = mixture._packed, mixture._experts.calls
    generator = torch.Generator().manual_seed(0)
    try:
        for size in _PROBED_SIZES:
            x = (size * torch.randn((1, _PROBED_ROWS, packed.shape[1]), generator=generator)).to(packed.dtype)
            result, expected = mixture(x), module(x)
            if not isinstance(expected, Tensor) or not torch.equal(result, expected):
                return False
    except Exception:  # of a module that takes other arguments, or computes something else
        return False
    finally:
        mixture.calls, mixture._experts.calls = 0, calls
    return True
