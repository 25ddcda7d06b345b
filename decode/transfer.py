"""A sequence on its way into a decode worker: what has arrived, and whether a chunk can be the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import HandoffError
from baton.core.handover import Chunk
from baton.core.kv_layout import KVLayout
from baton.core.reshard import EdgeKey, EdgePlan


@dataclass(slots=True, eq=False)
class Transfer:
    """`arrived` tokens of the sequence are in its `blocks`, by edge; `first_token` once an edge has brought its end."""

    blocks: tuple[int, ...]
    num_tokens: int
    arrived: dict[EdgeKey, int]
    first_token: int | None = None

    @property
    def complete(self) -> bool:
        return all(tokens == self.num_tokens for tokens in self.arrived.values())

    @property
    def landed(self) -> int:
        """Tokens that every edge has brought."""
        return min(self.arrived.values())

    def check(self, chunk: Chunk, plan: EdgePlan, layout: KVLayout) -> None:
        """Raises HandoffError unless this is the next part of the sequence on its edge, whole and of the right size."""
        arrived, tokens = self.arrived[plan.key], chunk.end_token - chunk.start_token
        if chunk.start_token != arrived or tokens < 1 or chunk.end_token > self.num_tokens:
            raise HandoffError(
                f"tokens [{chunk.start_token}, {chunk.end_token}) cannot follow {arrived} of {self.num_tokens}"
            )
        if (chunk.start_layer, chunk.end_layer) != (0, len(layout.layers)):
            raise HandoffError(f"layers [{chunk.start_layer}, {chunk.end_layer}) are not all {len(layout.layers)}")
        if chunk.num_bytes != plan.bytes_per_token(layout) * tokens:
            raise HandoffError(f"{chunk.num_bytes} bytes cannot be KV of {tokens} tokens")
        ends = chunk.end_token == self.num_tokens
        if chunk.last != ends or (ends and chunk.first_token is None):
            raise HandoffError("the last chunk, and only it, carries the end and the first token")
        if self.first_token not in (None, chunk.first_token):
            raise HandoffError(f"first token {chunk.first_token} here, {self.first_token} on another edge")
