"""A module of attention of a model of transformers by one call of the compiled kernels: products, norms of heads,
rotary embedding, the store of KV, attention over pages, the product of its result.

A call of torch takes some microseconds, and several times as long when weights have evicted its code from the caches. A
module is replaced if the call's result and KV have the bits of its own forward, at the first and the last positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from baton.engine.attention import FastAttention, Scores
from baton.engine.attention_calls import WITHOUT_EFFECT
from baton.engine.attention_native import NativeAttention
from baton.engine.batch import RowSpan
from baton.engine.kernels.native import AttentionLayers, AttentionShape, Kernels
from baton.engine.transformers_fused import KernelRotary
from baton.engine.transformers_norms import KernelNorm
from baton.engine.transformers_packed import PackedWeight, kernel_rows, linear

_LAYERS, _NORMS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
_GIVEN = ("hidden_states", "position_embeddings", "past_key_values")
_IGNORED = {"attention_mask", *WITHOUT_EFFECT}
_PROBED_TOKENS = 5
_PROBED_SIZES = (1.0, 30.0)  # of rows: with the first, scales show, with the second limits
_PROBED_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer stores KV, and attends: pages of K and V, `slots` [T] of the new tokens, the rows of the step, and
    the scale of scores (None: head size ** -0.5)."""

    storage: tuple[Tensor, Tensor]
    slots: Tensor
    rows: Any
    scale: float | None


