"""A model of decode that knows only the contract: what each reserved sequence is owed, and what KV there must be."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.request import GenerateRequest
from baton.core.step import Row


@dataclass
class Tracked:
    """What the contract says about one reserved sequence. `writing`: KV may be landing in its blocks. `landed`: so many
    positions have KV while more is to come."""

    request: GenerateRequest
    output: list[int] = field(default_factory=list)
    reported: int = 0
    phase: str = "receiving"
    writing: bool = False
    aborted: bool = False
    landed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.output)

    def check_row(self, row: Row) -> None:
        """A row computes the tokens of the sequence in order, samples at their end only, and no more than may come."""
        assert self.phase == "here" and not self.aborted
        draft_tokens = max(0, row.num_sampled - 1)
        own = row.tokens[: len(row.tokens) - draft_tokens]
        assert own == self.tokens[row.start : row.start + len(own)] and own
        assert (row.num_sampled > 0) == (row.start + len(own) == len(self.tokens))
        assert row.output_index == len(self.output)
        assert row.num_sampled <= self.request.max_tokens - len(self.output)


class WrittenKV:
    """KV of one pool: for each slot, the salt and all tokens up to the one that was last written there.

    Complete state: the slots by block and place in it.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    def write(self, tracked: Tracked, blocks: tuple[int, ...], start: int, tokens: tuple[int, ...]) -> int:
        """KV of `tokens` behind the first `start` of a sequence; returns up to which position it goes."""
        context = tracked.tokens[:start] + tokens
        for position in range(start, len(context)):
            self._slots[self._slot(blocks, position)] = tracked.request.cache_salt, context[: position + 1]
        return len(context)

    def check(self, tracked: Tracked, blocks: tuple[int, ...], end: int) -> None:
        """The first `end` positions of a sequence are there, and are of it."""
        for position in range(end):
            assert self._slots[self._slot(blocks, position)] == (
                tracked.request.cache_salt,
                tracked.tokens[: position + 1],
            )

    def _slot(self, blocks: tuple[int, ...], position: int) -> tuple[int, int]:
        return blocks[position // self._size], position % self._size
