"""Exact mode of a model that transformers computes: every sum over more than one product is a compiled kernel's.

The kernels sum in one order for any number of rows; torch's products do not. What modules leave to torch, such as a
router's product, is packed when it is first met; a product that the kernels do not compute, such as attention with a
softcap, is refused by its name. Everything else is computed row by row, by one thread of torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from baton.core.errors import StartupError
from baton.engine.kernels.native import Arena, Kernels
from baton.engine.transformers_packed import DTYPES, PackedWeight

_PRODUCTS = {
    torch.matmul, torch.mm, torch.bmm, torch.baddbmm, torch.addmm, torch.einsum, torch.tensordot, torch.mv, torch.dot,
    torch.inner, torch.conv1d, F.conv1d, F.scaled_dot_product_attention, F.bilinear, Tensor.matmul, Tensor.__matmul__,
    torch._grouped_mm, torch.ops.transformers.grouped_mm_fallback,  # of experts that are not packed
    Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.baddbmm, Tensor.addmm, Tensor.mv, Tensor.dot, Tensor.inner,
}  # fmt: skip


class ExactProducts(TorchFunctionMode):
    """While entered, products of parameters are computed by the kernels. Raises StartupError for others."""

    def __init__(self, kernels: Kernels, threads: int) -> None:
        super().__init__()
        self._kernels, self._threads, self._arena = kernels, threads, Arena()
        self._packed: dict[int, tuple[nn.Parameter, PackedWeight]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if function in _PRODUCTS and not _is_outer(args):
            raise StartupError(f"--exact: torch computes a product ({function.__name__}), which is not row-invariant")
        return function(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, nn.Parameter) or weight.dtype not in DTYPES or x.dtype != weight.dtype:
            raise StartupError(f"--exact: torch computes a product of a weight {list(weight.shape)} in {weight.dtype}")
        if id(weight) not in self._packed:
            packed = PackedWeight(self._kernels, self._arena, weight.data, bias, self._threads)
            self._packed[id(weight)] = weight, packed
        return self._packed[id(weight)][1](x, biased=bias is not None)


def _is_outer(args: Any) -> bool:
    """Whether each element of a product of matrices is one product of two numbers, as the angles of positions are."""
    return len(args) == 2 and all(isinstance(each, Tensor) for each in args) and args[0].shape[-1] == 1
