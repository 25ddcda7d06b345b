"""The parts of a decoder layer that do not depend on sequences: linear, norm, rotary embedding, activation.

Shapes: T tokens, H heads, D head size. Two sets of operations have the same interface: the fast one, and the exact one,
whose result for a row has the same bits whatever other rows it is computed with (docs/numerics.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kv_pool import store
from baton.engine.weights import Projection
from baton.models.model_config import Llama3Rope, ModelConfig

Linear = Callable[[Tensor], Tensor]


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x [..., n] normalised over its last dimension."""
        ...

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and the normalised sum."""
        ...


class Heads(Protocol):
    """The operations between a layer's projection to q, k, v and its attention: head norms, rotary embedding, KV."""

    def __call__(self, qkv: Tensor, rope: Any, cache: tuple[Tensor, Tensor], slots: Tensor) -> Tensor:
        """qkv [T, H + 2 K, D] -> rotated queries [T, H, D]. Keys (rotated) and values of the first len(slots) tokens
        are written to `cache`, each [blocks, block_size, K, D], at `slots` (block * block_size + offset). `rope` is the
        result of `LayerOps.rope` for the positions."""
        ...


class PlainLinear:
    """x @ weight.T + bias by torch's own kernels, on any device; the reference implementation of PackedLinear."""

    def __init__(self, projection: Projection) -> None:
        self._weight, self._bias = projection.weight, projection.bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The same with the weight reordered once into oneDNN's blocked form: a third faster for few rows, where reading
    the weight is the bottleneck. CPU only."""

    def __init__(self, projection: Projection) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(projection.weight.contiguous(), None)
        self._bias = projection.bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def make_linear(projection: Projection) -> Linear:
    """PackedLinear if oneDNN supports the device and dtype, else PlainLinear."""
    weight = projection.weight
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return PlainLinear(projection)
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PlainLinear(projection)
    return PackedLinear(projection)


class RMSNorm:
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        x = x + delta
        return x, self(x)


class Rotary:
    """Rotary position embedding (Su et al. 2021) in the "rotate half" order of Hugging Face checkpoints.

    Holds cos and signed sin for every position: [positions, 1, D]; the sine of the first half is negated.
    """

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], dim=-1).unsqueeze(1).to(dtype=dtype, device=device)
        self._sin = torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(dtype=dtype, device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [T], each [T, 1, D]."""
        return self._cos[positions], self._sin[positions]

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and signed sin of every position, each [positions, D]."""
        return self._cos[:, 0], self._sin[:, 0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, H, D] by the angles of its positions."""
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return (x * cos).add_(swapped.mul_(sin))


class PlainHeads:
    """`Heads` by separate torch operations; `rope` is `Rotary.at` of the positions."""

    def __init__(self, config: ModelConfig, norms: tuple[Norm, Norm] | None) -> None:
        self._num_heads, self._num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        self._norms = norms

    def __call__(self, qkv: Tensor, rope: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], slots: Tensor) -> Tensor:
        to_rotate = qkv[:, : self._num_rotated]
        if self._norms is not None:
            of_queries, of_keys = self._norms
            to_rotate = torch.cat(
                (of_queries(to_rotate[:, : self._num_heads]), of_keys(to_rotate[:, self._num_heads :])), 1
            )
        rotated, stored = rotate(to_rotate, *rope), len(slots)
        for tensor, new in zip(cache, (rotated[:, self._num_heads :], qkv[:, self._num_rotated :]), strict=True):
            store(tensor, slots, new[:stored])
        return rotated[:, : self._num_heads]


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """One frequency per pair of dimensions, [D / 2], with Llama 3.1's scaling if the config has it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    original = scaling.original_max_position_embeddings
    blend = (original / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > original / scaling.low_freq_factor, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < original / scaling.high_freq_factor, frequencies, stretched)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate and up side by side in the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_exact(gate_up: Tensor) -> Tensor:
    """The same, row-invariant. torch's silu uses its vector path for most elements and its scalar path, with another
    exp, for the last few of each thread's share, so its result depends on the number of rows. torch.exp does not
    (measured), and the other operations here round the same everywhere."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.div(torch.exp(-gate).add_(1.0)).mul_(up)


@dataclass(frozen=True, slots=True)
class LayerOps:
    """The interchangeable operations of a model. `rope` converts positions [T] to the rotation that `Heads` expects."""

    make_norm: Callable[[Tensor, float], Norm]
    make_heads: Callable[[ModelConfig, tuple[Norm, Norm] | None], Heads]
    swiglu: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor], Any]
    make_linear: Callable[[Projection], Linear] = make_linear


def plain(rotary: Rotary, *, exact: bool) -> LayerOps:
    """The operations in plain torch; `exact` ones are row-invariant in float32."""
    return LayerOps(RMSNorm, PlainHeads, swiglu_exact if exact else swiglu, rotary.at)
