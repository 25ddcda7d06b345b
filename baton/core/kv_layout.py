"""The layout of a KV cache, layer by layer, on which both ends of a hand-over must agree."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """KV of one layer. `kind` "attention" keeps K and V of `num_kv_heads` x `head_dim` per token; `window` is the
    number of latest positions that a query attends to (0: all)."""

    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    kind: Literal["attention"] = "attention"
    window: int = 0

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
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

    def first_difference(self, other: KVLayout) -> str | None:
        """Returns the name of the first field whose difference prevents KV transfer between two pools, with both
        values, or None. Block sizes may differ if one divides the other."""
        small, large = sorted((self.block_size, other.block_size))
        if small < 1 or large % small:
            return f"block_size: {self.block_size} and {other.block_size}, neither divides the other"
        if len(self.layers) != len(other.layers):
            return f"layers: {len(self.layers)} and {len(other.layers)}"
        for index, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            for f in fields(LayerKV):
                a, b = getattr(mine, f.name), getattr(theirs, f.name)
                if a != b:
                    return f"layers[{index}].{f.name}: {a} and {b}"
        return None
