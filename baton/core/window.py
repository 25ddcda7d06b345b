"""Which blocks a sequence still needs in a model that has layers with a sliding window. Pure.

KV of positions behind the longest window is never read again by those layers. A sequence gives the blocks that hold
nothing else back: in the first `num_dropped` columns of its table (baton.core.kv_layout) the null block takes the place
of those of each group with a window, so that every other block keeps its index. Kernels may load the null block, which
holds zeros, but masks hide what they load from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.kv_layout import KVLayout

STEPS_AHEAD = 3
"""Steps for whose tokens a prompt has blocks if steps are planned ahead: two are outstanding, and what was given back
after one is free after the next."""
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Window:
    """`size` is the number of latest positions that any query of a layer with a window attends to, its own included; 0
    if no block is given back. At least 2, so that a hand-over always has a token to send. The first `full` of the
    `groups` have layers without a window."""

    size: int
    block_size: int
    groups: int = 1
    full: int = 0

    @classmethod
    def of(cls, layout: KVLayout, *, give_back: bool = True) -> Window:
        """`give_back` false: blocks behind the window are kept, as a reference for tests."""
        groups, sizes = layout.groups, [layer.window for layer in layout.layers if layer.window]
        slides = give_back and sizes and (groups > 1 or len(sizes) == len(layout.layers))
        return cls(max(2, *sizes) if slides else 0, layout.block_size, groups, int(groups > 1))

    def first_position(self, query: int) -> int:
        """Returns the first position that queries at `query` and later attend to, in layers with a window."""
        return max(0, query - self.size + 1) if self.size else 0

    def num_behind(self, query: int) -> int:
        """Returns how many columns, from the first on, queries at `query` and later do not attend to."""
        return self.first_position(query) // self.block_size

    def columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def columns_at_once(self, step_tokens: int) -> int:
        """Returns how many columns hold a window and the positions of a row of up to `step_tokens`."""
        return -(-(self.size - 1 + step_tokens) // self.block_size) + 1 if self.size else _NO_LIMIT

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Returns how many blocks a sequence of `num_tokens` positions holds at once, at most, if they are computed
        in rows of up to `step_tokens`."""
        columns = self.columns(num_tokens)
        if not self.size:
            return self.groups * columns
        return self.full * columns + self.sliding * min(columns, self.columns_at_once(step_tokens))

    def max_tokens(self, num_blocks: int, step_tokens: int) -> int:
        """Returns of how many tokens a sequence may be whose `max_blocks` are at most `num_blocks`."""
        columns, at_once = num_blocks // self.groups, self.columns_at_once(step_tokens)
        if columns >= at_once:
            columns = (num_blocks - self.sliding * at_once) // self.full if self.full else _NO_LIMIT
        return columns * self.block_size

    @property
    def sliding(self) -> int:
        """How many groups have a window, or would give nothing back."""
        return self.groups - self.full

    def of_sliding(self, table: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the blocks of groups with a window in these columns of a table."""
        return tuple(block for index, block in enumerate(table) if index % self.groups >= self.full)

    def needed_from(self, query: int, table: tuple[int, ...], first: int = 0) -> tuple[int, ...]:
        """Returns the blocks that queries at `query` and later need, in the columns of a table from `first` on."""
        if not self.size:
            return table[first * self.groups :]
        behind = max(self.num_behind(query), first) * self.groups
        before = table[first * self.groups : behind] if self.full else ()
        return tuple(b for index, b in enumerate(before) if index % self.groups < self.full) + table[behind:]
