"""How many blocks a sequence will probably take: its prompt's, and those of as much output as answers had of late.

`max_tokens` is a bad estimate: most answers end long before it, and a plan by it leaves most of the memory idle. The
prompt alone is another: sequences that were let in with nothing to grow into preempt each other, and what is preempted
is computed again.
"""

from __future__ import annotations

START_TOKENS = 128.0  # before any answer has been seen
_WEIGHT = 0.05  # of one more answer


class OutputExpectation:
    """Complete state: `mean_tokens`, a moving average of the lengths of answers that have ended."""

    def __init__(self) -> None:
        self.mean_tokens = START_TOKENS

    def ended(self, produced: int) -> None:
        """An answer of that many tokens has ended, however it did."""
        if produced > 0:
            self.mean_tokens += _WEIGHT * (produced - self.mean_tokens)

    def blocks(self, prefill_tokens: int, total_tokens: int, block_size: int) -> int:
        """All that a sequence is expected to take: never more than its `total_tokens` need."""
        return _blocks(min(total_tokens, prefill_tokens + round(self.mean_tokens)), block_size)

    def growth(self, prefill_tokens: int, total_tokens: int, produced: int, block_size: int) -> int:
        """What one that is there is expected to take yet, at least one block: decode keeps that free for each."""
        expected = self.blocks(prefill_tokens, total_tokens, block_size)
        return max(1, expected - _blocks(prefill_tokens + produced, block_size))


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
