"""The layout of a KV cache, layer by layer, on which both ends of a hand-over must agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One storage of KV, of the layer that writes it: other layers may read it, too. `kind` "attention" keeps, for each
    token, K of `num_kv_heads` x `head_dim` and V of `num_kv_heads` x `value_dim` (0: `head_dim`). `window` is the
    number of latest positions that a query attends to, 0: all. In MLA K is the latent, V the rotated part of a key."""

    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    kind: Literal["attention"] = "attention"
    window: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim) * DTYPE_BYTES[self.dtype]


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
