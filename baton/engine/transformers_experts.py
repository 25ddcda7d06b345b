"""Mixtures of experts of a model of transformers, by the compiled kernels: products of each expert from packed weights.

An implementation in transformers' own interface for them, which classes of experts ask for what they differ in: names
and order of weights, biases, the gate. Where weights are not packed, it is transformers' grouped product. A step sorts
its tokens by expert and reads the weights of the experts that tokens chose, once; a token's result does not depend on
the other tokens. With a SiLU gate, all of a module is one call; else each of its two products, and torch computes what
is between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_int64
from itertools import chain, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from baton.engine.kernels.native import Arena, Kernels, Linear
from baton.engine.transformers_mxfp4 import Mxfp4Matrix, Mxfp4Weight
from baton.engine.transformers_packed import DTYPES, PackedWeight, kernel_rows, release

NAME = "baton_packed"
_TOLERANCE = {torch.bfloat16: 2**-5, torch.float32: 1e-4}
"""Of a result, as a share of the largest one: it is rounded at each of four operations."""
_PROBED_ROWS = 3
_PROBED_SCALES = (1.0, 30.0)  # of what a gate gets: with the second, limits show


class PackedExperts:
    """The packed weights of a module of `count` experts of rows of `size` elements. `calls` counts experts that were
    computed; `layers` are the packed weights of both products, for the kernels."""

    def __init__(self, module: Any, kernels: Kernels, arena: Arena, threads: int) -> None:
        self._is_transposed = module.is_transposed
        self._weights: dict[str, list[PackedWeight]] = {}
        for name in weight_names(module):
            biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * module.num_experts
            self._weights[name] = [
                PackedWeight(kernels, arena, matrix, bias, threads, getattr(module, name).dtype)
                for matrix, bias in zip(_matrices(module, name), biases, strict=True)
            ]
        self._up, self._down = (_Linears(each, kernels, threads) for each in self._weights.values())
        self._experts, self._threads = kernels.experts, threads
        self.count, self.size = module.num_experts, self._down.shape[0]
        self.layers = self._up.layers, self._down.layers
        self.has_silu_gate = _has_silu_gate(module, self._down.shape[1])
        self.calls, self.unpacked = 0, False
        self.placeholders: tuple[str, ...] = ()

    def __call__(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, n] and the experts of each token, index [T, k], with their weights [T, k] -> [T, n]."""
        if self.has_silu_gate:
            return self._at_once(hidden, index, weights)
        tokens, chosen = index.shape
        expert_of = index.reshape(-1).tolist()
        own = [place for place, expert in enumerate(expert_of) if expert < module.num_experts]  # not on another rank
        own.sort(key=expert_of.__getitem__)
        runs = [(expert, len(list(run))) for expert, run in groupby(map(expert_of.__getitem__, own))]
        self.calls += len(runs)
        at = torch.tensor(own, dtype=torch.int64)
        x = self._up(hidden.to(self._up.dtype).index_select(0, at // chosen), runs)
        x = self._down(module._apply_gate(x) if module.has_gate else module.act_fn(x), runs)
        if module.has_post_expert_norm:
            x = module.post_expert_norm(x)
        results = x.new_zeros((tokens * chosen, hidden.shape[1])).index_copy_(0, at, x)
        weighted = results * weights.reshape(-1, 1)
        return weighted.view(tokens, chosen, -1).sum(dim=1).to(hidden.dtype)

    def _at_once(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        dtype, (tokens, chosen) = self._up.dtype, index.shape
        x = kernel_rows(hidden.to(dtype), self._up.shape, dtype)
        index, weights = index.to(torch.int64).contiguous(), weights.float().contiguous()
        y = torch.empty((tokens, self._down.shape[0]), dtype=dtype)
        self.calls += self._experts(
            dtype == torch.bfloat16, *self.layers, self.count, index.data_ptr(), weights.data_ptr(), chosen,
            x.data_ptr(), x.shape[1], tokens, y.data_ptr(), self._threads,
        )  # fmt: skip
        return y.to(hidden.dtype)

    def unpack(self, name: str) -> Tensor:
        matrices = [each.unpack() for each in self._weights[name]]
        return torch.stack([matrix.T if self._is_transposed else matrix for matrix in matrices])


class _Linears:
    """One of the products of all experts."""

    def __init__(self, weights: list[PackedWeight], kernels: Kernels, threads: int) -> None:
        self.dtype, self.shape = weights[0].dtype, weights[0].shape
        self.layers = (Linear * len(weights))(*(each.struct for each in weights))
        self._linears, self._threads = kernels.linears, threads

    def __call__(self, x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        """x [r, k] -> [r, n]: `runs` are experts, each with a number of consecutive rows."""
        n, _ = self.shape
        x, y = kernel_rows(x, self.shape, self.dtype), torch.empty((len(x), n), dtype=self.dtype)
        flat = (c_int64 * (2 * len(runs)))(*chain.from_iterable(runs))
        self._linears(
            self.dtype == torch.bfloat16, self.layers, flat, len(runs), x.data_ptr(), x.shape[1], y.data_ptr(), n,
            self._threads,
        )  # fmt: skip
        return y


def _matrices(module: Any, name: str) -> Iterator[Tensor | Mxfp4Matrix]:
    """Yields the weight [n, k] of each expert."""
    weight: Mxfp4Weight | None = module.__dict__.get("baton_mxfp4", {}).get(name)
    for expert in range(module.num_experts):
        if weight is not None:
            yield Mxfp4Matrix(weight, expert)
        else:
            matrix = getattr(module, name).data[expert]
            yield matrix.T if module.is_transposed else matrix


def weight_names(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def are_experts(module: Any) -> bool:
    """Whether a module computes experts through transformers' interface for them, from one parameter for all."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts")):
        return False
    weights = [getattr(module, name, None) for name in weight_names(module)]
    return all(
        isinstance(weight, torch.nn.Parameter)
        and weight.ndim == 3
        and len(weight) == module.num_experts
        and weight.dtype in DTYPES
        for weight in weights
    )


def _has_silu_gate(module: Any, size: int) -> bool:
    """Whether what a module computes between its products is silu(gate) * up, of two halves of `size` elements."""
    if not module.has_gate or module.has_post_expert_norm:
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        for scale in _PROBED_SCALES:
            gate, up = scale * torch.randn((2, _PROBED_ROWS, size), generator=generator)
            result, expected = module._apply_gate(torch.cat((gate, up), dim=1)), F.silu(gate) * up
            if result.shape != expected.shape or not torch.allclose(result, expected, rtol=1e-5, atol=1e-6):
                return False
    except Exception:  # of a gate that takes other inputs
        return False
    return True


def pack_experts(module: Any, kernels: Kernels, arena: Arena, threads: int) -> PackedExperts | None:
    """Packs the weights of a module of experts in place, if each expert's result then equals that of transformers."""
    packed = PackedExperts(module, kernels, arena, threads)
    count, (name, _) = module.num_experts, weight_names(module)
    for each in module.__dict__.get("baton_mxfp4", ()):
        getattr(module, each).data = packed.unpack(each)
    weight = getattr(module, name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((count, weight.shape[1 if module.is_transposed else 2]), generator=generator).to(weight.dtype)
    index = torch.stack([torch.arange(count).roll(by) for by in range(min(2, count))], dim=1)
    call = (module, x, index, torch.rand(index.shape, generator=generator).to(weight.dtype))
    expected = grouped_mm_experts_forward(*call).float()
    if not (packed(*call).float() - expected).abs().max() <= _TOLERANCE[weight.dtype] * expected.abs().max():
        return None
    packed.calls, packed.placeholders = 0, weight_names(module)
    for each in packed.placeholders:
        release(getattr(module, each))
    return packed


def _forward(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    packed: PackedExperts | None = module.__dict__.get("baton_packed")
    if packed is None and "baton_mxfp4" in module.__dict__:
        return torch.zeros_like(hidden)  # not packed yet: what the model asks for is recorded
    if packed is None or packed.unpacked:
        result: Tensor = grouped_mm_experts_forward(module, hidden, index, weights)
        return result
    return packed(module, hidden, index, weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
