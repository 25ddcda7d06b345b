"""The layout of a KV cache, layer by layer, on which both ends of a hand-over must agree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`layers` are the storages, in the order in which a step writes them."""

    block_size: int
    layers: tuple[LayerKV, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` positions; the last may be partly filled."""
        return -(-num_tokens // self.block_size)
