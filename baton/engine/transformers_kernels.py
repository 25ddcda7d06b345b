"""Modules of a model of transformers that the compiled kernels compute: linear layers from packed weights, RMS norms,
and those of the modules that this one calls.

A module is replaced only after it was shown to be one. A linear layer's weight may be read by its own product alone, in
a pass that is observed, and the product of random inputs must equal torch's; a norm is whatever module computes RMS
normalisation, by any name, of inputs of several sizes. Everything else stays as transformers computes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from baton.core.errors import StartupError
from baton.engine.kernels.native import Arena, Kernels
from baton.engine.transformers_attention import KernelAttention, use_attention
from baton.engine.transformers_experts import PackedExperts, are_experts, pack_experts, weight_names
from baton.engine.transformers_fused import GatedMlp, KernelRotary, use_gated_mlps, use_rotary
from baton.engine.transformers_mixtures import KernelMixture, KernelRouter, use_mixtures, use_routers
from baton.engine.transformers_norms import KernelNorm, use_norms
from baton.engine.transformers_packed import DTYPES, PackedWeight, linear, release

_TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
"""Of a product, as a share of the largest one: the rounding of a result in bf16, twice."""
_PROBED_ROWS = 3
_SHAPE = {"device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"}  # attributes that read no element


class KernelModules:
    """The modules of a model that kernels compute."""

    def __init__(
        self, model: Any, observe: Callable[[], object], kernels: Kernels, threads: int, longest: int = 1
    ) -> None:
        """Replaces modules; `observe` computes a pass that uses all modules as every step does, `longest` is the most
        positions of a sequence."""
        self.linears: list[PackedWeight] = []
        self.experts: list[PackedExperts] = []
        arena, (linears, experts) = Arena(), _used_alone(model, observe)
        for module, embeddings in linears:
            weight = module.weight
            packed = PackedWeight(kernels, arena, weight.data, module.bias, threads)
            if not _same(packed, module):
                continue
            module.baton_packed = packed
            if "forward" not in module.__dict__:  # else it exchanges results with other ranks, of `product`
                module.forward = MethodType(linear, module)
            if embeddings is not None:
                for each in embeddings:
                    each.forward = packed.rows
                release(weight)
                packed.placeholders = ("weight",)
            self.linears.append(packed)
        for module in experts:
            if (of_all := pack_experts(module, kernels, arena, threads)) is not None:
                module.baton_packed = of_all
                self.experts.append(of_all)
        for name, module in model.named_modules():
            if "baton_mxfp4" in module.__dict__ and "baton_packed" not in module.__dict__:
                raise StartupError(f"{name}: its experts in MXFP4 are not computed as experts: use --kernels torch")
        self.norms = use_norms(model, kernels, threads)
        self.mlps = use_gated_mlps(model, kernels, threads)
        self.rotary = use_rotary(model, kernels)
        self.attentions = use_attention(model, kernels, threads, longest)
        self.routers = use_routers(model, kernels, arena, threads)
        self.mixtures = use_mixtures(model, kernels, threads)

    @property
    def calls(self) -> tuple[int, int]:
        """How many products and norms the kernels computed."""
        return sum(each.calls for each in self.linears), sum(each.calls for each in self.norms)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Meanwhile torch computes all but products of packed weights."""
        replaced: list[KernelNorm | GatedMlp | KernelRotary | KernelAttention | KernelRouter | KernelMixture]
        replaced = [*self.norms, *self.mlps, *self.rotary, *self.attentions, *self.routers, *self.mixtures]
        for each in replaced:
            each.plain = True
        try:
            yield
        finally:
            for each in replaced:
                each.plain = False


class _Uses(TorchFunctionMode):
    """Counts what torch's functions do with weights meanwhile: `products`, and all else as `reads`, by identity."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights, self.products, self.reads = weights, Counter[int](), Counter[int]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(function, "__self__", None), "__name__", "")
        if function is F.linear and len(args) > 1 and id(args[1]) in self._weights:
            self.products[id(args[1])] += 1
        elif name not in _SHAPE:
            self.reads.update(id(each) for each in (*args, *(kwargs or {}).values()) if id(each) in self._weights)
        return function(*args, **(kwargs or {}))


class _Observed:
    """Computes nothing, as the experts of an observed pass, but counts `calls`."""

    calls, unpacked = 0, False

    def __call__(self, module: Any, hidden: Tensor, *_: Any) -> Tensor:
        self.calls += 1
        return torch.zeros_like(hidden)


def _used_alone(model: Any, observe: Callable[[], object]) -> tuple[list[tuple[Any, list[Any] | None]], list[Any]]:
    """Returns the linear layers and experts whose weights serve their own products alone; with each linear layer the
    embeddings that have the same parameter, or None if it may be read in other ways, too."""
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    of_latents = {id(m.kv_b_proj) for m in model.modules() if hasattr(m, "expand_kv") and hasattr(m, "kv_b_proj")}
    linears = [
        module
        for module in model.modules()
        if type(module).forward is nn.Linear.forward and module.weight.dtype in DTYPES and id(module) not in of_latents
    ]
    experts = [
        (module, [getattr(module, name) for name in weight_names(module)])
        for module in model.modules()
        if are_experts(module)
    ]
    embeddings = [module for module in model.modules() if _looks_up(module)]
    calls = Counter[int]()
    handles = [
        m.register_forward_pre_hook(lambda module, _: calls.update((id(module),))) for m in (*linears, *embeddings)
    ]
    uses = _Uses({id(module.weight) for module in linears} | {id(each) for _, weights in experts for each in weights})
    for module, _ in experts:
        module.baton_packed = _Observed()
    try:
        with uses:
            observe()
    finally:
        for handle in handles:
            handle.remove()
        observed = {id(module): module.__dict__.pop("baton_packed").calls for module, _ in experts}
    alone: list[tuple[Any, list[Any] | None]] = []
    for module in linears:
        weight = id(module.weight)
        peers = [owner for owner in owners[weight] if owner is not module]
        if not calls[id(module)] == uses.products[weight] > 0:
            continue
        if uses.reads[weight] == sum(calls[id(owner)] for owner in peers) and all(map(_looks_up, peers)):
            alone.append((module, peers))
        elif peers:
            alone.append((module, None))
    return alone, [
        module
        for module, weights in experts
        if observed[id(module)]
        and not any(uses.reads[id(each)] or uses.products[id(each)] or len(owners[id(each)]) > 1 for each in weights)
    ]


def _looks_up(module: Any) -> bool:
    """Whether a module returns rows of its weight, and does nothing else."""
    return type(module).forward is nn.Embedding.forward and "forward" not in module.__dict__ and module.max_norm is None


def _same(packed: PackedWeight, module: Any) -> bool:
    x = torch.randn((_PROBED_ROWS, module.weight.shape[1]), generator=torch.Generator().manual_seed(0)).to(packed.dtype)
    expected = F.linear(x, module.weight, module.bias).float()
    error = (packed(x, biased=module.bias is not None).float() - expected).abs().max()
    packed.calls = 0
    return bool(error <= _TOLERANCE[packed.dtype] * expected.abs().max())
