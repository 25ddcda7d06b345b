"""What several operations of a model of transformers compute together, by one call of the compiled kernels: MLPs with a
SiLU gate, and rotary embedding.

A call of torch takes some microseconds, whatever it computes; with 30 layers of 30 calls that is half of a decode step
of a small model. As in transformers_kernels.py, a module is replaced only after its result was shown to be this one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels.native import Kernels, heads_struct
from baton.engine.transformers_packed import DTYPES, PackedWeight, kernel_rows, linear

_TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 1e-5}
"""Of a result, as a share of the largest one: both sides round each operation in bf16."""
_PROBED_ROWS = 3
_PROBED_SIZES = (1.0, 30.0)  # of inputs of MLPs: with the second, limits show
_LAYERS = ("gate_proj", "up_proj", "down_proj")
_ROTARY = "apply_rotary_pos_emb"


class GatedMlp:
    """The forward of a module that computes down(silu(gate(x)) * up(x)) from packed layers; with `plain`, the module's
    own. `calls` counts results of the kernel."""

    def __init__(
        self, kernels: Kernels, layers: list[PackedWeight], forward: Callable[..., Tensor], threads: int
    ) -> None:
        self._layers, self._forward, self._threads = layers, forward, threads
        self._structs = [ctypes.byref(layer.struct) for layer in layers]
        self._first, self._dtype, self._n = layers[0], layers[0].dtype, layers[2].shape[0]
        self._gated = kernels.gated
        self.calls, self.plain = 0, False

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if self.plain or arguments or options or self._first.convert or x.dtype != self._dtype:
            return self._forward(x, *arguments, **options)
        self.calls += 1
        for layer in self._layers:
            layer.calls += 1
        y = torch.empty((*x.shape[:-1], self._n), dtype=x.dtype)
        x = kernel_rows(x, self._first.shape, self._dtype)
        width = x.shape[-1]
        self._gated(
            self._dtype == torch.bfloat16, *self._structs, x.data_ptr(), width, x.numel() // width, y.data_ptr(),
            self._threads,
        )  # fmt: skip
        return y


def use_gated_mlps(model: Any, kernels: Kernels, threads: int) -> list[GatedMlp]:
    """Replaces the forward of each module whose packed layers are those of such an MLP, and whose result is."""
    made = []
    for module in model.modules():
        if (layers := _layers_of(module)) is not None:
            mlp = GatedMlp(kernels, layers, module.forward, threads)
            if _same_mlp(mlp, module):
                module.forward = mlp
                made.append(mlp)
    return made


def _layers_of(module: Any) -> list[PackedWeight] | None:
    """Returns the packed layers of a module that has three, by the usual names, and a SiLU, and nothing else."""
    children = dict(module.named_children())
    layers = [children.pop(name, None) for name in _LAYERS]
    if "forward" in module.__dict__ or len(children) != 1 or any(True for _ in module.parameters(recurse=False)):
        return None
    for layer in layers:
        if layer is None or "baton_packed" not in layer.__dict__ or layer.forward != MethodType(linear, layer):
            return None  # another kind of layer, or one that exchanges results with other ranks
    (activation,) = children.values()
    grid = torch.linspace(-20, 20, 401)
    if any(True for _ in activation.parameters()) or not torch.equal(activation(grid), F.silu(grid)):
        return None
    gate, up, down = (layer.baton_packed for layer in layers if layer is not None)
    fits = gate.shape == up.shape and down.shape[1] == gate.shape[0] and gate.dtype == up.dtype == down.dtype
    return [gate, up, down] if fits else None


def _same_mlp(mlp: GatedMlp, module: Any) -> bool:
    generator, (_, width) = torch.Generator().manual_seed(0), mlp._first.shape
    try:
        for size in _PROBED_SIZES:
            x = (size * torch.randn((1, _PROBED_ROWS, width), generator=generator)).to(mlp._dtype)
            expected = module(x)
            if not _close(mlp(x), expected, mlp._dtype):
                return False
    except Exception:  # of a module that takes other arguments, or computes something else
        return False
    finally:
        mlp.calls = 0
        for layer in mlp._layers:
            layer.calls = 0
    return True


class KernelRotary:
    """transformers' `apply_rotary_pos_emb` in the order "rotate half"; with `plain`, and for other arguments, the
    model's own `function`. `calls` counts results of the kernel."""

    def __init__(self, kernels: Kernels, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._rotate, self._function = kernels.rotate, function
        self.calls, self.plain = 0, False

    def __call__(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """q [1, H, T, D], k [1, K, T, D], cos and sin [1, T, D] -> q and k, rotated."""
        if self.plain or options or len(arguments) != 4 or not _fit(*arguments):
            return self._function(*arguments, **options)
        q, k, cos, sin = arguments
        self.calls += 1
        tokens, size = q.shape[2:]
        rotated_q, rotated_k = (torch.empty((1, tokens, each.shape[1], size), dtype=q.dtype) for each in (q, k))
        self._rotate(
            q.dtype == torch.bfloat16, *(ctypes.byref(heads_struct(each)) for each in (q, k)),
            cos.data_ptr(), sin.data_ptr(), tokens, size, rotated_q.data_ptr(), rotated_k.data_ptr(),
        )  # fmt: skip
        return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)


def use_rotary(model: Any, kernels: Kernels) -> list[KernelRotary]:
    """Lets modules of attention call the kernel, where it computes what the model's own function does. The library's
    modules stay as they are: each class gets a forward of its own, in which the name means something else."""
    made: list[KernelRotary] = []
    forwards: dict[FunctionType, FunctionType | None] = {}
    for module in model.modules():
        forward = type(module).forward
        if "forward" in module.__dict__ or not isinstance(forward, FunctionType):
            continue
        if _ROTARY not in forward.__code__.co_names or not callable(forward.__globals__.get(_ROTARY)):
            continue
        if forward not in forwards:
            rotary = KernelRotary(kernels, forward.__globals__[_ROTARY])
            same = _same_rotary(rotary, next(model.parameters()).dtype)
            forwards[forward] = _with_global(forward, _ROTARY, rotary) if same else None
            made += [rotary] if same else []
        if (own := forwards[forward]) is not None:
            module.forward = MethodType(own, module)
    return made


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    own = {**function.__globals__, name: value}
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        q.dtype in DTYPES
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.ndim == k.ndim == 4
        and q.shape[0] == k.shape[0] == 1
        and q.shape[2:] == k.shape[2:] == cos.shape[1:] == sin.shape[1:]
        and len(cos) == len(sin) == 1
        and q.shape[3] % 2 == 0
        and q.stride(3) == k.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def _same_rotary(rotary: KernelRotary, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn((1, 5, heads, 24), generator=generator).transpose(1, 2) for heads in (3, 2))
    cos, sin = (torch.randn((1, 5, 24), generator=generator) for _ in range(2))
    try:
        for to in (torch.float32, dtype):
            given = [each.to(to) for each in (q, k, cos, sin)]
            for result, expected in zip(rotary(*given), rotary._function(*given), strict=True):
                if not _close(result, expected, to):
                    return False
        return rotary.calls > 0
    except Exception:  # of a function that takes other arguments
        return False
    finally:
        rotary.calls = 0


def _close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return False
    error = (result.float() - expected.float()).abs().max()
    return bool(error <= _TOLERANCE.get(dtype, 0.0) * expected.float().abs().max())
