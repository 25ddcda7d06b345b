"""What a rank's weights and KV take, beside those of the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.kv_layout import KVLayout
from baton.engine.kv_pool import KVPool
from baton.engine.weights import WeightReader


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank beside those of the whole model. `replicated` lists, by tensor or "kv heads", what this rank
    holds beyond an even share: without it, parameters and KV are at most whole / size each."""

    parameter_bytes: int
    whole_parameter_bytes: int
    kv_bytes: int
    whole_kv_bytes: int
    replicated: dict[str, int]


def memory_report(weights: WeightReader, kv: KVPool, layout: KVLayout, size: int) -> MemoryReport:
    """`layout` is the whole model's, `size` the number of ranks."""
    blocks = kv.num_blocks + 1
    mine, whole = kv.layout.bytes_per_block * blocks, layout.bytes_per_block * blocks
    replicated = dict(weights.replicated)
    if mine > whole // size:
        replicated["kv heads"] = mine - whole // size
    return MemoryReport(weights.bytes_read, weights.whole_bytes, mine, whole, replicated)
