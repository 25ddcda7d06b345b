"""LoRA adapters as the C++ kernels read them (cpu/adapters.h)."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from baton.engine.adapters import AdapterProjection, LayerProjections
from baton.engine.kernels import native

_CHUNK = 16  # outputs of B that are stored together, and of gate and up that alternate


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """`layers` points into `tensors`."""

    layers: Any
    tensors: list[Tensor]


def pack_adapter(layers: Sequence[LayerProjections]) -> PackedAdapter:
    tensors: list[Tensor] = []

    def address(tensor: Tensor) -> int:
        tensors.append(tensor.contiguous())
        return tensors[-1].data_ptr()

    def linear(projection: AdapterProjection | None, *, alternating: bool = False) -> native.AdapterLinear:
        if projection is None:
            return native.AdapterLinear()
        parts = (native.AdapterPart * len(projection.parts))()
        for part, source in zip(parts, projection.parts, strict=True):
            part.outputs, part.rank = source.weight.shape
            part.b = address(_chunks(source.weight))
            part.first, part.step = source.first, _CHUNK
            if alternating:  # the first output of up, after all of gate, follows 16 of gate
                part.first, part.step = _CHUNK if source.first else 0, 2 * _CHUNK
        return native.AdapterLinear(address(projection.a), parts, len(projection.a), len(parts))

    packed = (native.AdapterLayer * len(layers))()
    for layer, source in zip(packed, layers, strict=True):
        layer.qkv, layer.attention_out = linear(source.qkv), linear(source.attention_out)
        layer.gate_up, layer.down = linear(source.gate_up, alternating=True), linear(source.down)
    return PackedAdapter(packed, tensors)


def adapter_rows(adapters: Mapping[str, PackedAdapter], tokens: Mapping[str, array[int]]) -> Any:
    """Returns a struct for each adapter of a batch; `tokens` are `Batch.adapters`."""
    rows = [native.AdapterRows(adapters[name].layers, at.buffer_info()[0], len(at)) for name, at in tokens.items()]
    return (native.AdapterRows * len(rows))(*rows)


def _chunks(weight: Tensor) -> Tensor:
    """weight [outputs, rank] -> [chunks, rank, 16], with zeros for missing outputs."""
    padded = F.pad(weight, (0, 0, 0, -len(weight) % _CHUNK))
    return padded.view(-1, _CHUNK, weight.shape[1]).transpose(1, 2)
