"""The layout of a KV cache, layer by layer, on which both ends of a hand-over must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
KVDType = Literal[DType, "float8_e4m3fn"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_FP8: KVDType = "float8_e4m3fn"
KV_DTYPE_BYTES: dict[str, int] = {**DTYPE_BYTES, _FP8: 1}
KV_DTYPES = ("auto", "fp8", "fp8_e4m3")
"""The values of `--kv-dtype`."""


def stored_dtype(kv_dtype: str, dtype: KVDType) -> KVDType:
    """Returns the data type of KV for a value of `--kv-dtype`, in a model that computes in `dtype`."""
    return {"auto": dtype, "fp8": _FP8, "fp8_e4m3": _FP8}[kv_dtype]


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One storage of KV, of the layer that writes it: other layers may read it, too. `kind` "attention" keeps, for each
    token, K of `num_kv_heads` x `head_dim` and V of `num_kv_heads` x `value_dim` (0: `head_dim`). `window` is the
    number of latest positions that a query attends to, 0: all. In MLA K is the latent, V the rotated part of a key."""

    num_kv_heads: int
    head_dim: int
    dtype: KVDType
    kind: Literal["attention"] = "attention"
    window: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim) * KV_DTYPE_BYTES[self.dtype]


def stored_layers(layers: Iterable[LayerKV], kv_dtype: str) -> tuple[LayerKV, ...]:
    """Returns layers whose dtypes are those of the computation as `--kv-dtype` stores them."""
    return tuple(replace(layer, dtype=stored_dtype(kv_dtype, layer.dtype)) for layer in layers)


@dataclass(frozen=True)
class KVLayout:
    """`layers` are the storages, in the order in which a step writes them.

    They form groups, so that a layer with a window does not keep blocks as long as one without. A block holds
    `block_size` positions of one group. A sequence's block table has a column for each `block_size` positions, with one
    block for each group; as a tuple it is column by column. Groups have equally many places for layers, so that any
    block can serve any group. There is more than one if some layers, at most half, have no window, and all are alike
    otherwise: then the first group is that of the layers without a window.
    """

    block_size: int
    layers: tuple[LayerKV, ...]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer: its group, and its place among the layers of the group."""
        full = [index for index, layer in enumerate(self.layers) if not layer.window]
        sliding = [index for index, layer in enumerate(self.layers) if layer.window]
        alike = len({replace(layer, window=0) for layer in self.layers}) == 1
        if not full or not alike or len(full) > len(sliding):
            return tuple((0, index) for index in range(len(self.layers)))
        places = {index: (0, place) for place, index in enumerate(full)}
        places |= {index: (1 + n // len(full), n % len(full)) for n, index in enumerate(sliding)}
        return tuple(places[index] for index in range(len(self.layers)))

    @cached_property
    def groups(self) -> int:
        return 1 + max((group for group, _ in self.places), default=0)

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """The bytes of a block, with places of its group that no layer has."""
        if self.groups == 1:
            return self.bytes_per_token * self.block_size
        return self.layers[0].bytes_per_token * (1 + max(place for _, place in self.places)) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks a table for `num_tokens` positions has; the last column may be partly filled."""
        return -(-num_tokens // self.block_size) * self.groups

    def positions_in(self, num_blocks: int) -> int:
        """Returns how many positions the whole columns of a table of `num_blocks` blocks have."""
        return num_blocks // self.groups * self.block_size
