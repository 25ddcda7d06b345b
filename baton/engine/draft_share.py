"""What a draft model takes beside its target, before either is loaded: its parameters, and KV blocks by the target's.

On a GPU the target's KV would else take the room that the draft, loaded behind it, needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.kv_layout import DTYPE_BYTES, KVLayout
from baton.core.model_config import DType, ModelConfig
from baton.engine.weights import parameter_bytes


@dataclass(frozen=True, slots=True)
class DraftShare:
    """`most_blocks` is what its sequences can use of KV blocks of `layout`, `max_model_len` their longest."""

    parameter_bytes: int
    layout: KVLayout
    most_blocks: int
    max_model_len: int

    def num_blocks(self, target_blocks: int) -> int:
        """How many it gets beside a target with so many."""
        return min(target_blocks, self.most_blocks)

    def kv_bytes(self, target_blocks: int) -> int:
        """With the block of zeros that a pool has besides."""
        return (self.num_blocks(target_blocks) + 1) * self.layout.bytes_per_block

    def left_of(self, budget: int, target_block_bytes: int) -> int:
        """The bytes of `budget` for the target's KV, whose blocks take `target_block_bytes`, so that both fit."""
        beside_one = self.layout.bytes_per_block
        after_parameters = budget - self.parameter_bytes - beside_one
        if_all_blocks = after_parameters - self.most_blocks * beside_one
        as_many_each = after_parameters // (target_block_bytes + beside_one) * target_block_bytes
        return max(if_all_blocks, as_many_each, 0)


def draft_share(
    config: ModelConfig, target_longest: int, block_size: int, dtype: DType, max_running: int
) -> DraftShare:
    """`config` is the draft's, `target_longest` how many positions the target's sequences may have."""
    longest = min(config.max_position_embeddings, target_longest)
    layout = config.kv_layout(block_size, dtype)
    parameters = parameter_bytes(config, 1, 0, DTYPE_BYTES[dtype])
    return DraftShare(parameters, layout, max_running * layout.blocks_for(longest), longest)
