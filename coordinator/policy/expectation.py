"""How long outputs are expected to be, and how many blocks sequences will need for them. Pure.

`max_tokens` is a bad estimate: most outputs end long before it, so reserving for it leaves most of the memory idle. The
prompt alone is a bad estimate too: sequences admitted without room to grow preempt each other, and preempted ones are
recomputed. So a sequence is expected to need blocks for its prompt and an output of recent average length.
"""

from __future__ import annotations

from baton.core.request import GenerateRequest
from coordinator.policy.pool import Pool, Worker

START_TOKENS = 128.0
"""Expected output length before any output has ended."""
_WEIGHT = 0.05
"""Of each new output in the moving average."""


class OutputExpectation:
    def __init__(self) -> None:
        self.mean_tokens = START_TOKENS  # moving average of the lengths of ended outputs

    def ended(self, produced: int) -> None:
        """Records that an output of `produced` tokens has ended, for any reason."""
        if produced > 0:
            self.mean_tokens += _WEIGHT * (produced - self.mean_tokens)

    def tokens(self, prefill_tokens: int, kv_tokens: int) -> int:
        """Returns how many tokens a sequence is expected to have, at most `kv_tokens`."""
        expected = prefill_tokens + round(self.mean_tokens)
        return expected if expected < kv_tokens else kv_tokens

    def blocks(self, request: GenerateRequest, pool: Pool) -> dict[int, int]:
        """Returns how many blocks a request is expected to need at a decode worker of a pool, by block size."""
        tokens = self.tokens(request.num_prefill_tokens, request.max_kv_tokens)
        return {size: worker.blocks_for(tokens) for size, worker in pool.most_blocks.items()}

    def growth(self, prefill_tokens: int, kv_tokens: int, produced: int, worker: Worker) -> int:
        """Returns the further blocks that a sequence is expected to need at its decode worker, at least the column that
        decode keeps free."""
        expected, now = self.tokens(prefill_tokens, kv_tokens), prefill_tokens + produced
        if expected <= now:
            return worker.blocks_of_column
        return max(worker.blocks_of_column, worker.blocks_for(expected) - worker.blocks_for(now))
