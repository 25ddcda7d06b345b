"""A model of decode that uses only the contract: the output due to each reserved sequence, and the KV it must have."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.request import GenerateRequest
from baton.core.step import Row
from baton.core.window import Window


@dataclass
class Tracked:
    """The contract's state of one reserved sequence. `writing`: KV may be arriving in its blocks. `received`: the
    number of positions that have KV while more is to arrive."""

    request: GenerateRequest
    output: list[int] = field(default_factory=list)
    reported: int = 0
    phase: str = "receiving"
    writing: bool = False
    aborted: bool = False
    received: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.output)

    def check_row(self, row: Row) -> None:
        """Checks that a row computes the sequence's tokens in order, samples only at their end, and not too many."""
        assert self.phase == "here" and not self.aborted
        draft_tokens = max(0, row.num_sampled - 1)
        own = row.tokens[: len(row.tokens) - draft_tokens]
        assert own == self.tokens[row.start : row.start + len(own)] and own
        assert (row.num_sampled > 0) == (row.start + len(own) == len(self.tokens))
        assert row.output_index == len(self.output)
        assert row.num_sampled <= self.request.max_tokens - len(self.output)


class WrittenKV:
    """The KV of one pool: for each slot, the salt and all tokens up to the one that was last written there, and the
    group of layers that wrote it.

    Complete state: the slots by block and position within it.
    """

    def __init__(self, block_size: int, window: Window | None = None) -> None:
        self._size, self._window = block_size, window or Window(0, block_size)
        self._slots: dict[tuple[int, int], tuple[int, str, tuple[int, ...]]] = {}

    def write(
        self, tracked: Tracked, blocks: tuple[int, ...], start: int, tokens: tuple[int, ...], window_start: int = 0
    ) -> int:
        """Writes the KV of `tokens` after the first `start` of a sequence, in groups with a window only from
        `window_start` on. Returns the position at which it ends."""
        context = tracked.tokens[:start] + tokens
        for group in range(self._window.groups):
            for position in range(max(start, window_start if group >= self._window.full else 0), len(context)):
                written = group, tracked.request.cache_salt, context[: position + 1]
                self._slots[self._slot(blocks, position, group)] = written
        return len(context)

    def check(self, tracked: Tracked, blocks: tuple[int, ...], end: int, start: int = 0) -> None:
        """Checks that the KV of positions [start, end) of a sequence is present and belongs to the sequence; in groups
        without a window that of [0, end)."""
        for group in range(self._window.groups):
            for position in range(start if group >= self._window.full else 0, end):
                assert self._slots[self._slot(blocks, position, group)] == (
                    group,
                    tracked.request.cache_salt,
                    tracked.tokens[: position + 1],
                )

    def _slot(self, blocks: tuple[int, ...], position: int, group: int) -> tuple[int, int]:
        return blocks[position // self._size * self._window.groups + group], position % self._size
