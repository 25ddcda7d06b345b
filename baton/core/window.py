"""Which blocks a sequence still needs in a model whose layers all have a sliding window. Pure.

KV of positions behind the longest window is never read again. A sequence gives the blocks that hold nothing else back:
they are the first `num_dropped` of its table, where the null block takes their place, so that every other block keeps
its index. Kernels may load the null block, which holds zeros, but masks hide what they load from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.kv_layout import KVLayout

STEPS_AHEAD = 3
"""Steps for whose tokens a prompt has blocks if steps are planned ahead: two are outstanding, and what was given back
after one is free after the next."""


@dataclass(frozen=True, slots=True)
class Window:
    """`size` is the number of latest positions that any layer's query attends to, its own included; 0 if some layer
    attends to all. At least 2, so that a hand-over always has a token to send."""

    size: int
    block_size: int

    @classmethod
    def of(cls, layout: KVLayout) -> Window:
        sizes = [layer.window for layer in layout.layers]
        return cls(max(2, *sizes) if sizes and all(sizes) else 0, layout.block_size)

    def first_position(self, query: int) -> int:
        """Returns the first position that queries at `query` and later attend to."""
        return max(0, query - self.size + 1) if self.size else 0

    def num_behind(self, query: int) -> int:
        """Returns how many blocks, from the first on, queries at `query` and later do not attend to."""
        return self.first_position(query) // self.block_size

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Returns how many blocks a sequence of `num_tokens` positions holds at once, at most, if they are computed
        in rows of up to `step_tokens`."""
        all_blocks = -(-num_tokens // self.block_size)
        if not self.size:
            return all_blocks
        return min(all_blocks, -(-(self.size - 1 + step_tokens) // self.block_size) + 1)
