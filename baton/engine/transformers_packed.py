"""Packed weights in modules of a model of transformers: their products by the compiled kernels, and the way back.

A packed weight replaces the original: its parameter keeps the shape, but all elements are one NaN, which no result
survives. For a comparison with torch's own products it is unpacked again, for a while; one in MXFP4 is read again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.native import GROUP, Arena, Kernels, Linear, pack_weight, padded, unpack_rows, unpack_weight
from baton.engine.transformers_mxfp4 import Mxfp4Matrix

DTYPES = (torch.bfloat16, torch.float32)
_STORE = 0  # of `Into` (gemm.h)
_PIECE_GROUPS = 256  # of outputs, in one of `PackedWeight.pieces`


class PackedWeight:
    """A weight [n, k] and bias, packed: `struct`. `calls` counts products; `convert` is set while torch is to multiply
    by the weight, converted; `placeholders` are the names of parameters that do not hold it now."""

    def __init__(
        self,
        kernels: Kernels,
        arena: Arena,
        weight: Tensor | Mxfp4Matrix,
        bias: Tensor | None,
        threads: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of rows; None: that of the weight."""
        self._n, self._k = weight.shape
        self.shape = self._n, self._k
        self._in_file: Mxfp4Matrix | None = None
        if isinstance(weight, Tensor):
            self.dtype = dtype or weight.dtype
            self.struct, self._kept = pack_weight(kernels, arena, weight, bias, dtype=self.dtype)
        else:
            self.dtype, self._in_file = dtype or torch.bfloat16, weight
            self.struct, self._kept = weight.pack(kernels, arena, bias)
        plain = Linear(self.struct.weight, None, None, self._n, self._k, self.struct.kind)
        self._layers = (ctypes.byref(plain), ctypes.byref(self.struct))
        self._kernels, self._linear, self._threads = kernels, kernels.linear, threads
        self.calls = 0
        self.convert: Callable[[Tensor], Tensor] | None = None
        self.placeholders: tuple[str, ...] = ()

    def __call__(self, x: Tensor, *, biased: bool) -> Tensor:
        """x [..., k] -> [..., n]; a row's bits do not depend on the others (gemm.h)."""
        self.calls += 1
        y = torch.empty((*x.shape[:-1], self._n), dtype=x.dtype)
        x = kernel_rows(x, self.shape, self.dtype)
        self._linear(
            self.dtype == torch.bfloat16, self._layers[biased], x.data_ptr(), x.shape[-1], x.numel() // x.shape[-1],
            y.data_ptr(), self._n, _STORE, self._threads,
        )  # fmt: skip
        return y

    def unpack(self, name: str = "weight") -> Tensor:
        if self._in_file is not None:
            return self._in_file.dequantized().to(self.dtype)
        return unpack_weight(self._kernels, self._kept[0], self._n, self._k, self.dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Returns rows [..., k] of the weight, unpacked, for an index [...] of outputs."""
        rows = unpack_rows(self._kernels, self._kept[0], index.reshape(-1), self._n, self._k, self.dtype)
        return rows.view(*index.shape, self._k)

    def pieces(self) -> Iterator[Tensor]:
        """Yields the weight unpacked, some rows at a time: a large one is not to be there twice."""
        packed, groups = self._kept[0], -(-self._n // GROUP)
        size = len(packed) // groups
        for first in range(0, groups, _PIECE_GROUPS):
            last = min(first + _PIECE_GROUPS, groups)
            rows = min(last * GROUP, self._n) - first * GROUP
            yield unpack_weight(self._kernels, packed[first * size : last * size], rows, self._k, self.dtype)


def kernel_rows(x: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns rows x [..., k] as kernels read them, padded; `shape` [n, k] and `dtype` are those of the weight. Raises
    RuntimeError for others: kernels get addresses alone."""
    n, k = shape
    if x.dtype != dtype or x.shape[-1] != k:
        raise RuntimeError(f"{list(x.shape)} in {x.dtype} times a weight [{n}, {k}] in {dtype}")
    width = padded(k, dtype)
    return (F.pad(x, (0, width - k)) if width != k else x).contiguous()


def product(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias of an nn.Linear; `bias` is the module's, or None."""
    packed: PackedWeight | None = module.__dict__.get("baton_packed")
    if packed is None:
        return F.linear(x, module.weight, bias)
    if (convert := packed.convert) is not None:
        of_all = packed.pieces() if packed.placeholders else module.weight.split(_PIECE_GROUPS * GROUP)
        y = torch.cat([F.linear(x, convert(rows)) for rows in of_all], dim=-1)
        return y if bias is None else y + convert(bias)
    return packed(x, biased=bias is not None)


def linear(module: Any, x: Tensor) -> Tensor:
    """What an nn.Linear computes."""
    return product(module, x, module.bias)


def weight_of(module: Any, tensor: Tensor) -> Tensor:
    """Returns the data of one of a module's tensors, unpacked if need be."""
    packed = module.__dict__.get("baton_packed")
    for name in () if packed is None else packed.placeholders:
        if tensor is getattr(module, name):
            unpacked: Tensor = packed.unpack(name)
            return unpacked
    return tensor.data


def release(parameter: Tensor) -> None:
    """Frees the memory of a parameter, and keeps its shape: all elements are one NaN."""
    parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