def may_store(pages: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels store numbers of `dtype` in pages."""
    return pages.dtype in (dtype, torch.float8_e4m3fn)


class KernelAttention:
    """The forward of a module of attention; with `plain`, and wherever a step does not attend as the kernel does, the
    module's own. `calls` counts results of the kernel."""

    def __init__(
        self,
        kernels: Kernels,
        layers: list[PackedWeight],
        norms: list[KernelNorm],
        size: int,
        forward: Callable[..., Any],
        threads: int,
    ) -> None:
        """`layers` are those of queries, keys, values and the result, `norms` those of queries and keys, or none;
        `size` is that of a head."""
        self._counted: list[PackedWeight | KernelNorm] = [*layers, *norms]
        self._forward, self._threads, self._size = forward, threads, size
        self._dtype, self._first, self._n = layers[0].dtype, layers[0], layers[3].shape[0]
        self._heads, self._kv_heads = (layer.shape[0] // size for layer in layers[:2])
        weights, epsilons = [norm.weight.data_ptr() for norm in norms], [norm.eps for norm in norms]
        self._struct = AttentionLayers(
            *(layer.struct for layer in layers), *(weights or (None, None)), *(epsilons or (0.0, 0.0))
        )
        self._layers, self._attend = ctypes.byref(self._struct), kernels.attention_layer
        self.calls, self.plain = 0, False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        place = None if self.plain or arguments else self._place(options)
        if place is None:
            return self._forward(*arguments, **options)
        self.calls += 1
        for each in self._counted:
            each.calls += 1
        x, (cos, sin) = options["hidden_states"], options["position_embeddings"]
        keys, values = place.storage
        tokens, dtype = x.shape[1], self._dtype
        shape = AttentionShape(
            self._heads, self._kv_heads, self._size, keys.shape[1], place.rows.window, place.scale or 0.0
        )
        y = torch.empty((1, tokens, self._n), dtype=dtype)
        x = kernel_rows(x, self._first.shape, dtype)
        self._attend(
            dtype == torch.bfloat16, keys.dtype == torch.float8_e4m3fn, self._layers, ctypes.byref(shape),
            place.rows.rows.buffer_info()[0], place.rows.count, x.data_ptr(), x.shape[-1], tokens, cos.data_ptr(),
            sin.data_ptr(), place.slots.data_ptr(), len(place.slots), keys.data_ptr(), values.data_ptr(), y.data_ptr(),
            self._threads,
        )  # fmt: skip
        return y, None

    def _place(self, options: dict[str, Any]) -> Place | None:
        """Returns where this layer stores and attends in this step; None if not as the kernel does."""
        x, rotary, cache = (options.get(name) for name in _GIVEN)
        if x is None or rotary is None or cache is None or x.ndim != 3 or len(x) != 1 or x.dtype != self._dtype:
            return None
        take = getattr(cache.target, "take", None)
        known = (name in _IGNORED or name in _GIVEN or value is None for name, value in options.items())
        if take is None or self._first.convert or not all(known):
            return None
        for each in rotary:
            if each.shape != (1, x.shape[1], self._size) or each.dtype != x.dtype or not each.is_contiguous():
                return None
        place: Place | None = take(self._kv_heads, self._size, x.dtype)
        return place


def use_attention(model: Any, kernels: Kernels, threads: int, longest: int) -> list[KernelAttention]:
    """Replaces the forward of each module whose packed layers are those of attention, and whose result is."""
    made = []
    for module in model.modules():
        if (parts := _parts_of(module)) is not None:
            attention = KernelAttention(kernels, *parts, module.forward, threads)
            if _same_bits(attention, module, kernels, longest):
                module.forward = attention
                made.append(attention)
    return made


def _parts_of(module: Any) -> tuple[list[PackedWeight], list[KernelNorm], int] | None:
    """Returns the packed layers of a module that has four, by the usual names, the norms of heads, if it has them, and
    the size of a head; None if it has anything else, or rotates in another way."""
    children = dict(module.named_children())
    forward, size = module.__dict__.get("forward"), getattr(module, "head_dim", None)
    if any(name not in children for name in _LAYERS) or not isinstance(size, int):
        return None
    if not isinstance(forward, MethodType) or not isinstance(_rotary_of(forward), KernelRotary):
        return None  # not that of `use_rotary`
    layers, norms = [], []
    for name in _LAYERS:
        layer = children.pop(name)
        if "baton_packed" not in layer.__dict__ or layer.forward != MethodType(linear, layer):
            return None  # another kind of layer, or one that exchanges results with other ranks
        layers.append(layer.baton_packed)
    if all(isinstance(children.get(name), torch.nn.Module) for name in _NORMS):
        norms = [children.pop(name).forward for name in _NORMS]
    weights = list(module.parameters(recurse=False)) + [p for child in children.values() for p in child.parameters()]
    q, k, v, out = (layer.shape for layer in layers)
    whole = q[0] % size == k[0] % size == 0 and k == v and q[1] == k[1] and out[1] == q[0] and size % 2 == 0
    if weights or not whole or q[0] % k[0] or len({layer.dtype for layer in layers}) > 1:
        return None
    if any(not isinstance(norm, KernelNorm) or len(norm.weight) != size for norm in norms):
        return None
    return layers, norms, size


def _rotary_of(forward: MethodType) -> Any:
    return forward.__func__.__globals__.get("apply_rotary_pos_emb")


class _Pages:
    """A target of a cache that stores the first tokens of a sequence in one block, and attends to them."""

    def __init__(self, kernels: Kernels, kv_heads: int, size: int, dtype: torch.dtype) -> None:
        fast = FastAttention(_PROBED_BLOCK, 1, dtype, torch.device("cpu"))
        self._attention = NativeAttention(kernels, 1, _PROBED_BLOCK, fast)
        self._slots = torch.arange(_PROBED_TOKENS)
        self._rows = self._attention.prepare([RowSpan(0, 0, _PROBED_TOKENS, (0,))], 0)
        self.storage = (
            torch.zeros(2, _PROBED_BLOCK, kv_heads, size, dtype=dtype),
            torch.zeros(2, _PROBED_BLOCK, kv_heads, size, dtype=dtype),
        )
        self.calls, self.scale = 0, None

    def update(self, keys: Tensor, values: Tensor, _: int) -> None:
        self._attention.store(self.storage, self._slots, keys, values)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any) -> Tensor:
        self.calls, self.scale = self.calls + 1, options.get("scaling")
        queries = query[0].transpose(0, 1)
        attended = self._attention.attend(queries, *self.storage, self._rows, Scores(self.scale))
        return attended.view(1, *queries.shape[:2], -1)


class _PagesAtOnce(_Pages):
    def take(self, *_: Any) -> Place:
        return Place(self.storage, self._slots, self._rows, self.scale)


def _same_bits(attention: KernelAttention, module: Any, kernels: Kernels, longest: int) -> bool:
    """Whether a module's own forward, with these positions, has the same result, and stores the same KV."""
    generator, cache = torch.Generator().manual_seed(0), module.baton_cache
    dtype, (_, width), size = attention._dtype, attention._first.shape, attention._size
    pages = kernels, attention._kv_heads, size, dtype
    try:
        for at, scale in product((0, max(0, longest - _PROBED_TOKENS)), _PROBED_SIZES):
            x = (scale * torch.randn((1, _PROBED_TOKENS, width), generator=generator)).to(dtype)
            rotary = tuple(torch.randn((1, _PROBED_TOKENS, size), generator=generator).to(dtype) for _ in range(2))
            given: dict[str, Any] = dict(zip(_GIVEN, (x, rotary, cache), strict=True))
            given |= {"position_ids": torch.arange(at, at + _PROBED_TOKENS)[None], "attention_mask": None}
            own, at_once = _Pages(*pages), _PagesAtOnce(*pages)
            cache.target, cache.before = own, at
            expected, _ = module(**given)
            cache.target, at_once.scale = at_once, own.scale
            result, _ = attention(**given)
            same = [(result, expected), *zip(at_once.storage, own.storage, strict=True)]
            if (own.calls, attention.calls) != (1, 1) or not all(torch.equal(*pair) for pair in same):
                return False
            attention.calls = 0
    except Exception:  # of a module that takes other arguments, or computes something else
        return False
    finally:
        cache.target, cache.before, attention.calls = None, 0, 0
        for each in attention._counted:
            each.calls = 0
    return True
